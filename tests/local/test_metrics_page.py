"""``/metrics``: vLLM's names and labels, and numbers that add up."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from surespec.local.engine import EngineCounters
from surespec.local.metrics import ServerMetrics

COUNTERS = EngineCounters(
    running=2,
    waiting=3,
    kv_usage=0.25,
    drafts=10,
    drafted=30,
    accepted=12,
    per_pos=(8, 3, 1),
    prompt_tokens=100,
    generation_tokens=50,
)
LABELS = {"model_name": "m", "engine": "0"}


def samples(metrics: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and the labels beyond the two that all have."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in LABELS))
            found[sample.name, rest] = sample.value
    return found


def test_the_engines_counters_under_vllms_names() -> None:
    page = samples(ServerMetrics("m", lambda: COUNTERS, speculating=True))
    assert page["vllm:num_requests_running", ()] == 2
    assert page["vllm:num_requests_waiting", ()] == 3
    assert page["vllm:kv_cache_usage_perc", ()] == 0.25
    assert page["vllm:prompt_tokens_total", ()] == 100
    assert page["vllm:generation_tokens_total", ()] == 50
    assert page["vllm:spec_decode_num_drafts_total", ()] == 10
    assert page["vllm:spec_decode_num_draft_tokens_total", ()] == 30
    assert page["vllm:spec_decode_num_accepted_tokens_total", ()] == 12
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [page[name, (("position", str(i)),)] for i in range(3)] == [8, 3, 1]


def test_without_speculation_there_is_nothing_about_it() -> None:
    page = samples(ServerMetrics("m", lambda: COUNTERS, speculating=False))
    assert not [name for name, _ in page if "spec_decode" in name]


def test_latencies() -> None:
    metrics = ServerMetrics("m", lambda: COUNTERS, speculating=False)
    metrics.step(0.5, None)
    metrics.step(0.7, 0.2)
    metrics.step(0.9, 0.2)
    metrics.finished("length", 5, 0.5, 0.9)
    page = samples(metrics)
    assert page["vllm:time_to_first_token_seconds_sum", ()] == pytest.approx(0.5)
    assert page["vllm:inter_token_latency_seconds_count", ()] == 2
    assert page["vllm:request_time_per_output_token_seconds_sum", ()] == pytest.approx(0.1)
    assert page["vllm:e2e_request_latency_seconds_sum", ()] == pytest.approx(0.9)
    reasons = {r: page["vllm:request_success_total", (("finished_reason", r),)] for r in ("stop", "length", "abort")}
    assert reasons == {"stop": 0, "length": 1, "abort": 0}


def test_an_aborted_request_is_no_latency() -> None:
    metrics = ServerMetrics("m", lambda: COUNTERS, speculating=False)
    metrics.finished("abort", 5, 0.5, 0.9)
    metrics.finished("stop", 1, 0.5, 0.5)
    page = samples(metrics)
    assert page["vllm:e2e_request_latency_seconds_count", ()] == 1
    assert page["vllm:request_time_per_output_token_seconds_count", ()] == 0
    assert page["vllm:request_success_total", (("finished_reason", "abort"),)] == 1
