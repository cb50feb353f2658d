"""What /openapi.json says of answers that no model of ours describes."""

from __future__ import annotations

from typing import Any

Responses = dict[int | str, dict[str, Any]]

_ERROR = {
    "description": "What is wrong; in /v1/messages as Anthropic says it",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
                "required": ["error"],
            }
        }
    },
}
# Of all routes: wrong requests, and an engine that loads, is full, or is down.
ERRORS: Responses = {"4XX": _ERROR, "503": _ERROR}
# Of routes that stream where the request asks for it.
STREAMED: Responses = {200: {"description": "Whole, or as server-sent events", "content": {"text/event-stream": {}}}}
