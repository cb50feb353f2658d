"""A chat's text as what it means: reasoning, content, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass

from serried.server.answers import Piece
from serried.server.chat_request import Chat
from serried.text.reasoning import Piece as Part
from serried.text.reasoning import ReasoningSplitter
from serried.text.tools import CallStart, Content, Event, joined


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


ChatEvent = Reasoning | Event


class ChatReader:
    """One sample's output. `calls`: how many calls of tools have begun."""

    def __init__(self, chat: Chat) -> None:
        self.calls = 0
        self._one_call = chat.one_call
        self._splitter = ReasoningSplitter(chat.reasoning_open) if chat.reasoning else None
        self._parser = chat.tool_format.parser(chat.tool_names) if chat.tool_format else None

    def take(self, piece: Piece) -> list[ChatEvent]:
        """What a piece means."""
        events = self._read(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            events += self._finish()
        return events

    def finish_reason(self, reason: str) -> str:
        """OpenAI's reason: calls of tools are one of their own."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _read(self, text: str) -> list[ChatEvent]:
        if self._splitter is None:
            return self._answer(text)
        return self._parts(self._splitter.add(text))

    def _parts(self, parts: list[Part]) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for part in parts:
            events += [Reasoning(part.text)] if part.is_reasoning else self._answer(part.text)
        return events

    def _answer(self, text: str) -> list[ChatEvent]:
        return self._counted(self._parser.add(text) if self._parser else [Content(text)])

    def _finish(self) -> list[ChatEvent]:
        events = self._parts(self._splitter.finish()) if self._splitter else []
        return events + (self._counted(self._parser.finish()) if self._parser else [])

    def _counted(self, events: list[Event]) -> list[ChatEvent]:
        kept: list[ChatEvent] = []
        for event in joined(events):
            if not isinstance(event, Content) and self._one_call and event.index > 0:
                continue
            self.calls += isinstance(event, CallStart)
            kept.append(event)
        return kept
