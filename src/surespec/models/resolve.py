"""From what the user typed to a ``Model``: a path, a bundled name, or a Hugging Face id."""

from __future__ import annotations

from pathlib import Path

from surespec.errors import ModelError, UsageError
from surespec.models.bundled import bundled, canonical_ids
from surespec.models.headers import from_folder, from_gguf
from surespec.models.hub import from_hub
from surespec.plan_nouns import Model


def from_path(path: Path) -> Model:
    """The facts of a folder (config.json and safetensors) or a GGUF file. Raises ModelError."""
    if path.is_dir():
        return from_folder(path)
    if path.suffix.lower() == ".gguf":
        return from_gguf(path)
    raise ModelError(
        f"{path}: neither a model folder nor a .gguf file.", hint="Give the folder that holds config.json."
    )


def resolve(name: str, *, offline: bool = False, flag: str = "--model") -> Model:
    """The facts of a model by path, bundled id or alias, or Hugging Face id, in this order. ``flag`` named it.

    Only configuration and headers are read, never tensors. Raises UsageError for a name that cannot be one, ModelError
    or FetchError when its facts cannot be had.
    """
    if not name.strip():
        raise UsageError(f"{flag} is empty.", hint="Give a folder, a .gguf file or an id such as Qwen/Qwen3-8B.")
    path = Path(name).expanduser()
    try:
        here = path.exists()
    except OSError:  # a name too long for a file
        here = False
    if here:
        return from_path(path)
    known = bundled(name)
    if known is not None:
        return known
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UsageError(
            f"{flag} {name}: there is no such file, and it is not a Hugging Face id (owner/name).",
            hint=f"Known without a network: {', '.join(canonical_ids())}.",
        )
    return from_hub(name, offline=offline)
