"""Was the machine still warming up (or slowing down) while it was measured? Half against half. Pure.

What is compared is the time of a decoding step, which hardly depends on the prompt: TPOT times the tokens of a step. A
run whose second half is clearly faster or slower than its first (Welch's t test on logs, ``LEVEL``, and more than
``LEAST``) was not settled. Where its second half is settled in itself, the first is cut, from every run of both arms,
so that the same prompts stay paired; where it is not, the run drifts, and only a warning helps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats as distributions

from surespec.core import Run, Trace

LEVEL = 0.001
"""Chance of an alarm in a run that is settled. There are a dozen runs or more in a tune."""

LEAST = 0.03
DRAFTS_ALWAYS = 0.9
FEWEST = 8
"""Requests below which halves tell nothing."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The runs to compare, the first half cut from all where ``cut``, and a remark (empty: nothing was found)."""

    baseline: tuple[Run, ...]
    candidate: tuple[Run, ...]
    cut: bool = False
    remark: str = ""


def step_ms(trace: Trace) -> float | None:
    """Mean time of a decoding step of one request; None where it cannot be told, or where a drafter only drafts in some
    steps, so that a mean step depends on the prompt."""
    after_first = trace.output_tokens - 1
    if not trace.ok or not trace.tpot_ms or after_first < 1:
        return None
    record = trace.acceptance
    steps = after_first - (record.accepted if record else 0)
    if steps <= 0 or (record is not None and record.drafts < DRAFTS_ALWAYS * steps):
        return None
    return trace.tpot_ms * after_first / steps


def change(traces: Sequence[Trace]) -> float:
    """How much longer a step takes in the second half than in the first (0.05: 5 %); 0 where it is not clear."""
    times = [math.log(ms) for trace in traces if (ms := step_ms(trace))]
    if len(times) < FEWEST:
        return 0.0
    early, late = times[: len(times) // 2], times[len(times) // 2 :]
    found = statistics.fmean(late) - statistics.fmean(early)
    if abs(found) <= LEAST:
        return 0.0
    if statistics.pstdev(early) + statistics.pstdev(late) == 0:
        return math.expm1(found)
    p = float(distributions.ttest_ind(early, late, equal_var=False).pvalue)
    return math.expm1(found) if p < LEVEL else 0.0


def settled(baseline: Sequence[Run], candidate: Sequence[Run]) -> Settled:
    """Look at every run of both arms at one concurrency; cut or warn."""
    before = tuple(baseline), tuple(candidate)
    runs = [*baseline, *candidate]
    found = max((change(run.traces) for run in runs), key=abs, default=0.0)
    if found == 0.0:
        return Settled(*before)
    way = f"{abs(found):.0%} {'slower' if found > 0 else 'faster'}"
    width = runs[0].concurrency
    if any(change(run.traces[len(run.traces) // 2 :]) for run in runs) or not all(_cuttable(run) for run in runs):
        remark = (
            f"At concurrency {width} a step became {way} while a run was measured, and did not settle: something else "
            "uses this machine, or its clock changes."
        )
        return Settled(*before, remark=remark)
    remark = (
        f"At concurrency {width} a step became {way} within a run, so the first half of every run is left out: the "
        "machine was not settled yet."
    )
    return Settled(
        tuple(_second_half(run) for run in baseline), tuple(_second_half(run) for run in candidate), True, remark
    )


def _cuttable(run: Run) -> bool:
    return sum(trace.ok for trace in run.traces) >= FEWEST and all(t.e2e_latency_ms for t in run.traces if t.ok)


def _second_half(run: Run) -> Run:
    """The run as its second half shows it. Its wall time is the busy time over the concurrency."""
    traces = run.traces[len(run.traces) // 2 :]
    good = [trace for trace in traces if trace.ok]
    busy_s = math.fsum(trace.e2e_latency_ms or 0.0 for trace in good) / 1e3
    tokens = sum(trace.output_tokens for trace in good)
    duration = busy_s / min(run.concurrency, len(good))
    return run.model_copy(
        update={
            "traces": tuple(traces),
            "num_requests": len(traces),
            "failed": len(traces) - len(good),
            "duration_s": duration,
            "output_tokens": tokens,
            "throughput_tok_s": tokens / duration,
            "tpot_ms_p50": statistics.median(t.tpot_ms for t in good if t.tpot_ms) if good else None,
        }
    )
