"""A response of /v1/responses as it grows: its output items, and the events that tell of each change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from serried.server.chat_output import ChatEvent, Reasoning
from serried.server.state import new_id
from serried.server.usage import Usage
from serried.text.tools import CallArguments, CallStart, Content

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Makes output items of chat events. One item is open at a time; `events` of each change are numbered."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self.response: dict[str, Any] = {**head, "status": "in_progress", "output": [], "usage": None}
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._scores: list[Any] = []

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def take(self, event: ChatEvent, scores: list[Any], new_call_id: str) -> Iterator[dict[str, Any]]:
        """Events of one change. scores: of its tokens, where asked for. new_call_id: for a call that begins."""
        match event:
            case Reasoning():
                yield from self._text("reasoning", event.text, [])
            case Content():
                yield from self._text("message", event.text, scores)
            case CallStart():
                yield from self._close("completed")
                call = {"type": "function_call", "call_id": new_call_id, "name": event.name, "arguments": ""}
                yield from self._add({"id": new_id("fc_"), **call})
            case CallArguments():
                item = self._item
                item["arguments"] += event.text
                yield self._at("response.function_call_arguments.delta", delta=event.text)

    def finish(self, reason: str, usage: Usage) -> Iterator[dict[str, Any]]:
        """The last events. reason: OpenAI's reason of a chat."""
        complete = reason in ("stop", "tool_calls")
        status = "completed" if complete else "incomplete"
        yield from self._close(status)
        response = self.response
        response["status"] = status
        if not complete:
            why = "max_output_tokens" if reason == "length" else reason
            response["incomplete_details"] = {"reason": why}
        response["completed_at"] = time.time() if complete else None
        response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": min(usage.cached, usage.prompt), "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        yield self._event(f"response.{status}", response=self._snapshot())

    def fail(self, message: str) -> Iterator[dict[str, Any]]:
        """The events of a failure in the midst."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=self._snapshot())

    def _text(self, kind: str, text: str, scores: list[Any]) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            item: dict[str, Any] = {"id": new_id("msg_" if kind == "message" else "rs_"), "type": kind, "content": []}
            yield from self._add({**item, **({"role": "assistant"} if kind == "message" else {"summary": []})})
            part = self._part(kind, "")
            yield self._at("response.content_part.added", content_index=0, part=part)
            self._item["content"].append(self._part(kind, ""))
        self._item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": scores} if kind == "message" else {}
        if kind == "message":
            self._scores += scores
        yield self._at(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **more)

    def _add(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open = {**item, "status": "in_progress"}
        self.response["output"].append(self._open)
        yield self._at("response.output_item.added", with_id=False, item=_copy(self._open))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._at("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            kind, part = item["type"], item["content"][0]
            more: dict[str, Any] = {}
            if kind == "message":
                part["logprobs"], self._scores = self._scores, []
                more = {"logprobs": part["logprobs"]}
            yield self._at(f"response.{_PARTS[kind]}.done", content_index=0, text=part["text"], **more)
            yield self._at("response.content_part.done", content_index=0, part=dict(part))
        yield self._at("response.output_item.done", with_id=False, item=_copy(item))
        self._open = None

    @property
    def _item(self) -> dict[str, Any]:
        if self._open is None:
            raise RuntimeError("no item is open")
        return self._open

    @staticmethod
    def _part(kind: str, text: str) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
        return {"type": _PARTS[kind], "text": text, **more}

    def _at(self, kind: str, with_id: bool = True, **more: Any) -> dict[str, Any]:
        place = {"item_id": self._item["id"]} if with_id else {}
        return self._event(kind, output_index=len(self.response["output"]) - 1, **place, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [_copy(item) for item in self.response["output"]]}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    copy = dict(item)
    if "content" in copy:
        copy["content"] = [dict(part) for part in copy["content"]]
    return copy
