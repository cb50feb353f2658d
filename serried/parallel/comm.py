"""What ranks say to each other: the Communicator protocol, its counters, and the group of one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from serried.parallel.reduction import ReductionPlan

Array = Any  # numpy.ndarray, or the backend's own tensor; a Communicator says which it takes


@dataclass
class Count:
    """Calls of one operation: how many, how many bytes this rank contributed to them, how long they took."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Counters:
    """Counts by operation. `all_reduces` adds up the two operations that are an all-reduce."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}

    @property
    def by_operation(self) -> Mapping[str, Count]:
        return self._counts

    @contextmanager
    def count(self, operation: str, size: int) -> Iterator[None]:
        """Count one call that contributes `size` bytes, and time it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.enter(operation, 1, size, time.perf_counter() - start)

    def enter(self, operation: str, calls: int, size: int, seconds: float) -> None:
        """Enter calls that were made and timed elsewhere."""
        count = self._counts.setdefault(operation, Count())
        count.calls += calls
        count.bytes += size
        count.seconds += seconds

    @property
    def all_reduces(self) -> int:
        return sum(self.calls(name) for name in ("all_reduce", "reduce_nodes"))

    def calls(self, operation: str) -> int:
        count = self.by_operation.get(operation)
        return count.calls if count else 0

    @property
    def bytes(self) -> int:
        return sum(count.bytes for count in self.by_operation.values())

    @property
    def seconds(self) -> float:
        return sum(count.seconds for count in self.by_operation.values())

    def reset(self) -> None:
        self._counts.clear()


class Communicator(Protocol):
    """A group of ranks, seen from one of them. All ranks of the group must make the same calls in the same order.

    Every call has a deadline and raises RankFailed where a peer dies or does not come. Arrays are contiguous;
    float32, bfloat16, float16, int8, int32 or int64. Results are bitwise the same on every rank.
    """

    rank: int
    size: int
    counters: Counters

    def all_reduce(self, x: Array) -> Array:
        """Elementwise sum over the ranks; the order of addition is the implementation's. May overwrite x."""
        ...

    def reduce_nodes(self, nodes: Array, plan: ReductionPlan) -> Array:
        """Fold the nodes of all ranks in the plan's order: float32 [tokens, own nodes, hidden] -> [tokens, hidden]."""
        ...

    def reduce_scatter(self, x: Array, parts: Sequence[int]) -> Array:
        """Elementwise sum over the ranks, of which rank r keeps parts[r] rows (along the first dimension)."""
        ...

    def all_gather(self, x: Array, parts: Sequence[int], dim: int = 0) -> Array:
        """Concatenate along `dim` what all ranks hold; rank r brings parts[r] of that dimension."""
        ...

    def gather(self, x: Array, parts: Sequence[int], dim: int = 0, root: int = 0) -> Array | None:
        """As all_gather, for one rank alone; None on the others."""
        ...

    def broadcast(self, x: Array, root: int = 0) -> Array:
        """The root's array, of the same shape and dtype on every rank. May overwrite x."""
        ...

    def send(self, x: Array, to: int) -> None:
        """Send an array to one rank, which calls recv."""
        ...

    def recv(self, x: Array, source: int) -> Array:
        """Receive into x, which has the shape and dtype of what the source sends."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A group of some of this group's ranks, in the order given; None on a rank that is not one of them.

        Every rank of this group must call it, with the same ranks.
        """
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class LocalComm:
    """The group of one rank: every operation is its own input. Takes any array. Contributes no bytes."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.counters = Counters()

    def _same(self, operation: str, x: Array) -> Array:
        with self.counters.count(operation, 0):
            return x

    def all_reduce(self, x: Array) -> Array:
        return self._same("all_reduce", x)

    def reduce_nodes(self, nodes: Array, plan: ReductionPlan) -> Array:
        with self.counters.count("reduce_nodes", 0):
            return fold_nodes(nodes, plan)

    def reduce_scatter(self, x: Array, parts: Sequence[int]) -> Array:
        return self._same("reduce_scatter", x)

    def all_gather(self, x: Array, parts: Sequence[int], dim: int = 0) -> Array:
        return self._same("all_gather", x)

    def gather(self, x: Array, parts: Sequence[int], dim: int = 0, root: int = 0) -> Array | None:
        return self._same("gather", x)

    def broadcast(self, x: Array, root: int = 0) -> Array:
        return self._same("broadcast", x)

    def send(self, x: Array, to: int) -> None:
        raise ValueError("a group of one has no peer to send to")

    def recv(self, x: Array, source: int) -> Array:
        raise ValueError("a group of one has no peer to receive from")

    def barrier(self) -> None:
        with self.counters.count("barrier", 0):
            pass

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        return LocalComm() if list(ranks) == [0] else None

    def close(self) -> None:
        pass


def fold_nodes(nodes: Array, plan: ReductionPlan) -> Array:
    """Add up the nodes of all ranks in the plan's order: [tokens, all nodes, hidden] -> [tokens, hidden]."""
    slots = [nodes[:, i] for i in range(sum(plan.counts))]
    return plan.across.run(slots, lambda a, b: a + b)[0]
