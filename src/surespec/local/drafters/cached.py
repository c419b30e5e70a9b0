"""What the drafters with a model and a KV cache of their own share.

Such a drafter has read ``valid`` positions of a sequence. To draft it catches up to the sequence's end, in one pass for
all sequences, and then goes on with its own words, one pass a token. Entries of rejected drafts stay in the cache until
they are written over; ``valid`` says what counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surespec.local import sampler
from surespec.local.drafters.base import NO_DRAFT, Draft, Drafter
from surespec.local.kv import KVCache
from surespec.local.types import FloatArray, IntArray

if TYPE_CHECKING:
    from surespec.local.scheduler import Sequence

LONG = 16  # a longer backlog (a prompt, mostly) is read alone, so that the others need no padding to its width
BLOCK = 256  # positions of one such pass


@dataclass(frozen=True, slots=True)
class Guess:
    """What one pass says of B sequences: the likeliest next token (B,) in the target's ids, the logits (B, own
    vocabulary), and the hidden states (B, H) that the next pass takes, if it takes any."""

    token_ids: IntArray
    logits: FloatArray
    hidden: FloatArray | None = None


class CachedDrafter(Drafter):
    """Drafts token by token with a model that keeps its own cache in the same slots as the target.

    ``shift``: position t of the cache reads token t + shift (0 for a language model, 1 for an EAGLE head, which reads
    the token after the one whose hidden state it is given).
    """

    shift = 0

    def __init__(self, cache: KVCache, max_len: int, probabilistic: bool) -> None:
        super().__init__(max_len)
        self.cache = cache
        self.probabilistic = probabilistic
        self.valid: list[int] = []  # by slot, in positions

    @abstractmethod
    def first(self, batch: Seq[Sequence], starts: list[int], ids: list[IntArray], known: list[bool]) -> Guess:
        """Read the tokens ``ids[i]`` at positions ``starts[i]`` on of ``batch[i]`` (contiguous slots). Where ``known``
        is false the one token only fills the gap between two slots."""

    @abstractmethod
    def following(self, batch: Seq[Sequence], starts: list[int], tokens: IntArray, before: Guess) -> Guess:
        """Read one drafted token each (B,), the choice made from ``before``."""

    def to_target(self, own: int) -> int:
        """The target's id of a token of the drafter's own vocabulary."""
        return own

    def spread(self, q: sampler.ProbArray) -> sampler.ProbArray:
        """Probabilities (1, own vocabulary) as (1, target's vocabulary)."""
        return q

    def start(self, sequence: Sequence) -> None:
        """Take the next slot, empty."""
        self.cache.alloc()
        self.valid.append(0)

    def release(self, sequence: Sequence) -> None:
        """Free the slot; what stood in the last one moves here."""
        self.cache.free(sequence.slot)
        self.valid[sequence.slot] = self.valid[-1]
        self.valid.pop()

    def observe(self, sequence: Sequence, start: int, aux: FloatArray | None, idle: bool) -> None:
        """Positions past what the target has kept hold rejected drafts."""
        self.valid[sequence.slot] = min(self.valid[sequence.slot], sequence.computed)

    def catch_up(self, sequence: Sequence, end: int) -> None:
        """Read one sequence alone up to position ``end`` (exclusive), a block at a time."""
        while (start := self.valid[sequence.slot]) < end:
            count = min(BLOCK, end - start)
            ids = sequence.ids[start + self.shift : start + self.shift + count]
            self.first([sequence], [start], [ids], [True])
            self.valid[sequence.slot] = start + count

    def propose(self, sequences: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        """See `Drafter.propose`; always as many tokens as asked for."""
        asked = [i for i, k in enumerate(ks) if k > 0]
        low, high = asked[0], asked[-1] + 1
        batch, wants = sequences[low:high], ks[low:high]
        for sequence, k in zip(batch, wants, strict=True):
            end = sequence.length - self.shift
            if k > 0 and end - self.valid[sequence.slot] > LONG:
                self.catch_up(sequence, end - 1)
        guess = self._read_backlog(batch, wants)
        probs: list[list[sampler.ProbArray]] = [[] for _ in batch]
        columns = [self._choose(batch, wants, 0, guess, probs)]
        for step in range(1, max(wants)):
            starts = [self.valid[s.slot] for s in batch]
            guess = self.following(batch, starts, columns[-1], guess)
            columns.append(self._choose(batch, wants, step, guess, probs))
            for sequence, k in zip(batch, wants, strict=True):
                self.valid[sequence.slot] += k > step  # the others wrote one token past what is valid: no harm
        ids = np.stack(columns, axis=1)
        drafts = [
            Draft(ids[i, :k], np.concatenate(probs[i]) if probs[i] else None) if k > 0 else NO_DRAFT
            for i, k in enumerate(wants)
        ]
        return [NO_DRAFT] * low + drafts + [NO_DRAFT] * (len(ks) - high)

    def _read_backlog(self, batch: Seq[Sequence], wants: Seq[int]) -> Guess:
        """One pass over what each sequence has that was not read; its last position predicts the first draft."""
        starts = [self.valid[s.slot] for s in batch]
        filler = np.zeros(1, np.int64)
        ids = [
            s.ids[start + self.shift : s.length] if k > 0 else filler
            for s, start, k in zip(batch, starts, wants, strict=True)
        ]
        guess = self.first(batch, starts, ids, [k > 0 for k in wants])
        for sequence, k in zip(batch, wants, strict=True):
            if k > 0:
                self.valid[sequence.slot] = sequence.length - self.shift
        return guess

    def _choose(
        self, batch: Seq[Sequence], wants: Seq[int], step: int, guess: Guess, probs: list[list[sampler.ProbArray]]
    ) -> IntArray:
        """The next token of each (B,): the likeliest, or one drawn at the request's temperature (its q: ``probs``).

        Only the temperature shapes q, as in vLLM: q need not know top_k and top_p for the output to be exact.
        """
        if not self.probabilistic:
            return guess.token_ids
        chosen = guess.token_ids.copy()
        for i, sequence in enumerate(batch):
            if wants[i] > step and not sequence.greedy:
                q = sampler.probs_from_logits(guess.logits[i : i + 1], sequence.params.temperature)
                chosen[i] = self.to_target(sampler.sample(q[0], sequence.rng))
                probs[i].append(self.spread(q))
        return chosen


__all__ = ["CachedDrafter", "Guess"]
