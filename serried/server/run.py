"""Runs the server: the port is bound before the model is loaded, so that nothing is lost to a port in use."""

from __future__ import annotations

import logging
import logging.config
import socket
import ssl
from typing import Any

import uvicorn

from serried.errors import InputError
from serried.server.app import Load, create_app
from serried.server.http1 import Http1
from serried.server.options import ServerConfig

log = logging.getLogger("serried.server")
_SHUTDOWN_SECONDS = 10


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
    """A server of one app; `error` is why the model could not be loaded, if it could not."""

    def __init__(self, config: ServerConfig, model: str, load: Load) -> None:
        self.error: BaseException | None = None
        app = create_app(config, model, load, self._failed)
        super().__init__(
            uvicorn.Config(
                app,
                http=Http1,
                ws="none",
                loop="asyncio",
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

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.should_exit = True


def serve(config: ServerConfig, model: str, load: Load) -> None:
    """Serve until told to stop; raises what loading raised."""
    with bind(config) as listener:
        server = Server(config, model, load)
        scheme = "https" if config.ssl_certfile else "http"
        host, port = listener.getsockname()[:2]
        log.info("listening on %s://%s:%d, loading %s", scheme, f"[{host}]" if ":" in host else host, port, model)
        server.run(sockets=[listener])
        if server.error is not None:
            raise server.error


class _Asked(logging.Filter):
    """Keeps out what asks every second or so: probes, scrapes, the page's panel."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not (len(arguments) > 2 and arguments[2] in ("/health", "/ready", "/metrics", "/stats"))


def log_config(config: ServerConfig) -> dict[str, Any]:
    """All logs on stderr, a line each."""
    level = config.log_level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s [server] %(message)s"}},
        "filters": {"asked": {"()": _Asked}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {
            "serried": {"handlers": ["stderr"], "level": level, "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            "uvicorn.access": {"handlers": ["stderr"], "level": level, "propagate": False, "filters": ["asked"]},
        },
    }
