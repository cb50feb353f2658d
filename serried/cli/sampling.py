"""The options of sampling, under vLLM's names, for the commands that generate."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from serried.cli.options import integer, integers, number
from serried.errors import InputError
from serried.sampling_params import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """What SamplingParams takes; `--seed` is an option of the engine."""
    group = parser.add_argument_group("sampling")
    _number(group, "--temperature", 0.0, "default 0: the likeliest token")
    _integer(group, "--top-k", 0, "choose among so many likeliest tokens")
    _number(group, "--top-p", 1.0, "choose among the likeliest tokens that have this probability together")
    _number(group, "--min-p", 0.0, "choose among tokens that have this part of the likeliest one's probability")
    _number(group, "--presence-penalty", 0.0, "taken off the logits of tokens that the answer has (-2 to 2)")
    _number(group, "--frequency-penalty", 0.0, "the same, for each time that it has them (-2 to 2)")
    _number(group, "--repetition-penalty", 1.0, "divides the logits of tokens that prompt or answer have")
    group.add_argument("--logit-bias", type=biases("--logit-bias"), help="added to logits: 12:-5,40:2.5")
    group.add_argument("--allowed-token-ids", type=integers("--allowed-token-ids"), help="choose among these alone")
    group.add_argument("--bad-words", action="append", default=[], help="never say this; may be repeated")
    _integer(group, "--n", 1, "answers to each prompt (needs a temperature)")
    group = parser.add_argument_group("length")
    _integer(group, "--max-tokens", max_tokens, f"default {max_tokens}")
    _integer(group, "--min-tokens", 0, "no end before so many tokens")
    group.add_argument("--stop", action="append", default=[], help="end the text before this; may be repeated")
    group.add_argument("--stop-token-ids", type=integers("--stop-token-ids"), default=(), help="end at these tokens")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    group = parser.add_argument_group("output")
    _integer(group, "--logprobs", None, "log-probabilities of the answer's tokens, and of so many likeliest (--json)")
    _integer(group, "--prompt-logprobs", None, "the same of the prompt's tokens (--json)")
    group.add_argument("--include-stop-str-in-output", action="store_true", help="keep what ended the text")
    group.add_argument(
        "--no-skip-special-tokens", dest="skip_special_tokens", action="store_false", help="show special tokens"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the options give."""
    names = set(SamplingParams.__dataclass_fields__)
    return SamplingParams(**{name: value for name, value in vars(args).items() if name in names})


def biases(option: str) -> Callable[[str], dict[int, float]]:
    """A parser of token ids, each with a number: 12:-5,40:2.5."""

    def parse(text: str) -> dict[int, float]:
        try:
            pairs = [part.split(":") for part in text.split(",")]
            found = {int(token): float(bias) for token, bias in pairs}
        except ValueError:
            raise InputError(f"{option} {text}: expected token ids with numbers, like 12:-5,40:2.5") from None
        if len(found) < len(pairs):
            raise InputError(f"{option} {text}: a token id stands there twice")
        return found

    return parse


def _integer(group: argparse._ArgumentGroup, option: str, default: int | None, text: str) -> None:
    group.add_argument(option, type=integer(option), default=default, help=text)


def _number(group: argparse._ArgumentGroup, option: str, default: float, text: str) -> None:
    group.add_argument(option, type=number(option), default=default, help=text)
