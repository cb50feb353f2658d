"""API keys: on every route but /health."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from serried.server.errors import ApiError, error_response

OPEN = "/health"


class ApiKeys:
    """Middleware: lets in who brings a key as `Authorization: Bearer`, as `x-api-key`, or as a password.

    The last is for browsers, which ask for it by themselves. Which route is open is decided by the path alone, and
    keys are compared as digests, in constant time.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == OPEN:
            await self.app(scope, receive, send)
            return
        given = _digest(_key(dict(scope["headers"])))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            ask = {"www-authenticate": 'Basic realm="serried", charset="UTF-8"'}
            message = "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key"
            response = error_response(scope["path"], ApiError(401, message, code="invalid_api_key", headers=ask))
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["salt"] = given.hex()
        await self.app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")
