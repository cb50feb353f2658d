"""A call as a JSON object, `{"name": ..., "arguments": {...}}`, read character by character as it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from serried.text.tools import CallArguments, CallStart, Event

_ARGUMENTS: Final = ("arguments", "parameters")
_SPACE: Final = " \t\r\n"


class ValueReader:
    """Finds the end of one JSON value. It does not check what is inside: a model's mistakes are its caller's to see."""

    def __init__(self, first: str) -> None:
        """first: the value's first character, which is not space."""
        self.kind = first if first in '{["' else "scalar"
        self._depth = 1 if first in "{[" else 0
        self._quoted = first == '"'
        self._escaped = False

    def ends_before(self, character: str) -> bool:
        """Whether the value has ended just before this character: only numbers and words end so."""
        return self.kind == "scalar" and character in ",}]" + _SPACE

    def ends_with(self, character: str) -> bool:
        """Take the next character; whether it is the value's last one."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
                return self._depth == 0
            return False
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class CallReader:
    """Reads one call. `done`: the object has ended; `failed`: it is no call; `raw`: what came before its first event.

    It gives events only once it is sure of the name and has seen the arguments begin (or the object end). A failure
    comes before that or not at all, so that an owner can always give back `raw` as plain text. names: what counts as
    a function's name (None: anything). bare: the object needs arguments to be a call at all.
    """

    def __init__(self, index: int, names: Sequence[str] | None = None, bare: bool = False) -> None:
        self.raw = ""
        self.done = False
        self.failed = False
        self._index, self._names, self._bare = index, names, bare
        self._state = self._open
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name, or as a string
        self._started = False
        self._value = ""
        self._reader: ValueReader | None = None
        self._streams = False

    @property
    def started(self) -> bool:
        """Whether it has given an event."""
        return self._started

    def add(self, character: str) -> list[Event]:
        """Take the next character, of which it takes no more once it is done or has failed."""
        if not self._started:
            self.raw += character
        events = self._state(character)
        if self.failed and self._started:
            self.failed, self.done = False, True
        return events

    def _open(self, character: str) -> list[Event]:
        if character == "{":
            self._state = self._before_key
        elif character not in _SPACE:
            self.failed = True
        return []

    def _before_key(self, character: str) -> list[Event]:
        if character == '"':
            self._value, self._reader, self._state = character, ValueReader(character), self._in_key
        elif character == "}":
            return self._end()
        elif character not in _SPACE + ",":
            self.failed = True
        return []

    def _in_key(self, character: str) -> list[Event]:
        self._value += character
        if self._reader and self._reader.ends_with(character):
            self._key = _text_of(self._value) or ""
            self._state = self._before_value
        return []

    def _before_value(self, character: str) -> list[Event]:
        if character in _SPACE + ":":
            return []
        self._value, self._reader = "", ValueReader(character)
        self._state = self._in_value
        self._streams = character == "{" and self._key in _ARGUMENTS and self._name is not None
        if not self._streams:
            self._value = character
            return []
        return [*self._start(), CallArguments(self._index, character)]

    def _in_value(self, character: str) -> list[Event]:
        if self._reader is None:
            return []
        if self._reader.ends_before(character):
            self._after_value()
            return [] if self.failed else self._before_key(character)
        ended = self._reader.ends_with(character)
        if self._streams:
            self._state = self._before_key if ended else self._in_value
            return [CallArguments(self._index, character)]
        self._value += character
        if ended:
            self._after_value()
        return []

    def _after_value(self) -> None:
        self._state = self._before_key
        if self._key == "name" and self._name is None:
            self._name = _text_of(self._value)
            if self._name is None or (self._names is not None and self._name not in self._names):
                self.failed = True
        elif self._key in _ARGUMENTS:
            # Some models write the object as a string once more.
            text = _text_of(self._value)
            self._arguments = self._value if text is None else text

    def _start(self) -> list[Event]:
        if self._started or self._name is None:
            return []
        self._started = True
        return [CallStart(self._index, self._name)]

    def _end(self) -> list[Event]:
        self.done = True
        if self._started:
            return []
        if self._name is None or (self._bare and self._arguments is None):
            self.failed = True
            return []
        arguments = self._arguments if self._arguments not in {None, "", "null"} else "{}"
        return [*self._start(), CallArguments(self._index, arguments or "{}")]


def _text_of(value: str) -> str | None:
    """The string that a JSON string holds; None where it is none."""
    try:
        text = json.loads(value)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def call_schema(tools: Sequence[Mapping[str, Any]], key: str) -> str:
    """A JSON schema of a call of any of these functions, its arguments under `key`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, key: tool.get("parameters") or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})


def literal(text: str, special: Mapping[str, int]) -> str:
    """A mark in a grammar: a special token where the vocabulary has it as one, else its characters."""
    return f"<[{special[text]}]>" if text in special else json.dumps(text)
