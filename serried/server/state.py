"""ServerState: what all routes share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from serried.engine.interface import AsyncEngine, EngineStats, GrammarSpec
from serried.errors import QueueFull
from serried.server.errors import ApiError
from serried.server.metrics import Metrics
from serried.server.options import ServerConfig
from serried.text.reasoning import CLOSE
from serried.text.structured import GrammarVocabulary
from serried.text.tokenizer import Tokenizer
from serried.text.tools import ToolFormat, detect_format, tool_format


class ServerState:
    """The engine once it is loaded, its names and formats, the queue's gate, the metrics.

    answering: how many HTTP requests are being answered. draining: whether no new ones are taken, because the server
    ends when these are answered.
    """

    def __init__(self, config: ServerConfig, model: str) -> None:
        self.config = config
        self.names = config.served_model_name or (model,)
        self.created = int(time.time())
        self.engine_or_none: AsyncEngine | None = None
        self.chat_template = config.template()
        self.tools: ToolFormat | None = None
        self.has_reasoning = False
        self.metrics = Metrics(self._stats, self.names[0])
        self.answering = 0
        self.draining = False
        self._in_flight = 0
        self._mean_seconds = 1.0
        self.known_grammars: dict[GrammarSpec, None] = {}  # that compile, the oldest first
        self.compiling = asyncio.Semaphore(2)  # grammars at once: others get their share of the threads
        self._grammars: asyncio.Task[GrammarVocabulary] | None = None
        if config.tool_call_parser not in ("auto", "none"):
            self.tools = tool_format(config.tool_call_parser)  # an unknown name fails before the model is loaded

    def loaded(self, engine: AsyncEngine) -> None:
        """Take the engine: from here on requests are answered."""
        if self.chat_template is None and engine.tokenizer is not None and not self.config.skip_tokenizer_init:
            self.chat_template = engine.tokenizer.chat_template
        template = self.chat_template
        if self.config.tool_call_parser == "auto" and (name := detect_format(template)):
            self.tools = tool_format(name)
        thinks = template is not None and CLOSE in template
        self.has_reasoning = self.config.reasoning_parser == "think" or (
            self.config.reasoning_parser == "auto" and thinks
        )
        self.engine_or_none = engine

    @property
    def engine(self) -> AsyncEngine:
        if self.engine_or_none is None:
            raise ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "2"})
        return self.engine_or_none

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.config.skip_tokenizer_init else self.engine.tokenizer

    @property
    def thinking_switches(self) -> list[str]:
        """Variables of the chat template that turn reasoning on and off."""
        template, allowed = self.chat_template or "", self.config.allowed_chat_template_kwargs
        return [name for name in ("enable_thinking", "thinking") if name in allowed and name in template]

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; an error that says what needs it where there is none."""
        if self.tokenizer is None:
            raise ApiError(400, f"{what} needs a tokenizer, which this server has not: give the prompt as token ids")
        return self.tokenizer

    async def grammars(self) -> GrammarVocabulary:
        """The vocabulary for grammars, made when it is first asked for, off the event loop."""
        if self._grammars is None or (self._grammars.done() and self._grammars.exception()):
            model = self.engine.model
            tokenizer = self.need_tokenizer("structured output")
            ends = model.eos_ids or tokenizer.eos_ids
            self._grammars = asyncio.ensure_future(
                asyncio.to_thread(GrammarVocabulary, tokenizer, model.vocab_size, ends)
            )
        return await asyncio.shield(self._grammars)

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        """A place for so many sequences; QueueFull where too many wait already."""
        waiting = self._in_flight - self.engine.model.max_num_seqs
        if self._in_flight and waiting + sequences > self.config.max_queued_requests:
            rounds = max(1.0, waiting / self.engine.model.max_num_seqs)
            raise QueueFull(max(0, waiting), min(60.0, max(1.0, rounds * self._mean_seconds)))
        self._in_flight += sequences
        start = time.monotonic()
        try:
            yield
        finally:
            self._in_flight -= sequences
            self._mean_seconds += 0.1 * (time.monotonic() - start - self._mean_seconds)

    def check_model(self, name: str | None) -> str:
        """The name under which the model answers; 404 for another model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"the model {name[:200]!r} does not exist here; this server has {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def _stats(self) -> EngineStats | None:
        return self.engine_or_none.stats() if self.engine_or_none else None


def cache_salt(request: Request, given: str | None) -> str | None:
    """What a request's prefixes are shared under: its own salt, and its key's where there are several keys."""
    if given is not None and len(given) > 256:
        raise ApiError(400, f"cache_salt: {len(given)} characters; at most 256 are allowed", param="cache_salt")
    own = request.scope.get("state", {}).get("salt") if len(state_of(request).config.api_key) > 1 else None
    return given if own is None else f"{own}:{given or ''}"


def state_of(request: Request) -> ServerState:
    """The state of the app that a request came to."""
    state: ServerState = request.app.state.serried
    return state


def new_id(prefix: str) -> str:
    """A random id of a request or response."""
    return prefix + secrets.token_hex(12)
