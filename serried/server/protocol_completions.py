"""The body of /v1/completions."""

from __future__ import annotations

from serried.server.protocol_common import SamplingFields


class CompletionRequest(SamplingFields):
    """OpenAI's, with vLLM's extensions. prompt: text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
