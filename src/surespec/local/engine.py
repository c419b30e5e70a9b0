"""The embedded engine: one thread that steps while there is work and sleeps while there is none (see `steps`)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surespec.errors import ConfigError, EngineError
from surespec.fetch import resolve_model
from surespec.local.drafters.base import Drafter
from surespec.local.drafters.draft_model import DraftModelDrafter, check_vocabulary
from surespec.local.drafters.eagle3 import Eagle3Drafter
from surespec.local.drafters.ngram import NgramDrafter
from surespec.local.eagle import Eagle3Head, read_aux_layers
from surespec.local.model import TargetModel
from surespec.local.scheduler import Scheduler, Sequence
from surespec.local.speculative import SpeculativeConfig, parse_speculative_config
from surespec.local.steps import Stepper
from surespec.local.tokenizer import Tokenizer, load_tokenizer
from surespec.local.types import ModelConfig, SamplingParams, StepOutput
from surespec.local.weights import load_model_files

DEFAULT_KV_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """A consistent look at the engine: gauges first, then totals since the start.

    ``kv_usage`` is the reserved share of the KV cache (0 .. 1): a request reserves prompt and answer when it starts.
    ``per_pos[i]`` counts drafts whose first i + 1 tokens were all accepted; all counts are of verified drafts.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    num_speculative_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_pos: tuple[int, ...] = ()
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0


class LocalEngine:
    """Serves token ids in, token ids out, for many requests at once. Thread-safe; see the methods.

    ``max_model_len`` (tokens of prompt and answer) defaults to the model's context, ``kv_cache_tokens`` (all running
    requests together) to 16,384 or one full context, if that is more. ``error`` is set once the engine has failed; it
    then refuses everything.
    """

    def __init__(
        self,
        target: TargetModel,
        *,
        speculative: SpeculativeConfig | None = None,
        drafter: Drafter | None = None,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        kv_cache_tokens: int | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Raises `ConfigError` for limits that make no sense, and when only one of speculative and drafter is given."""
        if (speculative is None) != (drafter is None):
            raise ConfigError("A speculative config and a drafter belong together, but only one was given.")
        self.max_model_len = _check_limits(target.config, speculative, max_num_seqs, max_model_len, kv_cache_tokens)
        default = max(DEFAULT_KV_TOKENS, self.max_model_len)
        self.kv_cache_tokens = kv_cache_tokens if kv_cache_tokens is not None else default
        self.target, self.speculative, self.drafter = target, speculative, drafter
        self.max_num_seqs = max_num_seqs
        self.error: EngineError | None = None
        self._eos = frozenset(eos_token_ids if eos_token_ids is not None else target.config.eos_token_ids)
        self._scheduler = Scheduler(max_num_seqs, self.max_model_len, self.kv_cache_tokens)
        self._stepper = Stepper(target, self._scheduler, speculative, drafter)
        self._condition = threading.Condition()  # guards all that follows, the scheduler and the totals
        self._incoming: list[Sequence] = []
        self._aborts: list[int] = []
        self._next_id = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="surespec-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- what callers use

    @property
    def num_speculative_tokens(self) -> int:
        """The k in force; 0 when speculation is off."""
        return self._stepper.k

    def submit(self, prompt_ids: Seq[int], params: SamplingParams, on_output: Callable[[StepOutput], None]) -> int:
        """Queue a request and return its id. ``on_output`` is called from the engine's thread and must not block; its
        last call has a finish reason. A stop or end token is part of the output; nothing after it is.

        Raises `ConfigError` for a request that can never run, `EngineError` when the engine has failed or is closed.
        """
        limit = self._scheduler.check(len(prompt_ids), params)
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.target.config.vocab_size:
            raise ConfigError(
                f"The prompt holds token ids from {min(prompt_ids)} to {max(prompt_ids)}, but the model's vocabulary "
                f"ends at {self.target.config.vocab_size - 1}."
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        with self._condition:
            if self.error is not None:
                raise EngineError(self.error.message, hint="Restart the server.")
            if self._closing:
                raise EngineError("The engine is closed.")
            self._next_id += 1
            self._incoming.append(Sequence.create(self._next_id, prompt_ids, params, limit, stop_ids, on_output))
            self._condition.notify()
            return self._next_id

    async def generate(self, prompt_ids: Seq[int], params: SamplingParams) -> AsyncIterator[StepOutput]:
        """The outputs of one request as they come. Closing the iterator early aborts the request and frees its slot.

        Raises what `submit` raises, and `EngineError` when the engine fails on the way.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[StepOutput] = asyncio.Queue()
        request_id = self.submit(
            prompt_ids, params, lambda output: _ignore(loop.call_soon_threadsafe(queue.put_nowait, output))
        )
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = output.finish_reason is not None
                if output.error:
                    raise EngineError(output.error)
                yield output
        finally:
            if not finished:
                self.abort(request_id)

    def abort(self, request_id: int) -> None:
        """End a request before the next step; its last output has finish reason ``abort``. Unknown ids are ignored."""
        with self._condition:
            self._aborts.append(request_id)
            self._condition.notify()

    def set_num_speculative_tokens(self, k: int) -> None:
        """Change k from the next step on: 0 turns speculation off, the k the engine was loaded with is the most.

        Raises `ConfigError` for another k.
        """
        if not 0 <= k <= self._stepper.max_k:
            raise ConfigError(
                f"num_speculative_tokens is {k}, but this engine was started with {self._stepper.max_k}: "
                f"0 (off) to {self._stepper.max_k} is possible."
                if self._stepper.max_k
                else f"num_speculative_tokens is {k}, but this engine was started without a speculative config."
            )
        self._stepper.k = k

    def counters(self) -> EngineCounters:
        """The counters now; never torn between two steps."""
        with self._condition:
            totals = self._stepper.totals
            return EngineCounters(
                running=len(self._scheduler.running),
                waiting=len(self._scheduler.waiting) + len(self._incoming),
                kv_usage=self._scheduler.reserved / self.kv_cache_tokens,
                num_speculative_tokens=self._stepper.k,
                drafts=totals.drafts,
                drafted=totals.drafted,
                accepted=sum(totals.per_pos),
                per_pos=tuple(totals.per_pos),
                prompt_tokens=totals.prompt_tokens,
                generation_tokens=totals.generation_tokens,
                steps=totals.steps,
            )

    def close(self) -> None:
        """Abort what runs or waits, stop the thread and wait for it. May be called twice."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _loop(self) -> None:
        try:
            while self._take_in():
                if parts := self._stepper.plan():
                    output = self._stepper.compute(parts)
                    with self._condition:
                        emitted = self._stepper.settle(parts, output)
                    self._deliver(emitted)
        except Exception as failure:  # anything at all: callers must hear of it instead of waiting for ever
            self.error = EngineError(f"The embedded engine failed: {type(failure).__name__}: {failure}")
        self._end_all(self.error.message if self.error else "")

    def _take_in(self) -> bool:
        """Wait until there is something to do; take in new and aborted requests. False: the engine is to close."""
        scheduler = self._scheduler
        with self._condition:
            while not (self._closing or self._incoming or self._aborts or scheduler.running or scheduler.waiting):
                self._condition.wait()
            if self._closing:
                return False
            for sequence in self._incoming:
                scheduler.add(sequence)
            self._incoming.clear()
            aborted = [s for s in map(scheduler.find, self._aborts) if s is not None]
            self._aborts.clear()
            for sequence in aborted:
                self._stepper.remove(sequence)
            self._stepper.admit()
        self._deliver([(s, StepOutput((), None, "abort", s.stats)) for s in aborted])
        return True

    def _deliver(self, emitted: Seq[tuple[Sequence, StepOutput]]) -> None:
        """Hand outputs out. Whoever cannot take them (a closed event loop) loses the request, not the engine."""
        for sequence, output in emitted:
            try:
                sequence.on_output(output)
            except Exception:
                if output.finish_reason is None:
                    self.abort(sequence.request_id)

    def _end_all(self, message: str) -> None:
        """Give every request its last output; nobody is left waiting."""
        with self._condition:
            self._closing = True
            left = [*self._scheduler.running, *self._scheduler.waiting, *self._incoming]
            self._incoming.clear()
            self._scheduler.clear()
        self._deliver([(s, StepOutput((), None, "abort", s.stats, message)) for s in left])


def build_engine(
    model: str | Path,
    precision: str = "fp32",
    speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None = None,
    max_num_seqs: int = 16,
    max_model_len: int | None = None,
    kv_cache_tokens: int | None = None,
    threads: int | None = None,
) -> tuple[LocalEngine, Tokenizer]:
    """Load a model (a name or a path, as `surespec.fetch.resolve_model` takes it) with its drafter, ready to serve.

    A drafter model runs in the target's precision. What small files can tell is checked before any weights are read.
    Raises `ConfigError` (settings), `ModelError` (files that are missing, broken or do not fit) and `FetchError` (a
    model that cannot be fetched).
    """
    config = speculative_config
    if config is not None and not isinstance(config, SpeculativeConfig):
        config = parse_speculative_config(config)
    files = load_model_files(resolve_model(model))
    tokenizer = load_tokenizer(files)
    longest = _check_limits(files.config, config, max_num_seqs, max_model_len, kv_cache_tokens)
    aux_layers: tuple[int, ...] = ()
    draft_path = None if config is None or config.model is None else resolve_model(config.model)
    draft_files = None
    if config is not None and draft_path is not None:
        if config.method == "eagle3":
            aux_layers = read_aux_layers(draft_path, files.config.num_layers)
        else:
            draft_files = load_model_files(draft_path)
            check_vocabulary(draft_files.config.vocab_size, files.config.vocab_size)
    target = TargetModel(files, precision, aux_layers, threads)
    drafter: Drafter | None = None
    if config is not None:
        probabilistic, vocab = config.draft_sample_method == "probabilistic", files.config.vocab_size
        room = {"max_num_seqs": max_num_seqs, "max_len": min(config.max_model_len or longest, longest)}
        if draft_files is not None:
            draft = TargetModel(draft_files, precision, threads=threads)
            drafter = DraftModelDrafter(draft, vocab, probabilistic=probabilistic, **room)
        elif draft_path is not None:
            drafter = Eagle3Drafter(Eagle3Head(draft_path, target), vocab, probabilistic=probabilistic, **room)
        else:
            drafter = NgramDrafter(config.prompt_lookup_min or 1, config.prompt_lookup_max or 1, room["max_len"])
    engine = LocalEngine(
        target,
        speculative=config,
        drafter=drafter,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return engine, tokenizer


def _check_limits(
    model: ModelConfig,
    config: SpeculativeConfig | None,
    max_num_seqs: int,
    max_model_len: int | None,
    kv_cache_tokens: int | None,
) -> int:
    """The longest sequence (tokens) the engine will serve. Raises `ConfigError` for limits that make no sense."""
    context = model.max_position_embeddings
    longest = max_model_len if max_model_len is not None else context
    if not 2 <= longest <= context:
        raise ConfigError(f"max_model_len is {longest}, but this model takes 2 to {context} tokens.")
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {max_num_seqs}, but at least 1 is needed.")
    if kv_cache_tokens is not None and kv_cache_tokens < 2:
        raise ConfigError(f"kv_cache_tokens is {kv_cache_tokens}, but at least 2 are needed.")
    if config is not None and config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"speculative config: max_model_len is {config.max_model_len}, but the target's is {longest}.",
            hint="The drafter's may be shorter, not longer.",
        )
    return longest


def _ignore(_: object) -> None:
    """Drop a value where a callback must return None."""


__all__ = ["EngineCounters", "LocalEngine", "build_engine"]
