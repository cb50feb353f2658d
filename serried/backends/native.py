"""The native backend: records the decoder's operators once, at load, then replays them in C++ for every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serried._native import core, open_kernels
from serried.backends.base import (
    AttentionSpec,
    Backend,
    Float64,
    Int64,
    Logits,
    Partial,
    RopeTable,
    UInt64,
)
from serried.backends.step import Int32, StepInput
from serried.backends.survey import LEAF, NOTHING, Survey
from serried.errors import RankFailed
from serried.kv.cache import CacheShape
from serried.parallel.comm import Communicator
from serried.parallel.reduction import ReductionPlan, Span
from serried.parallel.select import Operation
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array
from serried.weights.spec import Kind, Parameter

NEVER = 1 << 62  # bytes
TILE = 64  # outputs of a weight tile
PAD = 32  # a leaf's columns begin at a multiple of this


class _TiledDestination:
    """A weight in the kernels' tiles, repacked chunk by chunk as it is read, and quantized where its format says so.

    format: a dtype or the name of a method.
    """

    def __init__(self, store: Any, shape: tuple[int, ...], format: str) -> None:
        self._store = store
        self._weight = store.linear(*shape, format)

    def write(self, row: int, values: Array) -> None:
        if values.dtype == np.float16:
            values = values.astype(np.float32)
        values = np.ascontiguousarray(values)
        rows, columns = values.shape
        self._store.write(self._weight, row, rows, values.ctypes.data, values.dtype.name, columns)

    def write_blocks(self, row: int, rows: QuantizedRows) -> None:
        blocks = np.ascontiguousarray(rows.blocks)
        self._store.write_blocks(self._weight, row, blocks.shape[0], blocks.ctypes.data, blocks.shape[1])

    def finish(self) -> Any:
        return self._weight


class _VectorDestination:
    """A float32 vector."""

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self._weight = store.vector(size)

    def write(self, row: int, values: Array) -> None:
        self._store.write_vector(self._weight, row, np.ascontiguousarray(values, np.float32))

    def write_blocks(self, row: int, rows: QuantizedRows) -> None:
        self.write(row, rows.values().reshape(-1))

    def finish(self) -> Any:
        return self._weight


class NativeBackend:
    """Operators in C++. Handles are numbers of buffers; weights are the kernels' own.

    What a norm, an activation or a range of columns writes takes the dtype that its first consumer wants: int8 for
    a quantized weight.

    comm: the group that the ranks meet in (ShmComm, or LocalComm). max_tokens: the budget of a step. cpus: cores that
    the rank's threads are bound to (empty: none is).
    """

    name = "native"

    def __init__(
        self,
        dtype: str,
        threads: int,
        comm: Communicator,
        max_tokens: int,
        cpus: Sequence[int] = (),
        isa: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.comm = comm
        self.kernels = open_kernels(isa)
        self.isa: str = self.kernels.isa
        self._store = core.Store(self.kernels)
        self.pool = core.Pool(threads, list(cpus), self.kernels)
        self._max_tokens = max_tokens
        self._program: Any = None
        self._own_vocab = 0
        self._reductions: Counter[str] = Counter()

    # Around the operators

    def destination(
        self, shape: tuple[int, ...], kind: Kind, method: Method | None = None
    ) -> _TiledDestination | _VectorDestination:
        if kind == "vector":
            return _VectorDestination(self._store, shape[0])
        return _TiledDestination(self._store, shape, method.name if method else self.dtype)

    def constant(self, values: npt.NDArray[np.float32]) -> Any:
        weight = self._store.vector(values.size)
        self._store.write_vector(weight, 0, np.ascontiguousarray(values).reshape(-1))
        return weight

    def allocate_cache(self, shape: CacheShape) -> None:
        self._cache_shape = shape
        size = shape.slots * shape.kv_heads * shape.head_dim * shape.itemsize
        self._cache = [(self._store.allocate(size), self._store.allocate(size)) for _ in range(shape.layers)]

    def compile(self, forward: Callable[[Backend], Any]) -> NativeProgram:
        native = getattr(self.comm, "native", None)
        budget = self._max_tokens
        self._program = core.Program(self.kernels, self.pool, native, budget, budget, *self._shots(), self.dtype)
        forward(self)
        self._program.finish()
        counted = dict(self._reductions) if native is None else {}  # a ShmComm knows what its C++ has done
        return NativeProgram(self._program, self.kernels, self.comm, self._own_vocab, counted)

    # The operators

    def embed(self, weight: Parameter, rows: Span, comm: Communicator, scale: float = 1.0) -> int:
        edges = self._edges(rows, comm)
        self._reductions["all_reduce"] += 1
        return int(self._program.embed(weight.value, edges, scale))

    def norm(self, x: int, weight: Parameter, eps: float) -> int:
        return int(self._program.norm(x, weight.value, eps))

    def reduce(self, partial: Partial) -> int:
        self._reductions["reduce_nodes"] += 1
        columns = partial.outputs
        bias = partial.bias.value if partial.bias else None
        return int(self._program.reduce(partial.nodes, self._plan(partial.plan), bias, columns))

    def reduce_add_norm(
        self, partial: Partial, residual: int, weight: Parameter, eps: float, inner: Parameter | None = None
    ) -> tuple[int, int]:
        if inner is not None:
            y = self.reduce(partial)
            return int(self._program.norm_add_norm(y, inner.value, residual, weight.value, eps)), residual
        self._reductions["reduce_nodes"] += 1
        bias = partial.bias.value if partial.bias else None
        plan = self._plan(partial.plan)
        h = self._program.reduce_add_norm(partial.nodes, plan, bias, residual, weight.value, eps)
        return int(h), residual

    def linear(self, x: int, weight: Parameter, bias: Parameter | None) -> int:
        return int(self._program.linear(x, weight.value, bias.value if bias else None))

    def linear_nodes(self, x: int, weight: Parameter, plan: ReductionPlan, rank: int) -> int:
        return int(self._program.linear_nodes(x, weight.value, self._plan(plan)))

    def activation(self, x: int, name: str) -> int:
        return int(self._program.activation(x, name))

    def gated_activation(self, gate_up: int, name: str) -> int:
        return int(self._program.gated(gate_up, name))

    def attention(
        self, qkv: int, spec: AttentionSpec, rope: RopeTable, q_norm: Parameter | None, k_norm: Parameter | None
    ) -> int:
        k_cache, v_cache = self._cache[spec.layer]
        attention = core.Attention(
            spec.query_heads,
            spec.kv_heads,
            spec.head_dim,
            spec.rotary_dim,
            spec.scale,
            spec.softcap,
            spec.window,
            self.dtype,
            q_norm.value if q_norm else None,
            k_norm.value if k_norm else None,
            spec.norm_eps,
            rope.cos,
            rope.sin,
            k_cache,
            v_cache,
            self._cache_shape.block_size,
        )
        return int(self._program.attention(qkv, attention, list(spec.kv_map)))

    def columns(self, x: int, span: Span) -> int:
        return int(self._program.columns(x, span.start, span.stop))

    def all_gather_columns(self, x: int, comm: Communicator, parts: Sequence[int]) -> int:
        return int(self._program.gather_columns(x, list(parts)))

    def select_rows(self, x: int) -> int:
        return int(self._program.select_rows(x))

    def logits(self, x: int, weight: Parameter, softcap: float = 0.0) -> None:
        self._program.logits(x, weight.value, softcap)
        self._own_vocab = weight.shape[0]

    def _shots(self) -> tuple[int, int]:
        """The bytes from which a reduction goes in two shots, alone and where a residual and a norm follow."""
        return self._two_shot_from("reduce_nodes"), self._two_shot_from("reduce_add_norm")

    def _two_shot_from(self, operation: Operation) -> int:
        """By the group's table, unless the user has decided."""
        comm: Any = self.comm
        if comm.size == 1 or comm.algorithm == "one-shot":
            return NEVER
        if comm.algorithm == "two-shot":
            return 0
        threshold = comm.table.two_shot_from(operation, comm.size)
        return NEVER if threshold is None else int(threshold)

    def _plan(self, plan: ReductionPlan) -> Any:
        rank = self.comm.rank
        (result,) = plan.across.results
        return core.Plan(list(plan.counts), [list(pair) for pair in plan.across.pairs], result, leaf_table(plan, rank))

    def _edges(self, rows: Span, comm: Communicator) -> list[int]:
        starts = comm.all_gather(np.array([rows.start, rows.stop], np.int32), [2] * comm.size)
        return [*(int(i) for i in starts[::2]), int(starts[-1])]


class NativeProgram:
    """A recorded forward. reductions: the all-reduces of a step by operation, where the group does not count them."""

    def __init__(
        self, program: Any, kernels: Any, comm: Communicator, own_vocab: int, reductions: Mapping[str, int]
    ) -> None:
        self.native = program
        self._kernels = kernels
        self._comm = comm
        self._own_vocab = own_vocab
        self._reductions = reductions
        self._logits = self._room(0)  # of `choose`: used again by the next step

    def run(self, step: StepInput) -> npt.NDArray[np.float32]:
        # Rows of whole tiles, made new: who gets them may keep them.
        logits = self._room(step.logit_rows.size)
        self._run(self.native.run, step, logits)
        return logits[:, : self._own_vocab]

    def choose(self, step: StepInput, first: int, comm: Communicator) -> list[int] | None:
        rows = step.logit_rows.size
        if len(self._logits) < rows:
            self._logits = self._room(rows)
        tokens = np.empty(rows, np.int64)
        self._run(self.native.choose, step, self._logits, self._own_vocab, first, tokens)
        return tokens.tolist() if comm.rank == 0 else None

    def _room(self, rows: int) -> npt.NDArray[np.float32]:
        return np.empty((rows, -(-self._own_vocab // TILE) * TILE), np.float32)

    def _run(self, call: Callable[..., None], step: StepInput, *arguments: Any) -> None:
        try:
            call(step.flat, *arguments)
        except core.CommError as error:
            raise RankFailed(*error.args) from None
        for name, calls in self._reductions.items():
            self._comm.counters.enter(name, calls, 0, 0.0)

    def pick(
        self, logits: Logits, first: int, temperatures: Float64, seeds: UInt64, positions: Int32
    ) -> tuple[Int64, Float64]:
        rows, own = logits.shape
        places, scores = np.empty(rows, np.int64), np.empty(rows, np.float64)
        if rows == 0 or own == 0:
            return places, scores
        self.native.pick(_whole(logits), own, first, temperatures, seeds, positions, places, scores)
        return places, scores

    def survey(
        self,
        logits: Logits,
        rows: Sequence[int],
        counts: Sequence[int],
        divisors: Sequence[float],
        sums: Sequence[bool],
    ) -> list[Survey]:
        if not rows:
            return []
        own, size = logits.shape[1], len(rows)
        numbers = np.array([[0, min(count, own)] for count in counts], np.int64)  # possible, wanted and then found
        places = np.empty((size, int(numbers[:, 1].max())), np.int64)
        leaf_max, leaf_sum = np.empty((2, size, -(-own // LEAF)), np.float64)
        self.native.survey(
            _whole(logits),
            own,
            np.array(rows, np.int32),
            np.array(divisors, np.float64),
            np.array(sums, np.int32),
            numbers,
            places,
            leaf_max,
            leaf_sum,
        )
        return [
            Survey(possible, places[i, :found], *((leaf_max[i], leaf_sum[i]) if sums[i] else (NOTHING, NOTHING)))
            for i, (possible, found) in enumerate(numbers.tolist())
        ]

    def noise(self, seed: int, position: int, ids: Int64) -> Float64:
        values = np.empty(ids.size, np.float64)
        self._kernels.gumbel_noise(seed, position, np.ascontiguousarray(ids), values)
        return values


def _whole(logits: Logits) -> Logits:
    """The rows of whole tiles whose front `run` gave; anything else is laid out anew."""
    base = logits.base
    if isinstance(base, np.ndarray) and base.ndim == 2 and base.shape[0] == logits.shape[0]:
        return base
    return np.ascontiguousarray(logits)


def leaf_table(plan: ReductionPlan, rank: int) -> list[list[int]]:
    """A rank's leaves as the kernels walk them: [start, stop, additions after it, whether it ends a node].

    The pairs of `within` are in post-order, so each belongs to the last leaf of its right operand: a walk that
    pushes each leaf's sum and then adds the two topmost entries so many times makes the same additions.
    """
    leaves, adds = plan.leaves[rank], plan.within[rank]
    last = list(range(len(leaves)))  # the last leaf that each slot covers
    pops = [0] * len(leaves)
    for to, source in adds.pairs:
        last[to] = last[source]
        pops[last[source]] += 1
    ends = {last[slot] for slot in adds.results}
    return [[start, -(-stop // PAD) * PAD, pops[i], int(i in ends)] for i, (start, stop) in enumerate(leaves)]
