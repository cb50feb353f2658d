"""The engine in its own process: the same tokens as in this one, aborts, and a rank's death that nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import PROMPTS, open_llm, tokens
from tiny_models import Models

from serried import SamplingParams
from serried.config import EngineConfig
from serried.engine.client import ProcessEngine
from serried.engine.interface import ModelInfo
from serried.errors import EngineDead, InputError, QueueFull

PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
SETTINGS = {"dtype": "float32", "block_size": 16, "threads_per_rank": 1, "max_num_batched_tokens": 19}


@pytest.fixture(scope="module")
def model(tiny: Models) -> Path:
    return tiny.directory("split-9-3")


@asynccontextmanager
async def served(model: Path, tp: int = 2, *, max_waiting: int = 99, **options: Any) -> AsyncIterator[ProcessEngine]:
    config = EngineConfig.create(str(model), tensor_parallel_size=tp, **{**SETTINGS, **options})
    info = ModelInfo("tiny", 128, 128, frozenset(), {})
    engine = await ProcessEngine.start(config, info, None, max_waiting)
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: ProcessEngine, id: str, prompt: list[int], params: SamplingParams = PARAMS) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(params.n)]
    async for delta in engine.generate(prompt, params, request_id=id):
        found[delta.index] += delta.tokens
    return found


async def all_at_once(engine: ProcessEngine, params: SamplingParams = PARAMS) -> list[list[int]]:
    answers = await asyncio.gather(*(ask(engine, str(i), prompt, params) for i, prompt in enumerate(PROMPTS)))
    return [answer[0] for answer in answers]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_same_tokens_as_in_this_process(model: Path, backend: str) -> None:
    async def run() -> None:
        async with served(model, backend=backend) as engine:
            assert await all_at_once(engine) == expected
            three = await ask(engine, "three", PROMPTS[0], replace(PARAMS, n=3))
            assert three[0] == expected[0] and len({tuple(each) for each in three}) == 3
            await engine.check_ready()
            said = 24 * (len(PROMPTS) + 3)
            async with asyncio.timeout(20):  # figures come after the tokens that they count
                while engine.stats().generated_tokens < said or engine.stats().running or not engine.stats().ranks:
                    await asyncio.sleep(0.05)
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
            assert stats.generated_tokens == said
            assert len(stats.ranks) == 2
            assert all(rank.compute > 0 for rank in stats.ranks)

    with open_llm(model, 1, backend) as llm:
        expected = tokens(llm, PROMPTS, PARAMS)
    asyncio.run(run())


def test_who_goes_away_leaves_nothing(model: Path) -> None:
    async def run() -> None:
        async with served(model, tp=1) as engine:
            async with aclosing(engine.generate(PROMPTS[0], replace(PARAMS, max_tokens=60), request_id="a")) as stream:
                async for delta in stream:
                    assert delta.tokens
                    break
            two = replace(PARAMS, n=2, max_tokens=60)
            async with aclosing(engine.generate(PROMPTS[0], two, request_id="b")) as stream:
                async for delta in stream:
                    await engine.abort("b", 1 - delta.index)
                    break
            async with asyncio.timeout(20):
                while engine.stats().blocks_used or not engine.stats().steps:
                    await asyncio.sleep(0.05)
            assert await all_at_once(engine)

    asyncio.run(run())


def test_what_is_wrong_is_said_before_anything_runs(model: Path) -> None:
    async def run() -> None:
        async with served(model, tp=1, max_waiting=1, max_num_seqs=1) as engine:
            for prompt, params, said in (
                ([], PARAMS, "prompt is empty"),
                ([5000], PARAMS, "token id 5000"),
                ([1], replace(PARAMS, max_tokens=5000), "max_tokens is 5000"),
                ([1], replace(PARAMS, stop_token_ids=[4000]), "stop_token_ids"),
                ([1], replace(PARAMS, bad_words=["word"]), "bad_words"),
            ):
                with pytest.raises(InputError, match=said):
                    await ask(engine, "x", prompt, params)
            answers = await asyncio.gather(*(ask(engine, str(i), PROMPTS[0]) for i in range(6)), return_exceptions=True)
            assert any(isinstance(answer, QueueFull) for answer in answers)
            assert any(isinstance(answer, list) and len(answer[0]) == 24 for answer in answers)

    asyncio.run(run())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_and_nobody_notices(model: Path, victim: int) -> None:
    async def run() -> None:
        async with served(model) as engine:
            before = await all_at_once(engine, long)
            asking = asyncio.create_task(all_at_once(engine, long))
            while not any(tokens for flight in engine._flights.values() for tokens in flight.outputs.values()):
                await asyncio.sleep(0.01)
            assert engine._processes is not None
            rank0 = engine._processes.pids[0]
            children = Path(f"/proc/{rank0}/task/{rank0}/children").read_text().split()
            others = children or [
                child
                for task in Path(f"/proc/{rank0}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
            os.kill(int(others[0]) if victim else rank0, signal.SIGKILL)
            assert await asking == before
            assert engine.stats().restarts == 1
            await engine.check_ready()

    long = replace(PARAMS, max_tokens=60)
    asyncio.run(run())


def test_a_death_loses_and_doubles_no_request(model: Path) -> None:
    """More requests than may wait, some handed in while nobody is there, some while nobody knows it yet."""

    async def run() -> None:
        async with served(model, tp=1, max_waiting=6, max_num_seqs=2) as engine:
            expected = [await ask(engine, f"alone {n}", prompt) for n, prompt in enumerate(PROMPTS)]
            assert engine._processes is not None
            begun = [asyncio.create_task(ask(engine, f"begun {n}", PROMPTS[n % 4], long)) for n in range(5)]
            while sum(bool(tokens) for flight in engine._flights.values() for tokens in flight.outputs.values()) < 2:
                await asyncio.sleep(0.001)
            os.kill(engine._processes.pids[0], signal.SIGKILL)
            unknown = [asyncio.create_task(ask(engine, f"unknown {n}", PROMPTS[n])) for n in range(2)]
            while engine.up is not None:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDead, match="being started again"):
                await engine.check_ready()
            known = [asyncio.create_task(ask(engine, f"known {n}", PROMPTS[n])) for n in range(2)]
            await asyncio.sleep(0.05)
            if engine.up is None:  # it is being started: its socket is there, and nobody at the other end
                known += [asyncio.create_task(ask(engine, f"later {n}", PROMPTS[n])) for n in (2, 3)]
            gone = asyncio.create_task(ask(engine, "gone", PROMPTS[0]))
            await asyncio.sleep(0)
            gone.cancel()
            assert await asyncio.gather(*unknown, *known) == expected[:2] + expected[: len(known)]
            assert len({tuple(map(tuple, answer)) for answer in await asyncio.gather(begun[0], begun[4])}) == 1
            assert all(len(answer[0]) == long.max_tokens for answer in await asyncio.gather(*begun))
            await engine.check_ready()
            assert engine.stats().restarts == 1

    long = replace(PARAMS, max_tokens=60)
    asyncio.run(run())


def test_a_request_that_sees_two_deaths_is_ended(model: Path) -> None:
    """It may be what kills. The engine stays, and answers the others."""

    async def run() -> None:
        async with served(model, tp=1) as engine:
            expected = await ask(engine, "alone", PROMPTS[1])
            suspect = asyncio.create_task(ask(engine, "suspect", PROMPTS[0], replace(PARAMS, n=40, max_tokens=60)))
            for _ in range(2):
                while engine.up is None or not ("suspect" in engine._flights and engine._flights["suspect"].outputs[0]):
                    await asyncio.sleep(0.001)
                restarts = engine.stats().restarts
                assert engine._processes is not None
                os.kill(engine._processes.pids[0], signal.SIGKILL)
                while engine.stats().restarts == restarts:
                    await asyncio.sleep(0.001)
            with pytest.raises(EngineDead, match="died twice while this request ran"):
                await suspect
            assert await ask(engine, "after", PROMPTS[1]) == expected

    asyncio.run(run())


def test_an_engine_that_dies_again_and_again_says_so(model: Path) -> None:
    async def run() -> None:
        async with served(model, tp=1) as engine:
            for _ in range(3):
                while engine.up is None or engine._processes is None:
                    await asyncio.sleep(0.02)
                deaths = len(engine._deaths)
                os.kill(engine._processes.pids[0], signal.SIGKILL)
                while len(engine._deaths) == deaths:
                    await asyncio.sleep(0.02)
            while engine._dead is None:
                await asyncio.sleep(0.02)
            with pytest.raises(EngineDead, match="3 times"):
                await ask(engine, "x", PROMPTS[0])
            with pytest.raises(EngineDead):
                await engine.check_ready()

    asyncio.run(run())
