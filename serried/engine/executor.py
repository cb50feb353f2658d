"""Executors: how a step reaches all ranks. One interface for one process, for child processes and for torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from serried.backends.registry import resolve_backend
from serried.backends.step import Int32, StepInput
from serried.config import EngineConfig, TorchrunWorld, child_environment, torchrun_environment
from serried.engine.group import group_of_children, group_of_world
from serried.engine.worker import RankInfo, StepOutput, Worker
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
        self.processes = RankProcesses(
            RANK_MODULE, size, msgspec.msgpack.encode(config), config.threads, child_environment()
        )
        try:
            comm = group_of_children(config, self.processes.store_fd, 0, self.processes.check)
            super().__init__(config, source, progress, comm)
            self.processes.wait_ready(START_TIMEOUT)
        except BaseException as error:
            self._end(error)
            raise

    def execute(self, step: StepInput) -> StepOutput:
        try:
            self.processes.broadcast(step.pack().tobytes(), self.config.collective_timeout)
            return super().execute(step)
        except BaseException as error:
            self._end(error)
            raise

    def close(self) -> None:
        self.processes.close()
        super().close()

    def _end(self, error: BaseException) -> None:
        """Stop everything after an error; raise the culprit's own where a collective failed for its sake."""
        try:
            if isinstance(error, RankFailed):
                raise self.processes.failure(error) from error
        finally:
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
        self.decides = world.rank == 0
        super().__init__(config, source, progress if self.decides else None, comm)

    def execute(self, step: StepInput) -> StepOutput:
        flat = step.pack()
        self._say(flat.size)
        self.worker.comm.broadcast(flat)
        return super().execute(step)

    def pause(self) -> None:
        self._say(PAUSE)

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
    local_rank = 0 if world is None else world.local_rank
    # Decided here, once: a child that is bound to some cores would count them anew.
    config = resolve_backend(config, local_rank).resolve(threads_per_rank=config.threads)
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


def serve_steps(worker: Worker, receive: Callable[[], bytes]) -> None:
    """A child rank's life after loading: take each step from rank 0 and execute it, until the link ends."""
    while True:
        flat: Int32 = np.frombuffer(receive(), np.int32)
        worker.execute(StepInput.unpack(flat))
