"""HTTP/1.1 on uvicorn, with two things that it lacks: errors as JSON, and a deadline for headers."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from serried.server.errors import ApiError, error_body
from serried.server.json_response import encode

HEADER_SECONDS = 30.0
LINGER_SECONDS = 2.0
TLS_END_SECONDS = 0.5  # for an idle client to answer to the end of its session


class Http1(H11Protocol):
    """One connection."""

    _deadline: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """An idle TLS client need not answer to the end of its session, and many do not: nobody waits for it."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(TLS_END_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Called while h11's error is being handled: it knows whether the headers were too long."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        hint: Any = getattr(sys.exc_info()[1], "error_status_hint", 400)
        status = 431 if hint == 431 else 400
        text = "the headers are too long (--max-header-size)" if status == 431 else "this is not HTTP"
        body = encode(error_body(ApiError(status, text)))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closed while data is still coming in, the connection would be reset, and the answer lost.
        self._refused = True
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _watch(self) -> None:
        """The clock runs from the first byte of a request (or the connection) until its headers are there."""
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
