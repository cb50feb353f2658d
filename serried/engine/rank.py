"""`python -m serried.engine.rank`: one of the ranks above 0, started by the process that holds rank 0."""

from __future__ import annotations

import os

import msgspec

from serried.backends.registry import resolve_backend
from serried.backends.step import StepInput
from serried.config import EngineConfig
from serried.engine.channel import TELL_TIMES, receive_steps
from serried.engine.group import group_of_children
from serried.engine.worker import Worker
from serried.machine import cores_of_rank
from serried.models.registry import open_model
from serried.parallel.link import ChildLink


def main() -> None:
    """Load this rank's shard, say so, then execute the steps that rank 0 sends."""
    with ChildLink.from_argv() as link:
        config = resolve_backend(msgspec.msgpack.decode(link.payload, type=EngineConfig), link.rank)
        comm = group_of_children(config, link.store_fd, link.rank)
        cores = cores_of_rank(link.rank, link.size, config.threads)
        if config.backend == "native" and cores:
            os.sched_setaffinity(0, cores)  # before the weights are touched: they come to lie on this node
        worker = Worker(config, open_model(config.model), comm)
        for flat in receive_steps(comm, link):
            if flat[0] == TELL_TIMES:
                worker.gather_times()
            else:
                worker.execute(StepInput.unpack(flat))


if __name__ == "__main__":
    main()
