"""SamplingParams: how a request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from serried.errors import InputError

MAX_N = 1024
MAX_LOGPROBS = 1000
MAX_WORDS = 1000  # stop strings, bad words
MAX_WORD_LENGTH = 4096
LARGEST = (1 << 31) - 1  # what travels in an int32

# Name: least, largest, and what the two ends mean.
_WHOLE = {
    "n": (1, MAX_N, ""),
    "top_k": (-1, LARGEST, "; 0 or -1 is off"),
    "seed": (0, (1 << 64) - 1, ""),
    "max_tokens": (1, LARGEST, ""),
    "min_tokens": (0, LARGEST, ""),
    "logprobs": (0, MAX_LOGPROBS, ""),
    "prompt_logprobs": (0, MAX_LOGPROBS, ""),
}
_OPTIONAL = {"seed", "logprobs", "prompt_logprobs"}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Names and meanings are vLLM's; InputError names the parameter that is wrong.

    n: answers to one prompt. temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1 is off. min_p: the least
    probability, as a part of the likeliest token's; 0 is off. presence_penalty, frequency_penalty: taken off the
    logits of tokens of the output, once and for each time; 0 is off. repetition_penalty: divides positive logits of
    tokens of prompt and output, multiplies negative ones; 1 is off. seed: a seeded request gives the same tokens
    alone, in a batch and under every split (None: drawn anew for each request).

    logit_bias: what is added to a token's logit, -100 to 100. allowed_token_ids: no others (None: all). bad_words:
    texts, or sequences of token ids, that the output shall not hold. min_tokens: before so many neither an end token
    nor anything of `stop` or `stop_token_ids` ends the output.

    stop: strings that end the text and are not part of it (include_stop_str_in_output: they are). stop_token_ids:
    tokens that end it. ignore_eos: end tokens do not end it. skip_special_tokens: they are left out of the text.

    logprobs: give the log-probability of each token of the output, and those of so many likeliest tokens.
    prompt_logprobs: the same of the prompt. Both are of the model's own logits, before anything above is done to them.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, (least, largest, hint) in _WHOLE.items():
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not (_is_whole(value) and least <= value <= largest):
                raise _refusal(name, value, f"a whole number from {least} to {largest}{hint}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "True or False")
        self._check_numbers()
        self._set("stop", _words("stop", self.stop))
        self._set("bad_words", _bad_words(self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids: empty, so no token could follow; leave it out to allow all")
        self._set("logit_bias", _biases(self.logit_bias))
        self._check_pairs()

    def check_vocabulary(self, size: int) -> None:
        """InputError where a token id of any parameter is not below `size`."""
        lists: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias or ()),
        }
        for name, ids in lists.items():
            check_token_ids(name, ids, size)

    @property
    def edits_logits(self) -> bool:
        """Whether anything is done to the logits before a token is chosen, bad words apart."""
        penalties = self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)
        return penalties or bool(self.logit_bias or self.min_tokens) or self.allowed_token_ids is not None

    def _check_numbers(self) -> None:
        self._check("temperature", lambda x: 0 <= x < math.inf, "a finite number of at least 0; 0 is greedy")
        self._check("top_p", lambda x: 0 < x <= 1, "a number above 0 and at most 1; 1 is off")
        self._check("min_p", lambda x: 0 <= x <= 1, "a number from 0 to 1; 0 is off")
        self._check("presence_penalty", lambda x: -2 <= x <= 2, "a number from -2 to 2; 0 is off")
        self._check("frequency_penalty", lambda x: -2 <= x <= 2, "a number from -2 to 2; 0 is off")
        self._check("repetition_penalty", lambda x: 0 < x < math.inf, "a finite number above 0; 1 is off")

    def _check(self, name: str, holds: Callable[[float], bool], wanted: str) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not holds(float(value)):
            raise _refusal(name, value, wanted)

    def _check_pairs(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise InputError(f"n: {self.n} greedy answers would be the same; give a temperature above 0, or n=1")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def check_token_ids(name: str, ids: Sequence[int], size: int) -> None:
    """InputError, which names where they come from, where a token id is not below `size`."""
    for token in ids:
        if not 0 <= token < size:
            raise InputError(f"{name}: token id {token} is not in the vocabulary of {size} (0 to {size - 1})")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether it is a number that float64 holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _refusal(name: str, value: object, wanted: str) -> InputError:
    return InputError(f"{name}: {_shown(value)} is not {wanted}")


def _shown(value: object) -> str:
    """A value as it is shown in an error: its beginning, where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number that is too long to print"
    return text if len(text) <= 60 else text[:57] + "..."


def _sequence(name: str, value: object, wanted: str) -> tuple[object, ...]:
    """Any sequence but text, as a tuple; None is an empty one."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping):
        raise _refusal(name, value, wanted)
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise _refusal(name, value, wanted) from None


def _words(name: str, value: object) -> tuple[str, ...]:
    wanted = f"a list of at most {MAX_WORDS} strings of 1 to {MAX_WORD_LENGTH} characters"
    words = (value,) if isinstance(value, str) else _sequence(name, value, wanted)
    if len(words) > MAX_WORDS:
        raise InputError(f"{name}: {len(words)} strings; at most {MAX_WORDS} are allowed")
    for word in words:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_WORD_LENGTH:
            raise _refusal(name, word, f"a string of 1 to {MAX_WORD_LENGTH} characters")
    return words  # type: ignore[return-value]


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    wanted = f"a list of at most {MAX_WORDS} strings, or sequences of token ids"
    words = (value,) if isinstance(value, str) else _sequence("bad_words", value, wanted)
    texts = _words("bad_words", [word for word in words if isinstance(word, str)])
    ids = [_token_ids("bad_words", word) for word in words if not isinstance(word, str)]
    if not all(0 < len(word) <= MAX_WORD_LENGTH for word in ids):
        raise InputError(f"bad_words: a sequence of token ids has 1 to {MAX_WORD_LENGTH} of them")
    if len(words) > MAX_WORDS:
        raise InputError(f"bad_words: {len(words)} words; at most {MAX_WORDS} are allowed")
    return (*texts, *ids)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids, in their order."""
    for token in (ids := _sequence(name, value, "a list of token ids")):
        if not _is_whole(token) or not 0 <= token <= LARGEST:
            raise _refusal(name, token, "a token id, a whole number of at least 0")
    return ids  # type: ignore[return-value]


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, "a mapping from token ids to numbers")
    _token_ids("logit_bias", list(value))
    for token, bias in value.items():
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise InputError(f"logit_bias: {_shown(bias)}, of token {token}, is not a number from -100 to 100")
    return dict(value)
