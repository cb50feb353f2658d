"""Which part of each dimension a rank owns: what holds of every split, and the splits that DESIGN names."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import InputError
from serried.parallel.partition import ModelPartition, Partition, RowPartition, bisect
from serried.parallel.reduction import ReductionTree, Span
from serried.quant.method import GROUP

QWEN3_06B = {"query_heads": 16, "kv_heads": 8, "head_dim": 128, "mlp_columns": 3072, "vocab_rows": 151936}
SMOLLM2 = {"query_heads": 9, "kv_heads": 3, "head_dim": 64, "mlp_columns": 1536, "vocab_rows": 49152}
QWEN2_7B = {"query_heads": 28, "kv_heads": 4, "head_dim": 128, "mlp_columns": 18944, "vocab_rows": 152064}


def even(model: dict[str, int], ranks: int) -> ModelPartition:
    return ModelPartition(**model, weights=(1,) * ranks)


@st.composite
def partitions(draw: st.DrawFn) -> ModelPartition:
    head_dim = draw(st.sampled_from([8, 16, 32, 48, 64, 80, 96, 128]))
    kv_heads, group = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    largest = ModelPartition.max_ranks(kv_heads * group, head_dim)
    weights = draw(st.lists(st.integers(1, 5), min_size=1, max_size=min(largest, 12)))
    mlp_columns, vocab_rows = draw(st.integers(32, 20_000)), draw(st.integers(1, 200_000))
    return ModelPartition(kv_heads * group, kv_heads, head_dim, mlp_columns, vocab_rows, tuple(weights))


def dimensions(split: ModelPartition) -> list[Partition]:
    return [split.attention, split.mlp, split.vocab]


def edges(part: Partition) -> set[int]:
    return {span.stop for span in part.spans}


@given(st.integers(0, 500), st.lists(st.integers(1, 9), min_size=1, max_size=16))
def test_bisect_tiles_and_starves_nobody(count: int, weights: list[int]) -> None:
    spans = bisect(count, weights)
    assert len(spans) == len(weights)
    assert spans[0].start == 0
    assert spans[-1].stop == count
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert all(span.size >= (count >= len(weights)) for span in spans)


@given(st.integers(1, 4000), st.integers(1, 16))
def test_an_even_bisection_is_nearly_even(count: int, ranks: int) -> None:
    sizes = [span.size for span in bisect(count, [1] * ranks)]
    assert max(sizes) - min(sizes) <= 2


@given(partitions())
def test_spans_tile_each_dimension(split: ModelPartition) -> None:
    sizes = [split.query_heads * split.head_dim, split.mlp_columns, split.vocab_rows]
    for part, size in zip(dimensions(split), sizes, strict=True):
        assert part.size == size == sum(part.sizes)
        assert len(part.spans) == split.ranks
        assert [span.start for span in part.spans] == [0, *(span.stop for span in part.spans[:-1])]


@given(partitions())
def test_edges_lie_on_units(split: ModelPartition) -> None:
    unit = split.unit_heads(split.head_dim) * split.head_dim
    assert unit % 32 == 0
    assert all(heads * split.head_dim % 32 for heads in range(1, split.unit_heads(split.head_dim)))
    for part, step in zip(dimensions(split), (unit, 32, 64), strict=True):
        assert all(edge % step == 0 for edge in edges(part) - {part.size})


@given(partitions())
def test_no_edge_cuts_a_group_of_activations(split: ModelPartition) -> None:
    """What enters a product is quantized in groups of 32: each lies in one rank, one node and one leaf."""
    for part in (split.attention, split.mlp):
        starts = {span.start for span in part.spans}
        for rank, span in enumerate(part.spans):
            for inside in (*part.plan.leaves[rank], *part.plan.nodes[rank]):
                starts.add(span.start + inside.start)
        assert all(start % GROUP == 0 for start in starts - {part.size})


@given(partitions())
def test_edges_lie_on_leaf_edges(split: ModelPartition) -> None:
    unit = split.unit_heads(split.head_dim) * split.head_dim
    attention = ReductionTree(split.attention.size, unit)
    assert edges(split.attention) <= {span.stop for span in attention.leaf_spans()}
    for part in (split.attention, split.mlp):
        for span, leaves in zip(part.spans, part.plan.leaves, strict=True):
            assert [leaf.start for leaf in leaves] == [0, *(leaf.stop for leaf in leaves)][: len(leaves)]
            assert sum(leaf.size for leaf in leaves) == span.size
    assert sum(map(len, split.mlp.plan.leaves)) <= 64


@pytest.mark.parametrize(
    ("columns", "unit"), [(3072, 128), (2048, 128), (2047, 128), (1920, 64), (1000, 64), (512, 32), (300, 32)]
)
def test_the_mlp_has_as_many_units_as_attention_where_it_can(columns: int, unit: int) -> None:
    split = even({**QWEN3_06B, "mlp_columns": columns}, 1)
    leaf, *_ = split.mlp.plan.leaves[0]
    assert leaf.size == unit


@given(st.integers(1, 20_000), st.integers(0, 6))
def test_a_power_of_two_of_even_ranks_is_one_node_a_rank(columns: int, power: int) -> None:
    tree = ReductionTree(columns, 128)
    row = RowPartition.over(tree, [1] * 2**power)
    assert max(row.plan.counts) == 1
    assert all(row.plan.counts) or tree.leaves < 2**power
    parts = [Span(0, tree.leaves)]
    for _ in range(power):
        cut = [(p, p.start + -(-p.size // 2)) for p in parts]
        parts = [half for p, middle in cut for half in (Span(p.start, middle), Span(middle, p.stop))]
    spans = tree.leaf_spans()
    assert row.sizes == [sum(spans[i].size for i in range(*part)) for part in parts]


@given(partitions())
def test_powers_of_two_are_nested(split: ModelPartition) -> None:
    def of(ranks: int) -> ModelPartition:
        return even({name: getattr(split, name) for name in QWEN3_06B}, ranks)

    largest = ModelPartition.max_ranks(split.query_heads, split.head_dim)
    sizes = [2**k for k in range(7) if 2**k <= largest]
    for few, many in pairwise(of(ranks) for ranks in sizes):
        for coarse, fine in zip(dimensions(few), dimensions(many), strict=True):
            assert list(coarse.spans) == [
                Span(a.start, b.stop) for a, b in zip(fine.spans[::2], fine.spans[1::2], strict=True)
            ]


@given(partitions())
def test_a_rank_holds_the_kv_heads_that_it_reads(split: ModelPartition) -> None:
    group = split.query_heads // split.kv_heads
    heads: list[int] = []
    for rank in range(split.ranks):
        own = list(range(*split.q_heads(rank)))
        read = [head // group for head in own]
        held = split.kv_heads_of(rank)
        assert sorted(set(read)) == list(range(*held))
        assert [held.start + local for local in split.kv_head_map(rank)] == read
        assert split.attention.spans[rank].size == len(own) * split.head_dim
        heads += own
    assert heads == list(range(split.query_heads))


def test_kv_heads_are_replicated_when_tp_exceeds_them() -> None:
    split = even({**QWEN3_06B, "kv_heads": 2}, 8)
    assert [split.kv_heads_of(rank) for rank in range(8)] == [Span(0, 1)] * 4 + [Span(1, 2)] * 4
    assert all(split.kv_head_map(rank) == [0, 0] for rank in range(8))


def test_a_replicated_dimension_is_whole_on_every_rank() -> None:
    assert Partition.replicated(10, 3).spans == (Span(0, 10),) * 3


def test_9_heads_on_2_ranks() -> None:
    split = even(SMOLLM2, 2)
    assert [split.q_heads(rank) for rank in range(2)] == [Span(0, 5), Span(5, 9)]
    assert [split.kv_heads_of(rank) for rank in range(2)] == [Span(0, 2), Span(1, 3)]
    assert [split.kv_head_map(rank) for rank in range(2)] == [[0, 0, 0, 1, 1], [0, 1, 1, 1]]


def test_28_heads_on_8_ranks() -> None:
    split = even(QWEN2_7B, 8)
    assert [split.q_heads(rank).size for rank in range(8)] == [4, 3, 4, 3, 4, 3, 4, 3]
    assert [split.kv_heads_of(rank) for rank in range(8)] == [Span(r // 2, r // 2 + 1) for r in range(8)]
    assert split.attention.plan.counts == (1,) * 8


def test_a_vocabulary_of_151665_on_3_ranks() -> None:
    split = even({**QWEN3_06B, "vocab_rows": 151665}, 3)
    assert split.vocab.sizes == [790 * 64, 790 * 64, 151665 - 1580 * 64]


def test_a_vocabulary_of_fewer_units_than_ranks() -> None:
    split = even({**QWEN3_06B, "vocab_rows": 100}, 4)
    assert split.vocab.sizes == [64, 0, 36, 0]


def test_1536_mlp_columns_on_5_ranks() -> None:
    split = even(SMOLLM2, 5)
    assert split.mlp.sizes == [384, 256, 256, 384, 256]


@pytest.mark.parametrize(("weights", "heads", "mlp"), [((2, 1), [11, 5], [2048, 1024]), ((3, 1), [12, 4], [2304, 768])])
def test_weights_set_the_proportion(weights: tuple[int, ...], heads: list[int], mlp: list[int]) -> None:
    split = ModelPartition(**QWEN3_06B, weights=weights)
    assert [split.q_heads(rank).size for rank in range(2)] == heads
    assert split.mlp.sizes == mlp
    share = weights[0] / sum(weights)
    assert abs(split.vocab.sizes[0] - share * split.vocab_rows) <= 32


@given(partitions(), st.integers(2, 5))
def test_only_the_proportion_of_weights_counts(split: ModelPartition, factor: int) -> None:
    model = {name: getattr(split, name) for name in QWEN3_06B}
    scaled = ModelPartition(**model, weights=tuple(factor * weight for weight in split.weights))
    assert [part.spans for part in dimensions(scaled)] == [part.spans for part in dimensions(split)]


@pytest.mark.parametrize(
    ("ranks", "head_dim", "message"),
    [
        (17, 128, "--tensor-parallel-size 17: the model has 16 query heads; legal sizes are 1 to 16"),
        (0, 128, "--tensor-parallel-size 0: .* legal sizes are 1 to 16"),
        (9, 80, "--tensor-parallel-size 9: .* 16 query heads in units of 2; legal sizes are 1 to 8"),
    ],
)
def test_tp_beyond_the_units_is_refused(ranks: int, head_dim: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        even({**QWEN3_06B, "head_dim": head_dim}, ranks)


@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_legal_size_gives_each_rank_work(ranks: int) -> None:
    assert all(size > 0 for part in dimensions(even(QWEN3_06B, ranks)) for size in part.sizes)


def test_qwen3_06b_on_2_ranks() -> None:
    split = even(QWEN3_06B, 2)
    assert split.attention.sizes == [1024, 1024]
    assert split.mlp.sizes == [1536, 1536]
    assert split.vocab.sizes == [75968, 75968]
    assert [split.q_heads(rank) for rank in range(2)] == [Span(0, 8), Span(8, 16)]
    assert [split.kv_heads_of(rank) for rank in range(2)] == [Span(0, 4), Span(4, 8)]
    assert split.attention.plan.counts == split.mlp.plan.counts == (1, 1)
