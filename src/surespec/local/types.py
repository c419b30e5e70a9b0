"""The nouns of the embedded engine, shared by its model, its scheduler and its server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family model (Llama, SmolLM2, Qwen2, Qwen3), read from config.json or a GGUF header."""

    architecture: Literal["llama", "qwen2", "qwen3"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_bias: bool = False  # Qwen2: biases on q, k, v
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k
    rope_scaling: dict[str, float] | None = None  # Llama-3 style, or None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 KV cache one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class SeqChunk:
    """One sequence's share of a forward pass: ``token_ids`` (n,) at positions ``start`` .. ``start + n - 1``.

    ``start`` tokens of the sequence are in the cache already. Logits rows are returned for the tokens from index
    ``logits_from`` on (``n - 1``: only the last; 0: all, as verification needs; n: none).
    """

    slot: int
    start: int
    token_ids: IntArray
    logits_from: int


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """``logits`` (rows asked for, in chunk order; vocab). ``aux`` (all tokens in chunk order; 3 * hidden) holds the
    residual streams entering the three auxiliary layers, concatenated, when the drafter asked for them, else None."""

    logits: FloatArray
    aux: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. ``temperature`` 0 is greedy; ``top_k`` 0 means all tokens."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of top alternatives; None: no logprobs at all


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of an emitted token under the target, before temperature, and its top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestStats:
    """What speculation did for one request. ``acceptance_histogram[j]`` counts drafts with exactly j tokens accepted.

    ``queued_s`` passed from submission to a slot, ``first_token_s`` from submission to the first token.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    queued_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens one engine step gave one request: 1 .. k + 1 of them. ``stats`` comes with the last.

    ``error`` says why the engine gave the request up (finish reason ``abort``, no tokens); empty otherwise.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str = ""
