"""A script for torchrun: joins its world twice without init_process_group, then beside the user's own."""

import os

import comm_checks
import torch.distributed as dist

from serried.config import TorchrunWorld
from serried.parallel.torch_comm import TorchComm, join_torchrun

env = os.environ
world = TorchrunWorld(
    int(env["RANK"]),
    int(env["WORLD_SIZE"]),
    int(env["LOCAL_RANK"]),
    env["MASTER_ADDR"],
    int(env["MASTER_PORT"]),
)
for own in (False, True):
    if own:
        dist.init_process_group("gloo")
    comm = TorchComm(join_torchrun(world), world.rank, world.size, timeout=30, loopback=world.loopback)
    comm_checks.all_gather(comm)
    comm_checks.subgroups(comm)
    comm.close()
    assert dist.is_initialized() == own
dist.barrier()
dist.destroy_process_group()
os.write(1, f"rank {world.rank} of {world.size}: ok\n".encode())  # one write: lines stay whole
