"""Communicator over shared memory: ranks on one machine, CPU arrays, no PyTorch needed.

The operations themselves are C++ (csrc/comm); here arrays become addresses and counts.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from serried.errors import RankFailed
from serried.parallel.comm import Array, Communicator, Count, Counters, LocalComm
from serried.parallel.reduction import ReductionPlan
from serried.parallel.select import ALGORITHMS, DEFAULT_TABLE, AlgorithmTable, Operation, choose

SLOT_BYTES = 1 << 20
LOOK_AROUND = 0.2  # seconds between two looks at the liveness of those who have not joined yet
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int32": 4, "int64": 5}


class Timing(NamedTuple):
    """What the calls of one operation cost: until the last rank had come, and in all."""

    calls: int
    bytes: int
    wait_s: float
    total_s: float


class _NativeCounters(Counters):
    """Counters that are kept in C++, by the operations themselves; `read` and `clear` reach them."""

    def __init__(self, read: Callable[[], Mapping[str, Timing]], clear: Callable[[], None]) -> None:
        super().__init__()
        self._read, self._clear = read, clear

    @property
    def by_operation(self) -> Mapping[str, Count]:
        return {name: Count(t.calls, t.bytes, t.total_s) for name, t in self._read().items()}

    def reset(self) -> None:
        self._clear()


class _FlatPlan:
    """A ReductionPlan as C++ reads it: `arguments` are the addresses and counts of what is kept here."""

    def __init__(self, plan: ReductionPlan) -> None:
        self.plan = plan  # kept alive, so that its id stays its own
        self.counts = np.array(plan.counts, np.int32)
        self.pairs = np.array(plan.across.pairs, np.int32).reshape(-1, 2)
        slots, (result,) = sum(plan.counts), plan.across.results
        self.arguments = _address(self.counts), _address(self.pairs), len(self.pairs), slots, result


class StepRing:
    """A ring from rank 0 to all others of a group, beside its collectives; see csrc/comm/step_ring.hpp."""

    def __init__(self, native: Any, error: type[Exception]) -> None:
        self._native, self._error = native, error

    def close(self) -> None:
        """Let go of the memory. No other call may follow."""
        self._native = None

    def write(self, frame: Array, timeout: float) -> None:
        """Rank 0: hand int32 words to everybody. RankFailed names who has died, or has read nothing for `timeout` s."""
        try:
            self._native.write(frame, timeout)
        except self._error as error:
            raise RankFailed(*error.args) from None

    def read(self) -> bytes:
        """The others: the next frame, however long it takes. RankFailed where a rank has failed or died."""
        with _named_ranks(self._error):
            frame: bytes = self._native.read()
        return frame


class ShmComm:
    """A group of ranks in the memfd `fd` that all of them share (RankProcesses.store_fd, fd_share.share_memfd).

    Takes numpy arrays or CPU torch tensors and gives back the same kind. `timeout`: seconds without any progress of
    a missing rank after which an operation fails; math.inf: none. `algorithm`: of all-reduces, "auto" for what
    `table` says. `watch` (RankProcesses.check) is called now and then while the others are awaited, for `joining`
    seconds at most (None: `timeout`). The memfd must be new: it serves one world, once. Raises RankFailed where
    a rank does not join, ImportError without the extension.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        timeout: float = 60.0,
        algorithm: str = "auto",
        table: AlgorithmTable = DEFAULT_TABLE,
        slot_bytes: int = SLOT_BYTES,
        watch: Callable[[], None] = lambda: None,
        joining: float | None = None,
    ) -> None:
        core = importlib.import_module("serried._native._core")
        choose("all_reduce", 0, size, table, algorithm)  # a wrong name is said at once
        with _named_ranks(core.CommError):
            native = core.ShmComm(fd, rank, size, slot_bytes, timeout)
        self._setup(native, core.CommError, range(size), algorithm, table)
        self._join(timeout if joining is None else joining, watch)

    def _setup(
        self, native: Any, error: type[Exception], names: Sequence[int], algorithm: str, table: AlgorithmTable
    ) -> None:
        """native: the C++ object; error: what it throws; names: the members' ranks in the world."""
        self.native = native
        self.rank: int = native.rank
        self.size: int = native.size
        self.counters: Counters = _NativeCounters(self.timings, self.reset_timings)
        self._last: dict[str, Timing] = {}  # timings, once this rank has left the group
        self.names, self.algorithm, self.table = tuple(names), algorithm, table
        self._error = error
        self._plans: dict[int, _FlatPlan] = {}

    def _join(self, timeout: float, watch: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout
        while True:
            with _named_ranks(self._error):
                absent = self.native.absent(min(LOOK_AROUND, max(0.0, deadline - time.monotonic())))
            if not absent:
                return
            watch()
            if time.monotonic() > deadline:
                who = f"no sign of {_ranks(absent)} within {timeout:g} s"
                raise RankFailed(absent[0], f"joining the group of {_ranks(self.names)}: {who}")

    @property
    def timeout(self) -> float:
        """Seconds without progress after which an operation fails; may be set at any time."""
        seconds: float = self.native.timeout
        return seconds if seconds < 1e9 else math.inf

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.native.timeout = seconds

    def all_reduce(self, x: Array) -> Array:
        x = _contiguous(x, writable=True)
        algorithm = self._algorithm("all_reduce", x.nbytes)
        self._run("all_reduce", _address(x), math.prod(x.shape), _element(x), algorithm)
        return x

    def reduce_nodes(self, nodes: Array, plan: ReductionPlan) -> Array:
        nodes = _contiguous(nodes)
        tokens, own, columns = nodes.shape
        flat = self._plan(plan)
        if _dtype(nodes) != "float32" or own != plan.counts[self.rank] or len(plan.counts) != self.size:
            what = f"{_dtype(nodes)} {list(nodes.shape)}"
            raise ValueError(f"rank {self.rank} brings float32 [tokens, {plan.counts[self.rank]}, hidden], not {what}")
        out = _empty(nodes, (tokens, columns))
        algorithm = self._algorithm("reduce_nodes", 4 * tokens * columns * max(plan.counts))
        where = tokens, columns, _address(out), algorithm
        self._run("reduce_nodes", _address(nodes), *flat.arguments, *where)
        return out

    def reduce_scatter(self, x: Array, parts: Sequence[int]) -> Array:
        x = _contiguous(x)
        if x.shape[0] != sum(parts) or len(parts) != self.size:
            raise ValueError(f"reduce_scatter of {x.shape[0]} rows into parts {list(parts)}")
        row = math.prod(x.shape[1:])
        out = _empty(x, (parts[self.rank], *x.shape[1:]))
        counts = [part * row for part in parts]
        self._run("reduce_scatter", _address(x), counts, _element(x), _address(out))
        return out

    def all_gather(self, x: Array, parts: Sequence[int], dim: int = 0) -> Array:
        x = _contiguous(x)
        rows, widths, shape = self._parts(x, parts, dim)
        out = _empty(x, shape)
        self._run("all_gather", _address(x), rows, widths, _address(out))
        return out

    def gather(self, x: Array, parts: Sequence[int], dim: int = 0, root: int = 0) -> Array | None:
        x = _contiguous(x)
        rows, widths, shape = self._parts(x, parts, dim)
        out = _empty(x, shape) if self.rank == self._member(root) else None
        self._run("gather", _address(x), rows, widths, root, 0 if out is None else _address(out))
        return out

    def broadcast(self, x: Array, root: int = 0) -> Array:
        mine = self.rank == self._member(root)
        x = _contiguous(x, writable=not mine)
        self._run("broadcast", _address(x), x.nbytes, root)
        return x

    def send(self, x: Array, to: int) -> None:
        x = _contiguous(x)
        self._run("send", _address(x), x.nbytes, self._peer(to))

    def recv(self, x: Array, source: int) -> Array:
        x = _contiguous(x, writable=True)
        self._run("recv", _address(x), x.nbytes, self._peer(source))
        return x

    def barrier(self) -> None:
        self._run("barrier")

    def agree_min(self, value: int) -> int:
        """The least of what all ranks say."""
        least: int = self._run("agree_min", value)
        return least

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        members = list(ranks)
        if len(set(members)) < len(members) or not set(members) <= set(range(self.size)):
            raise ValueError(f"a subgroup of {self.size} ranks cannot be {members}")
        self._require_open("subgroup")
        if len(members) < 2:  # nobody has to meet for that
            return LocalComm() if members == [self.rank] else None
        with _named_ranks(self._error):
            native = self.native.subgroup(members)
        if native is None:
            return None
        group = ShmComm.__new__(ShmComm)
        group._setup(native, self._error, [self.names[r] for r in members], self.algorithm, self.table)
        return group

    def step_ring(self) -> StepRing:
        """Make a ring; all ranks call it."""
        self._require_open("step_ring")
        with _named_ranks(self._error):
            return StepRing(self.native.step_ring(), self._error)

    def timings(self) -> dict[str, Timing]:
        """What each operation has cost since the last reset, the program's own included."""
        if self.native is None:
            return self._last
        stats: dict[str, tuple[int, int, int, int]] = self.native.stats()
        return {
            name: Timing(calls, size, wait / 1e9, total / 1e9) for name, (calls, size, wait, total) in stats.items()
        }

    def reset_timings(self) -> None:
        self.native.reset_stats()

    def fail(self, reason: str) -> None:
        """Make this rank's error that of all ranks of the world, which then raise it as RankFailed."""
        if self.native is not None:
            self.native.fail(reason)

    def close(self) -> None:
        self._last = self.timings()
        native, self.native = self.native, None
        if native is not None:
            native.close()

    def _algorithm(self, operation: Operation, nbytes: int) -> int:
        # the ring adds in an order of its own: asked for, it is for plain sums only
        wanted = "auto" if operation == "reduce_nodes" and self.algorithm == "ring" else self.algorithm
        return ALGORITHMS.index(choose(operation, nbytes, self.size, self.table, wanted))

    def _plan(self, plan: ReductionPlan) -> _FlatPlan:
        flat = self._plans.get(id(plan))
        if flat is None:
            flat = self._plans[id(plan)] = _FlatPlan(plan)
        return flat

    def _parts(self, x: Array, parts: Sequence[int], dim: int) -> tuple[int, list[int], tuple[int, ...]]:
        """The array as rows of bytes, how many of a row each rank brings, and the shape of the whole."""
        shape, dim = tuple(x.shape), dim % len(x.shape)
        if len(parts) != self.size or shape[dim] != parts[self.rank]:
            raise ValueError(f"part {self.rank} of {list(parts)} has {shape[dim]} rows")
        inner = math.prod(shape[dim + 1 :]) * _itemsize(x)
        widths = [part * inner for part in parts]
        return math.prod(shape[:dim]), widths, (*shape[:dim], sum(parts), *shape[dim + 1 :])

    def _member(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} in a group of {self.size}")
        return rank

    def _peer(self, rank: int) -> int:
        if rank == self.rank:
            raise ValueError(f"rank {rank} cannot send to itself")
        return self._member(rank)

    def _require_open(self, operation: str) -> None:
        if self.native is None:
            raise ValueError(f"{operation}: this rank has closed the group of {_ranks(self.names)}")

    def _run(self, operation: str, *arguments: Any) -> Any:
        """Call an operation, and name the rank that makes it fail."""
        self._require_open(operation)
        with _named_ranks(self._error):
            return getattr(self.native, operation)(*arguments)


@contextmanager
def _named_ranks(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error as caught:
        rank, reason = caught.args
        raise RankFailed(rank, reason) from None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _contiguous(x: Array, writable: bool = False) -> Array:
    """The array, or a copy where it is read-only or has gaps. A tensor may be on the CPU only."""
    if isinstance(x, np.ndarray):
        if x.flags.c_contiguous and (x.flags.writeable or not writable):
            return x
        return np.require(x, requirements=["C", "W"] if writable else ["C"])
    if x.device.type != "cpu":
        raise ValueError(f"this group moves cpu tensors, not {x.device.type}")
    return x.detach().contiguous()


def _address(x: Array) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else int(x.data_ptr())


def _itemsize(x: Array) -> int:
    return x.itemsize if isinstance(x, np.ndarray) else int(x.element_size())


def _dtype(x: Array) -> str:
    return str(x.dtype).removeprefix("torch.")


def _element(x: Array) -> int:
    if (name := _dtype(x)) not in ELEMENTS:
        raise ValueError(f"cannot add up {name}: only {', '.join(ELEMENTS)}")
    return ELEMENTS[name]


def _empty(x: Array, shape: tuple[int, ...]) -> Array:
    return np.empty(shape, x.dtype) if isinstance(x, np.ndarray) else x.new_empty(shape)
