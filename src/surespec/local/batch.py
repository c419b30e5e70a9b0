"""Chunks of sequences -> the index arrays and the mask that a graph's attention takes, and the session's bindings.

Row numbers count in units of head_dim inside the joint q, k, v product: token t owns rows ``t * R`` ..
``t * R + R - 1``, query heads first, then keys, then values (R = heads + 2 * kv_heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from surespec.errors import EngineError
from surespec.local.graph import AttentionShape
from surespec.local.kv import KVCache
from surespec.local.types import IntArray

MASKED = np.float32(-1e30)  # exp() of it is exactly 0, and unlike -inf it never makes a NaN
ROW_CACHE = 64  # different batch forms remembered


@dataclass(frozen=True, slots=True)
class Rows:
    """The part of a batch's indices that only depends on the chunk lengths."""

    sequence: IntArray  # (n,) which chunk a token belongs to
    offset: IntArray  # (n,) its index in the chunk
    padded: IntArray  # (B, w) token at each query place
    arrays: dict[str, IntArray]  # the graph's inputs q_rows, k_rows, v_rows, out_rows


def rows_for(lengths: tuple[int, ...], shape: AttentionShape, last_only: bool = False) -> Rows:
    """Indices for chunks of these lengths; ``last_only``: every token gives K and V, only the last asks a query."""
    sizes = np.array(lengths, np.int64)
    width, count = 1 if last_only else int(sizes.max()), len(lengths)
    if width * shape.groups == 1:
        width = 2  # a product with one row takes another kernel, whose last bits differ
    first = np.cumsum(sizes) - sizes
    sequence = np.repeat(np.arange(count), sizes)
    offset = np.arange(int(sizes.sum())) - first[sequence]
    if last_only:
        padded = np.repeat((first + sizes - 1)[:, None], width, axis=1)
        asking, place = np.arange(count), np.zeros(count, np.int64)
    else:
        padded = first[:, None] + np.minimum(np.arange(width)[None, :], (sizes - 1)[:, None])
        asking, place = sequence, offset
    heads = np.arange(shape.num_heads).reshape(shape.num_kv_heads, shape.groups)
    q_rows = padded[:, None, None, :] * shape.rows + heads[None, :, :, None]
    tokens = np.arange(len(offset))[:, None] * shape.rows + np.arange(shape.num_kv_heads)[None, :]
    places = (asking[:, None] * shape.num_heads + np.arange(shape.num_heads)[None, :]) * width + place[:, None]
    arrays = {
        "q_rows": q_rows.reshape(count, shape.num_kv_heads, shape.groups * width),
        "k_rows": tokens + shape.num_heads,
        "v_rows": tokens + shape.num_heads + shape.num_kv_heads,
        "out_rows": places,
    }
    return Rows(sequence, offset, padded, {name: np.ascontiguousarray(a) for name, a in arrays.items()})


class BoundSession:
    """A session whose attention reads and writes a ``KVCache`` in place.

    Binding the cache takes two calls a layer and is done again only when the slots in use or the cache's layout change;
    a step binds its few small inputs. Not thread-safe: one caller at a time.
    """

    def __init__(self, session: ort.InferenceSession, shape: AttentionShape, last_only: bool = False) -> None:
        self._session = session
        self._shape = shape
        self._last_only = last_only
        self._binding = session.io_binding()
        self._rows: dict[tuple[int, ...], Rows] = {}
        self._slots = (0, 0)
        self._data: NDArray[Any] | None = None  # the bindings hold its bare address, so it must live as long as they

    def rows(self, lengths: tuple[int, ...]) -> Rows:
        """``rows_for`` with a small memory."""
        found = self._rows.get(lengths)
        if found is None:
            if len(self._rows) >= ROW_CACHE:
                self._rows.pop(next(iter(self._rows)))
            found = self._rows[lengths] = rows_for(lengths, self._shape, self._last_only)
        return found

    def run(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: tuple[int, ...],
        cache: KVCache,
        inputs: dict[str, NDArray[Any]],
        outputs: dict[str, NDArray[Any]],
    ) -> None:
        """Run chunks of ``lengths`` tokens at ``starts`` in ``slots`` (ascending, without gaps).

        ``inputs`` are the graph's own further inputs; results are written into the arrays of ``outputs``. EngineError
        for slots that are not in use or not in order, and for positions beyond the cache's maximum.
        """
        first, last = slots[0], slots[0] + len(slots)
        if list(slots) != list(range(first, last)) or first < 0 or last > cache.num_slots:
            raise EngineError(f"Slots {list(slots)} are not a gapless range of the {cache.num_slots} in use.")
        begin = np.asarray(starts, np.int64)
        ends = begin + np.asarray(lengths, np.int64)
        cache.ensure(int(ends.max()))
        rows = self.rows(lengths)
        positions = begin[rows.sequence] + rows.offset
        places = np.empty((len(positions), self._shape.num_kv_heads, 3), np.int64)
        places[:, :, 0] = rows.sequence[:, None]
        places[:, :, 1] = np.arange(self._shape.num_kv_heads)
        places[:, :, 2] = positions[:, None]
        visible = np.arange(cache.length) <= positions[rows.padded][:, :, None]
        mask = np.where(visible, np.float32(0), MASKED)
        if self._shape.groups > 1:
            mask = np.tile(mask, (1, self._shape.groups, 1))
        feeds = {"positions": positions[None], "places": places, "mask": mask[:, None], **rows.arrays}
        feeds |= {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        self._bind_cache(cache, first, last)
        for name, array in feeds.items():
            self._bind("input", name, array)
        for name, array in outputs.items():
            self._bind("output", name, array)
        self._session.run_with_iobinding(self._binding)
        cache.lengths[first:last] = ends

    def _bind_cache(self, cache: KVCache, first: int, last: int) -> None:
        if self._data is cache.data and self._slots == (first, last):
            return
        for layer in range(cache.num_layers):
            for part, plane in (("k", 2 * layer), ("v", 2 * layer + 1)):
                view = cache.view(plane, first, last)
                self._bind("input", f"{part}{layer}", view)
                self._bind("output", f"{part}{layer}.new", view)
        self._data, self._slots = cache.data, (first, last)

    def _bind(self, way: str, name: str, array: NDArray[Any]) -> None:
        """Hand the array's memory to ONNX Runtime; the caller keeps it alive until the run is over."""
        bind = self._binding.bind_input if way == "input" else self._binding.bind_output
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
