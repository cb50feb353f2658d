"""The application: routes, and what stands before them, from the outside in: CORS, keys, loading, limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serried import __version__
from serried.engine.interface import AsyncEngine
from serried.server import (
    errors,
    routes_chat,
    routes_completions,
    routes_info,
    routes_messages,
    routes_page,
    routes_responses,
    routes_tokens,
)
from serried.server.auth import OPEN, ApiKeys
from serried.server.body import RequestLimits
from serried.server.errors import ApiError, as_api_error, error_response
from serried.server.openapi import ERRORS
from serried.server.options import ServerConfig
from serried.server.state import ServerState, new_id

Load = Callable[[], Awaitable[AsyncEngine]]
log = logging.getLogger("serried.server")


def create_app(
    config: ServerConfig,
    model: str,
    load: Load,
    ready: Callable[[ServerState], None],
    failed: Callable[[BaseException], None],
) -> FastAPI:
    """The ASGI application. It loads the engine once it runs, and answers meanwhile.

    model: its name, unless config has others. ready, failed: one of them is told how loading has ended.
    """
    state = ServerState(config, model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        loading = asyncio.create_task(_load(state, load, ready, failed))
        try:
            yield
        finally:
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
            if state.engine_or_none is not None:
                await state.engine_or_none.close()

    # /openapi.json is served, its pages in a browser are not: they load their scripts from elsewhere.
    app = FastAPI(
        title="Serried",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    app.state.serried = state
    errors.install(app)
    for each in (
        routes_info,
        routes_completions,
        routes_chat,
        routes_responses,
        routes_messages,
        routes_tokens,
        routes_page,
    ):
        app.include_router(each.router)
    # The last one added is the outermost.
    app.add_middleware(
        RequestLimits, size=config.max_body_size, headers=config.max_header_size, seconds=config.body_timeout
    )
    app.add_middleware(Closed, state=state)
    if config.api_key:
        app.add_middleware(ApiKeys, keys=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(Envelope, state=state)
    return app


async def _load(
    state: ServerState, load: Load, ready: Callable[[ServerState], None], failed: Callable[[BaseException], None]
) -> None:
    try:
        state.loaded(await load())
        ready(state)
    except Exception as error:
        failed(error)


class Closed:
    """Middleware: until the engine is there, and once the server drains, 503 on every route but /health."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._why() if scope["type"] == "http" and scope["path"] != OPEN else None
        if why is not None:
            await error_response(scope["path"], why)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _why(self) -> ApiError | None:
        if self.state.draining:
            headers = {"retry-after": "5", "connection": "close"}
            return ApiError(503, "the server is ending, and takes no new requests", code="draining", headers=headers)
        if self.state.engine_or_none is None:
            return ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "2"})
        return None


class Envelope:
    """Middleware: counts requests that are being answered, and responses by route and status; gives each an id.

    It answers where all else has failed.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id, started = new_id("req_").encode(), False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                # What matched, not what was asked for: a path of a client's own choosing is no label.
                route = getattr(scope.get("route"), "path", "other")
                self.state.metrics.responses.labels(route, str(message["status"])).inc()
                # OpenAI's clients look for the one, Anthropic's for the other.
                ids = [(b"x-request-id", id), (b"request-id", id)]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        self.state.answering += 1
        try:
            await self.app(scope, receive, counted)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await error_response(scope["path"], as_api_error(error))(scope, receive, counted)
        finally:
            self.state.answering -= 1
