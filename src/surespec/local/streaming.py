"""From engine steps to text: detokenising, stop strings, and several choices of one request merged into one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from surespec.errors import EngineError
from surespec.local.types import FinishReason, RequestStats, SamplingParams, StepOutput, TokenLogprob


class Detokenizer(Protocol):
    """What the server needs of ``IncrementalDetokenizer``: text that never ends inside a UTF-8 character."""

    def push(self, ids: Sequence[int], /) -> str: ...

    def flush(self) -> str: ...


class StopScanner:
    """Finds the first stop string in text that comes in pieces.

    Text is held back only while its end could still become a stop string. Where two stop strings match, the one that
    begins first wins; text from its beginning on is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what may be sent. After a match ``matched`` is set and nothing more comes out."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda pair: pair[0])
            return self._take(at)
        return self._take(len(self._held) - self._undecided())

    def flush(self) -> str:
        """The text still held back, now that no more can come."""
        return "" if self.matched is not None else self._take(len(self._held))

    def _take(self, length: int) -> str:
        sent, self._held = self._held[:length], self._held[length:]
        return sent

    def _undecided(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step adds to a choice: its text (maybe empty, while text is held back) and the tokens counted."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    stats: RequestStats | None = None


class ChoiceDecoder:
    """Turns the steps of one choice into deltas.

    With stop strings the tokens of a step are looked at one by one, and those after the token that completes a stop
    string are dropped: text and token count are then the same with and without speculation.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops) if stops else None

    def push(self, step: StepOutput) -> Delta:
        """The delta of one step. ``finish_reason`` is set on the last one, by the engine or by a stop string."""
        if self._scanner is None:
            text = self._detokenizer.push(step.token_ids)
            if step.finish_reason:
                text += self._detokenizer.flush()
            return Delta(text, step.token_ids, step.logprobs, step.finish_reason, None, step.stats)
        return self._push_scanned(step, self._scanner)

    def _push_scanned(self, step: StepOutput, scanner: StopScanner) -> Delta:
        text, used = "", 0
        for token_id in step.token_ids:
            text += scanner.push(self._detokenizer.push([token_id]))
            used += 1
            if scanner.matched is not None:
                break
        if step.finish_reason and scanner.matched is None:
            text += scanner.push(self._detokenizer.flush())
            text += scanner.flush()
        finish = "stop" if scanner.matched is not None else step.finish_reason
        logprobs = None if step.logprobs is None else step.logprobs[:used]
        return Delta(text, step.token_ids[:used], logprobs, finish, scanner.matched, step.stats)


@dataclass(frozen=True, slots=True)
class ChoiceTask:
    """One choice to generate: its prompt's token ids and how to decode them."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


class TokenEngine(Protocol):
    """The part of the engine that a stream of choices needs."""

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_output: Callable[[StepOutput], None]
    ) -> int: ...

    def abort(self, request_id: int) -> None: ...


class ChoiceObserver(Protocol):
    """Told about the timing of every choice (the metrics)."""

    def step(self, since_start_s: float, since_last_s: float | None) -> None: ...

    def finished(self, reason: str, tokens: int, first_s: float, total_s: float) -> None: ...


class Flights:
    """The requests in flight: how many choices they hold, and how to end them all at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.choices = 0
        self._queues: set[asyncio.Queue[Any]] = set()

    def has_room(self, choices: int) -> bool:
        """Whether ``choices`` more may start."""
        return self.choices + choices <= self.limit

    def end_all(self, error: EngineError) -> None:
        """Make every open stream end with ``error``."""
        for queue in self._queues:
            queue.put_nowait(error)

    @property
    def idle(self) -> bool:
        """True when no request is in flight."""
        return not self._queues

    @asynccontextmanager
    async def stream(
        self,
        engine: TokenEngine,
        tasks: Sequence[ChoiceTask],
        decoder: Callable[[], ChoiceDecoder],
        observer: ChoiceObserver,
    ) -> AsyncIterator[AsyncIterator[tuple[int, Delta]]]:
        """Run ``tasks`` side by side; gives an iterator of (choice index, delta).

        Leaving the context aborts every choice that has not ended, which frees its slot. What the engine raises comes
        out of the iterator.
        """
        queue: asyncio.Queue[tuple[int, Delta] | BaseException] = asyncio.Queue()
        self.choices += len(tasks)
        self._queues.add(queue)
        pumps = [
            asyncio.create_task(_pump(engine, task, index, decoder(), queue, observer))
            for index, task in enumerate(tasks)
        ]
        try:
            yield _drain(queue, len(tasks))
        finally:
            self._queues.discard(queue)
            self.choices -= len(tasks)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _drain(
    queue: asyncio.Queue[tuple[int, Delta] | BaseException], choices: int
) -> AsyncIterator[tuple[int, Delta]]:
    """Yield from the queue until every choice has finished; raise what a choice raised."""
    open_choices = choices
    while open_choices:
        item = await queue.get()
        if isinstance(item, BaseException):
            raise item
        if item[1].finish_reason:
            open_choices -= 1
        yield item


class _EngineRequest:
    """One choice inside the engine: its outputs, brought from the engine's thread to this event loop."""

    def __init__(self, engine: TokenEngine, task: ChoiceTask) -> None:
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._ended = False
        self._id = engine.submit(
            task.prompt_ids, task.params, lambda output: _send(loop, self._outputs.put_nowait, output)
        )

    async def next(self) -> StepOutput:
        """The next step. Raises EngineError when the engine gave the request up."""
        output = await self._outputs.get()
        self._ended = output.finish_reason is not None
        if output.finish_reason == "abort":
            raise EngineError(output.error or "The engine was stopped before the request was finished.")
        return output

    async def end_early(self) -> RequestStats | None:
        """Abort, because a stop string came; returns the statistics (with the step that ran meanwhile, if any)."""
        self._engine.abort(self._id)
        while not self._ended:
            output = await self._outputs.get()
            self._ended = output.finish_reason is not None
        return output.stats

    def release(self) -> None:
        """Free the slot if the request has not ended."""
        if not self._ended:
            self._engine.abort(self._id)


def _send(loop: asyncio.AbstractEventLoop, put: Callable[[StepOutput], None], output: StepOutput) -> None:
    loop.call_soon_threadsafe(put, output)


async def _pump(
    engine: TokenEngine,
    task: ChoiceTask,
    index: int,
    decoder: ChoiceDecoder,
    queue: asyncio.Queue[tuple[int, Delta] | BaseException],
    observer: ChoiceObserver,
) -> None:
    """Move one choice from the engine to the queue, and time it. The engine never waits for a slow client."""
    start = time.perf_counter()
    first: float | None = None
    last: float | None = None
    tokens, reason = 0, "abort"
    request: _EngineRequest | None = None
    try:
        request = _EngineRequest(engine, task)
        while reason == "abort":
            step = await request.next()
            now = time.perf_counter()
            observer.step(now - start, None if last is None else now - last)
            first, last = first or now, now
            delta = decoder.push(step)
            tokens += len(delta.token_ids)
            if delta.finish_reason and not step.finish_reason:
                delta = replace(delta, stats=await request.end_early())
            reason = delta.finish_reason or reason
            queue.put_nowait((index, delta))
    except Exception as error:  # the reader of the queue raises it where the client can be told
        queue.put_nowait(error)
    finally:
        if request is not None:  # None: the engine refused it
            request.release()
            end = last or time.perf_counter()
            observer.finished(reason, tokens, (first or end) - start, end - start)
