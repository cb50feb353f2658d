"""Forwards of one operator each, for either backend: what the tests of operators share.

An operator's float32 input is an embedding's rows, so values are the same to the bit on both sides; `read` makes any
handle the forward's result, in float32, without a rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from serried import _native
from serried.backends.native import NativeBackend
from serried.backends.step import StepInput
from serried.backends.torch import TorchBackend
from serried.kv.cache import CacheShape
from serried.parallel.comm import LocalComm
from serried.parallel.partition import RowPartition, bisect
from serried.parallel.reduction import Adds, ReductionPlan, ReductionTree, Span, plan_reduction
from serried.quant.method import Method
from serried.weights.spec import Parameter, ShardSpec

Floats = npt.NDArray[np.float32]
Forward = Callable[[Any], Any]
Make = Callable[["Ops"], Forward]

ISAS = _native.core.cpu_isas() if _native.available() else ["none"]
DTYPES = ("float32", "bfloat16")
COUNTS = (1, 2, 5, 17, 70)  # tokens of a step
MAX_TOKENS = 80
VOCAB = 90
EPS = 1e-5


class OneOf(LocalComm):
    """Says that it is one of several ranks; the others are not there, so nothing may be reduced."""

    algorithm = "one-shot"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


class Ops:
    """A backend, with random parameters made on it: the same ones (exact in bfloat16) for everyone who asks."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._rng = np.random.default_rng(7)

    def values(self, *shape: int, scale: float = 1.0) -> Floats:
        values = self._rng.normal(scale=scale, size=shape).astype(ml_dtypes.bfloat16)
        return values.astype(np.float32)

    def parameter(self, values: Floats, kind: Any = "linear", method: Method | None = None) -> Parameter:
        parameter = Parameter(ShardSpec.replicated("x", values.shape), kind, method=method)
        destination = self.backend.destination(values.shape, kind, method)
        middle = values.shape[0] // 3
        destination.write(0, values[:middle])
        destination.write(middle, values[middle:])
        parameter.value = destination.finish()
        return parameter

    def linear(self, outputs: int, inputs: int) -> Parameter:
        return self.parameter(self.values(outputs, inputs, scale=inputs**-0.5))

    def vector(self, size: int) -> Parameter:
        return self.parameter(self.values(size), "vector")

    def input(self, columns: int, scale: float = 1.0, factor: float = 1.0) -> Forward:
        """A float32 handle [T, columns]: the embeddings of the step's tokens, times a factor."""
        weight = self.parameter(self.values(VOCAB, columns, scale=scale), "embedding")
        return lambda ops: ops.embed(weight, Span(0, VOCAB), LocalComm(), factor)


def read(ops: Any, x: Any, columns: int) -> Any:
    """Any handle [T, columns] as the result of a forward: float32 [Q, columns], to the bit."""
    if isinstance(ops, TorchBackend):
        return ops.select_rows(x).float().flatten(1)
    dtype = ops._program.dtype(x)
    unpadded = ops._program.columns(x, 0, columns)  # zeros beyond the columns
    unit = np.eye(columns, dtype=np.float32)
    identity = Parameter(ShardSpec.replicated("identity", unit.shape), "linear")
    identity.value = ops._store.linear(columns, columns, dtype)
    ops._store.write(identity.value, 0, columns, unit.ctypes.data, "float32", columns)
    return ops.logits(ops.select_rows(unpadded), identity)


# --- Steps ---


def plain_step(tokens: Sequence[int], rows: Sequence[int] | None = None) -> StepInput:
    """Some tokens of one sequence, of whose rows all (or some) are read."""
    count = len(tokens)
    return StepInput(
        tokens=np.array(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        slots=np.arange(count, dtype=np.int32),
        row_starts=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        block_starts=np.array([0, count], np.int32),
        blocks=np.arange(count, dtype=np.int32),
        logit_rows=np.arange(count, dtype=np.int32) if rows is None else np.array(rows, np.int32),
        picks=np.empty(0, np.int32),
        sampling=np.empty(0, np.int32),
    )


@cache
def tokens_of(count: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(count).integers(0, VOCAB, count))


STEPS = [plain_step(tokens_of(count)) for count in COUNTS]
ALONE = [plain_step([token]) for token in tokens_of(COUNTS[-1])]


# --- Running them ---


def run(backend: Any, make: Make, steps: Sequence[StepInput], shape: CacheShape | None = None) -> list[Floats]:
    backend.allocate_cache(shape or CacheShape(1, MAX_TOKENS, 1, 1, 2, 4))
    if isinstance(backend, NativeBackend):
        spoil_cache(backend)
    program = backend.compile(make(Ops(backend)))
    return [np.array(program.run(step)) for step in steps]


def spoil_cache(backend: NativeBackend) -> None:
    """What a recycled block may hold: NaN (all bits set, in either dtype)."""
    shape = backend._cache_shape
    for addresses in backend._cache:
        for address in addresses:
            ctypes.memset(address, 0xFF, shape.slots * shape.kv_heads * shape.head_dim * shape.itemsize)


def native(dtype: str, isa: str, threads: int = 2, comm: Any = None) -> NativeBackend:
    backend = NativeBackend(dtype, threads, comm or LocalComm(), MAX_TOKENS, isa=isa)
    assert backend.isa == isa
    return backend


def assert_close(found: Sequence[Floats], expected: Sequence[Floats], tolerance: float) -> None:
    """Elementwise, relative to the element and to what is usual in its row."""
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        usual = np.sqrt(np.square(b.astype(np.float64)).mean(-1, keepdims=True))
        worst = (np.abs(a.astype(np.float64) - b) / (np.abs(b) + usual + 1e-30)).max(initial=0)
        assert worst <= tolerance, f"{worst:.3g} is more than {tolerance:.3g}, for {a.shape[0]} rows"


def same_bits(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and bool((a.view(np.int32) == b.view(np.int32)).all())


def zero_padded(b: Any, x: Any, columns: int) -> Any:
    """In the backend's dtype, as norms, gates and attention leave it: what a linear takes."""
    return b.columns(x, Span(0, columns))


# --- Plans of reductions ---


def merged(plan: ReductionPlan) -> ReductionPlan:
    """All ranks' nodes contributed by one: what it takes to test the fold of many nodes in one process."""
    leaves, nodes, pairs, results = [], [], [], []
    slot = column = 0
    for own, within, spans in zip(plan.leaves, plan.within, plan.nodes, strict=True):
        leaves += [leaf.shift(column) for leaf in own]
        nodes += [node.shift(column) for node in spans]
        pairs += [(a + slot, b + slot) for a, b in within.pairs]
        results += [result + slot for result in within.results]
        slot, column = slot + len(own), column + (own[-1].stop if own else 0)
    adds = Adds(tuple(pairs), tuple(results))
    return ReductionPlan((sum(plan.counts),), plan.across, (tuple(leaves),), (adds,), (tuple(nodes),))


# Leaves of 1, 3, 5, 24 and 64: even, with a short last one, of several units, and split unevenly over ranks.
TREES = {
    1: ReductionTree(40, 64),
    3: ReductionTree(70, 32),
    5: ReductionTree(5 * 64, 64),
    24: ReductionTree(24 * 32 - 7, 32),
    64: ReductionTree(37 * 32 * 2 + 5, 32),
}
PLANS = {f"{count} leaves": RowPartition.over(tree, (1,)).plan for count, tree in TREES.items()}
for _count, _weights in ((3, (1, 1)), (5, (1, 1, 1)), (24, (3, 1)), (64, (1, 1, 1)), (64, (5, 1, 1, 2, 7))):
    _tree, _name = TREES[_count], f"{_count} leaves of {len(_weights)} ranks"
    PLANS[_name] = merged(plan_reduction(_tree, bisect(_tree.leaves, _weights)))
PLANS["64 nodes"] = merged(plan_reduction(TREES[64], [Span(i, i + 1) for i in range(64)]))


def inputs_of(plan: ReductionPlan) -> int:
    return plan.leaves[0][-1].stop
