"""Result files of other benchmark tools as a BenchResult, with their definitions put into ours.

Where the names of the keys come from: jetson-llm-benchmark 0.0.2 (its `bench_vllm.sh`), vLLM 0.33 `vllm bench serve
--save-result` (its `benchmarks/serve.py`), AIPerf 0.13 `profile_export_aiperf.json`, GuideLLM 0.8 `benchmarks.json`.
A file that lacks what a verdict needs is refused with the reason; what it merely does not say becomes a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from pydantic import ValidationError

from surespec.core import Acceptance, BenchResult, Run, Trace, Workload
from surespec.errors import InputFileError

Document = Mapping[str, Any]
MAX_K = 1024
_TO_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "us": 1e-3, "ns": 1e-6, "milliseconds": 1.0}


def number(document: Document, key: str, where: str) -> float | None:
    """A finite number, or None when the key is missing, null or not finite.

    Raises:
        InputFileError: the value is something else.
    """
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputFileError(f"{where}: {key} must be a number, not {str(value)[:40]!r}.")
    return float(value) if math.isfinite(value) else None


def needed(document: Document, key: str, where: str, hint: str = "") -> float:
    """``number``, above zero.

    Raises:
        InputFileError: missing, or not above zero.
    """
    value = number(document, key, where)
    if value is None or value <= 0:
        said = "is missing" if value is None else f"is {value:g}"
        raise InputFileError(f"{where}: {key} {said}, so nothing can be judged by it.", hint=hint)
    return value


def section(document: Document, key: str) -> Document:
    """A sub-object, empty when there is none."""
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def read_jetson(document: Document, where: str) -> BenchResult:
    """The envelope of jetson-llm-benchmark (vLLM form, with ``runs``).

    Its script turns a client that failed into zeros and exit code 0, so zeros are refused, never read as a measurement.
    Its ``e2e_latency_ms_p50`` is always 0.0, a defect of the script; it becomes None here, with a warning.
    """
    items = document.get("runs")
    if not isinstance(items, list) or not items:
        raise InputFileError(
            f"{where} has no runs: it is not a result of bench_vllm.sh.",
            hint="Results of bench_llama_cpp.sh and bench_ollama.sh have no concurrency; measure with: surespec bench",
        )
    zeros = "The script writes zeros when its client failed; run the client by itself to see its error."
    config = section(document, "config")
    prompts = int(number(config, "num_prompts", where) or 0)
    warnings = [*map(str, document.get("warnings") or ()), "The file has no token counts, failures or acceptance."]
    runs: list[Run] = []
    for index, item in enumerate(items):
        at = f"{where} runs[{index}]"
        if not isinstance(item, Mapping):
            raise InputFileError(f"{at} is not an object.")
        e2e = number(item, "e2e_latency_ms_p50", at) or None
        runs.append(
            Run(
                concurrency=int(needed(item, "concurrency", at)),
                num_requests=prompts, failed=0, duration_s=0.0, output_tokens=0,
                throughput_tok_s=needed(item, "throughput_tok_s", at, zeros),
                ttft_ms_p50=needed(item, "ttft_ms_p50", at, zeros),
                ttft_ms_p99=number(item, "ttft_ms_p99", at),
                tpot_ms_p50=needed(item, "tpot_ms_p50", at, zeros), tpot_ms_p99=None,
                itl_ms_p50=number(item, "itl_ms_p50", at), itl_ms_p99=number(item, "itl_ms_p99", at),
                e2e_latency_ms_p50=e2e,
            )
        )  # fmt: skip
    if any(run.e2e_latency_ms_p50 is None for run in runs):
        warnings.append("e2e_latency_ms_p50 is 0.0, a known defect of bench_vllm.sh: read it as unknown.")
    warnings.append("bench_vllm.sh sends random tokens, which do not show how drafts are accepted on real text.")
    workload = Workload(
        prompts="random",
        num_prompts=prompts,
        output_len=int(number(config, "output_len", where) or 0),
        input_len=int(number(config, "input_len", where) or 0) or None,
    )
    return _result(where, document.get("model"), runs, warnings, "jetson-llm-benchmark", workload=workload)


def read_vllm(document: Document, where: str) -> BenchResult:
    """One result of ``vllm bench serve --save-result``; with ``--save-detailed`` its requests become traces."""
    concurrency = document.get("max_concurrency")
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InputFileError(
            f"{where} has no max_concurrency: requests were sent at a rate, not at a fixed concurrency.",
            hint="Run vllm bench serve with --max-concurrency.",
        )
    completed = int(number(document, "completed", where) or 0)
    if completed < 1:
        raise InputFileError(f"{where}: no request of this benchmark succeeded (completed is {completed}).")
    traces = _vllm_traces(document)
    warnings = [
        "vllm bench serve does not send temperature 0 unless asked; make sure both files used the same sampling."
    ]
    e2e = _vllm_e2e(document, traces, where)
    if e2e is None:
        warnings.append("E2E latency is not in the file (add e2el to --percentile-metrics).")
    p99 = number(document, "p99_ttft_ms", where)
    if p99 is None:
        warnings.append("P99 TTFT is not in the file.")
    failed = number(document, "failed", where)
    asked = number(document, "num_prompts", where)
    if failed is None:
        failed = max(0.0, (asked or completed) - completed)
    if failed:
        warnings.append(f"{int(failed)} requests failed.")
    acceptance = _vllm_acceptance(document, where)
    run = Run(
        concurrency=concurrency, num_requests=completed + int(failed), failed=int(failed),
        duration_s=number(document, "duration", where) or 0.0,
        output_tokens=int(number(document, "total_output_tokens", where) or 0),
        throughput_tok_s=needed(document, "output_throughput", where),
        ttft_ms_p50=needed(document, "median_ttft_ms", where), ttft_ms_p90=number(document, "p90_ttft_ms", where),
        ttft_ms_p99=p99,
        tpot_ms_p50=needed(document, "median_tpot_ms", where), tpot_ms_p90=number(document, "p90_tpot_ms", where),
        tpot_ms_p99=number(document, "p99_tpot_ms", where),
        itl_ms_p50=number(document, "median_itl_ms", where), itl_ms_p90=number(document, "p90_itl_ms", where),
        itl_ms_p99=number(document, "p99_itl_ms", where),
        e2e_latency_ms_p50=e2e, e2e_latency_ms_p99=number(document, "p99_e2el_ms", where),
        acceptance=acceptance, traces=traces,
    )  # fmt: skip
    return _result(where, document.get("model_id"), [run], warnings, "vllm bench serve", date=document.get("date"))


def _vllm_e2e(document: Document, traces: Sequence[Trace], where: str) -> float | None:
    median = number(document, "median_e2el_ms", where)
    if median is not None:
        return median
    known = sorted(trace.e2e_latency_ms for trace in traces if trace.e2e_latency_ms is not None)
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else None


def _vllm_traces(document: Document) -> tuple[Trace, ...]:
    """Per-request lists of ``--save-detailed`` (seconds). Nothing when they are missing or of unequal length."""
    names = ("ttfts", "itls", "output_lens", "input_lens", "errors")
    columns = [document.get(name) for name in names]
    if not all(isinstance(column, list) for column in columns):
        return ()
    rows = list(zip(*(column for column in columns if isinstance(column, list)), strict=False))
    if len({len(column) for column in columns if isinstance(column, list)}) != 1:
        return ()
    starts, texts = document.get("start_times"), document.get("generated_texts")
    starts = starts if isinstance(starts, list) and len(starts) == len(rows) else [0.0] * len(rows)
    texts = texts if isinstance(texts, list) and len(texts) == len(rows) else [""] * len(rows)
    traces: list[Trace] = []
    for index, (ttft, gaps, tokens, prompt, error) in enumerate(rows):
        ok = not error and isinstance(tokens, int) and tokens > 0
        first, rest = 1e3 * float(ttft or 0.0), 1e3 * math.fsum(gaps or ())
        traces.append(
            Trace(
                prompt_id=f"request-{index + 1}", category="vllm", start_s=float(starts[index]) - min(starts), ok=ok,
                error="" if ok else str(error).strip().split("\n")[-1][:300] or "no tokens",
                prompt_tokens=int(prompt or 0), output_tokens=tokens if ok else 0, chunks=len(gaps or ()) + 1,
                ttft_ms=first if ok else None, tpot_ms=rest / (tokens - 1) if ok and tokens > 1 else None,
                e2e_latency_ms=first + rest if ok else None, text=str(texts[index] or ""),
            )
        )  # fmt: skip
    return tuple(traces)


def _vllm_acceptance(document: Document, where: str) -> Acceptance | None:
    drafts = number(document, "spec_decode_num_drafts", where)
    drafted = number(document, "spec_decode_draft_tokens", where)
    accepted = number(document, "spec_decode_accepted_tokens", where)
    if not drafts or not drafted or accepted is None:
        return None
    rates = document.get("spec_decode_per_position_acceptance_rates")
    if not isinstance(rates, list) or not all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates):
        rates = []
    reached = [round(rate * drafts) for rate in rates]
    return _acceptance(int(drafts), int(drafted), int(accepted), reached)


def read_aiperf(document: Document, where: str) -> BenchResult:
    """AIPerf's ``profile_export_aiperf.json``. Its inter-token latency is our TPOT, its inter-chunk latency our ITL."""
    if document.get("was_cancelled"):
        raise InputFileError(f"{where} is of a cancelled AIPerf run.", hint="Run it again to the end.")
    config = section(document, "input_config")
    concurrency = _find(config, "concurrency")
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InputFileError(
            f"{where} does not say its concurrency (input_config has none).", hint="Run aiperf with --concurrency."
        )
    count = int(_aiperf(document, "request_count", "avg", where) or 0)
    if count < 1:
        raise InputFileError(f"{where}: no request of this benchmark succeeded.")
    failed = int(_aiperf(document, "error_request_count", "avg", where) or 0)
    throughput = _aiperf(document, "output_token_throughput", "avg", where)
    latencies = {
        ours: {stat: _aiperf(document, theirs, stat, where) for stat in ("p50", "p90", "p99")}
        for ours, theirs in (
            ("ttft", "time_to_first_token"),
            ("tpot", "inter_token_latency"),
            ("itl", "inter_chunk_latency"),
            ("e2e", "request_latency"),
        )
    }
    if not throughput or not latencies["ttft"]["p50"] or not latencies["tpot"]["p50"]:
        raise InputFileError(
            f"{where} lacks output_token_throughput, time_to_first_token or inter_token_latency.",
            hint="Run aiperf with --streaming on a chat or completions endpoint.",
        )
    warnings = [
        "AIPerf counts output tokens with its own tokenizer unless --use-server-token-count is given.",
        "AIPerf's inter-token latency was read as TPOT; it leaves out all tokens of the first chunk, ours only one.",
    ]
    if failed:
        warnings.append(f"{failed} requests failed.")
    ttft, tpot, itl, e2e = (latencies[name] for name in ("ttft", "tpot", "itl", "e2e"))
    run = Run(
        concurrency=concurrency, num_requests=count + failed, failed=failed,
        duration_s=(_aiperf(document, "benchmark_duration", "avg", where) or 0.0) / 1e3,
        output_tokens=int(
            _aiperf(document, "total_output_tokens", "avg", where) or _aiperf(document, "total_osl", "avg", where) or 0
        ),
        throughput_tok_s=throughput,
        ttft_ms_p50=ttft["p50"], ttft_ms_p90=ttft["p90"], ttft_ms_p99=ttft["p99"],
        tpot_ms_p50=tpot["p50"], tpot_ms_p90=tpot["p90"], tpot_ms_p99=tpot["p99"],
        itl_ms_p50=itl["p50"], itl_ms_p90=itl["p90"], itl_ms_p99=itl["p99"],
        e2e_latency_ms_p50=e2e["p50"], e2e_latency_ms_p90=e2e["p90"], e2e_latency_ms_p99=e2e["p99"],
        acceptance=_aiperf_acceptance(document, where),
    )  # fmt: skip
    names = _find(config, "model_names")
    model = names[0] if isinstance(names, list) and names else _find(config, "model")
    return _result(where, model, [run], warnings, "aiperf", date=document.get("start_time"))


def _aiperf(document: Document, metric: str, stat: str, where: str) -> float | None:
    """One statistic of a metric; times come out in milliseconds whatever unit the file states."""
    entry = section(document, metric)
    value = number(entry, stat, f"{where} {metric}")
    return None if value is None else value * _TO_MS.get(str(entry.get("unit", "")), 1.0)


def _aiperf_acceptance(document: Document, where: str) -> Acceptance | None:
    histogram = document.get("pooled_spec_decode_acceptance_histogram")
    drafted = _aiperf(document, "total_draft_tokens", "avg", where)
    if not isinstance(histogram, Mapping) or not drafted:
        return None
    try:
        counts = {int(key): int(value) for key, value in histogram.items()}
    except (TypeError, ValueError, OverflowError):
        return None
    width = max(counts, default=0)
    if width > MAX_K:
        return None
    reached = [sum(value for key, value in counts.items() if key >= position) for position in range(1, width + 1)]
    accepted = sum(key * value for key, value in counts.items())
    return _acceptance(sum(counts.values()), int(drafted), accepted, reached)


def _acceptance(drafts: int, drafted: int, accepted: int, per_position: Sequence[int]) -> Acceptance | None:
    """None for counts that are none (negative, or beyond what a counter holds)."""
    try:
        return Acceptance(drafts=drafts, drafted=drafted, accepted=accepted, accepted_per_position=tuple(per_position))
    except ValidationError:
        return None


def read_guidellm(document: Document, where: str) -> BenchResult:
    """GuideLLM's ``benchmarks.json``: its synchronous and concurrent benchmarks.

    Its ``time_per_output_token_ms`` divides by n and contains TTFT, so it is not read. Its ``inter_token_latency_ms``
    is (last token - first token) / (n - 1) for a request: our TPOT.
    """
    warnings = [
        "GuideLLM's inter_token_latency_ms was read as TPOT; its time_per_output_token_ms contains TTFT and was not.",
        "GuideLLM weighs that distribution by tokens, so long answers count more than in surespec's median.",
        "GuideLLM does not keep the gaps between chunks, so ITL is unknown.",
    ]
    runs: dict[int, Run] = {}
    model: object = None
    for index, item in enumerate(document["benchmarks"]):
        at = f"{where} benchmarks[{index}]"
        if not isinstance(item, Mapping):
            raise InputFileError(f"{at} is not an object.")
        config = section(item, "config") or section(item, "args")
        strategy = section(config, "strategy")
        kind = strategy.get("type_")
        streams = 1 if kind == "synchronous" else strategy.get("streams") if kind == "concurrent" else None
        if not isinstance(streams, int):
            warnings.append(f"benchmarks[{index}] ({kind or 'no strategy'}) has no fixed concurrency and was left out.")
            continue
        model = model or _find(section(config, "backend"), "model") or _find(section(document, "args"), "model")
        runs[streams] = _guidellm_run(item, streams, at)
    if not runs:
        raise InputFileError(
            f"{where} has no benchmark at a fixed concurrency.", hint="Run guidellm with the profile concurrent."
        )
    return _result(where, model, list(runs.values()), warnings, "guidellm")


def _guidellm_run(item: Document, streams: int, at: str) -> Run:
    metrics = section(item, "metrics")

    def stats(name: str) -> Document:
        return section(section(metrics, name), "successful")

    def at_percentile(name: str, scale: float = 1.0) -> dict[str, float | None]:
        found = {key: number(section(stats(name), "percentiles"), key, f"{at} {name}") for key in ("p50", "p90", "p99")}
        return {key: None if value is None else value * scale for key, value in found.items()}

    made = section(section(item, "scheduler_metrics"), "requests_made") or section(metrics, "request_totals")
    successful = int(number(made, "successful", at) or number(stats("output_token_count"), "count", at) or 0)
    failed = int(number(made, "errored", at) or 0)
    if successful < 1:
        raise InputFileError(f"{at}: no request succeeded.")
    ttft, tpot = at_percentile("time_to_first_token_ms"), at_percentile("inter_token_latency_ms")
    e2e = at_percentile("request_latency", 1e3)
    duration = number(item, "duration", at)
    return Run(
        concurrency=streams, num_requests=successful + failed, failed=failed, duration_s=duration or 0.0,
        output_tokens=int(number(stats("output_token_count"), "total_sum", at) or 0),
        throughput_tok_s=needed(stats("output_tokens_per_second"), "mean", f"{at} output_tokens_per_second"),
        ttft_ms_p50=ttft["p50"], ttft_ms_p90=ttft["p90"], ttft_ms_p99=ttft["p99"],
        tpot_ms_p50=tpot["p50"], tpot_ms_p90=tpot["p90"], tpot_ms_p99=tpot["p99"],
        itl_ms_p50=None, itl_ms_p99=None,
        e2e_latency_ms_p50=e2e["p50"], e2e_latency_ms_p90=e2e["p90"], e2e_latency_ms_p99=e2e["p99"],
    )  # fmt: skip


def _find(tree: object, key: str, depth: int = 6) -> Any:
    """The first value of a key anywhere in a nested object (the tools moved such settings between versions)."""
    if not isinstance(tree, Mapping) or depth == 0:
        return None
    if tree.get(key) is not None:
        return tree[key]
    for value in tree.values():
        found = _find(value, key, depth - 1)
        if found is not None:
            return found
    return None


def pooled(runs: Iterable[Run]) -> Acceptance | None:
    """The acceptance of several runs together; None when none has any."""
    accepted = [run.acceptance for run in runs if run.acceptance is not None]
    return reduce(add, accepted) if accepted else None


def _result(
    where: str,
    model: object,
    runs: Sequence[Run],
    warnings: Sequence[str],
    source: str,
    *,
    workload: Workload | None = None,
    date: object = None,
) -> BenchResult:
    return BenchResult(
        endpoint="",
        model=str(model or "unknown"),
        workload=workload,
        runs=tuple(sorted(runs, key=lambda run: run.concurrency)),
        acceptance=pooled(runs),
        warnings=tuple(f"{where}: {warning}" for warning in warnings),
        source=source,
        started_at=str(date or ""),
    )
