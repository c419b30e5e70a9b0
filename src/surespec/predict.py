"""How fast an arm would be at another k, from one launch at a large k and the baseline. Pure.

A draft of k tokens is the start of a longer one, so the p_i of a run at large k are also those of every smaller k
(``facts``: expected tokens a step = 1 + p_1 + ... + p_k, measured, with no assumption of independence). What a step
costs is taken from served rounds, never from isolated forwards: the time of a step is TPOT times the tokens of a step,
known at k = 0 (baseline) and at the probed k, and linear between the two (a draft of k tokens is k passes of the
drafter, and a verification grows by one column a token).

Drafters such as ngram do not draft in every step. Both quantities are per step of the server, drafting or not: the
share of steps with a draft multiplies the p_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surespec.core import Acceptance, Run

TIE = 0.01
"""Speeds closer than this are a tie, and the smaller k wins it."""

HIGHEST_K = 8
RAISE_ABOVE_RATE = 0.6
"""Rule C3: a k above the probed one is considered only when the acceptance rate is above this."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One k at one concurrency. ``speed_ratio`` is predicted baseline TPOT / TPOT: above 1 is faster."""

    k: int
    tokens_per_step: float
    step_ms: float
    speed_ratio: float

    @property
    def tpot_ms(self) -> float:
        """Predicted time per output token."""
        return self.step_ms / self.tokens_per_step


def expected_tokens(per_position: Sequence[float], k: int, draft_share: float = 1.0) -> float:
    """Mean tokens a step gives: 1 + share of steps with a draft x (p_1 + ... + p_k). Positions not known count 0."""
    if k < 0:
        raise ValueError(f"k must not be negative, not {k}")
    return 1.0 + draft_share * sum(per_position[:k])


def extended(per_position: Sequence[float], length: int) -> tuple[float, ...]:
    """``per_position`` continued to ``length`` by its last conditional rate p_n / p_(n-1)."""
    values = list(per_position[:length])
    if not values:
        return ()
    before = values[-2] if len(values) > 1 else 1.0
    rate = min(1.0, values[-1] / before) if before > 0 else 0.0
    while len(values) < length:
        values.append(values[-1] * rate)
    return tuple(values)


def served_tpot_ms(run: Run) -> float | None:
    """Mean time per output token over all tokens of a run (that of traces if there are any, else the p50)."""
    good = [(t.tpot_ms, t.output_tokens - 1) for t in run.traces if t.ok and t.tpot_ms and t.output_tokens > 1]
    if not good:
        return run.tpot_ms_p50
    return sum(tpot * n for tpot, n in good) / sum(n for _, n in good)


def predict(baseline: Run, probe: Run, k_probed: int, ks: Sequence[int]) -> tuple[Prediction, ...]:
    """What each of ``ks`` would give at the concurrency of both runs; empty when the probe tells nothing.

    ``probe`` is a run of one drafter at ``k_probed`` >= 1. A run without acceptance, or whose counts contradict its
    tokens, cannot be used.
    """
    step_0, tpot_probed = served_tpot_ms(baseline), served_tpot_ms(probe)
    acceptance = probe.acceptance
    steps = _steps(probe, acceptance)
    if not step_0 or not tpot_probed or acceptance is None or steps is None or k_probed < 1:
        return ()
    share = min(1.0, acceptance.drafts / steps)
    positions = extended(acceptance.per_position[:k_probed], max([k_probed, *ks]))
    step_probed = tpot_probed * expected_tokens(positions, k_probed, share)
    slope = (step_probed - step_0) / k_probed
    found = []
    for k in ks:
        tokens, step = expected_tokens(positions, k, share), step_0 + slope * k
        if step > 0:  # a probe faster than the baseline per step can only be noise
            found.append(Prediction(k, tokens, step, step_0 * tokens / step))
    return tuple(found)


def calibrated(predictions: Sequence[Prediction], k_probed: int, measured: float) -> tuple[Prediction, ...]:
    """The predictions scaled so that the one at the probed k is the ratio that was ``measured`` there.

    This carries over what TPOT leaves out (the time to the first token is the same at every k). Empty when the probed
    k is not among them.
    """
    known = next((p.speed_ratio for p in predictions if p.k == k_probed), None)
    if known is None:
        return ()
    return tuple(replace(p, speed_ratio=p.speed_ratio * measured / known) for p in predictions)


def candidate_ks(k_probed: int, acceptance: Acceptance | None) -> tuple[int, ...]:
    """The k worth predicting: all up to the probed one, and higher ones where rule C3 allows."""
    highest = k_probed
    if acceptance is not None and acceptance.rate > RAISE_ABOVE_RATE:
        highest = max(k_probed, HIGHEST_K)
    return tuple(range(1, highest + 1))


def choose(
    single: Sequence[Prediction], load: Sequence[Prediction] = (), *, load_floor: float = 0.0
) -> Prediction | None:
    """The k that is fastest at concurrency 1 among those whose predicted load ratio reaches ``load_floor``.

    Where none does, the fastest at concurrency 1. Within ``TIE`` the smaller k wins. None when there is nothing.
    """
    if not single:
        return None
    safe = {p.k for p in load if p.speed_ratio >= load_floor}
    allowed = [p for p in single if p.k in safe] if load and safe else list(single)
    if not allowed:
        return None
    best = max(p.speed_ratio for p in allowed)
    return min((p for p in allowed if p.speed_ratio >= best / (1 + TIE)), key=lambda p: p.k)


def _steps(run: Run, acceptance: Acceptance | None) -> float | None:
    """Decoding steps of a run: tokens after the first of each request, less those that drafts gave for free."""
    if acceptance is None or acceptance.drafts <= 0:
        return None
    steps = run.output_tokens - (run.num_requests - run.failed) - acceptance.accepted
    return float(max(steps, acceptance.drafts)) if steps > 0 else None
