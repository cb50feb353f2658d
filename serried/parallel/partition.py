"""Which part of a dimension each rank owns. The only place with shard arithmetic: all others ask it.

A rank owns a contiguous range of *units* (what must stay whole: a head, 128 MLP columns, 64 vocabulary rows). Units
are grouped into the leaves of the dimension's reduction tree, and every edge between ranks is an edge between leaves:
ranks and leaves are bisected together, in equal parts or in the proportion of the ranks' weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from serried.errors import InputError
from serried.parallel.reduction import ReductionPlan, ReductionTree, Span, plan_reduction

VOCAB_UNIT = 64  # rows: a weight tile, and a leaf of the log-sum-exp
MLP_UNITS = (128, 64, 32)  # columns: the largest that leaves the MLP as many units as attention has
HEAD_COLUMNS = 32  # a unit of attention is a multiple of this many columns (a group of quantized activations)


def bisect(count: int, weights: Sequence[int]) -> list[Span]:
    """Split `count` things over ranks of the given weights, halving ranks and things together.

    Equal weights and a power of two of ranks give exactly the halves of the reduction tree (left part rounded up).
    Each rank gets at least one thing where there are as many things as ranks.
    """

    def halve(span: Span, ranks: Span) -> list[Span]:
        if ranks.size == 1:
            return [span]
        middle = ranks.start + (ranks.size + 1) // 2
        left, whole = sum(weights[ranks.start : middle]), sum(weights[ranks.start : ranks.stop])
        share = (2 * span.size * left + whole) // (2 * whole)  # rounded to nearest, halves up
        if span.size >= ranks.size:
            share = min(max(share, middle - ranks.start), span.size - (ranks.stop - middle))
        cut = span.start + share
        return halve(Span(span.start, cut), Span(ranks.start, middle)) + halve(
            Span(cut, span.stop), Span(middle, ranks.stop)
        )

    return halve(Span(0, count), Span(0, len(weights)))


@dataclass(frozen=True)
class Partition:
    """The ranges of one dimension that the ranks own, in elements, in rank order."""

    size: int
    spans: tuple[Span, ...]

    @classmethod
    def split(cls, size: int, unit: int, weights: Sequence[int]) -> Partition:
        """A range of whole units to each rank, in the proportion of the weights."""
        units = -(-size // unit)
        edges = [min(i * unit, size) for i in range(units + 1)]
        return cls(size, tuple(Span(edges[a], edges[b]) for a, b in bisect(units, weights)))

    @classmethod
    def replicated(cls, size: int, ranks: int) -> Partition:
        """The whole dimension to every rank."""
        return cls(size, (Span(0, size),) * ranks)

    @property
    def sizes(self) -> list[int]:
        return [span.size for span in self.spans]


@dataclass(frozen=True)
class RowPartition(Partition):
    """A split of the input dimension of a row-parallel linear, with the plan that adds up its partial sums."""

    plan: ReductionPlan

    @classmethod
    def over(cls, tree: ReductionTree, weights: Sequence[int]) -> RowPartition:
        """Leaves of the tree to each rank, in the proportion of the weights."""
        parts = bisect(tree.leaves, weights)
        edges = [0, *(span.stop for span in tree.leaf_spans())]
        spans = tuple(Span(edges[a], edges[b]) for a, b in parts)
        return cls(tree.size, spans, plan_reduction(tree, parts))


@dataclass(frozen=True)
class ModelPartition:
    """How a decoder is split over the ranks of a tensor-parallel group.

    Sizes are of the whole model; `weights` holds one positive integer a rank (equal ones for an even split).
    A rank holds the KV heads that its query heads read; where two ranks read the same KV head, both hold it.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_columns: int
    vocab_rows: int
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        largest = self.max_ranks(self.query_heads, self.head_dim)
        if not 1 <= self.ranks <= largest:
            unit = self.unit_heads(self.head_dim)
            what = f"{self.query_heads} query heads" + (f" in units of {unit}" if unit > 1 else "")
            raise InputError(
                f"--tensor-parallel-size {self.ranks}: the model has {what}; legal sizes are 1 to {largest}"
            )

    @staticmethod
    def unit_heads(head_dim: int) -> int:
        """The least number of whole heads that fills a multiple of 32 columns."""
        return HEAD_COLUMNS // math.gcd(head_dim, HEAD_COLUMNS)

    @classmethod
    def max_ranks(cls, query_heads: int, head_dim: int) -> int:
        """The largest tensor-parallel size: a leaf of attention for each rank."""
        return ReductionTree(query_heads, cls.unit_heads(head_dim)).leaves

    @property
    def ranks(self) -> int:
        return len(self.weights)

    @cached_property
    def attention(self) -> RowPartition:
        """Columns of q, rows of o: whole query heads."""
        unit = self.unit_heads(self.head_dim) * self.head_dim
        return RowPartition.over(ReductionTree(self.query_heads * self.head_dim, unit), self.weights)

    @cached_property
    def mlp(self) -> RowPartition:
        """Columns of gate and up, rows of down."""
        heads = self.max_ranks(self.query_heads, self.head_dim)
        fitting = [unit for unit in MLP_UNITS if -(-self.mlp_columns // unit) >= heads]
        unit = fitting[0] if fitting else MLP_UNITS[-1]
        return RowPartition.over(ReductionTree(self.mlp_columns, unit), self.weights)

    @cached_property
    def vocab(self) -> Partition:
        """Rows of the embedding and of the LM head."""
        return Partition.split(self.vocab_rows, VOCAB_UNIT, self.weights)

    def q_heads(self, rank: int) -> Span:
        """The query heads of a rank."""
        span = self.attention.spans[rank]
        return Span(span.start // self.head_dim, span.stop // self.head_dim)

    def kv_heads_of(self, rank: int) -> Span:
        """The KV heads that the query heads of a rank read."""
        heads, group = self.q_heads(rank), self.query_heads // self.kv_heads
        return Span(heads.start // group, (heads.stop - 1) // group + 1)

    @property
    def kv_columns(self) -> Partition:
        """Columns of k and v: the KV heads that each rank holds; ranks may share some."""
        heads = [self.kv_heads_of(rank) for rank in range(self.ranks)]
        dim = self.head_dim
        return Partition(self.kv_heads * dim, tuple(Span(h.start * dim, h.stop * dim) for h in heads))

    def kv_head_map(self, rank: int) -> list[int]:
        """For each query head of a rank, the KV head that it reads, counted from the rank's first."""
        heads, group = self.q_heads(rank), self.query_heads // self.kv_heads
        first = self.kv_heads_of(rank).start
        return [head // group - first for head in range(heads.start, heads.stop)]
