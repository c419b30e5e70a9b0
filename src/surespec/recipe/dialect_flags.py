"""The flags that say a speculative config to each engine, for writing into a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from surespec.dialects.llamacpp import SPEC_TYPES
from surespec.dialects.sglang import ALGORITHMS
from surespec.recipe.flags import SPEC_FLAG, Parsed, dialect
from surespec.recipe.jsontext import compact
from surespec.recipe.text import UnwritableError

_TUNING = {
    "--n-gpu-layers-draft", "--device-draft", "--ctx-size-draft", "--cache-type-k-draft", "--cache-type-v-draft",
    "-ctkd", "-ctvd", "-devd", "-cd", "--spec-draft-p-min", "--spec-draft-n-min", "--speculative-attention-mode",
    "--speculative-draft-kv-cache-dtype", "--speculative-draft-attention-backend",
}  # fmt: skip
_OLD_LLAMACPP = ("--draft-max", "--draft-min")


def is_tuning(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a flag of SGLang or llama.cpp only says how a drafter runs, so that it stays when the drafter changes."""
    return bool(config.get("model")) and name in _TUNING


def spec_flags(engine: str, config: Mapping[str, Any], parsed: Parsed) -> list[tuple[str, str | None]]:
    """(flag, value) pairs. ``parsed`` tells which generation of flags the recipe uses (llama.cpp).

    Raises UnwritableError for an engine or a method that has no such flags.
    """
    kind = dialect(engine)
    method, k = str(config.get("method", "")), config.get("num_speculative_tokens")
    if kind == "vllm":
        return [(SPEC_FLAG, compact(dict(config)))]
    if kind == "sglang":
        if method not in ALGORITHMS:
            raise UnwritableError(f"SGLang has no flag for the method {method}")
        out: list[tuple[str, str | None]] = [("--speculative-algorithm", ALGORITHMS[method])]
        if config.get("model"):
            out.append(("--speculative-draft-model-path", str(config["model"])))
        if isinstance(k, int) and method != "ngram":
            out += [("--speculative-num-steps", str(k)), ("--speculative-eagle-topk", "1")]
        return out + ([("--speculative-num-draft-tokens", str(k + 1))] if isinstance(k, int) else [])
    if kind == "llamacpp":
        return _llamacpp(method, config, parsed)
    raise UnwritableError("TensorRT-LLM takes speculation from its YAML file of options, not from a flag")


def _llamacpp(method: str, config: Mapping[str, Any], parsed: Parsed) -> list[tuple[str, str | None]]:
    if method not in SPEC_TYPES:
        raise UnwritableError(f"llama.cpp has no flag for the method {method}")
    old = any(parsed.last(name) for name in _OLD_LLAMACPP)
    draft = [("--model-draft", str(config["model"]))] if config.get("model") else []
    k = str(config.get("num_speculative_tokens", 3))
    if old and method == "draft_model":
        return [*draft, ("--draft-max", k)]
    if method == "ngram":  # --spec-draft-n-max bounds draft models only
        match = str(config.get("prompt_lookup_min") or 2)
        size = [("--spec-ngram-simple-size-n", match), ("--spec-ngram-simple-size-m", k)]
        return [("--spec-type", SPEC_TYPES[method]), *size]
    return [("--spec-type", SPEC_TYPES[method]), *draft, ("--spec-draft-n-max", k)]


def by_hand(engine: str, config: Mapping[str, Any] | None, others: Mapping[str, str | None]) -> str:
    """What to write by hand where a recipe cannot be patched."""
    if config is None:
        return "Take the flags out by hand."
    if dialect(engine) == "trtllm":
        method = {"eagle3": "Eagle3", "mtp": "MTP", "ngram": "NGram", "draft_model": "Draft_Target"}
        fields = {
            "decoding_type": method.get(str(config.get("method")), config.get("method")),
            "max_draft_len": config.get("num_speculative_tokens"),
            **({"speculative_model": config["model"]} if config.get("model") else {}),
        }
        return f"Add it to the file given by --config: speculative_config: {json.dumps(fields)}"
    flags = [*spec_flags(engine, config, Parsed((), ())), *others.items()]
    text = " ".join(name if value is None else f"{name} {shlex.quote(value)}" for name, value in flags)
    return f"Set it by hand: {text}"
