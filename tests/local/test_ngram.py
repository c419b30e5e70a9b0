"""Prompt lookup against a plain search that follows vLLM's rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.local.drafters.ngram import NgramDrafter, NgramIndex
from surespec.local.scheduler import Sequence
from surespec.local.types import SamplingParams


def search(ids: list[int], low: int, high: int, k: int) -> list[int]:
    """The longest suffix that occurred before, its earliest occurrence, up to k tokens behind it."""
    for n in range(high, low - 1, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[len(ids) - n :]:
                return ids[start + n : start + n + k]
    return []


def sequence(ids: list[int], room: int = 100) -> Sequence:
    params = SamplingParams()
    return Sequence.create(1, ids, params, len(ids) + room, frozenset(), lambda _: None)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_it_finds_what_a_search_finds_as_the_sequence_grows(prompt, steps, low, more, k):
    drafter = NgramDrafter(low, low + more, 1000)
    s = sequence(prompt)
    ids = list(prompt)
    for step in [[], *steps]:
        s.append(step)
        ids += step
        (draft,) = drafter.propose([s], [k])
        assert draft.ids.tolist() == search(ids, low, low + more, k)
        assert draft.probs is None


@pytest.mark.parametrize(
    ("ids", "low", "high", "expected"),
    [
        ([1, 2, 3, 4, 2, 3], 2, 2, [4, 2, 3]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, [9, 1, 2, 8]),  # the earliest of two
        ([5, 2, 9, 1, 2, 8, 1, 2], 1, 2, [8, 1, 2]),  # the longer match wins over the earlier
        ([7, 7, 7], 2, 2, [7]),  # an occurrence may overlap the suffix
        ([1, 2, 3], 1, 3, []),
        ([1], 1, 1, []),
    ],
)
def test_examples(ids, low, high, expected):
    (draft,) = NgramDrafter(low, high, 1000).propose([sequence(ids)], [4])
    assert draft.ids.tolist() == expected


def test_nothing_is_drafted_for_k_0_and_missed_tokens_are_caught_up_on():
    drafter = NgramDrafter(2, 2, 1000)
    s = sequence([1, 2, 3])
    assert len(drafter.propose([s], [0])[0].ids) == 0
    s.append([4, 5, 6, 1, 2])
    assert drafter.propose([s], [2])[0].ids.tolist() == [3, 4]


def test_a_released_sequence_is_forgotten():
    drafter = NgramDrafter(1, 1, 1000)
    drafter.propose([sequence([1, 2, 1])], [2])
    drafter.release(sequence([1]))
    assert drafter.propose([sequence([3, 1])], [2])[0].ids.tolist() == []


def test_the_index_only_reads_what_is_new():
    index = NgramIndex(2, 3)
    ids = np.arange(20)
    index.extend(ids, 20)
    ids[:] = 0  # were it read again, this would be found
    index.extend(ids, 20)
    assert index.find(np.array([5, 6]), 2) == 7
