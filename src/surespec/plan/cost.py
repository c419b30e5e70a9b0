"""What a step reads, and the acceptance length at which an arm stops being slower. Bytes only: an estimate.

Decoding one stream is bound by memory: a step costs what it reads. A plain step reads the weights once; a speculative
step reads them once for k + 1 tokens and the drafter k times (a parallel drafter once). For a mixture of experts k + 1
tokens touch more experts than one (K2).
"""

from __future__ import annotations

from surespec.memory import BYTES_PER_PARAMETER
from surespec.plan_nouns import Drafter, Model

# Served rounds cost more than their bytes (sampling, metadata, scheduling). GTC-DC workshop, Thor, FP4, k = 5: 1.34x.
OVERHEAD = 0.05


def distinct_experts(experts: int, active: int, tokens: int) -> float:
    """Expected number of different experts that ``tokens`` tokens use, routed independently and evenly."""
    return experts * (1.0 - (1.0 - active / experts) ** tokens)


def bytes_per_step(model: Model, tokens: int) -> float:
    """Weight bytes read by one step of ``tokens`` tokens: all layers and the output layer, not the embedding table."""
    table = 0 if model.tie_word_embeddings else 2 * model.vocab_size * model.hidden_size
    weights = float(max(1, model.weight_bytes - table))
    if not model.num_experts or not model.parameters:
        return weights
    expert_parameters = model.num_layers * model.num_experts * 3 * model.hidden_size * model.intermediate_size
    each = BYTES_PER_PARAMETER.get(model.quantization, model.weight_bytes / model.parameters)
    share = min(0.98, expert_parameters * each / weights)
    used = distinct_experts(model.num_experts, max(1, model.experts_per_token), tokens) / model.num_experts
    return weights * ((1 - share) + share * used)


def drafting_bytes(model: Model, drafter: Drafter, k: int) -> float:
    """Bytes the drafter reads a step: itself k times, a parallel drafter once; own layers as the target's layers do."""
    if drafter.method == "mtp":
        return k * model.mtp_layers * bytes_per_step(model, 1) / model.num_layers
    reads = 1 if drafter.parallel_drafting or drafter.method in ("dflash", "dspark") else k
    return float(reads * drafter.weight_bytes)


def break_even_length(model: Model, drafter: Drafter, k: int) -> float:
    """Mean tokens a step must yield for this arm to be as fast as no speculation, single stream."""
    step = bytes_per_step(model, k + 1) + drafting_bytes(model, drafter, k)
    return round(step / bytes_per_step(model, 1) * (1 + OVERHEAD), 2)
