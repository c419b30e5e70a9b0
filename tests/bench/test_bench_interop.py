"""Result files of other tools: definitions, defects, and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surespec.bench.interop import KNOWN_KINDS, load_result, to_jetson
from surespec.core import Acceptance, BenchResult, Run, Trace, Workload
from surespec.errors import InputFileError

DATA = Path(__file__).parent.parent / "data" / "bench"


def run(concurrency: int = 1, **more: Any) -> Run:
    fields: dict[str, Any] = {
        "concurrency": concurrency, "num_requests": 2, "failed": 0, "duration_s": 2.0, "output_tokens": 100,
        "throughput_tok_s": 50.0, "ttft_ms_p50": 20.0, "ttft_ms_p99": 30.0, "tpot_ms_p50": 19.004, "tpot_ms_p99": 22.0,
        "itl_ms_p50": 18.0, "itl_ms_p99": 25.0, "e2e_latency_ms_p50": 1000.0,
    }  # fmt: skip
    return Run(**{**fields, **more})


def save(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def changed(name: str, **changes: Any) -> dict[str, Any]:
    document = json.loads((DATA / name).read_text(encoding="utf-8"))
    return {**document, **changes}


def test_own_results_come_back_equal(tmp_path: Path) -> None:
    acceptance = Acceptance(drafts=10, drafted=30, accepted=12, accepted_per_position=(7, 3, 2))
    trace = Trace(prompt_id="chat-01", category="chat", start_s=0.0, ok=True, output_tokens=3, text="grüße")
    result = BenchResult(
        endpoint="http://h:1", model="m", runs=(run(acceptance=acceptance, traces=(trace,)), run(8)),
        acceptance=acceptance, workload=Workload(prompts="mixed", num_prompts=2, output_len=64), warnings=("w",),
    )  # fmt: skip
    assert load_result(save(tmp_path, result.document())) == result


def test_jetson_values_and_its_known_defect() -> None:
    result = load_result(DATA / "jetson.json")
    assert [r.concurrency for r in result.runs] == [1, 8]
    assert (result.runs[0].throughput_tok_s, result.runs[0].tpot_ms_p50, result.runs[0].ttft_ms_p99) == (
        25.6,
        37.5,
        260.1,
    )
    assert result.runs[0].num_requests == 50 and result.source == "jetson-llm-benchmark"
    assert result.workload is not None and (result.workload.input_len, result.workload.output_len) == (2048, 128)
    text = " ".join(result.warnings)
    assert "known defect" in text and "nvpmodel" in text and "random tokens" in text


def test_jetson_zeros_of_a_failed_client_are_refused_with_the_reason() -> None:
    with pytest.raises(InputFileError, match="throughput_tok_s is 0") as caught:
        load_result(DATA / "jetson-zeros.json")
    assert "client failed" in caught.value.hint and caught.value.exit_code == 2


def test_jetson_result_of_a_sibling_script_without_runs(tmp_path: Path) -> None:
    document = changed("jetson.json", runtime="ollama", metrics={"throughput_tok_s": 20.0})
    del document["runs"]
    with pytest.raises(InputFileError, match="no runs"):
        load_result(save(tmp_path, document))


def test_vllm_values() -> None:
    result = load_result(DATA / "vllm.json")
    (one,) = result.runs
    assert (one.concurrency, one.num_requests, one.failed, one.output_tokens) == (1, 4, 1, 300)
    assert (one.throughput_tok_s, one.tpot_ms_p50, one.itl_ms_p50, one.ttft_ms_p99) == (30.0, 30.0, 68.0, 110.0)
    assert one.acceptance == Acceptance(drafts=100, drafted=300, accepted=120, accepted_per_position=(60, 40, 20))
    assert result.acceptance == one.acceptance and result.model == "Qwen/Qwen3-8B"
    text = " ".join(result.warnings)
    assert "temperature" in text and "E2E latency is not in the file" in text and "1 requests failed" in text


def test_vllm_detailed_lists_become_traces() -> None:
    (one,) = load_result(DATA / "vllm-detailed.json").runs
    first, second, failed = one.traces
    assert (first.ttft_ms, first.output_tokens, first.chunks, first.text) == (100.0, 5, 3, "one")
    assert first.tpot_ms == pytest.approx(120.0 / 4) and first.e2e_latency_ms == pytest.approx(220.0)
    assert second.start_s == 0.5 and second.tpot_ms == pytest.approx(400.0 / 8)
    assert not failed.ok and failed.error == "ServerDisconnectedError" and failed.ttft_ms is None
    assert one.e2e_latency_ms_p50 == pytest.approx((220.0 + 600.0) / 2)


def test_vllm_appended_results_are_joined(tmp_path: Path) -> None:
    documents = [changed("vllm.json"), changed("vllm.json", max_concurrency=8, output_throughput=100.0)]
    result = load_result(save(tmp_path, "\n".join(json.dumps(document) for document in documents)))
    assert [(r.concurrency, r.throughput_tok_s) for r in result.runs] == [(1, 30.0), (8, 100.0)]
    assert result.acceptance is not None and result.acceptance.drafts == 200
    twice = [*documents, changed("vllm.json", output_throughput=31.0)]
    result = load_result(save(tmp_path, "\n".join(json.dumps(document) for document in twice)))
    assert result.runs[0].throughput_tok_s == 31.0 and "more than once" in " ".join(result.warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_concurrency": None}, "no max_concurrency"),
        ({"completed": 0}, "no request of this benchmark succeeded"),
        ({"output_throughput": 0.0}, "output_throughput is 0"),
        ({"median_tpot_ms": None}, "median_tpot_ms is missing"),
        ({"median_tpot_ms": "fast"}, "must be a number"),
        ({"median_ttft_ms": float("nan")}, "median_ttft_ms is missing"),
    ],
)
def test_vllm_files_that_measure_nothing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        load_result(save(tmp_path, changed("vllm.json", **changes)))


def test_aiperf_values_and_definitions() -> None:
    result = load_result(DATA / "aiperf.json")
    (one,) = result.runs
    assert (one.concurrency, one.num_requests, one.failed, one.output_tokens) == (1, 21, 1, 2560)
    assert (one.tpot_ms_p50, one.itl_ms_p50, one.e2e_latency_ms_p90, one.duration_s) == (15.0, 39.0, 2200.0, 40.0)
    assert one.acceptance == Acceptance(drafts=1000, drafted=3000, accepted=1500, accepted_per_position=(700, 500, 300))
    assert result.model == "meta-llama/Llama-3.1-8B-Instruct" and "read as TPOT" in " ".join(result.warnings)


def test_aiperf_units_are_honoured_and_missing_concurrency_is_refused(tmp_path: Path) -> None:
    seconds = changed("aiperf.json", time_to_first_token={"unit": "sec", "p50": 0.2, "p99": 0.3})
    assert load_result(save(tmp_path, seconds)).runs[0].ttft_ms_p50 == 200.0
    with pytest.raises(InputFileError, match="does not say its concurrency"):
        load_result(save(tmp_path, changed("aiperf.json", input_config={})))
    with pytest.raises(InputFileError, match="cancelled"):
        load_result(save(tmp_path, changed("aiperf.json", was_cancelled=True)))


def test_guidellm_tpot_is_not_the_one_that_contains_ttft() -> None:
    result = load_result(DATA / "guidellm.json")
    assert [(r.concurrency, r.throughput_tok_s) for r in result.runs] == [(1, 62.5), (8, 300.0)]
    one = result.runs[0]
    assert one.tpot_ms_p50 == 15.0 and one.itl_ms_p50 is None and one.e2e_latency_ms_p50 == 2000.0
    assert (one.num_requests, one.failed, one.output_tokens) == (22, 2, 2560) and result.model == "Qwen/Qwen3-4B"
    text = " ".join(result.warnings)
    assert "contains TTFT" in text and "throughput) has no fixed concurrency" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("   \n", "is empty"),
        ('{"schema": "surespec/bench/1", "runs": [', "line 1 column .* cut off"),
        ("{\n 'a': 1}", "line 2 column 2"),
        ("[1, 2]", "not an object"),
        ('{"hello": 1}', "no known kind"),
        ('{"schema": "surespec/bench/9"}', "another version"),
        ('{"schema": "surespec/judge/1"}', "not a benchmark result"),
        ('{"schema": "surespec/bench/1", "endpoint": "e", "model": "m", "runs": []}', "no runs"),
        ('{"schema": "surespec/bench/1", "endpoint": "e", "model": "m"}', "runs: field required"),
        ('{"schema": "surespec/bench/1", "endpoint": "e", "model": "m", "runs": [], "extra": 1}', "extra"),
        ('{"a": 1}\n{"b": 2}', "no known kind"),
        ("[" * 100_000, "nested too deeply|not JSON"),
    ],
)
def test_files_that_are_no_result(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        load_result(save(tmp_path, text))


def test_an_unknown_kind_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputFileError) as caught:
        load_result(save(tmp_path, {"hello": 1}))
    assert all(kind in caught.value.hint for kind in KNOWN_KINDS)


def test_missing_directory_and_binary(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no result file"):
        load_result(tmp_path / "none.json")
    with pytest.raises(InputFileError, match="is a directory"):
        load_result(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\x80\x81\xff")
    with pytest.raises(InputFileError, match="not a text file"):
        load_result(tmp_path / "b.json")


def test_a_broken_acceptance_is_an_input_error(tmp_path: Path) -> None:
    document = BenchResult(endpoint="e", model="m", runs=(run(),)).document()
    document["acceptance"] = {"drafts": "x", "drafted": 2, "accepted": 1}
    with pytest.raises(InputFileError):
        load_result(save(tmp_path, document))


def test_to_jetson_is_exactly_the_envelope() -> None:
    traces = tuple(
        Trace(prompt_id=f"p{i}", category="chat", start_s=0.0, ok=True, prompt_tokens=n)
        for i, n in enumerate((10, 30, 90))
    )
    result = BenchResult(
        endpoint="e", model="m", runs=(run(traces=traces), run(8, itl_ms_p50=None)), warnings=("w",),
        workload=Workload(prompts="mixed", num_prompts=3, output_len=64),
    )  # fmt: skip
    envelope = to_jetson(result)
    sample = json.loads((DATA / "jetson.json").read_text(encoding="utf-8"))
    assert list(envelope) == list(sample)
    assert list(envelope["config"]) == list(sample["config"]) and list(envelope["runs"][0]) == list(sample["runs"][0])
    assert envelope["config"] == {"input_len": 30, "output_len": 64, "num_prompts": 3}
    assert envelope["runs"][0]["tpot_ms_p50"] == 19.0 and envelope["runs"][1]["itl_ms_p50"] is None
    assert {envelope[k] for k in ("sku", "generation", "product_line", "variant", "l4t")} == {"unknown"}
    assert (envelope["benchmark_mode"], envelope["container"], envelope["warnings"]) == ("native", "", ["w"])
    assert to_jetson(result, container="img")["benchmark_mode"] == "container"


def test_what_we_write_as_jetson_we_read_back(tmp_path: Path) -> None:
    result = BenchResult(endpoint="e", model="m", runs=(run(), run(8)))
    back = load_result(save(tmp_path, to_jetson(result, sku="thor")))
    assert [(r.concurrency, r.throughput_tok_s) for r in back.runs] == [(1, 50.0), (8, 50.0)]
    assert not any("defect" in warning for warning in back.warnings)
