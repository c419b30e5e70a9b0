"""Parts of the report's view that are summaries of launches: categories, arms, time line. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import geometric_mean, median
from typing import Literal

from surespec.core import Acceptance, Arm, Launch, Run
from surespec.predict import calibrated, candidate_ks, predict


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """Speed-up of one workload category: the median over prompts of baseline TPOT / candidate TPOT (above 1: faster).

    ``low`` and ``high`` are the quartiles over the prompts, None with fewer than four pairs or without traces.
    """

    category: str
    prompts: int
    baseline_tpot_ms: float
    candidate_tpot_ms: float
    speedup: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm that was looked at. ``throughput`` is (concurrency, tok/s): means over its good launches."""

    name: str
    method: str
    k: int
    role: Literal["baseline", "candidate", "other"]
    launches: int
    failed: int
    acceptance_length: float | None
    per_position: tuple[float, ...]
    throughput: tuple[tuple[int, float], ...]
    speedup: float | None
    result: str


@dataclass(frozen=True, slots=True)
class LaunchBar:
    """One launch on the time line, in seconds from the start of the first one."""

    index: int
    arm: str
    status: str
    start_s: float
    loading_s: float
    measuring_s: float
    failure: str


@dataclass(frozen=True, slots=True)
class KRow:
    """One k of the candidate's drafter at concurrency 1, in tokens per second: predicted from the first probe with its
    interval, and measured (None: not launched). k = 0 is the baseline."""

    k: int
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None


def k_curve(launches: Sequence[Launch], arms: Sequence[Arm], candidate: str | None) -> tuple[KRow, ...]:
    """Predicted and measured speed over k for the candidate's drafter; empty without a candidate or its drafter's p_i.

    Predictions start from the drafter's first good launch, as ``tune`` made them.
    """
    by_name = {arm.name: arm for arm in arms}
    chosen = by_name.get(candidate or "")
    base = next(iter(_at_one(launches, "baseline")), None)
    if chosen is None or chosen.is_baseline or base is None:
        return ()
    mine = [arm for arm in arms if arm.method == chosen.method and "per_batch_size" not in str(arm.speculative_config)]
    measured = {
        arm.num_speculative_tokens: geometric_mean([run.throughput_tok_s for run in runs])
        for arm in mine
        if (runs := _at_one(launches, arm.name))
    }
    first = next((by_name[x.arm] for x in launches if x.status == "ok" and x.arm in {arm.name for arm in mine}), None)
    if first is None or not (runs := _at_one(launches, first.name)):
        return ()
    k = first.num_speculative_tokens
    ks = sorted({*candidate_ks(k, runs[0].acceptance), *measured})
    raw = predict(base, runs[0], k, ks)
    found = {p.k: p for p in calibrated(raw, k, runs[0].throughput_tok_s / base.throughput_tok_s)}
    if not found:
        return ()
    speed = base.throughput_tok_s
    zero = geometric_mean([run.throughput_tok_s for run in _at_one(launches, "baseline")])
    return (
        KRow(0, None, None, None, zero),
        *(
            KRow(
                one,
                found[one].speed_ratio * speed if one in found else None,
                found[one].low * speed if one in found else None,
                found[one].high * speed if one in found else None,
                measured.get(one),
            )
            for one in ks
        ),
    )


def _at_one(launches: Sequence[Launch], arm: str) -> list[Run]:
    """The runs of an arm at concurrency 1 that can be compared, a launch each."""
    return [
        run for run in good_runs(launches, arm) if run.concurrency == 1 and run.throughput_tok_s and run.tpot_ms_p50
    ]


def good_runs(launches: Sequence[Launch], arm: str | None) -> list[Run]:
    """Runs of the arm's launches that ended well, leaving out runs in which no request succeeded."""
    return [
        run
        for launch in launches
        if launch.arm == arm and launch.status == "ok"
        for run in launch.runs
        if run.num_requests > run.failed
    ]


def middle(runs: Sequence[Run], concurrency: int, field: str) -> float | None:
    """Geometric mean of a field over the runs at one concurrency (one run a launch), as the ratios are made of.

    None where nothing was measured.
    """
    values = [getattr(run, field) for run in runs if run.concurrency == concurrency]
    values = [value for value in values if value is not None]
    return geometric_mean(values) if values and min(values) > 0 else None


def _paired_tpot(launches: Sequence[Launch], arm: str | None, concurrency: int) -> dict[tuple[str, str], float]:
    """(category, prompt) -> median TPOT in ms over the arm's good launches."""
    values: dict[tuple[str, str], list[float]] = {}
    for run in good_runs(launches, arm):
        if run.concurrency == concurrency:
            for trace in run.traces:
                if trace.ok and trace.tpot_ms is not None:
                    values.setdefault((trace.category, trace.prompt_id), []).append(trace.tpot_ms)
    return {key: float(median(found)) for key, found in values.items()}


def categories(
    launches: Sequence[Launch], baseline: str, candidate: str | None
) -> tuple[int | None, tuple[CategoryRow, ...]]:
    """Speed-ups by category at the lowest concurrency both arms were measured at."""
    base, cand = good_runs(launches, baseline), good_runs(launches, candidate)
    shared = {run.concurrency for run in base} & {run.concurrency for run in cand}
    if not shared:
        return None, ()
    concurrency = min(shared)
    before, after = (_paired_tpot(launches, arm, concurrency) for arm in (baseline, candidate))
    pairs: dict[str, list[tuple[float, float]]] = {}
    for key in sorted(before.keys() & after.keys()):
        if before[key] > 0 and after[key] > 0:
            pairs.setdefault(key[0], []).append((before[key], after[key]))
    if not pairs:
        return concurrency, _categories_from_summaries(base, cand, concurrency)
    rows = []
    for category, found in pairs.items():
        speedups = sorted(b / a for b, a in found)
        quarter = (len(speedups) - 1) / 4
        spread = len(speedups) >= 4
        rows.append(
            CategoryRow(
                category=category,
                prompts=len(found),
                baseline_tpot_ms=float(median(b for b, _ in found)),
                candidate_tpot_ms=float(median(a for _, a in found)),
                speedup=float(median(speedups)),
                low=speedups[round(quarter)] if spread else None,
                high=speedups[round(3 * quarter)] if spread else None,
            )
        )
    return concurrency, tuple(sorted(rows, key=lambda row: -row.speedup))


def _categories_from_summaries(base: Sequence[Run], cand: Sequence[Run], concurrency: int) -> tuple[CategoryRow, ...]:
    """The same from ``Run.by_category`` when the traces are not at hand (a result file of another tool)."""

    def medians(runs: Sequence[Run]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for run in runs:
            for category, stats in run.by_category.items():
                if run.concurrency == concurrency and stats.tpot_ms_p50:
                    found.setdefault(category, []).append(stats.tpot_ms_p50)
        return {category: float(median(values)) for category, values in found.items()}

    before, after = medians(base), medians(cand)
    sizes = {name: stats.num_requests for run in cand for name, stats in run.by_category.items()}
    rows = [
        CategoryRow(name, sizes[name], before[name], after[name], before[name] / after[name], None, None)
        for name in sorted(before.keys() & after.keys())
    ]
    return tuple(sorted(rows, key=lambda row: -row.speedup))


def arm_rows(
    arms: Sequence[Arm], launches: Sequence[Launch], baseline: str, candidate: str | None, notes: Mapping[str, str]
) -> tuple[ArmRow, ...]:
    """One row per arm of the plan and per arm that was launched, in that order."""
    known = {arm.name: arm for arm in arms}
    reference = dict(_curve(good_runs(launches, baseline)))
    rows = []
    for name in dict.fromkeys([*known, *(launch.arm for launch in launches)]):
        arm, runs = known.get(name), good_runs(launches, name)
        mine = [launch for launch in launches if launch.arm == name]
        pooled = _pooled([run.acceptance for run in runs])
        curve = _curve(runs)
        shared = [c for c, _ in curve if reference.get(c)]
        speedup = dict(curve)[shared[0]] / reference[shared[0]] if shared and name != baseline else None
        rows.append(
            ArmRow(
                name=name,
                method=arm.method if arm else ("none" if name == baseline else ""),
                k=arm.num_speculative_tokens if arm else 0,
                role="baseline" if name == baseline else "candidate" if name == candidate else "other",
                launches=len(mine),
                failed=sum(launch.status == "failed" for launch in mine),
                acceptance_length=pooled.length if pooled else None,
                per_position=pooled.per_position if pooled else (),
                throughput=curve,
                speedup=speedup,
                result=_arm_result(mine, bool(runs), notes.get(name, "")),
            )
        )
    return tuple(rows)


def _arm_result(launches: Sequence[Launch], measured: bool, note: str) -> str:
    if not launches:
        return note or "not launched"
    if measured:
        return note
    reason = next((launch.failure for launch in launches if launch.failure), "no request succeeded")
    return f"failed: {reason}" + (f" ({note})" if note else "")


def _pooled(records: Sequence[Acceptance | None]) -> Acceptance | None:
    """All drafts together, None when the server never reported any (or drafted nothing)."""
    total: Acceptance | None = None
    for record in records:
        if record is not None and record.drafts:
            total = record if total is None else total + record
    return total


def _curve(runs: Sequence[Run]) -> tuple[tuple[int, float], ...]:
    """(concurrency, mean throughput in tok/s), ascending."""
    points = []
    for concurrency in sorted({run.concurrency for run in runs}):
        value = middle(runs, concurrency, "throughput_tok_s")
        if value is not None:
            points.append((concurrency, value))
    return tuple(points)


def timeline(launches: Sequence[Launch]) -> tuple[LaunchBar, ...]:
    """When each launch started, how long it loaded and how long it measured, all in seconds."""
    times = {launch.index: _seconds(launch.started_at) for launch in launches}
    origin = min((t for t in times.values() if t is not None), default=None)
    bars: list[LaunchBar] = []
    for launch in launches:
        at, end = times[launch.index], (bars[-1].start_s + bars[-1].loading_s + bars[-1].measuring_s) if bars else 0.0
        bars.append(
            LaunchBar(
                index=launch.index,
                arm=launch.arm,
                status=launch.status,
                # A result file without a start time is drawn after the launch before it.
                start_s=at - origin if at is not None and origin is not None else end,
                loading_s=launch.start_duration_s,
                measuring_s=sum(run.duration_s for run in launch.runs),
                failure=launch.failure,
            )
        )
    return tuple(bars)


def _seconds(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
