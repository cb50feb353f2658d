"""The format of Hermes and Qwen: `<tool_call>` around a JSON object, text before and between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from serried.text.tools import Content, Event, ToolParser, begun, call_id
from serried.text.tools_json import CallReader, call_schema, literal

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class Format:
    keeps_special = False  # they are added tokens, but not special ones

    def parser(self, names: Sequence[str]) -> ToolParser:
        return HermesParser()

    def grammar(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], many: bool) -> str:
        more = ' ("\\n" call)*' if many else ""
        opening, closing = literal(_OPEN, special), literal(_CLOSE, special)
        rules = f'start: call{more}\ncall: {opening} "\\n" body "\\n" {closing}\n'
        return f"{rules}body: %json {call_schema(tools, 'arguments')}"

    def new_id(self) -> str:
        return call_id()


class HermesParser:
    """Content until a tag; then an object, and the closing tag, which may be missing."""

    def __init__(self) -> None:
        self._held = ""  # text that may belong to a tag, or space that may stand before one
        self._calls = 0
        self._call: CallReader | None = None
        self._closing = False

    def add(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            events += self._take(character)
        return events

    def finish(self) -> list[Event]:
        call, self._call = self._call, None
        if call is not None:
            return [] if call.started else [Content(self._held + _OPEN + call.raw)]
        held, self._held = self._held, ""
        rest = held.strip()
        quiet = self._calls > 0 and (not rest or (self._closing and _CLOSE.startswith(rest)))
        return [Content("" if quiet else held)]

    def _take(self, character: str) -> list[Event]:
        if self._call is not None:
            return self._in_call(self._call, character)
        self._held += character
        if self._closing:
            return self._after_call()
        if self._held.endswith(_OPEN):
            self._held = self._held.removesuffix(_OPEN)
            self._call = CallReader(self._calls)
            return []
        return self._release()

    def _release(self) -> list[Event]:
        """Let go of what is surely content: all before the last space and the beginning of a tag."""
        tag = len(self._held) - begun(self._held, _OPEN)
        sure = len(self._held[:tag].rstrip())
        if sure == 0:
            return []
        content, self._held = self._held[:sure], self._held[sure:]
        return [Content(content)]

    def _in_call(self, call: CallReader, character: str) -> list[Event]:
        events = call.add(character)
        if call.failed:
            self._call, before = None, self._held
            self._held = ""
            return [Content(before + _OPEN + call.raw)]
        if events:
            self._held = ""  # the space before a call is no content
        if call.done:
            self._call, self._closing = None, True
            self._calls += 1
        return events

    def _after_call(self) -> list[Event]:
        """Between an object and its closing tag there is only space; other text is content again."""
        text = self._held.lstrip()
        if text == _CLOSE:
            self._held, self._closing = "", False
        elif not _CLOSE.startswith(text):
            self._closing = False
            return self._release()
        return []
