"""Backend: what a forward may do, an operator a method.

The decoder is written once against this protocol. An operator takes and returns *handles*: the torch backend's are
tensors and it runs each operator at once; a recording backend's are symbols, so the decoder never branches on a
value, and never asks a handle for anything. The rows of a handle are the step's tokens [T] or, after `select_rows`,
the rows that want logits [Q]; what the step holds (tokens, positions, cache slots) the backend knows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from serried.backends.step import Int32, StepInput
from serried.backends.survey import Survey
from serried.kv.cache import CacheShape
from serried.parallel.comm import Communicator
from serried.parallel.reduction import ReductionPlan, Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array
from serried.weights.spec import Kind, Parameter

Handle = Any
Logits = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention on one rank.

    layer: its index among this rank's layers, and so in the cache. kv_map: for each local query head, the local KV
    head that it reads. rotary_dim: the first so many columns of a head are rotated. scale: what q . k is multiplied
    with. window: the positions that a token sees, its own included (0: all before it). softcap: scaled scores x become
    softcap * tanh(x / softcap) (0: they stay).
    """

    layer: int
    query_heads: int
    kv_heads: int
    kv_map: tuple[int, ...]
    head_dim: int
    rotary_dim: int
    scale: float
    norm_eps: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of every position up to the longest sequence: float32 [positions, rotary_dim / 2], as handles."""

    cos: Handle
    sin: Handle


@dataclass(frozen=True)
class Partial:
    """The unreduced output of a row-parallel linear: this rank's nodes, and what it takes to make them a result.

    nodes: float32 [T, own nodes, outputs]. bias: added once, after the fold.
    """

    nodes: Handle
    outputs: int
    plan: ReductionPlan
    comm: Communicator
    bias: Parameter | None


class Destination(Protocol):
    """Memory for one parameter, filled by the loader piece by piece."""

    def write(self, row: int, values: Array) -> None:
        """Store [rows] or [rows, columns] from `row` on, rounded to the backend's dtype or quantized."""
        ...

    def write_blocks(self, row: int, rows: QuantizedRows) -> None:
        """Store rows that are in the parameter's method already."""
        ...

    def finish(self) -> Handle:
        """The handle, once everything is written."""
        ...


class Program(Protocol):
    """A forward, ready to run again and again."""

    def run(self, step: StepInput) -> npt.NDArray[np.float32]:
        """Run one step: this rank's part of the logits, float32 [Q, own vocabulary]."""
        ...

    def choose(self, step: StepInput, first: int, comm: Communicator) -> list[int] | None:
        """Run a step and choose the token of each of its rows by its picks, on rank 0; None on the others.

        first: the id of the first token whose logits are this rank's. NO_TOKEN where none may be chosen.
        """
        ...

    def pick(
        self, logits: Logits, first: int, temperatures: Float64, seeds: UInt64, positions: Int32
    ) -> tuple[Int64, Float64]:
        """For each row the place of the largest logit / temperature + Gumbel noise (0: of the largest logit), and it.

        logits: what `run` gave (or some of its rows), of the token ids from `first` on. Noise: see philox.py. Ties go
        to the lowest place.
        """
        ...

    def survey(
        self,
        logits: Logits,
        rows: Sequence[int],
        counts: Sequence[int],
        divisors: Sequence[float],
        sums: Sequence[bool],
    ) -> list[Survey]:
        """Of some rows of the logits: see Survey. counts: how many places each wants at most. sums: whether leaves."""
        ...

    def noise(self, seed: int, position: int, ids: Int64) -> Float64:
        """The Gumbel noise of some tokens: see philox.py."""
        ...


class Backend(Protocol):
    """The operators, and the few calls around them. T tokens, Q rows that want logits."""

    name: str
    dtype: str
    isa: str  # the instruction set of its kernels: results are exact within one

    def destination(self, shape: tuple[int, ...], kind: Kind, method: Method | None = None) -> Destination:
        """Room for a parameter of this rank: a `vector` in float32, others in the method, or the backend's dtype."""
        ...

    def constant(self, values: npt.NDArray[np.float32]) -> Handle:
        """A float32 table that no checkpoint holds."""
        ...

    def allocate_cache(self, shape: CacheShape) -> None:
        """Make the KV cache that `attention` writes and reads; its contents are undefined until written."""
        ...

    def compile(self, forward: Callable[[Backend], Handle]) -> Program:
        """Make a program of a forward."""
        ...

    def embed(self, weight: Parameter, rows: Span, comm: Communicator, scale: float = 1.0) -> Handle:
        """Embeddings of the step's tokens times `scale`, each from the rank that owns its row: float32 [T, hidden]."""
        ...

    def norm(self, x: Handle, weight: Parameter, eps: float) -> Handle:
        """RMSNorm of the float32 residual stream: [T, hidden] in the backend's dtype."""
        ...

    def reduce(self, partial: Partial) -> Handle:
        """Fold a row-parallel linear's nodes over the ranks, add the bias: float32 [T, outputs]."""
        ...

    def reduce_add_norm(
        self, partial: Partial, residual: Handle, weight: Parameter, eps: float, inner: Parameter | None = None
    ) -> tuple[Handle, Handle]:
        """reduce, add to the residual, RMSNorm: (normalized [T, hidden] in the backend's dtype, new residual).

        inner: the weight of another RMSNorm, of what has been reduced, before it is added.
        """
        ...

    def linear(self, x: Handle, weight: Parameter, bias: Parameter | None) -> Handle:
        """x @ weight.T + bias: [T, inputs] -> [T, own outputs]."""
        ...

    def linear_nodes(self, x: Handle, weight: Parameter, plan: ReductionPlan, rank: int) -> Handle:
        """x @ weight.T, not summed beyond this rank's nodes: [T, own inputs] -> float32 [T, own nodes, outputs]."""
        ...

    def activation(self, x: Handle, name: str) -> Handle:
        """An activation, elementwise."""
        ...

    def gated_activation(self, gate_up: Handle, name: str) -> Handle:
        """activation(gate) * up, of [T, gate | up]."""
        ...

    def attention(
        self,
        qkv: Handle,
        spec: AttentionSpec,
        rope: RopeTable,
        q_norm: Parameter | None,
        k_norm: Parameter | None,
    ) -> Handle:
        """Causal attention over the paged cache: [T, q | k | v heads] -> [T, query heads * head_dim].

        q and k are normalized head by head (where there are norms), rotated and rounded; k and v are written to the
        step's cache slots; then everything (in the window, where there is one) is read from the cache.
        """
        ...

    def columns(self, x: Handle, span: Span) -> Handle:
        """A range of columns."""
        ...

    def all_gather_columns(self, x: Handle, comm: Communicator, parts: Sequence[int]) -> Handle:
        """The columns of all ranks side by side."""
        ...

    def select_rows(self, x: Handle) -> Handle:
        """The rows that want logits: [T, ...] -> [Q, ...]."""
        ...

    def logits(self, x: Handle, weight: Parameter, softcap: float = 0.0) -> Handle:
        """y = x @ weight.T: [Q, hidden] -> float32 [Q, own vocabulary].

        softcap: y becomes softcap * tanh(y / softcap) (0: it stays).
        """
        ...
