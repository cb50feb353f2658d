"""`python -m serried.engine.process`: the process of rank 0, with an engine that is asked over ZMQ."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from serried.engine.build import build_core, load_tokenizer
from serried.engine.executor import create_executor
from serried.engine.service import EngineService
from serried.engine.wire import Close, FromEngine, Loading, Setup, ToEngine, Up
from serried.models.registry import open_model
from serried.parallel.link import ChildLink
from serried.weights.load import Progress

IDLE_LOOK = 0.5  # seconds that an idle engine waits for a message before it reports again
TELL_EVERY = 0.1  # seconds between two words on how far loading is


class Sockets:
    """The engine's two: requests come in on one, what it has to say goes out on the other."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._in = self._open(zmq.PULL, Path(address) / "requests")
        self._out = self._open(zmq.PUSH, Path(address) / "answers")
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def _open(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(f"ipc://{path}")
        return socket

    def receive(self, seconds: float) -> ToEngine | None:
        """The next message; None where none has come within so long."""
        if not self._in.poll(int(seconds * 1000)):
            return None
        return self._decoder.decode(self._in.recv())

    def send(self, message: FromEngine) -> None:
        self._out.send(self._encoder.encode(message))

    def close(self) -> None:
        self._context.destroy()


def main() -> None:
    """Load the model, say so, then take requests until told to close, or until whoever started this process ends."""
    with ChildLink.from_argv() as link:
        setup = msgspec.msgpack.decode(link.payload, type=Setup)
        weights = setup.config.load_format != "dummy"
        source = open_model(setup.config.model, setup.config.revision, weights=weights)
        tokenizer = load_tokenizer(source)
        sockets = Sockets(setup.address)
        executor = None
        try:
            executor = create_executor(setup.config, source, told_sometimes(sockets.send))
            core = build_core(executor, source, tokenizer)
            service = EngineService(core, executor, tokenizer, setup.max_waiting, sockets.send)
            worker = executor.worker
            sockets.send(
                Up(
                    max_model_len=executor.max_model_len,
                    blocks=worker.cache.blocks,
                    weight_bytes=worker.weight_bytes_per_step,
                    cache_bytes=worker.cache.blocks * worker.cache.bytes_per_block,
                )
            )
            link.ready()
            gc.freeze()  # what loading has made stays: no pause of a step to look through it again
            serve(service, sockets)
        finally:
            if executor is not None:
                executor.close()
            sockets.close()


def told_sometimes(send: Callable[[FromEngine], None]) -> Progress:
    """A progress of loading that is sent on, but not for every piece of a tensor."""
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_EVERY or done == total:
            told = now
            send(Loading(done, total))

    return tell


def serve(service: EngineService, sockets: Sockets) -> None:
    """Take what has come, then step, until told to close."""
    while True:
        message = sockets.receive(IDLE_LOOK if service.idle else 0)
        while message is not None:
            if isinstance(message, Close):
                return
            service.take(message)
            message = sockets.receive(0)
        service.step()


if __name__ == "__main__":
    main()
