"""What guards the embedded server's sockets: how many may be open, and how long one may take to say what it wants.

aiohttp bounds bodies, lines and idle connections, but a client that opens a connection and never ends the head of its
first request is waited for without end. Here such a connection is closed, and connections beyond a number are answered
with a 503 at once, so that a slow or greedy client cannot keep others out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web

HEAD_TIMEOUT_S = 15.0
MAX_CONNECTIONS = 1024
_END_OF_HEAD = b"\r\n\r\n"
_BODY = b'{"error":{"message":"Too many open connections; try again later.","type":"overloaded_error"}}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_BODY)).encode() + _END_OF_HEAD + _BODY
)


class Guarded(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's ``handler`` once it is admitted."""

    def __init__(self, handler: Any, open_: set[Guarded], max_connections: int, head_timeout_s: float) -> None:
        self._handler, self._open, self._most = handler, open_, max_connections
        self._head_timeout_s = head_timeout_s
        self._admitted = False
        self._tail = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit it, or refuse it where too many are open."""
        self._transport = transport
        if len(self._open) >= self._most:
            self._transport.write(_REFUSAL)
            self._transport.close()
            return
        self._admitted = True
        self._open.add(self)
        self._timer = asyncio.get_running_loop().call_later(self._head_timeout_s, self._transport.abort)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """The timer ends with the first head; later requests of the connection are under aiohttp's own."""
        if not self._admitted:
            return
        if self._timer is not None:
            seen = self._tail + data
            if _END_OF_HEAD in seen:
                self._timer.cancel()
                self._timer, self._tail = None, b""
            else:
                self._tail = seen[-3:]
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        """As aiohttp wants it."""
        return bool(self._handler.eof_received()) if self._admitted else False

    def connection_lost(self, exc: Exception | None) -> None:
        """Free its place."""
        if not self._admitted:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._open.discard(self)
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        self._handler.resume_writing()


class GuardedSite(web.SockSite):
    """A site whose connections are ``Guarded``."""

    def __init__(
        self,
        runner: web.AppRunner,
        sock: socket.socket,
        *,
        max_connections: int = MAX_CONNECTIONS,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        super().__init__(runner, sock)
        self._listener, self._most, self._head_timeout_s = sock, max_connections, head_timeout_s
        self.open: set[Guarded] = set()

    async def start(self) -> None:
        """Listen. Raises OSError as `web.SockSite.start` does."""
        await web.BaseSite.start(self)
        make: Callable[[], Any] | None = self._runner.server
        assert make is not None  # set by the runner's setup

        def factory() -> Guarded:
            return Guarded(make(), self.open, self._most, self._head_timeout_s)

        self._server = await asyncio.get_running_loop().create_server(factory, sock=self._listener, backlog=128)


__all__ = ["HEAD_TIMEOUT_S", "MAX_CONNECTIONS", "Guarded", "GuardedSite"]
