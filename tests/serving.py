"""Helpers to test the server over real sockets: the application in a thread of its own, and an engine with faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from aiohttp import web

from surespec.errors import ConfigError, EngineError
from surespec.local.app import API, ServingEngine, make_app
from surespec.local.engine import EngineCounters
from surespec.local.speculative import SpeculativeConfig
from surespec.local.tokenizer import Tokenizer
from surespec.local.types import RequestStats, SamplingParams, StepOutput


class AppInThread:
    """Runs the application on a free port while the ``with`` block lasts; ``url`` is its root."""

    def __init__(self, engine: ServingEngine, tokenizer: Tokenizer, **options: Any) -> None:
        self.app = make_app(engine, tokenizer, "toy", **options)
        self.api = self.app[API]
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    def __enter__(self) -> AppInThread:
        self._thread.start()
        self.port = self.call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class FaultyEngine:
    """Sends every request the given steps and then hangs until aborted, or dies as `LocalEngine` does."""

    def __init__(
        self,
        steps: Sequence[Sequence[int]],
        then: Literal["hang", "die", "crash"] = "hang",
        max_num_seqs: int = 2,
    ) -> None:
        self.max_model_len, self.max_num_seqs, self.kv_cache_tokens = 512, max_num_seqs, 4096
        self.speculative: SpeculativeConfig | None = None
        self.error: EngineError | None = None
        self.num_speculative_tokens = 0
        self._steps, self._then = steps, then
        self._open: dict[int, Callable[[StepOutput], None]] = {}
        self._ids = 0

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, on_output: Callable[[StepOutput], None]) -> int:
        if self.error is not None:
            raise self.error
        self._ids += 1
        self._open[self._ids] = on_output
        for ids in self._steps:
            on_output(StepOutput(tuple(ids)))
        if self._then == "die":
            self.error = EngineError("The embedded engine failed: it was told to.")
            on_output(StepOutput((), None, "abort", RequestStats(), self.error.message))
            del self._open[self._ids]
        if self._then == "crash":
            raise KeyError("a secret prompt")
        return self._ids

    def abort(self, request_id: int) -> None:
        if on_output := self._open.pop(request_id, None):
            on_output(StepOutput((), None, "abort", RequestStats()))

    def set_num_speculative_tokens(self, k: int) -> None:
        raise ConfigError(f"num_speculative_tokens is {k}.")

    def counters(self) -> EngineCounters:
        return EngineCounters(running=len(self._open))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds; fail the test after a generous time."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
