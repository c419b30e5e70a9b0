"""A target model in a few lines of NumPy, for tests of the engine around it.

Its "keys" are the token ids themselves: logits at a position follow from what the cache holds up to there, so a cache
that was moved, rolled back or filled wrongly shows in the output at once. ``aux`` rows are (token, position, slot-free
sum of the tokens so far), which a test can check.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surespec.local.kv import KVCache
from surespec.local.types import ForwardOutput, ModelConfig, SeqChunk


class FakeTarget:
    """Random but fixed: ``seed`` decides the answers, ``sharpness`` how far apart the logits lie."""

    def __init__(
        self, vocab: int = 50, seed: int = 0, max_len: int = 512, sharpness: float = 3.0, eos: int = 2
    ) -> None:
        self.config = ModelConfig("llama", 1, 1, 1, 1, 1, 1, vocab, max_len, 1e4, 1e-5, True, None, (eos,))
        rng = np.random.default_rng(seed)
        self.tables = sharpness * rng.standard_normal((4, vocab, vocab)).astype(np.float32)
        self.chunks_seen: list[tuple[tuple[int, int, int], ...]] = []  # (slot, start, count) of every pass
        self.fail_at: int | None = None  # raise at this pass

    def new_cache(self, max_slots: int, max_len: int) -> KVCache:
        """A real KVCache; the key of a token is its id."""
        return KVCache(1, 1, 1, max_slots, max_len)

    def forward(self, chunks: Sequence[SeqChunk], cache: KVCache) -> ForwardOutput:
        """Write the ids into the cache, then read them back to make logits and aux."""
        slots = [c.slot for c in chunks]
        assert slots == list(range(slots[0], slots[0] + len(slots))), f"slots are not contiguous: {slots}"
        self.chunks_seen.append(tuple((c.slot, c.start, len(c.token_ids)) for c in chunks))
        if self.fail_at is not None and len(self.chunks_seen) > self.fail_at:
            raise RuntimeError("the fake target was told to fail")
        logits, aux = [np.zeros((0, self.config.vocab_size), np.float32)], []
        for chunk in chunks:
            n = len(chunk.token_ids)
            end = chunk.start + n
            cache.ensure(end)
            cache.data[0, chunk.slot, 0, chunk.start : end, 0] = chunk.token_ids
            cache.lengths[chunk.slot] = end
            held = cache.data[0, chunk.slot, 0, :end, 0].astype(np.int64)
            logits += [self.logits(held[: chunk.start + i + 1])[None] for i in range(chunk.logits_from, n)]
            aux += [[held[t], t, held[: t + 1].sum()] for t in range(chunk.start, end)]
        return ForwardOutput(np.concatenate(logits), np.array(aux, np.float32))

    def logits(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits (V,) after ``ids``: they depend on the newest tokens most, and on all."""
        ids = np.asarray(ids, np.int64)
        near, before = ids[-1], ids[-2] if len(ids) > 1 else 0
        far = self.tables[3][ids].mean(axis=0)
        return (self.tables[0, near] + self.tables[1, before] + 2.0 * far).astype(np.float32)

    def greedy(self, prompt: Sequence[int], n: int, eos: int | None = None) -> list[int]:
        """The plain greedy answer, one token at a time, with no cache at all."""
        ids = list(prompt)
        while len(ids) < len(prompt) + n:
            ids.append(int(self.logits(ids).argmax()))
            if ids[-1] == eos:
                break
        return ids[len(prompt) :]
