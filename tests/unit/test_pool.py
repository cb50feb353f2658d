"""The block pool: no block is lost or held by accident, and a known prefix is found until its turn comes to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serried.kv.pool import BlockPool
from serried.kv.prefix import PrefixChain


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
        pool.check()
    for group in held:
        pool.give_back(group)
    assert sorted(pool.take(blocks) or []) == list(range(blocks))


class SharedBlocks(RuleBasedStateMachine):
    """Sequences over a small alphabet of blocks: each shares what it finds, takes the rest, publishes, ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.sequences: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what was last written to each block

    @rule(letters=st.text("ab", min_size=1, max_size=5))
    def begin(self, letters: str) -> None:
        chain = PrefixChain(1)
        chain.extend([ord(letter) for letter in letters])
        found = self.pool.find(chain.keys)
        for block, key in zip(found, chain.keys, strict=False):
            assert self.content[block] == key, "a block that was found holds something else"
        missing = len(letters) - len(found)
        if missing > self.pool.available(found):
            return
        self.pool.share(found)
        taken = self.pool.take(missing)
        assert taken is not None
        for block, key in zip(taken, chain.keys[len(found) :], strict=True):
            self.content[block] = key
            self.pool.publish(block, key)
        self.sequences.append(found + taken)

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        self.pool.give_back(self.sequences.pop(number % len(self.sequences)))

    @invariant()
    def balanced(self) -> None:
        self.pool.check()
        held = {block for sequence in self.sequences for block in sequence}
        assert self.pool.free == self.pool.blocks - len(held)


TestSharedBlocks = SharedBlocks.TestCase


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4)
    old, new = PrefixChain(1), PrefixChain(1)
    old.extend([1, 2])
    new.extend([3, 4])
    for chain in (old, new):
        blocks = pool.take(2)
        assert blocks is not None
        for block, key in zip(blocks, chain.keys, strict=True):
            pool.publish(block, key)
        pool.give_back(blocks)
    pool.take(1)
    assert (len(pool.find(old.keys)), len(pool.find(new.keys))) == (1, 2)
    pool.take(1)
    assert (len(pool.find(old.keys)), len(pool.find(new.keys))) == (0, 2)
    pool.forget_all()
    assert pool.find(new.keys) == []
    pool.check()


def test_blocks_of_no_known_content_are_handed_out_first() -> None:
    pool = BlockPool(3)
    chain = PrefixChain(1)
    chain.extend([1, 2])
    blocks = pool.take(3)
    assert blocks == [0, 1, 2]
    pool.publish(0, chain.keys[0])
    pool.give_back(blocks)
    assert pool.take(2) == [1, 2]
    assert pool.find(chain.keys) == [0]


def test_a_salt_or_another_beginning_is_another_prefix() -> None:
    chains = [PrefixChain(2), PrefixChain(2, "salt"), PrefixChain(2), PrefixChain(2)]
    for chain, tokens in zip(chains, ([1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4, 5]), strict=True):
        chain.extend(tokens)
    plain, salted, other, longer = (chain.keys for chain in chains)
    assert not set(plain) & set(salted) and not set(plain) & set(other)
    assert longer == plain


@pytest.mark.parametrize("block", [0, 3])
def test_giving_back_what_is_not_held_is_a_bug(block: int) -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    assert taken == [0, 1]
    pool.give_back([0])
    with pytest.raises(KeyError):
        pool.give_back([block])
    with pytest.raises(KeyError):
        pool.publish(block, b"key")
    assert pool.free == 3
