"""The KV cache: slots stay without gaps, the budget is kept, the array grows and shrinks with what is used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.errors import EngineError
from surespec.local.kv import KVCache


def make(max_slots: int = 4, max_len: int = 600, max_tokens: int | None = None) -> KVCache:
    return KVCache(2, 3, 4, max_slots, max_len, max_tokens)


def test_layout_views_and_size() -> None:
    cache = make()
    assert cache.data.shape == (4, 4, 3, 128, 4)
    assert cache.num_bytes == 4 * 4 * 3 * 128 * 4 * 4
    view = cache.view(3, 1, 3)
    assert view.shape == (2, 3, 128, 4)
    assert view.flags.c_contiguous
    assert np.shares_memory(view, cache.data)


def test_growth_goes_in_steps_keeps_the_contents_and_stops_at_the_maximum() -> None:
    cache = make(max_len=300)
    slot = cache.alloc()
    cache.data[:, slot] = 5.0
    before = cache.data
    cache.ensure(128)
    assert cache.data is before
    cache.ensure(129)
    assert cache.length == 256
    assert (cache.data[:, slot, :, :128] == 5.0).all()
    assert not cache.data[:, slot, :, 128:].any()
    with pytest.raises(EngineError, match="301 tokens is longer than the maximum of 300"):
        cache.ensure(301)


def test_the_budget() -> None:
    cache = make(max_slots=2, max_tokens=100)
    assert cache.can_reserve(100)
    assert not cache.can_reserve(101)
    cache.reserve(60)
    assert cache.usage == pytest.approx(0.6)
    with pytest.raises(EngineError, match="40 of 100 tokens left; 41 were asked for"):
        cache.reserve(41)
    assert cache.reserved_tokens == 60
    cache.release(60)
    assert cache.reserved_tokens == 0


def test_no_slot_no_reservation() -> None:
    cache = make(max_slots=1)
    cache.alloc()
    assert not cache.can_reserve(1)
    with pytest.raises(EngineError, match="All 1 slots"):
        cache.alloc()
    with pytest.raises(EngineError, match=r"Slot 1 .* not in use"):
        cache.free(1)


@given(st.lists(st.integers(-1, 3), max_size=40))
def test_slots_have_no_gaps_and_contents_follow_their_sequence(actions: list[int]) -> None:
    cache = make()
    owner: list[int] = []  # which sequence sits in which slot
    serial = 0
    for action in actions:
        if action < 0 and len(owner) < 4:
            serial += 1
            slot = cache.alloc()
            assert slot == len(owner)
            owner.append(serial)
            cache.lengths[slot] = 1 + serial % 100
            cache.data[:, slot, :, : 1 + serial % 100] = serial
        elif 0 <= action < len(owner):
            moved = cache.free(action)
            last = owner.pop()
            assert moved == ((len(owner), action) if action < len(owner) else None)
            if moved:
                owner[action] = last
        for slot, sequence in enumerate(owner):
            assert cache.lengths[slot] == 1 + sequence % 100
            assert (cache.data[:, slot, :, : 1 + sequence % 100] == sequence).all()
