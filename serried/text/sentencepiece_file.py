"""tokenizer.model: a vocabulary as SentencePiece writes it, in the wire format of Protocol Buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from serried.errors import InputError
from serried.text.sentencepiece import Pieces, Rules, bpe_backend, unigram_backend
from serried.text.vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED

if TYPE_CHECKING:
    import tokenizers

_UNIGRAM, _BPE = 1, 2
_VARINT, _EIGHT, _COUNTED, _FOUR = 0, 1, 2, 5
Value = int | bytes


class SentencePieceFile(NamedTuple):
    """The backend (control and user-defined pieces added), and the pieces that begin and end a text."""

    backend: tokenizers.Tokenizer
    bos: str | None
    eos: str | None
    unknown: str


def read_sentencepiece(path: Path, prefix: str = "always") -> SentencePieceFile:
    """Read a model of kind BPE or Unigram, to encode as SentencePiece itself does; damage -> InputError.

    prefix: `first` puts no space after control tokens, and none before a text that begins with one.
    """
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(value) for number, value in fields if number == 1 and isinstance(value, bytes)]
        trainer, rules = _message(fields, 2), _message(fields, 3)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (IndexError, ValueError, struct.error):
        pieces = []
    if sum(kind == UNKNOWN for _, _, kind in pieces) != 1:  # each model has one
        raise InputError(
            f"{path}: not a SentencePiece model; a model directory needs one, or a tokenizer.json (`save_pretrained` "
            "writes it)"
        )
    try:
        return _build(pieces, trainer, rules, prefix)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


class _Message(NamedTuple):
    """The fields of a message, by their numbers in sentencepiece_model.proto."""

    numbers: dict[int, int]
    strings: dict[int, bytes]


def _message(fields: list[tuple[int, Value]], wanted: int) -> _Message:
    """A message that occurs once; IndexError where it does not."""
    inner = list(_fields([value for number, value in fields if number == wanted and isinstance(value, bytes)][-1]))
    return _Message(
        {number: value for number, value in inner if isinstance(value, int)},
        {number: value for number, value in inner if isinstance(value, bytes)},
    )


def _build(pieces: list[tuple[str, float, int]], trainer: _Message, rules: _Message, prefix: str) -> SentencePieceFile:
    import tokenizers as hf

    model = trainer.numbers.get(3, _UNIGRAM)
    as_suffix, escaped = trainer.numbers.get(24, False), rules.numbers.get(5, True)
    if model not in {_UNIGRAM, _BPE} or as_suffix or not escaped:
        raise InputError("of SentencePiece models only BPE and Unigram are read, with a space before a word as ▁")
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True))
    unknown = types.index(UNKNOWN)
    build = bpe_backend if model == _BPE else unigram_backend
    backend = build(
        Pieces(tokens, scores, types, unknown),
        Rules(
            prefix=prefix if rules.numbers.get(3, True) else "never",
            byte_fallback=bool(trainer.numbers.get(35, False)),
            charsmap=rules.strings.get(2, b""),
            squeeze=bool(rules.numbers.get(4, True)),
            isolated=[token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED],
        ),
    )
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in {CONTROL, UNKNOWN}]
    backend.add_tokens([hf.AddedToken(token, normalized=False, special=True) for token in special])
    ids = trainer.numbers.get(41, 1), trainer.numbers.get(42, 2)
    bos, eos = (tokens[index] if index < len(tokens) and types[index] == CONTROL else None for index in ids)
    return SentencePieceFile(backend, bos, eos, tokens[unknown])


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message: each its number, and a number or bytes. Damage -> IndexError or ValueError."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _COUNTED:
            size, at = _varint(data, at)
        elif wire in {_FOUR, _EIGHT}:
            size = 4 if wire == _FOUR else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > end:
            raise ValueError("truncated")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("number too long")
