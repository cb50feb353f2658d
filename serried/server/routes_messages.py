"""/v1/messages: Anthropic's interface."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from serried.server.answers import Piece
from serried.server.body import JsonRoute
from serried.server.chat_output import ChatEvent, ChatReader, Reasoning
from serried.server.chat_request import Chat, prepare_chat, template_tools
from serried.server.errors import as_api_error, error_body, renamed
from serried.server.json_response import json_response
from serried.server.messages_request import RENAMED, as_chat
from serried.server.openapi import STREAMED
from serried.server.prompts import encode_messages
from serried.server.protocol_messages import CountRequest, MessagesRequest
from serried.server.replies import Pieces, Reply
from serried.server.sse import event
from serried.server.state import ServerState, new_id, state_of
from serried.server.usage import Usage
from serried.text.tools import CallArguments, CallStart, Content

router = APIRouter(route_class=JsonRoute)
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    arrived = time.monotonic()
    state = state_of(request)
    model = state.check_model(body.model)
    with renamed(RENAMED):
        chat = await prepare_chat(state, as_chat(body, state.thinking_switches), request)
    reply = _Reply(state, model, chat)
    return await reply.send(request, state, [chat.question], arrived=arrived, stream=bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """How many tokens a prompt has."""
    state = state_of(request)
    state.check_model(body.model)
    with renamed(RENAMED):
        chat = as_chat(body, state.thinking_switches)
        tools = template_tools(chat.tools) if chat.tool_choice != "none" else None
        ids = await encode_messages(
            state,
            chat.messages,
            tools=tools,
            template_kwargs=chat.chat_template_kwargs,
            continue_final_message=chat.continue_final_message is True,
        )
    return json_response({"input_tokens": len(ids)})


class _Reply(Reply):
    """One request's message, whole or streamed: blocks, of which one is open at a time."""

    def __init__(self, state: ServerState, model: str, chat: Chat) -> None:
        self._state = state
        self._reader = ChatReader(chat)
        self._usage = Usage(len(chat.question.prompt))
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._usage.prompt, "output_tokens": 0},
        }

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The message when it is complete."""
        async for _ in self._events(pieces):
            pass
        return {**self._message, "content": [_finished(block) for block in self._blocks]}

    async def stream(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """The events, named as their type."""
        async for data in self._events(pieces):
            yield event(data, data["type"])

    def failed(self, error: BaseException) -> bytes:
        """In Anthropic's words."""
        return event(error_body(as_api_error(error), anthropic=True), "error")

    async def _events(self, pieces: Pieces) -> AsyncGenerator[dict[str, Any], None]:
        begun = False
        try:
            async for piece in pieces:
                self._usage.take(piece)
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": dict(self._message)}
                for each in self._reader.take(piece):
                    for data in self._take(each):
                        yield data
                if piece.finish_reason:
                    self._finish(piece)
        finally:
            await pieces.aclose()
        for data in self._close():
            yield data
        ended = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": self._message["usage"]}
        yield {"type": "message_stop"}

    def _take(self, each: ChatEvent) -> Iterator[dict[str, Any]]:
        match each:
            case Reasoning():
                yield from self._text("thinking", "thinking_delta", each.text)
            case Content():
                yield from self._text("text", "text_delta", each.text)
            case CallStart():
                id = self._state.tools.new_id() if self._state.tools else new_id("toolu_")
                yield from self._start({"type": "tool_use", "id": id, "name": each.name, "input": {}})
            case CallArguments():
                self._blocks[-1]["json"] = self._blocks[-1].get("json", "") + each.text
                yield self._delta({"type": "input_json_delta", "partial_json": each.text})

    def _text(self, kind: str, delta: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self._blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: "", **more})
        self._blocks[-1][kind] += text
        yield self._delta({"type": delta, kind: text})

    def _start(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(dict(block))
        self._open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _finish(self, piece: Piece) -> None:
        reason = self._reader.finish_reason(piece.finish_reason or "stop")
        by_sequence = reason == "stop" and isinstance(piece.stop_reason, str)
        self._message["stop_reason"] = "stop_sequence" if by_sequence else _REASONS.get(reason, "end_turn")
        self._message["stop_sequence"] = piece.stop_reason if by_sequence else None
        cached = min(self._usage.cached, self._usage.prompt)
        self._message["usage"] = {
            "input_tokens": self._usage.prompt - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.completion,
        }


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    """A block as it stands in a whole message; the input of a call that was cut off is empty."""
    if block["type"] != "tool_use":
        return block
    try:
        given = json.loads(block.get("json", "{}"))
    except ValueError:
        given = {}
    return {
        "type": "tool_use",
        "id": block["id"],
        "name": block["name"],
        "input": given if isinstance(given, dict) else {},
    }
