"""One step of the engine, without its thread: plan, compute, settle.

The scheduler says who computes what; the drafter proposes; one forward pass of the target reads, for every sequence,
its newest token and the drafts behind it; the accept rule keeps what the target would have said itself and adds one
token of the target's own. Without a drafter the drafts are empty and the same step is plain decoding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surespec.local import sampler
from surespec.local.drafters.base import NO_DRAFT, Draft, Drafter
from surespec.local.scheduler import PromptPass, Scheduler, Sequence
from surespec.local.speculative import SpeculativeConfig
from surespec.local.types import FinishReason, FloatArray, ForwardOutput, IntArray, SeqChunk, StepOutput

if TYPE_CHECKING:
    from surespec.local.model import TargetModel


@dataclass(slots=True)
class Part:
    """One sequence's share of a forward pass: prompt tokens (``draft`` None), or its newest token and ``draft``."""

    sequence: Sequence
    chunk: SeqChunk
    draft: Draft | None


@dataclass(slots=True)
class Totals:
    """Counts since the start, in tokens; drafts are counted when verified. ``per_pos[i]``: first i + 1 accepted."""

    per_pos: list[int]
    drafts: int = 0
    drafted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0


class Stepper:
    """Scheduler, target, cache and drafter, moved on one step at a time. Not thread-safe: `LocalEngine` is."""

    def __init__(
        self,
        target: TargetModel,
        scheduler: Scheduler,
        speculative: SpeculativeConfig | None,
        drafter: Drafter | None,
    ) -> None:
        self.target, self.scheduler, self.speculative, self.drafter = target, scheduler, speculative, drafter
        self.cache = target.new_cache(scheduler.max_num_seqs, scheduler.max_model_len)
        self.max_k = speculative.num_speculative_tokens if speculative else 0
        self.k = self.max_k  # the k in force; may be changed between steps
        self.totals = Totals([0] * self.max_k)

    def admit(self) -> None:
        """Let waiting sequences start, as many as fit."""
        for sequence in self.scheduler.admit():
            sequence.stats.queued_s = time.perf_counter() - sequence.submitted_at
            self.cache.alloc()
            if self.drafter is not None:
                self.drafter.start(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's slot everywhere; target, drafter and scheduler close the hole in the same way."""
        if (slot := sequence.slot) >= 0:
            if self.drafter is not None:
                self.drafter.release(sequence)
            self.cache.free(slot)
        self.scheduler.remove(sequence)

    def plan(self) -> list[Part]:
        """What each sequence computes next, drafts included; empty when nothing runs."""
        work = self.scheduler.next_pass()
        if work is None:
            return []
        if isinstance(work, PromptPass):
            return [Part(s, _prompt(s, n), None) for s, n in zip(work.sequences, work.counts, strict=True)]
        drafts = self._propose(work.sequences, work.num_decoding)
        width = max(len(draft.ids) for draft in drafts) + 1
        return [
            Part(s, _prompt(s, min(width, s.prompt_len - s.computed)), None)
            if s.in_prompt
            else Part(s, _newest(s, draft), draft)
            for s, draft in zip(work.sequences, drafts, strict=True)
        ]

    def _propose(self, sequences: tuple[Sequence, ...], num_decoding: int) -> list[Draft]:
        """Ask the drafter; k is cut so that no sequence outgrows its limit or the drafter's context."""
        if self.drafter is None or self.speculative is None or self.k == 0:
            return [NO_DRAFT] * len(sequences)
        k, drafter = min(self.k, self.speculative.k_for_batch(num_decoding)), self.drafter
        ks = [
            0
            if s.in_prompt or s.length + k > drafter.max_len or not drafter.can_draft(s)
            else min(k, s.limit - s.length - 1)
            for s in sequences
        ]
        return self.drafter.propose(sequences, ks) if any(ks) else [NO_DRAFT] * len(ks)

    def compute(self, parts: list[Part]) -> ForwardOutput:
        """The forward pass."""
        return self.target.forward([part.chunk for part in parts], self.cache)

    def settle(self, parts: list[Part], output: ForwardOutput) -> list[tuple[Sequence, StepOutput]]:
        """Accept, count, append and stop, sequence by sequence; finished sequences leave their slots."""
        best: IntArray = output.logits.argmax(axis=-1)
        emitted: list[tuple[Sequence, StepOutput]] = []
        row = token = 0
        self.totals.steps += 1
        idle = self.speculative is None or min(self.k, self.speculative.k_for_batch(len(self.scheduler.running))) == 0
        for part in parts:
            sequence, chunk, size = part.sequence, part.chunk, len(part.chunk.token_ids)
            rows = size - chunk.logits_from
            if rows:
                logits = output.logits[row : row + rows]
                emitted.append((sequence, self._emit(sequence, logits, self._choose(part, logits, best[row:]))))
            sequence.computed = chunk.start + size if part.draft is None else sequence.length - 1
            if self.drafter is not None:
                kept = sequence.computed - chunk.start
                aux = None if output.aux is None else output.aux[token : token + kept]
                self.drafter.observe(sequence, chunk.start, aux, idle)
            row, token = row + rows, token + size
        for sequence, step in emitted:
            if step.finish_reason is not None:
                self.remove(sequence)
        return emitted

    def _choose(self, part: Part, logits: FloatArray, best: IntArray) -> list[int]:
        """The tokens that follow by the accept rule; ``logits`` (n, V) come behind the newest token and each draft."""
        sequence, draft = part.sequence, part.draft or NO_DRAFT
        if sequence.greedy:
            accepted, following = sampler.accept_greedy(draft.ids, best)
            tokens = [*draft.ids[:accepted].tolist(), following]
        else:
            params = sequence.params
            probs = sampler.probs_from_logits(logits, params.temperature, params.top_p, params.top_k)
            tokens = sampler.accept_rejection(draft.ids, draft.probs, probs, sequence.rng)
        if part.draft is None:
            self.totals.prompt_tokens += sequence.prompt_len
            sequence.stats.first_token_s = time.perf_counter() - sequence.submitted_at
        elif len(draft.ids):
            self._count(sequence, len(draft.ids), len(tokens) - 1)
        return tokens

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Book one verified draft, in the totals and in the request's own record."""
        totals, stats = self.totals, sequence.stats
        totals.drafts += 1
        totals.drafted += drafted
        for position in range(accepted):
            totals.per_pos[position] += 1
        stats.drafts += 1
        stats.drafted += drafted
        stats.accepted += accepted
        if not stats.acceptance_histogram:
            stats.acceptance_histogram = [0] * (self.max_k + 1)
        stats.acceptance_histogram[accepted] += 1

    def _emit(self, sequence: Sequence, logits: FloatArray, tokens: list[int]) -> StepOutput:
        """Append ``tokens`` up to a stop token or the request's end, and make the step's output of them."""
        reason: FinishReason | None = None
        for i, token in enumerate(tokens):
            if token in sequence.stop_ids:
                tokens, reason = tokens[: i + 1], "stop"
                break
        if reason is None and sequence.length + len(tokens) >= sequence.limit:
            reason = "length"
        sequence.append(tokens)
        sequence.stats.output_tokens += len(tokens)
        self.totals.generation_tokens += len(tokens)
        wanted = sequence.params.logprobs
        found = None if wanted is None else sampler.logprobs(logits[: len(tokens)], tokens, wanted)
        return StepOutput(tuple(tokens), found, reason, sequence.stats if reason else None)


def _prompt(sequence: Sequence, count: int) -> SeqChunk:
    """The next ``count`` prompt tokens; logits only behind the last token of the prompt."""
    end = sequence.computed + count
    ids = sequence.ids[sequence.computed : end]
    return SeqChunk(sequence.slot, sequence.computed, ids, count - 1 if end == sequence.prompt_len else count)


def _newest(sequence: Sequence, draft: Draft) -> SeqChunk:
    """The newest token and the drafts behind it, all with logits."""
    newest = sequence.ids[sequence.computed : sequence.length]
    ids = np.concatenate((newest, draft.ids)) if len(draft.ids) else newest
    return SeqChunk(sequence.slot, sequence.computed, ids, 0)


__all__ = ["Part", "Stepper", "Totals"]
