"""Tokens in, text out: what each sample of a request says, until a stop string or the engine ends it."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from serried.engine.interface import GrammarSpec, TokenDelta, TokenLogprobs
from serried.errors import EngineDead
from serried.sampling_params import SamplingParams
from serried.server.metrics import RequestTimes
from serried.server.state import ServerState, new_id
from serried.text.answer import AnswerText
from serried.text.tokenizer import Tokenizer


@dataclass
class Piece:
    """What is new of one sample. text may be empty: of tokens whose text is not certain yet.

    index: of the sample among all of the request's prompts. prompt: number of the prompt. offsets: where each
    token's text begins in the sample's text. finish_reason, stop_reason: with its last piece. cached_tokens: of the
    prompt, found in the prefix cache; with the first piece.
    """

    index: int
    prompt: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Question:
    """One prompt, and what is wanted of it. number: among the request's prompts."""

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    grammar: GrammarSpec | None = None
    priority: int = 0
    cache_salt: str | None = None


class Sample:
    """One sample's text as it grows."""

    def __init__(self, index: int, prompt: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.index, self.prompt = index, prompt
        self.finished = False
        self._text = AnswerText(tokenizer, params)
        self._offset = Offset(tokenizer) if tokenizer and params.logprobs is not None else None

    def take(self, delta: TokenDelta) -> Piece:
        """Take the sample's next tokens, none of which count after a stop string."""
        piece = Piece(self.index, self.prompt, cached_tokens=delta.cached_tokens)
        piece.prompt_logprobs = delta.prompt_logprobs
        for number, token in enumerate(delta.tokens):
            last = number == len(delta.tokens) - 1
            piece.tokens.append(token)
            if delta.logprobs is not None:
                piece.logprobs.append(delta.logprobs[number])
            if self._offset is not None:
                piece.offsets.append(self._offset.take(token))
            piece.text += self._text.take(token, delta.finish_reason if last else None)
            if self._text.stopped is not None:
                break
        if not delta.tokens and delta.finish_reason:
            piece.text = self._text.take(None, delta.finish_reason)
        if self._text.stopped is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._text.stopped
        else:
            piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        self.finished = piece.finish_reason is not None
        return piece


class Offset:
    """Where in the text each token begins, in characters; a token inside a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def take(self, token: int) -> int:
        start = self._length
        if self._tokenizer is not None and token not in self._tokenizer.control_ids:
            self._length += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return start


async def answer(state: ServerState, question: Question, arrived: float) -> AsyncGenerator[Piece, None]:
    """The pieces of all samples of a prompt. Closing it ends them in the engine too.

    arrived: when the request did, by time.monotonic(). An engine that fails -> EngineDead.
    """
    params, engine, times = question.params, state.engine, RequestTimes(state.metrics, arrived)
    first = question.number * params.n
    samples = [Sample(first + each, question.number, params, state.tokenizer) for each in range(params.n)]
    request_id = new_id("req-")
    state.metrics.prompt.observe(len(question.prompt))
    deltas = engine.generate(
        question.prompt,
        params,
        request_id=request_id,
        priority=question.priority,
        cache_salt=question.cache_salt,
        grammar=question.grammar,
    )
    try:
        async for delta in deltas:
            sample = samples[delta.index]
            if sample.finished:
                continue
            if delta.tokens:
                times.tokens(delta.index, len(delta.tokens), time.monotonic())
            piece = sample.take(delta)
            piece.cached_tokens *= delta.index == 0  # the samples share their prompt
            if piece.finish_reason == "error":
                raise EngineDead(str(piece.stop_reason or "the engine ended this request"))
            if piece.finish_reason is not None:
                times.finished(delta.index, piece.finish_reason)
                if not delta.finish_reason:
                    await engine.abort(request_id, delta.index)
            yield piece
            if all(each.finished for each in samples):
                return
        raise EngineDead("the engine ended this request before it was finished")
    finally:
        await deltas.aclose()
        for number, sample in enumerate(samples):
            if not sample.finished:
                times.finished(number, "abort")
        state.metrics.e2e.observe(time.monotonic() - arrived)
