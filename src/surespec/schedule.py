"""From measurements at some concurrencies to a table batch size -> k, in each engine's words. Pure.

Drafting pays most where few requests run and costs most where many do, so the best k falls with the batch size. For
every batch size the predicted speed of each k is interpolated between the measured concurrencies (linear in log batch
size), and the fastest wins; a tie of 1 % goes to the smaller k. k = 0 takes part with what it costs: an engine that
could draft is slower than one that cannot, even while it drafts nothing (``rules/schedules.toml``). Only a k whose
predicted speed is ahead of k = 0 by more than the noise of the launches behind it (``CERTAIN``) is drafted: a table is
there never to be slower than no speculation. k never rises with the batch size: verifying costs more the more requests
share a pass, so a larger k at a larger size is noise. Above the largest measured concurrency nothing is drafted.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surespec.core import Run
from surespec.errors import UsageError
from surespec.predict import TIE, calibrated, predict

LARGEST_BATCH = 1024
CERTAIN = 0.05
"""Gain below which drafting is not worth the risk: a launch of each arm varies by 2 to 5 % on a quiet machine."""


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency: throughput ratio to the baseline for each k from 1 on, predicted or measured."""

    concurrency: int
    ratios: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Batch sizes ``low`` to ``high``, both included, draft ``k`` tokens; ``ratio`` is the least predicted in it."""

    low: int
    high: int
    k: int
    ratio: float


def point(baseline: Run, probe: Run, k_probed: int, ks: Sequence[int]) -> Point | None:
    """What each k would give at the concurrency of both runs, from one probe at ``k_probed``; None when the probe tells
    nothing."""
    measured = probe.throughput_tok_s / baseline.throughput_tok_s
    found = calibrated(predict(baseline, probe, k_probed, sorted({*ks, k_probed})), k_probed, measured)
    return Point(baseline.concurrency, {p.k: p.speed_ratio for p in found}) if found else None


def table(points: Sequence[Point], *, idle_cost: float = 0.0) -> tuple[Row, ...]:
    """Rows from batch size 1 to ``LARGEST_BATCH``, without gaps. ``idle_cost``: share of speed that k = 0 costs.

    Raises ValueError without a point, or where the points do not know the same k.
    """
    if not points:
        raise ValueError("a table needs at least one measured concurrency")
    points = sorted(points, key=lambda p: p.concurrency)
    if len({frozenset(p.ratios) for p in points}) != 1:
        raise ValueError("every concurrency must know the same k")
    rows: list[Row] = []
    for batch in range(1, points[-1].concurrency + 1):
        _extend(rows, batch, *best_k(points, batch, idle_cost, rows[-1].k if rows else None))
    if rows[-1].k == 0:
        last = rows.pop()
        rows.append(Row(last.low, LARGEST_BATCH, 0, last.ratio))
    else:
        rows.append(Row(points[-1].concurrency + 1, LARGEST_BATCH, 0, 1 - idle_cost))
    return tuple(rows)


def best_k(points: Sequence[Point], batch: int, idle_cost: float = 0.0, most: int | None = None) -> tuple[int, float]:
    """The k (up to ``most``) to draft at a batch size and the ratio it is predicted to give."""
    ratios = {k: _between(points, batch, k) for k in points[0].ratios if most is None or k <= most}
    ratios[0] = 1 - idle_cost
    best = max(ratios.values())
    if best < ratios[0] * (1 + CERTAIN):
        return 0, ratios[0]
    k = min(k for k, ratio in ratios.items() if ratio >= best / (1 + TIE))
    return k, ratios[k]


def most_k(rows: Sequence[Row]) -> int:
    """The largest k of a table."""
    return max(row.k for row in rows)


def as_vllm(rows: Sequence[Row]) -> list[list[int]]:
    """``num_speculative_tokens_per_batch_size`` (vLLM 0.24 and newer; the embedded engine too): [low, high, k]."""
    return [[row.low, row.high, row.k] for row in rows]


def as_trtllm(rows: Sequence[Row]) -> dict[int, int]:
    """``draft_len_schedule``: {highest batch size: k}, falling; above its last key nothing is drafted.

    Its first value is the ``max_draft_len`` to set beside it. Raises UsageError where no batch size drafts.
    """
    found = {row.high: row.k for row in rows if row.k > 0}
    if not found:
        raise UsageError("No batch size gains from drafting, so there is no table to write.", hint="Leave it off.")
    return found


def as_sglang(rows: Sequence[Row]) -> dict[str, dict[str, list[int]]]:
    """The file of ``--speculative-adaptive-config``: {lowest batch size: candidate steps}."""
    return {str(row.low): {"candidate_steps": [row.k]} for row in rows}


def _extend(rows: list[Row], batch: int, k: int, ratio: float) -> None:
    if rows and rows[-1].k == k:
        rows[-1] = Row(rows[-1].low, batch, k, min(rows[-1].ratio, ratio))
    else:
        rows.append(Row(batch, batch, k, ratio))


def _between(points: Sequence[Point], batch: int, k: int) -> float:
    """Ratio of a k at a batch size: between two measured ones linear in its log, outside that of the nearest."""
    sizes = [p.concurrency for p in points]
    at = bisect.bisect_left(sizes, batch)
    if at < len(sizes) and sizes[at] == batch:
        return points[at].ratios[k]
    if at == 0 or at == len(sizes):
        return points[min(at, len(sizes) - 1)].ratios[k]
    low, high = points[at - 1], points[at]
    share = math.log(batch / low.concurrency) / math.log(high.concurrency / low.concurrency)
    return low.ratios[k] + share * (high.ratios[k] - low.ratios[k])
