"""EngineCore: schedule, execute, update. No I/O; it lives in the process of rank 0."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from serried.backends.step import StepInput
from serried.engine.batch import build_step
from serried.engine.request import Request
from serried.engine.scheduler import Scheduler
from serried.engine.worker import StepOutput
from serried.errors import InputError
from serried.sampling_params import SamplingParams


class StepExecutor(Protocol):
    """What the core asks of the ranks: run a step everywhere, give back what rank 0 has decided."""

    def execute(self, step: StepInput) -> StepOutput: ...


@dataclass(frozen=True)
class NewToken:
    """What a step gave one request: its next token, and why it ended, if it did."""

    request: Request
    token: int
    finish_reason: str | None


class EngineCore:
    """Requests in, tokens out, a step at a time."""

    def __init__(
        self,
        executor: StepExecutor,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.steps = 0
        self._ids = count()

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt of token ids; InputError where it can never run."""
        for token in (*prompt, *params.stop_token_ids):
            if not 0 <= token < self.vocab_size:
                raise InputError(f"token id {token} is not in the vocabulary of {self.vocab_size}")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request = Request(next(self._ids), list(prompt), params, seed, self.eos_ids)
        self.scheduler.add(request)
        return request

    def step(self) -> list[NewToken]:
        """Run one step; the tokens that it gave, and which requests they ended."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        self.steps += 1
        output = self.executor.execute(build_step(scheduled, self.scheduler.block_size))
        chosen = iter(output.tokens)
        tokens = []
        for part in scheduled:
            samples = part.samples
            part.request.computed = part.stop
            if samples:
                token = next(chosen)
                part.request.append(token)
                tokens.append(NewToken(part.request, token, part.request.finish_reason))
        self.scheduler.retire()
        return tokens

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside: a stop string was found, or its client went away."""
        if not request.finish_reason:
            self.scheduler.finish(request, reason)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle
