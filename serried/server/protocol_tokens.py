"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from serried.server.protocol_chat import Tool
from serried.server.protocol_common import RequestModel


class TokenizeRequest(RequestModel):
    """vLLM's: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]
