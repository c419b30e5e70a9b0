"""Will it fit? Pure arithmetic over the nouns of ``plan_nouns``; ``fitting`` says what to change when it does not.

The budget follows vLLM V1 (``vllm/v1/worker/gpu_worker.py``, ``worker/utils.py``): an engine asks for
``ceil(total x utilization)``; weights *including the drafter*, the peak activation, what CUDA itself takes and the
graphs come out of it, and the rest is KV cache. On memory shared by CPU and GPU it starts only if that much is
available on the host. Weights and KV are exact where shapes and file sizes are known; activation, graphs and CUDA's own
share are estimates (``ESTIMATES``), on the cautious side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from surespec.plan_nouns import GIB, Device, Drafter, KVGroup, MemoryBudget, Model

BLOCK_TOKENS = 16
UTILIZATION_CEILING = 0.90  # W3; jetson-inference-mem-tune MAX_GPU_UTIL
ESTIMATES = {
    "activation": "tokens of a batch x (4 hidden + 3 intermediate) x 2 bytes, plus twice the fp32 logits",
    "graphs": "0.3 GiB and 10 MiB a layer",
    "non_torch": "0.3 GiB, 0.75 GiB where CPU and GPU share the memory",
    "system": "1.2 GiB on boards up to 8 GB, 1.5 up to 16 GB, 3 beyond, 6 on a desktop",
}

# Bytes a parameter, scales included (a group of 128 in W4A16, of 16 in NVFP4); embeddings and output layer in 16 bit.
BYTES_PER_PARAMETER = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "w4a16": 0.516,
    "gptq": 0.516,
    "awq": 0.52,
    "nvfp4": 0.5625,
    "mxfp4": 0.531,
}


def body_parameters(model: Model) -> int:
    """Parameters of all layers and norms, without embedding and output layer (dense and MoE Llama-like models)."""
    attention = 0
    for group in model.kv_groups:
        if group.kind in ("full", "sliding"):
            q = model.hidden_size * model.num_heads * group.head_dim_k
            kv = model.hidden_size * group.kv_heads * (group.head_dim_k + group.head_dim_v)
            norms = 2 * group.head_dim_k if model.model_type.startswith("qwen3") else 0
            attention += group.layers * (2 * q + kv + norms)
    experts = max(1, model.num_experts)
    router = model.hidden_size * model.num_experts
    mlp = experts * 3 * model.hidden_size * model.intermediate_size + router
    return attention + model.num_layers * (mlp + 2 * model.hidden_size) + model.hidden_size


def parameter_count(model: Model) -> int:
    """All parameters; tied embeddings count once."""
    tables = 1 if model.tie_word_embeddings else 2
    return body_parameters(model) + tables * model.vocab_size * model.hidden_size


def weight_bytes(model: Model, quantization: str) -> int:
    """Calculated bytes of the weights in one precision: layers quantised, embedding and output layer in 16 bit."""
    per_parameter = BYTES_PER_PARAMETER.get(quantization, 2.0)
    table_bytes = 4.0 if quantization == "fp32" else 2.0
    tables = 1 if model.tie_word_embeddings else 2
    return round(body_parameters(model) * per_parameter + tables * model.vocab_size * model.hidden_size * table_bytes)


def _values_bytes(values: int, kv_dtype: str) -> float:
    """Bytes of ``values`` cached numbers of one head: 2 in 16 bit, 1 in fp8, 1/2 plus a scale per 16 in nvfp4."""
    if kv_dtype == "fp32":
        return 4.0 * values
    if kv_dtype.startswith("fp8"):
        return float(values)
    if kv_dtype == "nvfp4":
        return values / 2 + values / 16
    return 2.0 * values


def group_bytes_per_token(group: KVGroup, kv_dtype: str = "auto") -> float:
    """KV bytes one token adds in these layers (all of them together); 0 for layers that keep a state."""
    if group.kind == "state":
        return 0.0
    if group.kind == "mla":
        one = 656.0 if kv_dtype == "fp8_ds_mla" else _values_bytes(group.head_dim_k, kv_dtype)
        return group.layers * one
    key, value = _values_bytes(group.head_dim_k, kv_dtype), _values_bytes(group.head_dim_v, kv_dtype)
    return group.layers * group.kv_heads * (key + value)


def kv_bytes_per_token(model: Model, kv_dtype: str = "auto") -> int:
    """Bytes a further token of a long request costs: full and MLA layers (windows are full by then, states fixed)."""
    return round(sum(group_bytes_per_token(g, kv_dtype) for g in model.kv_groups if g.kind in ("full", "mla")))


def kv_bytes_of_request(
    model: Model, tokens: int, kv_dtype: str = "auto", *, batched_tokens: int = 2048, spec_blocks: int = 0
) -> int:
    """KV and state bytes of one request of ``tokens`` tokens, in whole blocks of 16.

    A sliding window keeps ``min(window - 1 + batched tokens, tokens)`` and a block more; a state is kept once and once
    for each speculative block (vllm/v1/kv_cache_interface.py).
    """
    total = 0.0
    for group in model.kv_groups:
        per_token = group_bytes_per_token(group, kv_dtype)
        if group.kind == "state":
            total += group.layers * group.state_bytes * (1 + spec_blocks)
        elif group.kind == "sliding":
            kept = min(group.window - 1 + batched_tokens, tokens)
            total += per_token * (math.ceil(kept / BLOCK_TOKENS) + 1) * BLOCK_TOKENS
        else:
            total += per_token * math.ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS
    return round(total)


def eagle3_parameters(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, draft_vocab: int
) -> int:
    """Parameters of an EAGLE-3 head that shares the target's embedding.

    A projection of three hidden states (3H x H), q/k/v over twice the width, o, one gated MLP and an output layer over
    the draft vocabulary (config in TensorRT-LLM #6158). 424.7 M for Llama-3.1-8B, 0.79 GiB in 16 bit, as measured.
    """
    attention = 2 * hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    return 3 * hidden * hidden + attention + 3 * hidden * intermediate + draft_vocab * hidden


def block_drafter_parameters(
    hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, layers: int
) -> int:
    """Parameters of a block drafter (DFlash, DSpark) that shares embedding and output layer: estimate, from its layers
    and a projection of as many hidden states."""
    attention = hidden * (2 * heads + 2 * kv_heads) * head_dim
    return layers * (attention + 3 * hidden * intermediate + hidden * hidden)


def mtp_parameters(model: Model) -> int:
    """Parameters of a model's own MTP layers: as many decoder layers and a 2H x H projection; tables are shared."""
    if not model.num_layers:
        return 0
    layer = body_parameters(model) // model.num_layers
    return model.mtp_layers * (layer + 2 * model.hidden_size * model.hidden_size)


def system_use(device: Device) -> int:
    """Estimated bytes the system itself uses where the free memory was not read."""
    if device.kind == "gpu":
        return GIB // 2
    if device.kind == "unified":
        return 6 * GIB
    if device.memory_gb <= 8:
        return round(1.2 * GIB)
    return round(1.5 * GIB) if device.memory_gb <= 16 else 3 * GIB


def system_reserve(device: Device) -> int:
    """Bytes to leave free beside the engine (M5): nothing on a GPU's own memory."""
    if device.kind == "gpu":
        return 0
    return GIB // 2 if device.memory_gb <= 16 else GIB


def available_bytes(device: Device) -> int:
    """What is free once running servers are stopped (M7), or the table's size less an estimate of the system's use."""
    if device.available_bytes is not None:
        return min(device.memory_bytes, device.available_bytes + device.reclaimable_bytes)
    return max(0, device.memory_bytes - system_use(device))


@dataclass(frozen=True)
class Settings:
    """What decides the memory of one launch. ``utilization`` None: the engine takes what it needs."""

    model: Model
    utilization: float | None
    max_model_len: int
    max_num_seqs: int
    batched_tokens: int
    concurrency: int
    tokens_per_request: int
    kv_dtype: str = "auto"
    drafter: Drafter | None = None
    k: int = 0
    tensor_parallel: int = 1


def activation_bytes(s: Settings) -> int:
    """Peak activation of the profiling run (see ESTIMATES)."""
    model = s.model
    width = model.intermediate_size * max(1, model.experts_per_token)
    tokens = min(s.batched_tokens, max(s.max_model_len, s.max_num_seqs))
    logits = 2 * s.max_num_seqs * model.vocab_size * 4
    return round((tokens * (4 * model.hidden_size + 3 * width) * 2 + logits) / s.tensor_parallel)


def budget(device: Device, s: Settings) -> MemoryBudget:
    """How the memory of this launch is spent on this device, for one GPU."""
    total, available, reserve = device.memory_bytes, available_bytes(device), system_reserve(device)
    requested = max(0, available - reserve) if s.utilization is None else math.ceil(total * s.utilization)
    weights = math.ceil(s.model.weight_bytes / s.tensor_parallel)
    drafter = s.drafter.weight_bytes if s.drafter else 0
    on_cpu = device.kind == "cpu"
    graphs = 0 if on_cpu else round(0.3 * GIB) + s.model.num_layers * 10 * 2**20
    non_torch = round((0.75 if device.unified else 0.3) * GIB) if not on_cpu else round(0.2 * GIB)
    activation = activation_bytes(s)
    kv = requested - weights - drafter - activation - non_torch - graphs

    draft_kv = _draft_kv_per_token(s)
    per_token = math.ceil(kv_bytes_per_token(s.model, s.kv_dtype) / s.tensor_parallel + draft_kv)
    one = _request_bytes(s, s.max_model_len, draft_kv)
    usual = _request_bytes(s, min(s.max_model_len, s.tokens_per_request), draft_kv)
    needed = max(one, s.concurrency * usual)
    kv_slack = kv - needed
    admission_slack = kv_slack if s.utilization is None else available - reserve - requested
    margin = min(kv_slack, admission_slack)
    short: Literal["", "kv", "admission", "weights"]
    if margin >= 0:
        short = ""
    elif s.utilization is not None and admission_slack <= kv_slack:
        short = "admission"
    else:
        short = "weights" if kv < 0 else "kv"
    return MemoryBudget(
        total=total,
        available=available,
        requested=requested,
        reserve=reserve,
        weights=weights,
        drafter=drafter,
        activation=activation,
        non_torch=non_torch,
        graphs=graphs,
        kv=kv,
        kv_needed=needed,
        kv_tokens=max(0, kv // per_token) if per_token else 0,
        kv_bytes_per_token=per_token,
        margin=margin,
        fits=margin >= 0,
        short_of=short,
    )


def _draft_kv_per_token(s: Settings) -> float:
    """The drafter's KV bytes a token, in the cache's type (a drafter's figure is given for 16 bit)."""
    if s.drafter is None:
        return 0.0
    return s.drafter.kv_bytes_per_token * _values_bytes(1, s.kv_dtype) / 2


def _request_bytes(s: Settings, tokens: int, draft_kv: float) -> int:
    """KV of one request, drafter and look-ahead slots included."""
    with_lookahead = tokens + s.k
    target = kv_bytes_of_request(s.model, with_lookahead, s.kv_dtype, batched_tokens=s.batched_tokens, spec_blocks=s.k)
    return math.ceil(target / s.tensor_parallel + draft_kv * with_lookahead)


def highest_utilization(device: Device) -> float:
    """The highest utilization the available memory allows, 0.90 at most, in steps of 0.01."""
    room = (available_bytes(device) - system_reserve(device)) / device.memory_bytes if device.memory_bytes else 0.0
    return max(0.0, min(UTILIZATION_CEILING, math.floor(room * 100) / 100))
