"""A streaming client for OpenAI-compatible servers that times one request and counts its tokens.

Times come from ``time.perf_counter`` and are taken when a piece of the body arrives, before it is parsed. Tokens are
counted by the server (``usage``, or llama.cpp's ``timings``), never by counting chunks: a chunk of a speculating server
holds several tokens. A stream that cannot be counted or that did not end properly is a failed trace, with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import aiohttp

from surespec.bench.sse import EventParser
from surespec.bench.stream import RequestRefused, StreamFailure, StreamState, error_text
from surespec.bench.workload import Prompt
from surespec.core import Trace
from surespec.endpoint_url import KEY_VARIABLES, api_key, normalise_endpoint, shown
from surespec.errors import EndpointError, plain
from surespec.json_text import loads_json

Api = Literal["chat", "completions"]
_PATHS: dict[Api, str] = {"chat": "v1/chat/completions", "completions": "v1/completions"}
_OPTIONAL_FIELDS = ("stream_options", "seed", "ignore_eos", "top_p")
_REFUSALS = (400, 422)
_CONNECT_TIMEOUT_S = 10.0
_DRAIN_S = 1.0
_SHOWN_CHARS = 300
TIMED_OUT = "timed out"
"""How the error of a request begins that got no answer, or no more of it, in time."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How every request is decoded. ``ignore_eos`` is a vLLM and SGLang extension, sent only when True."""

    output_len: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One request's trace and the gaps between its chunks with content, in milliseconds."""

    trace: Trace
    gaps_ms: tuple[float, ...] = ()


class StreamClient:
    """Sends prompts to one endpoint. Use as ``async with``; ``send`` may run many times at once.

    ``dropped`` names the request fields the server refused and that are no longer sent.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str = "",
        api: Api = "chat",
        decoding: Decoding | None = None,
        timeout_s: float = 600.0,
        idle_timeout_s: float | None = None,
    ) -> None:
        self.url = normalise_endpoint(endpoint)
        self.model = model
        self.api: Api = api
        self.decoding = decoding or Decoding()
        self.dropped: tuple[str, ...] = ()
        self._understood = False
        self.timeout_s = timeout_s
        self.idle_timeout_s = idle_timeout_s
        self._key = api_key()
        self._session: aiohttp.ClientSession | None = None
        self._sessions: tuple[aiohttp.ClientSession, ...] = ()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open HTTP session, with the API key and no limit on connections."""
        if self._session is None:
            raise RuntimeError("StreamClient is used outside of 'async with'")
        return self._session

    async def __aenter__(self) -> StreamClient:
        auth = aiohttp.BasicAuth(self.url.user, self.url.password or "") if self.url.user else None
        headers = {"Authorization": f"Bearer {self._key}"} if self._key and auth is None else {}
        timeout = aiohttp.ClientTimeout(
            total=self.timeout_s, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self.idle_timeout_s or self.timeout_s
        )
        self.url = self.url.with_user(None)
        self._sessions = tuple(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=once),
                headers=headers, auth=auth, timeout=timeout, read_bufsize=2**18,
            )
            for once in (False, True)
        )  # fmt: skip
        self._session = self._sessions[0]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions:
            await session.close()

    async def models(self) -> list[str]:
        """The model names of ``/v1/models``, as a check that this is an OpenAI-compatible server.

        Raises:
            EndpointError: nothing answers, or what answers is something else; says what to try.
        """
        url = self.url / "v1/models"
        where = f"{shown(self.url)} "
        curl = f"Try: curl {shown(url)}"
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
                status, body = response.status, await read_text(response, 2**20)
        except TimeoutError as err:
            raise EndpointError(
                f"{where}did not answer in time.", hint=f"Is the server busy or hanging? {curl}"
            ) from err
        except (aiohttp.ClientError, OSError) as err:
            raise EndpointError(
                f"{where}cannot be reached: {self._clean(_network_reason(err))}.",
                hint=f"Is it running? {curl}",
            ) from err
        if status in (401, 403):
            raise EndpointError(
                f"{where}refuses the request (HTTP {status}).", hint=f"Set {' or '.join(KEY_VARIABLES)} to its key."
            )
        try:
            document = loads_json(body) if status == 200 else None
        except ValueError:
            document = None
        entries = document.get("data") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            what = (
                f"HTTP {status}" if status != 200 else ("a web page" if "<html" in body.lower() else "something else")
            )
            raise EndpointError(
                f"{where}answers, but not as an OpenAI-compatible server: GET /v1/models gave {what}.",
                hint=f"Is this the right port and path? {curl}",
            )
        return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and entry.get("id")]

    async def send(self, prompt: Prompt, *, origin: float | None = None) -> Reply:
        """Send one prompt and read its stream to the end. Never raises for what a server does: see ``Trace.error``.

        ``origin`` (perf_counter seconds) is the start of the measured window, from which ``start_s`` counts.
        """
        stream = StreamState(sent_at=time.perf_counter())
        begun = stream.sent_at
        try:
            try:
                await self._post(prompt, stream)
            except RequestRefused as refusal:
                before = self.dropped
                self.dropped += self._refused_fields(refusal)
                if self.dropped == before:
                    raise
                stream = StreamState(sent_at=time.perf_counter())
                try:
                    await self._post(prompt, stream)
                except RequestRefused:
                    self.dropped = before
                    raise refusal from None
            self._understood = True
            stream.check()
        except StreamFailure as failure:
            reason = self._clean(str(failure))
        except TimeoutError:
            reason = self._timeout_reason(stream)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as err:
            when = "after the answer had begun" if stream.chunk_times else "before the first token"
            reason = self._clean(f"the connection broke {when}: {_network_reason(err)}")
        else:
            return self._reply(prompt, stream, origin if origin is not None else begun)
        start = begun - origin if origin is not None else 0.0
        return Reply(
            Trace(
                prompt_id=prompt.id, category=prompt.category, start_s=start, ok=False, error=reason,
                prompt_tokens=stream.prompt_tokens or 0, chunks=len(stream.chunk_times), text="".join(stream.text),
            )
        )  # fmt: skip

    async def _post(self, prompt: Prompt, stream: StreamState) -> None:
        """Send it; once more, on a new connection, where the one in use was closed before anything came back.

        llama.cpp's server offers keep-alive and closes after a stream all the same: the next request on that connection
        is lost if it is quick. From then on every request has a connection of its own.
        """
        try:
            await self._exchange(prompt, stream)
        except aiohttp.ServerDisconnectedError:
            self._session = self._sessions[1]
            await self._exchange(prompt, stream)

    async def _exchange(self, prompt: Prompt, stream: StreamState) -> None:
        body = json.dumps(self.payload(prompt), ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        stream.sent_at = time.perf_counter()
        async with self.session.post(self.url / _PATHS[self.api], data=body, headers=headers) as response:
            if response.status != 200:
                text = await read_text(response, 2**16)
                kind = RequestRefused if response.status in _REFUSALS else StreamFailure
                raise kind(f"HTTP {response.status}: {error_text(text)}")
            if response.content_type in ("text/html", "application/json"):
                text = await read_text(response, 2**16)
                raise StreamFailure(
                    f"the server answered with {response.content_type} instead of a stream: {error_text(text)}"
                )
            parser = EventParser()
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                for event in parser.feed(piece):
                    stream.take(event.data, event.name, now)
                if stream.done:
                    await _drain(response)
                    return
            for event in parser.close():
                stream.take(event.data, event.name, time.perf_counter())

    def payload(self, prompt: Prompt) -> dict[str, Any]:
        """The request body for a prompt, without the fields this server refused."""
        decoding = self.decoding
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens or decoding.output_len,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if decoding.seed is not None:
            body["seed"] = decoding.seed
        if decoding.ignore_eos:
            body["ignore_eos"] = True
        if self.api == "chat":
            body |= {"messages": list(prompt.messages), **prompt.extra}
        else:
            body |= {"prompt": prompt.as_text(), **({"stop": prompt.extra["stop"]} if "stop" in prompt.extra else {})}
        return {key: value for key, value in body.items() if key not in self.dropped}

    def _refused_fields(self, refusal: RequestRefused) -> tuple[str, ...]:
        """The optional fields to retry without: those the refusal names, or all of them if it names none and this
        server has not yet understood any request."""
        left = tuple(name for name in _OPTIONAL_FIELDS if name not in self.dropped)
        named = tuple(name for name in left if name in str(refusal))
        return named or (() if self._understood else left)

    def _reply(self, prompt: Prompt, stream: StreamState, origin: float) -> Reply:
        first, last = stream.chunk_times[0], max(stream.last_at, stream.chunk_times[-1])
        tokens = stream.output_tokens or 0
        ttft, e2e = 1e3 * (first - stream.sent_at), 1e3 * (last - stream.sent_at)
        times = stream.chunk_times
        trace = Trace(
            prompt_id=prompt.id, category=prompt.category, start_s=stream.sent_at - origin, ok=True,
            prompt_tokens=stream.prompt_tokens or 0, output_tokens=tokens, chunks=len(times), ttft_ms=ttft,
            tpot_ms=(e2e - ttft) / (tokens - 1) if tokens > 1 else None, e2e_latency_ms=e2e,
            finish_reason=stream.finish_reason, text="".join(stream.text), acceptance=stream.acceptance,
        )  # fmt: skip
        return Reply(trace, tuple(1e3 * (b - a) for a, b in itertools.pairwise(times)))

    def _timeout_reason(self, stream: StreamState) -> str:
        waited = time.perf_counter() - stream.sent_at
        got = f"after {len(stream.chunk_times)} chunks" if stream.chunk_times else "before the first token"
        return f"{TIMED_OUT} {got}, {waited:.0f} s after it was sent"

    def _clean(self, text: str) -> str:
        """Text from outside, short, on one line, without the API key."""
        line = " ".join(text.split())
        if self._key:
            line = line.replace(self._key, "***")
        return plain(line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 3] + "...")


def _network_reason(err: Exception) -> str:
    """What the system says of a broken connection, such as "connection refused"."""
    cause = err.os_error if isinstance(err, aiohttp.ClientConnectorError) else err
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused"
    return (getattr(cause, "strerror", None) or str(err) or type(err).__name__).rstrip(".")


async def read_text(response: aiohttp.ClientResponse, limit: int) -> str:
    """At most ``limit`` bytes of a body as text; what is not UTF-8 becomes U+FFFD."""
    pieces: list[bytes] = []
    async for piece in response.content.iter_any():
        pieces.append(piece)
        if sum(map(len, pieces)) >= limit:
            break
    return b"".join(pieces)[:limit].decode("utf-8", "replace")


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read past ``[DONE]`` to the end of the body, so that the connection can be used again."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        await asyncio.wait_for(response.content.read(), _DRAIN_S)
