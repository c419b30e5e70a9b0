"""Result files in and out: surespec's own, and those of other benchmark tools.

``load_result`` finds out what a file is by its keys. ``to_jetson`` writes the envelope of the jetson-llm-benchmark
skill, so that a program which reads that skill's results can read ours.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surespec.bench.foreign import Document, pooled, read_aiperf, read_guidellm, read_jetson, read_vllm
from surespec.core import BenchResult, Run
from surespec.errors import InputFileError
from surespec.input_files import MIB, read_input
from surespec.json_text import refuse_halves

Reader = Callable[[Document, str], BenchResult]
SCHEMA = "surespec/bench/1"
_MAX_FILE_BYTES = 1024 * MIB  # traces of a long run
KNOWN_KINDS = (
    "surespec bench --json",
    "jetson-llm-benchmark (bench_vllm.sh)",
    "vllm bench serve --save-result",
    "AIPerf profile_export_aiperf.json",
    "GuideLLM benchmarks.json",
)
_AIPERF_METRICS = ("inter_token_latency", "request_latency", "output_token_throughput", "time_to_first_token")


def load_result(path: str | Path) -> BenchResult:
    """Read a benchmark result of any known tool. A file of ``vllm bench serve --append-result`` may hold several.

    Raises:
        InputFileError: no such file, not JSON (with line and column), an unknown kind (lists the known ones), or a
            result that holds no measurement.
    """
    file = Path(path)
    where = file.name
    documents = _read_documents(file)
    if not all(isinstance(document, dict) for document in documents):
        raise InputFileError(f"{path} is JSON but not an object.", hint=f"Known kinds: {'; '.join(KNOWN_KINDS)}.")
    readers = [_reader_of(document, str(path)) for document in documents]
    if len(documents) == 1:
        return readers[0](documents[0], where)
    if any(reader is not read_vllm for reader in readers):
        raise InputFileError(f"{path} holds {len(documents)} JSON documents; one was expected.")
    return _joined([read_vllm(document, f"{where} result {i + 1}") for i, document in enumerate(documents)], where)


def to_jetson(
    result: BenchResult,
    *,
    runtime: str = "vllm",
    sku: str = "unknown",
    generation: str = "unknown",
    product_line: str = "unknown",
    variant: str = "unknown",
    l4t: str = "unknown",
    container: str = "",
) -> dict[str, Any]:
    """The result as jetson-llm-benchmark writes it, keys in its order. ``container`` empty means a native client.

    ``input_len`` is the length asked for, else the median prompt length the server counted (0: not known). A value that
    was not measured is null, never 0: readers take 0 for a failed run.
    """
    workload = result.workload
    return {
        "skill": "jetson-llm-benchmark",
        "runtime": runtime,
        "model": result.model,
        "sku": sku,
        "generation": generation,
        "product_line": product_line,
        "variant": variant,
        "l4t": l4t,
        "benchmark_mode": "container" if container else "native",
        "container": container,
        "config": {
            "input_len": (workload.input_len if workload else None) or _median_prompt(result),
            "output_len": workload.output_len if workload else 0,
            "num_prompts": workload.num_prompts if workload else max(run.num_requests for run in result.runs),
        },
        "runs": [_jetson_run(run) for run in result.runs],
        "warnings": list(result.warnings),
    }


def _jetson_run(run: Run) -> dict[str, Any]:
    def rounded(value: float | None) -> float | None:
        return round(value, 2) if value else None

    return {
        "concurrency": run.concurrency,
        "ttft_ms_p50": rounded(run.ttft_ms_p50),
        "ttft_ms_p99": rounded(run.ttft_ms_p99),
        "itl_ms_p50": rounded(run.itl_ms_p50),
        "itl_ms_p99": rounded(run.itl_ms_p99),
        "tpot_ms_p50": rounded(run.tpot_ms_p50),
        "throughput_tok_s": rounded(run.throughput_tok_s),
        "e2e_latency_ms_p50": rounded(run.e2e_latency_ms_p50),
    }


def _median_prompt(result: BenchResult) -> int:
    lengths = [trace.prompt_tokens for run in result.runs for trace in run.traces if trace.ok and trace.prompt_tokens]
    return round(statistics.median(lengths)) if lengths else 0


def _read_documents(file: Path) -> list[Any]:
    """The JSON documents of a file, one after another."""
    if not file.exists():
        raise InputFileError(f"There is no result file {file}.")
    raw = read_input(file, what="a result file", most_bytes=_MAX_FILE_BYTES)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise InputFileError(f"{file} is not a text file (byte {err.start}).") from err
    decoder, position, documents = json.JSONDecoder(), 0, []
    text = text.strip()
    while position < len(text):
        try:
            document, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as err:
            cut = " It may have been cut off." if err.pos >= len(text.rstrip()) - 1 else ""
            raise InputFileError(
                f"{file} is not JSON: {err.msg} at line {err.lineno} column {err.colno}.{cut}",
                hint=f"Known kinds: {'; '.join(KNOWN_KINDS)}.",
            ) from err
        except RecursionError as err:
            raise InputFileError(f"{file} is nested too deeply.") from err
        except ValueError as err:
            raise InputFileError(f"{file} is not JSON: a number in it has too many digits.") from err
        documents.append(document)
        while position < len(text) and text[position].isspace():
            position += 1
    if not documents:
        raise InputFileError(f"{file} is empty.")
    try:
        refuse_halves(text, documents)
    except UnicodeEncodeError as err:
        raise InputFileError(f"{file} holds half of a surrogate pair, which is no text.") from err
    return documents


def _reader_of(document: Document, where: str) -> Reader:
    schema = document.get("schema")
    if schema == SCHEMA:
        return _read_own
    if isinstance(schema, str) and schema.startswith("surespec/"):
        wanted = "of another version" if schema.startswith("surespec/bench/") else "not a benchmark result"
        raise InputFileError(f"{where} has the schema {schema}, which is {wanted}.", hint=f"Needed: {SCHEMA}.")
    if document.get("skill") == "jetson-llm-benchmark" or {"benchmark_mode", "runs"} <= document.keys():
        return read_jetson
    if "output_throughput" in document and {"model_id", "backend", "endpoint_type"} & document.keys():
        return read_vllm
    if "aiperf_version" in document or any(
        isinstance(document.get(name), dict) and "unit" in document[name] for name in _AIPERF_METRICS
    ):
        return read_aiperf
    if isinstance(document.get("benchmarks"), list) and document["benchmarks"]:
        return read_guidellm
    raise InputFileError(f"{where} is of no known kind.", hint=f"Known kinds: {'; '.join(KNOWN_KINDS)}.")


def _read_own(document: Document, where: str) -> BenchResult:
    try:
        result = BenchResult.model_validate(document)
    except ValidationError as err:
        first = err.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the document"
        raise InputFileError(f"{where}: {field}: {first['msg'].lower()}.") from err
    except (TypeError, ValueError, ZeroDivisionError) as err:
        raise InputFileError(f"{where}: a count of its acceptance is not a number.") from err
    if not result.runs:
        raise InputFileError(f"{where} has no runs.")
    return result


def _joined(results: list[BenchResult], where: str) -> BenchResult:
    """Several results of one file as one; of two at the same concurrency the later stays, with a warning."""
    runs: dict[int, Run] = {}
    warnings = list(dict.fromkeys(warning for result in results for warning in result.warnings))
    for result in results:
        for run in result.runs:
            if run.concurrency in runs:
                warnings.append(f"{where} has concurrency {run.concurrency} more than once; the last one was read.")
            runs[run.concurrency] = run
    ordered = tuple(runs[level] for level in sorted(runs))
    return results[-1].model_copy(update={"runs": ordered, "acceptance": pooled(ordered), "warnings": tuple(warnings)})
