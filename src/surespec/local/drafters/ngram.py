"""Prompt lookup: what followed the same few tokens earlier in this sequence is proposed again.

The rule is vLLM's (``v1/spec_decode/ngram_proposer.py``): the longest suffix of ``prompt_lookup_min`` to ``_max``
tokens that occurred before, at its earliest occurrence, and up to k tokens that followed it there. vLLM scans the
sequence at every step; here an index of n-grams grows with it, so a step costs a few dictionary lookups at any length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from surespec.local.drafters.base import NO_DRAFT, Draft, Drafter
from surespec.local.types import IntArray

if TYPE_CHECKING:
    from surespec.local.scheduler import Sequence


class NgramIndex:
    """The earliest continuation of every n-gram of one growing sequence, for n from ``low`` to ``high``."""

    def __init__(self, low: int, high: int) -> None:
        self._tables: dict[int, dict[bytes, int]] = {n: {} for n in range(high, low - 1, -1)}
        self._seen = 0

    def extend(self, ids: IntArray, length: int) -> None:
        """Take in tokens up to ``length``. An n-gram enters once a token follows it: the suffix never finds itself."""
        for n, table in self._tables.items():
            for end in range(max(self._seen, n), length):
                table.setdefault(ids[end - n : end].tobytes(), end)
        self._seen = max(self._seen, length)

    def find(self, ids: IntArray, length: int) -> int | None:
        """Where the tokens after the longest known suffix of ``ids[:length]`` begin, or None."""
        for n, table in self._tables.items():
            if n <= length and (position := table.get(ids[length - n : length].tobytes())) is not None:
                return position
        return None


class NgramDrafter(Drafter):
    """Prompt lookup over prompt and answer. Needs no model and draws nothing by chance."""

    def __init__(self, low: int, high: int, max_len: int) -> None:
        super().__init__(max_len)
        self.low, self.high = low, high
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, sequences: Seq[Sequence], ks: Seq[int]) -> list[Draft]:
        """See `Drafter.propose`; fewer than k tokens, or none, where the sequence holds no more."""
        return [self._propose(s, k) if k > 0 else NO_DRAFT for s, k in zip(sequences, ks, strict=True)]

    def _propose(self, sequence: Sequence, k: int) -> Draft:
        index = self._indexes.get(sequence.request_id)
        if index is None:
            index = self._indexes[sequence.request_id] = NgramIndex(self.low, self.high)
        index.extend(sequence.ids, sequence.length)
        begin = index.find(sequence.ids, sequence.length)
        if begin is None:
            return NO_DRAFT
        return Draft(sequence.ids[begin : min(begin + k, sequence.length)].copy())

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's index."""
        self._indexes.pop(sequence.request_id, None)


__all__ = ["NgramDrafter", "NgramIndex"]
