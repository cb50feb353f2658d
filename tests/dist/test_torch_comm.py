"""Every operation of TorchComm over gloo, in worlds of real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import HERE, Watch, World

from serried.config import TorchrunWorld
from serried.errors import InputError, RankFailed
from serried.parallel.torch_comm import TorchComm, join_torchrun

CHECKS = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "broadcast",
    "send_recv",
    "reduce_nodes",
    "subgroups",
    "counters",
    "crossed",
    "missing",
]


@pytest.mark.parametrize("check", CHECKS)
def test_operation(world: World, check: str) -> None:
    world.run(check)


def test_two_worlds_with_more_ranks_than_cores(world: World) -> None:
    """A second world in this process, while the first is inside a check; and neither is torch's own."""
    if world.size > 2:
        pytest.skip("one world beside it is enough")
    other = World(8)
    watch = Watch(other.processes.pids)
    world.begin("all_gather")
    other.run("reduce_nodes")
    world.finish("all_gather")
    other.run("counters")
    assert not dist.is_initialized()
    other.close()
    assert not watch.survivors(0)


def test_wrong_device(world: World) -> None:
    with pytest.raises(ValueError, match="cpu tensors, not meta"):
        world.comm.all_reduce(torch.empty(1, device="meta"))


def test_nccl_is_said_to_be_missing() -> None:
    if hasattr(dist, "ProcessGroupNCCL"):
        pytest.skip("this PyTorch has NCCL")
    with pytest.raises(InputError, match="no NCCL"):
        TorchComm(dist.HashStore(), 0, 1, device="cuda")


def test_torchrun() -> None:
    """Under the real torchrun: two engines in turn in one world, beside the user's own init_process_group."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, HERE / "torchrun_script.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: ok", "rank 1 of 2: ok"]


def test_torchrun_without_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RankFailed, match=f"torchrun's store at 127.0.0.1:{port}"):
            join_torchrun(TorchrunWorld(1, 2, 1, "127.0.0.1", port), timeout=0.5)
