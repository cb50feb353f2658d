"""The web page: a few files of the package, and nothing from anywhere else."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

from fastapi import APIRouter, Response

from serried.server.errors import ApiError

router = APIRouter(include_in_schema=False)
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# A page that shows what a model wrote must not run it, nor load or send anything elsewhere.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
async def page() -> Response:
    return await static("index.html")


@router.get("/static/{name}")
async def static(name: str) -> Response:
    """A file by its name; there are no others."""
    content = _files().get(name)
    if content is None:
        raise ApiError(404, "no such file")
    kind = _TYPES["." + name.rpartition(".")[2]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)


@lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    folder = files("serried.server") / "static"
    return {each.name: each.read_bytes() for each in folder.iterdir() if "." + each.name.rpartition(".")[2] in _TYPES}
