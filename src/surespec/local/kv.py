"""The KV cache: one NumPy array that ONNX Runtime reads and writes in place.

Layout ``data[2 * layer + (0: key, 1: value), slot, kv_head, position, head_dim]``, fp32. The running sequences occupy
slots 0 .. R-1 without gaps, so that any range of slots of one layer is one contiguous block which a graph can bind
without a copy. The position axis is as long as the longest running sequence needs, in steps of ``STEP``; growing or
shrinking it copies the used slots once. A rejected draft needs no clean-up: its positions are written again later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surespec.errors import EngineError
from surespec.local.types import FloatArray

STEP = 128


class KVCache:
    """Keys and values of up to ``max_slots`` sequences of up to ``max_len`` tokens.

    ``max_tokens`` is the budget that ``reserve`` counts against (default: every slot full). The array itself grows with
    what is used; ``data`` is another array after that, and views of the old one are worth nothing.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_slots: int,
        max_len: int,
        max_tokens: int | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.max_slots = max_slots
        self.max_len = max_len
        self.max_tokens = max_slots * max_len if max_tokens is None else max_tokens
        self.num_slots = 0
        self.reserved_tokens = 0
        self.lengths: NDArray[np.int64] = np.zeros(max_slots, np.int64)
        self.data: FloatArray = self._empty(min(STEP, self._whole_steps(max_len)))

    def _empty(self, length: int) -> FloatArray:
        # Zeros, not garbage: a masked position weighs nothing, but 0 * NaN would still be NaN.
        return np.zeros((2 * self.num_layers, self.max_slots, self.num_kv_heads, length, self.head_dim), np.float32)

    @staticmethod
    def _whole_steps(length: int) -> int:
        return -(-max(length, 1) // STEP) * STEP

    @property
    def length(self) -> int:
        """The length of the position axis, in tokens."""
        return int(self.data.shape[3])

    @property
    def num_bytes(self) -> int:
        """Bytes of the array as laid out now."""
        return int(self.data.nbytes)

    @property
    def usage(self) -> float:
        """Reserved share of the token budget, 0 .. 1."""
        return self.reserved_tokens / self.max_tokens if self.max_tokens else 0.0

    def can_reserve(self, tokens: int) -> bool:
        """Whether ``tokens`` more fit into the budget and a slot is free."""
        return self.num_slots < self.max_slots and self.reserved_tokens + tokens <= self.max_tokens

    def reserve(self, tokens: int) -> None:
        """Count ``tokens`` against the budget. EngineError when they do not fit."""
        if self.reserved_tokens + tokens > self.max_tokens:
            raise EngineError(
                f"The KV cache has {self.max_tokens - self.reserved_tokens} of {self.max_tokens} tokens left; "
                f"{tokens} were asked for."
            )
        self.reserved_tokens += tokens

    def release(self, tokens: int) -> None:
        """Give ``tokens`` back to the budget."""
        self.reserved_tokens = max(0, self.reserved_tokens - tokens)

    def alloc(self) -> int:
        """Take the next slot (its number is the count of slots before). EngineError when all are taken."""
        if self.num_slots == self.max_slots:
            raise EngineError(f"All {self.max_slots} slots of the KV cache are taken.")
        slot = self.num_slots
        self.num_slots += 1
        self.lengths[slot] = 0
        return slot

    def free(self, slot: int) -> tuple[int, int] | None:
        """Give ``slot`` back. The last slot moves into the gap: returns (moved from, moved to), or None."""
        if not 0 <= slot < self.num_slots:
            raise EngineError(f"Slot {slot} of the KV cache is not in use.")
        last = self.num_slots - 1
        self.num_slots = last
        moved = None
        if slot != last:
            used = int(self.lengths[last])
            self.data[:, slot, :, :used] = self.data[:, last, :, :used]
            self.lengths[slot] = used
            moved = (last, slot)
        self.lengths[last] = 0
        self._shrink()
        return moved

    def ensure(self, length: int) -> None:
        """Make room for positions below ``length``. EngineError beyond ``max_len``."""
        if length > self.max_len:
            raise EngineError(f"A sequence of {length} tokens is longer than the maximum of {self.max_len}.")
        if length > self.length:
            self._relayout(self._whole_steps(length))

    def _shrink(self) -> None:
        """Attention pays for the axis, not for what is used; so drop it once at most half of it is needed."""
        needed = self._whole_steps(int(self.lengths[: self.num_slots].max(initial=1)))
        if 2 * needed <= self.length:
            self._relayout(needed)

    def _relayout(self, length: int) -> None:
        old, slots, keep = self.data, self.num_slots, min(length, self.length)
        self.data = self._empty(length)
        self.data[:, :slots, :, :keep] = old[:, :slots, :, :keep]

    def view(self, index: int, first_slot: int, last_slot: int) -> FloatArray:
        """Contiguous view (slots, kv_heads, length, head_dim) of plane ``index`` = 2 * layer (+ 1 for values)."""
        return self.data[index, first_slot:last_slot]
