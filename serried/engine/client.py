"""ProcessEngine: an engine in a process of its own, asked over ZMQ. What the server runs on.

The process that is started here holds rank 0; its ranks are its children. When any of them dies, stalls or raises, all
are ended, the first error is logged, a new set is started, and every request in flight is handed in again with the
tokens that it has already. Because the engine is exact, a client sees a pause, then the very text that it would have
got.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from serried.config import EngineConfig, child_environment
from serried.engine.flight import Flight
from serried.engine.folder import private_folder
from serried.engine.interface import EngineStats, GrammarSpec, ModelInfo, TokenDelta
from serried.engine.wire import (
    Abort,
    Add,
    Alive,
    Close,
    Deltas,
    Figures,
    FromEngine,
    Loading,
    Probe,
    Refused,
    Setup,
    ToEngine,
    Up,
)
from serried.errors import EngineDead, InputError, QueueFull, RankFailed
from serried.parallel.launch import RankProcesses
from serried.sampling_params import SamplingParams
from serried.text.bad_words import spell_out
from serried.text.tokenizer import Tokenizer
from serried.weights.load import Progress

PROCESS_MODULE = "serried.engine.process"
LOOK_AROUND = 0.2  # seconds between two looks at the liveness of the process
MOST_DEATHS, WITHIN = 3, 300.0  # so many deaths in so many seconds are too many
PROBE_TIMEOUT = 30.0  # seconds that a forward may take before the engine is not ready
PROBE_AGE = 5.0  # seconds for which a success counts

log = logging.getLogger("serried.engine")


class ProcessEngine:
    """See AsyncEngine. Made with `await ProcessEngine.start(...)`; belongs to the event loop that it was made in."""

    def __init__(self, config: EngineConfig, model: ModelInfo, tokenizer: Tokenizer | None, max_waiting: int) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.up: Up | None = None
        self._max_waiting = max_waiting
        self._flights: dict[str, Flight] = {}
        self._stats = EngineStats()
        self._before = EngineStats()  # of the processes that have died
        self._probes: dict[int, asyncio.Future[None]] = {}
        self._alive_at = 0.0
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._dead: EngineDead | None = None
        self._folder = private_folder()
        self._context = zmq.asyncio.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: RankProcesses | None = None
        self._sockets: tuple[zmq.asyncio.Socket, ...] = ()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        max_waiting: int = 1024,
        progress: Progress | None = None,
    ) -> ProcessEngine:
        """Start the process and wait until it is there. InputError or RankFailed where it does not come up."""
        engine = cls(config, model, tokenizer, max_waiting)
        try:
            engine.up = await engine._launch(progress)
        except BaseException as error:
            await engine.close()
            if isinstance(error, RankFailed) and error.input_error:
                raise error.input_error from error
            raise
        engine._tasks.append(asyncio.create_task(engine._run()))
        return engine

    @property
    def failure(self) -> str | None:
        """See AsyncEngine."""
        return str(self._dead) if self._dead else None

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: GrammarSpec | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """See AsyncEngine.generate."""
        if self._dead:
            raise self._dead
        if request_id in self._flights:
            raise InputError(f"request_id: {request_id!r} is in use")
        if params.seed is None:  # drawn here, so that it is the same after a restart
            params = replace(params, seed=secrets.randbits(64))
        words = spell_out(params.bad_words, self.tokenizer)
        add = Add(request_id, list(prompt), params, words, priority, cache_salt, grammar)
        flight = self._flights[request_id] = Flight(add, {index: [] for index in range(params.n)})
        unfinished = set(flight.outputs)
        try:
            await self._send(add)
            while unfinished:
                delta = await flight.deltas.get()
                if isinstance(delta, Exception):
                    flight.outputs.clear()
                    raise delta
                if delta.finish_reason:
                    unfinished.discard(delta.index)
                yield delta
        finally:
            del self._flights[request_id]
            if flight.outputs:
                await self._send(Abort(request_id))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """See AsyncEngine.abort."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        for each in list(flight.outputs) if index is None else [index]:
            if flight.outputs.pop(each, None) is not None:
                flight.deltas.put_nowait(TokenDelta(each, finish_reason="abort"))
        await self._send(Abort(request_id, index))

    def stats(self) -> EngineStats:
        """See AsyncEngine.stats."""
        now, before = self._stats, self._before
        return replace(
            now,
            **{name: getattr(now, name) + getattr(before, name) for name in _COUNTERS},
            restarts=before.restarts,
        )

    async def check_ready(self) -> None:
        """See AsyncEngine.check_ready."""
        if self._dead:
            raise self._dead
        if self.up is None:
            raise EngineDead("a rank has failed, and the engine is being started again")
        if time.monotonic() - self._alive_at < PROBE_AGE:
            return
        number = secrets.randbits(62)
        answer = self._probes[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(Probe(number))
            await asyncio.wait_for(answer, PROBE_TIMEOUT)
        except TimeoutError:
            raise EngineDead(f"no forward has succeeded within {PROBE_TIMEOUT:g} s") from None
        finally:
            self._probes.pop(number, None)

    async def close(self) -> None:
        """See AsyncEngine.close."""
        self._die(EngineDead("the engine has been closed"))
        if self.up is not None:  # else nobody is there, and ZMQ would wait for somebody to come
            with suppress(TimeoutError, zmq.ZMQError):
                await asyncio.wait_for(self._send(Close()), 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    # The process

    async def _launch(self, progress: Progress | None = None) -> Up:
        """Start a process, and wait for its Up."""
        folder = Path(self._folder.name) / secrets.token_hex(4)
        folder.mkdir()
        self._sockets = self._bind(zmq.PUSH, folder / "requests"), self._bind(zmq.PULL, folder / "answers")
        self._requests, self._answers = self._sockets
        setup = Setup(self.config, str(folder), self._max_waiting)
        self._processes = await asyncio.to_thread(
            RankProcesses,
            PROCESS_MODULE,
            1,
            msgspec.msgpack.encode(setup),
            self.config.threads,
            child_environment(),
            first=0,
        )
        while not isinstance(message := await self._next(), Up):
            if progress and isinstance(message, Loading):
                progress(message.done, message.total)
        return message

    def _bind(self, kind: int, path: Path) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{path}")
        return socket

    async def _end(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            await asyncio.to_thread(processes.close)
        for socket in self._sockets:
            socket.close()

    async def _next(self) -> FromEngine:
        """The next message; RankFailed where the process has died meanwhile."""
        while not await self._answers.poll(int(LOOK_AROUND * 1000)):
            if self._processes is not None:
                self._processes.check()
        message: FromEngine = self._decoder.decode(await self._answers.recv())
        return message

    async def _send(self, message: ToEngine) -> None:
        """Tell the process, where there is one; what a request is about, the next one is told in any case."""
        if self.up is None:
            return
        try:
            await self._requests.send(self._encoder.encode(message))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Else the process has died, and with its socket this send: nobody has cancelled the caller.

    async def _run(self) -> None:
        """Pass messages on, and start anew after a death."""
        while True:
            try:
                while True:
                    self._receive(await self._next())
            except RankFailed as error:
                if not await self._restart(error):
                    return

    async def _restart(self, error: RankFailed) -> bool:
        """A new process, which gets all that is in flight; False where too many have died."""
        while True:
            log.error("%s%s", error, f"\n{error.traceback}" if error.traceback else "")
            self._not_ready()
            await self._end()
            self._deaths.append(time.monotonic())
            if len(self._deaths) == MOST_DEATHS and self._deaths[-1] - self._deaths[0] < WITHIN:
                why = f"the engine has died {MOST_DEATHS} times in {WITHIN:g} s, the last time of: {error}"
                self._die(EngineDead(why))
                return False
            self._before = replace(self.stats(), restarts=self._before.restarts + 1)
            self._stats = EngineStats()
            for flight in self._flights.values():
                flight.see_death()
            log.warning("starting the ranks again; %d requests go on after that", len(self._flights))
            try:
                up = await self._launch()
            except RankFailed as again:
                error = again
                continue
            except InputError as refusal:
                self._die(EngineDead(f"the engine could not be started again: {refusal}"))
                return False
            # From here on new requests go to the process by themselves: those that are here now are handed in again.
            self.up, flights = up, list(self._flights.items())
            for id, flight in flights:
                if flight.outputs and self._flights.get(id) is flight:
                    await self._send(flight.rest)
            return True

    def _die(self, error: EngineDead) -> None:
        """Every request ends with this error, those that are yet to come too."""
        self._dead = self._dead or error
        for flight in self._flights.values():
            flight.deltas.put_nowait(error)
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(error)

    def _not_ready(self) -> None:
        """Until the next process is there; nobody will answer the probes that are under way."""
        self.up, self._alive_at = None, 0.0
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(EngineDead("a rank failed while this forward ran"))

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self._alive_at = time.monotonic()
            for id, delta in message.items:
                if flight := self._flights.get(id):
                    flight.take(delta)
        elif isinstance(message, Figures):
            self._stats = message.stats
        elif isinstance(message, Alive):
            self._alive_at = time.monotonic()
            answer = self._probes.get(message.number)
            if answer and not answer.done():
                answer.set_result(None)
        elif isinstance(message, Refused) and (flight := self._flights.get(message.id)):
            full = message.waiting is not None
            flight.deltas.put_nowait(QueueFull(message.waiting or 0) if full else InputError(message.message))


_COUNTERS = (
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "prompt_tokens",
    "generated_tokens",
    "steps",
    "step_seconds",
)
