"""Token ids to text as they come: what is shown is always a prefix of the whole text decoded at once."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

from serried.errors import InputError
from serried.text.tokenizer import Tokenizer

# Decoders whose text grows only at its end: pieces rewritten one by one, bytes joined, the start stripped.
_PIECEWISE: Final = re.compile(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?|Metaspace ")


class _Stream(Protocol):
    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """Byte-level vocabularies: every token is some bytes, whatever stands beside it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        kept = [index for index in ids if index not in tokenizer.control_ids] if self._skip else ids
        return self._decoder.decode(b"".join([tokenizer.token_bytes(index) for index in kept]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceStream:
    """SentencePiece-like vocabularies, with bytes (<0x41>) for what has no piece.

    The library turns a run of byte tokens into text only if the whole run is UTF-8, else each byte into
    U+FFFD; so a run is held back until it ends, however long.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        steps = {step["type"]: step for step in tokenizer.decoder_steps}
        self._replacements = [
            (step["pattern"]["String"], step["content"])
            for step in tokenizer.decoder_steps
            if step["type"] == "Replace"
        ]
        self._fallback = "ByteFallback" in steps
        self._metaspace: dict[str, Any] | None = steps.get("Metaspace")
        strip = steps.get("Strip", {"content": "", "start": 0})
        self._strip, self._strippable = strip["content"], strip["start"]
        self._run = bytearray()
        self._first = True

    def feed(self, ids: Sequence[int]) -> str:
        texts = []
        for index in ids:
            piece = self._tokenizer.token_piece(index)
            if piece is None or (self._skip and index in self._tokenizer.control_ids):
                continue
            piece = self._rewrite(piece)
            if self._fallback and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
                self._run.append(int(match[1], 16))
            else:
                texts += [self._end_run(), piece]
        return self._left_strip("".join(texts))

    def finish(self) -> str:
        return self._left_strip(self._end_run())

    def _rewrite(self, piece: str) -> str:
        for pattern, content in self._replacements:
            piece = piece.replace(pattern, content)
        if self._metaspace is not None:
            bare = self._first and self._metaspace["prepend_scheme"] != "never"
            piece = piece.replace(self._metaspace["replacement"], "" if bare else " ")
        self._first = False
        return piece

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _left_strip(self, text: str) -> str:
        while self._strippable and text:
            if not text.startswith(self._strip):
                self._strippable = 0
                break
            text = text.removeprefix(self._strip)
            self._strippable -= 1
        return text


class _WholeText:
    """Any other decoder may change what came before: nothing is certain until the end or a stop string."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, stop: Sequence[str]) -> None:
        self._tokenizer, self._skip, self._stop = tokenizer, skip_special, stop
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += ids
        if self._stop:
            text = self._tokenizer.decode(self._ids, self._skip)
            if any(stop in text for stop in self._stop):
                return text
        return ""

    def finish(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip)


def _open(tokenizer: Tokenizer, skip_special: bool, stop: Sequence[str]) -> _Stream:
    steps = tokenizer.decoder_steps
    kinds = "".join(step["type"] + " " for step in steps)
    if kinds == "ByteLevel ":
        return _ByteStream(tokenizer, skip_special)
    plain = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    open_end = all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
    if steps and plain and open_end and _PIECEWISE.fullmatch(kinds):
        return _PieceStream(tokenizer, skip_special)
    return _WholeText(tokenizer, skip_special, stop)


class Detokenizer:
    """The text of one request, bit by bit.

    All that `add` and `finish` return, joined, is `tokenizer.decode(all ids)`, cut before the first stop
    string: the one that is complete first (of two that end together, the longer). `stopped` is that string.
    An empty stop string -> InputError.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(item, str) and item for item in stop):
            raise InputError(f"stop must be a list of strings that are not empty, not {stop!r}")
        self._stop = tuple(stop)
        self._stream = _open(tokenizer, skip_special, self._stop)
        self._held = ""
        self.stopped: str | None = None

    def add(self, ids: Sequence[int], search: bool = True) -> str:
        """Take the next ids; return the new text that is certain and no part of a stop string.

        Without `search` no stop string that ends in it counts; one that begins in it may. (Where a decoder may change
        what came before, those count as soon as `search` is on.)
        """
        if self.stopped is not None:
            return ""
        new = self._stream.feed(ids)
        if not search and isinstance(self._stream, _WholeText):
            return ""
        return self._release(new, search)

    def finish(self) -> str:
        """Return the rest of the text; call once, after the last id."""
        if self.stopped is not None:
            return ""
        text = self._release(self._stream.finish())
        rest, self._held = self._held, ""
        return text if self.stopped is not None else text + rest

    def _release(self, new: str, search: bool = True) -> str:
        if not self._stop:
            return new
        old, text = len(self._held), self._held + new
        # Only what ends in the new text: what was held back has been searched, or was not to be.
        starts = [(text.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stop if search]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """The length of the longest end of the text with which a stop string begins."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for size in range(longest, 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stop):
                return size
        return 0
