"""EngineConfig: each wrong value is an error that names its option; nothing is taken silently."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from serried.config import EngineConfig, torchrun_environment
from serried.errors import InputError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("dtype", "float16"),
        ("dtype", None),
        ("backend", "tpu"),
        ("device", "tpu"),
        ("load_format", "pt"),
        ("sabotage", "nothing"),
        *[("tensor_parallel_size", value) for value in (0, -1, 1.0, "2", True, None)],
        *[("max_num_seqs", value) for value in (0, 2.5)],
        *[("max_num_batched_tokens", value) for value in (0, "many")],
        *[("block_size", value) for value in (0, -16, None)],
        *[("threads_per_rank", value) for value in (0, -1, 0.5)],
        *[("max_model_len", value) for value in (0, -1, 1 << 60)],
        *[("kv_cache_memory", value) for value in (0, -5, 1e9)],
        *[("seed", value) for value in (-1, 1 << 64, 1.5, "7")],
        *[("collective_timeout", value) for value in (0, -1, math.inf, math.nan)],
        *[("tp_weights", value) for value in ((2, 1), (0,), (1.5,), ())],
    ],
)
def test_bad_values_are_named(field: str, bad: Any) -> None:
    with pytest.raises(InputError, match="^--" + field.replace("_", "-")):
        EngineConfig.create("m", **{field: bad})


def test_weights_one_a_rank() -> None:
    config = EngineConfig.create("m", tensor_parallel_size=2, tp_weights=[3, 1])
    assert config.weights == config.tp_weights == (3, 1)
    assert EngineConfig.create("m", tensor_parallel_size=3).weights == (1, 1, 1)
    with pytest.raises(InputError, match=r"--tp-weights 3,1: 2 weights for --tensor-parallel-size 3"):
        EngineConfig.create("m", tensor_parallel_size=3, tp_weights=(3, 1))


@pytest.mark.parametrize(
    ("option", "near"), [("tensor_paralel_size", "tensor_parallel_size"), ("max_len", "max_model_len"), ("zzz", None)]
)
def test_an_unknown_option(option: str, near: str | None) -> None:
    with pytest.raises(InputError, match=f"unknown option '{option}'") as caught:
        EngineConfig.create("m", **{option: 2})
    assert ("did you mean" in str(caught.value)) == (near is not None)
    if near:
        assert f"did you mean {near}?" in str(caught.value)


def test_it_is_frozen_and_travels() -> None:
    """What the child ranks get is what rank 0 has."""
    config = EngineConfig.create(
        "dir", tensor_parallel_size=2, tp_weights=[2, 1], seed=(1 << 64) - 1, max_model_len=77, sabotage="rank-order"
    )
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert config.resolve(seed=5).seed == 5
    assert config.resolve(seed=5).resolve(seed=config.seed) == config


def test_threads() -> None:
    assert EngineConfig.create("m", threads_per_rank=3).threads == 3
    assert EngineConfig.create("m", tensor_parallel_size=5000).threads == 1
    assert EngineConfig.create("m").threads >= 1


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun_environment() is None
    assert EngineConfig.create("m").tensor_parallel_size == 1
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    world = torchrun_environment()
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.master_port, world.loopback) == (1, 3, 1, 1234, True)
    assert EngineConfig.create("m").tensor_parallel_size == 3
    assert EngineConfig.create("m", tensor_parallel_size=2).tensor_parallel_size == 2
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    other = torchrun_environment()
    assert other is not None
    assert not other.loopback
