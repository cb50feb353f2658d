"""The canonical reduction tree: the one order in which partial sums are ever added.

Floating-point addition is not associative. The order is therefore a property of the model (of a dimension's size and
unit), never of the number of ranks: see *Exact* in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

MAX_DEPTH = 6
MAX_LEAVES = 1 << MAX_DEPTH


class Span(NamedTuple):
    """A half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shift(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)


class Adds(NamedTuple):
    """A fold written out: for each pair (a, b) in turn, slot a += slot b; the sums stand in the slots `results`."""

    pairs: tuple[tuple[int, int], ...]
    results: tuple[int, ...]

    def run(self, slots: Sequence[T], add: Callable[[T, T], T]) -> list[T]:
        """Fold the slots with `add`; the slots given are left alone."""
        values = list(slots)
        for a, b in self.pairs:
            values[a] = add(values[a], values[b])
        return [values[i] for i in self.results]


@dataclass(frozen=True)
class ReductionTree:
    """The tree over one dimension of `size` elements, cut in units of `unit` (the last may be short).

    The units are halved, left part rounded up, to a depth of six or to one unit, whichever comes first. A subtree is
    named by its range of leaves; a range of more than one leaf splits at its upper middle. (With 64 units or more all
    leaves lie at depth six, so halving the leaves and halving the units give the same tree; with fewer, a leaf is a
    unit.)
    """

    size: int
    unit: int

    @property
    def units(self) -> int:
        return -(-self.size // self.unit)

    @property
    def leaves(self) -> int:
        return min(self.units, MAX_LEAVES)

    def leaf_spans(self) -> list[Span]:
        """The elements of each leaf, in order."""

        def halve(units: Span, depth: int) -> Iterator[Span]:
            if depth == MAX_DEPTH or units.size == 1:
                yield Span(units.start * self.unit, min(units.stop * self.unit, self.size))
                return
            middle = upper_middle(units)
            yield from halve(Span(units.start, middle), depth + 1)
            yield from halve(Span(middle, units.stop), depth + 1)

        return list(halve(Span(0, self.units), 0)) if self.size else []

    def cover(self, part: Span) -> list[Span]:
        """The maximal subtrees (as leaf ranges) that lie wholly inside a range of leaves."""

        def descend(node: Span) -> Iterator[Span]:
            if part.start <= node.start and node.stop <= part.stop:
                yield node
            elif node.start < part.stop and part.start < node.stop:
                middle = upper_middle(node)
                yield from descend(Span(node.start, middle))
                yield from descend(Span(middle, node.stop))

        return list(descend(Span(0, self.leaves))) if part.size else []

    def adds(self, parts: Sequence[Span], root: Span | None = None) -> Adds:
        """How to fold subtrees that together tile `root` (default: the whole tree), in tree order."""
        slot = {part: i for i, part in enumerate(parts)}
        pairs: list[tuple[int, int]] = []

        def fold(node: Span) -> int:
            if node in slot:
                return slot[node]
            middle = upper_middle(node)
            left, right = fold(Span(node.start, middle)), fold(Span(middle, node.stop))
            pairs.append((left, right))
            return left

        top = fold(root or Span(0, self.leaves))
        return Adds(tuple(pairs), (top,))


def upper_middle(span: Span) -> int:
    """Where a range is halved: the left part is rounded up."""
    return span.start + (span.size + 1) // 2


@dataclass(frozen=True)
class ReductionPlan:
    """Who contributes which sums to a row-parallel linear, and how they are added up.

    counts: the number of nodes that each rank contributes, in rank order.
    across: how the nodes of all ranks, in rank order, fold into the result.
    leaves: for each rank, its leaves as ranges of its own columns.
    within: for each rank, how its leaves fold into its nodes.
    nodes: for each rank, its nodes as ranges of its own columns.
    """

    counts: tuple[int, ...]
    across: Adds
    leaves: tuple[tuple[Span, ...], ...]
    within: tuple[Adds, ...]
    nodes: tuple[tuple[Span, ...], ...]


def plan_reduction(tree: ReductionTree, parts: Sequence[Span]) -> ReductionPlan:
    """The plan for ranks that own the given ranges of the tree's leaves."""
    edges = [0, *(span.stop for span in tree.leaf_spans())]
    owned = [tree.cover(part) for part in parts]

    def columns(leaves: Sequence[Span], part: Span) -> tuple[Span, ...]:
        return tuple(Span(edges[a], edges[b]).shift(-edges[part.start]) for a, b in leaves)

    def within(nodes: Sequence[Span], part: Span) -> Adds:
        folds = [tree.adds(_singles(part), node) for node in nodes]
        return Adds(tuple(p for f in folds for p in f.pairs), tuple(r for f in folds for r in f.results))

    return ReductionPlan(
        counts=tuple(len(nodes) for nodes in owned),
        across=tree.adds([node for nodes in owned for node in nodes]),
        leaves=tuple(columns(_singles(part), part) for part in parts),
        within=tuple(within(nodes, part) for nodes, part in zip(owned, parts, strict=True)),
        nodes=tuple(columns(nodes, part) for nodes, part in zip(owned, parts, strict=True)),
    )


def _singles(part: Span) -> list[Span]:
    return [Span(leaf, leaf + 1) for leaf in range(part.start, part.stop)]
