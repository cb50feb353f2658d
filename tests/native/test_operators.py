"""Every operator of the native backend against the torch backend, for every instruction set of this CPU.

Both run the same forward: see forwards.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from forwards import (
    ALONE,
    DTYPES,
    EPS,
    ISAS,
    MAX_TOKENS,
    PLANS,
    STEPS,
    TREES,
    VOCAB,
    Floats,
    Forward,
    Make,
    OneOf,
    Ops,
    assert_close,
    inputs_of,
    native,
    plain_step,
    read,
    run,
    same_bits,
    tokens_of,
    zero_padded,
)

from serried._native import core
from serried.backends import torch as torch_backend
from serried.backends.base import AttentionSpec, Partial, RopeTable
from serried.backends.native import NEVER, NativeBackend, NativeProgram
from serried.backends.step import StepInput
from serried.backends.survey import NumpyChoices
from serried.backends.torch import TorchBackend
from serried.kv.cache import CacheShape
from serried.layers.rope import RopeConfig, rope_table
from serried.parallel.comm import LocalComm
from serried.parallel.partition import bisect
from serried.parallel.reduction import ReductionPlan, Span, plan_reduction

BF16 = 2.0**-8  # one rounding to bfloat16, relative


# --- The operators, each with a forward around it ---


@dataclass(frozen=True)
class Case:
    """make: places the parameters, gives the forward. rounds: its result is in the backend's dtype (else float32).

    torch_rounds: how often the torch backend rounds on the way, in bfloat16.
    """

    make: Make
    rounds: bool = False
    torch_rounds: int = 1


def embed(columns: int, factor: float = 1.0) -> Case:
    def make(ops: Ops) -> Forward:
        x = ops.input(columns, factor=factor)
        return lambda b: read(b, x(b), columns)

    return Case(make, torch_rounds=0)


def norm(columns: int) -> Case:
    def make(ops: Ops) -> Forward:
        x, weight = ops.input(columns, 3.0), ops.vector(columns)
        return lambda b: read(b, b.norm(x(b), weight, EPS), columns)

    return Case(make, rounds=True)


def linear(outputs: int, inputs: int, bias: bool) -> Case:
    def make(ops: Ops) -> Forward:
        x, weight = ops.input(inputs), ops.linear(outputs, inputs)
        shift = ops.vector(outputs) if bias else None
        return lambda b: read(b, b.linear(zero_padded(b, x(b), inputs), weight, shift), outputs)

    return Case(make, torch_rounds=1 + bias)


def logits(rows: int, inputs: int, softcap: float = 0.0) -> Case:
    def make(ops: Ops) -> Forward:
        x, weight = ops.input(inputs), ops.linear(rows, inputs)
        return lambda b: b.logits(b.select_rows(zero_padded(b, x(b), inputs)), weight, softcap)

    return Case(make)


def activation(name: str, columns: int) -> Case:
    def make(ops: Ops) -> Forward:
        x = ops.input(columns, 3.0)
        return lambda b: read(b, b.activation(x(b), name), columns)

    return Case(make, torch_rounds=0)


def gated_activation(name: str, columns: int) -> Case:
    def make(ops: Ops) -> Forward:
        x = ops.input(2 * columns, 3.0)
        return lambda b: read(b, b.gated_activation(x(b), name), columns)

    return Case(make, rounds=True, torch_rounds=0)


def columns(whole: int, span: Span) -> Case:
    def make(ops: Ops) -> Forward:
        x = ops.input(whole)
        return lambda b: read(b, b.columns(x(b), span), span.size)

    return Case(make, rounds=True, torch_rounds=0)


def columns_of_columns(whole: int, first: Span, second: Span) -> Case:
    """The second time of what is in the backend's dtype already."""

    def make(ops: Ops) -> Forward:
        x = ops.input(whole)
        return lambda b: read(b, b.columns(b.columns(x(b), first), second), second.size)

    return Case(make, rounds=True, torch_rounds=0)


def partial(ops: Ops, plan: ReductionPlan, outputs: int, bias: bool = False) -> Callable[[Any], Partial]:
    inputs = inputs_of(plan)
    x, weight = ops.input(inputs), ops.linear(outputs, inputs)
    shift = ops.vector(outputs) if bias else None

    def forward(b: Any) -> Partial:
        nodes = b.linear_nodes(zero_padded(b, x(b), inputs), weight, plan, 0)
        return Partial(nodes, outputs, plan, LocalComm(), shift)

    return forward


def reduce(plan: ReductionPlan, outputs: int, bias: bool) -> Case:
    def make(ops: Ops) -> Forward:
        unreduced = partial(ops, plan, outputs, bias)
        return lambda b: read(b, b.reduce(unreduced(b)), outputs)

    return Case(make, torch_rounds=node_rounds(plan))


def node_rounds(plan: ReductionPlan) -> int:
    """torch rounds each node; of many, most errors cancel."""
    return 1 if plan.counts == (1,) else 4


def reduce_add_norm(plan: ReductionPlan, outputs: int, bias: bool, result: int, inner: bool = False) -> Case:
    """result: 0 for what is normalized, 1 for the new residual. inner: what is added is normalized too."""

    def make(ops: Ops) -> Forward:
        unreduced, residual, weight = partial(ops, plan, outputs, bias), ops.input(outputs), ops.vector(outputs)
        first = ops.vector(outputs) if inner else None

        def forward(b: Any) -> Any:
            both = b.reduce_add_norm(unreduced(b), residual(b), weight, EPS, first)
            return read(b, both[result], outputs)

        return forward

    return Case(make, rounds=result == 0, torch_rounds=node_rounds(plan) + 1)


CASES = {
    **{f"embed {n}": embed(n) for n in (8, 64, 130)},
    "embed 70, scaled": embed(70, 8.3125),
    **{f"norm {n}": norm(n) for n in (1, 33, 64, 200)},
    **{
        f"linear {inputs} to {outputs}{' with bias' * bias}": linear(outputs, inputs, bias)
        for outputs, inputs, bias in (
            (64, 32, False), (1, 1, True), (65, 33, False), (130, 100, True), (300, 31, True), (700, 257, False),
        )
    },
    **{f"logits {inputs} to {rows}": logits(rows, inputs) for rows, inputs in ((1, 32), (100, 65), (1090, 96))},
    **{f"logits 65 to 100, capped at {cap}": logits(100, 65, cap) for cap in (0.5, 2.0, 30.0)},
    **{f"{name} {n}": activation(name, n) for name, n in (("silu", 7), ("gelu", 64), ("gelu_pytorch_tanh", 100))},
    **{
        f"gated {name} {n}": gated_activation(name, n)
        for name in ("silu", "gelu", "gelu_pytorch_tanh")
        for n in (5, 33, 160)
    },
    **{f"columns {span} of {n}": columns(n, span) for n, span in ((70, Span(3, 40)), (64, Span(0, 64)))},
    "columns of columns": columns_of_columns(100, Span(10, 97), Span(5, 70)),
    **{f"reduce {name}": reduce(plan, 70, i % 2 == 0) for i, (name, plan) in enumerate(PLANS.items())},
    **{
        f"reduce_add_norm {name}, {('normalized', 'residual')[result]}": reduce_add_norm(
            PLANS[name], outputs, bias, result
        )
        for name, outputs, bias in (("1 leaves", 64, False), ("5 leaves of 3 ranks", 77, True), ("64 nodes", 33, True))
        for result in (0, 1)
    },
    **{
        f"reduce_norm_add_norm {name}, {('normalized', 'residual')[result]}": reduce_add_norm(
            PLANS[name], outputs, bias, result, inner=True
        )
        for name, outputs, bias in (("1 leaves", 64, False), ("24 leaves of 2 ranks", 77, True))
        for result in (0, 1)
    },
}  # fmt: skip


@cache
def by_torch(name: str, dtype: str) -> list[Floats]:
    return run(TorchBackend(dtype), CASES[name].make, STEPS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_operator(name: str, dtype: str, isa: str) -> None:
    """As torch's: in float32 to the digit; in bfloat16 torch in float32 is met too, but for one rounding."""
    case = CASES[name]
    found = run(native(dtype, isa), case.make, STEPS)
    assert all(np.isfinite(rows).all() for rows in found)
    assert_close(found, by_torch(name, "float32"), 1e-5 + BF16 * (case.rounds and dtype == "bfloat16"))
    if dtype == "bfloat16":
        assert_close(found, by_torch(name, dtype), 1e-5 + BF16 * (case.rounds + case.torch_rounds))
    # The same bits for one token as for many, with one thread as with two.
    (together,) = (rows for rows in found if len(rows) == len(ALONE))
    assert same_bits(np.concatenate(run(native(dtype, isa, threads=1), case.make, ALONE)), together)


def test_the_comparison_can_fail() -> None:
    a = by_torch("linear 33 to 65", "float32")
    for row in (0, 16):
        wrong = [rows.copy() for rows in a]
        wrong[3][row, 11] += 3e-5 * np.abs(a[3]).max()
        with pytest.raises(AssertionError):
            assert_close(wrong, a, 1e-5)
        assert not same_bits(wrong[3], a[3])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(5))
def test_the_nodes_of_a_rank(rank: int, dtype: str, isa: str) -> None:
    """Ranks with one node, with several and with none at all: linear_nodes alone, as nobody is there to reduce with."""
    tree, outputs = TREES[64], 70
    parts = [*bisect(tree.leaves, (1, 5, 2, 7)), Span(64, 64)]
    plan = plan_reduction(tree, parts)
    inputs = plan.leaves[rank][-1].stop if plan.leaves[rank] else 32
    width = -(-outputs // 64) * 64

    def make(ops: Ops) -> Forward:
        x, weight = ops.input(inputs), ops.linear(outputs, inputs)

        def forward(b: Any) -> Any:
            nodes = b.linear_nodes(zero_padded(b, x(b), inputs), weight, plan, rank)
            wide = width if isinstance(b, NativeBackend) else outputs
            return read(b, nodes, wide * plan.counts[rank]) if plan.counts[rank] else read(b, x(b), inputs)

        return forward

    expected = run(TorchBackend("float32"), make, STEPS)
    found = run(native(dtype, isa, comm=OneOf(rank, 5)), make, STEPS)
    if plan.counts[rank]:
        found = [rows.reshape(len(rows), -1, width)[:, :, :outputs].reshape(len(rows), -1) for rows in found]
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_some_rows_or_none(dtype: str, isa: str) -> None:
    tokens = tokens_of(17)
    steps = [plain_step(tokens, rows) for rows in ([0], [16], [2, 3, 11], [], list(range(17)))]
    case = logits(100, 65)
    found = run(native(dtype, isa), case.make, steps)
    assert [rows.shape for rows in found] == [(1, 100), (1, 100), (3, 100), (0, 100), (17, 100)]
    for step, rows in zip(steps, found, strict=True):
        assert same_bits(rows, found[-1][step.logit_rows])
    assert_close(found, run(TorchBackend("float32"), case.make, steps), 1e-5)


def test_a_row_of_a_tied_embedding_is_looked_up_in_its_tiles() -> None:
    """One array serves as the embedding and as the LM head."""

    def make(ops: Ops) -> Forward:
        tied = ops.parameter(ops.values(VOCAB, 72), "embedding")
        return lambda b: b.logits(b.select_rows(zero_padded(b, b.embed(tied, Span(0, VOCAB), LocalComm()), 72)), tied)

    for dtype in DTYPES:
        found, expected = run(native(dtype, ISAS[-1]), make, STEPS), run(TorchBackend("float32"), make, STEPS)
        assert_close(found, expected, 1e-5)


# --- Attention ---


@dataclass(frozen=True)
class Heads:
    """An attention: its heads, and the cache that it reads. The last three: see AttentionSpec (rotary_dim 0: all)."""

    head_dim: int
    kv_map: tuple[int, ...]
    qk_norm: bool
    block_size: int
    rotary_dim: int = 0
    window: int = 0
    softcap: float = 0.0

    @property
    def kv_heads(self) -> int:
        return max(self.kv_map) + 1

    @property
    def columns(self) -> int:
        return (len(self.kv_map) + 2 * self.kv_heads) * self.head_dim

    def shape(self, dtype: str) -> CacheShape:
        blocks = -(-CACHE_SLOTS // self.block_size)
        return CacheShape(1, blocks, self.block_size, self.kv_heads, self.head_dim, 4 if dtype == "float32" else 2)

    def make(self, ops: Ops) -> Forward:
        x = ops.input(self.columns)
        norms = [ops.vector(self.head_dim) if self.qk_norm else None for _ in range(2)]
        rotary_dim = self.rotary_dim or self.head_dim
        cos, sin = rope_table(RopeConfig(10000.0), rotary_dim, CACHE_SLOTS)
        rope = RopeTable(ops.backend.constant(cos), ops.backend.constant(sin))
        spec = AttentionSpec(
            layer=0,
            query_heads=len(self.kv_map),
            kv_heads=self.kv_heads,
            kv_map=self.kv_map,
            head_dim=self.head_dim,
            rotary_dim=rotary_dim,
            scale=self.head_dim**-0.5,
            norm_eps=EPS,
            window=self.window,
            softcap=self.softcap,
        )
        return lambda b: read(b, b.attention(x(b), spec, rope, *norms), len(self.kv_map) * self.head_dim)


HEADS = [
    Heads(64, (0, 0, 1, 1), False, 32),
    Heads(20, (0, 1, 2), False, 1),
    Heads(24, (0, 0, 0, 1, 2, 2), True, 16),  # non-uniform: a rank with parts of its first and of its last group
    Heads(128, (0, 0, 0, 0, 0, 0, 0), True, 32),
    Heads(128, (0, 1, 1), False, 16),
    Heads(20, (0,) * 9 + (1,), True, 32),
    Heads(32, (0, 0, 1), True, 16, rotary_dim=24, window=50),
    Heads(20, (0, 1, 1), False, 32, rotary_dim=2, window=300),
    Heads(64, (0, 0, 1, 1), False, 32, window=1, softcap=2.0),
    Heads(24, (0, 0, 1), True, 32, softcap=0.7),
]
LENGTHS = (530, 3, 70, 257, 33)  # of the sequences: three segments, a block, across the edges of both
CACHE_SLOTS = sum(-(-n // 32) * 32 for n in LENGTHS) + 32
WINDOW = MAX_TOKENS - 8


@dataclass(frozen=True)
class Part:
    """Some tokens of a sequence."""

    sequence: int
    start: int
    stop: int


def attention_step(parts: Sequence[Part], block_size: int) -> StepInput:
    """A step whose sequences' blocks are scattered over the cache."""
    order = np.random.default_rng(1).permutation(-(-CACHE_SLOTS // block_size)).astype(np.int32)
    needed = [-(-n // block_size) for n in LENGTHS]
    first = [0, *accumulate(needed)]
    tokens, positions, slots, blocks = [], [], [], []
    for part in parts:
        own = order[first[part.sequence] : first[part.sequence + 1]][: -(-part.stop // block_size)]
        at = np.arange(part.start, part.stop)
        tokens.append(((at * 31 + part.sequence * 7) ** 2 // 5) % VOCAB)
        positions.append(at)
        slots.append(own[at // block_size] * block_size + at % block_size)
        blocks.append(own)
    counts = [part.stop - part.start for part in parts]
    joined = [np.concatenate(arrays).astype(np.int32) for arrays in (tokens, positions, slots, blocks)]
    return replace(
        plain_step(joined[0].tolist()),
        positions=joined[1],
        slots=joined[2],
        row_starts=np.array([0, *accumulate(counts)], np.int32),
        kv_lens=np.array([part.stop for part in parts], np.int32),
        block_starts=np.array([0, *accumulate(len(own) for own in blocks)], np.int32),
        blocks=joined[3],
    )


def chunks(sizes: Sequence[int]) -> list[list[Part]]:
    """All sequences from their beginning to their end, sequence i in chunks of sizes[i], all in the same steps."""
    at, steps = [0] * len(LENGTHS), []
    while any(a < n for a, n in zip(at, LENGTHS, strict=True)):
        step, room = [], MAX_TOKENS
        for i, length in enumerate(LENGTHS):
            count = min(sizes[i], length - at[i], room)
            if count > 0:
                step.append(Part(i, at[i], at[i] + count))
                at[i], room = at[i] + count, room - count
        steps.append(step)
    return steps


PREFILL = [[Part(i, a, min(a + WINDOW, n))] for i, n in enumerate(LENGTHS) for a in range(0, n, WINDOW)]
MIXED = chunks((23, 1, 5, 17, 1))  # prefill of some with decode of others
ONE_BY_ONE = [[Part(i, n - 1, n)] for i, n in enumerate(LENGTHS)]


def by_sequence(steps: Sequence[Sequence[Part]], results: Sequence[Floats]) -> list[Floats]:
    """The rows of each sequence, in the order of its positions."""
    rows: list[list[Floats]] = [[] for _ in LENGTHS]
    for step, found in zip(steps, results, strict=True):
        edges = list(accumulate((part.stop - part.start for part in step), initial=0))
        for part, a, b in zip(step, edges, edges[1:], strict=False):
            rows[part.sequence].append(found[a:b])
    return [np.concatenate(found) for found in rows]


def attention(backend: Any, heads: Heads, steps: Sequence[Sequence[Part]]) -> list[Floats]:
    inputs = [attention_step(step, heads.block_size) for step in steps]
    return by_sequence(steps, run(backend, heads.make, inputs, heads.shape(backend.dtype)))


def attend_exactly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """torch's attention in float64, of q, k and v that are rounded already."""
    return ATTEND(q.double(), k.double(), v.double(), positions, spec)


ATTEND = torch_backend.attend


@cache
def attention_by_torch(heads: Heads, dtype: str) -> list[Floats]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "attend", attend_exactly)
        return attention(TorchBackend(dtype), heads, PREFILL)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention(heads: Heads, dtype: str, isa: str) -> None:
    """Prefill against torch; then prefill and decode mixed, with other threads: the same bits."""
    found = attention(native(dtype, isa), heads, PREFILL)
    assert all(np.isfinite(rows).all() for rows in found)
    # Both round q and k, but at times to different sides of a tie: one rounding, of the result or of what is behind it.
    assert_close(found, attention_by_torch(heads, dtype), 1e-5 if dtype == "float32" else BF16)
    mixed = attention(native(dtype, isa, threads=1), heads, MIXED)
    for length, a, b in zip(LENGTHS, found, mixed, strict=True):
        assert same_bits(a, b), f"the sequence of {length}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_reads_nothing_but_the_cache(dtype: str, isa: str) -> None:
    """The last token once more, alone and then all together: as in prefill; and the block size does not matter."""
    heads = Heads(24, (0, 0, 1, 2, 2), True, 16)
    steps = [*PREFILL, *ONE_BY_ONE, [part for step in ONE_BY_ONE for part in step]]
    found = attention(native(dtype, isa), heads, steps)
    for length, rows in zip(LENGTHS, found, strict=True):
        assert len(rows) == length + 2
        assert same_bits(rows[-1], rows[-3])
        assert same_bits(rows[-2], rows[-3])
    for block_size in (1, 32, 7):
        other = attention(native(dtype, isa), replace(heads, block_size=block_size), PREFILL)
        assert all(same_bits(a[:-2], b) for a, b in zip(found, other, strict=True))


class Spoiled(Ops):
    """Tokens 0 to 2 are NaN, 3 to 5 infinite, in all their columns."""

    def input(self, columns: int, scale: float = 1.0, factor: float = 1.0) -> Forward:
        values = self.values(VOCAB, columns, scale=scale)
        values[:3], values[3:6] = np.nan, np.inf
        weight = self.parameter(values, "embedding")
        return lambda ops: ops.embed(weight, Span(0, VOCAB), LocalComm(), factor)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "window", "spoiled"), [(5, 0, (3, 4)), (80, 0, (40, 41, 63)), (80, 9, (40, 41, 63))])
def test_no_trace_of_what_a_token_does_not_see(
    count: int, window: int, spoiled: tuple[int, ...], dtype: str, isa: str
) -> None:
    """NaN and infinity in the keys and values of a chunk's own tokens: later ones, and those that left the window."""
    heads = Heads(64, (0, 0, 0, 1), False, 1, window=window)
    tokens = [6 + (i * i) % (VOCAB - 6) for i in range(count)]
    steps = [plain_step([i % 6 if i in at else t for i, t in enumerate(tokens)]) for at in ((), spoiled)]
    clean, dirty = run(native(dtype, isa), lambda ops: heads.make(Spoiled(ops.backend)), steps, heads.shape(dtype))
    for row in range(count):
        sees = any(row - (window or count) < p <= row for p in spoiled)
        assert np.isfinite(clean[row]).all()
        assert np.isnan(dirty[row]).any() if sees else same_bits(dirty[row], clean[row]), f"row {row}"


# --- What a step must not be ---


def test_bad_steps_are_refused() -> None:
    backend = native("float32", ISAS[-1])
    backend.allocate_cache(CacheShape(1, MAX_TOKENS, 1, 1, 2, 4))
    program = backend.compile(logits(100, 65).make(Ops(backend)))
    program.run(plain_step(tokens_of(70)))
    too_long = [1] * (MAX_TOKENS + 1)
    with pytest.raises(ValueError, match="larger than the program's budget"):
        program.run(plain_step(too_long, [0]))
    flat = plain_step(tokens_of(5)).flat
    for broken, message in ((flat[:-1], "wrong size"), (flat[:4], "too short"), (-flat, "negative size")):
        with pytest.raises(ValueError, match=message):
            program.native.run(np.ascontiguousarray(broken), np.empty((5, 128), np.float32))
    with pytest.raises(ValueError, match="too few rows"):
        program.native.run(flat, np.empty((4, 128), np.float32))
    with pytest.raises(RuntimeError, match="finished"):
        program.native.select_rows(0)


@pytest.mark.parametrize("name", ["relu", "SILU", ""])
def test_an_unknown_activation(name: str) -> None:
    backend = native("float32", ISAS[0])
    with pytest.raises(ValueError, match="the native kernels have silu, gelu, gelu_pytorch_tanh"):
        backend.compile(activation(name, 8).make(Ops(backend)))


# --- Choosing tokens ---


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("own", [1, 63, 64, 65, 700])
def test_surveys_are_numpys(isa: str, own: int) -> None:
    """Places, counts and sums of some rows, with many equals and what is no number or -inf; noise too."""
    store = NativeBackend("float32", 2, LocalComm(), 4, isa=isa)
    native = core.Program(store.kernels, store.pool, None, 4, 4, NEVER, NEVER, "float32")
    program, plain = NativeProgram(native, store.kernels, LocalComm(), own, {}), NumpyChoices()
    rng = np.random.default_rng(own)
    logits = (rng.standard_normal((3, own)) * 4).round().astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    rows, counts, divisors, sums = [2, 0, 1, 2], [own, 5, 1, 0], [0.7, 1.0, 3.0, 1e-3], [True, True, False, True]
    for found, wanted in zip(
        program.survey(logits, rows, counts, divisors, sums),
        plain.survey(logits, rows, counts, divisors, sums),
        strict=True,
    ):
        assert (found.possible, found.places.tolist()) == (wanted.possible, wanted.places.tolist())
        assert found.leaf_max.tolist() == wanted.leaf_max.tolist()
        np.testing.assert_allclose(found.leaf_sum, wanted.leaf_sum, rtol=1e-14)
    (nothing,) = program.survey(np.full((1, own), np.nan, np.float32), [0], [3], [1.0], [True])
    assert (nothing.possible, nothing.places.size, nothing.leaf_sum.sum()) == (0, 0, 0)
    ids = rng.integers(0, 200_000, 50)
    np.testing.assert_allclose(program.noise(1 << 63, 7, ids), plain.noise(1 << 63, 7, ids), rtol=1e-14)
