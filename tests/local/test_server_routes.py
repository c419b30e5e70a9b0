"""The server over real sockets, on a toy model with n-gram speculation: routes, refusals, streams, hang-ups."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import AppInThread, FaultyEngine, wait_for
from surespec._version import __version__
from surespec.local import app as app_module
from surespec.local import guards as guards_module
from surespec.local.engine import LocalEngine, build_engine
from surespec.local.tokenizer import Tokenizer
from toy import make_llama

Json = dict[str, Any]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
COPY = "one two three one two three one two three one two"


@pytest.fixture(scope="module")
def engine_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, Tokenizer]]:
    folder: Path = make_llama(tmp_path_factory.mktemp("toy"))
    engine, tokenizer = build_engine(
        folder, precision="fp32", speculative_config=NGRAM, max_num_seqs=4, kv_cache_tokens=1024
    )
    yield engine, tokenizer
    engine.close()


@pytest.fixture(scope="module")
def server(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> Iterator[AppInThread]:
    with AppInThread(*engine_and_tokenizer) as running:
        yield running


def call(
    server: AppInThread, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Json, http.client.HTTPMessage]:
    """One request; the answer as status, JSON and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else {"text": text.decode()}, answer.headers


def complete(server: AppInThread, **fields: Any) -> Json:
    """A greedy completion that must succeed."""
    body = {"prompt": COPY, "temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
    status, answer, _ = call(server, "POST", "/v1/completions", body)
    assert status == 200, answer
    return answer


def stream(server: AppInThread, path: str, **fields: Any) -> list[Json | str]:
    """All events of a streamed greedy request."""
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True} | fields
    status, answer, headers = call(server, "POST", path, body)
    assert status == 200 and headers.get_content_type() == "text/event-stream", answer
    events = answer["text"].split("\n\n") if "text" in answer else []
    assert events[-1] == "" and all(e.startswith("data: ") for e in events[:-1])
    return [e[6:] if e == "data: [DONE]" else json.loads(e[6:]) for e in events[:-1]]


def refused(status: int, answer: Json) -> Json:
    """The error of an answer that must be an envelope."""
    assert status >= 400 and set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    error: Json = answer["error"]
    return error


def idle(server: AppInThread) -> bool:
    counters = server.api.engine.counters()
    return counters.running == counters.waiting == 0 and server.api.flights.idle


# ---- what the server is


def test_who_answers(server: AppInThread) -> None:
    assert call(server, "GET", "/version")[1] == {"version": __version__, "engine": "surespec-local"}
    assert call(server, "GET", "/health")[0] == 200
    [card] = call(server, "GET", "/v1/models")[1]["data"]
    assert (card["id"], card["max_model_len"]) == ("toy", 512)
    assert call(server, "GET", "/v1/models/toy")[1] == card


def test_an_unknown_route_or_method_is_an_envelope(server: AppInThread) -> None:
    assert "Not Found" in refused(*call(server, "GET", "/v2/models")[:2])["message"]
    assert call(server, "GET", "/v1/completions")[0] == 405


def test_tokenize(server: AppInThread) -> None:
    tokens = call(server, "POST", "/tokenize", {"prompt": COPY})[1]
    assert tokens["count"] == len(tokens["tokens"]) > 5
    chat = call(server, "POST", "/tokenize", {"messages": [{"role": "user", "content": COPY}]})[1]
    assert chat["count"] > tokens["count"]


# ---- completions


def test_the_same_text_streamed_and_whole(server: AppInThread) -> None:
    whole = complete(server)
    events = stream(server, "/v1/completions", prompt=COPY, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    *chunks, last = [e for e in events if isinstance(e, dict)]
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 12
    assert last["metrics"] == whole["metrics"]
    spec = whole["metrics"]["speculative_decoding"]
    assert spec["num_spec_tokens"] == 3 and len(spec["acceptance_histogram"]) == 4
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert len(chunks) == 12 - spec["num_accepted_draft_tokens"]  # one chunk a step, several tokens in some


def test_prompts_as_token_ids_and_several_at_once(server: AppInThread) -> None:
    ids = call(server, "POST", "/tokenize", {"prompt": COPY})[1]["tokens"]
    text = complete(server)["choices"][0]["text"]
    assert complete(server, prompt=ids)["choices"][0]["text"] == text
    several = complete(server, prompt=[COPY, "something else", COPY], n=2)
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [c["text"] for c in several["choices"]].count(text) == 4
    assert several["usage"]["completion_tokens"] == 6 * 12 and "metrics" not in several


def test_seeded_choices_differ_and_repeat(server: AppInThread) -> None:
    def texts() -> list[str]:
        return [c["text"] for c in complete(server, temperature=1.5, seed=-7, n=3)["choices"]]

    assert texts() == texts() and len(set(texts())) > 1


def test_stop_strings_cut_text_and_count(server: AppInThread) -> None:
    whole = complete(server, max_tokens=24)["choices"][0]["text"]
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    answer = complete(server, max_tokens=24, stop=["never there", stop])
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    assert 0 < answer["usage"]["completion_tokens"] < 24
    assert "speculative_decoding" in answer["metrics"]
    events = stream(server, "/v1/completions", prompt=COPY, max_tokens=24, stop=stop)
    chunks = [e["choices"][0] for e in events if isinstance(e, dict)]
    assert "".join(c["text"] for c in chunks) == expected and chunks[-1]["finish_reason"] == "stop"
    wait_for(lambda: idle(server), "the slots of stopped requests")


def test_completion_logprobs(server: AppInThread) -> None:
    choice = complete(server, logprobs=2)["choices"][0]
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["text_offset"]) == 12
    assert all(1 <= len(top) <= 2 and max(top.values()) <= 0 for top in shown["top_logprobs"])
    best = [max(top.values()) for top in shown["top_logprobs"]]
    assert shown["token_logprobs"] == pytest.approx(best)  # greedy takes the likeliest


# ---- refusals


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "a", "model": "gpt-5"}, 404, "'gpt-5' does not exist here; this server has 'toy'"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": []}, 400, "empty list"),
        ({"prompt": [[]]}, 400, "prompt is empty"),
        ({"prompt": [320]}, 400, "vocabulary ends at 319"),
        ({"prompt": "word " * 600}, 400, "do not fit into the model's context length of 512"),
        ({"prompt": "a", "max_tokens": 512}, 400, "512 output tokens do not fit"),
        ({"prompt": "a", "echo": True}, 400, "echo is not supported"),
        ({"prompt": "a", "n": 128, "max_tokens": 1, "stop": 3}, 400, "stop is not valid"),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b"{not json", 400, "not JSON"),
        (b"[]", 400, "JSON object, not a list"),
        (b'{"prompt": "' + b"x" * 9 * 2**20 + b'"}', 413, "larger than 8 MiB"),
    ],
)
def test_refusals(server: AppInThread, body: Any, status: int, words: str) -> None:
    got, answer, _ = call(server, "POST", "/v1/completions", body)
    assert got == status and words in refused(got, answer)["message"]
    assert idle(server)


def test_streamed_requests_are_refused_with_a_status_too(server: AppInThread) -> None:
    status, answer, _ = call(server, "POST", "/v1/completions", {"prompt": "", "stream": True})
    assert status == 400 and "empty" in refused(status, answer)["message"]


def test_another_content_type_is_refused(server: AppInThread) -> None:
    """A form of a foreign web page can post plain text, but not JSON."""
    status, answer, _ = call(server, "POST", "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in refused(status, answer)["message"]


def test_a_request_larger_than_the_queue_is_refused(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> None:
    with AppInThread(*engine_and_tokenizer, max_queued=1) as server:
        status, answer, _ = call(server, "POST", "/v1/completions", {"prompt": "a", "n": 6})
        assert status == 400 and "at most 5 at once" in refused(status, answer)["message"]


def test_a_full_queue_says_come_back_later(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> None:
    engine = FaultyEngine([[5]], max_num_seqs=1)
    with AppInThread(engine, engine_and_tokenizer[1], max_queued=0) as server:
        first = open_stream(server)
        status, answer, headers = call(server, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 503 and headers["Retry-After"].isdigit()
        assert "too many requests" in refused(status, answer)["message"]
        first.close()
        wait_for(lambda: idle(server), "the slot of the closed stream")


# ---- the API key


def test_the_api_key_guards_the_model(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> None:
    with AppInThread(*engine_and_tokenizer, api_key="s3cret") as server:
        for path in ("/v1/models", "/v1/models/toy"):
            for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
                status, answer, _ = call(server, "GET", path, headers=headers)
                assert status == 401 and refused(status, answer)["code"] == "invalid_api_key"
            assert call(server, "GET", path, headers={"Authorization": "Bearer s3cret"})[0] == 200
        assert call(server, "POST", "/v1/completions", {"prompt": "a"})[0] == 401
        assert call(server, "GET", "/health")[0] == call(server, "GET", "/metrics")[0] == 200


# ---- clients that hang up, engines that fail


def open_stream(server: AppInThread) -> socket.socket:
    """A raw connection with a stream that has begun and will not end by itself."""
    body = json.dumps({"prompt": COPY, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    return connection


def test_a_client_that_hangs_up_frees_its_slot(server: AppInThread) -> None:
    clients = [open_stream(server) for _ in range(4)]
    for client in clients:
        client.close()
    wait_for(lambda: idle(server), "the slots of clients that hung up")


def test_a_client_that_hangs_up_before_an_answer_frees_its_slot(
    engine_and_tokenizer: tuple[LocalEngine, Tokenizer],
) -> None:
    engine = FaultyEngine([])
    with AppInThread(engine, engine_and_tokenizer[1]) as server:
        body = b'{"prompt": "a"}'
        client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
        )
        client.sendall(head + body)
        wait_for(lambda: engine.counters().running == 1, "the request")
        client.close()
        wait_for(lambda: idle(server), "the slot of the client that hung up")


def test_a_client_that_never_reads_loses_its_slot(
    engine_and_tokenizer: tuple[LocalEngine, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "WRITE_TIMEOUT_S", 0.2)
    engine = FaultyEngine([[100]] * 50_000)  # more than the sockets between can hold
    with AppInThread(engine, engine_and_tokenizer[1]) as server:
        client = open_stream(server)
        wait_for(lambda: idle(server), "the slot of the client that does not read")
        client.close()


def test_a_body_that_never_comes_is_given_up(
    engine_and_tokenizer: tuple[LocalEngine, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards_module, "BODY_TIMEOUT_S", 0.1)
    with AppInThread(FaultyEngine([]), engine_and_tokenizer[1]) as server:
        client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
        client.sendall(head + b'{"prompt"')
        assert client.recv(1000).startswith(b"HTTP/1.1 408")
        client.close()


def test_deeply_nested_tools_are_refused(server: AppInThread) -> None:
    nested = b"[" * 900 + b"]" * 900
    body = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"a": ' + nested + b"}]}"
    assert call(server, "POST", "/v1/chat/completions", body)[0] in (200, 400)


def test_an_engine_that_dies_midway_ends_the_stream_with_an_error(
    engine_and_tokenizer: tuple[LocalEngine, Tokenizer],
) -> None:
    with AppInThread(FaultyEngine([[100], [101]], "die"), engine_and_tokenizer[1]) as server:
        events = stream(server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        assert isinstance(events[-2], dict) and events[-1] == "[DONE]"
        assert "The embedded engine failed" in events[-2]["error"]["message"]
        assert call(server, "GET", "/health")[0] == 503
        status, answer, _ = call(server, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 503 and "failed" in refused(status, answer)["message"]


def test_a_failure_nobody_expected_shows_and_logs_no_content(
    engine_and_tokenizer: tuple[LocalEngine, Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    with AppInThread(FaultyEngine([], "crash"), engine_and_tokenizer[1]) as server:
        status, answer, _ = call(server, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 500 and "secret" not in refused(status, answer)["message"]
    assert "KeyError" in caplog.text and "secret" not in caplog.text


def test_stopping_ends_open_streams_with_an_error(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> None:
    from surespec.errors import EngineError

    with AppInThread(FaultyEngine([[100]]), engine_and_tokenizer[1]) as server:
        client = open_stream(server)
        server.api.stopping = True
        assert call(server, "GET", "/health")[0] == 503
        status, answer, _ = call(server, "POST", "/v1/completions", {"prompt": "a"})
        assert status == 503 and "is stopping" in refused(status, answer)["message"]

        async def end() -> None:
            server.api.flights.end_all(EngineError("The server was stopped."))

        server.call(end())
        received = b""
        while b"[DONE]" not in received and (piece := client.recv(4096)):
            received += piece
        assert b'"error":{"message":"The server was stopped."' in received
        client.close()


# ---- speculation while running


def test_k_changes_while_running(server: AppInThread) -> None:
    route, text = "/surespec/speculation", complete(server)["choices"][0]["text"]
    start = {"method": "ngram", "num_speculative_tokens": 3, "max_num_speculative_tokens": 3}
    assert call(server, "GET", route)[1] == start
    assert call(server, "POST", route, {"num_speculative_tokens": 0})[1] == start | {"num_speculative_tokens": 0}
    off = complete(server)
    assert off["choices"][0]["text"] == text
    assert off["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert call(server, "POST", route, {"num_speculative_tokens": 3})[1] == start
    assert complete(server)["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("body", [{"num_speculative_tokens": n} for n in (4, -1, True, 1.5, "2")] + [{}, {"k": 1}])
def test_a_wrong_k_is_refused(server: AppInThread, body: Json) -> None:
    assert call(server, "POST", "/surespec/speculation", body)[0] == 400
    assert server.api.engine.num_speculative_tokens == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:3000"},
        {"Host": "attacker.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"X-Forwarded-For": "10.0.0.1"},
    ],
)
def test_web_pages_and_proxies_cannot_change_k(server: AppInThread, headers: dict[str, str]) -> None:
    for method, body in (("GET", None), ("POST", {"num_speculative_tokens": 0})):
        status, answer, _ = call(server, method, "/surespec/speculation", body, headers)
        assert status == 403 and refused(status, answer)["type"] == "permission_error"
    assert server.api.engine.num_speculative_tokens == 3


def test_without_speculation_there_is_no_k_to_change(engine_and_tokenizer: tuple[LocalEngine, Tokenizer]) -> None:
    with AppInThread(FaultyEngine([]), engine_and_tokenizer[1]) as server:
        status, answer, _ = call(server, "POST", "/surespec/speculation", {"num_speculative_tokens": 0})
        assert status == 400 and "without a speculative config" in refused(status, answer)["message"]


# ---- metrics


def test_metrics_follow_the_requests(server: AppInThread) -> None:
    def value(name: str) -> float:
        page = call(server, "GET", "/metrics")[1]["text"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))

    names = ("generation_tokens_total", "prompt_tokens_total", "spec_decode_num_drafts_total")
    before = {n: value(f"vllm:{n}") for n in names}
    seen = value("vllm:e2e_request_latency_seconds_count")
    answer = complete(server)
    after = {n: value(f"vllm:{n}") - before[n] for n in names}
    assert after["generation_tokens_total"] == 12
    assert after["prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert after["spec_decode_num_drafts_total"] == answer["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert value("vllm:e2e_request_latency_seconds_count") == seen + 1
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == 0
