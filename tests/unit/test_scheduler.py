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


def request(index: int, prompt: int, max_tokens: int, *, first: int = 7, priority: int = 0) -> Request:
    made = Request(index, [first, *[7] * (prompt - 1)], SamplingParams(max_tokens=max_tokens), 0, priority=priority)
    if prompt == 0:
        made.prompt.clear()
    return made


def scheduler(
    blocks: int = 8, block_size: int = 4, longest: int = 32, requests: int = 4, budget: int = 16, caching: bool = True
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks),
        block_size=block_size,
        max_model_len=longest,
        max_requests=requests,
        token_budget=budget,
        prefix_caching=caching,
    )


@dataclass(frozen=True)
class Load:
    """Sizes of a scheduler, and the requests: when each comes (in steps), its prompt (a length, and its first token),
    its max_tokens, its priority."""

    blocks: int
    block_size: int
    requests: int
    budget: int
    caching: bool
    arrivals: tuple[tuple[int, int, int, int, int], ...]


loads = st.builds(
    Load,
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(7, 8), st.integers(1, 12), st.integers(0, 1)),
        max_size=12,
    ).map(tuple),
)


class Cache:
    """What a KV cache would hold: in each slot, all tokens up to its position, as attention would have read them."""

    def __init__(self, made: Scheduler) -> None:
        self.made = made
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, step: list[Scheduled]) -> None:
        """Execute a step: each part finds what came before it, and is written beside it."""
        size = self.made.block_size
        for part in step:
            request = part.request
            for position in range(part.stop):
                slot = (request.blocks[position // size], position % size)
                seen = tuple(request.tokens(0, position + 1))
                if position >= part.start:
                    self.slots[slot] = seen
                assert self.slots.get(slot) == seen, "the cache holds another sequence there"
        for part in step:
            samples = part.samples
            self.made.computed(part)
            if samples:
                part.request.append(3 + len(part.request.output) % 2)


@settings(max_examples=200, deadline=None)
@given(loads)
def test_a_load_runs_to_its_end(load: Load) -> None:
    made = scheduler(load.blocks, load.block_size, 1000, load.requests, load.budget, load.caching)
    cache = Cache(made)
    waiting = [
        (at, request(i, prompt, count, first=first, priority=priority))
        for i, (at, prompt, first, count, priority) in enumerate(load.arrivals)
    ]
    waiting = [(at, r) for at, r in waiting if -(-r.longest // load.block_size) <= load.blocks]
    started: list[int] = []
    bound = 20 + sum(2 * r.longest for _, r in waiting)
    for now in range(bound):
        for _, each in [pair for pair in waiting if pair[0] == now]:
            made.add(each)
        expected = [r.priority for r in made.waiting]
        assert expected == sorted(expected)
        step = made.schedule()
        check_step(made, step, load)
        started += [part.request.id for part in step if part.request.id not in started]
        cache.run(step)
        made.retire()
    assert made.idle
    assert made.pool.free == load.blocks
    assert all(len(r.output) == r.params.max_tokens for _, r in waiting)
    if len({r.priority for _, r in waiting}) == 1:
        order = [r.id for _, r in sorted(waiting, key=lambda pair: pair[0])]
        assert started == order, "not first come, first served"


def check_step(made: Scheduler, step: list[Scheduled], load: Load) -> None:
    assert sum(part.stop - part.start for part in step) <= load.budget
    assert len(made.running) <= load.requests
    made.pool.check()
    held = {block for r in made.running for block in r.blocks}
    assert len(held) == load.blocks - made.pool.free
    assert bool(step) == bool(made.running), "running requests, but an empty step"
    for part in step:
        assert part.start == part.request.computed < part.stop <= part.request.length
        assert part.stop <= len(part.request.blocks) * load.block_size
        assert part.samples == (part.stop == part.request.length)


def run(made: Scheduler, step: list[Scheduled]) -> None:
    for part in step:
        samples = part.samples
        made.computed(part)
        if samples:
            part.request.append(3)


def test_a_known_prefix_is_not_computed_again() -> None:
    made = scheduler(blocks=16, budget=32)
    made.add(request(0, 14, 1))
    run(made, made.schedule())
    made.retire()
    again, other = request(1, 14, 1), request(2, 14, 1, first=8)
    for each in (again, other):
        made.add(each)
    assert [(part.request.id, part.start, part.stop) for part in made.schedule()] == [(1, 12, 14), (2, 0, 14)]
    assert (again.cached, made.counters.hit, made.counters.queried) == (12, 12, 42)


def test_the_last_token_is_always_computed() -> None:
    made = scheduler(blocks=16, budget=32)
    for index in range(2):
        made.add(request(index, 8, 1))
        (part,) = made.schedule()
        assert (part.start, part.stop) == ((0, 8) if index == 0 else (4, 8))
        run(made, [part])
        made.retire()


def test_who_may_not_reuse_computes_everything() -> None:
    made = scheduler(blocks=16, budget=32)
    for index in range(2):
        each = request(index, 8, 1)
        each.may_reuse = False
        made.add(each)
        (part,) = made.schedule()
        assert (part.start, part.stop) == (0, 8)
        run(made, [part])
        made.retire()


def test_the_last_that_came_is_preempted_and_comes_back_first() -> None:
    made = scheduler(blocks=6, budget=64, caching=False)
    old, new = request(0, 7, 13), request(1, 7, 13)
    for each in (old, new):
        made.add(each)
    later = request(2, 1, 1)
    steps = 0
    while not made.counters.preemptions:
        run(made, made.schedule())
        steps += 1
        assert steps < 30
    assert made.running == [old] and made.waiting == [new] and new.blocks == []
    assert len(new.output) > 0, "what it has said is kept"
    made.add(later)
    assert made.waiting == [new, later]
    while not made.idle:
        run(made, made.schedule())
        made.retire()
    assert (len(old.output), len(new.output), len(later.output)) == (13, 13, 1)


def test_lower_priorities_go_first_and_are_preempted_last() -> None:
    made = scheduler(blocks=6, budget=64, requests=2, caching=False)
    low, urgent = request(0, 7, 13, priority=5), request(1, 7, 13, priority=1)
    for each in (low, urgent):
        made.add(each)
    assert made.waiting == [urgent, low]
    while not made.counters.preemptions:
        run(made, made.schedule())
    assert made.running == [urgent]


def test_a_long_prompt_goes_in_chunks_beside_those_that_decode() -> None:
    made = scheduler(blocks=16, budget=8, longest=64)
    first, second = request(0, 3, 4), request(1, 20, 2)
    made.add(first)
    made.add(second)
    seen = []
    while not made.idle:
        step = made.schedule()
        seen.append([(part.request.id, part.start, part.stop) for part in step])
        run(made, step)
        made.retire()
    assert seen == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 4), (1, 5, 12)],
        [(0, 4, 5), (1, 12, 19)],
        [(0, 5, 6), (1, 19, 20)],
        [(1, 20, 21)],
    ]


def scoring(index: int, prompt: int, max_tokens: int) -> Request:
    return Request(index, [7] * prompt, SamplingParams(max_tokens=max_tokens, prompt_logprobs=0), 0)


def score(step: list[Scheduled]) -> None:
    """What the engine does with the log-probabilities of a step."""
    for part in step:
        part.request.prompt_logprobs += [None] * len(part.scored)  # type: ignore[list-item]


def test_a_prompt_that_is_scored_goes_in_chunks() -> None:
    """So many positions a step may give log-probabilities; the others go on beside it, and its last row is free."""
    made = Scheduler(BlockPool(16), block_size=4, max_model_len=64, max_requests=4, token_budget=16, score_budget=3)
    for each in (request(0, 2, 9), scoring(1, 8, 2), scoring(2, 3, 1)):
        made.add(each)
    seen = []
    while any(r.id for r in (*made.running, *made.waiting)):
        step = made.schedule()
        seen.append([(part.request.id, part.start, part.stop, len(part.scored)) for part in step])
        score(step)
        run(made, step)
        made.retire()
    assert seen == [
        [(0, 0, 2, 0), (1, 0, 3, 3)],
        [(0, 2, 3, 0), (1, 3, 6, 3)],
        [(0, 3, 4, 0), (1, 6, 8, 1), (2, 0, 3, 2)],
        [(0, 4, 5, 0), (1, 8, 9, 0)],
    ]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 20), st.integers(0, 29))
def test_every_position_is_scored_once(prompt: int, budget: int, scores: int, known: int) -> None:
    """Also where the cache of a prompt that was scored in part has to be filled again."""
    made = Scheduler(
        BlockPool(40), block_size=1, max_model_len=40, max_requests=4, token_budget=budget, score_budget=scores
    )
    each = scoring(0, prompt, 1)
    each.prompt_logprobs += [None] * min(known, prompt - 1)  # type: ignore[list-item]
    made.add(each)
    positions = list(range(len(each.prompt_logprobs)))
    while not made.idle:
        step = made.schedule()
        assert step
        assert sum(len(part.scored) for part in step) <= scores
        positions += [position for part in step for position in part.scored]
        score(step)
        run(made, step)
        made.retire()
    assert positions == list(range(prompt - 1))


def test_one_answer_of_several_scores_the_prompt() -> None:
    asked = SamplingParams(n=2, prompt_logprobs=1)
    first, second = (Request(sample, [7] * 4, asked, 0, sample=sample) for sample in (0, 1))
    assert [len(Scheduled(r, 0, 4).scored) for r in (first, second)] == [3, 0]


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
    assert (made.running, made.waiting) == ([running], [waiting, last])
    made.finish(waiting, "abort")
    made.finish(running, "abort")
    assert (running.finish_reason, waiting.finish_reason, running.blocks) == ("abort", "abort", [])
    assert made.pool.free == 4
    assert [part.request for part in made.schedule()] == [last]
