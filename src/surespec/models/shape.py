"""A Hugging Face ``config.json`` -> ``Model``: which layers cache what, in which precision the weights are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surespec.errors import ModelError
from surespec.memory import parameter_count, weight_bytes
from surespec.plan_nouns import KVGroup, Model

_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_MAX_DIM = 1 << 24


def from_config(
    config: Mapping[str, Any], model_id: str, *, checkpoint_bytes: int = 0, source: str = "config.json", path: str = ""
) -> Model:
    """The facts of a model from its configuration.

    ``checkpoint_bytes`` is the size of the weights where it is known (index or headers), else it is calculated.
    Raises ModelError naming the missing or impossible field.
    """
    # Vision models nest the language model's shape, heads in the speculators format their one layer's.
    parts = (config.get(name) for name in ("text_config", "transformer_layer_config"))
    nested: Mapping[str, Any] = next((part for part in parts if isinstance(part, Mapping)), {})
    shape: Mapping[str, Any] = {**config, **nested}
    layers = _whole(shape, model_id, "num_hidden_layers", "n_layer")
    hidden = _whole(shape, model_id, "hidden_size", "n_embd", "d_model")
    heads = _whole(shape, model_id, "num_attention_heads", "n_head")
    experts = _optional(shape, model_id, "num_experts", "num_local_experts", "n_routed_experts")
    dense = _optional(shape, model_id, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    model = Model(
        id=model_id,
        architecture=_first_string(config.get("architectures")),
        model_type=str(shape.get("model_type", "")),
        hidden_size=hidden,
        intermediate_size=_optional(shape, model_id, "moe_intermediate_size") if experts else dense,
        num_layers=layers,
        num_heads=heads,
        vocab_size=_whole(shape, model_id, "vocab_size"),
        max_position_embeddings=_optional(shape, model_id, "max_position_embeddings", "n_positions"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", shape.get("tie_word_embeddings", False))),
        num_experts=experts,
        experts_per_token=_optional(shape, model_id, "num_experts_per_tok", "experts_per_token") if experts else 0,
        quantization=quantization_of(config),
        weight_bytes=0,
        kv_groups=kv_groups(shape, model_id, layers, hidden, heads),
        mtp_layers=_optional(shape, model_id, *_MTP_KEYS),
        draft_vocab_size=_optional(config, model_id, "draft_vocab_size"),
        drafts=drafting_method(config),
        source=source,
        path=path,
    )
    if experts and not model.intermediate_size:
        model = model.model_copy(update={"intermediate_size": dense})
    calculated = weight_bytes(model, model.quantization)
    return model.model_copy(
        update={
            "parameters": parameter_count(model),
            "weight_bytes": checkpoint_bytes or calculated,
            "weight_source": "size of the checkpoint" if checkpoint_bytes else "calculated from the shape",
        }
    )


def drafting_method(config: Mapping[str, Any]) -> str:
    """The method of a drafting head, by its configuration; empty for a model of its own."""
    said = str(config.get("speculators_model_type", "")).lower()
    names = f"{said} {_first_string(config.get('architectures'))}".lower()
    for method in ("dflash", "dspark", "eagle3"):
        if method in names:
            return method
    if "peagle" in names:
        return "eagle3"
    return "eagle3" if config.get("draft_vocab_size") else ""


def kv_groups(shape: Mapping[str, Any], model_id: str, layers: int, hidden: int, heads: int) -> tuple[KVGroup, ...]:
    """Which layers cache what: keys of transformers' configs, sizes as in vllm/v1/kv_cache_interface.py."""
    if shape.get("kv_lora_rank"):
        latent = _whole(shape, model_id, "kv_lora_rank") + _optional(shape, model_id, "qk_rope_head_dim")
        return (KVGroup(kind="mla", layers=layers, kv_heads=1, head_dim_k=latent),)
    head_dim = _optional(shape, model_id, "head_dim") or hidden // heads
    kv_heads = _optional(shape, model_id, "num_key_value_heads", "n_head_kv") or heads
    dims = {
        "kv_heads": kv_heads,
        "head_dim_k": head_dim,
        "head_dim_v": _optional(shape, model_id, "v_head_dim") or head_dim,
    }
    window = _optional(shape, model_id, "sliding_window")
    kinds = _layer_kinds(shape, layers, window)
    groups: list[KVGroup] = []
    full, sliding, state = kinds.count("full"), kinds.count("sliding"), kinds.count("state")
    if full:
        groups.append(KVGroup(kind="full", layers=full, **dims))
    if sliding:
        groups.append(KVGroup(kind="sliding", layers=sliding, window=window, **dims))
    if state:
        groups.append(KVGroup(kind="state", layers=state, state_bytes=_state_bytes(shape, model_id, hidden)))
    return tuple(groups)


def _layer_kinds(shape: Mapping[str, Any], layers: int, window: int) -> list[str]:
    """One of full, sliding, state for each layer, from whichever key the family uses."""
    listed = shape.get("layer_types")
    if isinstance(listed, list) and len(listed) == layers:
        return [_kind_of(str(kind), window) for kind in listed]
    pattern = shape.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:  # Nemotron-H: M Mamba, * attention, - MLP only
        return ["state" if c == "M" else "full" for c in pattern if c in "M*"]
    interval = shape.get("full_attention_interval")
    if isinstance(interval, int) and interval > 1:  # Qwen3-Next family: every n-th layer has attention, the rest GDN
        return ["full" if (i + 1) % interval == 0 else "state" for i in range(layers)]
    stride = shape.get("sliding_window_pattern")
    if window and isinstance(stride, int) and stride > 1:  # Gemma 3: n - 1 local layers, then a global one
        return ["full" if (i + 1) % stride == 0 else "sliding" for i in range(layers)]
    uses_window = bool(window) and shape.get("use_sliding_window", True) is not False
    if uses_window and str(shape.get("model_type", "")) in ("gpt_oss", "gemma2"):
        return ["sliding" if i % 2 == 0 else "full" for i in range(layers)]
    if uses_window and str(shape.get("model_type", "")) in ("mistral", "phi3", "starcoder2"):
        return ["sliding"] * layers
    return ["full"] * layers


def _kind_of(name: str, window: int) -> str:
    if "linear" in name or "mamba" in name or "recurrent" in name:
        return "state"
    return "sliding" if ("sliding" in name or "chunked" in name) and window else "full"


def _state_bytes(shape: Mapping[str, Any], model_id: str, hidden: int) -> int:
    """Bytes of one layer's state for one request: recurrent state in 32 bit, the convolution's tail in 16 bit."""
    if shape.get("linear_num_value_heads"):  # gated delta net
        key_heads = _optional(shape, model_id, "linear_num_key_heads")
        key_dim, value_dim = (
            _optional(shape, model_id, "linear_key_head_dim"),
            _optional(shape, model_id, "linear_value_head_dim"),
        )
        value_heads = _optional(shape, model_id, "linear_num_value_heads")
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        tail = max(0, (_optional(shape, model_id, "linear_conv_kernel_dim") or 4) - 1)
        return value_heads * key_dim * value_dim * 4 + channels * tail * 2
    heads, head_dim = (
        _optional(shape, model_id, "mamba_num_heads", "mamba_n_heads"),
        _optional(shape, model_id, "mamba_head_dim", "mamba_d_head"),
    )
    state = _optional(shape, model_id, "ssm_state_size", "mamba_d_state") or 16
    inner = heads * head_dim or 2 * hidden
    tail = max(0, (_optional(shape, model_id, "conv_kernel", "mamba_d_conv") or 4) - 1)
    return inner * state * 4 + inner * tail * 2


def quantization_of(config: Mapping[str, Any]) -> str:
    """The weights' precision as a key of ``memory.BYTES_PER_PARAMETER``; ``bf16`` when nothing is said."""
    quant = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quant, Mapping):
        dtype = str(config.get("torch_dtype", config.get("dtype", "bfloat16")))
        return {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")
    method = str(quant.get("quant_method", "")).lower()
    algorithm = str(quant.get("quant_algo", quant.get("format", ""))).lower()
    if "nvfp4" in algorithm or "nvfp4" in method:
        return "nvfp4"
    if method in ("awq", "gptq", "mxfp4", "fp8"):
        return method
    if "fp8" in algorithm or "float-quantized" in algorithm:
        return "fp8"
    if method in ("compressed-tensors", "modelopt"):
        return _compressed(quant)
    return "w4a16" if quant.get("load_in_4bit") or int(quant.get("bits", 0) or 0) == 4 else "int8"


def _compressed(quant: Mapping[str, Any]) -> str:
    """Bits and type of the first group of a compressed-tensors configuration."""
    groups = quant.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return "fp8"
    bits, kind = weights.get("num_bits"), str(weights.get("type", ""))
    if bits == 4:
        return "nvfp4" if kind == "float" else "w4a16"
    return "fp8" if kind == "float" else "int8"


def _first_string(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) and value else ""


def _whole(shape: Mapping[str, Any], model_id: str, *names: str) -> int:
    """A required positive whole number under the first of these names that is there."""
    value = _optional(shape, model_id, *names)
    if value < 1:
        raise ModelError(
            f"{model_id}: config.json has no {names[0]}.",
            hint="A plan needs the target's shape; is this the folder of a language model?",
        )
    return value


def _optional(shape: Mapping[str, Any], model_id: str, *names: str) -> int:
    """A whole number under the first of these names that is there, or 0. Raises ModelError on nonsense."""
    for name in names:
        value = shape.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_DIM:
            raise ModelError(f"{model_id}: {name} in config.json is {value!r}, not a whole number of a possible size.")
        return value
    return 0
