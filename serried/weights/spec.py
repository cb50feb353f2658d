"""Where a parameter's values come from: stated once, on the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serried.parallel.reduction import Span
from serried.quant.method import Method

Kind = Literal["vector", "linear", "head", "embedding"]
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Piece:
    """One slice of one checkpoint tensor: `rows` of its first dimension, `columns` of its second (None: all).

    `shape` is the whole tensor's, which the checkpoint must have.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: Span
    columns: Span | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        if len(self.shape) == 1:
            return (self.rows.size,)
        return (self.rows.size, self.columns.size if self.columns else self.shape[1])

    @property
    def elements(self) -> int:
        rows, *rest = self.local_shape
        return rows * (rest[0] if rest else 1)


@dataclass(frozen=True)
class ShardSpec:
    """The slices that make up a rank's shard of a parameter, stacked along the first dimension."""

    pieces: tuple[Piece, ...]

    @classmethod
    def replicated(cls, tensor: str, shape: tuple[int, ...]) -> ShardSpec:
        """The whole tensor on every rank."""
        return cls((Piece(tensor, shape, Span(0, shape[0])),))

    @classmethod
    def rows(cls, tensor: str, shape: tuple[int, ...], rows: Span) -> ShardSpec:
        """A range of the first dimension: the outputs of a column-parallel linear, the ids of a vocabulary."""
        return cls((Piece(tensor, shape, rows),))

    @classmethod
    def columns(cls, tensor: str, shape: tuple[int, ...], columns: Span) -> ShardSpec:
        """A range of the second dimension: the inputs of a row-parallel linear."""
        return cls((Piece(tensor, shape, Span(0, shape[0]), columns),))

    @classmethod
    def stacked(cls, specs: Sequence[ShardSpec]) -> ShardSpec:
        """Several shards one below the other: a fused QKV or gate/up projection."""
        return cls(tuple(piece for spec in specs for piece in spec.pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shard's shape."""
        first = self.pieces[0].local_shape
        return (sum(piece.local_shape[0] for piece in self.pieces), *first[1:])


@dataclass
class Parameter:
    """A rank's shard of a weight. `value` is the backend's handle and `method` what it is kept in, set by the loader.

    kind: what the backend will do with it: `vector` (float32: norms, biases), `linear` (the right side of a
    product, [outputs, inputs]), `head` (the same, over the vocabulary), `embedding` (rows are looked up; a tied one
    also serves as the LM head's weight). method: None where it is plain. offset: what is added, in float32, to the
    values of a `vector` (a norm whose checkpoint holds weight - 1).
    """

    spec: ShardSpec
    kind: Kind
    offset: float = 0.0
    value: Any = field(default=None, repr=False)
    method: Method | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.spec.pieces)

    def nominal_bytes(self, dtype: str) -> float:
        """Bytes that this shard's numbers take in the format that it was loaded in, without any padding.

        dtype: the engine's, of what is not quantized.
        """
        if self.kind == "vector":
            return 4.0 * self.elements
        return self.elements * (self.method.bits / 8 if self.method else ITEMSIZE[dtype])
