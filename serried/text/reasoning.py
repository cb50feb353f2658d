"""Reasoning: what a model thinks before it answers, told from the answer as the text comes."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class Piece(NamedTuple):
    """Some text, of the reasoning or of the answer."""

    text: str
    is_reasoning: bool


class _State(Enum):
    START = 0  # nothing but whitespace and the beginning of a tag so far
    THINKING = 1
    BETWEEN = 2  # after the closing tag
    ANSWERING = 3


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag, so that what follows is reasoning from its first token."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """Splits one answer, bit by bit; `opened` says that the prompt has opened the reasoning.

    Reasoning stands at the very beginning or nowhere: a tag further on is text. The tags and the whitespace around
    them belong to neither part. What `add` and `finish` return does not depend on how the text is cut, but for where
    its pieces end.
    """

    def __init__(self, opened: bool = False) -> None:
        self._state = _State.THINKING if opened else _State.START
        self._held = ""
        self._said = False  # whether some reasoning was returned: whitespace before it is dropped

    def add(self, text: str) -> list[Piece]:
        """Take new text; return what is certain."""
        self._held += text
        pieces: list[Piece] = []
        if self._state is _State.START:
            self._start()
        if self._state is _State.THINKING:
            pieces += self._think()
        if self._state is _State.BETWEEN:
            self._held = self._held.lstrip()
            self._state = _State.ANSWERING if self._held else _State.BETWEEN
        if self._state is _State.ANSWERING and self._held:
            pieces.append(Piece(self._held, False))
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back; call once, after the last text."""
        rest, self._held = self._held, ""
        if self._state is _State.THINKING:
            rest = rest.rstrip() if self._said else rest.strip()
        return [Piece(rest, self._state is _State.THINKING)] if rest and self._state is not _State.BETWEEN else []

    def _start(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(OPEN):
            self._state, self._held = _State.THINKING, bare.removeprefix(OPEN)
        elif not OPEN.startswith(bare):
            self._state = _State.ANSWERING

    def _think(self) -> list[Piece]:
        text, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._state, self._held = _State.BETWEEN, rest
            text = text.rstrip()
        else:
            held = next((size for size in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:size])), 0)
            text = text[: len(text) - held].rstrip()  # whitespace may turn out to stand before the tag
            self._held = self._held[len(text) :]
        if not self._said:
            text = text.lstrip()
        self._said = self._said or bool(text)
        return [Piece(text, True)] if text else []
