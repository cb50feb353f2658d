"""SamplingParams: how a request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serried.errors import InputError

MAX_STOPS = 64
MAX_STOP_LENGTH = 4096


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's.

    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1 is off. seed: a seeded request gives the same tokens
    alone, in a batch and under every split (None: drawn anew for each request). stop: strings that end the text and
    are not part of it. stop_token_ids: tokens that end it. ignore_eos: end tokens do not end it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int = 16
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        if len(stop) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stop):
            raise InputError(f"stop: expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise InputError(f"stop_token_ids: {token!r} is not a token id")

    def _check_numbers(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature: {self.temperature!r} is not a number of at least 0")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p: {self.top_p!r} is not above 0 and at most 1")
        if not _is_int(self.top_k) or not -1 <= self.top_k < 1 << 31:
            raise InputError(f"top_k: {self.top_k!r} is not a whole number (0 or -1 is off)")
        if not _is_int(self.max_tokens) or not 1 <= self.max_tokens < 1 << 31:
            raise InputError(f"max_tokens: {self.max_tokens!r} is not a whole number of at least 1")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 1 << 64):
            raise InputError(f"seed: {self.seed!r} is not a whole number from 0 to 2^64 - 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
