"""What a measurement reads: metrics pages, streams, prompts, result files, bundles, captured machines, engines' words."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz_harness import Case, Surface, expect
from fuzz_mutations import NASTY_BYTES, damaged, dump, json_texts, repeated, trees
from hypothesis import strategies as st
from rich.console import Console

from surespec.apply import decision, undo
from surespec.bench.client import StreamClient
from surespec.bench.interop import load_result, to_jetson
from surespec.bench.scrape import difference, parse_metrics, summed, with_server_info
from surespec.bench.sse import EventParser
from surespec.bench.stream import StreamFailure, StreamState, error_text
from surespec.bench.workload import Prompt, load_workload
from surespec.core import BASELINE, Acceptance, Arm, Judgement, Launch, Run, Trace
from surespec.engines.containers import _container, _documents
from surespec.engines.failures import classify
from surespec.engines.log_tail import redact
from surespec.errors import SurespecError
from surespec.judge import judge_results
from surespec.probe import find_device
from surespec.report import build_view, print_terminal, render_csv
from surespec.rules import policy
from surespec.scheduling import schedule_of
from surespec.store import Bundle

DATA = Path(__file__).parents[1] / "data"


def say(judgement: Judgement) -> str:
    """The verdict as the terminal shows it."""
    file = io.TextIOWrapper(io.BytesIO(), "utf-8")
    print_terminal(judgement, Console(file=file, width=100))
    file.flush()
    return ""


# -- metrics ---------------------------------------------------------------------------------------------------------------

_pages = [
    p.read_bytes()
    for p in (*sorted((DATA / "bench").glob("metrics-*.txt")), *sorted((DATA / "engines").glob("*metrics*.txt")))
]
_lines = sorted({line for page in _pages for line in page.split(b"\n") if b"spec" in line or b"sglang" in line})
_values = st.sampled_from(
    (b"NaN", b"+Inf", b"-Inf", b"1e400", b"-1", b"0", b"1e308", b"9" * 400, b"x", b"", b"1 1", b"1_0", "९".encode())
)
_labels = st.sampled_from(
    (
        b"",
        b'{position="0"}',
        b'{position="99999999999999999999"}',
        '{position="²"}'.encode(),
        b'{position="0",a="\\',
        b'{a="}',
        b"{",
        b'{position="-1"}',
        b'{position=""}',
    )
)
_names = st.sampled_from((
    b"vllm:spec_decode_num_drafts_total", b"vllm:spec_decode_num_draft_tokens_total", b"vllm:spec_decode_num_accepted_tokens_total",
    b"vllm:spec_decode_num_accepted_tokens_per_pos_total", b"sglang:spec_verify_calls_total", b"sglang:generation_tokens_total",
    b"sglang:num_requests_total", b"sglang:spec_num_draft_tokens", b"sglang:spec_accept_length", b"trtllm_spec_decode_drafted_tokens_total",
    b"trtllm_spec_decode_accepted_tokens_total", b"llamacpp:spec_decode_num_drafts",
))  # fmt: skip
_made = st.lists(st.builds(lambda n, l, v: n + l + b" " + v, _names, _labels, _values), max_size=8).map(b"\n".join)
_iterations = json_texts((
    [{"iter": 3, "specDecodingStats": {"numDraftTokens": 12, "numAcceptedTokens": 4, "numRequestsWithDraftTokens": 2}, "attentionDpRank": 0}],
    ["{\"iter\": 1, \"specDecodingStats\": {\"numDraftTokens\": 1}}"],
))  # fmt: skip
_page = st.one_of(
    damaged(st.sampled_from(_pages)), st.lists(st.sampled_from(_lines), max_size=8).map(b"\n".join), _made, _made, _iterations,
    st.binary(max_size=60),
)  # fmt: skip
_info = trees(({"internal_states": [{"avg_spec_accept_length": 2.5}], "speculative_num_draft_tokens": 4},))


def _check_metrics(case: Case, _folder: Path) -> None:
    before, after, info = case
    first = parse_metrics(before.decode("utf-8", "replace"))
    second = parse_metrics(after.decode("utf-8", "replace"))
    if isinstance(info, dict):
        second = with_server_info(second, info)
    for pair in ((first, second), (None, second), (first, None), (first, summed([first, second]))):
        found, notes = difference(*pair)
        expect(all(notes), "an empty note")
        if found is not None:
            json.dumps(found.model_dump(mode="json"), allow_nan=False)


# -- streams ---------------------------------------------------------------------------------------------------------------

_chunk = {
    "id": "c",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": "a", "reasoning_content": None}, "finish_reason": None}],
}
_last = {
    "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "text": "x"}], "usage": {"completion_tokens": 4, "prompt_tokens": 3},
    "timings": {"predicted_n": 4, "prompt_n": 2},
    "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 2, 3], "num_draft_tokens": 9, "num_spec_tokens": 2}},
}  # fmt: skip
_error = {"error": {"message": "no", "code": 400}, "object": "error"}
_call = {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]}
_event = trees((_chunk, _last, _error, _call), most=2).map(
    lambda t: b"data: " + dump(t).encode("utf-8", "surrogatepass") + b"\n\n"
)
_mark = st.sampled_from((
    b"data: [DONE]\n\n", b": ping\n\n", b"event: error\n", b"data\n\n", b"data:\n\n", b"\r", b"\n", b"\r\n\r\n", b"data: {}\n\n", b"id: 1\n", b"retry: 9\n",
    b"data: [1]\n\n", b"data: {\"a\":\ndata: 1}\n\n", b"data: " + b"[" * 9000 + b"\n\n", b"data: " + b"9" * 6000 + b"\n\n", b"\xef\xbb\xbf", b"data: \xff\n\n",
))  # fmt: skip
_body = st.one_of(
    st.lists(_event | _mark, max_size=8).map(b"".join), st.lists(_event | _mark, max_size=5).map(b"".join),
    damaged(st.lists(_event, min_size=1, max_size=3).map(b"".join)), st.binary(max_size=100),
)  # fmt: skip
_streams = st.tuples(_body, st.lists(st.integers(1, 60), max_size=5))


def pieces(body: bytes, sizes: list[int]) -> list[bytes]:
    """The body cut at these lengths, again and again."""
    out, at, turn = [], 0, 0
    while at < len(body):
        size = sizes[turn % len(sizes)] if sizes else len(body)
        out.append(body[at : at + size])
        at, turn = at + size, turn + 1
    return out


def _check_stream(case: Case, _folder: Path) -> None:
    """The reader and what it makes of the events; how the body was cut makes no difference."""
    body, sizes = case
    whole, cut = EventParser(), EventParser()
    events = [*whole.feed(body), *whole.close()]
    again = [e for piece in pieces(body, sizes) for e in cut.feed(piece)] + cut.close()
    expect(events == again, "another cut gives other events")
    state = StreamState(sent_at=0.0)
    try:
        for number, event in enumerate(events):
            state.take(event.data, event.name, 1.0 + number)
            if state.done:
                break
        state.check()
    except StreamFailure as failure:
        expect(str(failure).strip(), "a failure without words")
    error_text(body.decode("utf-8", "replace"))


def _check_long_stream(body: Case, _folder: Path) -> None:
    _check_stream((body, [65536]), _folder)


_PROMPT = Prompt("p", "chat", ({"role": "user", "content": "x"},))


def _check_socket(case: Case, _folder: Path) -> None:
    """The whole client against a server that answers these bytes, headers and all."""
    head, body, sizes = case

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces(head + body, [*sizes, 400]):
                writer.write(piece)
                await writer.drain()
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, StreamClient(f"http://127.0.0.1:{port}", model="m", timeout_s=2) as client:
            reply = await client.send(_PROMPT)
            expect(reply.trace.ok or reply.trace.error, "a failed request without a reason")
            expect(
                len(reply.trace.error) <= 400 and reply.trace.error.isprintable(),
                "a reason with control characters",
                reply.trace.error[:80],
            )
            json.dumps(reply.trace.model_dump(mode="json"), allow_nan=False)
            await client.models()

    asyncio.run(run())


_heads = st.sampled_from((
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n", b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99999999999\r\n\r\n", b"HTTP/1.1 999 \x1b[2J\r\n\r\n", b"", b"HTTP/1.1 204\r\n\r\n",
    b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:1/\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: \xff;charset=x\r\nConnection: close\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 9000,
    b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\n\r\n", b"HTTP/1.1 302 F\r\nLocation: \xff\xfe://\r\n\r\n",
))  # fmt: skip
_models_body = json_texts(
    ({"object": "list", "data": [{"id": "toy", "max_model_len": 512, "owned_by": "vllm", "root": "a/b"}]},)
)
_sockets = st.tuples(_heads, _body | _models_body, st.lists(st.integers(1, 60), max_size=3))


# -- prompts ---------------------------------------------------------------------------------------------------------------

_prompt_lines = trees((
    {"prompt": "Name three rivers.", "id": "a", "category": "x", "max_tokens": 5, "expected": "y"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}], "tools": [{"type": "function"}], "stop": ["a"]},
    {"messages": [{"role": "assistant", "tool_calls": []}], "temperature": 1, "model": "m"},
)).map(lambda t: dump(t).encode("utf-8", "surrogatepass"))  # fmt: skip
_prompt_files = st.one_of(
    st.lists(_prompt_lines, max_size=4).map(b"\n".join), damaged(st.lists(_prompt_lines, max_size=3).map(b"\r\n".join)), st.binary(max_size=60),
    st.lists(st.sampled_from(NASTY_BYTES), max_size=3).map(b"\n".join),
)  # fmt: skip


def _check_prompts(data: Case, folder: Path) -> None:
    path = folder / "mine.jsonl"
    path.write_bytes(data)
    work = load_workload(path, 5)
    client = StreamClient("http://127.0.0.1:9")
    for prompt in work.prompts:
        expect(prompt.as_text(), "an empty prompt")
        json.dumps(client.payload(prompt), ensure_ascii=False).encode()
        Trace(prompt_id=prompt.id, category=prompt.category, start_s=0, ok=False).model_dump_json()


# -- result files ------------------------------------------------------------------------------------------------------------


def _own_result() -> dict[str, Any]:
    acceptance = Acceptance(drafts=10, drafted=30, accepted=12, accepted_per_position=(7, 3, 2))
    trace = Trace(
        prompt_id="chat-01",
        category="chat",
        start_s=0.0,
        ok=True,
        output_tokens=3,
        ttft_ms=1.0,
        tpot_ms=9.0,
        e2e_latency_ms=20.0,
        text="grüße",
        acceptance=acceptance,
    )
    run = Run(
        concurrency=1, num_requests=2, failed=0, duration_s=2.0, output_tokens=100, throughput_tok_s=50.0, ttft_ms_p50=20.0, ttft_ms_p99=30.0,
        tpot_ms_p50=19.0, tpot_ms_p99=22.0, itl_ms_p50=18.0, itl_ms_p99=25.0, e2e_latency_ms_p50=1000.0, acceptance=acceptance, traces=(trace,),
    )  # fmt: skip
    from surespec.core import BenchResult

    return BenchResult(
        endpoint="http://h:1", model="m", runs=(run, run.model_copy(update={"concurrency": 8})), acceptance=acceptance
    ).document()


_results = [json.loads(p.read_text()) for p in sorted((DATA / "bench").glob("*.json"))]
_results += [_own_result()] * 3
_result_files = st.one_of(json_texts(_results), json_texts(_results), json_texts([_own_result()], most=2),
                          st.lists(json_texts(_results[-2:] + [r for r in _results if "model_id" in r]), max_size=3).map(b"\n".join))  # fmt: skip
_whole = dump(_own_result()).encode()


def _check_results(case: Case, folder: Path) -> None:
    """Both files of ``surespec judge``, and everything that is printed of them."""
    base, cand = folder / "base.json", folder / "cand.json"
    base.write_bytes(case[0])
    cand.write_bytes(case[1] or _whole)
    first = load_result(base)
    json.dumps(first.document(), allow_nan=False, ensure_ascii=False).encode()
    json.dumps(to_jetson(first), allow_nan=False, ensure_ascii=False).encode()
    judgement = judge_results(first, load_result(cand), policy("jetson"), names=("base.json", "cand.json"))
    json.dumps(judgement.document("judge"), allow_nan=False, ensure_ascii=False).encode()
    say(judgement)


# -- bundles -----------------------------------------------------------------------------------------------------------------


@cache
def bundle_files() -> dict[str, bytes]:
    """The files of a small finished run, by their path in it."""
    with TemporaryDirectory() as name:
        bundle = Bundle.create(
            Path(name) / "run",
            {
                "options": {"model": "m", "concurrency": [1], "recipe": "run.sh", "policy": "jetson"},
                "machine": {"cpu": {"model": "x"}, "memory_gb": 8},
                "command": "surespec tune",
            },
        )
        ngram = Arm(
            name="ngram-k5",
            method="ngram",
            num_speculative_tokens=5,
            speculative_config={"method": "ngram", "num_speculative_tokens": 5},
        )
        bundle.write_arms((BASELINE, ngram), {"ngram-k5": "predicted"})
        launches = []
        for index, arm in enumerate(("baseline", "ngram-k5")):
            acceptance = (
                Acceptance(drafts=10, drafted=50, accepted=20, accepted_per_position=(8, 5, 4, 2, 1)) if index else None
            )
            traces = tuple(
                Trace(
                    prompt_id=f"p{i}",
                    category="chat",
                    start_s=i,
                    ok=True,
                    output_tokens=10,
                    chunks=5,
                    ttft_ms=5,
                    tpot_ms=20.0 - 5 * index,
                    e2e_latency_ms=200,
                    text="a",
                    acceptance=acceptance,
                )
                for i in range(3)
            )
            run = Run(concurrency=1, num_requests=3, failed=0, duration_s=1, output_tokens=30, throughput_tok_s=30.0 + 10 * index, ttft_ms_p50=5, ttft_ms_p99=5, tpot_ms_p50=20 - 5 * index,
                      tpot_ms_p99=20, itl_ms_p50=1, itl_ms_p99=1, e2e_latency_ms_p50=200, acceptance=acceptance, traces=traces)  # fmt: skip
            launches.append(
                Launch(
                    index=index,
                    arm=arm,
                    status="ok",
                    started_at=f"2026-01-01T00:0{index}:00+00:00",
                    runs=(run,),
                    command="surespec serve",
                )
            )
            bundle.write_launch(launches[-1])
        bundle.event("note", text="hello")
        bundle.write_judgement(
            Judgement(
                verdict="keep",
                policy="jetson",
                why="A. B.",
                arm="ngram-k5",
                speculative_config=ngram.speculative_config,
                launches=tuple(launches),
            )
        )
        journal = {
            "schema": "surespec/apply/1",
            "recipe": "/nonexistent/run.sh",
            "original_sha256": "0" * 64,
            "applied_sha256": "1" * 64,
        }
        files = {str(p.relative_to(bundle.path)): p.read_bytes() for p in sorted(bundle.path.rglob("*")) if p.is_file()}
        return {**files, "recipe/journal.json": json.dumps(journal).encode(), "recipe/original": b"vllm serve a\n"}


@st.composite
def bundles(draw: st.DrawFn) -> tuple[str, bytes | None]:
    """Which file is damaged, and how (None: it is gone)."""
    files = bundle_files()
    name = draw(st.sampled_from(sorted(files)))
    data = files[name]
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in data.splitlines()]
        line = dump(draw(trees(lines))).encode("utf-8", "surrogatepass") + b"\n"
        data = draw(st.sampled_from((line + b"".join(data.splitlines(True)[1:]), line, data)))
    elif name.endswith(".json"):
        data = draw(json_texts([json.loads(data)]))
    return name, draw(st.one_of(st.just(data), st.just(data), damaged(st.just(data)), st.none()))


def _check_bundle(case: Case, folder: Path) -> None:
    """Everything a command does with a finished run: read, report, schedule, apply, undo. Each may refuse by itself."""
    name, damage = case
    for path, data in bundle_files().items():
        content = damage if path == name else data
        if content is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    refusals: list[SurespecError] = []

    def may_refuse(work: Any) -> Any:
        try:
            return work()
        except SurespecError as error:
            refusals.append(error)
            return None

    def report() -> None:
        bundle = Bundle.open(folder)
        launches = bundle.launches(with_traces=True)
        judgement = bundle.judgement()
        view = build_view(
            judgement,
            launches,
            manifest=bundle.manifest,
            arms=bundle.arms(),
            notes=bundle.arm_notes(),
            problems=bundle.problems,
        )
        expect(view.badge, "no badge")
        render_csv(launches).encode("utf-8")
        if judgement is not None:
            json.dumps(judgement.document("tune"), allow_nan=False, ensure_ascii=False).encode()
            say(judgement)
        bundle.events()
        bundle.next_index()

    may_refuse(report)
    found = may_refuse(lambda: schedule_of(folder, "vllm"))
    if found is not None:
        json.dumps(found.document(), allow_nan=False)
    may_refuse(lambda: decision(folder).changed_since())
    may_refuse(lambda: undo(folder))
    if refusals:
        raise refusals[0]


# -- machines and engines ------------------------------------------------------------------------------------------------------

_boards = DATA / "plan" / "boards"
_board_files = [
    (board.name, str(p.relative_to(board)), p.read_bytes())
    for board in sorted(_boards.iterdir()) for p in sorted(board.rglob("*")) if p.is_file()
]  # fmt: skip


@st.composite
def machines(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A captured machine with one damaged file."""
    board, path, data = draw(st.sampled_from(_board_files))
    return board, path, draw(damaged(st.just(data)) | st.binary(max_size=40))


def _check_machine(case: Case, folder: Path) -> None:
    board, path, data = case
    for name, file, content in _board_files:
        if name == board:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(data if file == path else content)
    device = find_device(root=folder)
    expect(device.memory_bytes >= 0, "less than no memory")
    json.dumps(device.model_dump(mode="json"), allow_nan=False)


_inspect = [{
    "Id": "ab" * 32, "Name": "/llm", "Path": "vllm", "Args": ["serve", "a/b", "--port", "8001"], "ImageName": "x",
    "Config": {"Image": "vllm/vllm-openai:v1", "Labels": {"io.kubernetes.pod.name": "p"}, "Cmd": ["a"]},
    "HostConfig": {"PortBindings": {"8001/tcp": [{"HostPort": "80"}]}, "NetworkMode": "host", "AutoRemove": True},
}]  # fmt: skip
_logs = [p.read_bytes() for p in sorted((DATA / "engines").glob("*.log"))]
_said = st.tuples(
    json_texts((_inspect,)),
    damaged(st.sampled_from(_logs))
    | repeated([b"hf_token=", b"a", b"Error: ", b"\x1b[1m", b"(pid=1) ", b"--api-key "], 100_000),
)


def _check_said(case: Case, _folder: Path) -> None:
    """What docker says of its containers, and the log of an engine that failed."""
    for entry in _documents(case[0].decode("utf-8", "replace")):
        _container("docker", entry)
    text = case[1].decode("utf-8", "replace")
    redact(text)
    for engine in ("vllm", "llamacpp", "sglang"):
        failure = classify(engine, "start", 1, None, text.splitlines())
        json.dumps(failure.model_dump(mode="json"))


SURFACES = (
    Surface("metrics", st.tuples(_page, _page, st.none() | _info), _check_metrics, share=1.5),
    Surface("stream", _streams, _check_stream, share=2),
    Surface("stream-long", repeated([b"data: ", b"\n", b"\r", b"a", b": x\n", b"data: {}\n\n", b"data: a\n", b"\xff"], 4_000_000), _check_long_stream, share=0.02, quick=3),
    Surface("stream-socket", _sockets, _check_socket, share=0.3, quick=20),
    Surface("prompts", _prompt_files, _check_prompts, share=1.2),
    Surface("results", st.tuples(_result_files, st.just(b"") | _result_files), _check_results, share=1),
    Surface("bundle", bundles(), _check_bundle, share=0.8),
    Surface("machine", machines(), _check_machine, share=0.6),
    Surface("engine-words", _said, _check_said, share=0.3, quick=15),
)  # fmt: skip
__all__ = ["SURFACES"]
