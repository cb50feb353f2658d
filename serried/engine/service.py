"""EngineService: an EngineCore that takes requests as messages and gives its tokens as messages. No sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from serried.engine.core import EngineCore, NewToken
from serried.engine.executor import Executor
from serried.engine.interface import EngineStats, RankStats, TokenDelta
from serried.engine.request import Request
from serried.engine.wire import Abort, Add, Alive, Deltas, Figures, FromEngine, Probe, Refused
from serried.engine.worker import RankTimes
from serried.errors import InputError
from serried.sampling_params import SamplingParams
from serried.text.structured import Grammar, GrammarVocabulary
from serried.text.tokenizer import Tokenizer

STATS_EVERY = 0.25  # seconds
RANKS_EVERY = 1.0  # seconds between two looks at what the other ranks do: they have to say it


@dataclass
class _Samples:
    """One Add's requests that still run, by the index of the sample."""

    running: dict[int, Request] = field(default_factory=dict)
    answered: bool = False  # whether its first delta is out


class EngineService:
    """Turns messages into requests of a core, and the core's tokens into messages."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        tokenizer: Tokenizer | None,
        max_waiting: int,
        send: Callable[[FromEngine], None],
    ) -> None:
        self.tokenizer = tokenizer
        self.core = core
        self.executor = executor
        self.max_waiting = max_waiting
        self._send = send
        self._samples: dict[str, _Samples] = {}
        self._owners: dict[int, tuple[str, int]] = {}  # by request: Add and index
        self._probes: dict[int, int] = {}  # by request: the probe's number
        self._totals = {"prompt_tokens": 0, "generated_tokens": 0}
        self._step_seconds = 0.0
        self._figures_at = self._ranks_at = 0.0
        self._started = time.monotonic()
        self._ranks: list[RankTimes] = []
        self._grammars: GrammarVocabulary | None = None  # made when the first request wants it

    @property
    def idle(self) -> bool:
        return self.core.idle

    def take(self, message: Add | Abort | Probe) -> None:
        """Act on a message."""
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            self._abort(message.id, message.index)
            self.report(force=self.core.idle)
        else:
            request = self.core.add([0], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            request.may_reuse = False
            self._probes[request.id] = message.number

    def step(self) -> None:
        """Run one step, if there is something to do, and send what it gave."""
        if self.idle:
            self.report()
            return
        start = time.monotonic()
        tokens = self.core.step()
        self._step_seconds += time.monotonic() - start
        items = [item for new in tokens if (item := self._delta(new))]
        if items:
            self._send(Deltas(items))
        self.report(force=self.core.idle)

    def report(self, force: bool = False) -> None:
        """Send the figures, if it is time."""
        now = time.monotonic()
        if not force and now - self._figures_at < STATS_EVERY:
            return
        if now - self._ranks_at >= RANKS_EVERY:
            self._ranks, self._ranks_at = self.executor.rank_times(), time.monotonic()
        self._figures_at = now
        self._send(Figures(self.stats()))

    def stats(self) -> EngineStats:
        """The figures of now."""
        scheduler, counters = self.core.scheduler, self.core.scheduler.counters
        uptime = self._ranks_at - self._started  # when the ranks said it: what they did since is not idleness
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_used=scheduler.pool.blocks - scheduler.pool.free,
            blocks_total=scheduler.pool.blocks,
            prefix_queries=counters.queried,
            prefix_hits=counters.hit,
            preemptions=counters.preemptions,
            prompt_tokens=self._totals["prompt_tokens"],
            generated_tokens=self._totals["generated_tokens"],
            steps=self.core.steps,
            step_seconds=self._step_seconds,
            ranks=[
                RankStats(rank, times.compute, times.collective, max(0.0, uptime - times.compute - times.collective))
                for rank, times in enumerate(self._ranks)
            ],
        )

    def _add(self, message: Add) -> None:
        waiting = len(self.core.scheduler.waiting)
        if waiting >= self.max_waiting and message.outputs is None:  # what runs again after a restart was let in once
            self._send(Refused(message.id, "the queue is full", waiting))
            return
        if message.id in self._samples:
            self._send(Refused(message.id, f"request_id: {message.id!r} is in use"))
            return
        samples = self._samples[message.id] = _Samples(answered=message.outputs is not None)
        try:
            begun = message.outputs
            for index in range(message.params.n) if begun is None else begun:
                request = self.core.add(
                    message.prompt,
                    message.params,
                    sample=index,
                    bad_words=message.bad_words,
                    priority=message.priority,
                    cache_salt=message.cache_salt,
                    grammar=self._grammar(message),
                    output=() if begun is None else begun[index],
                )
                samples.running[index] = request
                self._owners[request.id] = (message.id, index)
        except InputError as error:
            self._abort(message.id, None)
            self._send(Refused(message.id, str(error)))
            return
        self._totals["prompt_tokens"] += 0 if begun else len(message.prompt)

    def _grammar(self, message: Add) -> Grammar | None:
        if message.grammar is None:
            return None
        if self._grammars is None:
            if self.tokenizer is None:
                raise InputError("the model has no tokenizer, so its output cannot be held to a grammar")
            self._grammars = GrammarVocabulary(self.tokenizer, self.core.vocab_size, self.core.eos_ids)
        return self._grammars.compile(message.grammar)

    def _abort(self, id: str, index: int | None) -> None:
        samples = self._samples.get(id)
        if samples is None:
            return
        chosen: Iterable[int] = list(samples.running) if index is None else [index]
        for each in chosen:
            request = samples.running.pop(each, None)
            if request is not None:
                del self._owners[request.id]
                self.core.finish(request, "abort")
        if not samples.running:
            del self._samples[id]

    def _delta(self, new: NewToken) -> tuple[str, TokenDelta] | None:
        request = new.request
        number = self._probes.pop(request.id, None)
        if number is not None:
            self._send(Alive(number))
            return None
        owner = self._owners.get(request.id)
        if owner is None:
            return None
        id, index = owner
        samples = self._samples[id]
        self._totals["generated_tokens"] += 1
        first, samples.answered = not samples.answered, True
        delta = TokenDelta(
            index=index,
            tokens=() if new.token is None else (new.token,),
            logprobs=None if new.logprobs is None else (new.logprobs,),
            prompt_logprobs=(None, *request.prompt_logprobs) if first and request.scores_prompt else None,
            finish_reason=new.finish_reason,  # type: ignore[arg-type]
            stop_reason=_stop_reason(new),
            cached_tokens=request.cached if len(request.output) == 1 else 0,
        )
        if new.finish_reason:
            del samples.running[index], self._owners[request.id]
            if not samples.running:
                del self._samples[id]
        return id, delta


def _stop_reason(new: NewToken) -> int | str | None:
    if new.token is None:
        return "no token is allowed"
    return new.token if new.finish_reason == "stop" and new.token in new.request.params.stop_token_ids else None
