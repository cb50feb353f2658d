"""The scheduler: the budget is kept, the first come are served first, everything that can run does, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.engine.request import Request
from serried.engine.scheduler import Scheduled, Scheduler
from serried.errors import InputError
from serried.kv.pool import BlockPool
from serried.sampling_params import SamplingParams


def request(index: int, prompt: int, max_tokens: int) -> Request:
    return Request(index, [7] * prompt, SamplingParams(max_tokens=max_tokens), 0)


def scheduler(
    blocks: int = 8, block_size: int = 4, longest: int = 32, requests: int = 4, budget: int = 16
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks), block_size=block_size, max_model_len=longest, max_requests=requests, token_budget=budget
    )


@dataclass(frozen=True)
class Load:
    """Sizes of a scheduler, and the requests: when each comes (in steps), its prompt, its max_tokens."""

    blocks: int
    block_size: int
    requests: int
    budget: int
    arrivals: tuple[tuple[int, int, int], ...]


loads = st.builds(
    Load,
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 12)), max_size=12).map(tuple),
)


@settings(max_examples=150)
@given(loads)
def test_a_load_runs_to_its_end(load: Load) -> None:
    made = scheduler(load.blocks, load.block_size, 1000, load.requests, load.budget)
    waiting = [(at, request(i, prompt, count)) for i, (at, prompt, count) in enumerate(load.arrivals)]
    waiting = [(at, r) for at, r in waiting if -(-r.longest // load.block_size) <= load.blocks]
    started: list[int] = []
    arrived: list[int] = []
    bound = 20 + sum(r.longest for _, r in waiting)
    for now in range(bound):
        for _, each in [pair for pair in waiting if pair[0] == now]:
            made.add(each)
            arrived.append(each.id)
        step = made.schedule()
        check_step(made, step, load)
        started += [part.request.id for part in step if part.request.id not in started]
        run(step)
        made.retire()
    assert made.idle
    assert made.pool.free == load.blocks
    assert started == arrived, "not first come, first served"
    assert all(len(r.output) == r.params.max_tokens for _, r in waiting)


def check_step(made: Scheduler, step: list[Scheduled], load: Load) -> None:
    assert sum(part.stop - part.start for part in step) <= load.budget
    assert len(made.running) <= load.requests
    held = [block for r in made.running for block in r.blocks]
    assert len(held) == len(set(held)) == load.blocks - made.pool.free
    assert bool(step) == bool(made.running), "running requests, but an empty step"
    for part in step:
        assert part.start == part.request.computed < part.stop <= part.request.length
        assert part.stop <= len(part.request.blocks) * load.block_size
        assert part.samples == (part.stop == part.request.length)


def run(step: list[Scheduled]) -> None:
    for part in step:
        samples = part.samples
        part.request.computed = part.stop
        if samples:
            part.request.append(3)


def test_a_long_prompt_goes_in_chunks_beside_those_that_decode() -> None:
    made = scheduler(blocks=16, budget=8, longest=64)
    first, second = request(0, 3, 4), request(1, 20, 2)
    made.add(first)
    made.add(second)
    seen = []
    while not made.idle:
        step = made.schedule()
        seen.append([(part.request.id, part.start, part.stop) for part in step])
        run(step)
        made.retire()
    assert seen == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 4), (1, 5, 12)],
        [(0, 4, 5), (1, 12, 19)],
        [(0, 5, 6), (1, 19, 20)],
        [(1, 20, 21)],
    ]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    """Else a stream of small ones would starve it."""
    made = scheduler(blocks=4, block_size=4, requests=9)
    for each in (request(0, 10, 2), request(1, 13, 2), request(2, 1, 1)):
        made.add(each)
    assert [part.request.id for part in made.schedule()] == [0]
    assert [r.id for r in made.waiting] == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "said"),
    [
        (0, 1, ["prompt is empty"]),
        (30, 3, ["30 tokens", "max_tokens is 3", "33", "32", "--max-model-len"]),
        (33, 1, ["33 tokens", "--max-model-len"]),
        (1, 1 << 30, ["max_tokens", "--max-model-len"]),
        (20, 6, ["7 cache blocks of 4", "there are 6", "--kv-cache-memory"]),
    ],
)
def test_what_can_never_run_is_refused(prompt: int, max_tokens: int, said: list[str]) -> None:
    made = scheduler(blocks=6)
    with pytest.raises(InputError) as caught:
        made.add(request(0, prompt, max_tokens))
    assert all(word in str(caught.value) for word in said)
    assert made.idle


def test_what_just_fits_is_taken() -> None:
    made = scheduler(blocks=8)
    made.add(request(0, 30, 2))
    made.add(request(1, 31, 1))
    assert len(made.waiting) == 2


def test_ending_a_request_before_its_time() -> None:
    made = scheduler(blocks=4, requests=1)
    running, waiting, last = (request(i, 4, 8) for i in range(3))
    for each in (running, waiting, last):
        made.add(each)
    made.schedule()
    made.finish(waiting, "abort")
    made.finish(running, "abort")
    assert (running.finish_reason, waiting.finish_reason, running.blocks) == ("abort", "abort", [])
    assert made.pool.free == 4
    assert [part.request for part in made.schedule()] == [last]
