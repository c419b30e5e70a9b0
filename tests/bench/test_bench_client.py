"""The streaming client against streams as they really come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from surespec.bench.client import Decoding, Reply, StreamClient
from surespec.bench.stream import parse_acceptance
from surespec.bench.workload import Prompt
from surespec.core import Acceptance, Trace
from surespec.endpoint_url import normalise_endpoint, shown

PROMPT = Prompt(id="p", category="chat", messages=({"role": "user", "content": "hi"},))


async def reply(server: Any, prompt: Prompt = PROMPT, **more: Any) -> Reply:
    async with StreamClient(server.url, model="toy", **more) as client:
        return await client.send(prompt)


async def trace(server: Any, **more: Any) -> Trace:
    return (await reply(server, **more)).trace


@pytest.mark.parametrize("piece", [None, 1, 3, 50])
@pytest.mark.parametrize("eol", ["\n", "\r\n", "\r"])
async def test_splits_comments_and_line_ends(server: Any, kit: Any, piece: int | None, eol: str) -> None:
    server.piece = piece
    server.answers = [
        kit.sse(
            ": keep-alive", kit.delta("", role="assistant"), "", kit.delta("grüße "), ": ping",
            kit.delta("日本", "stop"), kit.usage(11), eol=eol,
        )
    ]  # fmt: skip
    got = await reply(server)
    assert got.trace.ok and got.trace.text == "grüße 日本"
    assert (got.trace.output_tokens, got.trace.prompt_tokens, got.trace.chunks) == (11, 7, 2)
    assert got.trace.finish_reason == "stop" and len(got.gaps_ms) == 1


async def test_tokens_are_counted_by_usage_not_by_chunks(server: Any, kit: Any) -> None:
    server.answers = [kit.sse(kit.delta("five tokens in one chunk", "length"), kit.usage(128))]
    got = await trace(server)
    assert got.output_tokens == 128 and got.chunks == 1


async def test_role_and_empty_first_chunks_are_no_first_token(server: Any, kit: Any) -> None:
    async def handler(request: Any) -> Any:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(kit.sse(kit.delta("", role="assistant"), kit.delta(""), kit.delta(None), done=False))
        await asyncio.sleep(0.2)
        await response.write(kit.sse(kit.delta("a"), kit.delta("b", "stop"), kit.usage(2)))
        return response

    server.answers = [handler]
    got = await trace(server)
    assert got.chunks == 2 and got.ttft_ms is not None and got.ttft_ms >= 150


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reasoning_content": "think"}, "think"),
        ({"reasoning": "think"}, "think"),
        ({"reasoning": "think", "reasoning_content": "think"}, "think"),
        ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}, "f{}"),
        ({"tool_calls": [{"index": 0, "function": {"arguments": ""}}]}, ""),
    ],
)
async def test_reasoning_and_tool_calls_are_tokens(server: Any, kit: Any, fields: dict[str, Any], text: str) -> None:
    server.answers = [kit.sse(kit.delta(None, None, **fields), kit.delta("x", "stop"), kit.usage(5))]
    got = await trace(server)
    assert got.ok and got.text == text + "x" and got.chunks == 2


async def test_done_missing_is_fine_when_the_answer_ended(server: Any, kit: Any) -> None:
    server.answers = [kit.sse(kit.delta("a", "stop"), kit.usage(2), done=False)]
    assert (await trace(server)).ok


async def test_usage_in_every_chunk_takes_the_last(server: Any, kit: Any) -> None:
    one = {**kit.delta("a"), "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    two = {**kit.delta("b", "stop"), "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    server.answers = [kit.sse(one, two)]
    got = await trace(server)
    assert (got.output_tokens, got.prompt_tokens) == (2, 3)


async def test_llama_cpp_timings_count_when_usage_is_missing(server: Any, kit: Any) -> None:
    last = {**kit.delta(None, "stop"), "timings": {"prompt_n": 9, "predicted_n": 6}}
    server.answers = [kit.sse(kit.delta("abc"), last)]
    got = await trace(server)
    assert got.ok and (got.output_tokens, got.prompt_tokens) == (6, 9)


async def test_an_end_token_alone_is_one_token(server: Any, kit: Any) -> None:
    server.answers = [kit.sse(kit.delta(""), kit.delta("", "stop"), kit.usage(1))]
    got = await trace(server)
    assert got.ok and got.output_tokens == 1 and got.tpot_ms is None and got.ttft_ms is not None


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("error in 200", "inside the stream: boom"),
        ("named error event", "inside the stream: boom"),
        ("error object", "inside the stream: boom"),
        ("not json", "not JSON"),
        ("json list", "not a JSON object"),
        ("cut", "connection broke after the answer had begun"),
        ("ends early", "ended before the answer was complete"),
        ("no usage", "no usage"),
        ("no content", "streamed no content"),
        ("no tokens", "no tokens"),
        ("aborted", "gave the request up"),
        ("html", "text/html instead of a stream"),
        ("empty", "ended before"),
        ("http 500", "HTTP 500: boom"),
        ("http 404 text", "HTTP 404"),
        ("json answer", "application/json instead of a stream"),
    ],
)
async def test_what_makes_a_request_fail(server: Any, kit: Any, case: str, reason: str) -> None:
    start = kit.sse(kit.delta("a"), done=False)
    server.answers = [
        {
            "error in 200": kit.sse(kit.delta("a"), {"error": {"message": "boom", "code": 500}}),
            "named error event": kit.sse('event: error\ndata: {"message": "boom"}'),
            "error object": kit.sse({"object": "error", "message": "boom"}),
            "not json": start + b"data: {oops\n\n",
            "json list": start + b"data: [1]\n\n",
            "cut": kit.cut(start),
            "ends early": start,
            "no usage": kit.sse(kit.delta("a", "stop")),
            "no content": kit.sse(kit.delta("", "stop"), kit.usage(9)),
            "no tokens": kit.sse(kit.delta("", "stop"), kit.usage(0)),
            "empty": b": nothing\n\n",
            "aborted": kit.sse(kit.delta("a", "abort"), kit.usage(3)),
            "html": kit.html("<html>sign in</html>"),
            "http 500": kit.status(500, {"error": {"message": "boom"}}),
            "http 404 text": kit.status(404, "no such path"),
            "json answer": kit.status(200, {"choices": [{"message": {"content": "hi"}}]}),
        }[case]
    ]
    got = await trace(server)
    assert not got.ok and reason in got.error
    assert got.ttft_ms is None and got.tpot_ms is None and got.e2e_latency_ms is None and got.output_tokens == 0


async def test_silence_between_chunks_times_out(server: Any, kit: Any) -> None:
    release = asyncio.Event()
    server.answers = [kit.stalls(kit.sse(kit.delta("a"), done=False), release)]
    got = await trace(server, idle_timeout_s=0.2)
    release.set()
    assert not got.ok and "timed out after 1 chunks" in got.error


async def test_the_whole_request_has_a_time_limit(server: Any, kit: Any) -> None:
    release = asyncio.Event()
    server.answers = [kit.stalls(b": wait\n\n", release)]
    got = await trace(server, timeout_s=0.2)
    release.set()
    assert not got.ok and "timed out before the first token" in got.error


async def test_an_open_connection_after_done_does_not_hang(server: Any, kit: Any) -> None:
    release = asyncio.Event()
    server.answers = [kit.stalls(kit.good(), release)]
    got = await asyncio.wait_for(trace(server), timeout=20)
    release.set()
    assert got.ok


async def test_the_request_that_is_sent(server: Any) -> None:
    decoding = Decoding(output_len=33, temperature=0.5, top_p=0.9, seed=4)
    await reply(server, decoding=decoding)
    assert server.requests[0] == {
        "model": "toy", "max_tokens": 33, "temperature": 0.5, "top_p": 0.9, "seed": 4, "stream": True,
        "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}],
    }  # fmt: skip
    assert server.paths == ["/v1/chat/completions"]
    await reply(server, decoding=Decoding(ignore_eos=True, seed=None))
    assert server.requests[1]["ignore_eos"] is True and "seed" not in server.requests[1]


async def test_prompts_own_limit_and_extra_fields(server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    await reply(server, Prompt("p", "tools", PROMPT.messages, max_tokens=5, extra={"tools": tools}))
    assert server.requests[0]["max_tokens"] == 5 and server.requests[0]["tools"] == tools


async def test_completions_api_sends_text(server: Any, kit: Any) -> None:
    chunk = {"object": "text_completion", "choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}
    server.answers = [kit.sse(chunk, kit.usage(3))]
    got = await reply(server, Prompt("p", "chat", PROMPT.messages, text="once upon"), api="completions")
    assert got.trace.ok and got.trace.text == "abc"
    assert server.paths == ["/v1/completions"] and server.requests[0]["prompt"] == "once upon"
    assert "messages" not in server.requests[0]


async def test_refused_fields_are_left_out_once_and_remembered(server: Any, kit: Any) -> None:
    server.answers = [kit.refuses("seed", "stream_options")]
    async with StreamClient(server.url, model="toy") as client:
        assert (await client.send(PROMPT)).trace.ok
        assert set(client.dropped) == {"seed", "stream_options"}
        assert (await client.send(PROMPT)).trace.ok
    assert len(server.requests) == 3
    assert "seed" not in server.requests[2] and "stream_options" not in server.requests[2]


async def test_a_refusal_that_names_no_field_is_tried_bare_but_not_remembered_if_it_stays(
    server: Any, kit: Any
) -> None:
    refusal = kit.status(400, {"error": {"message": "maximum context length is 64 tokens"}})
    server.answers = [refusal, refusal, kit.good(), refusal, kit.good()]
    async with StreamClient(server.url, model="toy") as client:
        got = (await client.send(PROMPT)).trace
        assert not got.ok and "context length" in got.error and client.dropped == ()
        assert (await client.send(PROMPT)).trace.ok
        assert not (await client.send(PROMPT)).trace.ok  # the server is known to understand our fields: no second try
    assert len(server.requests) == 4


async def test_the_key_is_sent_and_never_shown(server: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.answers = [kit.status(401, {"error": {"message": "wrong key sk-secret"}})]
    got = await trace(server)
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in got.error and "***" in got.error
    monkeypatch.setenv("SURESPEC_API_KEY", "own")
    await trace(server)
    assert server.headers[1]["Authorization"] == "Bearer own"


async def test_connection_is_reused(server: Any) -> None:
    ports: set[int] = set()
    original = server.answers[0]

    async def handler(request: Any) -> Any:
        from aiohttp import web

        ports.add(request.transport.get_extra_info("peername")[1])
        return web.Response(body=original, content_type="text/event-stream")

    server.answers = [handler]
    async with StreamClient(server.url, model="toy") as client:
        for _ in range(3):
            assert (await client.send(PROMPT)).trace.ok
    assert len(ports) == 1


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/api/v1", "https://h/api"),
        ("http://u:p@h:1", "http://h:1"),
        ("http://[::1]:8000/v1?x=1#y", "http://[::1]:8000"),
    ],
)
def test_endpoints_are_normalised(given: str, root: str) -> None:
    assert shown(normalise_endpoint(given)) == root


def test_acceptance_record_of_vllm() -> None:
    want = Acceptance(drafts=10, drafted=30, accepted=13, accepted_per_position=(7, 4, 2))
    record = {"num_draft_tokens": 30, "num_spec_tokens": 3, "mean_acceptance_length": 2.3}
    assert parse_acceptance({**record, "acceptance_histogram": [3, 3, 2, 2]}) == want
    assert parse_acceptance({**record, "acceptance_histogram": {"0": 3, "1": 3, "2": 2, "3": 2}}) == want
    assert want.per_position == (0.7, 0.4, 0.2) and want.length == 2.3


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"acceptance_histogram": [1]},
        {"acceptance_histogram": "x", "num_draft_tokens": 3},
        {"acceptance_histogram": [0, 9], "num_draft_tokens": 3},
        {"acceptance_histogram": [0, -9], "num_draft_tokens": 3},
        {"acceptance_histogram": {"a": 1}, "num_draft_tokens": 3},
        {"acceptance_histogram": {"99999999": 0}, "num_draft_tokens": 3},
    ],
)
def test_a_record_that_contradicts_itself_is_none(record: dict[str, Any]) -> None:
    assert parse_acceptance(record) is None
