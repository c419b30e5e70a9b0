"""Which prompt blocks a router is told of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surespec.local.kv_blocks import BlockTable, block_hashes

prompts = st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=8)


@given(prompts)
def test_what_is_stored_is_removed_once_and_nothing_is_left(requests):
    table, present = BlockTable(4), set()
    for tokens in requests:
        stored = table.take(tokens)
        if stored is not None:
            assert len(stored.token_ids) == 4 * len(stored.hashes)
            assert not present & set(stored.hashes)
            assert stored.parent is None or stored.parent in present
            present |= set(stored.hashes)
        assert set(block_hashes(tokens, 4)) <= present
        assert table.blocks == len(present)
    for tokens in requests:
        gone = table.release(tokens)
        assert set(gone) <= present
        assert len(set(gone)) == len(gone)
        present -= set(gone)
    assert present == set()
    assert table.blocks == 0


@given(st.lists(st.integers(0, 2**31), min_size=8, max_size=40), st.integers(0, 39))
def test_equal_hashes_are_equal_prefixes(tokens, place):
    other = list(tokens)
    other[place % len(tokens)] += 1
    same = [a == b for a, b in zip(block_hashes(tokens, 4), block_hashes(other, 4), strict=True)]
    assert same == [(i + 1) * 4 <= place % len(tokens) for i in range(len(same))]
    assert all(-(2**63) <= found < 2**63 for found in block_hashes(tokens, 4))


def test_a_prompt_shorter_than_a_block_has_none():
    assert block_hashes([1, 2, 3], 4) == ()
    assert BlockTable(4).take([1, 2, 3]) is None
