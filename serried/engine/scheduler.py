"""Scheduler: which requests take part in a step, and with how many tokens. Pure: no tensors, no clock.

Continuous batching: a step has a budget of tokens. Requests that decode come first, so that a long prompt never holds
up an answer; what is left of the budget goes to prompts, in chunks where they are longer. Cache blocks are taken as
sequences grow. When they run out, the request that came last (and weighs least) is preempted: it loses its blocks, goes
back to the head of the queue, and is computed again later, to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from serried.engine.request import Request
from serried.errors import InputError
from serried.kv.pool import BlockPool
from serried.kv.prefix import PrefixChain


@dataclass(frozen=True)
class Scheduled:
    """A request's part of a step: its tokens at positions [start, stop). `samples`: they end with its last token."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        return self.stop == self.request.length

    @property
    def scored(self) -> range:
        """The positions whose logits give the log-probability of the prompt's next token."""
        request = self.request
        if not request.scores_prompt:
            return range(0)
        return range(max(self.start, len(request.prompt_logprobs)), min(self.stop, len(request.prompt) - 1))


@dataclass
class CacheCounters:
    """What became of prompts' tokens: `queried` for a known prefix, `hit`; and how often a request was preempted."""

    queried: int = 0
    hit: int = 0
    preemptions: int = 0


@dataclass
class _Step:
    """A step in the making: what is left of its budgets, and the parts that it has, by request."""

    tokens: int
    scores: int
    parts: dict[int, Scheduled] = field(default_factory=dict)
    preempted: set[int] = field(default_factory=set)

    def fit(self, request: Request, start: int) -> Scheduled:
        """As much of a request, from `start` on, as there is room for: it may be nothing."""
        part = Scheduled(request, start, min(request.length, start + self.tokens))
        if len(part.scored) > self.scores:
            part = Scheduled(request, start, max(start, part.scored.start + self.scores))
        return part

    def put(self, part: Scheduled) -> None:
        self.parts[part.request.id] = part
        self.tokens -= part.stop - part.start
        self.scores -= len(part.scored)

    def take_back(self, request: Request) -> None:
        """Its room stays unused: who is preempted in this step has come last."""
        self.parts.pop(request.id, None)
        self.preempted.add(request.id)


class Scheduler:
    """Lower priority first, then first come, first served, within a budget of tokens a step.

    prefix_caching: blocks of an equal prefix are used again. A request that could not run even alone is refused by add;
    so the first of the running requests always gets its blocks, and nothing waits for ever.
    score_budget: how many positions of prompts may give log-probabilities in a step. Their logits are as many rows of
    the vocabulary, so without a bound a long prompt would fill the memory.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_model_len: int,
        max_requests: int,
        token_budget: int,
        prefix_caching: bool = True,
        score_budget: int = 1 << 30,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_requests = max_requests
        self.token_budget = token_budget
        self.prefix_caching = prefix_caching
        self.score_budget = score_budget
        self.waiting: list[Request] = []  # in the order in which they will be admitted
        self.running: list[Request] = []  # in the order in which they were
        self.counters = CacheCounters()

    def add(self, request: Request) -> None:
        """Queue a request; InputError where it can never run."""
        total = len(request.prompt) + request.params.max_tokens
        if not request.prompt:
            raise InputError("the prompt is empty; give at least one token")
        if total > self.max_model_len:
            raise InputError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.params.max_tokens}: "
                f"{total} together, but the context holds {self.max_model_len} (--max-model-len)"
            )
        if self._blocks(request.longest) > self.pool.blocks:
            raise InputError(
                f"the request needs {self._blocks(request.longest)} cache blocks of {self.block_size} tokens; there "
                f"are {self.pool.blocks} (--kv-cache-memory)"
            )
        request.chain = PrefixChain(self.block_size, request.cache_salt)
        later = (i for i, other in enumerate(self.waiting) if other.priority > request.priority)
        self.waiting.insert(next(later, len(self.waiting)), request)

    def schedule(self) -> list[Scheduled]:
        """The requests of the next step, in the order in which they were admitted."""
        step = _Step(self.token_budget, self.score_budget)
        for request in self._by_need():
            part = step.fit(request, request.computed)
            if request.id not in step.preempted and part.stop > part.start and self._grow(part, step):
                step.put(part)
        if not step.preempted:
            self._admit(step)
        return [step.parts[request.id] for request in self.running if request.id in step.parts]

    def computed(self, part: Scheduled) -> None:
        """Note that a part has been executed: its K and V are in the cache."""
        request = part.request
        request.computed = part.stop
        if not self.prefix_caching:
            return
        known = len(request.chain.keys)
        full = part.stop // self.block_size
        if full > known:
            request.chain.extend(request.tokens(0, full * self.block_size))
        for i in range(part.start // self.block_size, full):
            self.pool.publish(request.blocks[i], request.chain.keys[i])

    def retire(self) -> list[Request]:
        """Take out the requests that have finished and free their blocks."""
        done = [request for request in self.running if request.finish_reason]
        self.running = [request for request in self.running if not request.finish_reason]
        for request in done:
            self._release(request)
        return done

    def finish(self, request: Request, reason: str) -> None:
        """End a request that waits or runs, before its time."""
        request.finish_reason = reason
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.retire()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def _by_need(self) -> Iterator[Request]:
        """Running requests: those that decode, then those whose prompt is not through."""
        running = list(self.running)
        yield from (request for request in running if request.length - request.computed == 1)
        yield from (request for request in running if request.length - request.computed != 1)

    def _grow(self, part: Scheduled, step: _Step) -> bool:
        """Give a running request the blocks for its part, preempting others or, in the end, itself."""
        request = part.request
        missing = self._blocks(part.stop) - len(request.blocks)
        while missing > 0:
            blocks = self.pool.take(missing)
            if blocks is not None:
                request.blocks += blocks
                return True
            victim = max(self.running, key=lambda other: (other.priority, self.running.index(other)))
            self._preempt(victim)
            step.take_back(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.computed = 0
        self.counters.preemptions += 1
        before = (i for i, other in enumerate(self.waiting) if other.priority >= request.priority)
        self.waiting.insert(next(before, len(self.waiting)), request)

    def _admit(self, step: _Step) -> None:
        while self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            found = self._known_prefix(request)
            start = len(found) * self.block_size
            part = step.fit(request, start)
            if part.stop == part.start:
                return
            # Room for all of its tokens, though they may take several steps; and those that run may each want a block
            # soon: who comes in must not push one of them out, or be pushed out himself half-way.
            if self._blocks(request.length) - len(found) + len(self.running) > self.pool.available(found):
                return
            missing = self._blocks(part.stop) - len(found)
            self.waiting.pop(0)
            self.pool.share(found)
            request.blocks = found + (self.pool.take(missing) or [])
            request.computed = request.cached = start
            self.counters.queried += request.length
            self.counters.hit += start
            self.running.append(request)
            step.put(part)

    def _known_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of a request; its last token is always computed, for the logits after it."""
        if not self.prefix_caching or not request.may_reuse:
            return []
        whole = (request.length - 1) // self.block_size
        request.chain.extend(request.tokens(0, request.length))
        return self.pool.find(request.chain.keys[:whole])

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)
