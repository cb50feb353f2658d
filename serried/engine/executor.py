"""Executors: how a step reaches all ranks. One interface for one process, for child processes and for torchrun."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
import numpy as np

from serried.backends.registry import resolve_backend
from serried.backends.step import StepInput
from serried.config import EngineConfig, TorchrunWorld, child_environment, torchrun_environment
from serried.engine.channel import TELL_TIMES, open_channel
from serried.engine.footprint import check_fit, footprint
from serried.engine.group import group_of_children, group_of_world
from serried.engine.worker import RankInfo, RankTimes, StepOutput, Worker
from serried.errors import InputError, RankFailed
from serried.kv.pool import BlockPool
from serried.models.registry import ModelSource
from serried.parallel.comm import Communicator, Counters, LocalComm
from serried.parallel.launch import RankProcesses
from serried.weights.load import Progress

RANK_MODULE = "serried.engine.rank"
START_TIMEOUT = 600.0  # seconds that the ranks may take to load
PAUSE, STOP = -1, -2  # what a follower may be sent instead of a step's size


class Executor(Protocol):
    """All ranks of one engine, seen from this process."""

    config: EngineConfig
    worker: Worker
    decides: bool  # whether this process holds rank 0, which schedules and samples

    @property
    def max_model_len(self) -> int: ...

    @property
    def ranks(self) -> list[RankInfo]: ...

    @property
    def counters(self) -> Counters: ...

    def new_pool(self) -> BlockPool: ...

    def execute(self, step: StepInput) -> StepOutput:
        """Run a step on all ranks. RankFailed names the rank that fails."""
        ...

    def rank_times(self) -> list[RankTimes]:
        """What each rank has done with its time so far."""
        ...

    def pause(self) -> None:
        """Tell followers that there is nothing more for now."""
        ...

    def follow(self) -> None:
        """Take part in the steps that rank 0 decides on, until it pauses."""
        ...

    def close(self) -> None:
        """End the ranks that this executor started."""
        ...


class LocalExecutor:
    """One rank, in this process."""

    decides = True

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        progress: Progress | None = None,
        comm: Communicator | None = None,
    ) -> None:
        self.config = config
        self.worker = Worker(config, source, comm or LocalComm(), progress)

    @property
    def max_model_len(self) -> int:
        return self.worker.max_model_len

    @property
    def ranks(self) -> list[RankInfo]:
        return self.worker.info

    @property
    def counters(self) -> Counters:
        return self.worker.comm.counters

    def new_pool(self) -> BlockPool:
        return BlockPool(self.worker.cache.blocks)

    def execute(self, step: StepInput) -> StepOutput:
        output = self.worker.execute(step)
        if output is None:
            raise RankFailed(self.worker.comm.rank, "decides no token; only rank 0 may execute")
        return output

    def rank_times(self) -> list[RankTimes]:
        times = self.worker.gather_times()
        return [RankTimes(0.0, 0.0)] if times is None else times

    def pause(self) -> None:
        pass

    def follow(self) -> None:
        pass

    def close(self) -> None:
        self.worker.comm.close()


class ProcessExecutor(LocalExecutor):
    """Rank 0 in this process, the others as its children on this machine."""

    def __init__(self, config: EngineConfig, source: ModelSource, progress: Progress | None = None) -> None:
        size = config.tensor_parallel_size
        self._closed = False
        self.processes = RankProcesses(
            RANK_MODULE, size, msgspec.msgpack.encode(config), config.threads, child_environment()
        )
        try:
            comm = group_of_children(config, self.processes.store_fd, 0, self.processes.check)
            super().__init__(config, source, progress, comm)
            self._channel = open_channel(comm, self.processes, config.collective_timeout)
            self.processes.wait_ready(START_TIMEOUT)
        except BaseException as error:
            self._end(error)
            raise

    def execute(self, step: StepInput) -> StepOutput:
        try:
            self._channel.send(step.flat)
            return super().execute(step)
        except BaseException as error:
            self._end(error)
            raise

    def rank_times(self) -> list[RankTimes]:
        try:
            self._channel.send(np.array([TELL_TIMES], np.int32))
            return super().rank_times()
        except BaseException as error:
            self._end(error)
            raise

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(RankFailed):  # who is gone needs no telling
                self._channel.close()
        self.processes.close()
        super().close()

    def _end(self, error: BaseException) -> None:
        """Stop everything after an error; raise the culprit's own where a collective failed for its sake.

        What a rank finds wrong with the user's input is raised as it would be by this one.
        """
        try:
            if isinstance(error, RankFailed):
                failed = self.processes.failure(error)
                raise failed.input_error or failed from error
        finally:
            self._closed = True
            self.processes.close()


class TorchrunExecutor(LocalExecutor):
    """One rank of the world that torchrun made. Rank 0 decides; the others follow."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        world: TorchrunWorld,
        progress: Progress | None = None,
    ) -> None:
        comm = group_of_world(config, world)
        _check_commits(source, comm)
        self.decides = world.rank == 0
        super().__init__(config, source, progress if self.decides else None, comm)

    def execute(self, step: StepInput) -> StepOutput:
        flat = step.flat
        self._say(flat.size)
        self.worker.comm.broadcast(flat)
        return super().execute(step)

    def pause(self) -> None:
        self._say(PAUSE)

    def rank_times(self) -> list[RankTimes]:
        return []  # the others wait for steps alone

    def follow(self) -> None:
        comm = self.worker.comm
        while (size := int(comm.broadcast(np.zeros(1, np.int64))[0])) >= 0:
            self.worker.execute(StepInput.unpack(comm.broadcast(np.zeros(size, np.int32))))

    def _say(self, size: int) -> None:
        self.worker.comm.broadcast(np.array([size], np.int64))


def create_executor(
    config: EngineConfig, source: ModelSource, progress: Callable[[int, int], None] | None = None
) -> Executor:
    """The executor that fits: torchrun's world where there is one, else this process, with children for TP > 1."""
    source.config.partition(config.weights)  # a misfit is found before anything is started
    size, world = config.tensor_parallel_size, torchrun_environment()
    if world is not None:
        check_world(config, world)
    else:
        check_fit(config, source, footprint(config, source))
    local_rank = 0 if world is None else world.local_rank
    # Decided here, once: a child that is bound to some cores would count them anew, and one that is given a hub id
    # would ask the hub, which may have something newer by then.
    config = resolve_backend(config, local_rank).resolve(
        threads_per_rank=config.threads, model=source.location, revision=None
    )
    if world is not None:
        return TorchrunExecutor(config, source, world, progress)
    return LocalExecutor(config, source, progress) if size == 1 else ProcessExecutor(config, source, progress)


def check_world(config: EngineConfig, world: TorchrunWorld) -> None:
    """Refuse a tensor-parallel size that is not torchrun's world size."""
    if config.tensor_parallel_size != world.size:
        raise InputError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: torchrun started {world.size} ranks; "
            f"leave the option out, or give {world.size}"
        )


def _check_commits(source: ModelSource, comm: Communicator) -> None:
    """Refuse ranks that have found different commits of a model on the hub, each in the cache of its machine."""
    own = np.frombuffer(hashlib.sha256(source.commit.encode()).digest(), np.int64)[:1]
    if np.unique(comm.all_gather(own, [1] * comm.size)).size > 1:
        comm.close()
        raise InputError(f"{source.name}: the ranks have different commits of it; give --revision COMMIT")
