"""Draft and acceptance counters from a server's metrics page, whatever the engine calls them.

Two snapshots, one before and one after a run, give the run's ``Acceptance`` by ``difference``. What the engines have:

* vLLM and the embedded engine ``vllm:spec_decode_*`` (with ``_total`` or, on old versions, without), llama.cpp
  ``llamacpp:spec_decode_*``: drafts, drafted, accepted, accepted by position.
* TensorRT-LLM: on ``/prometheus/metrics`` drafted and accepted tokens by position (newest), or their sums alone; on
  ``/metrics`` a JSON list of iterations, *emptied by reading it*, so the second reading is the run itself.
* SGLang counts verify steps, tokens sent and requests. Every request has its first token from its prompt, and every
  step gives one token beside the accepted ones: accepted = tokens - requests - steps. Older ones have no steps but a
  mean length over the server's life in ``/server_info``: steps = (tokens - requests) / mean. Both make running sums,
  whose differences are those of a run. Its gauges are means of the last few steps and say nothing about a run.

SGLang and TensorRT-LLM: by their sources and recorded shapes, not verified on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from surespec.bench.client import read_text
from surespec.core import Acceptance
from surespec.json_text import loads_json

_PREFIXES = ("vllm:spec_decode_", "llamacpp:spec_decode_", "trtllm_spec_decode_", "trtllm:spec_decode_")
_FIELDS = {
    "num_drafts": "drafts",
    "num_draft_tokens": "drafted",
    "num_accepted_tokens": "accepted",
    "num_accepted_tokens_per_pos": "position",
    "drafted_tokens": "drafted at",
    "accepted_tokens": "position",
}
_SGLANG = {
    "sglang:spec_verify_calls_total": "steps",
    "sglang:generation_tokens_total": "sent",
    "sglang:num_requests_total": "requests",
    "sglang:spec_num_draft_tokens": "width",
}
_GAUGES = ("sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:avg_spec_accept_length")
_METRIC_PATHS = ("metrics", "prometheus/metrics")
_INFO_PATHS = ("server_info", "get_server_info")
_TIMEOUT_S = 15.0
_MAX_BYTES = 16 * 2**20
_MOST = 2.0**62  # tokens; what is larger is no count

_MEANS_ONLY = "SGLang publishes its acceptance as a running mean over the server's life; that of this run is unknown."
_WORKED_OUT = (
    "SGLang does not count accepted tokens: they are worked out from the tokens it sent, a little low where an answer "
    "ended inside a draft."
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters at one moment, summed over engines and workers. ``notes`` says what the page could not give.

    ``drafts`` is None where the engine does not count them; ``positions`` maps a draft position (0 first) to how many
    drafts were accepted up to it. ``found`` is False for a page without speculation counters.

    ``source`` ``iterations``: the counts are those since the last reading, from the iterations ``first`` to ``last``
    (None: it told none). ``sent`` and ``requests``: the tokens an SGLang server sent (None: another engine), and for
    how many requests. ``remark`` is said with every result made of this.
    """

    drafts: float | None = None
    drafted: float = 0.0
    accepted: float = 0.0
    positions: Mapping[int, float] = field(default_factory=dict)
    found: bool = False
    notes: tuple[str, ...] = ()
    source: Literal["counters", "iterations"] = "counters"
    first: int | None = None
    last: int | None = None
    sent: float | None = None
    requests: float = 0.0
    remark: str = ""


def parse_metrics(page: str) -> Snapshot:
    """Read a page: the Prometheus text format, or TensorRT-LLM's JSON. What cannot be parsed is skipped, not fatal."""
    if page.lstrip().startswith("["):
        return _iterations(page)
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    drafted_at: dict[int, float] = {}
    gauges = False
    for name, labels, value in _samples(page):
        gauges = gauges or (name in _GAUGES and value > 0)  # 0: nothing is drafted
        key = _field_of(name)
        if key is None or not abs(value) < _MOST:
            continue
        if key in ("position", "drafted at"):
            label = labels.get("position") or labels.get("token_position", "")
            table = positions if key == "position" else drafted_at
            if label.isascii() and label.isdecimal() and len(label) <= 4:
                table[int(label)] = table.get(int(label), 0.0) + value
        elif key == "width":
            sums[key] = max(sums.get(key, 0.0), value)
        else:
            sums[key] = sums.get(key, 0.0) + value
    if drafted_at:
        # By position, per finished request: every draft has a first token, so they count the drafts.
        sums |= {"drafts": drafted_at.get(0, 0.0), "drafted": sum(drafted_at.values())}
        sums |= {"accepted": sum(positions.values())}
    if gauges or {"steps", "sent"} & sums.keys():
        return _of_sglang(sums, speculating=gauges)
    return Snapshot(
        drafts=sums.get("drafts"),
        drafted=sums.get("drafted", 0.0),
        accepted=sums.get("accepted", 0.0),
        positions=positions,
        found="drafted" in sums and "accepted" in sums,
    )


def with_server_info(snapshot: Snapshot, info: Mapping[str, Any]) -> Snapshot:
    """A snapshot of an SGLang without step counter, completed by its ``/server_info``; as it is where that has no mean.

    ``avg_spec_accept_length`` is the mean number of tokens a step since the server started.
    """
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    mean, width = state.get("avg_spec_accept_length"), info.get("speculative_num_draft_tokens")
    if snapshot.found or snapshot.sent is None or not isinstance(mean, int | float) or not mean >= 1:
        return snapshot
    if not isinstance(width, int | float) or not width >= 2:
        return snapshot
    steps = (snapshot.sent - snapshot.requests) / mean
    return _of_sglang({"sent": snapshot.sent, "requests": snapshot.requests, "steps": steps, "width": float(width)})


def difference(before: Snapshot | None, after: Snapshot | None) -> tuple[Acceptance | None, tuple[str, ...]]:
    """What happened between two snapshots, and warnings about what could not be told.

    None without a warning when the server has no such counters (or drafted nothing: speculation is off).
    """
    if after is None:
        lost = before is not None and before.found
        return None, ("The metrics page could not be read after the run; its acceptance is unknown.",) if lost else ()
    if not after.found:
        return None, after.notes
    if before is None:
        return None, ("The metrics page could be read only after the run, so its acceptance is unknown.",)
    start = _start(before, after)
    drafted, accepted = after.drafted - start.drafted, after.accepted - start.accepted
    per_position = [after.positions.get(i, 0.0) - start.positions.get(i, 0.0) for i in sorted(after.positions)]
    drafts = None if after.drafts is None else after.drafts - (start.drafts or 0.0)
    if after.remark:  # worked out, so a rounding may show as a token too few or too many
        accepted = min(max(accepted, 0.0), max(drafted, 0.0))
    counts = [drafted, accepted, drafts or 0.0, *per_position]
    if not max(counts) < _MOST:
        return None, ("The server's counters are no counts of tokens, so its acceptance is unknown.",)
    if min(counts) < 0:
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
    ), tuple(filter(None, (after.remark, _thrown_away(before, after))))


def _start(before: Snapshot, after: Snapshot) -> Snapshot:
    """What to count from. A list emptied by the first reading starts from nothing, as do counters not there yet."""
    if before.found and before.source == after.source == "counters":
        return before
    unsaid = before.sent - before.requests if before.sent is not None and not before.found else 0.0
    return Snapshot(drafts=0.0, accepted=unsaid, found=True)


async def scrape(session: aiohttp.ClientSession, root: URL) -> Snapshot | None:
    """Read the metrics pages of the server at ``root``; None when it has none or refuses. Raises TimeoutError.

    The page that counts by position is the one to use; a server has one page as a rule, TensorRT-LLM has two.
    """
    read: list[Snapshot] = []
    for path in _METRIC_PATHS:
        page = await _get(session, root / path)
        if page is None or "<html" in page[:512].lower():
            continue
        snapshot = parse_metrics(page)
        if snapshot.found and snapshot.positions:
            return snapshot
        read.append(snapshot)
    best = next((snapshot for snapshot in read if snapshot.found), read[0] if read else None)
    if best is None or best.found or best.sent is None:
        return best
    for path in _INFO_PATHS:
        info = _json(await _get(session, root / path) or "")
        if isinstance(info, dict):
            return with_server_info(best, info)
    return best


async def scrape_all(session: aiohttp.ClientSession, roots: Sequence[URL]) -> Snapshot | None:
    """The sum over several servers (Dynamo's workers); None as soon as one does not answer, since a sum of some would
    look like a server that was restarted."""
    try:
        found = [await scrape(session, root) for root in roots]
    except TimeoutError:  # it hangs, so its other pages need not be waited for
        return None
    present = [snapshot for snapshot in found if snapshot is not None]
    return summed(present) if present and len(present) == len(found) else None


def summed(snapshots: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of several workers. Those without speculation counters (nothing drafted yet) add nothing."""
    if len(snapshots) == 1:
        return snapshots[0]
    counting = [snapshot for snapshot in snapshots if snapshot.found]
    positions: dict[int, float] = {}
    for snapshot in counting:
        for position, count in snapshot.positions.items():
            positions[position] = positions.get(position, 0.0) + count
    drafts = [snapshot.drafts for snapshot in counting]
    return Snapshot(
        drafts=None if None in drafts or not drafts else math.fsum(count or 0.0 for count in drafts),
        drafted=math.fsum(snapshot.drafted for snapshot in counting),
        accepted=math.fsum(snapshot.accepted for snapshot in counting),
        positions=positions,
        found=bool(counting),
        notes=tuple(dict.fromkeys(note for snapshot in snapshots for note in snapshot.notes)),
        remark=next((snapshot.remark for snapshot in counting if snapshot.remark), ""),
    )


async def _get(session: aiohttp.ClientSession, url: URL) -> str | None:
    """A page's text; None when there is none. Raises TimeoutError after 15 s, or as long as a request may take."""
    timeout = aiohttp.ClientTimeout(total=min(_TIMEOUT_S, session.timeout.total or _TIMEOUT_S))
    try:
        async with session.get(url, timeout=timeout) as response:
            return await read_text(response, _MAX_BYTES) if response.status == 200 else None
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError):
        return None


def _of_sglang(sums: Mapping[str, float], *, speculating: bool = True) -> Snapshot:
    """Running sums out of SGLang's steps, tokens and requests; a note where a speculating server lacks one of them."""
    steps, sent, requests, width = sums.get("steps"), sums.get("sent"), sums.get("requests"), sums.get("width", 0.0)
    if sent is None or requests is None or steps is None or width < 2:
        notes = (_MEANS_ONLY,) if speculating else ()
        return Snapshot(notes=notes, sent=None if requests is None else sent, requests=requests or 0.0)
    return Snapshot(
        drafts=steps,
        drafted=steps * (width - 1),
        accepted=sent - requests - steps,
        found=True,
        sent=sent,
        requests=requests,
        remark=_WORKED_OUT,
    )


def _iterations(page: str) -> Snapshot:
    """TensorRT-LLM's iterations since the last reading. Ranks beyond the first repeat its speculative counts."""
    rows = [_json(row) if isinstance(row, str) else row for row in _json(page) or ()]
    rows = [row for row in rows if isinstance(row, dict) and not row.get("attentionDpRank")]
    numbers = [row["iter"] for row in rows if isinstance(row.get("iter"), int)]
    told = [row["specDecodingStats"] for row in rows if isinstance(row.get("specDecodingStats"), dict)]
    drafting = [stats for stats in told if _number(stats.get("numDraftTokens"))]
    by_request = [_number(stats.get("numRequestsWithDraftTokens")) for stats in drafting]
    return Snapshot(
        drafts=sum(count or 0.0 for count in by_request) if all(by_request) else None,
        drafted=sum(_number(stats.get("numDraftTokens")) or 0.0 for stats in drafting),
        accepted=sum(_number(stats.get("numAcceptedTokens")) or 0.0 for stats in drafting),
        found=bool(told),
        source="iterations",
        first=min(numbers, default=None),
        last=max(numbers, default=None),
    )


def _thrown_away(before: Snapshot, after: Snapshot) -> str:
    """A warning when the server kept fewer iterations than the run had: it keeps the last 1000 by default."""
    if after.source != "iterations" or before.last is None or after.first is None or after.last is None:
        return ""
    lost = after.first - before.last - 1
    if lost <= 0:
        return ""
    return (
        f"The server kept only the last {after.last - after.first + 1} iterations of this run and threw {lost} away; "
        "its acceptance is that of the end of the run (iter_stats_max_iterations sets how many are kept)."
    )


def _json(text: str) -> Any:
    try:
        return loads_json(text)
    except ValueError:
        return None


def _number(value: object) -> float | None:
    """A count that makes sense, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def _field_of(name: str) -> str | None:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return _FIELDS.get(name.removeprefix(prefix).removesuffix("_total"))
    return _SGLANG.get(name)


def _samples(page: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    """The samples of the lines that could matter; each line is parsed alone so that a broken one harms no other."""
    wanted = (*_PREFIXES, *_GAUGES, *_SGLANG)
    for raw in page.splitlines():
        line = raw.strip()
        if not line.startswith(wanted):
            continue
        try:
            parsed = [
                (sample.name, sample.labels, float(sample.value))
                for family in text_string_to_metric_families(line + "\n")
                for sample in family.samples
            ]
        except (ValueError, KeyError, IndexError, OverflowError):
            continue
        yield from parsed
