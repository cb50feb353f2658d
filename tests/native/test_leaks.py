"""Requests come and are aborted, thousands of times: the engine's process holds no block, memory or file more."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Models

from serried import SamplingParams
from serried.config import EngineConfig
from serried.engine.client import ProcessEngine
from serried.engine.interface import ModelInfo

BURST = 100  # cycles, of which so many run at once:
AT_ONCE = 25
WARM = 200  # cycles after which all that is made once has been made
PER_CYCLE = 300  # bytes that a cycle may seem to cost: what the allocator does not give back is no more than that
SLACK = 2 << 20  # bytes of noise


async def cycle(engine: ProcessEngine, rng: random.Random, id: str) -> None:
    """A request that goes away: before its first token, after some, one sample at a time, or at its end."""
    params = SamplingParams(
        n=rng.randint(1, 3),
        temperature=1.0,
        max_tokens=rng.choice([1, 5, 60]),
        seed=rng.getrandbits(60),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 0]),
        presence_penalty=rng.choice([0, 1]),
    )
    prompt = [rng.randrange(320) for _ in range(rng.randint(1, 90))]
    leaves, seen = rng.randint(0, 6), 0
    if leaves == 0:
        task = asyncio.ensure_future(anext(engine.generate(prompt, params, request_id=id)))
        await asyncio.sleep(rng.random() * 0.003)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    async with aclosing(engine.generate(prompt, params, request_id=id, cache_salt=rng.choice([None, "a"]))) as stream:
        async for delta in stream:
            seen += 1
            if seen == leaves:
                if rng.random() < 0.7:
                    return
                await engine.abort(id, delta.index if rng.random() < 0.5 else None)


def of_process(pid: int) -> tuple[int, int]:
    """Bytes that a process holds, and how many files it has open."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def idle(engine: ProcessEngine) -> None:
    """Until the engine has said, of itself after one more request, that nothing runs."""
    before = engine.stats().generated_tokens
    async for _ in engine.generate([0], SamplingParams(max_tokens=1), request_id="last"):
        pass
    async with asyncio.timeout(60):
        while (found := engine.stats()).running or found.blocks_used or found.generated_tokens == before:
            await asyncio.sleep(0.01)


async def bursts(engine: ProcessEngine, cycles: int, after: Callable[[], Any]) -> None:
    gate, number = asyncio.Semaphore(AT_ONCE), 0

    async def one(seed: int) -> None:
        async with gate:
            await cycle(engine, random.Random(seed), f"r{seed}")

    while number < WARM + cycles:
        await asyncio.gather(*(one(number + each) for each in range(BURST)))
        number += BURST
        await idle(engine)
        if number >= WARM:
            after()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cycles", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_aborts_leak_nothing(tiny: Models, cycles: int) -> None:
    config = EngineConfig.create(
        str(tiny.directory("llama-tied")),
        backend="native",
        block_size=8,
        threads_per_rank=1,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        kv_cache_memory=30 * 8 * 2 * 2 * 2 * 16 * 2,
    )

    async def run() -> list[tuple[int, int]]:
        engine = await ProcessEngine.start(config, ModelInfo("tiny", 256, 320), None, 9999)
        found: list[tuple[int, int]] = []
        try:
            assert engine.up is not None and engine.up.blocks == 30
            assert engine._processes is not None
            (pid,) = engine._processes.pids
            await bursts(engine, cycles, lambda: found.append(of_process(pid)))
            stats = engine.stats()
            assert (stats.restarts, stats.blocks_used) == (0, 0)
            assert stats.preemptions > 0 and stats.prefix_queries > 0
            assert engine._probes == {}
        finally:
            await engine.close()
        return found

    own = of_process(os.getpid())[1]
    found = asyncio.run(run())
    memory, files = (np.array(each, np.int64) for each in zip(*found, strict=True))
    assert files.max() <= files[0] + 1
    assert memory[-1] - memory[0] < SLACK + PER_CYCLE * cycles, memory
    if len(memory) > 20:  # a slope, once there is enough to see one
        slope = np.polyfit(np.arange(len(memory)) * BURST, memory, 1)[0]
        assert slope < PER_CYCLE, f"{slope:.0f} bytes a cycle"
    assert of_process(os.getpid())[1] <= own + 1
