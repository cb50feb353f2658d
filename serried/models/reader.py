"""Typed access to what a config or a file's metadata says; errors name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serried.errors import InputError


class Reader:
    """Typed access to the keys of a config; errors name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fail(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key}: {problem}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing; the model cannot be built without it")
        if not _is_positive(value):
            raise self.fail(key, f"is {value!r}; expected a positive number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value >= 1 << 31:
            raise self.fail(key, f"is {value!r}; expected a whole number below 2^31")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value not in (None, True, False):
            raise self.fail(key, f"is {value!r}; expected true or false")
        return default if value is None else bool(value)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.fail(key, f"is {value!r}; expected a token id or a list of them")
        return tuple(ids)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_positive, value)):
            raise self.fail(key, f"is {_short(value)}; expected a list of {count} positive numbers")
        return tuple(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _short(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
