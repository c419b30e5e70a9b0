"""Who computes what in the next forward pass. No model in here: sequences in, a plan out.

Continuous batching: a request waits until a slot and its whole KV reservation are free, reads its prompt in chunks,
then decodes one step at a time with all the others. Prompt passes and decode passes alternate while both kinds have
work, so a long prompt delays the streams already running by one chunk at a time. Running sequences fill slots 0 ..
R - 1 without a hole: when one leaves, the last moves into its slot (`KVCache.free` moves the cache the same way).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from surespec.errors import ConfigError
from surespec.local.sampler import is_greedy
from surespec.local.types import IntArray, RequestStats, SamplingParams, StepOutput

PREFILL_TOKENS = 512  # prompt tokens a pass when nobody decodes
PREFILL_TOKENS_SHARED = 128  # and when somebody does: about the time of a few decode steps


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its tokens and how far it is.

    ``ids`` has room for ``limit`` tokens, of which ``length`` are known; the target's cache holds ``computed`` of them.
    While decoding, ``computed == length - 1``: the newest token has been emitted but not been read yet.
    """

    request_id: int
    ids: IntArray
    prompt_len: int
    limit: int
    params: SamplingParams
    stop_ids: frozenset[int]
    on_output: Callable[[StepOutput], None]
    rng: np.random.Generator
    greedy: bool
    length: int = 0
    computed: int = 0
    slot: int = -1
    stats: RequestStats = field(default_factory=RequestStats)
    submitted_at: float = field(default_factory=time.perf_counter)

    @classmethod
    def create(
        cls,
        request_id: int,
        prompt_ids: Seq[int],
        params: SamplingParams,
        limit: int,
        stop_ids: frozenset[int],
        on_output: Callable[[StepOutput], None],
    ) -> Sequence:
        """A new sequence holding its prompt; ``limit`` comes from `Scheduler.check`."""
        ids = np.zeros(limit, np.int64)
        ids[: len(prompt_ids)] = prompt_ids
        return cls(
            request_id,
            ids,
            len(prompt_ids),
            limit,
            params,
            stop_ids,
            on_output,
            np.random.default_rng(params.seed),
            is_greedy(params),
            length=len(prompt_ids),
            stats=RequestStats(prompt_tokens=len(prompt_ids)),
        )

    @property
    def in_prompt(self) -> bool:
        """True until the whole prompt is in the target's cache."""
        return self.computed < self.prompt_len

    def append(self, tokens: Seq[int]) -> None:
        """Add emitted tokens."""
        self.ids[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)


@dataclass(frozen=True, slots=True)
class PromptPass:
    """The next pass reads ``counts[i]`` prompt tokens of ``sequences[i]`` (contiguous slots)."""

    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodePass:
    """The next pass decodes ``sequences`` (contiguous slots), ``num_decoding`` of them.

    One still in its prompt may stand between two that decode; it then reads as many prompt tokens as the widest of them
    computes, which costs little.
    """

    sequences: tuple[Sequence, ...]
    num_decoding: int


class Scheduler:
    """Waiting queue, slots and KV reservations."""

    def __init__(self, max_num_seqs: int, max_model_len: int, kv_cache_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.kv_cache_tokens = kv_cache_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # index = slot
        self.reserved = 0  # tokens
        self._prompt_turn = True

    def check(self, prompt_len: int, params: SamplingParams) -> int:
        """The most tokens the sequence may come to hold: prompt and answer, cut at the model's length.

        That is also its KV reservation: k is cut towards the end, so nothing past it is ever computed.
        Raises `ConfigError` for a request that can never run, naming the numbers.
        """
        if prompt_len < 1:
            raise ConfigError("The prompt is empty.", hint="Send at least one token.")
        if params.max_tokens < 1:
            raise ConfigError(f"max_tokens is {params.max_tokens}, but must be at least 1.")
        if prompt_len >= self.max_model_len:
            raise ConfigError(
                f"The prompt has {prompt_len} tokens, but the model's context is {self.max_model_len} tokens, "
                "prompt and answer together.",
                hint="Shorten the prompt.",
            )
        limit = min(prompt_len + params.max_tokens, self.max_model_len)
        if limit > self.kv_cache_tokens:
            raise ConfigError(
                f"The request needs room for {limit} tokens ({prompt_len} of prompt and up to {limit - prompt_len} of "
                f"answer), but the KV cache holds {self.kv_cache_tokens}.",
                hint="Lower max_tokens, shorten the prompt, or start the server with a larger KV cache.",
            )
        return limit

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; first come, first served."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give slots to waiting sequences while slots and KV reservation last. Order is kept: nobody is overtaken."""
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            if self.reserved + self.waiting[0].limit > self.kv_cache_tokens:
                break
            sequence = self.waiting.popleft()
            sequence.slot = len(self.running)
            self.running.append(sequence)
            self.reserved += sequence.limit
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; the one in the last slot moves into the freed slot."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.reserved -= sequence.limit
        last = self.running.pop()
        if last is not sequence:
            self.running[sequence.slot] = last
            last.slot = sequence.slot
        sequence.slot = -1

    def clear(self) -> None:
        """Forget all sequences."""
        self.running.clear()
        self.waiting.clear()
        self.reserved = 0

    def find(self, request_id: int) -> Sequence | None:
        """The waiting or running sequence of a request."""
        return next((s for s in (*self.running, *self.waiting) if s.request_id == request_id), None)

    def next_pass(self) -> PromptPass | DecodePass | None:
        """What to compute next, or None when nothing runs. Prompt and decode passes take turns."""
        reading = [s for s in self.running if s.in_prompt]
        decoding = len(self.running) - len(reading)
        if reading and (self._prompt_turn or not decoding):
            self._prompt_turn = False
            return self._prompt_pass(reading, PREFILL_TOKENS_SHARED if decoding else PREFILL_TOKENS)
        self._prompt_turn = True
        if not decoding:
            return None
        slots = [s.slot for s in self.running if not s.in_prompt]
        return DecodePass(tuple(self.running[slots[0] : slots[-1] + 1]), decoding)

    @staticmethod
    def _prompt_pass(reading: list[Sequence], budget: int) -> PromptPass:
        """Fill the budget from the lowest slot on, as far as the slots are contiguous."""
        chosen: list[Sequence] = []
        counts: list[int] = []
        for sequence in reading:
            if budget <= 0 or (chosen and sequence.slot != chosen[-1].slot + 1):
                break
            count = min(budget, sequence.prompt_len - sequence.computed)
            chosen.append(sequence)
            counts.append(count)
            budget -= count
        return PromptPass(tuple(chosen), tuple(counts))


__all__ = ["DecodePass", "PromptPass", "Scheduler", "Sequence"]
