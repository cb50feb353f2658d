"""Communicator over PyTorch process groups: gloo for CPU tensors, NCCL for CUDA tensors.

Whatever is only moved travels as bytes, so that no dtype and no uneven part is a special case. Nothing is
registered in torch.distributed: several engines can live in one process, and the user's own process groups are
left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from serried.config import TorchrunWorld
from serried.errors import InputError, RankFailed
from serried.parallel.comm import Array, Communicator, Counters, LocalComm, fold_nodes
from serried.parallel.meeting import Meeting, first_line
from serried.parallel.reduction import ReductionPlan

HALVES = (torch.bfloat16, torch.float16)


def anonymous_store(fd: int, size: int) -> Store:
    """The store of a set of ranks that share the memfd `fd` (RankProcesses.store_fd, ChildLink.store_fd).

    It has no name in any file system and opens no port; it ends with the last process that holds it open.
    """
    # FileStore opens its path again at every call, and writes to it once more when the last process group has
    # let go of it: the number must never come to mean another file, so the duplicate is never closed
    store: Store = dist.FileStore(f"/proc/self/fd/{os.dup(fd)}", size)  # type: ignore[attr-defined]
    return store


def join_torchrun(world: TorchrunWorld, timeout: float = 60.0) -> Store:
    """The store of the world that torchrun made, for this rank's next engine.

    Every rank must make its engines in the same order. Raises RankFailed where that store does not answer.
    """
    try:
        wait = timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=wait))
        engine = store.add(f"serried/engines/{world.rank}", 1)
    except (RuntimeError, ValueError) as error:
        where = f"{world.master_addr}:{world.master_port}"
        raise RankFailed(world.rank, f"torchrun's store at {where}: {first_line(error)}") from error
    return PrefixStore(f"serried/{engine}", store)


def _gloo(store: Store, rank: int, size: int, timeout: float, loopback: bool) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [gloo.create_device(hostname="127.0.0.1") if loopback else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: float) -> Any:
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise InputError("this build of PyTorch has no NCCL: install one for CUDA, or use the CPU")
    options = nccl.Options()
    # NCCL's own watchdog ends the whole process: it must not be the first to act
    options._timeout = timedelta(seconds=2 * timeout)
    return nccl(store, rank, size, options)


class TorchComm:
    """A group of ranks over gloo (device "cpu") or NCCL (device "cuda": the current CUDA device).

    takes torch tensors on that device, or numpy arrays; gives back the same kind. `timeout` is
    the deadline of every operation in seconds. `loopback`: all ranks are on this machine, so bind to
    127.0.0.1 only. `names`: the members' ranks in the world, for error messages (default: 0, 1, ...).
    `watch` (RankProcesses.check) is called now and then while the others are awaited, for `joining` seconds at most
    (None: `timeout`). Raises RankFailed where a rank does not join, and what `watch` raises.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: str = "cpu",
        timeout: float = 60.0,
        loopback: bool = False,
        names: Sequence[int] | None = None,
        watch: Callable[[], None] = lambda: None,
        joining: float | None = None,
    ) -> None:
        self.rank, self.size, self.counters = rank, size, Counters()
        self._device, self._store, self._loopback = torch.device(device), store, loopback
        on_device = self._device.type != "cpu"

        def open_group() -> Any:
            return _nccl(store, rank, size, timeout) if on_device else _gloo(store, rank, size, timeout, loopback)

        members = range(size) if names is None else names
        self._group = Meeting(
            store, rank, members, timeout, open_group, on_device, watch, timeout if joining is None else joining
        )
        self._subgroups = 0

    def all_reduce(self, x: Array) -> Array:
        tensor = self._tensor(x)
        with self.counters.count("all_reduce", tensor.nbytes):
            # gloo would round to half precision after each addition
            total = tensor.float() if tensor.dtype in HALVES and self._device.type == "cpu" else tensor
            self._group.meet("all_reduce", lambda group: group.allreduce([total]))
            return _like(x, total.to(tensor.dtype))

    def reduce_nodes(self, nodes: Array, plan: ReductionPlan) -> Array:
        tensor = self._tensor(nodes)
        with self.counters.count("reduce_nodes", tensor.nbytes):
            everyone = self._gather_all("reduce_nodes", tensor.movedim(1, 0), plan.counts)
            return _like(nodes, fold_nodes(everyone.movedim(0, 1), plan).contiguous())

    def reduce_scatter(self, x: Array, parts: Sequence[int]) -> Array:
        tensor = self._tensor(x)
        if tensor.shape[0] != sum(parts):
            raise ValueError(f"reduce_scatter of {tensor.shape[0]} rows into parts {list(parts)}")
        with self.counters.count("reduce_scatter", tensor.nbytes):
            row, mine = _row_bytes(tensor), parts[self.rank]
            arrived = self._bytes(self.size * mine * row)
            sent, received = [part * row for part in parts], [mine * row] * self.size
            raw = _raw(tensor)
            self._group.meet("reduce_scatter", lambda group: group.alltoall_base(arrived, raw, received, sent))
            pieces = arrived.view(tensor.dtype).view(self.size, mine, *tensor.shape[1:])
            total = pieces[0].float() if tensor.dtype in HALVES else pieces[0].clone()
            for piece in pieces[1:]:
                total += piece
            return _like(x, total.to(tensor.dtype))

    def all_gather(self, x: Array, parts: Sequence[int], dim: int = 0) -> Array:
        tensor = self._tensor(x)
        with self.counters.count("all_gather", tensor.nbytes):
            whole = self._gather_all("all_gather", tensor.movedim(dim, 0), parts)
            return _like(x, whole.movedim(0, dim).contiguous())

    def gather(self, x: Array, parts: Sequence[int], dim: int = 0, root: int = 0) -> Array | None:
        tensor = self._tensor(x)
        with self.counters.count("gather", tensor.nbytes):
            front = tensor.movedim(dim, 0).contiguous()
            padded = self._padded(front, parts)
            slots = [torch.empty_like(padded) for _ in parts] if self.rank == root else []
            options: Any = dist.GatherOptions()
            options.rootRank = root
            outputs = [slots] if slots else []
            self._group.meet("gather", lambda group: group.gather(outputs, [padded], options))
            if self.rank != root:
                return None
            return _like(x, _joined(slots, front, parts).movedim(0, dim).contiguous())

    def broadcast(self, x: Array, root: int = 0) -> Array:
        tensor = self._tensor(x)
        with self.counters.count("broadcast", tensor.nbytes if self.rank == root else 0):
            raw = _raw(tensor)
            self._group.meet("broadcast", lambda group: group.broadcast(raw, root))
            return _like(x, tensor)

    def send(self, x: Array, to: int) -> None:
        tensor = self._tensor(x)
        with self.counters.count("send", tensor.nbytes):
            raw = _raw(tensor)
            self._group.meet("send", lambda group: group.send([raw], to, 0), (to,))

    def recv(self, x: Array, source: int) -> Array:
        tensor = self._tensor(x)
        with self.counters.count("recv", 0):
            raw = _raw(tensor)
            self._group.meet("recv", lambda group: group.recv([raw], source, 0), (source,))
            return _like(x, tensor)

    def barrier(self) -> None:
        with self.counters.count("barrier", 0):
            token = torch.zeros(1, dtype=torch.int32, device=self._device)
            self._group.meet("barrier", lambda group: group.allreduce([token]))

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        members = list(ranks)
        if len(set(members)) < len(members) or not set(members) <= set(range(self.size)):
            raise ValueError(f"a subgroup of {self.size} ranks cannot be {members}")
        self._subgroups += 1  # on members and others alike: the number is the group's name
        if self.rank not in members:
            return None
        if len(members) == 1:
            return LocalComm()
        whole = self._group
        return TorchComm(
            PrefixStore(f"group/{self._subgroups}", self._store),
            members.index(self.rank),
            len(members),
            self._device.type,
            whole.timeout,
            self._loopback,
            [whole.names[r] for r in members],
        )

    def close(self) -> None:
        self._group.close()

    def _gather_all(self, operation: str, front: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        """Concatenate along the first dimension."""
        front = front.contiguous()
        padded = self._padded(front, parts)
        arrived = self._bytes(self.size * padded.numel())
        self._group.meet(operation, lambda group: group._allgather_base(arrived, padded))
        return _joined(list(arrived.view(self.size, -1)), front, parts)

    def _padded(self, front: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        """The bytes of this rank's part, as many as those of the largest part."""
        if front.shape[0] != parts[self.rank]:
            raise ValueError(f"part {self.rank} of {list(parts)} has {front.shape[0]} rows")
        room = max(parts) * _row_bytes(front)
        if front.nbytes == room:
            return _raw(front)
        padded = torch.zeros(room, dtype=torch.uint8, device=self._device)
        padded[: front.nbytes] = _raw(front)
        return padded

    def _tensor(self, x: Array) -> torch.Tensor:
        """A contiguous tensor over the memory of x (of a copy where x is read-only or has gaps)."""
        if isinstance(x, np.ndarray):
            array = np.require(x, requirements=["C", "W"])
            if array.dtype == ml_dtypes.bfloat16:
                tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            else:
                tensor = torch.from_numpy(array)
            tensor = tensor.to(self._device)  # on CUDA, the small arrays of the engine go by way of the device
        else:
            tensor = x.detach()
        if tensor.device.type != self._device.type:
            raise ValueError(f"this group moves {self._device.type} tensors, not {tensor.device.type}")
        return tensor.contiguous()

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in place."""
    if not tensor.numel():  # its strides may be such that it cannot be viewed
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.view(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one index of the first dimension."""
    return tensor.shape[1:].numel() * tensor.element_size()


def _joined(slots: Sequence[torch.Tensor], front: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """The parts of all ranks, out of their padded bytes, one after the other along the first dimension."""
    row = _row_bytes(front)
    whole = torch.cat([slot[: part * row] for slot, part in zip(slots, parts, strict=True)])
    return whole.view(front.dtype).view(sum(parts), *front.shape[1:])


def _like(x: Array, tensor: torch.Tensor) -> Array:
    """The tensor as the kind of array that x is."""
    if not isinstance(x, np.ndarray):
        return tensor
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
