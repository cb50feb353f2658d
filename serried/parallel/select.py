"""Which algorithm an all-reduce takes: a pure function of operation, bytes and ranks over a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from serried.errors import InputError

Algorithm = Literal["one-shot", "two-shot", "ring"]
Operation = Literal["all_reduce", "reduce_nodes", "reduce_add_norm"]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
CHOICES: tuple[str, ...] = ("auto", *ALGORITHMS)  # of --allreduce-algorithm


class Sample(NamedTuple):
    """What was measured: `nbytes` that a rank contributes, an algorithm, and how long a call took."""

    nbytes: int
    algorithm: Algorithm
    seconds: float


@dataclass(frozen=True)
class Switch:
    """From how many bytes on two-shot is the faster one for an operation, in worlds of at least `ranks` ranks."""

    operation: Operation
    ranks: int
    two_shot_from: int


@dataclass(frozen=True)
class AlgorithmTable:
    """Where to switch from one-shot to two-shot. measured: on this machine, not the default."""

    switches: tuple[Switch, ...]
    measured: bool = False

    def two_shot_from(self, operation: Operation, ranks: int) -> int | None:
        """The bytes from which two-shot is the faster one, as the nearest smaller world knows; None: never."""
        known = [s for s in self.switches if s.operation == operation and s.ranks <= ranks]
        return max(known, key=lambda s: s.ranks).two_shot_from if known else None


# One-shot reads what all ranks brought, on every rank: N times the bytes, and one synchronisation. Two-shot reads them
# once, and the folded shares once more, for a second synchronisation of about a microsecond. Between two ranks both
# move the same bytes. Where a residual and a norm follow (reduce_add_norm), the second shot takes what the norm gives,
# in the dtype of the next linear: half the bytes or less, and no rank adds and normalizes what another one does.
DEFAULT_TABLE = AlgorithmTable(
    (
        Switch("all_reduce", 3, 64 << 10),
        Switch("all_reduce", 5, 32 << 10),
        Switch("all_reduce", 9, 16 << 10),
        Switch("reduce_nodes", 3, 128 << 10),
        Switch("reduce_nodes", 5, 64 << 10),
        Switch("reduce_nodes", 9, 32 << 10),
        Switch("reduce_add_norm", 2, 128 << 10),
    )
)


def choose(
    operation: Operation, nbytes: int, ranks: int, table: AlgorithmTable = DEFAULT_TABLE, algorithm: str = "auto"
) -> Algorithm:
    """The algorithm to use; all ranks must ask with the same numbers (nbytes: what the largest rank contributes).

    algorithm: what the user asks for; "auto" leaves it to the table, which never says "ring". Raises InputError for
    a name that is none, and for a ring of anything but plain sums: it adds in an order that depends on the split.
    """
    if algorithm not in CHOICES:
        raise InputError(f"--allreduce-algorithm {algorithm}: choose one of {', '.join(CHOICES)}")
    if operation != "all_reduce" and algorithm == "ring":
        raise InputError("--allreduce-algorithm ring: it adds in an order of its own, so it is for bench only")
    for name in ALGORITHMS:
        if name == algorithm:
            return name
    threshold = table.two_shot_from(operation, ranks)
    return "two-shot" if threshold is not None and nbytes >= threshold else "one-shot"


def measured_table(samples: Mapping[tuple[Operation, int], Sequence[Sample]]) -> AlgorithmTable:
    """The table that measurements give: two-shot from where on it wins at every larger size.

    samples: by operation and ranks; of each size at least one sample of both algorithms (the fastest counts).
    """
    switches = []
    for (operation, ranks), taken in samples.items():
        fastest: dict[tuple[int, Algorithm], float] = {}
        for nbytes, name, seconds in taken:
            fastest[nbytes, name] = min(seconds, fastest.get((nbytes, name), seconds))
        never = 1 << 62  # a world of more ranks must not inherit the switch of a smaller one
        threshold = never
        for nbytes in sorted({nbytes for nbytes, _ in fastest}, reverse=True):
            if fastest[nbytes, "two-shot"] >= fastest[nbytes, "one-shot"]:
                break
            threshold = nbytes
        switches.append(Switch(operation, ranks, threshold))
    return AlgorithmTable(tuple(switches), measured=True)
