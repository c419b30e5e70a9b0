"""Draft and acceptance counters from a server's metrics page, whatever the engine calls them.

Two snapshots, one before and one after a run, give the run's ``Acceptance`` by ``difference``. Names and meanings:
vLLM and the embedded engine ``vllm:spec_decode_*`` (with ``_total`` or, on old versions, without), llama.cpp
``llamacpp:spec_decode_*``, TensorRT-LLM ``trtllm_spec_decode_*``. SGLang publishes running means (gauges), which cannot
be taken apart into the share of one run; a snapshot notes that instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from surespec.bench.client import read_text
from surespec.core import Acceptance

_PREFIXES = ("vllm:spec_decode_", "llamacpp:spec_decode_", "trtllm_spec_decode_", "trtllm:spec_decode_")
_FIELDS = {
    "num_drafts": "drafts",
    "num_draft_tokens": "drafted",
    "num_accepted_tokens": "accepted",
    "num_accepted_tokens_per_pos": "position",
}
_GAUGES = ("sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:avg_spec_accept_length")
_METRIC_PATHS = ("metrics", "prometheus/metrics")
_TIMEOUT = aiohttp.ClientTimeout(total=15)
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at one moment, summed over engines and workers. ``notes`` says what the page could not give.

    ``drafts`` is None where the engine does not count them; ``positions`` maps a draft position (0 first) to how many
    drafts were accepted up to it. ``found`` is False for a page without speculation counters.
    """

    drafts: float | None = None
    drafted: float = 0.0
    accepted: float = 0.0
    positions: Mapping[int, float] = field(default_factory=dict)
    found: bool = False
    notes: tuple[str, ...] = ()


def parse_metrics(page: str) -> Snapshot:
    """Read a page in the Prometheus text format. Lines that cannot be parsed are skipped, not fatal."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    gauges: set[str] = set()
    for name, labels, value in _samples(page):
        if name in _GAUGES:
            gauges.add(name)
        key = _field_of(name)
        if key is None or not math.isfinite(value):
            continue
        if key == "position":
            label = labels.get("position", "")
            if label.isdigit():
                positions[int(label)] = positions.get(int(label), 0.0) + value
        else:
            sums[key] = sums.get(key, 0.0) + value
    notes: tuple[str, ...] = ()
    if gauges and "drafted" not in sums:
        notes = (
            "SGLang publishes its acceptance as a running mean over the server's life; that of this run is unknown.",
        )
    return Snapshot(
        drafts=sums.get("drafts"),
        drafted=sums.get("drafted", 0.0),
        accepted=sums.get("accepted", 0.0),
        positions=positions,
        found="drafted" in sums and "accepted" in sums,
        notes=notes,
    )


def difference(before: Snapshot | None, after: Snapshot | None) -> tuple[Acceptance | None, tuple[str, ...]]:
    """What happened between two snapshots, and warnings about what could not be told.

    None without a warning when the server has no such counters (or drafted nothing: speculation is off).
    """
    if after is None:
        lost = before is not None and before.found
        return None, ("The metrics page could not be read after the run; its acceptance is unknown.",) if lost else ()
    if not after.found:
        return None, after.notes
    start = before if before is not None and before.found else Snapshot(drafts=0.0, found=True)
    if before is None:
        return None, ("The metrics page could be read only after the run, so its acceptance is unknown.",)
    drafted, accepted = after.drafted - start.drafted, after.accepted - start.accepted
    per_position = [after.positions.get(i, 0.0) - start.positions.get(i, 0.0) for i in sorted(after.positions)]
    drafts = None if after.drafts is None else after.drafts - (start.drafts or 0.0)
    if min([drafted, accepted, drafts or 0.0, *per_position]) < 0:
        return None, ("The server's counters went backwards: it was restarted during the run; acceptance is unknown.",)
    if drafted == 0:
        return None, ()
    if drafts is None:
        return None, ("The engine counts drafted and accepted tokens but not drafts, so acceptance length is unknown.",)
    return Acceptance(
        drafts=round(drafts),
        drafted=round(drafted),
        accepted=round(accepted),
        accepted_per_position=tuple(round(count) for count in per_position),
    ), ()


async def scrape(session: aiohttp.ClientSession, root: URL) -> Snapshot | None:
    """Read the metrics page of the server at ``root``; None when it has none or does not answer."""
    fallback: Snapshot | None = None
    for path in _METRIC_PATHS:
        try:
            async with session.get(root / path, timeout=_TIMEOUT) as response:
                if response.status != 200:
                    continue
                page = await read_text(response, _MAX_BYTES)
        except (aiohttp.ClientError, OSError):
            continue
        if "<html" in page[:512].lower():
            continue
        snapshot = parse_metrics(page)
        if snapshot.found:
            return snapshot
        fallback = fallback or snapshot
    return fallback


def _field_of(name: str) -> str | None:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return _FIELDS.get(name.removeprefix(prefix).removesuffix("_total"))
    return None


def _samples(page: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """The samples of the lines that could matter; each line is parsed alone so that a broken one harms no other."""
    for raw in page.splitlines():
        line = raw.strip()
        if not line.startswith((*_PREFIXES, *_GAUGES)):
            continue
        try:
            parsed = [
                (sample.name, sample.labels, float(sample.value))
                for family in text_string_to_metric_families(line + "\n")
                for sample in family.samples
            ]
        except (ValueError, KeyError, IndexError):
            continue
        yield from parsed
