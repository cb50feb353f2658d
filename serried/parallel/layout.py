"""Which ranks work together: one grid of ranks, from which every group is cut.

The grid is external_dp x dp x pp x pcp x tp, numbered row by row (tp innermost: a TP group is a run of
neighbours). Ranks that differ only along some of the axes form a group. external_dp counts replicas that know
nothing of each other; it is what the world leaves over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

from serried.errors import InputError

Kind = Literal["tp", "pp", "dp", "ep", "external_dp", "pcp", "dcp"]
KINDS: tuple[Kind, ...] = get_args(Kind)

OPTIONS = {
    "world_size": "--world-size",
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "pcp": "--prefill-context-parallel-size",
    "dcp": "--decode-context-parallel-size",
}


class Coordinates(NamedTuple):
    """Where a rank stands in the grid, an index an axis; the fields are the grid's axes, outermost first."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int


AXES = Coordinates._fields


@dataclass(frozen=True)
class RankLayout:
    """A world of ranks and the sizes of its axes.

    dcp is no axis of its own: it splits each TP group into runs of dcp ranks.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    pcp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            if getattr(self, name) < 1:
                raise InputError(f"{option} {getattr(self, name)}: must be at least 1")
        left, why = self.world_size, f"the world size {self.world_size}"
        for name in ("tp", "pp", "dp", "pcp"):
            size = getattr(self, name)
            _must_divide(name, size, left, why)
            left //= size
            why += f" / {name} {size}" if size > 1 else ""
        _must_divide("dcp", self.dcp, self.tp, f"the tensor-parallel size {self.tp}")

    @property
    def external_dp(self) -> int:
        return self.world_size // (self.dp * self.pp * self.pcp * self.tp)

    @property
    def shape(self) -> Coordinates:
        """The sizes of the grid's axes."""
        return Coordinates(self.external_dp, self.dp, self.pp, self.pcp, self.tp)

    def groups(self, kind: Kind) -> list[list[int]]:
        """All groups of a kind, ordered as vLLM orders them; every rank is in exactly one.

        An EP group is the DP x PCP x TP grid of one pipeline stage of one external replica.
        """
        if kind == "dcp":
            return _cut((self.world_size // self.dcp, self.dcp), [1])
        varying = ("dp", "pcp", "tp") if kind == "ep" else (kind,)
        return _cut(self.shape, [AXES.index(axis) for axis in varying])

    def group_of(self, kind: Kind, rank: int) -> list[int]:
        """The group of a kind that a rank is in."""
        self._check(rank)
        return next(group for group in self.groups(kind) if rank in group)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands in the grid."""
        self._check(rank)
        indices = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            indices.append(index)
        return Coordinates(*reversed(indices))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank {rank}: the ranks of this world are 0 to {self.world_size - 1}")


def _must_divide(name: str, size: int, whole: int, what: str) -> None:
    if whole % size:
        small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
        legal = ", ".join(str(n) for n in sorted({*small, *(whole // n for n in small)}))
        raise InputError(f"{OPTIONS[name]} {size}: does not divide {what}; legal values are {legal}")


def _cut(shape: Sequence[int], varying: Sequence[int]) -> list[list[int]]:
    """Cut a grid into groups of the ranks that differ only along the axes `varying`.

    vLLM's order of the groups: the varying axes take the last places, and each that comes from elsewhere
    changes places with the fixed axis that stood there (its `transpose`); then the grid is read row by row.
    """
    order = list(range(len(shape)))
    places = order[len(shape) - len(varying) :]
    coming = [axis for axis in varying if axis not in places]
    going = [axis for axis in places if axis not in varying]
    for a, b in zip(coming, going, strict=True):
        order[a], order[b] = b, a

    def numbers(axes: Sequence[int]) -> list[int]:
        strides = [math.prod(shape[axis + 1 :]) for axis in axes]
        indices = product(*(range(shape[axis]) for axis in axes))
        return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]

    offsets = numbers(order[-len(varying) :])
    return [[first + offset for offset in offsets] for first in numbers(order[: -len(varying)])]
