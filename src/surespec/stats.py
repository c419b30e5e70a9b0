"""Ratios of a candidate to a baseline, with intervals that count launches and prompts. Pure: values in, values out.

Two things make a measured ratio uncertain, and both are in every interval:

* *launches*: two server lives of one arm differ (memory layout, clocks, neighbours). A launch is a random effect. With
  two or more launches of each arm, its size is measured: a t interval on the log launch values, variances pooled over
  both arms (launch noise is a property of the machine, so it is alike in both; pooling keeps the degrees of freedom
  that 2 or 3 launches have). With one launch of an arm nothing can be measured, so a launch-to-launch coefficient of
  variation is assumed, and ``Comparison.assumptions`` says so.
* *prompts*: the prompts stand for traffic that was not sent. Both arms get the same ones, so what counts is how much
  the *ratio* varies when prompts are drawn again: a bootstrap over prompts that keeps pairs together, inside each
  category (the mix of categories is fixed by design). Every stratum of size n gives n - 1 draws, which makes the
  variance of means unbiased in small strata (Rao and Wu, 1988).

The half widths add in squares, so an interval is never narrower than what the prompts alone allow.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

from surespec.core import Interval, Ratios, Run, Trace

ASSUMED_LAUNCH_CV = 0.03
"""Launch-to-launch coefficient of variation taken for granted where only one launch of an arm was measured."""

ASSUMED_SAMPLING_CV = 0.03
"""Standard error of a log ratio taken for granted where a file holds no single requests to resample."""

RESAMPLES = 2000

DECISION_ERROR = 0.05
"""Two-sided error of all looks together: 2.5 % for each side of a threshold, the ratio lying exactly on it."""

FIRST_LOOK = 2
"""Launches of each arm before a verdict is looked at for the first time."""

_REPEAT = re.compile(r"#\d+$")  # a prompt set that is too small is sent again with #2 ... behind the ids

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingError:
    """Standard errors of the two log ratios that come from the choice of prompts alone; ``pairs`` prompts."""

    throughput: float
    tpot: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios at one concurrency and what they rest on. ``paired_prompts`` is 0 when no requests could be paired.

    ``launch_spread`` is the measured launch-to-launch standard deviation of log throughput (about the coefficient of
    variation), pooled over both arms; None with one launch of each. ``tpot_spread`` is that of log TPOT.
    """

    ratios: Ratios
    paired_prompts: int
    launches: tuple[int, int]
    launch_spread: float | None
    tpot_spread: float | None
    sampling: SamplingError | None
    assumptions: tuple[str, ...]

    def foreseen(self, launches: int, confidence: float) -> Ratios:
        """The ratios as ``launches`` of each arm would give them if estimates and spreads stayed as they are."""

        def interval(now: Interval, spread: float | None, sampling_se: float) -> Interval:
            wide = ASSUMED_LAUNCH_CV if spread is None else spread
            launch = _critical(confidence, 2 * launches - 2) * wide * math.sqrt(2 / launches)
            df = self.sampling.pairs - 1 if self.sampling else None
            half = math.exp(math.hypot(launch, _critical(confidence, df) * sampling_se))
            return Interval(estimate=now.estimate, low=now.estimate / half, high=now.estimate * half)

        speed_se = self.sampling.throughput if self.sampling else ASSUMED_SAMPLING_CV
        tpot_se = self.sampling.tpot if self.sampling else ASSUMED_SAMPLING_CV
        return Ratios(
            throughput_tok_s=interval(self.ratios.throughput_tok_s, self.launch_spread, speed_se),
            tpot_ms_p50=interval(self.ratios.tpot_ms_p50, self.tpot_spread, tpot_se),
        )


@dataclass(frozen=True, slots=True)
class _PromptMean:
    """One prompt in one arm, averaged over launches: TPOT in ms (geometric mean), tokens, end-to-end ms."""

    category: str
    tpot_ms: float
    tokens: float
    e2e_ms: float


def usable(run: Run) -> bool:
    """True when a run has the positive throughput and TPOT that a ratio needs (some tools write zeros on failure)."""
    return run.throughput_tok_s > 0 and run.tpot_ms_p50 is not None and run.tpot_ms_p50 > 0


def compare_runs(
    baseline: Sequence[Run],
    candidate: Sequence[Run],
    *,
    confidence: float = 0.95,
    launch_cv: float = ASSUMED_LAUNCH_CV,
) -> Comparison:
    """Candidate / baseline for ``throughput_tok_s`` and ``tpot_ms_p50`` at one concurrency.

    ``baseline`` and ``candidate`` hold one run a launch, at least one each, all ``usable``; otherwise ValueError.
    """
    if not baseline or not candidate:
        raise ValueError("a ratio needs at least one run of each arm")
    if not all(usable(run) for run in (*baseline, *candidate)):
        raise ValueError("a run without throughput or TPOT cannot be compared")
    sampling = sampling_error(baseline, candidate)
    assumptions = _assumptions(len(baseline), len(candidate), launch_cv, sampling)
    throughput_se = sampling.throughput if sampling else ASSUMED_SAMPLING_CV
    tpot_se = sampling.tpot if sampling else ASSUMED_SAMPLING_CV
    sampling_df = sampling.pairs - 1 if sampling else None

    def interval(base: Iterable[float], cand: Iterable[float], sampling_se: float) -> Interval:
        return ratio_interval(
            [math.log(x) for x in base],
            [math.log(x) for x in cand],
            sampling_se=sampling_se,
            sampling_df=sampling_df,
            confidence=confidence,
            launch_cv=launch_cv,
        )

    ratios = Ratios(
        throughput_tok_s=interval(
            (r.throughput_tok_s for r in baseline), (r.throughput_tok_s for r in candidate), throughput_se
        ),
        tpot_ms_p50=interval((_tpot(r) for r in baseline), (_tpot(r) for r in candidate), tpot_se),
    )
    logs = [[math.log(run.throughput_tok_s) for run in runs] for runs in (baseline, candidate)]
    tpot_logs = [[math.log(_tpot(run)) for run in runs] for runs in (baseline, candidate)]
    return Comparison(
        ratios=ratios,
        paired_prompts=sampling.pairs if sampling else 0,
        launches=(len(baseline), len(candidate)),
        launch_spread=_pooled_spread(*logs),
        tpot_spread=_pooled_spread(*tpot_logs),
        sampling=sampling,
        assumptions=assumptions,
    )


def look_confidence(launches: int, most: int, *, error: float = DECISION_ERROR) -> float:
    """The confidence of the intervals that decide when ``launches`` of each arm are there and at most ``most`` will be.

    A verdict is looked for after every launch from the second on, and each look is a chance to be wrong. The error is
    spent over the looks as the square of the share of launches (Kim and DeMets, 1987, rho = 2): little at first, when
    two launches tell little, most at the end. The parts add up to ``error``, so by Bonferroni's inequality all looks
    together err no more often. One look alone gets all of it.
    """
    if most <= FIRST_LOOK:
        return 1 - error
    share = min(launches, most) / most
    before = (min(launches, most) - 1) / most if launches > FIRST_LOOK else 0.0
    return 1 - error * (share**2 - before**2)


def ratio_interval(
    baseline_logs: Sequence[float],
    candidate_logs: Sequence[float],
    *,
    sampling_se: float,
    sampling_df: int | None,
    confidence: float = 0.95,
    launch_cv: float = ASSUMED_LAUNCH_CV,
) -> Interval:
    """The ratio exp(mean candidate - mean baseline) of log launch values, with its interval.

    ``sampling_se`` is the standard error from prompts, on the log scale, with ``sampling_df`` degrees of freedom (None:
    known). Where an arm has one launch, the launch error is the larger of ``launch_cv`` and what the other arm shows.
    """
    n_base, n_cand = len(baseline_logs), len(candidate_logs)
    spread = _pooled_spread(baseline_logs, candidate_logs) or 0.0
    if min(n_base, n_cand) >= 2:
        launch_half = _critical(confidence, n_base + n_cand - 2) * spread
    else:
        launch_half = _critical(confidence, None) * max(launch_cv, spread)
    launch_half *= math.sqrt(1 / n_base + 1 / n_cand)
    half = math.hypot(launch_half, _critical(confidence, sampling_df) * sampling_se)
    centre = sum(candidate_logs) / n_cand - sum(baseline_logs) / n_base
    return Interval(estimate=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half))


def sampling_error(baseline: Sequence[Run], candidate: Sequence[Run]) -> SamplingError | None:
    """How much both log ratios vary with the choice of prompts; None with fewer than two paired prompts.

    Prompts are paired by ``prompt_id`` and averaged over launches first, so launch noise is not counted twice.
    """
    base, cand = _prompt_means(baseline), _prompt_means(candidate)
    shared = sorted(base.keys() & cand.keys())
    if len(shared) < 2:
        return None
    draws = _draws([base[p].category for p in shared])
    tpot = _log_medians([cand[p].tpot_ms for p in shared], draws) - _log_medians(
        [base[p].tpot_ms for p in shared], draws
    )
    speed = _log_speeds([cand[p] for p in shared], draws) - _log_speeds([base[p] for p in shared], draws)
    return SamplingError(throughput=float(np.std(speed)), tpot=float(np.std(tpot)), pairs=len(shared))


def _tpot(run: Run) -> float:
    """``tpot_ms_p50`` of a run that is ``usable``."""
    if run.tpot_ms_p50 is None:
        raise ValueError("a run without TPOT cannot be compared")
    return run.tpot_ms_p50


def _prompt_means(runs: Sequence[Run]) -> dict[str, _PromptMean]:
    """Every prompt that succeeded, averaged over its requests (repeats in a run included) in all launches."""
    groups: dict[str, list[Trace]] = defaultdict(list)
    for run in runs:
        for trace in run.traces:
            if trace.ok and (trace.tpot_ms or 0) > 0 and (trace.e2e_latency_ms or 0) > 0 and trace.output_tokens > 0:
                groups[_REPEAT.sub("", trace.prompt_id)].append(trace)
    return {
        prompt_id: _PromptMean(
            category=traces[0].category,
            tpot_ms=math.exp(math.fsum(math.log(t.tpot_ms or 1.0) for t in traces) / len(traces)),
            tokens=math.fsum(t.output_tokens for t in traces) / len(traces),
            e2e_ms=math.fsum(t.e2e_latency_ms or 0.0 for t in traces) / len(traces),
        )
        for prompt_id, traces in groups.items()
    }


def _draws(categories: Sequence[str]) -> NDArray[np.int64]:
    """Indices (RESAMPLES, n - strata) of prompts drawn again within categories (all as one if any has one prompt)."""
    strata: dict[str, list[int]] = defaultdict(list)
    for index, category in enumerate(categories):
        strata[category].append(index)
    groups = list(strata.values())
    if any(len(group) < 2 for group in groups):
        groups = [list(range(len(categories)))]
    rng = np.random.default_rng(0)  # fixed: the same data gives the same interval
    columns = [np.asarray(group)[rng.integers(0, len(group), size=(RESAMPLES, len(group) - 1))] for group in groups]
    return np.concatenate(columns, axis=1)


def _log_medians(values: Sequence[float], draws: NDArray[np.int64]) -> Array:
    """Log of the median of each draw, shape (RESAMPLES,)."""
    return np.asarray(np.log(np.median(np.asarray(values)[draws], axis=1)), dtype=np.float64)


def _log_speeds(prompts: Sequence[_PromptMean], draws: NDArray[np.int64]) -> Array:
    """Log of tokens per busy millisecond of each draw, shape (RESAMPLES,).

    At a fixed concurrency the wall time is the busy time divided by a constant, which leaves a ratio unchanged.
    """
    tokens = np.asarray([p.tokens for p in prompts])[draws].sum(axis=1)
    busy = np.asarray([p.e2e_ms for p in prompts])[draws].sum(axis=1)
    return np.asarray(np.log(tokens / busy), dtype=np.float64)


def _pooled_spread(baseline_logs: Sequence[float], candidate_logs: Sequence[float]) -> float | None:
    """Standard deviation within arms; None when each has one value."""
    df = len(baseline_logs) + len(candidate_logs) - 2
    return math.sqrt((_sum_of_squares(baseline_logs) + _sum_of_squares(candidate_logs)) / df) if df > 0 else None


def _sum_of_squares(values: Sequence[float]) -> float:
    """Squared deviations from the mean, summed."""
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values)


def _critical(confidence: float, df: int | None) -> float:
    """Two-sided critical value: Student's t with ``df`` degrees of freedom, or the normal one (None)."""
    tail = 1 - (1 - confidence) / 2
    return float(distributions.norm.ppf(tail) if df is None else distributions.t.ppf(tail, df))


def _assumptions(n_base: int, n_cand: int, launch_cv: float, sampling: SamplingError | None) -> tuple[str, ...]:
    """What the interval rests on that was not measured, in sentences."""
    said = []
    if min(n_base, n_cand) < 2:
        which = "each arm" if n_base == n_cand == 1 else ("the baseline" if n_base < 2 else "the candidate")
        said.append(
            f"Only one launch of {which} was measured, so launches are assumed to vary by {launch_cv:.0%} "
            "(coefficient of variation)."
        )
    if sampling is None:
        said.append(
            "No requests could be paired by prompt, so the choice of prompts is assumed to add "
            f"{ASSUMED_SAMPLING_CV:.0%} (standard error of the ratio)."
        )
    return tuple(said)
