"""Products with quantized weights against an exact model of them, and what happens to activations on the way there.

The model: activations are rounded in groups of 32, to int8 or, where there are outliers, three bits finer (here in
NumPy, as kernels.hpp says), the weights are the numbers that their blocks stand for, and what comes out is the product
of the two in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from forwards import (
    ALONE,
    DTYPES,
    EPS,
    ISAS,
    MAX_TOKENS,
    PLANS,
    STEPS,
    VOCAB,
    Floats,
    Forward,
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
from hypothesis import given, settings
from hypothesis import strategies as st

from serried import _native
from serried.backends.base import AttentionSpec, Partial, RopeTable
from serried.backends.step import StepInput
from serried.kv.cache import CacheShape
from serried.layers.rope import RopeConfig, rope_table
from serried.parallel.comm import LocalComm
from serried.parallel.reduction import Span
from serried.quant import q4_k
from serried.quant.method import GROUP, Method, groups_of
from serried.quant.registry import METHODS
from serried.quant.rows import quantize_rows
from serried.weights.spec import Parameter, ShardSpec

EXACT = 1e-5
FINE_SQUARES, FINE_STEPS = 25600, 8  # of kernels.hpp
by_method = pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
by_isa = pytest.mark.parametrize("isa", ISAS)


def rounded(x: Floats) -> Any:
    """What the kernels multiply with instead of x [rows, columns]: float64."""
    rows, columns = x.shape
    groups = np.zeros((rows, groups_of(columns) * GROUP), np.float32)
    groups[:, :columns] = x
    groups = groups.reshape(rows, -1, GROUP)
    digits, scale = in_steps(groups, 127)
    fine = np.square(digits).sum(-1, keepdims=True) < FINE_SQUARES
    finer, finer_scale = in_steps(groups, 127 * FINE_STEPS)
    return np.where(fine, finer * finer_scale, digits * scale).reshape(rows, -1)[:, :columns]


def in_steps(groups: Floats, most: int) -> tuple[Any, Any]:
    """Groups [..., 32] as whole numbers of up to `most`, in float64, and what they are multiples of."""
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.where(largest > 0, np.rint(groups * (np.float32(most) / largest)), 0)
    return digits.astype(np.float64), largest / np.float32(most)


def numbers(method: Method, weight: Floats) -> Any:
    return quantize_rows(method, weight).values().astype(np.float64)


def model(x: Floats, method: Method, weight: Floats, bias: Floats | None = None) -> Floats:
    y = rounded(x) @ numbers(method, weight).T
    return (y if bias is None else y + bias).astype(np.float32)


class Made:
    """A forward around `inner`, and the values of its embedding table, for the model."""

    def __init__(self, columns: int, inner: Callable[[Ops], Callable[[Any, Any], Any]]) -> None:
        self.columns, self.inner = columns, inner

    def __call__(self, ops: Ops) -> Forward:
        self.table = ops.values(VOCAB, self.columns, scale=3.0)
        self.table[::7] *= 128
        self.table[::2, ::29] *= 16  # fine groups
        self.table[3] = 0
        embedding, inner = ops.parameter(self.table, "embedding"), self.inner(ops)
        return lambda b: inner(b, b.embed(embedding, Span(0, VOCAB), LocalComm()))

    def inputs(self, steps: Sequence[StepInput]) -> list[Floats]:
        return [self.table[step.tokens] for step in steps]


SHAPES = [(64, 32), (1, 1), (65, 33), (130, 100), (300, 31), (700, 257), (192, 576)]


@by_isa
@by_method
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear(outputs: int, inputs: int, method: Method, isa: str) -> None:
    """The exact model but for float32 sums; the same bits for one token as for many, with one thread as with two."""
    values: dict[str, Floats] = {}

    def inner(ops: Ops) -> Callable[[Any, Any], Any]:
        values["weight"], values["bias"] = ops.values(outputs, inputs, scale=inputs**-0.5), ops.values(outputs)
        weight, bias = ops.parameter(values["weight"], "linear", method), ops.parameter(values["bias"], "vector")
        return lambda b, x: read(b, b.linear(zero_padded(b, x, inputs), weight, bias), outputs)

    made = Made(inputs, inner)
    found = run(native("float32", isa), made, STEPS)
    expected = [model(x, method, values["weight"], values["bias"]) for x in made.inputs(STEPS)]
    assert_close(found, expected, EXACT)
    assert same_bits(np.concatenate(run(native("float32", isa, threads=1), made, ALONE)), found[-1])


def test_the_comparison_can_fail() -> None:
    """A model with float32 activations instead of rounded ones differs by what the rounding costs."""
    weight = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    for method in METHODS.values():
        exact = (x @ numbers(method, weight).T).astype(np.float32)
        with pytest.raises(AssertionError):
            assert_close([exact], [model(x, method, weight)], 100 * EXACT)
        assert_close([exact], [model(x, method, weight)], 0.03)


def with_identity(table: Floats, isa: str) -> Floats:
    """What is multiplied instead of each row of the table [MAX_TOKENS, columns]."""
    columns = table.shape[1]

    def forward(ops: Ops) -> Forward:
        embedding = ops.parameter(table, "embedding")
        identity = ops.parameter(np.eye(columns, dtype=np.float32) * 127, "linear", METHODS["int8"])
        return lambda b: b.logits(b.select_rows(b.embed(embedding, Span(0, MAX_TOKENS), LocalComm())), identity)

    (found,) = run(native("float32", isa), forward, [plain_step(range(len(table)))])
    return found / np.float32(127)  # whose scale has no rounding


@by_isa
def test_when_a_group_is_fine(isa: str) -> None:
    """Where the squares of its digits have a sum below 25,600: there a quarter of a step is kept."""
    table = np.zeros((MAX_TOKENS, 64), np.float32)
    table[:20, :6] = [127, 97, 6, 5, 0.25, -0.25]  # 25,599
    table[20:40, 20:27] = [3, -127, 97, 7, 2, 0.25, -0.25]  # 25,600
    table[40:, 32:35] = [-127, 0.25, 0.375]
    found = with_identity(table, isa)
    expected = np.where(np.abs(table) >= 1, table, 0)
    expected[:20], expected[40:] = table[:20], table[40:]
    assert_close([found], [expected], EXACT)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from(["even", "outlier", "pair", "tiny", "zero"]), min_size=1, max_size=5),
)
@settings(max_examples=20, deadline=None)
def test_groups_of_all_kinds(seed: int, kinds: list[str]) -> None:
    """By every instruction set as by the model, whatever stands beside them."""
    rng = np.random.default_rng(seed)
    table = np.zeros((MAX_TOKENS, GROUP * len(kinds)), np.float32)
    for group, kind in enumerate(kinds):
        values = rng.normal(size=(MAX_TOKENS, GROUP)) * (kind != "zero") * (1e-30 if kind == "tiny" else 1)
        if kind in {"outlier", "pair"}:
            values[:, rng.permutation(GROUP)[: 1 + (kind == "pair")]] *= 10 ** rng.uniform(0, 4, (MAX_TOKENS, 1))
        table[:, group * GROUP : (group + 1) * GROUP] = values
    for isa in ISAS:
        with np.errstate(under="ignore"):
            assert_close([with_identity(table, isa)], [rounded(table).astype(np.float32)], EXACT)


@by_method
def test_instruction_sets_agree(method: Method) -> None:
    """Those that multiply and add in one rounding: all but the baseline."""

    def inner(ops: Ops) -> Callable[[Any, Any], Any]:
        weight = ops.parameter(ops.values(130, 257, scale=0.1), "linear", method)
        return lambda b, x: read(b, b.linear(zero_padded(b, x, 257), weight, None), 130)

    runs = [run(native("float32", isa), Made(257, inner), STEPS) for isa in ISAS if isa != "baseline"]
    for other in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, runs[0], strict=True))


@by_isa
@by_method
@pytest.mark.parametrize("name", ["3 leaves", "24 leaves of 2 ranks", "64 leaves of 5 ranks"])
def test_reduction(name: str, method: Method, isa: str) -> None:
    """Leaf by leaf and node by node: groups do not straddle them."""
    plan, outputs = PLANS[name], 70
    inputs = inputs_of(plan)
    values: dict[str, Floats] = {}

    def inner(ops: Ops) -> Callable[[Any, Any], Any]:
        values["weight"] = ops.values(outputs, inputs, scale=inputs**-0.5)
        weight = ops.parameter(values["weight"], "linear", method)

        def forward(b: Any, x: Any) -> Any:
            nodes = b.linear_nodes(zero_padded(b, x, inputs), weight, plan, 0)
            return read(b, b.reduce(Partial(nodes, outputs, plan, LocalComm(), None)), outputs)

        return forward

    made = Made(inputs, inner)
    found = run(native("float32", isa), made, STEPS)
    assert_close(found, [model(x, method, values["weight"]) for x in made.inputs(STEPS)], EXACT)
    assert same_bits(np.concatenate(run(native("float32", isa, threads=1), made, ALONE)), found[-1])


@by_isa
@by_method
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding(dtype: str, method: Method, isa: str) -> None:
    """One array serves as the embedding, whose rows are the numbers of its blocks, and as the LM head."""
    columns = 72
    values: dict[str, Floats] = {}

    def table(ops: Ops) -> Parameter:
        values["table"] = ops.values(VOCAB, columns)
        return ops.parameter(values["table"], "embedding", method)

    def looked_up(ops: Ops) -> Forward:
        tied = table(ops)
        return lambda b: read(b, b.embed(tied, Span(0, VOCAB), LocalComm()), columns)

    def both(ops: Ops) -> Forward:
        tied = table(ops)
        return lambda b: b.logits(
            b.select_rows(zero_padded(b, b.embed(tied, Span(0, VOCAB), LocalComm()), columns)), tied
        )

    rows = run(native("float32", isa), looked_up, STEPS)
    held = quantize_rows(method, values["table"]).values()
    assert all(np.array_equal(found, held[step.tokens]) for step, found in zip(STEPS, rows, strict=True))
    found = run(native(dtype, isa), both, STEPS)
    if dtype == "float32":
        assert_close(found, [model(x, method, values["table"]) for x in rows], EXACT)
    else:  # selected from float32: nothing is rounded to bfloat16 before it is to int8
        assert all(same_bits(a, b) for a, b in zip(found, run(native("float32", isa), both, STEPS), strict=True))


# --- Whoever writes activations writes them as int8, where a quantized weight is their first consumer ---


def norm(ops: Ops) -> tuple[Callable[[Any, Any], Any], int]:
    weight = ops.parameter(ops.values(100), "vector")
    return lambda b, x: b.norm(x, weight, EPS), 100


def gated(ops: Ops) -> tuple[Callable[[Any, Any], Any], int]:
    return lambda b, x: b.gated_activation(x, "silu"), 50


def reduced(ops: Ops) -> tuple[Callable[[Any, Any], Any], int]:
    plan = PLANS["3 leaves"]
    weight = ops.parameter(ops.values(100, inputs_of(plan), scale=0.1), "linear", METHODS["int8"])
    scale = ops.parameter(ops.values(100), "vector")

    def forward(b: Any, x: Any) -> Any:
        nodes = b.linear_nodes(b.columns(x, Span(10, 10 + inputs_of(plan))), weight, plan, 0)
        return b.reduce_add_norm(Partial(nodes, 100, plan, LocalComm(), None), x, scale, EPS)[0]

    return forward, 100


def attention(ops: Ops) -> tuple[Callable[[Any, Any], Any], int]:
    cos, sin = rope_table(RopeConfig(10000.0), 20, MAX_TOKENS)
    rope = RopeTable(ops.backend.constant(cos), ops.backend.constant(sin))
    spec = AttentionSpec(0, 3, 1, (0, 0, 0), 20, 20, 20**-0.5, EPS)
    return lambda b, x: b.attention(x, spec, rope, None, None), 60


@by_isa
@by_method
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("producer", [norm, gated, reduced, attention], ids=lambda f: f.__name__)
def test_producers(producer: Any, dtype: str, method: Method, isa: str) -> None:
    """Rounded once: from float32, but for attention, which writes the cache's dtype."""
    values: dict[str, Floats] = {}

    def plain(ops: Ops) -> Callable[[Any, Any], Any]:
        forward, columns = producer(ops)
        return lambda b, x: read(b, forward(b, x), columns)

    def multiplied(ops: Ops) -> Callable[[Any, Any], Any]:
        forward, columns = producer(ops)
        values["weight"] = ops.values(33, columns, scale=columns**-0.5)
        weight = ops.parameter(values["weight"], "head", method)
        return lambda b, x: b.logits(b.select_rows(forward(b, x)), weight)

    before = dtype if producer is attention else "float32"
    written = run(native(before, isa), Made(100, plain), STEPS, cache(before))
    found = run(native(dtype, isa), Made(100, multiplied), STEPS, cache(dtype))
    assert_close(found, [model(x, method, values["weight"]) for x in written], EXACT)


def cache(dtype: str) -> CacheShape:
    return CacheShape(1, MAX_TOKENS, 1, 1, 20, 4 if dtype == "float32" else 2)


@pytest.mark.parametrize("first", ["plain", "quantized"])
def test_consumers_of_two_kinds(first: str) -> None:
    """What is written for a plain weight can be rounded for a quantized one; not the other way round."""
    results: dict[str, list[Floats]] = {}

    def inner(ops: Ops) -> Callable[[Any, Any], Any]:
        scale = ops.parameter(ops.values(64), "vector")
        weights = {
            "plain": ops.parameter(ops.values(40, 64), "linear"),
            "quantized": ops.parameter(ops.values(40, 64), "linear", METHODS["int8"]),
        }

        def forward(b: Any, x: Any) -> Any:
            h = b.norm(x, scale, EPS)
            order = sorted(weights, key=lambda name: name != first)
            outputs = {name: b.linear(h, weights[name], None) for name in order}
            return read(b, outputs["quantized"], 40)

        return forward

    if first == "quantized":
        with pytest.raises(ValueError, match="rounded to int8 for its first consumer"):
            run(native("bfloat16", ISAS[-1]), Made(64, inner), STEPS)
        return
    results["float32"] = run(native("float32", ISAS[-1]), Made(64, inner), STEPS)
    results["bfloat16"] = run(native("bfloat16", ISAS[-1]), Made(64, inner), STEPS)
    assert_close(results["bfloat16"], results["float32"], 0.03)
    assert not all(same_bits(a, b) for a, b in zip(*results.values(), strict=True))  # rounded on the way


# --- How weights get there ---


@by_isa
@by_method
def test_blocks_and_values_make_the_same_weight(method: Method, isa: str) -> None:
    """Rows as float32, or as blocks of a file, in pieces of any size: the same tiles."""
    values = np.random.default_rng(2).standard_normal((200, 173)).astype(np.float32)
    blocks = quantize_rows(method, values)
    table = np.eye(173, dtype=np.float32)[:VOCAB]

    def make(cuts: Sequence[int], as_blocks: bool) -> Any:
        def forward(ops: Ops) -> Forward:
            embedding = ops.parameter(table, "embedding")
            destination = ops.backend.destination(values.shape, "linear", method)
            for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True):
                if as_blocks:
                    destination.write_blocks(a, replace(blocks, blocks=blocks.blocks[a:b]))
                else:
                    destination.write(a, values[a:b])
            weight = Parameter(ShardSpec.replicated("x", values.shape), "linear", method=method)
            weight.value = destination.finish()
            return lambda b: b.logits(b.select_rows(b.embed(embedding, Span(0, VOCAB), LocalComm())), weight)

        return forward

    runs = [run(native("float32", isa), make(cuts, how), STEPS) for cuts in ([], [1, 70, 130]) for how in (0, 1)]
    for other in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, runs[0], strict=True))
    column = tokens_of(5)[0]
    assert_close([runs[0][2][:1]], [blocks.values()[None, :, column]], EXACT)  # 1 is 127 / 127: nothing is rounded


@by_isa
@by_method
def test_the_bits_of_numpy(method: Method, isa: str) -> None:
    """Quantizing, by every instruction set."""
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((50, 173)) * 10.0 ** rng.integers(-6, 4, (50, 1))).astype(np.float32)
    values[3], values[4], values[5, :40] = 0, 0.75, -1
    kernels = _native.open_kernels(isa)
    for source_values in (values, values.astype(ml_dtypes.bfloat16)):
        blocks = np.full((50, method.row_bytes(173) + 6), 7, np.uint8)
        source = (source_values.ctypes.data, source_values.dtype.name, 50, 173, 173)
        kernels.quantize(method.name, *source, blocks.ctypes.data, blocks.shape[1])
        assert np.array_equal(blocks[:, :-6], method.quantize(source_values))
        assert (blocks[:, -6:] == 7).all()


@by_isa
def test_q4_k_by_every_instruction_set(isa: str) -> None:
    rng = np.random.default_rng(6)
    raw = rng.integers(0, 256, (9, 3 * q4_k.SUPERBLOCK_BYTES)).astype(np.uint8)
    with np.errstate(all="ignore"):
        expected = q4_k._repack(raw.reshape(-1, q4_k.SUPERBLOCK_BYTES)).reshape(9, -1)
    found = np.zeros_like(expected)
    arguments = (raw.ctypes.data, raw.shape[1], 9, 3, found.ctypes.data, found.shape[1])
    _native.open_kernels(isa).repack_q4_k(*arguments)
    nan = np.isnan(expected.reshape(-1, 20)[:, :4].copy().view(np.float16))
    assert np.array_equal(found.reshape(-1, 20)[:, 4:], expected.reshape(-1, 20)[:, 4:])
    halves = [each.reshape(-1, 20)[:, :4].copy().view(np.uint16) for each in (found, expected)]
    assert ((halves[0] == halves[1]) | nan).all()


def test_what_a_store_refuses() -> None:
    backend = native("float32", ISAS[-1])
    destination = backend.destination((10, 64), "linear", METHODS["int8"])
    rows = quantize_rows(METHODS["int8"], np.ones((11, 64), np.float32))
    with pytest.raises(IndexError, match="rows beyond the weight's"):
        destination.write_blocks(0, rows)
    with pytest.raises(IndexError, match="rows of too few blocks"):
        destination.write_blocks(0, quantize_rows(METHODS["int8"], np.ones((10, 32), np.float32)))
    with pytest.raises(ValueError, match="not quantized"):
        backend.destination((11, 64), "linear").write_blocks(0, rows)
    with pytest.raises(ValueError, match="int8, int4 or int4_min"):
        backend._store.linear(10, 64, "int3")
