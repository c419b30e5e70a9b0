"""A table batch size -> k from the launches of a bundle (``surespec schedule``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surespec.core import BASELINE, Arm, Launch, Run
from surespec.errors import BundleError, UsageError
from surespec.predict import candidate_ks
from surespec.rules import load_topic
from surespec.schedule import Point, Row, as_sglang, as_trtllm, as_vllm, most_k, point, table
from surespec.stats import usable
from surespec.store import Bundle
from surespec.tune_plan import ALONE

ENGINES = ("vllm", "local", "trtllm", "sglang")


@dataclass(frozen=True)
class Schedule:
    """The table of one drafter and what it rests on. ``idle_cost`` is the share of speed that k = 0 costs."""

    engine: str
    arm: Arm
    rows: tuple[Row, ...]
    concurrencies: tuple[int, ...]
    idle_cost: float
    idle_source: str
    notes: tuple[str, ...]

    @property
    def drafts(self) -> bool:
        """Whether any batch size drafts."""
        return most_k(self.rows) > 0

    def setting(self) -> dict[str, Any]:
        """The table in the engine's words, with what has to be set beside it."""
        k = most_k(self.rows)
        if self.engine in ("vllm", "local"):
            config = {**(self.arm.speculative_config or {}), "num_speculative_tokens": k}
            return {**config, "num_speculative_tokens_per_batch_size": as_vllm(self.rows)}
        if self.engine == "trtllm":
            return {"max_draft_len": self.rows[0].k, "draft_len_schedule": as_trtllm(self.rows)}
        return as_sglang(self.rows)

    def document(self) -> dict[str, Any]:
        """For JSON (schema ``surespec/schedule/1``)."""
        return {
            "schema": "surespec/schedule/1",
            "engine": self.engine,
            "arm": self.arm.name,
            "concurrencies": list(self.concurrencies),
            "idle_cost": round(self.idle_cost, 4),
            "idle_cost_source": self.idle_source,
            "rows": [{"low": r.low, "high": r.high, "k": r.k, "ratio": round(r.ratio, 3)} for r in self.rows],
            "setting": self.setting() if self.drafts else None,
            "notes": list(self.notes),
        }


def schedule_of(folder: Path, engine: str, method: str = "") -> Schedule:
    """The table that a bundle's launches support. ``method`` picks the drafter, by default the fastest for one user.

    Raises UsageError for an unknown engine or a drafter that was not measured, BundleError where nothing was.
    """
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: no table of k is known there.", hint=f"Known: {', '.join(ENGINES)}.")
    bundle = Bundle.open(folder)
    launches = [launch for launch in bundle.launches(with_traces=True) if launch.status == "ok"]
    arms = {arm.name: arm for arm in bundle.arms()}
    base = [launch for launch in launches if launch.arm == BASELINE.name]
    if not base:
        raise BundleError(f"{folder} has no baseline.", hint=f"Finish it: surespec tune --resume --out {folder}")
    probes = _probes(launches, arms)
    if method:
        probes = {name: probe for name, probe in probes.items() if name == method}
    found = {name: made for name, probe in probes.items() if (made := _points(base, probe, arms[probe[0].arm]))}
    if not found:
        what = f"the drafter {method}" if method else "a drafter"
        raise UsageError(
            f"{folder} has no launch of {what} whose acceptance and speed are known.",
            hint=f"Measured: {', '.join(sorted(_probes(launches, arms))) or 'the baseline only'}.",
        )
    name = max(found, key=lambda n: max(found[n][0].ratios.values()))
    points = found[name]
    arm = arms[probes[name][0].arm]
    idle, source = _idle_cost(engine, base, launches, name)
    rows = table(points, idle_cost=idle)
    return Schedule(
        engine, arm, rows, tuple(p.concurrency for p in points), idle, source, _notes(rows, points, idle, engine)
    )


def _probes(launches: Sequence[Launch], arms: dict[str, Arm]) -> dict[str, list[Launch]]:
    """Of each drafter the launches of its largest measured k."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        arm = arms.get(launch.arm)
        if arm is None or arm.is_baseline or launch.arm.endswith(ALONE):
            continue
        now = found.get(arm.method)
        known = arms[now[0].arm].num_speculative_tokens if now else 0
        if arm.num_speculative_tokens > known:
            found[arm.method] = [launch]
        elif now is not None and arm.num_speculative_tokens == known:
            now.append(launch)
    return found


def _points(base: Sequence[Launch], probe: Sequence[Launch], arm: Arm) -> list[Point]:
    """One point a concurrency that both measured, all for the same k."""
    k = arm.num_speculative_tokens
    single = _run(probe[0], 1)
    ks = candidate_ks(k, single.acceptance if single else None)
    made = []
    for width in sorted({run.concurrency for run in base[0].runs} & {run.concurrency for run in probe[0].runs}):
        before, after = _run(base[0], width), _run(probe[0], width)
        if before is not None and after is not None and (found := point(before, after, k, ks)) is not None:
            made.append(found)
    shared = frozenset.intersection(*(frozenset(p.ratios) for p in made)) if made else frozenset()
    return [Point(p.concurrency, {k: r for k, r in p.ratios.items() if k in shared}) for p in made if shared]


def _idle_cost(engine: str, base: Sequence[Launch], launches: Sequence[Launch], method: str) -> tuple[float, str]:
    """What k = 0 costs: measured where an arm drafted only while alone, else by the table of rules."""
    for launch in launches:
        if launch.arm.endswith(ALONE) and launch.arm.startswith(f"{method}-"):
            for run in launch.runs:
                before = _run(base[0], run.concurrency)
                if run.concurrency > 1 and before is not None and usable(run):
                    cost = 1 - run.throughput_tok_s / before.throughput_tok_s
                    return max(0.0, cost), f"measured in launch {launch.index} at concurrency {run.concurrency}"
    entry = load_topic("schedules")[engine]
    return float(entry["idle_cost"]), str(entry["source"])


def _notes(rows: Sequence[Row], points: Sequence[Point], idle: float, engine: str) -> tuple[str, ...]:
    said = []
    if most_k(rows) == 0:
        said.append("No batch size gains from drafting: leave speculation off.")
    elif any(row.k == 0 for row in rows[:-1]) and idle > 0:
        said.append(
            f"Where the table says 0, it still costs about {idle:.1%} beside no speculation at all; if most of your "
            "requests run there, leave it off."
        )
    if len(points) == 1:
        said.append(
            f"Only concurrency {points[0].concurrency} was measured; measure more for a table worth having, such as "
            "--concurrency 1,4,8,16."
        )
    return tuple(said)


def _run(launch: Launch, width: int) -> Run | None:
    return next((run for run in launch.runs if run.concurrency == width and usable(run)), None)
