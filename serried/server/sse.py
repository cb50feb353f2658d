"""Server-sent events to a client that may leave, or never read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serried.errors import SerriedError
from serried.server.errors import ApiError
from serried.server.json_response import encode

T = TypeVar("T")
Render = Callable[[BaseException], bytes]
log = logging.getLogger("serried.server")
PATIENCE = 1.0  # seconds to wait for a first event, so that an error before it can have a status of its own
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """One event, with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(data) + b"\n\n"


class EventStream(Response):
    """Sends events as they come; closes their generator as soon as the client is gone or has stopped reading."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_interval: float, write_timeout: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._ping, self._timeout = ping_interval, write_timeout
        self._sending_since: float | None = None
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        jobs = [self._pump(send), _until_gone(receive), self._watch(send)]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(tasks)
            await self._events.aclose()
        if tasks[0].done() and not tasks[0].cancelled():
            tasks[0].result()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await self._send(send, data, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, more: bool) -> None:
        now = asyncio.get_running_loop().time
        self._sending_since = now()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since, self._sent = None, now()

    async def _watch(self, send: Send) -> None:
        """Breaks silence, so that nobody between takes the connection for dead; ends where nobody reads."""
        now = asyncio.get_running_loop().time
        self._sent = now()
        while True:
            await asyncio.sleep(min(self._ping, self._timeout) / 2)
            if self._sending_since is not None:
                if now() - self._sending_since > self._timeout:
                    return
            elif now() - self._sent > self._ping:
                await self._send(send, b": still working\n\n", more=True)


async def stream_of(
    events: AsyncGenerator[bytes, None], render: Render, *, ping_interval: float, write_timeout: float
) -> EventStream:
    """An EventStream. An error that comes at once is raised, so that it has a status; a later one is rendered."""
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait([first], timeout=PATIENCE)
        if first.done():
            first.result()
    except BaseException:
        await _end([first])
        await events.aclose()
        raise
    return EventStream(_chained(first, events, render), ping_interval=ping_interval, write_timeout=write_timeout)


async def _chained(
    first: Awaitable[bytes], events: AsyncGenerator[bytes, None], render: Render
) -> AsyncGenerator[bytes, None]:
    try:
        yield await first
        async for data in events:
            yield data
    except Exception as error:
        log.warning("a stream ended early: %s", error, exc_info=not isinstance(error, SerriedError))
        yield render(error)
    finally:
        await events.aclose()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled as soon as the client is gone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end([task, gone])


class ClientGone(ApiError):
    """There is nobody to answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client is gone")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


async def merged(sources: list[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What several generators give, as it comes; all are closed when one fails or the reader stops."""
    if len(sources) == 1:
        async for only in sources[0]:
            yield only
        return
    queue: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue(maxsize=len(sources))
    tasks = [asyncio.ensure_future(_feed(source, queue)) for source in sources]
    try:
        running = len(sources)
        while running:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await _end(tasks)
        for source in sources:
            await source.aclose()


async def _feed(source: AsyncIterator[T], queue: asyncio.Queue[tuple[T | None, BaseException | None]]) -> None:
    try:
        async for item in source:
            await queue.put((item, None))
        await queue.put((None, None))
    except Exception as error:
        await queue.put((None, error))
