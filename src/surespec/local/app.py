"""The HTTP routes of the embedded engine: OpenAI's API, health, metrics, and the switch for speculation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from aiohttp import web

from surespec._version import __version__
from surespec.errors import EngineError
from surespec.local import guards
from surespec.local.guards import (
    MAX_BODY_BYTES,
    as_request_error,
    authorisation,
    error_envelopes,
    only_local_programs,
    read_json_body,
)
from surespec.local.metrics import Counters, ServerMetrics
from surespec.local.openai_api import (
    ChatRequest,
    CompletionRequest,
    Limits,
    RequestError,
    check_text,
    parse_json,
    parse_request,
)
from surespec.local.openai_wire import Answer, ChatAnswer, CompletionAnswer
from surespec.local.speculative import SpeculativeConfig
from surespec.local.streaming import ChoiceDecoder, ChoiceTask, Delta, Flights, TokenEngine
from surespec.local.tokenizer import IncrementalDetokenizer, Tokenizer

WRITE_TIMEOUT_S = 60.0
BIG_BODY_BYTES = 32 * 2**10  # larger bodies are read beside the event loop, so that streams do not stutter
API: web.AppKey[Api] = web.AppKey("api")
T = TypeVar("T")


class ServingEngine(TokenEngine, Protocol):
    """What the server needs of the engine (`LocalEngine`)."""

    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int
    speculative: SpeculativeConfig | None
    error: EngineError | None

    @property
    def num_speculative_tokens(self) -> int: ...
    def set_num_speculative_tokens(self, k: int) -> None: ...
    def counters(self) -> Counters: ...


def make_app(
    engine: ServingEngine,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    api_key: str | None = None,
    max_queued: int = 128,
    only_local_pages: bool = False,
) -> web.Application:
    """The application. Run it with ``handler_cancellation=True``, so that a client that hangs up frees its slot.

    Args:
        model_name: the name clients must use.
        api_key: required as ``Authorization: Bearer KEY`` on ``/v1/*`` and ``/tokenize`` when given.
        max_queued: choices that may wait beyond the engine's ``max_num_seqs``; more are refused with a 503.
        only_local_pages: refuse requests that a browser sends for a page of another site (loopback servers).
    """
    api = Api(engine, tokenizer, model_name, max_queued)
    pages = [guards.only_local_pages()] if only_local_pages else []
    middlewares = [error_envelopes, *pages, authorisation(api_key)]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app[API] = api
    app.router.add_get("/health", api.health)
    app.router.add_get("/version", api.version)
    app.router.add_get("/metrics", api.metrics_page)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/models/{name:.+}", api.model)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_post("/v1/chat/completions", api.chat)
    app.router.add_post("/tokenize", api.tokenize)
    app.router.add_get("/surespec/speculation", api.speculation)
    app.router.add_post("/surespec/speculation", api.set_speculation)
    return app


class Api:
    """The handlers, around one engine and its tokenizer."""

    def __init__(self, engine: ServingEngine, tokenizer: Tokenizer, model_name: str, max_queued: int) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.limits = Limits(engine.max_model_len, engine.kv_cache_tokens)
        self.flights = Flights(engine.max_num_seqs + max_queued)
        self.max_k = engine.speculative.num_speculative_tokens if engine.speculative else None
        self.metrics = ServerMetrics(model_name, engine.counters, speculating=self.max_k is not None)
        self.stopping = False
        self._created = int(time.time())

    # ---- what the server is ------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine works, 503 when it does not or the server is stopping."""
        ok = self.engine.error is None and not self.stopping
        return web.json_response({"status": "ok" if ok else "unhealthy"}, status=200 if ok else 503)

    async def version(self, request: web.Request) -> web.Response:
        """Who answers here."""
        return web.json_response({"version": __version__, "engine": "surespec-local"})

    async def metrics_page(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self.metrics.text(), headers={"Content-Type": content_type})

    async def models(self, request: web.Request) -> web.Response:
        """The one model, as a list."""
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        """The one model, by its name."""
        self._check_model(request.match_info["name"])
        return web.json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "surespec",
            "max_model_len": self.limits.max_model_len,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise RequestError(
                f"The model {name!r} does not exist here; this server has {self.model_name!r}.",
                param="model",
                status=404,
                kind="not_found_error",
                code="model_not_found",
            )

    # ---- generation --------------------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        body = await read_json_body(request)

        def read() -> tuple[CompletionRequest, list[list[int]]]:
            ask = parse_request(parse_json(body), CompletionRequest)
            return ask, [self._encode(prompt, ask) for prompt in ask.prompts]

        ask, prompts = await _beside_loop(len(body), read)
        return await self._answer(request, ask, prompts, CompletionAnswer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        body = await read_json_body(request)

        def read() -> tuple[ChatRequest, list[int]]:
            ask = parse_request(parse_json(body), ChatRequest)
            return ask, self._encode_chat(ask)

        ask, prompt = await _beside_loop(len(body), read)
        return await self._answer(request, ask, [prompt], ChatAnswer)

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: the token ids of a ``prompt`` or of ``messages``, as vLLM answers it."""
        body = await read_json_body(request)

        def read() -> list[int]:
            document = parse_json(body)
            if "messages" in document:
                return self._encode_chat(parse_request(document, ChatRequest))
            ask = parse_request(document, CompletionRequest)
            if not isinstance(ask.prompt, str):
                raise RequestError("prompt must be one string here.", param="prompt")
            return self._encode(ask.prompt, ask)

        ids = await _beside_loop(len(body), read)
        return web.json_response({"count": len(ids), "max_model_len": self.limits.max_model_len, "tokens": ids})

    def _encode(self, prompt: str | list[int], ask: CompletionRequest) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return self.tokenizer.encode(check_text(prompt, "prompt"), add_special=ask.add_special_tokens is not False)

    def _encode_chat(self, ask: ChatRequest) -> list[int]:
        messages = [message.for_template() for message in ask.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=ask.template_tools)
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply.", param="messages") from None
        return self.tokenizer.encode(check_text(text, "messages"), add_special=bool(ask.add_special_tokens))

    def _tasks(self, ask: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> list[ChoiceTask]:
        """The choices of a request: ``n`` for every prompt, those of one prompt side by side."""
        n, tasks = ask.n or 1, []
        if not prompts:
            raise RequestError("prompt is an empty list.", param="prompt")
        for ids in prompts:
            room = self.limits.output_tokens(len(ids), ask.token_limit)
            params = ask.sampling(room)
            for index in range(n):  # as in vLLM: the choices of one seeded request differ, reproducibly
                seeded = params if params.seed is None else replace(params, seed=params.seed + index)
                tasks.append(ChoiceTask(tuple(ids), seeded))
        if len(tasks) > self.flights.limit:
            raise RequestError(
                f"The request asks for {len(tasks)} choices; this server takes at most {self.flights.limit} at once.",
                param="n",
            )
        if self.stopping or not self.flights.has_room(len(tasks)):
            why = "is stopping" if self.stopping else "has too many requests waiting"
            raise RequestError(f"The server {why}; try again later.", status=503, kind="overloaded_error")
        return tasks

    async def _answer(
        self,
        request: web.Request,
        ask: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        shape: type[Answer],
    ) -> web.StreamResponse:
        self._check_model(ask.model)
        tasks = self._tasks(ask, prompts)
        answer = shape(
            self.model_name,
            sum(len(ids) for ids in prompts),
            len(tasks),
            self.tokenizer.token_text,
            logprobs=ask.top_alternatives is not None,
            num_spec_tokens=self.max_k,
        )

        def decoder() -> ChoiceDecoder:
            return ChoiceDecoder(
                IncrementalDetokenizer(self.tokenizer, ask.skip_special_tokens is not False), ask.stops
            )

        async with self.flights.stream(self.engine, tasks, decoder, self.metrics) as deltas:
            if ask.stream:
                usage = ask.stream_options is not None and ask.stream_options.include_usage
                return await _stream(request, answer, deltas, usage)
            async for index, delta in deltas:
                answer.add(index, delta)
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError("the client is gone")
            return web.json_response(answer.body())

    # ---- speculation -------------------------------------------------------------------------------------------

    async def speculation(self, request: web.Request) -> web.Response:
        """How the engine speculates now. For programs on this machine only."""
        only_local_programs(request)
        return web.json_response(
            {
                "method": self.engine.speculative.method if self.engine.speculative else None,
                "num_speculative_tokens": self.engine.num_speculative_tokens,
                "max_num_speculative_tokens": self.max_k or 0,
            }
        )

    async def set_speculation(self, request: web.Request) -> web.Response:
        """Set k for all requests from their next step on; 0 turns speculation off. For programs on this machine."""
        only_local_programs(request)
        document = parse_json(await read_json_body(request))
        field = "num_speculative_tokens"
        if set(document) != {field}:
            raise RequestError(f'The body must be {{"{field}": N}} and nothing else.', param=field)
        k, most = document[field], self.max_k
        if most is None:
            raise RequestError("The server was started without a speculative config; restart it with one.", param=field)
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= most:
            raise RequestError(
                f"{field} must be a whole number from 0 to {most}, the k it was started with.", param=field
            )
        self.engine.set_num_speculative_tokens(k)
        return await self.speculation(request)


async def _stream(
    request: web.Request, answer: Answer, deltas: AsyncIterator[tuple[int, Delta]], include_usage: bool
) -> web.StreamResponse:
    """Server-sent events: one chunk for every engine step, errors as a line of their own, then ``[DONE]``.

    The headers leave with the first step, so that a request the engine refuses still gets its proper status.
    """
    response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    response.content_type, response.charset = "text/event-stream", "utf-8"
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        async for index, delta in deltas:
            if not response.prepared:
                await response.prepare(request)
            events = [_event(answer.chunk([choice], **extra)) for choice in answer.add(index, delta)]
            await _write(request, response, b"".join(events))
        last = _event(answer.usage_chunk()) if include_usage else b""
    except ConnectionError:
        raise
    except Exception as error:
        if not response.prepared:
            raise
        last = _event(as_request_error(error, request).body)
    await _write(request, response, last + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write, but never wait for ever on a client that has stopped reading."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client stopped reading") from None


async def _beside_loop(body_bytes: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if body_bytes > BIG_BODY_BYTES else work()
