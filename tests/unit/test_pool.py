"""The block pool: no block is ever held twice, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.kv.pool import BlockPool


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=60))
def test_every_block_is_free_or_held_by_one(blocks: int, moves: list[tuple[bool, int]]) -> None:
    pool, held = BlockPool(blocks), list[list[int]]()
    for takes, number in moves:
        before = pool.free
        if takes:
            taken = pool.take(number)
            assert (taken is None) == (number > before)
            assert pool.free == before - (0 if taken is None else number)
            held += [taken] if taken else []
        elif held:
            pool.give_back(held.pop(number % len(held)))
        every = [block for group in held for block in group]
        assert len(every) == len(set(every)) == blocks - pool.free
        assert set(every) <= set(range(blocks))
    for group in held:
        pool.give_back(group)
    assert sorted(pool.take(blocks) or []) == list(range(blocks))


def test_blocks_come_back_oldest_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1])
    pool.give_back([0])
    assert pool.take(3) == [3, 1, 0]


@pytest.mark.parametrize("block", [0, 3, 99])
def test_giving_back_what_is_not_held_is_a_bug(block: int) -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    assert taken == [0, 1]
    pool.give_back([0])
    with pytest.raises(KeyError):
        pool.give_back([block])
    assert pool.free == 3
