"""The format of Llama 3: the output is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from serried.text.tools import Content, Event, ToolParser, call_id
from serried.text.tools_json import CallReader, call_schema

_TAG: Final = "<|python_tag|>"
_SPACE: Final = " \t\r\n"
_BETWEEN: Final = _SPACE + ";,"


class Format:
    keeps_special = True

    def parser(self, names: Sequence[str]) -> ToolParser:
        return LlamaParser(names)

    def grammar(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], many: bool) -> str:
        more = ' ("; " body)*' if many else ""
        return f"start: body{more}\nbody: %json {call_schema(tools, 'parameters')}"

    def new_id(self) -> str:
        return call_id()


class LlamaParser:
    """Calls stand at the beginning, or the whole output is content: JSON that calls no function on offer is that too.

    Several calls have space, commas or semicolons between them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._held = ""  # before a call, or between two
        self._calls = 0
        self._call: CallReader | None = None
        self._content = False

    def add(self, text: str) -> list[Event]:
        events: list[Event] = []
        for number, character in enumerate(text):
            if self._content:
                return [*events, Content(text[number:])]
            events += self._take(character)
        return events

    def finish(self) -> list[Event]:
        call, held, self._held = self._call, self._held, ""
        if call is not None:
            return [] if call.started else [Content(held + call.raw)]
        return [Content(held if held.strip(_BETWEEN) or self._calls == 0 else "")]

    def _take(self, character: str) -> list[Event]:
        if self._call is not None:
            return self._in_call(self._call, character)
        between = _BETWEEN if self._calls else _SPACE
        core = "".join(each for each in self._held + character if each not in between)
        if core in ("{", _TAG + "{"):
            self._call = CallReader(self._calls, self._names, bare=True)
            return self._in_call(self._call, character)
        self._held += character
        if _TAG.startswith(core):
            return []
        return self._give_up("")

    def _in_call(self, call: CallReader, character: str) -> list[Event]:
        events = call.add(character)
        if call.failed:
            return self._give_up(call.raw)
        if events:
            self._held = ""
        if call.done:
            self._call = None
            self._calls += 1
        return events

    def _give_up(self, raw: str) -> list[Event]:
        """From here on all is content."""
        held, self._held, self._call, self._content = self._held, "", None, True
        return [Content(held + raw)]
