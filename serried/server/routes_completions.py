"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from serried.engine.interface import TokenLogprobs
from serried.sampling_params import SamplingParams
from serried.server.answers import Offset, Piece, Question
from serried.server.body import JsonRoute
from serried.server.errors import bad_request
from serried.server.logprobs import CompletionLogprobs, prompt_logprobs
from serried.server.openapi import STREAMED
from serried.server.prompts import encode_prompts
from serried.server.protocol_completions import CompletionRequest
from serried.server.questions import make_questions
from serried.server.replies import ChoicesReply, Pieces
from serried.server.sampling import output_room, sampling_params
from serried.server.state import ServerState, state_of
from serried.server.structure import check_grammar, grammar_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt."""
    arrived = time.monotonic()
    state = state_of(request)
    model = state.check_model(body.model)
    prompts = await encode_prompts(state, body.prompt, body.add_special_tokens is not False)
    wanted = grammar_of(body)
    params = [_params(state, body, prompt) for prompt in prompts]
    if wanted is not None:
        await check_grammar(state, *wanted)
    questions = make_questions(request, body, prompts, params, wanted[0] if wanted else None)
    reply = _Reply(state, body, model, questions)
    return await reply.send(request, state, questions, arrived=arrived, stream=bool(body.stream))


def _params(state: ServerState, body: CompletionRequest, prompt: Sequence[int]) -> SamplingParams:
    """The parameters of one prompt. Nothing but the prompt itself may be asked for: then one token is thrown away."""
    asked = 16 if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None:
        asked = min(asked, max(1, state.engine.model.max_model_len - len(prompt)))
    if asked == 0 and (body.echo or body.prompt_logprobs is not None):
        asked = 1
    model, config = state.engine.model, state.config
    room = output_room(asked, "max_tokens", len(prompt), "prompt", model, config)
    if state.tokenizer is None and (body.stop or body.bad_words):
        raise bad_request("stop: needs a tokenizer, which this server has not; give stop_token_ids", "stop")
    params = sampling_params(body, model, config, max_tokens=room, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        return replace(params, prompt_logprobs=body.logprobs)
    return params


class _Reply(ChoicesReply):
    """One request's reply, whole or streamed."""

    def __init__(self, state: ServerState, body: CompletionRequest, model: str, questions: Sequence[Question]) -> None:
        super().__init__("cmpl-", "text_completion", model, body, questions)
        self._state, self._body, self._questions = state, body, questions
        self._nothing = body.max_tokens == 0
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._echoes = [self._echo(each, texts[each.number]) for each in questions] if body.echo else []
        self._begun: set[int] = set()
        self._prompt_scores: dict[int, Sequence[TokenLogprobs | None]] = {}

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The response when all samples have ended."""
        choices: dict[int, dict[str, Any]] = {}
        async for piece in pieces:
            choice = self._choice(piece)
            if piece.index in choices:
                _join(choices[piece.index], choice)
            else:
                choices[piece.index] = choice
        ordered = [choices[index] for index in sorted(choices)]
        return {**self.head, "choices": ordered, "usage": self.usage.to_dict()}

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """A piece with nothing to tell gives none."""
        choice = self._choice(piece)
        if choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
            yield choice

    def _choice(self, piece: Piece) -> dict[str, Any]:
        """A piece as OpenAI's choice; the first one of a sample begins with the prompt where that is echoed."""
        body, tokenizer = self._body, self._state.tokenizer
        self.usage.take(piece)
        if piece.prompt_logprobs is not None:
            self._prompt_scores[piece.prompt] = piece.prompt_logprobs
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        text = "" if self._nothing else piece.text
        tokens = [] if self._nothing else piece.tokens
        echo = self._echoes[piece.prompt] if body.echo else ""
        scores = CompletionLogprobs(tokenizer, body.logprobs or 0)
        if body.logprobs is not None:
            if first and body.echo:
                self._add_prompt(scores, piece.prompt)
            for number, token in enumerate(tokens):
                offset = piece.offsets[number] if piece.offsets else 0
                scores.add(token, piece.logprobs[number], len(echo) + offset)
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": echo + text if first else text,
            "logprobs": scores.lists if body.logprobs is not None else None,
            "finish_reason": "length" if self._nothing and piece.finish_reason else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if body.prompt_logprobs is not None and first and piece.prompt in self._prompt_scores:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_scores[piece.prompt], tokenizer)
        if body.return_token_ids or tokenizer is None:
            choice["token_ids"] = list(tokens)
            if first:
                choice["prompt_token_ids"] = list(self._questions[piece.prompt].prompt)
        return choice

    def _add_prompt(self, scores: CompletionLogprobs, number: int) -> None:
        prompt, tokenizer = self._questions[number].prompt, self._state.tokenizer
        known = self._prompt_scores.get(number, ())
        offset = Offset(tokenizer)
        for token, score in zip(prompt, known, strict=True):
            scores.add(token, score, offset.take(token))

    def _echo(self, question: Question, text: Any) -> str:
        tokenizer = self._state.tokenizer
        if isinstance(text, str):
            return text
        return tokenizer.decode(question.prompt) if tokenizer is not None else ""


def _join(whole: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a later piece of the same sample."""
    whole["text"] += more["text"]
    for name in ("finish_reason", "stop_reason"):
        whole[name] = more[name] if more[name] is not None else whole[name]
    if whole["logprobs"] is not None:
        for name, values in more["logprobs"].items():
            whole["logprobs"][name] += values
    if "token_ids" in whole:
        whole["token_ids"] += more["token_ids"]
