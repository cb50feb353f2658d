"""The process that renders chat templates, apart from ours, and its two ends of the link."""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

from serried.errors import InputError

SECONDS: Final = 5.0  # a rendering takes less than a millisecond, unless it was written to take long
_START_SECONDS: Final = 60.0
_MEMORY: Final = 1 << 30
_OUTPUT: Final = 1 << 24


class Renderer:
    """A child process that renders templates, one at a time, started by the first.

    A template is code that came with a model or a request. Only a process can be stopped for certain
    whatever it does (a loop, `9**9**9`, a string of gigabytes): the child has a timer that kills it, a
    limit on its memory, and nothing else to lose. The timer is its own, so it ends even without a parent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0

    def render(self, template: str, variables: dict[str, Any]) -> str:
        request = json.dumps({"template": template, "variables": variables, "seconds": SECONDS}).encode()
        with self._lock:
            connection = self._connect()
            connection.settimeout(SECONDS * 3)  # the child's own timer comes first
            try:
                _send(connection, request)
                reply = json.loads(_receive(connection))
            except OSError:  # a time-out too
                self.close()
                raise InputError(
                    f"the chat template was stopped: it took more than {SECONDS:g} s or {_MEMORY >> 20} MiB"
                ) from None
        if "error" in reply:
            raise InputError(f"chat template: {reply['error']}")
        text: str = reply["text"]
        return text

    def _connect(self) -> socket.socket:
        # After a fork the child belongs to the other process.
        alive = self._owner == os.getpid() and self._child is not None and self._child.poll() is None
        if alive and self._socket is not None:
            return self._socket
        self.close()
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path = sys.argv[2:]; from {__name__} import _serve; _serve(int(sys.argv[1]))"
        paths = [str(Path(entry).absolute()) for entry in sys.path]
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), *paths],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
        self._socket, self._owner = ours, os.getpid()
        ours.settimeout(_START_SECONDS)
        try:
            _receive(ours)
        except OSError:
            self.close()
            raise InputError("the process that renders chat templates did not start") from None
        return ours

    def close(self) -> None:
        """Stop the child, if there is one and it is ours."""
        if self._socket is not None:
            self._socket.close()
        if self._child is not None and self._owner == os.getpid():
            self._child.kill()
            self._child.wait()
        self._child = self._socket = None


renderer = Renderer()
atexit.register(renderer.close)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    """One message; the end of the connection -> ConnectionError."""
    chunks: list[bytes] = []
    wanted, size = 8, 0
    header = True
    while True:
        chunk = connection.recv(min(wanted - size, 1 << 20))
        if not chunk:
            raise ConnectionError("closed")
        chunks.append(chunk)
        size += len(chunk)
        if size < wanted:
            continue
        message = b"".join(chunks)
        if not header:
            return message
        header, chunks, wanted, size = False, [], struct.unpack("<Q", message)[0], 0


def _serve(descriptor: int) -> None:
    """The child: render until the parent closes its end."""
    import resource
    import signal

    _compiler()  # import all before the limits hold
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as connection, suppress(ConnectionError):
        _send(connection, b"ready")
        while True:
            request = json.loads(_receive(connection))
            # The default action of its signal ends the process, in C code too.
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            reply = json.dumps(_answer(request["template"], request["variables"])).encode()
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(connection, reply)


def _answer(template: str, variables: dict[str, Any]) -> dict[str, str]:
    try:
        pieces, size = [], 0
        for piece in _compiler()(template).generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > _OUTPUT:
                return {"error": f"it writes more than {_OUTPUT} characters"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": f"it needs more than {_MEMORY >> 20} MiB"}
    except RecursionError:
        return {"error": "it recurses too deeply"}
    except Exception as error:  # whatever a template does wrong is the template's message
        line = getattr(error, "lineno", None)
        return {"error": f"{error}" + (f" (line {line})" if line else "")}


@lru_cache(maxsize=1)
def _compiler() -> Callable[[str], Any]:
    """A sandbox with what templates on the hub rely on, as Hugging Face documents it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only a block."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it without ClassVar

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: object) -> NoReturn:
        raise TemplateError(str(message))

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return lru_cache(maxsize=8)(environment.from_string)
