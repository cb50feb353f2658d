"""Errors as HTTP: which status each has, and the body in the caller's dialect (OpenAI's, or Anthropic's)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serried.errors import EngineDead, InputError, QueueFull
from serried.server.json_response import json_response

_OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# "top_k: 5000000000 is not ..." names the parameter first.
_PARAMETER = re.compile(r"([a-z_][a-z0-9_]*(?:\[\d+\]|\.[A-Za-z_][A-Za-z0-9_]*)*)(?: must be|\.\w+ is missing|:| is )")


class ApiError(HTTPException):
    """An answer other than 2xx. param: the field that is wrong; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.param, self.code = message, param, code


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as what the client is told."""
    match error:
        case ApiError():
            return error
        case InputError():
            found = _PARAMETER.match(str(error))
            return bad_request(str(error), found[1] if found else None)
        case QueueFull():
            wait = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(429, str(error), code="queue_full", headers=wait)
        case EngineDead():
            return ApiError(503, f"the engine cannot answer: {error}", code="engine_dead", headers={"retry-after": "5"})
        case RequestValidationError():
            return _invalid(error.errors())
        case ValidationError():
            return _invalid([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return ApiError(500, "internal error: it is in the server's log", code="internal_error")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields as the caller knows them, where a request was put into another interface's words."""
    try:
        yield
    except (ApiError, InputError, ValidationError) as error:
        told = as_api_error(error)
        old = told.param or ""
        head = old.partition("[")[0]
        new = names.get(old) or (names[head] + old.removeprefix(head) if head in names else old)
        if new == old:
            raise told from None
        message = told.message.replace(old, new, 1)
        raise ApiError(told.status_code, message, param=new, code=told.code, headers=told.headers) from None


def error_body(error: ApiError, anthropic: bool = False) -> dict[str, Any]:
    """The JSON of an error."""
    status = error.status_code
    if anthropic:
        message = (
            error.message if not error.param or error.param in error.message else f"{error.param}: {error.message}"
        )
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: ApiError) -> Response:
    """The whole response to a request of that path."""
    return json_response(error_body(error, path.startswith("/v1/messages")), error.status_code, error.headers)


def install(app: FastAPI) -> None:
    """Map every exception that a route raises on purpose."""

    async def handle(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, as_api_error(error))

    for kind in (HTTPException, RequestValidationError, InputError, QueueFull, EngineDead):
        app.add_exception_handler(kind, handle)


def _invalid(errors: Any) -> ApiError:
    """What pydantic complains of: the first field that is wrong (of a union's branches the deepest), and all of it."""
    first = next(iter(errors))
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first['msg']}")
    same = [error for error in errors if error["loc"][:2] == first["loc"][:2]]
    param = _path(max((error["loc"] for error in same), key=lambda location: len(_path(location) or "")))
    said = [str(error["msg"]) for error in errors if _path(error["loc"]) == param]
    message = "; or ".join(dict.fromkeys(said))
    return bad_request(f"{param}: {message}" if param else f"the body: {message}", param)


def _path(location: Any) -> str | None:
    """("body", "messages", 0, "role") as messages[0].role, without the branches of unions that pydantic names."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in {"str", "int", "float", "bool", "dict"} and "[" not in part and "(" not in part:
            path += f".{part}" if path else part
    return path or None
