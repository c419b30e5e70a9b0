"""From logits to tokens: pure functions, NumPy only.

The accept rule of speculative sampling is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318):
keep a draft x with probability min(1, p(x) / q(x)); at the first refusal draw from (p - q)+, normalised; after k
acceptances draw one more from p. What comes out is distributed exactly as the target's own samples, whatever q is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from surespec.local.types import FloatArray, IntArray, SamplingParams, TokenLogprob

ProbArray = NDArray[np.float64]

GREEDY_BELOW = 1e-5  # a temperature below this is greedy, as in vLLM


def is_greedy(params: SamplingParams) -> bool:
    """True when the request takes the most probable token each time."""
    return params.temperature < GREEDY_BELOW


def probs_from_logits(logits: FloatArray, temperature: float, top_p: float = 1.0, top_k: int = 0) -> ProbArray:
    """Turn logits (n, V) into the probabilities (n, V) that are sampled from; rows sum to 1.

    vLLM's order: temperature, then top_k, then top_p. ``top_k`` (0: off) keeps all tokens that tie with the k-th;
    ``top_p`` keeps the smallest set of most probable tokens whose mass reaches it (at least one token).
    Raises ValueError when the temperature is not positive (greedy decoding needs no probabilities).
    """
    if temperature <= 0.0:
        raise ValueError("temperature must be positive; greedy decoding takes the argmax")
    probs = np.zeros(logits.shape)
    vocab = logits.shape[-1]
    for row, out in zip(logits, probs, strict=True):
        kept: IntArray | slice = slice(None)
        if 0 < top_k < vocab:
            kept = np.flatnonzero(row >= np.partition(row, vocab - top_k)[vocab - top_k])
        values = row[kept].astype(np.float64)
        values -= values.max()
        values = np.exp(values / temperature)
        values /= values.sum()
        out[kept] = _nucleus(values, top_p) if top_p < 1.0 else values
    return probs


def _nucleus(probs: ProbArray, top_p: float) -> ProbArray:
    """``probs`` (n,) with all but the smallest set that reaches ``top_p`` set to zero, normalised again."""
    # All tokens below (1 - top_p) / n together weigh less than 1 - top_p, so the set is complete before the first of
    # them: only the others, few as a rule, need sorting.
    able = np.flatnonzero(probs >= (1.0 - top_p) / len(probs))
    order = able[np.argsort(-probs[able], kind="stable")]
    mass = np.cumsum(probs[order])
    kept = order[: 1 + int(np.searchsorted(mass[:-1], top_p))]  # a token stays while the mass before it is below top_p
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def sample(probs: ProbArray, rng: np.random.Generator) -> int:
    """Draw one token from ``probs`` (V,), which need not be normalised."""
    mass = np.cumsum(probs)
    token = int(np.searchsorted(mass, rng.random() * mass[-1], side="right"))
    # The product may round up to the total; the last token that has any mass is then meant.
    return token if token < len(mass) else int(np.searchsorted(mass, mass[-1]))


def accept_greedy(drafts: IntArray, target_argmax: IntArray) -> tuple[int, int]:
    """Compare drafts (k,) with the target's own choices (k + 1,): the number accepted and the token that follows."""
    k = len(drafts)
    wrong = np.flatnonzero(drafts != target_argmax[:k])
    accepted = int(wrong[0]) if len(wrong) else k
    return accepted, int(target_argmax[accepted])


def accept_rejection(
    draft_ids: IntArray, draft_probs: ProbArray | None, target_probs: ProbArray, rng: np.random.Generator
) -> list[int]:
    """Exact rejection sampling: the accepted drafts and one more token, 1 .. k + 1 of them.

    ``draft_ids`` (k,) were drawn from ``draft_probs`` (k, V), or come from a drafter without chance (None: q is 1 at
    the draft); ``target_probs`` (k + 1, V) are the target's at each draft and after the last.
    """
    tokens: list[int] = []
    for i, draft in enumerate(draft_ids.tolist()):
        p = target_probs[i]
        q_draft = 1.0 if draft_probs is None else draft_probs[i, draft]
        if rng.random() * q_draft < p[draft]:
            tokens.append(draft)
            continue
        tokens.append(sample(residual(p, draft, None if draft_probs is None else draft_probs[i]), rng))
        return tokens
    tokens.append(sample(target_probs[len(draft_ids)], rng))
    return tokens


def residual(p: ProbArray, draft: int, q: ProbArray | None) -> ProbArray:
    """(p - q)+ over the vocabulary, not normalised: what is left to draw from once ``draft`` was refused."""
    if q is None:
        left = p.copy()
        left[draft] = 0.0
    else:
        left = np.maximum(p - q, 0.0)
    # Nothing is left when p equals q up to rounding; the refusal was then a rounding accident itself.
    return left if left.any() else p


def logprobs(logits: FloatArray, token_ids: Sequence[int], top_n: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of emitted tokens (n,) under raw logits (n, V), with the ``top_n`` best of each position.

    Raw as in vLLM: before temperature, top_k and top_p.
    """
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    found = []
    for row, token in zip(rows, token_ids, strict=True):
        best: IntArray = np.zeros(0, np.int64)
        if top_n > 0:
            count = min(top_n, len(row))
            best = np.argpartition(row, len(row) - count)[len(row) - count :]
            best = best[np.argsort(-row[best], kind="stable")]
        found.append(TokenLogprob(int(token), float(row[token]), tuple((int(t), float(row[t])) for t in best)))
    return tuple(found)


__all__ = [
    "GREEDY_BELOW",
    "ProbArray",
    "accept_greedy",
    "accept_rejection",
    "is_greedy",
    "logprobs",
    "probs_from_logits",
    "residual",
    "sample",
]
