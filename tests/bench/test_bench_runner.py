"""bench(): checks before measuring, counts, failures, acceptance, hooks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from surespec.bench.client import Reply
from surespec.bench.runner import BenchOptions, Progress, bench, bench_async, summarise
from surespec.core import Acceptance, BenchResult, Trace
from surespec.errors import EndpointError, Interrupted, UsageError


def options(server: Any, **more: Any) -> BenchOptions:
    return BenchOptions(**{"endpoint": server.url, "concurrency": (1,), "prompts": "quick", "num_prompts": 5, **more})


async def test_counts_come_from_usage_and_warm_up_is_dropped(server: Any, kit: Any) -> None:
    server.answers = [kit.good(tokens=9)]
    result = await bench_async(options(server, concurrency=(1, 2)))
    assert [run.concurrency for run in result.runs] == [1, 2]
    for run in result.runs:
        assert (run.num_requests, run.failed, run.output_tokens) == (5, 0, 45)
        assert run.tokens_per_chunk == 4.5
        assert run.tpot_ms_p50 is not None and run.ttft_ms_p50 > 0
        assert [trace.prompt_id for trace in run.traces] == [trace.prompt_id for trace in result.runs[0].traces]
    measured = {trace.prompt_id for trace in result.runs[0].traces}
    assert len(measured) == 5
    assert len(server.requests) == 1 + (2 + 5) + (2 + 5)  # check, then warm-up and run at each concurrency
    assert result.workload is not None and result.workload.num_prompts == 5
    assert BenchResult.model_validate(json.loads(json.dumps(result.document()))) == result


async def test_warm_up_prompts_are_never_measured_ones(server: Any) -> None:
    await bench_async(options(server, num_prompts=18))
    sent = [json.dumps(body["messages"]) for body in server.requests]
    assert not set(sent[:3]) & set(sent[3:])


async def test_warm_up_can_be_left_out(server: Any) -> None:
    await bench_async(options(server, warmup=False))
    assert len(server.requests) == 1 + 5


async def test_workers_keep_the_concurrency(server: Any, kit: Any) -> None:
    async def slow(request: Any) -> Any:
        await asyncio.sleep(0.05)
        return await kit.stream(request, kit.good())

    server.answers = [slow]
    await bench_async(options(server, concurrency=(3,), num_prompts=9))
    assert server.most_in_flight == 3


async def test_failures_are_counted_and_never_averaged_in(server: Any, kit: Any) -> None:
    server.answers = [
        kit.good(4), kit.good(4), kit.status(500, {"error": {"message": "out of memory"}}), kit.good(4), kit.good(4)
    ]  # fmt: skip
    result = await bench_async(options(server, warmup=False, num_prompts=4))
    run = result.runs[0]
    assert (run.num_requests, run.failed, run.output_tokens) == (4, 1, 12)
    assert any("1 of 4 requests failed" in warning and "out of memory" in warning for warning in result.warnings)
    failed = [trace for trace in run.traces if not trace.ok]
    assert len(failed) == 1 and failed[0].ttft_ms is None and failed[0].tpot_ms is None
    assert sum(stats.num_requests for stats in run.by_category.values()) == 3


async def test_no_success_is_an_endpoint_error(server: Any, kit: Any) -> None:
    server.answers = [kit.good(), kit.status(500, {"error": "engine died"})]
    with pytest.raises(EndpointError, match=r"None of .* engine died"):
        await bench_async(options(server, warmup=False, num_prompts=30, prompts="mixed"))
    assert len(server.requests) < 30  # a dead server is not asked 30 times


async def test_check_request_must_succeed(server: Any, kit: Any) -> None:
    server.answers = [kit.sse('data: {"error": {"message": "Synthetic acceptance not supported"}}', done=False)]
    with pytest.raises(EndpointError, match=r"first streamed request.*Synthetic acceptance"):
        await bench_async(options(server))


async def test_a_server_without_usage_is_refused_before_measuring(server: Any, kit: Any) -> None:
    server.answers = [kit.sse(kit.delta("hi", "stop"))]
    with pytest.raises(EndpointError, match="no usage") as caught:
        await bench_async(options(server))
    assert "include_usage" in caught.value.hint
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models_html": "<html>welcome</html>"}, "a web page"),
        ({"models_html": "<html>no</html>", "models_status": 404}, "HTTP 404"),
        ({"models": {"hello": 1}}, "not as an OpenAI-compatible"),
        ({"models": [1, 2]}, "not as an OpenAI-compatible"),
        ({"models": {"data": []}}, "lists no model"),
        ({"models_status": 401}, "refuses the request"),
    ],
)
async def test_endpoints_that_are_something_else(server: Any, change: dict[str, Any], message: str) -> None:
    for key, value in change.items():
        setattr(server, key, value)
    with pytest.raises(EndpointError, match=message) as caught:
        await bench_async(options(server))
    assert caught.value.hint


async def test_endpoint_down_names_the_url_and_curl(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(EndpointError) as caught:
        await bench_async(BenchOptions(endpoint=url))
    assert caught.value.message == f"{url} cannot be reached: connection refused."
    assert "curl" in caught.value.hint and caught.value.exit_code == 1


async def test_first_of_several_models_with_a_warning(server: Any) -> None:
    server.models = {"data": [{"id": "a"}, {"id": "b"}]}
    result = await bench_async(options(server))
    assert result.model == "a" and any("2 models" in warning for warning in result.warnings)
    assert {body["model"] for body in server.requests} == {"a"}


async def test_acceptance_from_counters_by_difference(server: Any) -> None:
    page = (
        'vllm:spec_decode_num_drafts_total{{engine="0"}} {0}\n'
        'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {1}\n'
        'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2}\n'
    )
    server.metrics = [page.format(10, 30, 5), page.format(20, 60, 20)]
    run = (await bench_async(options(server))).runs[0]
    assert run.acceptance is not None
    assert (run.acceptance.drafts, run.acceptance.drafted, run.acceptance.accepted) == (10, 30, 15)


async def test_acceptance_per_request_is_preferred_and_split_by_category(server: Any, kit: Any) -> None:
    record = {"acceptance_histogram": [1, 2, 3], "num_draft_tokens": 12, "num_spec_steps": 6, "num_spec_tokens": 2}
    answer = kit.sse(kit.delta("hi", "stop"), kit.usage(4, metrics={"speculative_decoding": record}))
    server.answers = [answer]
    server.metrics = ["vllm:spec_decode_num_drafts_total 5\nvllm:spec_decode_num_draft_tokens_total 5\n"]
    result = await bench_async(options(server, num_prompts=2))
    one = Acceptance(drafts=6, drafted=12, accepted=8, accepted_per_position=(5, 3))
    assert result.runs[0].acceptance == one + one
    assert {name: stats.acceptance for name, stats in result.runs[0].by_category.items()} == {"chat": one, "code": one}
    assert result.acceptance == one + one


async def test_hooks_see_every_measured_request(server: Any) -> None:
    steps: list[Progress] = []
    traces: list[tuple[int, Trace]] = []
    await bench_async(options(server), steps.append, lambda level, trace: traces.append((level, trace)))
    assert [(step.done, step.total) for step in steps if step.phase == "run"] == [(i, 5) for i in range(1, 6)]
    assert [step.done for step in steps if step.phase == "warmup"] == [1, 2]
    assert list(dict.fromkeys(step.stage for step in steps)) == ["checking", "warming up", "measuring"]
    assert len(traces) == 5 and {level for level, _ in traces} == {1}


def test_keyboard_interrupt_becomes_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> BenchResult:
        raise KeyboardInterrupt

    monkeypatch.setattr("surespec.bench.runner.bench_async", interrupted)
    with pytest.raises(Interrupted):
        bench(BenchOptions(endpoint="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    "bad",
    [
        {"concurrency": ()},
        {"concurrency": (0,)},
        {"concurrency": (2, 2)},
        {"output_len": 1},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"timeout_s": 0.0},
        {"num_prompts": 0},
        {"input_len": 0},
        {"endpoint": "ftp://host"},
        {"endpoint": ""},
        {"endpoint": "http://host:notaport"},
    ],
)
async def test_unusable_options_are_usage_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        await bench_async(BenchOptions(**{"endpoint": "http://127.0.0.1:9", **bad}))


def _trace(index: int, start: float, ms: float, tokens: int, ok: bool = True) -> Reply:
    return Reply(
        Trace(
            prompt_id=f"p{index}", category="chat", start_s=start, ok=ok, output_tokens=tokens, chunks=2,
            ttft_ms=10.0 if ok else None, tpot_ms=5.0 if ok else None, e2e_latency_ms=ms if ok else None,
        ),
        (1.0, 3.0),
    )  # fmt: skip


def test_throughput_is_tokens_over_the_measured_window() -> None:
    replies = [_trace(0, 0.0, 1000.0, 10), _trace(1, 1.0, 3000.0, 30), _trace(2, 0.0, 0.0, 99, ok=False)]
    run = summarise(2, replies)
    assert run.duration_s == 4.0 and run.throughput_tok_s == 10.0 and run.failed == 1
    assert run.ttft_ms_p50 == 10.0 and run.itl_ms_p50 == 2.0 and run.e2e_latency_ms_p50 == 2000.0
    assert run.tokens_per_chunk == 10.0


async def test_the_metrics_page_may_be_elsewhere(server: Any) -> None:
    counts = "vllm:spec_decode_num_draft_tokens_total {0}\nvllm:spec_decode_num_accepted_tokens_total {0}\n"
    pages = [f"vllm:spec_decode_num_drafts_total {n}\n{counts.format(n)}" for n in (1, 2)]
    server.metrics = list(pages)
    here = await bench_async(options(server, num_prompts=1))
    server.metrics = list(pages)
    elsewhere = await bench_async(options(server, num_prompts=1, metrics_endpoints=("http://127.0.0.1:9",)))
    assert here.acceptance is not None and elsewhere.acceptance is None
    with pytest.raises(UsageError):
        await bench_async(options(server, num_prompts=1, metrics_endpoints=("ftp://x",)))
