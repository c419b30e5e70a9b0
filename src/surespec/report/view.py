"""The one view model of a tuning: everything the terminal, the CSV and the HTML page show, already computed.

Built from plain objects (a manifest, arms, launches with their traces, a judgement or none), so that a page can be made
of a bundle, of two result files, or of a run that was stopped half-way. Pure: no I/O, no clock. A number that was not
measured is None and is shown as a dash; it is never invented.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from surespec.core import BASELINE, DEFINITIONS, Arm, Interval, Judgement, Launch, Run
from surespec.judge_words import percent
from surespec.report.summaries import (
    ArmRow,
    CategoryRow,
    KRow,
    LaunchBar,
    arm_rows,
    categories,
    good_runs,
    k_curve,
    middle,
    timeline,
)

Outcome = Literal["better", "worse", "unclear"]
Status = Literal["keep", "marginal", "disable", "inconclusive", "not_lossless", "failed", "unfinished"]

BADGES: dict[Status, str] = {
    "keep": "Keep",
    "marginal": "Marginal",
    "disable": "Disable",
    "inconclusive": "Inconclusive",
    "not_lossless": "Output differs",
    "failed": "Failed",
    "unfinished": "Unfinished",
}
_METRICS: tuple[tuple[str, str, str, bool], ...] = (
    # field of Run, what a reader sees, unit, whether a ratio above 1 is better
    ("throughput_tok_s", "Throughput", "tok/s", True),
    ("tpot_ms_p50", "TPOT, median", "ms", False),
    ("ttft_ms_p50", "TTFT, median", "ms", False),
)
_SECRET = re.compile(r"api_?key|secret|password|authorization|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric at one concurrency. ``ratio`` is candidate / baseline; without an interval it is informative only."""

    concurrency: int
    metric: str
    label: str
    unit: str
    baseline: float | None
    candidate: float | None
    ratio: float | None
    low: float | None
    high: float | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class View:
    """All a report says, in reading order."""

    status: Status
    badge: str
    headline: str
    why: str
    policy: str
    candidate: str | None
    interval_label: str
    command: str
    rows: tuple[Row, ...]
    category_concurrency: int | None
    categories: tuple[CategoryRow, ...]
    arms: tuple[ArmRow, ...]
    timeline: tuple[LaunchBar, ...]
    k_curve: tuple[KRow, ...]
    lossless: bool | None
    lossless_text: str
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    definitions: tuple[tuple[str, str], ...]
    machine: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    reproduce: str
    version: str
    created_at: str


def build_view(
    judgement: Judgement | None,
    launches: Sequence[Launch],
    *,
    manifest: Mapping[str, Any] | None = None,
    arms: Sequence[Arm] = (),
    notes: Mapping[str, str] | None = None,
    problems: Sequence[str] = (),
) -> View:
    """The view of one tuning or judging.

    ``judgement`` is None when the run was stopped before a verdict. ``launches`` should carry their traces; without
    them the categories come from each run's own summary. ``notes`` maps an arm's name to a remark (predicted value, why
    it was not launched); ``problems`` says what of the bundle could not be read. Raises nothing for missing data: what
    is absent is shown as absent.
    """
    manifest = manifest or {}
    launches = sorted(launches, key=lambda launch: launch.index)
    baseline, candidate = _roles(judgement, launches, arms)
    rows = _rows(judgement, good_runs(launches, baseline), good_runs(launches, candidate))
    concurrency, by_category = categories(launches, baseline, candidate)
    return View(
        status=judgement.verdict if judgement else "unfinished",
        badge=BADGES[judgement.verdict if judgement else "unfinished"],
        headline=_headline(judgement, candidate, rows),
        why=" ".join(filter(None, (judgement.why, judgement.stopped)))
        if judgement
        else "The run ended before a verdict. What was measured so far is below.",
        policy=judgement.policy if judgement else "",
        candidate=candidate,
        interval_label=f"{percent(judgement.confidence if judgement else 0.95)} interval",
        command=judgement.command if judgement else "",
        rows=rows,
        category_concurrency=concurrency,
        categories=by_category,
        arms=arm_rows(arms, launches, baseline, candidate, notes or {}),
        timeline=timeline(launches),
        k_curve=k_curve(launches, arms, candidate),
        lossless=judgement.lossless if judgement else None,
        lossless_text=_lossless_text(judgement),
        assumptions=judgement.assumptions if judgement else (),
        warnings=(*_warnings(judgement, launches), *problems),
        definitions=tuple(DEFINITIONS.items()),
        machine=_flat(manifest.get("machine", {})),
        options=_flat(manifest.get("options", {})),
        reproduce=str(manifest.get("command") or _tune_command(manifest.get("options"))),
        version=str(manifest.get("surespec_version", "")),
        created_at=str(manifest.get("created_at", "")),
    )


def _roles(judgement: Judgement | None, launches: Sequence[Launch], arms: Sequence[Arm]) -> tuple[str, str | None]:
    """Names of the baseline and of the arm it is compared with.

    A verdict that recommends no arm still compared one: then it is the arm with most good launches, and among equals
    the one with the highest throughput.
    """
    names = list(dict.fromkeys([arm.name for arm in arms] + [launch.arm for launch in launches]))
    baseline = next((arm.name for arm in arms if arm.is_baseline), None)
    if baseline is None:
        baseline = BASELINE.name if BASELINE.name in names or not names else names[0]
    if judgement and judgement.arm and judgement.arm != baseline:
        return baseline, judgement.arm
    others = [name for name in names if name != baseline and good_runs(launches, name)]

    def weight(name: str) -> tuple[int, float]:
        runs = good_runs(launches, name)
        lowest = min(run.concurrency for run in runs)
        speed = median(run.throughput_tok_s for run in runs if run.concurrency == lowest)
        return sum(launch.arm == name and launch.status == "ok" for launch in launches), speed

    return baseline, max(others, key=weight, default=None)


def _rows(judgement: Judgement | None, base: Sequence[Run], cand: Sequence[Run]) -> tuple[Row, ...]:
    ratios = judgement.ratios if judgement else {}
    judged = {int(key[1:]) for key in ratios if key[1:].isdigit()}
    rows = []
    for concurrency in sorted({run.concurrency for run in (*base, *cand)} | judged):
        for field, label, unit, higher in _METRICS:
            before, after = middle(base, concurrency, field), middle(cand, concurrency, field)
            found = ratios.get(f"c{concurrency}")
            interval: Interval | None = getattr(found, field, None) if found else None
            point = interval.estimate if interval else (after / before if before and after is not None else None)
            rows.append(
                Row(
                    concurrency=concurrency,
                    metric=field,
                    label=label,
                    unit=unit,
                    baseline=before,
                    candidate=after,
                    ratio=point,
                    low=interval.low if interval else None,
                    high=interval.high if interval else None,
                    outcome=_outcome(interval, higher),
                )
            )
    return tuple(rows)


def _outcome(interval: Interval | None, higher_is_better: bool) -> Outcome:
    """What an interval says against 1; a point without an interval says nothing certain."""
    if interval is None or interval.low <= 1.0 <= interval.high:
        return "unclear"
    return "better" if (interval.low > 1.0) == higher_is_better else "worse"


def _headline(judgement: Judgement | None, candidate: str | None, rows: Sequence[Row]) -> str:
    """The verdict in one sentence; the intervals stand in ``why`` and in the table."""
    if judgement is None:
        return "No verdict yet: the run was stopped before it could be judged."
    name = "the candidate" if candidate in (None, "candidate") else candidate
    if judgement.verdict == "not_lossless":
        return f"Do not use {name}: its output differs from the output without speculation."
    if judgement.verdict == "failed":
        return "No verdict: the measurement failed."
    opening = {
        "keep": f"Keep {name}",
        "marginal": "A small gain, your choice",
        "disable": "Leave speculation off",
        "inconclusive": "Not certain yet",
    }[judgement.verdict]
    speeds = [
        f"{row.ratio:.2f} times the tokens per second with {_users(row.concurrency)}"
        for row in rows
        if row.metric == "throughput_tok_s" and row.ratio is not None
    ]
    if not speeds:
        return f"{opening}."
    shown = [speeds[0], *(text.replace(" the tokens per second", "") for text in speeds[1:][-1:])]
    who = "" if judgement.verdict == "keep" else f"{name} gives "
    return f"{opening}: {who}{' and '.join(shown)}."


def _users(concurrency: int) -> str:
    return "one user" if concurrency == 1 else f"{concurrency} users at once"


def _lossless_text(judgement: Judgement | None) -> str:
    if judgement is None or judgement.lossless is None:
        said = "Outputs with and without speculation were not compared, so this report says nothing about losslessness."
    elif judgement.lossless:
        said = "The output with speculation equals the output without it."
    else:
        said = "The output with speculation differs from the output without it."
    detail = judgement.lossless_detail if judgement else ""
    return f"{said} {detail}".strip()


def _warnings(judgement: Judgement | None, launches: Sequence[Launch]) -> tuple[str, ...]:
    """Warnings of the verdict and of every launch, failures included, each once."""
    said = list(judgement.warnings) if judgement else []
    for launch in launches:
        said += [f"Launch {launch.index} ({launch.arm}): {text}" for text in launch.warnings]
        said += [
            f"Launch {launch.index} ({launch.arm}): {run.failed} of {run.num_requests} requests failed at concurrency "
            f"{run.concurrency}; they are not in any average."
            for run in launch.runs
            if run.failed
        ]
        if launch.status != "ok":
            said.append(f"Launch {launch.index} ({launch.arm}) {launch.status}: {launch.failure or 'no reason given.'}")
    return tuple(dict.fromkeys(said))


_TUNE_FLAGS = (
    "model", "engine", "precision", "concurrency", "policy", "prompts", "num_prompts", "output_len", "temperature",
    "draft_model", "eagle3_head",
)  # fmt: skip


def _tune_command(options: Any) -> str:
    """The ``surespec tune`` that measures the same again, from the options a bundle keeps; "" when it keeps none."""
    if not isinstance(options, Mapping) or "model" not in options:
        return ""
    words = ["surespec", "tune"]
    for name in _TUNE_FLAGS:
        value = options.get(name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def _flat(table: Any, prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested settings as (dotted name, text) lines; what looks like a secret is masked, since reports are shared."""
    if not isinstance(table, Mapping):
        return ()
    lines: list[tuple[str, str]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if _SECRET.search(str(key)):
            lines.append((name, "(hidden)"))
        elif isinstance(value, Mapping):
            lines += _flat(value, f"{name}.")
        elif value is not None and value != "" and value != []:
            text = ", ".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)
            lines.append((name, text))
    return tuple(lines)
