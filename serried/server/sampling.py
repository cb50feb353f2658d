"""From a request's fields to SamplingParams, within the server's caps and the model's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serried.engine.interface import ModelInfo
from serried.sampling_params import SamplingParams
from serried.server.errors import bad_request
from serried.server.options import ServerConfig
from serried.server.protocol_common import SamplingFields

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "prompt_logprobs",
)
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_BIASES = 1024


def sampling_params(
    fields: SamplingFields, model: ModelInfo, config: ServerConfig, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The parameters; InputError or a 400 names the field that is wrong, or asks for more than the server allows."""
    given: dict[str, Any] = {name: model.defaults[name] for name in _DEFAULTS if name in model.defaults}
    given |= {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    _cap("n", given.get("n"), config.max_n, "--max-n")
    _cap("logprobs", logprobs, config.max_logprobs, "--max-logprobs")
    _cap("prompt_logprobs", given.get("prompt_logprobs"), config.max_logprobs, "--max-logprobs")
    stops = given.get("stop")
    if isinstance(stops, list) and len(stops) > config.max_stop_strings:
        limit = f"{config.max_stop_strings} (--max-stop-strings)"
        raise bad_request(f"stop: {len(stops)} strings; this server allows {limit}", "stop")
    if given.get("top_k") is not None:
        given["top_k"] = int(given["top_k"])
    params = SamplingParams(**given, logit_bias=_biases(fields.logit_bias), max_tokens=max_tokens, logprobs=logprobs)
    params.check_vocabulary(model.vocab_size)
    return params


def output_room(asked: int | None, name: str, prompt: int, source: str, model: ModelInfo, config: ServerConfig) -> int:
    """How many tokens the output may have: as asked, or all that the context has room for beside the prompt.

    name, source: of the fields that say how many, and that brought the prompt.
    """
    room = model.max_model_len - prompt
    if room < 1:
        message = f"the prompt has {prompt} tokens, the context {model.max_model_len}: no room for an answer"
        raise bad_request(message, source, "context_length_exceeded")
    cap = config.max_output_tokens
    if asked is None:
        return room if cap is None else min(room, cap)
    if asked < 1:
        raise bad_request(f"{name}: {asked} is not a whole number of at least 1", name)
    _cap(name, asked, cap, "--max-output-tokens")
    if asked > room:
        message = (
            f"{name}: {asked} tokens and a prompt of {prompt} are more than the context, {model.max_model_len}; "
            f"ask for {room} at most, or shorten the prompt"
        )
        raise bad_request(message, name, "context_length_exceeded")
    return asked


def _cap(name: str, value: Any, limit: int | None, option: str) -> None:
    if value is not None and limit is not None and value > limit:
        raise bad_request(f"{name}: {value} is more than this server allows, {limit} ({option})", name)


def _biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    if len(given) > _MAX_BIASES:
        raise bad_request(f"logit_bias: {len(given)} tokens; at most {_MAX_BIASES} are allowed", "logit_bias")
    biases = {}
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise bad_request(f"logit_bias: {token[:40]!r} is not a token id", "logit_bias")
        biases[int(token)] = bias
    return biases
