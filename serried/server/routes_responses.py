"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from serried.server.answers import Piece
from serried.server.body import JsonRoute
from serried.server.chat_output import ChatReader, Reasoning
from serried.server.chat_request import Chat, prepare_chat
from serried.server.errors import as_api_error, renamed
from serried.server.logprobs import chat_logprobs
from serried.server.openapi import STREAMED
from serried.server.protocol_responses import ResponsesRequest
from serried.server.replies import Pieces, Reply
from serried.server.responses_output import ResponseWriter
from serried.server.responses_request import RENAMED, as_chat
from serried.server.sse import event
from serried.server.state import ServerState, new_id, state_of
from serried.server.usage import Usage
from serried.text.tools import CallStart

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=STREAMED)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, in OpenAI's newer words."""
    arrived = time.monotonic()
    state = state_of(request)
    model = state.check_model(body.model)
    with renamed(RENAMED):
        chat = await prepare_chat(state, as_chat(body), request)
    reply = _Reply(state, body, model, chat)
    return await reply.send(request, state, [chat.question], arrived=arrived, stream=bool(body.stream))


class _Reply(Reply):
    """One request's reply, whole or streamed."""

    def __init__(self, state: ServerState, body: ResponsesRequest, model: str, chat: Chat) -> None:
        self._state = state
        self._reader = ChatReader(chat)
        self._usage = Usage(len(chat.question.prompt))
        self._top = chat.question.params.logprobs
        self._writer = ResponseWriter(_head(body, model, chat))

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The response when it is complete."""
        async for _ in self._events(pieces):
            pass
        return self._writer.response

    async def stream(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """The events, named as their type."""
        async for data in self._events(pieces):
            yield event(data, data["type"])

    def failed(self, error: BaseException) -> bytes:
        """The last events after an error in the midst."""
        return b"".join(event(data, data["type"]) for data in self._writer.fail(as_api_error(error).message))

    async def _events(self, pieces: Pieces) -> AsyncGenerator[dict[str, Any], None]:
        begun, reason = False, "stop"
        try:
            async for piece in pieces:
                if not begun:
                    begun = True
                    for data in self._writer.begin():
                        yield data
                for data in self._take(piece):
                    yield data
                if piece.finish_reason:
                    reason = self._reader.finish_reason(piece.finish_reason)
        finally:
            await pieces.aclose()
        for data in self._writer.finish(reason, self._usage):
            yield data

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        self._usage.take(piece)
        events = self._reader.take(piece)
        if events and all(isinstance(each, Reasoning) for each in events):
            self._usage.reasoning += len(piece.tokens)
        scores: list[Any] = []
        if self._top is not None:
            scores = chat_logprobs(piece.tokens, piece.logprobs, self._state.tokenizer, self._top)["content"]
        made = []
        for number, each in enumerate(events):
            id = self._state.tools.new_id() if isinstance(each, CallStart) and self._state.tools else ""
            made += list(self._writer.take(each, scores if number == 0 else [], id))
        return made


def _head(body: ResponsesRequest, model: str, chat: Chat) -> dict[str, Any]:
    """What a response says of its request."""
    params = chat.question.params
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning or {},
        "store": False,
        "temperature": params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [{"strict": False, "parameters": None, **tool} for tool in body.tools or ()],
        "top_p": params.top_p,
        "top_logprobs": params.logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }
