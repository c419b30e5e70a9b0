"""Which KV blocks of prompts are in use, for a router that sends like to like. Pure bookkeeping, no I/O.

A block is ``block_size`` prompt tokens; its hash covers all tokens before it too, so equal hashes mean equal prefixes.
The embedded engine keeps no block beyond the request that computed it, and that is what is told.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were not there before: their tokens in order, their hashes, and the hash of the block before them."""

    token_ids: tuple[int, ...]
    hashes: tuple[int, ...]
    parent: int | None


def block_hashes(token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """One signed 64-bit hash a full block, each over everything up to the block's end."""
    found = []
    digest = blake2b(digest_size=8)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        digest.update(struct.pack(f"<{block_size}q", *block))
        found.append(int.from_bytes(digest.digest(), "little", signed=True))
    return tuple(found)


class BlockTable:
    """Counts the users of each block. Not thread-safe: one event loop owns it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._users: Counter[int] = Counter()

    @property
    def blocks(self) -> int:
        """Distinct blocks in use."""
        return len(self._users)

    def take(self, token_ids: Sequence[int]) -> Stored | None:
        """A request begins. The blocks that are new with it, always the last ones of its chain; None without any."""
        hashes = block_hashes(token_ids, self.block_size)
        known = next((i for i, found in enumerate(hashes) if found not in self._users), len(hashes))
        self._users.update(hashes)
        if known == len(hashes):
            return None
        tokens = tuple(token_ids[known * self.block_size : len(hashes) * self.block_size])
        return Stored(tokens, hashes[known:], hashes[known - 1] if known else None)

    def release(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The request has ended. The blocks that nobody uses any more."""
        hashes = block_hashes(token_ids, self.block_size)
        self._users.subtract(hashes)
        gone = tuple(found for found in hashes if self._users[found] <= 0)
        for found in gone:
            del self._users[found]
        return gone
