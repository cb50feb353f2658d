"""The server's log: a line each on stderr, written by a thread, so that a stderr nobody reads holds no answer up."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from typing import Any

from serried.server.options import ServerConfig

MOST_LINES = 10_000  # that wait for a reader; what comes on top of them is counted, not kept
_FLUSH_SECONDS = 1.0


class ThreadHandler(logging.Handler):
    """Writes records on stderr from a thread of its own.

    A pipe that nobody reads and a terminal stopped by Ctrl-S take 64 KiB and then block whoever writes: here that is
    the thread, never the event loop. Lines beyond `MOST_LINES` are lost, and the log says how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost = 0
        self._put, self._written = 0, 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock, by any thread."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._lines.qsize() >= MOST_LINES:
            self._lost += 1
            return
        if self._lost:
            line = f"{self._lost} lines of this log are lost: nobody read stderr\n{line}"
            self._lost = 0
        self._put += 1
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._written < self._put and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        self._lines.put(None)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            _write_on_stderr(f"{line}\n".encode(errors="backslashreplace"))
            self._written += 1


def _write_on_stderr(data: bytes) -> None:
    """Past sys.stderr's buffer, whose lock a write that never returns would keep at the interpreter's end."""
    try:
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]
    except (AttributeError, OSError, ValueError):
        pass  # stderr is closed or was never there


class _Asked(logging.Filter):
    """Keeps out what asks every second or so: probes, scrapes, the page's panel."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not (len(arguments) > 2 and arguments[2] in ("/health", "/ready", "/metrics", "/stats"))


def log_config(config: ServerConfig) -> dict[str, Any]:
    """All logs on stderr, a line each; as `logging.config.dictConfig` takes it."""
    level = config.log_level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s [server] %(message)s"}},
        "filters": {"asked": {"()": _Asked}},
        "handlers": {"stderr": {"()": ThreadHandler, "formatter": "line"}},
        "loggers": {
            "serried": {"handlers": ["stderr"], "level": level, "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            "uvicorn.access": {"handlers": ["stderr"], "level": level, "propagate": False, "filters": ["asked"]},
        },
    }


def flush() -> None:
    """Have what was logged written, before an end that runs no exit handlers."""
    for handler in logging.getLogger("serried").handlers:
        handler.flush()
