"""The table by which the kernels walk a rank's leaves gives the very additions of the reduction plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.backends.native import PAD, leaf_table
from serried.parallel.partition import ModelPartition, RowPartition, bisect
from serried.parallel.reduction import ReductionPlan, ReductionTree, Span, plan_reduction

Table = list[list[int]]


@st.composite
def plans(draw: st.DrawFn) -> ReductionPlan:
    """Of any tree whose units are groups of 32 columns, over ranks of any weights, some perhaps without a leaf."""
    unit = draw(st.sampled_from([32, 64, 96, 128, 160]))
    units = draw(st.one_of(st.integers(1, 70), st.integers(71, 300)))
    tree = ReductionTree(units * unit - draw(st.integers(0, unit - 1)), unit)
    return RowPartition.over(tree, draw(st.lists(st.integers(1, 9), min_size=1, max_size=16))).plan


def walk(table: Table, leaves: Sequence[Any]) -> list[Any]:
    """What csrc/kernels does, with additions that remember their operands: the nodes, in order."""
    stack: list[Any] = []
    nodes = []
    for (_, _, pops, ends_node), leaf in zip(table, leaves, strict=True):
        stack.append(leaf)
        for _ in range(pops):
            right = stack.pop()
            stack.append((stack.pop(), right))
        if ends_node:
            (node,) = stack
            nodes.append(node)
            stack = []
    assert not stack, "sums that belong to no node"
    return nodes


def pair(a: Any, b: Any) -> Any:
    return a, b


@settings(max_examples=300)
@given(plans())
def test_the_additions_are_those_of_the_plan(plan: ReductionPlan) -> None:
    for rank, (leaves, within) in enumerate(zip(plan.leaves, plan.within, strict=True)):
        named = [(rank, i) for i in range(len(leaves))]
        nodes = walk(leaf_table(plan, rank), named)
        assert nodes == within.run(named, pair)
        assert len(nodes) == plan.counts[rank]


@given(plans(), st.integers(0, 2**32 - 1))
def test_the_sums_are_those_of_the_plan(plan: ReductionPlan, seed: int) -> None:
    """In float32, whose additions are not associative: all ranks together give the bits of one rank alone."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(64) * 2.0 ** rng.integers(-8, 9, 64)).astype(np.float32)

    def add(x: Any) -> np.float32:
        return np.float32(add(x[0]) + add(x[1])) if isinstance(x, tuple) else values[x]

    first, nodes = 0, []
    for rank, leaves in enumerate(plan.leaves):
        nodes += [add(node) for node in walk(leaf_table(plan, rank), range(first, first + len(leaves)))]
        first += len(leaves)
    tree = ReductionTree(first, 1)
    (whole,) = walk(leaf_table(plan_reduction(tree, [Span(0, first)]), 0), range(first))
    (result,) = plan.across.run(nodes, np.add)
    assert result.tobytes() == add(whole).tobytes()


@given(plans())
def test_leaves_follow_each_other_in_groups_of_32_columns(plan: ReductionPlan) -> None:
    """Each begins where the last one ends; the end of the last is padded, as the weight's columns are."""
    for rank, leaves in enumerate(plan.leaves):
        table = leaf_table(plan, rank)
        assert len(table) == len(leaves)
        at = 0
        for (start, stop, _, _), leaf in zip(table, leaves, strict=True):
            assert (start, stop - stop % -PAD) == (at, stop)
            assert start == leaf.start
            assert leaf.stop <= stop < leaf.stop + PAD
            at = stop


@given(plans())
def test_the_stack_stays_low(plan: ReductionPlan) -> None:
    """Its depth is that of the tree and one more: what the kernels have room for."""
    for rank in range(len(plan.counts)):
        depth = 0
        for _, _, pops, ends_node in leaf_table(plan, rank):
            depth += 1
            assert depth <= 7
            depth -= pops
            assert depth >= 1
            depth -= ends_node
        assert depth == 0


def test_a_table_by_hand() -> None:
    """Five leaves, ((0 1) 2) (3 4); and what ranks of two and three of them walk."""
    tree = ReductionTree(5 * 32 - 3, 32)
    one = leaf_table(plan_reduction(tree, [Span(0, 5)]), 0)
    assert one == [[0, 32, 0, 0], [32, 64, 1, 0], [64, 96, 1, 0], [96, 128, 0, 0], [128, 160, 2, 1]]
    two = plan_reduction(tree, [Span(0, 2), Span(2, 5)])
    assert leaf_table(two, 0) == [[0, 32, 0, 0], [32, 64, 1, 1]]
    assert leaf_table(two, 1) == [[0, 32, 0, 1], [32, 64, 0, 0], [64, 96, 1, 1]]
    assert leaf_table(plan_reduction(tree, [Span(0, 5), Span(5, 5)]), 1) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 16])
def test_the_plans_of_a_real_model(ranks: int) -> None:
    """Qwen3-0.6B: 16 heads of 128 columns, 3072 columns of MLP."""
    partition = ModelPartition(16, 8, 128, 3072, 151_936, (1,) * ranks)
    for plan in (partition.attention.plan, partition.mlp.plan):
        for rank, (leaves, within) in enumerate(zip(plan.leaves, plan.within, strict=True)):
            assert walk(leaf_table(plan, rank), range(len(leaves))) == within.run(range(len(leaves)), pair)


def test_a_wrong_table_is_seen() -> None:
    """The walk can fail: one addition more, one less, a node that ends too early."""
    tree = ReductionTree(24 * 32, 32)
    plan = plan_reduction(tree, bisect(tree.leaves, (1, 1, 1)))
    leaves = range(len(plan.leaves[1]))
    right = walk(leaf_table(plan, 1), leaves)
    for row in range(len(plan.leaves[1])):
        for column, change in ((2, 1), (2, -1), (3, 1), (3, -1)):
            table = leaf_table(plan, 1)
            table[row][column] += change
            if table[row][2] < 0 or table[row][3] not in (0, 1):
                continue
            with pytest.raises((AssertionError, IndexError, ValueError)):
                assert walk(table, leaves) == right
