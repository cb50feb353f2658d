"""Bad words as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from serried.errors import InputError
from serried.text.tokenizer import Tokenizer


def spell_out(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each word as token ids: a text as it stands at the beginning, and after a space where that differs.

    InputError for a text where there is no tokenizer, and for one that has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise InputError("bad_words: the model has no tokenizer, so it cannot take text; give token ids")
        texts = (word.lstrip(" "), " " + word.lstrip(" "))
        spelled = [tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
        if not any(spelled):
            raise InputError(f"bad_words: {word!r} has no tokens in this vocabulary")
        found.update((tuple(ids), None) for ids in spelled if ids)
    return [list(ids) for ids in found]
