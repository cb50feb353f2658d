"""Standard input as text; bytes that are no UTF-8 are refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from serried.errors import InputError


def read_text() -> str:
    """All of it."""
    try:
        return _checked(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise _refusal(error.object[error.start]) from None


def read_lines() -> Iterator[str]:
    """Line by line as they come, without their ends."""
    try:
        for line in sys.stdin:
            yield _checked(line).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise _refusal(error.object[error.start]) from None


def _checked(text: str) -> str:
    """In some locales Python reads a byte that is no text as a lone surrogate, U+DC80 to U+DCFF."""
    for character in text if not text.isascii() else "":
        if "\udc80" <= character <= "\udcff":
            raise _refusal(ord(character) - 0xDC00)
    return text


def _refusal(byte: int) -> InputError:
    return InputError(f"standard input is not UTF-8 text: it has the byte 0x{byte:02x}")
