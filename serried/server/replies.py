"""A reply, whole or as events: what the four interfaces share, and the chunks of OpenAI's two older ones."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from fastapi import Request, Response

from serried.server.answers import Piece, Question
from serried.server.errors import as_api_error, error_body
from serried.server.json_response import json_response
from serried.server.protocol_common import SamplingFields
from serried.server.questions import pieces_of
from serried.server.sse import DONE, event, stream_of, while_connected
from serried.server.state import ServerState, new_id
from serried.server.usage import Usage

Pieces = AsyncGenerator[Piece, None]


class Reply(ABC):
    """One request's reply. Closing its pieces ends the samples in the engine too."""

    @abstractmethod
    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        """The JSON when all samples have ended."""

    @abstractmethod
    def stream(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """The events as the pieces come, which it closes."""

    def failed(self, error: BaseException) -> bytes:
        """The last events of a stream after an error in its midst."""
        return event(error_body(as_api_error(error))) + DONE

    async def send(
        self, request: Request, state: ServerState, questions: Sequence[Question], *, arrived: float, stream: bool
    ) -> Response:
        """Ask the engine and answer the client. arrived: when the request did, by time.monotonic()."""
        pieces, config = pieces_of(state, questions, arrived), state.config
        if not stream:
            try:
                return json_response(await while_connected(request, self.whole(pieces)))
            finally:
                await pieces.aclose()
        return await stream_of(
            self.stream(pieces),
            self.failed,
            ping_interval=config.ping_interval,
            write_timeout=config.write_timeout,
        )


class ChoicesReply(Reply):
    """A reply made of choices. Streamed, each chunk holds one of them; the usage is in a last one, if asked for."""

    def __init__(self, prefix: str, kind: str, model: str, body: SamplingFields, questions: Sequence[Question]) -> None:
        self.head = {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}
        self.usage = Usage(sum(len(each.prompt) for each in questions))
        self._options = body.stream_options

    @abstractmethod
    def chunks(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """What a piece adds, as choices of a stream."""

    async def stream(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """One event a choice."""
        with_usage = self._options is not None and bool(self._options.include_usage)
        running = self._options is not None and bool(self._options.continuous_usage_stats)
        try:
            async for piece in pieces:
                for choice in self.chunks(piece):
                    chunk: dict[str, Any] = {**self.head, "choices": [choice]}
                    if with_usage or running:
                        chunk["usage"] = self.usage.to_dict() if running else None
                    yield event(chunk)
            if with_usage:
                yield event({**self.head, "choices": [], "usage": self.usage.to_dict()})
            yield DONE
        finally:
            await pieces.aclose()
