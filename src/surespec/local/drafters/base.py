"""What a drafter is to the engine: a few hooks around one question, ``propose``.

The engine calls, for each sequence: ``start`` once it has a slot, ``observe`` after every step that computed some of
it, ``release`` before its slot is given up. A drafter may be skipped for any number of steps (k = 0) and must still
draft correctly afterwards: what it has not read of a sequence it catches up on, or it says that it cannot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surespec.local.sampler import ProbArray
from surespec.local.types import FloatArray, IntArray

if TYPE_CHECKING:
    from surespec.local.scheduler import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens ``ids`` (n,), n <= k, and what they were drawn from: ``probs`` (n, vocab), or None when they were
    chosen without chance."""

    ids: IntArray
    probs: ProbArray | None = None


NO_DRAFT = Draft(np.zeros(0, np.int64))


class Drafter(ABC):
    """Proposes tokens for a batch of sequences. ``max_len`` is the longest sequence (tokens) it can draft for."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        """Draft up to ``ks[i]`` tokens to follow ``sequences[i]``; 0 asks for none.

        ``sequences`` come in slot order and fill a contiguous range of slots; one that is still in its prompt may stand
        among them, with k = 0.
        """

    def start(self, sequence: Sequence) -> None:  # noqa: B027 (a hook: most drafters need only some)
        """``sequence`` was given its slot, the next free one."""

    def observe(self, sequence: Sequence, start: int, aux: FloatArray | None, idle: bool) -> None:  # noqa: B027
        """The target has read positions ``start`` .. ``sequence.computed - 1`` for good, and the token after them is
        known; all drafts beyond are void. ``aux`` (n, 3 * hidden) goes with these positions (None: not asked for).
        ``idle``: nothing is drafted at present (k = 0), so that any work here would cost and gain nothing."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether ``propose`` may be asked for ``sequence``."""
        return True

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """``sequence`` gives up its slot; the sequence in the last slot moves into it."""


__all__ = ["NO_DRAFT", "Draft", "Drafter"]
