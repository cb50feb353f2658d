"""The canonical reduction tree: whoever adds up which part of it, the result is the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.parallel.partition import bisect
from serried.parallel.reduction import (
    MAX_LEAVES,
    Adds,
    ReductionPlan,
    ReductionTree,
    Span,
    plan_reduction,
)

Floats = npt.NDArray[np.float32]


@st.composite
def trees(draw: st.DrawFn, max_units: int = 300) -> ReductionTree:
    unit = draw(st.sampled_from([1, 32, 64, 80, 128]))
    units = draw(st.integers(1, max_units))
    return ReductionTree(units * unit - draw(st.integers(0, unit - 1)), unit)


@st.composite
def splits(draw: st.DrawFn, max_units: int = 300) -> tuple[ReductionTree, list[Span]]:
    """A tree, and ranks that own any ranges of its leaves, some perhaps empty."""
    tree = draw(trees(max_units))
    cuts = sorted(draw(st.lists(st.integers(0, tree.leaves), max_size=9)))
    edges = [0, *cuts, tree.leaves]
    return tree, [Span(a, b) for a, b in pairwise(edges)]


def halve_units(units: list[int], depth: int = 6) -> Any:
    """The tree as DESIGN words it, written independently: nested pairs, with lists of units as leaves."""
    if depth == 0 or len(units) == 1:
        return units
    middle = -(-len(units) // 2)
    return halve_units(units[:middle], depth - 1), halve_units(units[middle:], depth - 1)


def leaves_of(tree: Any) -> list[list[int]]:
    return [tree] if isinstance(tree, list) else leaves_of(tree[0]) + leaves_of(tree[1])


def expression(tree: Any, leaves: Any) -> Any:
    """Which sums the tree makes of the leaves: nested pairs of the leaves given."""
    return next(leaves) if isinstance(tree, list) else (expression(tree[0], leaves), expression(tree[1], leaves))


def pair(a: Any, b: Any) -> Any:
    """An addition that remembers its operands."""
    return a, b


def fold(plan: ReductionPlan, leaves: Sequence[Any], add: Any) -> Any:
    """What the ranks of a plan do: each folds its own leaves into nodes, then all nodes are folded."""
    nodes, first = [], 0
    for own, within in zip(plan.leaves, plan.within, strict=True):
        nodes += within.run(leaves[first : first + len(own)], add)
        first += len(own)
    (result,) = plan.across.run(nodes, add)
    return result


def one_rank(tree: ReductionTree) -> ReductionPlan:
    return plan_reduction(tree, [Span(0, tree.leaves)])


def random_leaves(count: int, seed: int) -> Floats:
    """Values of very different sizes, so that nearly every order of addition rounds differently."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, 64)) * 2.0 ** rng.integers(-8, 9, (count, 64))
    return values.astype(np.float32)


@given(trees())
def test_leaves_tile_the_dimension_in_whole_units(tree: ReductionTree) -> None:
    spans = tree.leaf_spans()
    assert len(spans) == tree.leaves == min(tree.units, MAX_LEAVES)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == tree.size
    assert all(span.size > 0 and span.start % tree.unit == 0 for span in spans)


@given(trees())
def test_leaves_are_those_of_the_halved_units(tree: ReductionTree) -> None:
    expected = leaves_of(halve_units(list(range(tree.units))))
    units = [(span.start // tree.unit, -(-span.stop // tree.unit)) for span in tree.leaf_spans()]
    assert units == [(leaf[0], leaf[-1] + 1) for leaf in expected]


@given(splits())
def test_every_split_adds_in_the_order_of_the_tree(split: tuple[ReductionTree, list[Span]]) -> None:
    tree, parts = split
    expected = expression(halve_units(list(range(tree.units))), iter(range(tree.leaves)))
    result = fold(plan_reduction(tree, parts), list(range(tree.leaves)), pair)
    assert result == expected


@given(splits(), st.integers(0, 2**32 - 1))
def test_every_split_gives_the_same_bits(split: tuple[ReductionTree, list[Span]], seed: int) -> None:
    tree, parts = split
    leaves = list(random_leaves(tree.leaves, seed))
    whole = fold(one_rank(tree), leaves, np.add)
    assert fold(plan_reduction(tree, parts), leaves, np.add).tobytes() == whole.tobytes()


@given(splits())
def test_the_plan_names_each_rank_its_own_columns(split: tuple[ReductionTree, list[Span]]) -> None:
    tree, parts = split
    plan, spans = plan_reduction(tree, parts), tree.leaf_spans()
    assert plan.counts == tuple(len(within.results) for within in plan.within)
    for part, leaves, nodes in zip(parts, plan.leaves, plan.nodes, strict=True):
        own = spans[part.start : part.stop]
        first = own[0].start if own else 0
        assert [leaf.shift(first) for leaf in leaves] == own
        cover = [Span(spans[a].start, spans[b - 1].stop) for a, b in tree.cover(part)]
        assert [node.shift(first) for node in nodes] == cover


@given(splits())
def test_a_cover_is_the_fewest_subtrees(split: tuple[ReductionTree, list[Span]]) -> None:
    tree, parts = split
    subtrees = {Span(0, tree.leaves)}
    waiting = [Span(0, tree.leaves)]
    while waiting:
        node = waiting.pop()
        middle = node.start + -(-node.size // 2)
        halves = [Span(node.start, middle), Span(middle, node.stop)] if node.size > 1 else []
        subtrees.update(halves)
        waiting += halves
    for part in parts:
        inside = {node for node in subtrees if part.start <= node.start and node.stop <= part.stop}
        maximal = {
            node
            for node in inside
            if not any(o != node and o.start <= node.start and node.stop <= o.stop for o in inside)
        }
        cover = tree.cover(part)
        assert cover == sorted(maximal)
        assert [i for node in cover for i in range(*node)] == list(range(*part))


def most_nodes(ranks: int, leaf_counts: Sequence[int]) -> int:
    """The most nodes that any rank of an even split contributes, over trees of so many leaves."""
    trees = [ReductionTree(count, 1) for count in leaf_counts if count >= ranks]
    return max(len(tree.cover(part)) for tree in trees for part in bisect(tree.leaves, [1] * ranks))


def test_how_many_nodes_a_rank_contributes() -> None:
    of_64 = {ranks: most_nodes(ranks, [64]) for ranks in range(1, 9)}
    assert of_64 == {1: 1, 2: 1, 3: 5, 4: 1, 5: 5, 6: 4, 7: 4, 8: 1}
    of_any = {ranks: most_nodes(ranks, range(1, 65)) for ranks in range(1, 65)}
    assert max(of_any.values()) == 5
    assert all(of_any[2**k] == 1 for k in range(7))


def test_no_range_of_leaves_needs_more_than_ten_nodes() -> None:
    tree = ReductionTree(64, 1)
    assert max(len(tree.cover(Span(a, b))) for a in range(64) for b in range(a + 1, 65)) == 10


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_adding_in_rank_order_gives_other_bits(ranks: int) -> None:
    """The negative control: both ways of ignoring the tree are seen."""
    tree = ReductionTree(64, 1)
    plan = plan_reduction(tree, bisect(tree.leaves, [1] * ranks))
    leaves = list(random_leaves(tree.leaves, seed=ranks))
    whole = fold(one_rank(tree), leaves, np.add)
    nodes: list[Floats] = []
    sums: list[Floats] = []
    first = 0
    for own, within in zip(plan.leaves, plan.within, strict=True):
        mine = within.run(leaves[first : first + len(own)], np.add)
        nodes += mine
        sums.append(np.add.accumulate(mine)[-1])
        first += len(own)
    for in_rank_order in (np.add.accumulate(nodes)[-1], np.add.accumulate(sums)[-1]):
        np.testing.assert_allclose(in_rank_order, whole, rtol=1e-3, atol=1e-2)
        assert in_rank_order.tobytes() != whole.tobytes()


@given(splits(max_units=64), st.data())
def test_any_corruption_of_a_plan_is_seen(split: tuple[ReductionTree, list[Span]], data: st.DataObject) -> None:
    """Whichever addition is left out, made twice or given another operand, other sums come out."""
    tree, parts = split
    adds = tree.adds(nodes := [node for part in parts for node in tree.cover(part)])
    if not adds.pairs:
        return
    right = adds.run(nodes, pair)
    i = data.draw(st.integers(0, len(adds.pairs) - 1))
    a, b = adds.pairs[i]
    other = data.draw(st.integers(0, len(nodes) - 1))
    before, after = adds.pairs[:i], adds.pairs[i + 1 :]
    corrupt = [before + after, (*before, (a, b), (a, b), *after), (*before, (b, a), *after)]
    corrupt += [(*before, (a, other), *after)] if other != b else []
    corrupt += [(*before, (other, b), *after)] if other != a else []
    for pairs in corrupt:
        assert Adds(pairs, adds.results).run(nodes, pair) != right


@given(splits(max_units=64), st.data())
def test_swapped_nodes_are_seen(split: tuple[ReductionTree, list[Span]], data: st.DataObject) -> None:
    tree, parts = split
    nodes = [node for part in parts for node in tree.cover(part)]
    adds = tree.adds(nodes)
    a, b = (data.draw(st.integers(0, len(nodes) - 1)) for _ in range(2))
    swapped = list(nodes)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    same = adds.run(swapped, pair) == adds.run(nodes, pair)
    assert same == (a == b)


def test_a_fold_leaves_its_slots_alone() -> None:
    slots = [1, 2, 3]
    assert Adds(((1, 2), (0, 1)), (0,)).run(slots, lambda a, b: a + b) == [6]
    assert slots == [1, 2, 3]
