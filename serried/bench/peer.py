"""One engine in a process of its own, to be measured in turn with another: both ends of the conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from serried.config import EngineConfig, child_environment
from serried.errors import InputError, RankFailed, SerriedError
from serried.parallel.launch import RankProcesses
from serried.parallel.link import ChildLink

TIMEOUT = 600.0  # seconds that an answer may take: loading a large file is the longest


class Setup(msgspec.Struct, frozen=True):
    """What a peer opens: a GGUF file, with so many threads (Serried: as the config says).

    sequences, positions: the most of each that a task will ask for.
    """

    path: str
    threads: int
    config: EngineConfig
    sequences: int
    positions: int


class Task(msgspec.Struct, frozen=True):
    """What is timed: `steps` steps of `tokens` tokens of each sequence, after `context` tokens that are not timed.

    Either one step (a prefill) or one token a step (decoding).
    """

    sequences: int
    context: int
    tokens: int
    steps: int

    @property
    def positions(self) -> int:
        """Positions of a sequence that the cache must hold."""
        return self.context + self.tokens * self.steps

    @property
    def timed_tokens(self) -> int:
        return self.sequences * self.tokens * self.steps


class About(msgspec.Struct, frozen=True):
    """What a peer says of itself once it has opened the file."""

    version: str = ""
    build: str = ""
    load_s: float = 0.0
    peak_rss_mib: float = 0.0


class Request(msgspec.Struct, frozen=True):
    """To a peer. task: prepare it (run it once); none: run the one prepared again. prompt: give the logits after it."""

    task: Task | None = None
    prompt: list[int] = []


class Answer(msgspec.Struct, frozen=True):
    """From a peer: what it is, the seconds of a run, logits (float32, little-endian), or what the user did wrong."""

    about: About = About()
    seconds: float = 0.0
    logits: bytes = b""
    error: str = ""


class Engine(Protocol):
    """What the child of a peer must be able to do."""

    @property
    def about(self) -> About: ...

    def prepare(self, task: Task) -> None:
        """Make ready for a task: fill the cache with its context."""
        ...

    def run(self) -> float:
        """The seconds of the prepared task's steps; the context stays, so that it can be run again."""
        ...

    def logits(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits [vocabulary] after a prompt; what was prepared is lost."""
        ...


class Peer:
    """The parent's end: starts `python -m module` and asks it for one thing at a time.

    Raises InputError with what the child found wrong with the user's input, RankFailed with its traceback otherwise,
    or with `hint` where it died without one.
    """

    def __init__(self, name: str, module: str, setup: Setup, hint: str = "") -> None:
        self.name, self._hint = name, hint
        payload = msgspec.msgpack.encode(setup)
        self._child = RankProcesses(module, 1, payload, setup.threads, child_environment(), first=0)
        try:
            self.about = self._answer().about
        except BaseException:
            self.close()
            raise

    def prepare(self, task: Task) -> float:
        """Make ready for a task and run it once, to warm up; the seconds of that run."""
        return self._ask(Request(task)).seconds

    def run(self) -> float:
        """Seconds of the steps of the task that was prepared."""
        return self._ask(Request()).seconds

    def logits(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        return np.frombuffer(self._ask(Request(prompt=list(prompt))).logits, np.float32)

    def close(self) -> None:
        self._child.close()

    def _ask(self, request: Request) -> Answer:
        self._child.broadcast(msgspec.msgpack.encode(request))
        return self._answer()

    def _answer(self) -> Answer:
        try:
            answer = msgspec.msgpack.decode(self._child.recv(0, TIMEOUT), type=Answer)
        except RankFailed as error:
            hint = "" if error.traceback else self._hint
            raise RankFailed(error.rank, f"{self.name}: {error.reason}{hint}", error.traceback) from None
        if answer.error:
            raise InputError(answer.error)
        return answer


def serve(open_engine: Callable[[Setup, ExitStack], Engine]) -> None:
    """The child's life: open the file, then do what the parent asks for, until it hangs up.

    The engine's resources are given back through the stack.
    """
    with ChildLink.from_argv() as link, ExitStack() as stack:
        setup = msgspec.msgpack.decode(link.payload, type=Setup)

        def say(answer: Answer) -> None:
            link.send(msgspec.msgpack.encode(answer))

        try:
            engine = open_engine(setup, stack)
            link.ready()
            say(Answer(engine.about))
            while True:
                say(_do(engine, msgspec.msgpack.decode(link.recv(), type=Request)))
        except SerriedError as error:
            say(Answer(error=str(error)))


def _do(engine: Engine, request: Request) -> Answer:
    if request.prompt:
        return Answer(logits=engine.logits(request.prompt).astype("<f4").tobytes())
    if request.task:
        engine.prepare(request.task)
    return Answer(seconds=engine.run())
