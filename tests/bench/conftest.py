"""A small server that answers as servers really do, faults included, for the tests of the measuring side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chat chunk with one choice."""
    body = {**({} if content is None else {"content": content}), **more}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": body, "finish_reason": finish}],
    }


def usage(tokens: int, prompt: int = 7, **more: Any) -> dict[str, Any]:
    """The trailing usage chunk."""
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": counts, **more}


def sse(*chunks: dict[str, Any] | str, done: bool = True, eol: str = "\n") -> bytes:
    """Chunks as a server-sent event stream; a string is sent as a raw line."""
    lines = [chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk, ensure_ascii=False)}" for chunk in chunks]
    if done:
        lines.append("data: [DONE]")
    return "".join(line + eol + eol for line in lines).encode()


def good(tokens: int = 4, text: str = "hello world") -> bytes:
    """An ordinary answer: role chunk, two content chunks, finish, usage, done."""
    half = len(text) // 2
    return sse(delta("", role="assistant"), delta(text[:half]), delta(text[half:], "length"), usage(tokens))


@dataclass
class FaultServer:
    """Answers ``/v1/models`` with ``models`` and every generation with the next of ``answers`` (the last repeats)."""

    url: str = ""
    models: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": "toy"}]})
    models_status: int = 200
    models_html: str = ""
    answers: list[bytes | Handler] = field(default_factory=lambda: [good()])
    piece: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def on_models(self, request: web.Request) -> web.Response:
        if self.models_html:
            return web.Response(text=self.models_html, content_type="text/html", status=self.models_status)
        return web.json_response(self.models, status=self.models_status)

    async def on_metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(status=404)
        page = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
        return web.Response(text=page)

    async def on_generate(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return await (stream(request, answer, self.piece) if isinstance(answer, bytes) else answer(request))
        finally:
            self.in_flight -= 1


async def stream(
    request: web.Request, body: bytes, piece: int | None = None, pause_s: float = 0.0
) -> web.StreamResponse:
    """Send a body as an event stream, in pieces of ``piece`` bytes."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for start in range(0, len(body), piece or len(body)):
        await response.write(body[start : start + (piece or len(body))])
        await asyncio.sleep(0)
    await response.write_eof()
    return response


def status(code: int, body: Any) -> Handler:
    """A handler that refuses with a JSON body."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=code)

    return handler


def html(text: str) -> Handler:
    """A handler that answers with a web page and status 200, as a proxy's sign-in page does."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type="text/html")

    return handler


def cut(body: bytes) -> Handler:
    """A handler that sends part of a stream and then drops the connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    return handler


def stalls(body: bytes, release: asyncio.Event) -> Handler:
    """A handler that sends part of a stream and then nothing until ``release``."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(body)
        await release.wait()
        return response

    return handler


def refuses(*fields: str) -> Handler:
    """A handler that answers 400 while the request has one of the fields, else the ordinary stream."""

    async def handler(request: web.Request) -> web.StreamResponse:
        sent = await request.json()
        bad: Sequence[str] = [name for name in fields if name in sent]
        if bad:
            detail = [{"loc": ["body", name], "msg": "Extra inputs are not permitted"} for name in bad]
            return web.json_response({"detail": detail}, status=400)
        return await stream(request, good())

    return handler


class Kit:
    """The helpers above, for tests (test modules cannot import this file by name)."""

    delta = staticmethod(delta)
    usage = staticmethod(usage)
    sse = staticmethod(sse)
    good = staticmethod(good)
    stream = staticmethod(stream)
    status = staticmethod(status)
    html = staticmethod(html)
    cut = staticmethod(cut)
    stalls = staticmethod(stalls)
    refuses = staticmethod(refuses)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    """A running FaultServer on a free port of the loopback interface."""
    fault = FaultServer()
    app = web.Application()
    app.router.add_get("/v1/models", fault.on_models)
    app.router.add_get("/metrics", fault.on_metrics)
    app.router.add_post("/v1/chat/completions", fault.on_generate)
    app.router.add_post("/v1/completions", fault.on_generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    fault.url = f"http://127.0.0.1:{port}"
    yield fault
    await runner.cleanup()
