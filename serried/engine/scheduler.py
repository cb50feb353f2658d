"""Scheduler: which requests take part in a step, and with how many tokens. Pure: no tensors, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serried.engine.request import Request
from serried.errors import InputError
from serried.kv.pool import BlockPool


@dataclass(frozen=True)
class Scheduled:
    """A request's part of a step: its tokens at positions [start, stop). `samples`: they end with its last token."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        return self.stop == self.request.length


class Scheduler:
    """First come, first served, within a budget of tokens a step; prompts longer than the budget go in chunks.

    A request is admitted when all blocks that it may ever need are free, so nothing that runs can be stranded.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_model_len: int, max_requests: int, token_budget: int
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_requests = max_requests
        self.token_budget = token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

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
        if self._blocks_for(request) > self.pool.blocks:
            raise InputError(
                f"the request needs {self._blocks_for(request)} cache blocks of {self.block_size} tokens; there are "
                f"{self.pool.blocks} (--kv-cache-memory)"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """The requests of the next step, in the order in which they were admitted."""
        self._admit()
        budget = self.token_budget
        step = []
        for request in self.running:
            count = min(request.length - request.computed, budget)
            if count:
                step.append(Scheduled(request, request.computed, request.computed + count))
                budget -= count
        return step

    def retire(self) -> list[Request]:
        """Take out the requests that have finished and free their blocks."""
        done = [request for request in self.running if request.finish_reason]
        self.running = [request for request in self.running if not request.finish_reason]
        for request in done:
            self.pool.give_back(request.blocks)
            request.blocks = []
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

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_requests:
            blocks = self.pool.take(self._blocks_for(self.waiting[0]))
            if blocks is None:
                return
            request = self.waiting.popleft()
            request.blocks = blocks
            self.running.append(request)

    def _blocks_for(self, request: Request) -> int:
        return -(-request.longest // self.block_size)
