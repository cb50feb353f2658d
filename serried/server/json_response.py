"""JSON out: fast, and with null where a number is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

encode = msgspec.json.encode


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(encode(content), status, dict(headers or {}), media_type="application/json")
