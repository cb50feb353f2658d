"""What the front end and the engine's process say to each other: plain structs, as msgpack over ZMQ."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serried.config import EngineConfig
from serried.engine.interface import EngineStats, GrammarSpec, TokenDelta
from serried.sampling_params import SamplingParams


class Setup(msgspec.Struct, frozen=True):
    """What the engine's process is started with. address: the folder of its sockets, private to this user."""

    config: EngineConfig
    address: str
    max_waiting: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How much of the model is loaded, in elements of rank 0."""

    done: int
    total: int


class Up(msgspec.Struct, frozen=True, tag=True):
    """The engine is there."""

    max_model_len: int
    blocks: int
    weight_bytes: int  # of the largest rank
    cache_bytes: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """A request. prompt: token ids. bad_words: the params' as token ids.

    outputs: the samples that shall run, by index, each with the tokens that it has already: after a restart a request
    goes on where it was. None: all samples, from their beginning.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    bad_words: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None
    grammar: GrammarSpec | None = None
    outputs: dict[int, list[int]] | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one sample of it."""

    id: str
    index: int | None = None


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Ask for a sign of life: a forward through all ranks."""

    number: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """End."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was not taken. waiting: how many wait already, where that is why; else the message says why."""

    id: str
    message: str
    waiting: int | None = None


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """What a step gave, by request."""

    items: Sequence[tuple[str, TokenDelta]]


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Probe."""

    number: int


class Figures(msgspec.Struct, frozen=True, tag=True):
    """How the engine is doing."""

    stats: EngineStats


ToEngine = Add | Abort | Probe | Close
FromEngine = Loading | Up | Refused | Deltas | Alive | Figures
