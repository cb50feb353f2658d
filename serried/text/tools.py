"""Tool calls in a model's output: what the formats have in common, and which format a model writes.

A parser takes text as it comes and gives events. What it gives does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, cast

from serried.errors import InputError


@dataclass(frozen=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins: its number among the calls of this output, and the function's name."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, which joined are JSON (where the model wrote valid JSON)."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


class ToolParser(Protocol):
    """One output's parser."""

    def add(self, text: str) -> list[Event]:
        """Take the next piece of text."""
        ...

    def finish(self) -> list[Event]:
        """The end of the output: what was held back. Call once."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes calls.

    keeps_special: whether its marks are special tokens, which must stay in the text.
    """

    keeps_special: bool

    def parser(self, names: Sequence[str]) -> ToolParser:
        """A parser for an output; names: of the functions offered."""
        ...

    def grammar(self, tools: Sequence[Mapping[str, Any]], special: Mapping[str, int], many: bool) -> str:
        """A grammar (lark, in llguidance's syntax) that an output matches which calls these functions.

        tools: `name` and `parameters` (a JSON schema) each. special: ids of special tokens by their text. many:
        whether there may be more than one call.
        """
        ...

    def new_id(self) -> str:
        """A fresh id for a call."""
        ...


FORMATS: Final = {
    "hermes": "serried.text.tools_hermes",
    "llama3_json": "serried.text.tools_llama",
    "mistral": "serried.text.tools_mistral",
}


def tool_format(name: str) -> ToolFormat:
    """A format by its name; an unknown one -> InputError."""
    if name not in FORMATS:
        raise InputError(f"--tool-call-parser {name}: unknown; choose from auto, none, {', '.join(FORMATS)}")
    module = import_module(FORMATS[name])
    return cast(Callable[[], ToolFormat], module.Format)()


def detect_format(template: str | None) -> str | None:
    """The format that a chat template teaches its model; None where it teaches none that we know."""
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM write XML between these tags, which is not JSON.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def call_id(length: int = 24, prefix: str = "call_") -> str:
    """A random id of letters and digits."""
    return prefix + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def begun(text: str, tag: str) -> int:
    """The length of the longest end of the text with which a tag begins."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0


def joined(events: Sequence[Event]) -> list[Event]:
    """The same events, neighbours of a kind made one; empty text left out."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if not isinstance(event, CallStart) and not event.text:
            continue
        if isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result
