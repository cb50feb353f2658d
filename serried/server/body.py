"""Bodies: read within limits, and parsed so that what is no JSON text never gets further."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serried.server.errors import ApiError, bad_request, error_response


class RequestLimits:
    """Middleware: no body larger than `size` bytes, none that takes longer than `seconds`, headers within their limit.

    h11 looks at the size of headers only where they come in several pieces.
    """

    def __init__(self, app: ASGIApp, size: int, headers: int, seconds: float) -> None:
        self.app, self.size, self.headers, self.seconds = app, size, headers, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head = len(scope["raw_path"]) + len(scope["query_string"])
        if head + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > self.headers:
            told = ApiError(431, f"the headers are larger than {self.headers} bytes (--max-header-size)")
            await error_response(scope["path"], told)(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.size:
            await self._drain(receive)
            await error_response(scope["path"], self._too_large())(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        taken, arrived = 0, False
        deadline = asyncio.get_running_loop().time() + self.seconds

        async def limited() -> Message:
            nonlocal taken, arrived
            if arrived:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {self.seconds:g} s", headers=_CLOSE) from None
            taken += len(message.get("body", b""))
            arrived = not message.get("more_body", False)
            if taken > self.size:
                if not arrived:
                    await self._drain(receive)
                raise self._too_large()
            return message

        return limited

    async def _drain(self, receive: Receive) -> None:
        """Read on a while: a client that is still sending would take a closed connection for the answer."""
        taken = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self.seconds, 10.0)):
                while taken < 16 * self.size:
                    message = await receive()
                    taken += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.size} bytes (--max-body-size)", headers=_CLOSE)


_CLOSE = {"connection": "close"}  # what is left of the body is not read


class JsonRequest(Request):
    """A request whose JSON is strict: valid UTF-8, no lone surrogates, no NaN, no deep nesting."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise _named(body, error) from None


class JsonRoute(APIRoute):
    """A route that takes JSON, and says so where it is given something else.

    Were any other type taken as JSON, every web page could post here from its reader's browser unasked.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                raise ApiError(415, f"content-type must be application/json, not {kind or 'left out'}")
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def _named(body: bytes, error: ValueError) -> ApiError:
    """The error of a body, with the field where the value rather than the syntax is at fault."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    path = _culprit(value, "") if value is not None else None
    where = f"{path}: " if path else "the body: "
    return bad_request(f"{where}not JSON text: {error}", path)


def _culprit(value: Any, path: str) -> str | None:
    """Where the first lone surrogate, NaN or infinity is."""
    if isinstance(value, str):
        return path if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    return next((found for where, item in items if (found := _culprit(item, where))), None)
