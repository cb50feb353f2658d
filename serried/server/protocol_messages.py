"""The body of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from serried.server.protocol_common import RequestModel


class CountRequest(RequestModel):
    """What a prompt is made of. Blocks of content are checked where they are used."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "MCP servers are not supported",
        "container": "containers are not supported",
    }


class MessagesRequest(CountRequest):
    """Anthropic's."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
