"""``bench``: measure one endpoint at one or several concurrencies and say what was found.

Order of events: the endpoint is checked (reachable, OpenAI-compatible, one real streamed request succeeds); then, for
each concurrency, warm-up requests that are thrown away, a snapshot of the metrics page, the measured requests from
``concurrency`` workers that each send the next prompt when the last one is answered (closed loop), another snapshot.

The same prompts are sent at every concurrency, so that runs of two arms pair by prompt id. A server with a prefix cache
therefore prefills faster at the second concurrency than at the first; this moves TTFT, in every arm alike, and the
warm-up cannot remove it. Compare one concurrency with the same one of another arm, not two of one arm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from itertools import cycle, islice
from operator import add
from typing import Literal

import numpy as np

from surespec.bench.client import TIMED_OUT, Api, Decoding, Reply, StreamClient
from surespec.bench.scrape import difference, scrape_all
from surespec.bench.workload import Prompt, PromptSet, load_workload
from surespec.core import Acceptance, BenchResult, CategoryStats, Run, Trace, Workload
from surespec.endpoint_url import normalise_endpoint, shown
from surespec.errors import EndpointError, Interrupted, UsageError

DEFAULT_NUM_PROMPTS = 36
_WARMUP_TOKENS = 64
_MIN_WARMUP_REQUESTS = 2
_GIVE_UP_AFTER = 8
_GIVE_UP_SILENT = 2
"""Requests a worker that time out in a row: each has cost the whole time limit, so a server that hangs is left soon."""

_MAX_CONCURRENCY = 1024


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. ``model`` None: the first the server lists. ``num_prompts`` None: 36, or a file's own number.

    ``timeout_s`` limits one whole request and, in the same measure, the silence between two pieces of its stream.
    ``metrics_endpoints`` are the servers whose metrics pages are read and summed, where that is not ``endpoint``
    (Dynamo's workers).
    """

    endpoint: str
    model: str | None = None
    concurrency: tuple[int, ...] = (1, 8)
    prompts: str = "mixed"
    num_prompts: int | None = None
    output_len: int = 128
    input_len: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    warmup: bool = True
    timeout_s: float = 600.0
    ignore_eos: bool = False
    api: Api = "chat"
    metrics_endpoints: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UsageError for a value that cannot be measured with."""
        if not self.concurrency:
            raise UsageError("--concurrency needs at least one number.", hint="Example: --concurrency 1,8")
        for level in self.concurrency:
            if not 1 <= level <= _MAX_CONCURRENCY:
                raise UsageError(f"--concurrency must lie between 1 and {_MAX_CONCURRENCY}, not {level}.")
        if len(set(self.concurrency)) != len(self.concurrency):
            raise UsageError("--concurrency names a number twice.")
        if self.output_len < 2:
            raise UsageError(f"--output-len must be at least 2, not {self.output_len}: TPOT needs two tokens.")
        if not 0.0 <= self.temperature <= 10.0:
            raise UsageError(f"--temperature must lie between 0 and 10, not {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p must lie above 0 and not above 1, not {self.top_p}.")
        if self.timeout_s <= 0:
            raise UsageError(f"--timeout must be above 0 seconds, not {self.timeout_s}.")
        if self.api not in ("chat", "completions"):
            raise UsageError(f"--api must be chat or completions, not {self.api!r}.")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a benchmark stands: requests ``done`` of ``total`` in this phase, with the measured tokens so far."""

    phase: Literal["check", "warmup", "run"]
    concurrency: int
    done: int
    total: int
    failed: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0

    @property
    def stage(self) -> str:
        """The phase in a word for a progress bar."""
        return {"check": "checking", "warmup": "warming up", "run": "measuring"}[self.phase]


ProgressHook = Callable[[Progress], None]
TraceHook = Callable[[int, Trace], None]


def bench(
    options: BenchOptions, progress: ProgressHook | None = None, on_trace: TraceHook | None = None
) -> BenchResult:
    """Measure, blocking. ``on_trace(concurrency, trace)`` is called as each measured request ends.

    Raises:
        UsageError, InputFileError: options or prompts that cannot be used.
        EndpointError: nothing answers, something else answers, or no request of a run succeeded.
        Interrupted: Ctrl-C; every finished trace has been given to ``on_trace``.
    """
    try:
        return asyncio.run(bench_async(options, progress, on_trace))
    except KeyboardInterrupt:
        raise Interrupted("The benchmark was interrupted.") from None


async def bench_async(
    options: BenchOptions, progress: ProgressHook | None = None, on_trace: TraceHook | None = None
) -> BenchResult:
    """``bench`` for a caller that has an event loop; cancelling it stops all requests."""
    options.check()
    prompts = _prompts(options)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    decoding = Decoding(
        options.output_len, options.temperature, options.top_p, options.seed, ignore_eos=options.ignore_eos
    )
    client = StreamClient(
        options.endpoint, model=options.model or "", api=options.api, decoding=decoding, timeout_s=options.timeout_s
    )
    warnings = list(prompts.warnings)
    runs: list[Run] = []
    async with client:
        warnings += await _check(client, options, prompts, progress)
        for level in options.concurrency:
            run, notes = await _measure(client, level, prompts, options, progress, on_trace)
            runs.append(run)
            warnings += [note for note in notes if note not in warnings]
    accepted = [run.acceptance for run in runs if run.acceptance is not None]
    return BenchResult(
        endpoint=shown(client.url),
        model=client.model,
        workload=Workload(
            prompts=prompts.name,
            num_prompts=len(prompts.prompts),
            output_len=options.output_len,
            input_len=options.input_len,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            categories=prompts.categories,
        ),
        runs=tuple(runs),
        acceptance=reduce(add, accepted) if accepted else None,
        warnings=tuple(warnings),
        started_at=started_at,
    )


def _prompts(options: BenchOptions) -> PromptSet:
    count = options.num_prompts
    if count is not None:
        return load_workload(options.prompts, count, input_len=options.input_len)
    loaded = load_workload(options.prompts, input_len=options.input_len)
    if options.prompts != "mixed":
        return loaded
    return replace(loaded, prompts=loaded.prompts[:DEFAULT_NUM_PROMPTS])


async def _check(
    client: StreamClient, options: BenchOptions, prompts: PromptSet, progress: ProgressHook | None
) -> list[str]:
    """Make sure the endpoint serves streamed requests before anything is measured; choose the model."""
    if progress:
        progress(Progress("check", options.concurrency[0], 0, 1))
    names = await client.models()
    warnings: list[str] = []
    if not client.model:
        if not names:
            raise EndpointError(f"{shown(client.url)} lists no model.", hint="Name it with --model.")
        client.model = names[0]
        if len(names) > 1:
            warnings.append(f"The server lists {len(names)} models; {names[0]} was measured (choose with --model).")
    trace = (await client.send(_short(prompts.warmup[0], options.output_len))).trace
    if not trace.ok:
        raise EndpointError(
            f"{shown(client.url)} did not answer a first streamed request: {trace.error}.",
            hint=_hint(trace.error, client.model, names),
        )
    if client.dropped:
        warnings.append(f"The server refuses these request fields, so they were left out: {', '.join(client.dropped)}.")
    if progress:
        progress(Progress("check", options.concurrency[0], 1, 1))
    return warnings


def _hint(error: str, model: str, names: Sequence[str]) -> str:
    if "usage" in error:
        return "The server must honour stream_options.include_usage; surespec never counts tokens by chunks."
    if model not in names and names:
        return f"The server lists: {', '.join(names[:5])}."
    return "Look into the server's log."


def _short(prompt: Prompt, output_len: int) -> Prompt:
    return replace(prompt, max_tokens=min(output_len, _WARMUP_TOKENS))


async def _measure(
    client: StreamClient,
    level: int,
    prompts: PromptSet,
    options: BenchOptions,
    progress: ProgressHook | None,
    on_trace: TraceHook | None,
) -> tuple[Run, list[str]]:
    """One run: warm-up, snapshot, measured window, snapshot."""
    notes: list[str] = []
    if options.warmup:
        count = max(_MIN_WARMUP_REQUESTS, level)
        warmup = [_short(p, options.output_len) for p in islice(cycle(prompts.warmup), count)]
        replies, _ = await _closed_loop(client, warmup, level, "warmup", progress, None)
        failed = sum(not reply.trace.ok for reply in replies)
        if failed:
            notes.append(f"{failed} of {count} warm-up requests at concurrency {level} failed.")
    metrics_at = [normalise_endpoint(one) for one in options.metrics_endpoints] or [client.url]
    before = await scrape_all(client.session, metrics_at)
    replies, unsent = await _closed_loop(client, prompts.prompts, level, "run", progress, on_trace)
    after = await scrape_all(client.session, metrics_at)
    counted, scrape_notes = difference(before, after)
    notes += scrape_notes
    run = summarise(level, replies, counted)
    if unsent:
        notes.append(f"Concurrency {level}: gave up after many failures in a row; {unsent} prompts were not sent.")
    if run.failed:
        reason = next(reply.trace.error for reply in replies if not reply.trace.ok)
        notes.append(f"Concurrency {level}: {run.failed} of {run.num_requests} requests failed; the first: {reason}.")
    return run, notes


async def _closed_loop(
    client: StreamClient,
    prompts: Sequence[Prompt],
    level: int,
    phase: Literal["warmup", "run"],
    progress: ProgressHook | None,
    on_trace: TraceHook | None,
) -> tuple[list[Reply], int]:
    """Send all prompts from ``level`` workers. Returns the replies in prompt order and how many were never sent."""
    replies: dict[int, Reply] = {}
    queue: Iterator[tuple[int, Prompt]] = iter(enumerate(prompts))
    in_a_row = silent = failed = tokens = 0
    origin = time.perf_counter()

    async def worker() -> None:
        nonlocal in_a_row, silent, failed, tokens
        for index, prompt in queue:
            reply = await client.send(prompt, origin=origin)
            replies[index] = reply
            in_a_row = 0 if reply.trace.ok else in_a_row + 1
            silent = silent + 1 if reply.trace.error.startswith(TIMED_OUT) else 0
            failed += not reply.trace.ok
            tokens += reply.trace.output_tokens
            if on_trace:
                on_trace(level, reply.trace)
            if progress:
                elapsed = time.perf_counter() - origin
                progress(Progress(phase, level, len(replies), len(prompts), failed, tokens, elapsed))
            if in_a_row >= max(_GIVE_UP_AFTER, 2 * level) or silent >= _GIVE_UP_SILENT * level:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(min(level, len(prompts))):
            group.create_task(worker())
    return [replies[index] for index in sorted(replies)], len(prompts) - len(replies)


def summarise(level: int, replies: Sequence[Reply], counted: Acceptance | None = None) -> Run:
    """The Run of a set of replies: percentiles and rates over the successful ones, failures only counted.

    ``counted`` is the acceptance by the server's own counters; the sum of the requests' records is preferred where
    every request has one, because counters also hold what other clients sent meanwhile.

    Raises:
        EndpointError: none succeeded.
    """
    traces = tuple(reply.trace for reply in replies)
    good = [trace for trace in traces if trace.ok]
    if not good:
        reason = traces[0].error if traces else "no request was sent"
        raise EndpointError(
            f"None of {len(traces)} requests at concurrency {level} succeeded; the first: {reason}.",
            hint="Look into the server's log.",
        )
    ends = [trace.start_s + (trace.e2e_latency_ms or 0.0) / 1e3 for trace in good]
    duration = max(ends) - min(trace.start_s for trace in good)
    tokens = sum(trace.output_tokens for trace in good)
    ttft = _percentiles([t.ttft_ms for t in good])
    tpot = _percentiles([t.tpot_ms for t in good])
    itl = _percentiles([gap for reply in replies if reply.trace.ok for gap in reply.gaps_ms])
    e2e = _percentiles([t.e2e_latency_ms for t in good])
    own, complete = _pooled(good)
    return Run(
        concurrency=level,
        num_requests=len(traces),
        failed=len(traces) - len(good),
        duration_s=duration,
        output_tokens=tokens,
        throughput_tok_s=tokens / duration if duration > 0 else 0.0,
        ttft_ms_p50=ttft[0], ttft_ms_p90=ttft[1], ttft_ms_p99=ttft[2],
        tpot_ms_p50=tpot[0], tpot_ms_p90=tpot[1], tpot_ms_p99=tpot[2],
        itl_ms_p50=itl[0], itl_ms_p90=itl[1], itl_ms_p99=itl[2],
        e2e_latency_ms_p50=e2e[0], e2e_latency_ms_p90=e2e[1], e2e_latency_ms_p99=e2e[2],
        tokens_per_chunk=tokens / max(1, sum(trace.chunks for trace in good)),
        acceptance=own if complete else (counted or own),
        by_category={name: _category([t for t in good if t.category == name]) for name in _names(good)},
        traces=traces,
    )  # fmt: skip


def _category(traces: Sequence[Trace]) -> CategoryStats:
    return CategoryStats(
        num_requests=len(traces),
        output_tokens=sum(trace.output_tokens for trace in traces),
        tpot_ms_p50=_percentiles([trace.tpot_ms for trace in traces])[0],
        acceptance=_pooled(traces)[0],
    )


def _pooled(traces: Sequence[Trace]) -> tuple[Acceptance | None, bool]:
    """The sum of the requests' own acceptance records, and whether every request had one."""
    records = [trace.acceptance for trace in traces if trace.acceptance is not None]
    return (reduce(add, records) if records else None), len(records) == len(traces)


def _names(traces: Sequence[Trace]) -> list[str]:
    return list(dict.fromkeys(trace.category for trace in traces))


def _percentiles(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """p50, p90 and p99 by linear interpolation; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None, None
    p50, p90, p99 = np.percentile(np.asarray(known), (50, 90, 99))
    return float(p50), float(p90), float(p99)
