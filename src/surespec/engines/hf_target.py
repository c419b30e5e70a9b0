"""Models and heads as engines that read Hugging Face folders want them: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surespec.core import Arm
from surespec.engines.base import FetchHook
from surespec.errors import ModelError, SurespecError
from surespec.fetch import PACKAGED_HEADS, fetch, hf_folder, known_models, packaged_head
from surespec.models.resolve import from_path, resolve
from surespec.plan.heads import brought
from surespec.plan_nouns import Refusal


def drafter_of(name: str) -> str:
    """What the engine is told for a head or draft: the folder of what surespec knows, else as ``target_of``."""
    return str(packaged_head(name)) if name in PACKAGED_HEADS else target_of(name, "drafter")


def misfit(arm: Arm, target: str) -> str:
    """Why a drafter that lies here does not fit the target, by their configurations (H3, H4), one sentence; empty when
    it fits or cannot be told. Engines find it out late: vLLM loads a head of another size and dies at its first draft.
    """
    named = str((arm.speculative_config or {}).get("model", ""))
    if not named or not Path(named).is_dir():
        return ""
    try:
        found = brought(from_path(Path(named)), resolve(target))
    except SurespecError:
        return ""
    return f"{arm.name} is left out: {found.why} ({found.rule})" if isinstance(found, Refusal) else ""


def fetch_folders(target: str, arms: Sequence[Arm], progress: FetchHook) -> None:
    """Make the folder of each known model that the target or an arm names; the engine fetches ids itself."""
    named = [target, *(str((arm.speculative_config or {}).get("model", "")) for arm in arms)]
    for key in known_models():
        if str(hf_folder(key)) in named:
            fetch(key, "hf", progress)


def target_of(name: str, flag: str) -> str:
    """What vLLM is told for a model: the folder of a known name, an absolute path, or a Hugging Face id as it is.

    Raises ModelError for what vLLM cannot serve, such as a GGUF file.
    """
    if name in known_models() and not Path(name).exists():
        return str(hf_folder(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{flag} {name}: the folder has no config.json.", hint="vLLM wants a Hugging Face folder.")
        return str(path.absolute())
    if path.is_file():
        raise ModelError(
            f"{flag} {name}: vLLM wants a model folder with config.json and *.safetensors, not a file.",
            hint="For the small default model: surespec fetch smollm2-135m --format hf",
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    raise ModelError(
        f"There is no model {name!r}: it is not a folder here, nor a name surespec knows.",
        hint=f"Give a folder with config.json, a Hugging Face id, or one of: {', '.join(known_models())}.",
    )
