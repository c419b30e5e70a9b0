"""The value of ``--speculative-config``: vLLM's own keys, checked before anything is loaded.

Rules follow vLLM 0.33 (``vllm/config/speculative.py``): which method an absent ``method`` means, how one given
``prompt_lookup_*`` bound mirrors the other, and how a batch-size table is read. What vLLM knows and the embedded engine
has not is refused by name, so that nobody believes a key took effect.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from surespec.errors import ConfigError
from surespec.json_text import loads_json

Method = Literal["ngram", "draft_model", "eagle3"]
METHODS: tuple[str, ...] = ("ngram", "draft_model", "eagle3")
MAX_SPECULATIVE_TOKENS = 32
TURN_OFF = "To serve without speculation leave --speculative-config out."

# Methods that vLLM 0.33 has and this engine has not.
_VLLM_METHODS = frozenset(
    {
        "ngram_gpu",
        "suffix",
        "custom_class",
        "eagle",
        "extract_hidden_states",
        "dflash",
        "dspark",
        "mtp",
        "medusa",
        "mlp_speculator",
    }
)
# Keys that vLLM 0.33 takes and this engine has not.
_VLLM_KEYS = frozenset(
    {
        "quantization",
        "revision",
        "code_revision",
        "tensor_parallel_size",
        "enforce_eager",
        "disable_padded_drafter_batch",
        "parallel_drafting",
        "draft_load_config",
        "moe_backend",
        "attention_backend",
        "use_local_argmax_reduction",
        "use_heterogeneous_vocab",
        "kv_cache_dtype",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
        "enable_adaptive_verification",
        "dspark_draft_topk",
        "index_share_for_mtp_iteration",
        "disable_eagle_block_drop",
        "fly_window_size",
        "fly_entropy_threshold",
        "fly_entropy_top_k",
        "draft_lm_head_quantization",
        "disable_lookahead_block_hashes",
        "xpress_topc",
        "disable_by_batch_size",
    }
)


class SpeculativeConfig(BaseModel):
    """How the embedded engine speculates. Build it with `parse_speculative_config`, which explains what is wrong.

    ``prompt_lookup_max``/``prompt_lookup_min`` (tokens) are set for ``ngram`` only; ``max_model_len`` (tokens) is the
    longest sequence the drafter is asked about; ``num_speculative_tokens_per_batch_size`` holds rows ``[lo, hi, k]``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Method
    model: str | None = None
    num_speculative_tokens: int
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard"] = "standard"
    max_model_len: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _lookup_bounds(cls, data: Any) -> Any:
        """vLLM: neither bound given means 5 and 5; one given stands for both."""
        if not isinstance(data, dict) or data.get("method") != "ngram":
            return data
        low, high = data.get("prompt_lookup_min"), data.get("prompt_lookup_max")
        return {
            **data,
            "prompt_lookup_max": high if high is not None else (low if low is not None else 5),
            "prompt_lookup_min": low if low is not None else (high if high is not None else 5),
        }

    @model_validator(mode="after")
    def _check(self) -> SpeculativeConfig:
        _check_k(self.num_speculative_tokens)
        _check_method_fields(self)
        if self.num_speculative_tokens_per_batch_size is not None:
            _check_table(self.num_speculative_tokens_per_batch_size)
        return self

    def k_for_batch(self, batch_size: int) -> int:
        """Tokens to draft for each sequence when ``batch_size`` sequences decode.

        vLLM's reading of the table: bounds inclusive, a gap or the tail carries the last k before it, and no row asks
        for more than ``num_speculative_tokens``.
        """
        k = self.num_speculative_tokens
        for low, _, row_k in self.num_speculative_tokens_per_batch_size or ():
            if batch_size < low:
                break
            k = row_k
        return min(k, self.num_speculative_tokens)

    def document(self) -> dict[str, Any]:
        """The JSON form, without the keys that were not set."""
        return self.model_dump(mode="json", exclude_none=True)


def _check_k(k: int) -> None:
    if k == 0:
        raise ConfigError("speculative config: num_speculative_tokens is 0, which drafts nothing.", hint=TURN_OFF)
    if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"speculative config: num_speculative_tokens is {k}, but must be from 1 to {MAX_SPECULATIVE_TOKENS}.",
            hint="Useful values are mostly 2 to 8: each further token is accepted less often.",
        )


def _check_method_fields(config: SpeculativeConfig) -> None:
    method, low, high = config.method, config.prompt_lookup_min, config.prompt_lookup_max
    if method == "ngram" and config.model is not None:
        raise ConfigError(
            f"speculative config: method ngram reads the prompt and uses no model, but model is {config.model!r}.",
            hint="Leave out model, or choose method draft_model or eagle3.",
        )
    if method != "ngram" and config.model is None:
        raise ConfigError(
            f"speculative config: method {method} needs model, the path or name of its drafter.",
            hint='For example {"method": "eagle3", "model": "smollm2-135m-eagle3", "num_speculative_tokens": 3}.',
        )
    if method != "ngram" and (low is not None or high is not None):
        raise ConfigError(
            f"speculative config: prompt_lookup_min and prompt_lookup_max belong to method ngram, not to {method}.",
            hint="Leave them out.",
        )
    if low is not None and high is not None and not 1 <= low <= high:
        raise ConfigError(
            f"speculative config: prompt_lookup_min is {low} and prompt_lookup_max is {high}, "
            "but 1 <= min <= max must hold.",
        )
    if method == "ngram" and config.draft_sample_method == "probabilistic":
        raise ConfigError(
            "speculative config: draft_sample_method probabilistic needs a drafter with probabilities; ngram has none.",
            hint="Leave draft_sample_method out.",
        )
    if config.draft_tensor_parallel_size not in (None, 1):
        raise ConfigError(
            f"speculative config: draft_tensor_parallel_size is {config.draft_tensor_parallel_size}, "
            "but the embedded engine runs on one device: only 1 is possible.",
        )
    if config.max_model_len is not None and config.max_model_len < 1:
        raise ConfigError(f"speculative config: max_model_len is {config.max_model_len}, but must be positive.")


def _check_table(table: tuple[tuple[int, int, int], ...]) -> None:
    name = "speculative config: num_speculative_tokens_per_batch_size"
    if not table:
        raise ConfigError(f"{name} is empty.", hint="Leave it out, or give rows [lo, hi, k] such as [[1, 4, 3]].")
    previous = 0
    for row in table:
        low, high, k = row
        if previous == 0 and low != 1:
            raise ConfigError(f"{name} must start at batch size 1, but its first row is {list(row)}.")
        if high < low or k < 0:
            raise ConfigError(f"{name}: row {list(row)} must be [lo, hi, k] with lo <= hi and k >= 0.")
        if low <= previous:
            raise ConfigError(f"{name}: row {list(row)} overlaps the row that ends at {previous}.")
        previous = high


def parse_speculative_config(value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Read the JSON text (or mapping) of ``--speculative-config``.

    Raises `ConfigError` with one sentence for: text that is not JSON (with its position, and shell quoting recognised),
    an unknown key (with the nearest known one), a method of another engine, a value out of range, a contradiction.
    """
    data = dict(value) if not isinstance(value, str) else _read_json(value)
    _refuse_unknown_keys(data)
    if data.get("model") in ("ngram", "[ngram]") and data.get("method") in (None, "ngram"):
        data |= {"method": "ngram", "model": None}  # vLLM's older spelling
    if data.get("method") is None:
        data["method"] = _infer_method(data)
    _refuse_unknown_method(data["method"])
    if "num_speculative_tokens" not in data:
        raise ConfigError(
            "speculative config: num_speculative_tokens is missing.", hint=f"Give 1 to {MAX_SPECULATIVE_TOKENS}."
        )
    if isinstance(table := data.get("num_speculative_tokens_per_batch_size"), list):
        data["num_speculative_tokens_per_batch_size"] = tuple(tuple(r) if isinstance(r, list) else r for r in table)
    try:
        return SpeculativeConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"speculative config: {where} is {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}."
        ) from None


def _read_json(text: str) -> dict[str, Any]:
    """Parse JSON text; the hints name the ways shells and templates break it (engines.md, section 9)."""
    stripped = text.strip()
    example = """Pass it as one argument in single quotes: '{"method": "ngram", "num_speculative_tokens": 4}'."""
    try:
        data = loads_json(stripped)
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError):
            raise ConfigError(f"speculative config cannot be read: {error}.", hint=example) from error
        if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
            reason = f"it is wrapped in literal {stripped[0]} quotes, so a layer quoted it twice"
        elif stripped.startswith("{{"):
            reason = "its braces are doubled, as a template does that escapes them"
        elif "\\" in stripped:
            reason = "it holds backslashes, so a wrapper escaped it again"
        elif stripped.startswith("{'"):
            reason = "JSON needs double quotes around names and texts"
        else:
            reason = error.msg[:1].lower() + error.msg[1:]
        raise ConfigError(
            f"speculative config is not valid JSON at character {error.pos + 1}: {reason}. It reads: {_short(text)}",
            hint=example,
        ) from None
    if isinstance(data, str) and data.lstrip().startswith("{"):
        raise ConfigError(
            'speculative config is a JSON text, not an object: it is wrapped in literal " quotes, so a layer quoted it '
            f"twice. It reads: {_short(text)}",
            hint=example,
        )
    if not isinstance(data, dict):
        raise ConfigError(f"speculative config must be a JSON object, but reads: {_short(text)}", hint=example)
    return data


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_unknown_keys(data: Mapping[str, Any]) -> None:
    known = list(SpeculativeConfig.model_fields)
    for key in data:
        if key in known:
            continue
        listing = f"Known keys: {', '.join(known)}."
        if key in _VLLM_KEYS:
            raise ConfigError(
                f"speculative config: {key} is a key of vLLM that the embedded engine does not have.", hint=listing
            )
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"speculative config: unknown key {key!r}.{guess}", hint=listing)


def _refuse_unknown_method(method: Any) -> None:
    if method in METHODS:
        return
    listing = f"Methods here: {', '.join(METHODS)}."
    if isinstance(method, str) and (method in _VLLM_METHODS or method.endswith("_mtp")):
        raise ConfigError(
            f"speculative config: method {method} is known to vLLM but not to the embedded engine.", hint=listing
        )
    near = difflib.get_close_matches(str(method), METHODS, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"speculative config: unknown method {method!r}.{guess}", hint=listing)


def _infer_method(data: Mapping[str, Any]) -> str:
    """The method vLLM takes when none is given: by the drafter's name, then by its config.json, else draft_model."""
    model = data.get("model")
    if model is None:
        if data.get("prompt_lookup_max") is not None or data.get("prompt_lookup_min") is not None:
            return "ngram"
        return "draft_model"
    name = Path(str(model)).name.lower()
    if "eagle3" in name or _has_eagle3_config(Path(str(model))):
        return "eagle3"
    if "eagle-" in name:
        return "eagle"
    return "draft_model"


def _has_eagle3_config(folder: Path) -> bool:
    """True when the folder's config.json names an EAGLE-3 architecture (plain or speculators format)."""
    try:
        config = loads_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    listed = config.get("architectures")
    names = [*(listed if isinstance(listed, list) else ()), config.get("speculators_model_type")]
    return any("eagle3" in str(name).lower() for name in names)


__all__ = ["MAX_SPECULATIVE_TOKENS", "METHODS", "SpeculativeConfig", "parse_speculative_config"]
