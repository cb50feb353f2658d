"""SamplingParams: everything that is wrong is refused at the door, by name, and nothing that is right."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import InputError
from serried.sampling_params import SamplingParams

HUGE = 10**400  # no float64 holds it
LONGER = 10**5000  # Python refuses to print it
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
LISTS = ("stop_token_ids", "allowed_token_ids")
SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")

BAD = [
    *[
        (name, bad)
        for name in NUMBERS
        for bad in (math.nan, math.inf, -math.inf, "1", True, HUGE, -HUGE, LONGER, [1.0])
    ],
    *[(name, None) for name in NUMBERS],
    *[(name, bad) for name in WHOLE for bad in (math.nan, 1.0, "1", True, HUGE, -HUGE, LONGER, [1])],
    *[(name, None) for name in ("n", "top_k", "max_tokens", "min_tokens")],
    *[("temperature", bad) for bad in (-0.1, -1e-300)],
    *[("top_p", bad) for bad in (0, -1, 1.01)],
    *[("min_p", bad) for bad in (-0.1, 1.01)],
    *[("presence_penalty", bad) for bad in (-2.01, 2.01)],
    *[("frequency_penalty", bad) for bad in (-2.01, 2.01)],
    *[("repetition_penalty", bad) for bad in (0, -1.0)],
    *[("top_k", bad) for bad in (-2, 1 << 31)],
    *[("max_tokens", bad) for bad in (0, -1, 1 << 31)],
    *[("min_tokens", bad) for bad in (-1, 1 << 31)],
    *[("seed", bad) for bad in (-1, 1 << 64)],
    *[("n", bad) for bad in (0, -1, 1025)],
    *[(name, bad) for name in ("logprobs", "prompt_logprobs") for bad in (-1, 1001)],
    *[("stop", bad) for bad in ("", [""], [5], ["x"] * 1001, ["y" * 4097], 5, b"x", {"x": 1})],
    *[("bad_words", bad) for bad in ("", [""], [5], [None], ["x"] * 1001, ["y" * 4097], [[]], [[-1]], [[True]], 5)],
    *[("bad_words", bad) for bad in ([["x"]], [[1 << 31]], [[1.0]], [[1] * 4097], [[1]] * 1001)],
    *[(name, bad) for name in LISTS for bad in ([-1], ["3"], [True], [1.0], [1 << 31], [HUGE], "12", b"12", 5, {3: 1})],
    ("allowed_token_ids", []),
    *[("logit_bias", bad) for bad in ({-1: 1.0}, {"3": 1.0}, {True: 1.0}, {1.5: 1.0}, {1 << 31: 1.0}, [3], 3, "3")],
    *[("logit_bias", {3: bad}) for bad in (math.nan, math.inf, -100.5, 101, "1", True, None, HUGE)],
    *[(name, bad) for name in SWITCHES for bad in (None, 1, "yes")],
]


@pytest.mark.parametrize(("name", "bad"), BAD, ids=lambda value: str(value)[:20] if value is not LONGER else "longer")
def test_bad_parameters_are_named(name: str, bad: Any) -> None:
    """In one short line, whatever was given."""
    with pytest.raises(InputError, match=rf"^{name}: ") as caught:
        SamplingParams(**{name: bad})
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: 5 is more than max_tokens, 4"),
        ({"n": 2, "temperature": 0}, "n: 2 greedy answers would be the same"),
        ({"top_k": -2}, "top_k: -2 is not a whole number from -1 to 2147483647; 0 or -1 is off"),
        ({"min_p": 1.5}, "min_p: 1.5 is not a number from 0 to 1; 0 is off"),
        ({"logit_bias": {7: 200}}, "logit_bias: 200, of token 7, is not a number from -100 to 100"),
        ({"temperature": "x" * 1000}, "x... is not a finite number"),
    ],
)
def test_what_is_said(params: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SamplingParams(**params)


def test_an_unknown_parameter() -> None:
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=0.5)  # type: ignore[call-arg]


def test_good_parameters() -> None:
    params = SamplingParams(
        n=3, temperature=0.5, top_k=-1, seed=(1 << 64) - 1, stop="end", stop_token_ids=[3], max_tokens=1, min_tokens=1,
        logit_bias={3: -100, 4: 100.0}, allowed_token_ids=range(3), bad_words=["a", [1, 2], (3,)], logprobs=0,
        prompt_logprobs=20, repetition_penalty=1e300, presence_penalty=-2, frequency_penalty=2, min_p=1, top_p=1,
    )  # fmt: skip
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.bad_words == ("a", (1, 2), (3,))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(bad_words="word").bad_words == ("word",)
    assert SamplingParams(temperature=np.float64(0.5)).temperature == 0.5
    assert copy.deepcopy(params) == params
    with pytest.raises(AttributeError):
        params.top_k = 3  # type: ignore[misc]


def test_what_was_given_may_change_later() -> None:
    """The parameters are their own: the caller's lists stay the caller's."""
    bias, stops, words = {3: 1.0}, [5], [[1, 2]]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops, bad_words=words)
    bias[4], words[0][0] = 2.0, 9
    stops.append(6)
    assert (params.logit_bias, params.stop_token_ids, params.bad_words) == ({3: 1.0}, (5,), ((1, 2),))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": [1, 10]}, "stop_token_ids"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids"),
        ({"logit_bias": {9: 0.0, 10: 1.0}}, "logit_bias"),
    ],
)
def test_ids_beyond_the_vocabulary(params: dict[str, Any], name: str) -> None:
    made = SamplingParams(**params)
    made.check_vocabulary(11)
    with pytest.raises(InputError, match=f"^{name}: token id 10 is not in the vocabulary of 10 \\(0 to 9\\)"):
        made.check_vocabulary(10)


@given(st.sampled_from([*NUMBERS, *WHOLE]), st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3)))
def test_any_value_is_taken_or_refused(name: str, value: Any) -> None:
    """Never another exception; and what is taken is as it was given."""
    settings = {name: value, "max_tokens": value if name == "max_tokens" else (1 << 31) - 1}
    try:
        assert getattr(SamplingParams(**settings), name) == value
    except InputError as error:
        assert str(error).startswith(f"{name}: ")
