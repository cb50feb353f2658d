"""EngineCore: schedule, execute, update. No I/O; it lives in the process of rank 0."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from serried.backends.philox import sample_seed
from serried.backends.picks import NO_TOKEN
from serried.backends.step import StepInput
from serried.engine.batch import build_step
from serried.engine.edits import nothing_left
from serried.engine.interface import TokenLogprobs
from serried.engine.request import Grammar, Request
from serried.engine.scheduler import Scheduler
from serried.engine.worker import StepOutput
from serried.errors import InputError
from serried.sampling_params import SamplingParams, check_token_ids


class StepExecutor(Protocol):
    """What the core asks of the ranks: run a step everywhere, give back what rank 0 has decided."""

    def execute(self, step: StepInput) -> StepOutput: ...


@dataclass(frozen=True)
class NewToken:
    """What a step gave one request: its next token, and why it ended, if it did.

    token: None where none could be chosen, because all are forbidden; that ends the request (`abort`). logprobs: where
    asked for.
    """

    request: Request
    token: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None


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

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        sample: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        output: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> Request:
        """Queue a prompt of token ids; InputError where it can never run.

        sample: which of the params' `n` answers it shall be. bad_words: the params' as token ids. priority: lower ones
        come first. cache_salt: only requests with the same one share cached prefixes. output: tokens that it has
        already, from another engine. grammar: what the output must match, at its beginning.
        """
        check_token_ids("prompt", prompt, self.vocab_size)
        params.check_vocabulary(self.vocab_size)
        for word in bad_words:
            check_token_ids("bad_words", word, self.vocab_size)
        if nothing_left(params, (*params.stop_token_ids, *self.eos_ids), bad_words, self.vocab_size):
            raise InputError("bad_words and min_tokens: with them every token that is allowed is forbidden")
        seed = secrets.randbits(64) if params.seed is None else sample_seed(params.seed, sample)
        request = Request(
            next(self._ids),
            list(prompt),
            params,
            seed,
            self.eos_ids,
            sample,
            bad_words,
            priority=priority,
            cache_salt=cache_salt,
            grammar=grammar,
        )
        for token in output:
            request.advance(token)
        request.may_reuse = not request.scores_prompt  # a prompt's logits come only where it is computed
        self.scheduler.add(request)
        return request

    def step(self) -> list[NewToken]:
        """Run one step; the tokens that it gave, and which requests they ended."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        self.steps += 1
        output = self.executor.execute(build_step(scheduled, self.scheduler.block_size))
        chosen, scores = iter(output.tokens), iter(output.logprobs)
        tokens = []
        for part in scheduled:
            request, samples = part.request, part.samples
            request.prompt_logprobs += [next(scores) for _ in part.scored]
            self.scheduler.computed(part)
            if samples:
                logprobs = None if request.params.logprobs is None else next(scores)
                tokens.append(_give(request, next(chosen), logprobs))
        self.scheduler.retire()
        return tokens

    def finish(self, request: Request, reason: str) -> None:
        """End a request from outside: a stop string was found, or its client went away."""
        if not request.finish_reason:
            self.scheduler.finish(request, reason)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle


def _give(request: Request, token: int, logprobs: TokenLogprobs | None) -> NewToken:
    """Append the token that was chosen for a request."""
    if token == NO_TOKEN:
        request.finish_reason = "abort"
        return NewToken(request, None, "abort")
    request.append(token)
    return NewToken(request, token, request.finish_reason, logprobs)
