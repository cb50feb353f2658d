"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from serried.server.protocol_common import RequestModel, SamplingFields


class FunctionDefinition(RequestModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: str
    function: FunctionDefinition


class ChatRequest(SamplingFields):
    """OpenAI's, with vLLM's extensions. messages and tool_choice are checked where they are used."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
