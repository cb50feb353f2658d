"""The body of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from serried.server.protocol_common import SamplingFields

_STATELESS = "this server keeps no responses; send the whole conversation as input"


class ResponsesRequest(SamplingFields):
    """OpenAI's, with vLLM's sampling extensions. input is checked where it is used."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    refused: ClassVar[Mapping[str, str]] = {
        **SamplingFields.refused,
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "background": _STATELESS,
        "prompt": "stored prompts are not supported; send them as input",
        "max_tool_calls": "built-in tools are not supported",
    }
