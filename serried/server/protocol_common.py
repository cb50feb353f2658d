"""What the requests of all interfaces have in common: strict types, and fields that we refuse rather than ignore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from serried.server.errors import bad_request

_REFUSED: Mapping[str, str] = {
    "use_beam_search": "beam search is not supported",
    "best_of": "best_of is not supported; give n, and choose among the answers",
    "suffix": "filling in the middle is not supported",
    "lora_request": "LoRA adapters are not supported",
    "logits_processors": "logits processors of a request's own are not supported",
    "ebnf": "EBNF grammars are not supported; give a JSON schema, a regex or choices",
    "guided_grammar": "EBNF grammars are not supported; give a JSON schema, a regex or choices",
    "truncate_prompt_tokens": "prompts are never truncated; shorten the prompt",
    "functions": "functions are not supported; give tools",
    "function_call": "function_call is not supported; give tool_choice",
    "web_search_options": "web search is not supported",
    "audio": "audio is not supported",
    "mm_processor_kwargs": "images, audio and video are not supported",
}


class RequestModel(BaseModel):
    """A body. Types are strict (no "5" for 5, no true for 1), numbers finite.

    Fields that we do not know are ignored, as OpenAI's clients expect, unless one of `refused` is set: it would change
    what the request means.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, str]] = _REFUSED

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, why in cls.refused.items():
                if data.get(name) not in (None, False, [], {}) and name not in cls.model_fields:
                    raise bad_request(f"{name}: {why}", name)
        return data


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(RequestModel):
    """vLLM's way to ask for a grammar: exactly one of them."""

    json_: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    refused: ClassVar[Mapping[str, str]] = {
        "grammar": "EBNF grammars are not supported; give a JSON schema, a regex or choices",
        "structural_tag": "structural tags are not supported",
    }

    @model_validator(mode="before")
    @classmethod
    def _json_is_taken(cls, data: Any) -> Any:
        # BaseModel has a method of that name.
        return {**data, "json_": data["json"]} if isinstance(data, dict) and "json" in data else data


class SamplingFields(RequestModel):
    """How tokens are chosen, in the names of OpenAI and vLLM; what a request leaves out is the model's default."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
