"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from serried.server.answers import Piece
from serried.server.body import JsonRoute
from serried.server.chat_output import ChatEvent, ChatReader, Reasoning
from serried.server.chat_request import Chat, prepare_chat
from serried.server.logprobs import chat_logprobs, prompt_logprobs
from serried.server.openapi import STREAMED
from serried.server.protocol_chat import ChatRequest
from serried.server.replies import ChoicesReply, Pieces
from serried.server.state import ServerState, new_id, state_of
from serried.text.tools import CallArguments, CallStart, Content

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    arrived = time.monotonic()
    state = state_of(request)
    model = state.check_model(body.model)
    chat = await prepare_chat(state, body, request)
    reply = _Reply(state, body, model, chat)
    return await reply.send(request, state, [chat.question], arrived=arrived, stream=bool(body.stream))


class _Reply(ChoicesReply):
    """One request's reply, whole or streamed."""

    def __init__(self, state: ServerState, body: ChatRequest, model: str, chat: Chat) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__("chatcmpl-", kind, model, body, [chat.question])
        self._state, self._body, self._chat = state, body, chat
        self._readers = [ChatReader(chat) for _ in range(chat.question.params.n)]
        self._begun: set[int] = set()
        self._prompt_scores: list[Any] | None = None

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The response when all samples have ended."""
        messages = [_Message(self._state) for _ in self._readers]
        async for piece in pieces:
            messages[piece.index].take(self._take(piece), self._readers[piece.index], piece, self._scores(piece))
        choices = [message.choice(index, self._body) for index, message in enumerate(messages)]
        reply: dict[str, Any] = {**self.head, "choices": choices, "usage": self.usage.to_dict()}
        if self._prompt_scores is not None:
            reply["prompt_logprobs"] = self._prompt_scores
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = list(self._chat.question.prompt)
        return reply

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A sample's first one gives the role. Scores of tokens go with the first of a piece."""
        deltas = [_delta(each, self._state) for each in self._take(piece)]
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            deltas.insert(0, {"role": "assistant", "content": ""})
        scores = self._scores(piece)
        with_ids = self._body.return_token_ids and piece.tokens
        if (scores is not None or piece.finish_reason or with_ids) and not deltas:
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices:
            choices[0]["logprobs"] = scores
        if piece.finish_reason:
            choices[-1]["finish_reason"] = self._readers[piece.index].finish_reason(piece.finish_reason)
            choices[-1]["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids and choices:
            choices[0]["token_ids"] = piece.tokens
        return choices

    def _take(self, piece: Piece) -> list[ChatEvent]:
        before = self.usage.completion
        self.usage.take(piece)
        if piece.prompt_logprobs is not None:
            self._prompt_scores = prompt_logprobs(piece.prompt_logprobs, self._state.tokenizer)
        events = self._readers[piece.index].take(piece)
        if events and all(isinstance(each, Reasoning) for each in events):
            self.usage.reasoning += self.usage.completion - before
        return events

    def _scores(self, piece: Piece) -> dict[str, Any] | None:
        if not self._body.logprobs or not piece.tokens:
            return None
        return chat_logprobs(piece.tokens, piece.logprobs, self._state.tokenizer, self._body.top_logprobs or 0)


class _Message:
    """A sample's message as it grows."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._scores: list[Any] = []
        self._tokens: list[int] = []
        self._end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}

    def take(
        self, events: Sequence[ChatEvent], reader: ChatReader, piece: Piece, scores: dict[str, Any] | None
    ) -> None:
        for each in events:
            match each:
                case Reasoning():
                    self._reasoning.append(each.text)
                case Content():
                    self._content.append(each.text)
                case CallStart():
                    self._calls.append(_call(each, self._state))
                case CallArguments():
                    self._calls[-1]["function"]["arguments"] += each.text
        self._scores += scores["content"] if scores else []
        self._tokens += piece.tokens
        if piece.finish_reason:
            reason = reader.finish_reason(piece.finish_reason)
            self._end = {"finish_reason": reason, "stop_reason": piece.stop_reason}

    def choice(self, index: int, body: ChatRequest) -> dict[str, Any]:
        """OpenAI's choice; reasoning under both names that clients know."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if self._reasoning and body.include_reasoning is not False:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": self._scores} if body.logprobs else None,
            **self._end,
        }
        if body.return_token_ids:
            choice["token_ids"] = self._tokens
        return choice


def _call(start: CallStart, state: ServerState) -> dict[str, Any]:
    id = state.tools.new_id() if state.tools else new_id("call_")
    return {"id": id, "type": "function", "function": {"name": start.name, "arguments": ""}}


def _delta(each: ChatEvent, state: ServerState) -> dict[str, Any]:
    """An event as the `delta` of a chunk."""
    match each:
        case Reasoning():
            return {"reasoning_content": each.text, "reasoning": each.text}
        case Content():
            return {"content": each.text}
        case CallStart():
            return {"tool_calls": [{"index": each.index, **_call(each, state)}]}
        case CallArguments():
            return {"tool_calls": [{"index": each.index, "function": {"arguments": each.text}}]}
