"""How fast an arm would be at another k, from one launch at a large k and the baseline. Pure.

A draft of k tokens is the start of a longer one, so the p_i of a run at large k are also those of every smaller k
(``facts``: expected tokens a step = 1 + p_1 + ... + p_k, measured, with no assumption of independence). What a step
costs is taken from served rounds, never from isolated forwards: the time of a step is TPOT times the tokens of a step,
known at k = 0 (baseline) and at the probed k. Between the two it is not a line through both: speculation costs
something whatever k is (the drafter is set up, the verification is another kernel), and then about the same for each
token (a pass of the drafter, a column of the verification). In 440 public measurements of SGLang's EAGLE-3 (SpecBundle,
batch 1 and 8, k = 3, 5, 7) the step at k = 3 costs 0.61 of what the step at k = 7 adds (median), not the 0.43 of a
line: a fixed share of about ``FIXED_SHARE``. Predictions carry that doubt in their interval.

Drafters such as ngram do not draft in every step. Both quantities are per step of the server, drafting or not: the
share of steps with a draft multiplies the p_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surespec.core import Acceptance, Run

TIE = 0.01
"""Speeds closer than this are a tie, and the smaller k wins it."""

FIXED_SHARE = 0.25
"""Part of what a step at the probed k costs above the baseline that is there at every k from 1 on."""

FIXED_SHARES = (0.0, 0.6)
"""The range of that part a prediction allows for; within it lie nine of ten of those 88 public curves."""

PREDICTION_LAUNCH_CV = 0.03
HIGHEST_K = 8
RAISE_ABOVE_RATE = 0.6
"""Rule C3: a k above the probed one is considered only when the acceptance rate is above this."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One k at one concurrency. ``speed_ratio`` is predicted baseline TPOT / TPOT: above 1 is faster; ``low`` and
    ``high`` are its 95 % interval."""

    k: int
    tokens_per_step: float
    step_ms: float
    speed_ratio: float
    low: float
    high: float

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


def step_share(k: int, k_probed: int, fixed_share: float) -> float:
    """Which part of the cost that the probed k adds to a step the given k adds: 0 at k = 0, 1 at the probed one."""
    return fixed_share + (1 - fixed_share) * k / k_probed if k > 0 else 0.0


def tokens_per_step(run: Run) -> float | None:
    """Mean tokens a decoding step of a run gives, steps without a draft included; None where it cannot be told."""
    steps = _steps(run, run.acceptance)
    return None if steps is None or run.acceptance is None else 1 + run.acceptance.accepted / steps


def break_even_tokens(baseline: Run, probe: Run, gain: float = 0.0) -> float | None:
    """Tokens a step that the probed k needs on this device to be ``gain`` faster than the baseline (0: as fast): the
    step's cost over the baseline's, times 1 + gain. Beside the measured 1 + accepted / drafts it says what a better
    drafter would have to reach. None when the probe tells nothing."""
    step_0, tpot, tokens = served_tpot_ms(baseline), served_tpot_ms(probe), tokens_per_step(probe)
    if not step_0 or not tpot or tokens is None:
        return None
    return (1 + gain) * tpot * tokens / step_0


def predict(
    baseline: Run, probe: Run, k_probed: int, ks: Sequence[int], *, fixed_share: float = FIXED_SHARE
) -> tuple[Prediction, ...]:
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
    added = tpot_probed * expected_tokens(positions, k_probed, share) - step_0
    found = []
    for k in ks:
        tokens = expected_tokens(positions, k, share)
        step = step_0 + added * step_share(k, k_probed, fixed_share)
        others = [step_0 + added * step_share(k, k_probed, one) for one in FIXED_SHARES]
        if step <= 0 or min(others) <= 0:  # a probe faster than the baseline per step can only be noise
            continue
        error = math.exp(1.96 * math.hypot(_tokens_error(probe, k), math.sqrt(2) * PREDICTION_LAUNCH_CV))
        ratio = step_0 * tokens / step
        low, high = (step_0 * tokens / one for one in (max(others), min(others)))
        found.append(Prediction(k, tokens, step, ratio, min(low, ratio) / error, max(high, ratio) * error))
    return tuple(found)


def calibrated(predictions: Sequence[Prediction], k_probed: int, measured: float) -> tuple[Prediction, ...]:
    """The predictions scaled so that the one at the probed k is the ratio that was ``measured`` there.

    This carries over what TPOT leaves out (the time to the first token is the same at every k). Empty when the probed
    k is not among them.
    """
    known = next((p.speed_ratio for p in predictions if p.k == k_probed), None)
    if known is None:
        return ()
    scale = measured / known
    return tuple(
        replace(p, speed_ratio=p.speed_ratio * scale, low=p.low * scale, high=p.high * scale) for p in predictions
    )


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


def _tokens_error(probe: Run, k: int) -> float:
    """Standard error of log tokens a step at ``k`` by the choice of prompts: requests are drawn, not drafts, which
    follow each other. Without a record of each request, drafts count as a third of independent ones (a design effect of
    3)."""
    records = [t.acceptance for t in probe.traces if t.ok and t.acceptance and t.acceptance.drafts > 0]
    values = [1 + sum(record.per_position[:k]) for record in records]
    if len(values) >= 2:
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
        return math.sqrt(variance / len(values)) / mean
    if probe.acceptance is None or probe.acceptance.drafts < 1:
        return 0.0
    mean = 1 + sum(probe.acceptance.per_position[:k])
    variance = math.fsum(p * (1 - p) for p in probe.acceptance.per_position[:k])
    return math.sqrt(3 * variance / probe.acceptance.drafts) / mean


def _steps(run: Run, acceptance: Acceptance | None) -> float | None:
    """Decoding steps of a run: tokens after the first of each request, less those that drafts gave for free."""
    if acceptance is None or acceptance.drafts <= 0:
        return None
    steps = run.output_tokens - (run.num_requests - run.failed) - acceptance.accepted
    return float(max(steps, acceptance.drafts)) if steps > 0 else None
