"""A server that offers keep-alive and closes after every stream, as llama.cpp's does: no request may be lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from surespec.bench.runner import BenchOptions, bench

CHUNKS = [
    {"choices": [{"delta": {"content": "one two"}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request: the list of models, or a stream with a known end; then the connection is closed, a moment late."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if length := next((line for line in head.splitlines() if line.lower().startswith("content-length")), ""):
        await reader.readexactly(int(length.split(":")[1]))
    models = json.dumps({"data": [{"id": "m"}]})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n\n"
    body = models if head.startswith("GET /v1/models") else stream
    status = "200 OK" if head.startswith("POST") or body is models else "404 Not Found"
    start = f"HTTP/1.1 {status}\r\nKeep-Alive: timeout=5, max=100\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(f"{start}{len(body):x}\r\n{body}\r\n0\r\n\r\n".encode())
    await writer.drain()
    await asyncio.sleep(0.002)  # long enough for a quick client to send its next request into the closing connection
    writer.close()


@pytest.fixture
def endpoint() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def test_no_request_is_lost(endpoint: str) -> None:
    result = bench(BenchOptions(endpoint, concurrency=(1, 4), prompts="copy", num_prompts=20, output_len=8))
    assert [run.failed for run in result.runs] == [0, 0]
    assert result.warnings == ()
