"""The format of Mistral: `[TOOL_CALLS]`, then a JSON list of calls, or (newer models) `name[ARGS]{...}` for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from serried.text.tools import CallArguments, CallStart, Content, Event, ToolParser, begun, call_id
from serried.text.tools_json import CallReader, ValueReader, call_schema, literal

_TAG: Final = "[TOOL_CALLS]"
_SPACE: Final = " \t\r\n"
_HEAD: Final = re.compile(r"([\w.:-]{1,256})(\[CALL_ID\][A-Za-z0-9]*)?(\[ARGS\])?\s*")
_HEAD_CHARACTERS: Final = re.compile(r"[\w.:\[\]\s-]")


class Format:
    keeps_special = True

    def parser(self, names: Sequence[str]) -> ToolParser:
        return MistralParser()

    def grammar(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], many: bool) -> str:
        more = ' (", " body)*' if many else ""
        return f'start: {literal(_TAG, special)} "[" body{more} "]"\nbody: %json {call_schema(tools, "arguments")}'

    def new_id(self) -> str:
        return call_id(9, "")  # their templates refuse any other length


class MistralParser:
    """Content until the tag; after it calls, and content again where neither a call nor a tag follows."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0
        self._call: CallReader | None = None
        self._value: ValueReader | None = None
        self._state: Callable[[str], list[Event]] = self._text

    def add(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            events += self._state(character)
        return events

    def finish(self) -> list[Event]:
        if self._call is not None:
            return [] if self._call.started else [Content(self._held + self._call.raw)]
        if self._value is not None:
            return []
        quiet = self._calls > 0 and not self._held.strip(_SPACE + ",]")
        return [Content("" if quiet else self._held)]

    def _text(self, character: str) -> list[Event]:
        self._held += character
        if self._held.endswith(_TAG):
            self._state = self._after_tag
            return []
        tag = len(self._held) - begun(self._held, _TAG)
        sure = len(self._held[:tag].rstrip())
        if sure == 0:
            return []
        content, self._held = self._held[:sure], self._held[sure:]
        return [Content(content)]

    def _after_tag(self, character: str) -> list[Event]:
        """Which of the two forms it is. What is held begins with the space before the tag."""
        if character == "{":
            return self._begin_call(character)
        self._held += character
        if character == "[":
            self._state = self._between
        elif _HEAD_CHARACTERS.match(character) and character not in _SPACE + "]":
            self._state = self._head
        elif character not in _SPACE:
            self._state = self._text
        return []

    def _begin_call(self, character: str) -> list[Event]:
        self._call = CallReader(self._calls)
        self._state = self._in_object
        return self._in_object(character)

    def _in_object(self, character: str) -> list[Event]:
        call = self._call
        if call is None:
            return []
        events = call.add(character)
        if call.failed:
            self._held, self._call, self._state = self._held + call.raw, None, self._text
            return []
        if events:
            self._held = ""
        if call.done:
            self._calls += 1
            self._call, self._state = None, self._between
        return events

    def _between(self, character: str) -> list[Event]:
        """In the list between two calls, or behind it."""
        if character == "{":
            return self._begin_call(character)
        if character in _SPACE + ",]":
            self._held += character
            return []
        if self._calls:
            self._held = ""
        self._state = self._text
        return self._text(character)

    def _head(self, character: str) -> list[Event]:
        """The newer form: a name, perhaps marks, then the arguments."""
        if character == "{" and (head := _HEAD.fullmatch(self._held.rpartition(_TAG)[2].strip())):
            self._held, self._value, self._state = "", ValueReader(character), self._in_arguments
            return [CallStart(self._calls, head[1]), CallArguments(self._calls, character)]
        self._held += character
        if not _HEAD_CHARACTERS.match(character) or len(self._held) > 1024:
            self._state = self._text
        return []

    def _in_arguments(self, character: str) -> list[Event]:
        ended = self._value is None or self._value.ends_with(character)
        events: list[Event] = [CallArguments(self._calls, character)]
        if ended:
            self._calls += 1
            self._value, self._state = None, self._text
        return events
