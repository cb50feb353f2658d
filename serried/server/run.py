"""Runs the server: the port is bound before the model is loaded, so that nothing is lost to a port in use."""

from __future__ import annotations

import json
import logging
import signal
import socket
import ssl
import time
from types import FrameType
from typing import Any

import uvicorn

from serried.errors import InputError
from serried.server.app import Load, create_app
from serried.server.http1 import Http1
from serried.server.log import flush, log_config
from serried.server.options import ServerConfig
from serried.server.state import ServerState

log = logging.getLogger("serried.server")
_SHUTDOWN_SECONDS = 10  # that answers are waited for in the end


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket; InputError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Named as TCP, or asyncio would leave Nagle's algorithm on: 40 ms between the headers and the body of an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: one whose client takes nothing for so long is ended by the kernel.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout * 1000))
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise InputError(f"--host {config.host} --port {config.port}: {error.strerror or error}") from None
    listener.set_inheritable(False)
    return listener


class Server(uvicorn.Server):
    """A server of one app; `error` is why the model could not be loaded, if it could not.

    SIGTERM: what is being answered is answered to its end, new requests get a 503, then it ends with status 0. A second
    one, one while the model is being loaded, and SIGINT end it sooner.
    """

    def __init__(self, config: ServerConfig, model: str, load: Load) -> None:
        self.error: BaseException | None = None
        self.url = ""
        self._drain_seconds = config.drain_timeout
        self._drain_until: float | None = None
        app = create_app(config, model, load, self._ready, self._failed)
        super().__init__(
            uvicorn.Config(
                app,
                http=Http1,
                ws="none",
                loop="auto",
                lifespan="on",
                log_config=log_config(config),
                access_log=config.access_log,
                server_header=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
                h11_max_incomplete_event_size=config.max_header_size,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
            )
        )

        self._state: ServerState = app.state.serried

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come. One that is handed on is raised again in the end, and becomes the exit status."""
        if sig != signal.SIGTERM:
            super().handle_exit(sig, frame)
        elif self._state.engine_or_none is None or self._state.draining:
            self.should_exit = True
        else:
            self._state.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._state.draining:
            now, waiting = time.monotonic(), self._state.answering
            if self._drain_until is None:
                self._drain_until = now + self._drain_seconds
                log.info("SIGTERM: %d requests are answered to their end, new ones get a 503", waiting)
            if not waiting or now > self._drain_until:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """After it a signal that was handed on may end the process at once, so the log is written first."""
        await super().shutdown(sockets)
        flush()

    def _ready(self, state: ServerState) -> None:
        log.info("ready at %s; try it:\n%s", self.url, example_request(self.url, state))

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.should_exit = True


def serve(config: ServerConfig, model: str, load: Load) -> None:
    """Serve until told to stop; raises what loading raised."""
    with bind(config) as listener:
        server = Server(config, model, load)
        server.url = url_of(config, listener)
        log.info("listening on %s, loading %s", server.url, model)
        server.run(sockets=[listener])
        if server.error is not None:
            raise server.error


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """The address to paste; of a server that listens on every address, this machine's own."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def example_request(url: str, state: ServerState) -> str:
    """A command that asks the server something, in what this model can be asked in."""
    body: dict[str, Any]
    if state.tokenizer is None:
        path, body = "completions", {"prompt": [1, 2, 3]}
    elif state.chat_template is None:
        path, body = "completions", {"prompt": "Once upon a time"}
    else:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Name three rivers."}]}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if state.config.api_key else ""
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
