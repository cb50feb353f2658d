"""Vocabulary: what a tokenizer is made of, wherever it was read; the types that SentencePiece and GGUF give tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MERGED: Final = frozenset({NORMAL, USER_DEFINED, UNUSED})  # what ordinary text can become, piece by piece


class Vocabulary(NamedTuple):
    """The parts of a Tokenizer, by the names of its parameters.

    frame: the ids before and after a text. special_tokens: bos_token and so on, for chat templates.
    """

    backend: tokenizers.Tokenizer
    frame: tuple[Sequence[int], Sequence[int]] = ((), ())
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str] = {}
    chat_template: str | None = None
