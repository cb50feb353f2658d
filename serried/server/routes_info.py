"""What the server says of itself: /health, /ready, /version, /metrics, /stats, /v1/models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from serried import __version__
from serried.server.json_response import json_response
from serried.server.state import ServerState, state_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """The process is up: 200, also while the model is being loaded; 503 once the engine is down for good."""
    engine = state_of(request).engine_or_none
    failure = engine.failure if engine else None
    if failure is not None:
        return json_response({"status": "failed", "reason": failure}, 503)
    return json_response({"status": "ok", "engine": "loading" if engine is None else "up"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """A forward through all ranks has succeeded lately."""
    await state_of(request).engine.check_ready()
    return json_response({"status": "ready"})


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(state_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats")
async def stats(request: Request) -> Response:
    """The engine's figures as JSON, for the page's panel. Counters count from the engine's start."""
    state = state_of(request)
    figures = state.engine.stats()
    model = state.engine.model
    return json_response(
        {
            "time": time.monotonic(),
            "model": state.names[0],
            "max_model_len": model.max_model_len,
            "tensor_parallel_size": model.tensor_parallel_size,
            "stats": figures,
        }
    )


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names under which the model answers."""
    state = state_of(request)
    return json_response({"object": "list", "data": [_card(state, name) for name in state.names]})


@router.get("/v1/models/{name:path}")
async def one_model(name: str, request: Request) -> Response:
    state = state_of(request)
    return json_response(_card(state, state.check_model(name)))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "serried",
        "root": state.engine.model.name,
        "max_model_len": state.engine.model.max_model_len,
    }
