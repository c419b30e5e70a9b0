"""An EAGLE-3 head drafts from the target's own hidden states (Li et al., arXiv 2503.01840).

Position t of the head's cache stands for token t + 1 beside the target's auxiliary states at t. The positions of
accepted drafts are read again with the target's states, since the head drafted them from its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from surespec.local.drafters.cached import BLOCK, CachedDrafter, Guess
from surespec.local.eagle import DraftOutput, Eagle3Head
from surespec.local.sampler import ProbArray
from surespec.local.types import FloatArray, IntArray

if TYPE_CHECKING:
    from surespec.local.scheduler import Sequence


class Eagle3Drafter(CachedDrafter):
    """Drafts with ``head``. ``target_vocab`` and ``max_len`` are in tokens; the latter is cut to the head's context."""

    shift = 1

    def __init__(
        self, head: Eagle3Head, target_vocab: int, *, max_num_seqs: int, max_len: int, probabilistic: bool = False
    ) -> None:
        max_len = min(max_len, head.config.max_position_embeddings)
        super().__init__(head.new_cache(max_num_seqs, max_len), max_len, probabilistic)
        self.head, self.target_vocab = head, target_vocab
        # By slot: the states of positions valid .. computed - 1; None once some of them were let go.
        self._aux: list[list[FloatArray] | None] = []
        self._no_aux = np.zeros((1, 3 * head.config.hidden_size), np.float32)

    def start(self, sequence: Sequence) -> None:
        """Take the next slot, empty."""
        super().start(sequence)
        self._aux.append([])

    def release(self, sequence: Sequence) -> None:
        """Free the slot; what stood in the last one moves here."""
        super().release(sequence)
        self._aux[sequence.slot] = self._aux[-1]
        self._aux.pop()

    def observe(self, sequence: Sequence, start: int, aux: FloatArray | None, idle: bool) -> None:
        """Keep the states until they are read: at the next draft, or a block of them at a time (long prompts), so that
        they never pile up. While nothing is drafted a block is kept and none is read, since reading a token costs the
        head a thirtieth of what the token costs the target; what has more to read by then is not drafted for again.
        """
        if aux is None:
            raise ValueError("an EAGLE-3 drafter needs a target that gives its auxiliary states")
        slot = sequence.slot
        kept = self._aux[slot]
        if kept is None:
            return
        self.valid[slot] = min(self.valid[slot], start)
        kept.append(aux)
        backlog = sequence.computed - self.valid[slot] > BLOCK
        if sequence.length > self.max_len or (idle and backlog):  # past its context the head will not be asked again
            self._aux[slot] = None
        elif backlog:
            self.catch_up(sequence, sequence.computed - 1)

    def can_draft(self, sequence: Sequence) -> bool:
        """Not where states are missing."""
        return self._aux[sequence.slot] is not None

    def first(self, batch: Seq[Sequence], starts: list[int], ids: list[IntArray], known: list[bool]) -> Guess:
        """Read the backlogs beside the target's states."""
        aux = [
            self._take(s.slot, len(i)) if real else self._no_aux for s, i, real in zip(batch, ids, known, strict=True)
        ]
        slots = [s.slot for s in batch]
        return _guess(self.head.extend(slots, starts, ids, aux, self.cache, want_logits=self.probabilistic))

    def following(self, batch: Seq[Sequence], starts: list[int], tokens: IntArray, before: Guess) -> Guess:
        """Read the newest drafts beside the head's own states."""
        assert before.hidden is not None  # set by `_guess`
        slots = [s.slot for s in batch]
        return _guess(self.head.step(slots, starts, tokens, before.hidden, self.cache, want_logits=self.probabilistic))

    def to_target(self, own: int) -> int:
        """Through the checkpoint's table."""
        return int(self.head.d2t[own])

    def spread(self, q: ProbArray) -> ProbArray:
        """Tokens outside the head's vocabulary get nothing."""
        full = np.zeros((len(q), self.target_vocab))
        full[:, self.head.d2t] = q
        return full

    def _take(self, slot: int, count: int) -> FloatArray:
        """The oldest ``count`` of the states kept, removed."""
        kept = self._aux[slot]
        assert kept is not None  # see `can_draft`
        rows = kept[0] if len(kept) == 1 else np.concatenate(kept)
        self._aux[slot] = [rows[count:]] if len(rows) > count else []
        return rows[:count]


def _guess(out: DraftOutput) -> Guess:
    return Guess(out.token_ids, out.logits if out.logits is not None else out.hidden[:, :0], out.hidden)


__all__ = ["Eagle3Drafter"]
