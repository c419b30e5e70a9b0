"""``surespec serve`` on the embedded engine: bind, load, warm up, say where it listens, run, and stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from aiohttp import web

from surespec.errors import EngineError, PortInUseError, UsageError
from surespec.local.app import API, make_app
from surespec.local.connections import GuardedSite
from surespec.local.engine import LocalEngine, build_engine
from surespec.local.guards import is_loopback
from surespec.local.tokenizer import Tokenizer
from surespec.local.types import SamplingParams

STOP_GRACE_S = 4.0  # streams may finish this long after the first signal; a second signal ends them at once
KEEP_ALIVE_S = 75.0
API_KEY_VARIABLE = "SURESPEC_API_KEY"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What ``serve`` is to run.

    Attributes:
        model: name or path, as `surespec.fetch.resolve_model` takes it.
        served_model_name: the name clients use; default: ``model`` as given.
        speculative_config: vLLM's keys, as JSON text or an object; None: no speculation.
        port: 0 lets the system choose one; the ready message names it.
        max_model_len, kv_cache_tokens: tokens; None: the engine's default.
        api_key: asked for on ``/v1/*``; None: the environment's ``SURESPEC_API_KEY``, and without that none.
        max_queued: choices that may wait beyond ``max_num_seqs`` before the server answers 503.
    """

    model: str
    served_model_name: str | None = None
    precision: Literal["fp32", "int8", "int4"] = "fp32"
    speculative_config: str | Mapping[str, Any] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int = 16
    kv_cache_tokens: int | None = None
    threads: int | None = None
    api_key: str | None = field(default=None, repr=False)
    max_queued: int = 128


def serve(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; returns then, after open streams have ended.

    Messages go to stderr; the line ``surespec: serving MODEL on URL`` comes once a first token was really produced.

    Raises:
        PortInUseError: before anything is loaded.
        UsageError, ModelError, ConfigError: what is wrong with the options, the model or the speculative config.
        EngineError: the engine did not produce a token.
    """
    with contextlib.closing(bind(options.host, options.port)) as listener, _interruptible():
        _say(f"loading {options.model} ({options.precision})")
        engine, tokenizer = engine_of(options, options.model)
        with contextlib.closing(engine):
            asyncio.run(_run(options, listener, engine, tokenizer))
    _say("stopped")


def engine_of(options: ServeOptions, model: str | Path) -> tuple[LocalEngine, Tokenizer]:
    """The engine that the options ask for, on ``model``. Raises what ``build_engine`` raises."""
    return build_engine(
        model,
        precision=options.precision,
        speculative_config=options.speculative_config,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_cache_tokens=options.kv_cache_tokens,
        threads=options.threads,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening (so nobody mistakes a loading server for a ready one).

    Raises PortInUseError, or UsageError when the address cannot be used at all.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is not a port number.", hint="Use 0 to 65535; 0 lets the system choose.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise UsageError(f"--host {host!r} is not an address of this machine.", hint="Use 127.0.0.1.") from None
    try:
        # First without SO_REUSEADDR: with it, Linux lets two servers that are still loading share a port. It is then
        # needed only where closed connections of an earlier server linger on the port.
        listener = _bound(family, kind, protocol, address, reuse=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _bind_error(error, host, port) from None
        try:
            listener = _bound(family, kind, protocol, address, reuse=True)
        except OSError as still:
            raise _bind_error(still, host, port) from None
    return listener


def _bound(family: int, kind: int, protocol: int, address: Any, *, reuse: bool) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_error(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"Port {port} on {host} is already in use by another process.",
            hint="Stop that process, choose another with --port, or let the system choose with --port 0.",
        )
    if error.errno == errno.EACCES:
        return UsageError(f"Port {port} needs administrator rights.", hint="Choose one from 1024 on with --port.")
    return UsageError(f"Cannot listen on {host}: {error.strerror}.", hint="Use --host 127.0.0.1.")


async def _run(options: ServeOptions, listener: socket.socket, engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """Warm up, listen, wait for the signal, stop."""
    await _warm_up(engine, tokenizer)
    name = options.served_model_name or options.model
    key = options.api_key or os.environ.get(API_KEY_VARIABLE) or None
    only_local = is_loopback(listener.getsockname()[0])
    app = make_app(engine, tokenizer, name, api_key=key, max_queued=options.max_queued, only_local_pages=only_local)
    runner = web.AppRunner(
        app,
        access_log=None,  # it would log nothing a user needs, and addresses nobody asked us to keep
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    stop, at_once = _signals()
    try:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the next start on this port
            await GuardedSite(runner, listener).start()
        except OSError as error:  # another server that was loading at the same time was faster
            raise _bind_error(error, options.host, options.port) from None
        _announce(options, listener, name, engine, key)
        await _until(stop, engine)
        await _drain(app, runner, at_once)
    finally:
        await runner.cleanup()


async def _warm_up(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """Produce a few real tokens, so that "ready" is true and the first request pays for nothing."""
    prompt = tokenizer.encode("Hello, hello, hello, hello") or [0]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    if not [step async for step in engine.generate(prompt, params)]:
        raise EngineError("The engine produced no token for a test prompt.")


def _announce(options: ServeOptions, listener: socket.socket, name: str, engine: LocalEngine, key: str | None) -> None:
    """The ready line, and a warning when others can reach the server."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    config = engine.speculative
    speculation = f"{config.method}, k = {config.num_speculative_tokens}" if config else "off"
    if not is_loopback(host):
        guard = "with the API key" if key else "without any key; give --api-key-file or SURESPEC_API_KEY"
        _say(f"warning: {options.host} is not a loopback address; other machines can use this server {guard}")
    _say(f"serving {name} on http://{shown}:{port} (speculation: {speculation})")


async def _until(stop: asyncio.Event, engine: LocalEngine) -> None:
    """Wait for the signal; say it once if the engine fails meanwhile (``/health`` and requests answer 503 then)."""
    failed = False
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)
        if engine.error is not None and not failed:
            failed = True
            _say(f"error: {engine.error.message} Requests are refused until the server is started again.")


async def _drain(app: web.Application, runner: web.AppRunner, at_once: asyncio.Event) -> None:
    """Accept nothing new, let open requests finish for a moment, then end them with an error they can show."""
    api = app[API]
    api.stopping = True
    for site in list(runner.sites):
        await site.stop()
    for patience in (STOP_GRACE_S, 1.0):
        deadline = asyncio.get_running_loop().time() + patience
        while not api.flights.idle and asyncio.get_running_loop().time() < deadline:
            if at_once.is_set() and patience == STOP_GRACE_S:
                break
            await asyncio.sleep(0.02)
        api.flights.end_all(EngineError("The server was stopped before the request was finished."))


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events for the first and for a second SIGINT or SIGTERM."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop, at_once


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT or SIGTERM end loading like a normal stop, without a traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"surespec: {text}", file=sys.stderr, flush=True)


__all__ = ["ServeOptions", "bind", "make_app", "serve"]
