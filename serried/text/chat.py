"""Chat templates: messages to one prompt, whose control tokens are the template's own and no others."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

from serried.errors import InputError
from serried.text.tokenizer import Tokenizer, check_text

SECONDS: Final = 5.0  # a rendering takes less than a millisecond, unless it was written to take long
_START_SECONDS: Final = 60.0
_MEMORY: Final = 1 << 30
_OUTPUT: Final = 1 << 24
_ZERO_WIDTH_SPACE: Final = "\u200b"

Messages = Sequence[Mapping[str, Any]]


def render(
    source: Tokenizer | str,
    messages: Messages,
    add_generation_prompt: bool = True,
    *,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """The prompt that a template (or a tokenizer's own template) makes of messages; `kwargs` go to it too.

    Malformed messages, or a template that raises, runs too long or needs too much memory -> InputError.
    """
    template, variables = _inputs(source, messages, add_generation_prompt, chat_template, kwargs)
    return _renderer.render(template, variables)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    add_generation_prompt: bool = True,
    *,
    chat_template: str | None = None,
    **kwargs: Any,
) -> list[int]:
    """The ids of a rendered chat, in which special-token literals inside the messages stay text.

    Such a literal gets a private mark after its first character before the template sees it, so the
    template's own ones are those without; the marks are taken out before encoding. Should a template
    notice (it renders something else with marks than without), the mark is a zero-width space that stays.
    Errors as `render`.
    """
    template, variables = _inputs(tokenizer, messages, add_generation_prompt, chat_template, kwargs)
    literals = tuple(tokenizer.control_literals)
    haystack = template + json.dumps(variables, ensure_ascii=False)
    mark = next((chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in haystack), _ZERO_WIDTH_SPACE)
    own = {name: variables[name] for name in tokenizer.special_tokens.keys() - kwargs.keys()}
    marked = _marked(variables, literals, mark) | own
    plain = _renderer.render(template, variables)
    if marked == variables:
        return tokenizer.encode(plain, add_special=False, parse_special=True)
    text = _renderer.render(template, marked)
    if text.replace(mark, "") != plain:
        mark = _ZERO_WIDTH_SPACE
        text = _renderer.render(template, _marked(variables, literals, mark) | own)
    return tokenizer.encode_parts(_parts(text, tokenizer.control_literals, mark))


def _inputs(
    source: Tokenizer | str,
    messages: Messages,
    add_generation_prompt: bool,
    chat_template: str | None,
    kwargs: dict[str, Any],
) -> tuple[str, dict[str, Any]]:
    own, special = (source, {}) if isinstance(source, str) else (source.chat_template, source.special_tokens)
    template = chat_template if chat_template is not None else own
    if template is None:
        raise InputError("this model has no chat template: give one, or give the prompt as plain text (--raw)")
    variables = {"tools": None, "documents": None, **special, **kwargs}
    variables |= {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
    try:
        # JSON types only: a template must not get hold of objects that have methods of their own.
        return template, json.loads(json.dumps(variables))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"what a chat template is given must be JSON values: {error}") from None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined by newlines, keys that are None left out.

    Anything but dicts with a string `role` and a `content` of text -> InputError naming the message.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of objects, not {type(messages).__name__}")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} must be an object with role and content, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InputError(f"{where}.role must be a string, such as 'user'")
        clean = {str(key): value for key, value in message.items() if value is not None}
        if "content" in clean:
            clean["content"] = _content(clean["content"], f"{where}.content")
        elif "tool_calls" not in clean:
            raise InputError(f"{where}.content is missing")
        checked.append(clean)
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, Sequence):
        raise InputError(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f'{where}[{number}] must be {{"type": "text", "text": "..."}}: only text is supported')
        texts.append(check_text(part["text"], f"{where}[{number}].text"))
    return "\n".join(texts)


@lru_cache(maxsize=8)
def _patterns(literals: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """Where a literal starts, and the proper beginnings and endings of all literals."""
    names = "|".join(re.escape(name) for name in sorted(literals, key=len, reverse=True))
    starts = re.compile(f"(?=(?:{names}))." if literals else "(?!)", re.DOTALL)
    heads = {name[:size] for name in literals for size in range(1, len(name))}
    tails = {name[-size:] for name in literals for size in range(1, len(name))}
    return starts, tuple(heads), tuple(tails)


def _marked(value: Any, literals: tuple[str, ...], mark: str, is_role: bool = False) -> Any:
    """A copy of JSON data with a mark in every literal, and where a string and the template could form one.

    The ends of a role stay as they are: some templates build their control tokens around it.
    """
    if isinstance(value, dict):
        return {
            _marked(key, literals, mark): _marked(item, literals, mark, is_role=key == "role")
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_marked(item, literals, mark) for item in value]
    if not isinstance(value, str):
        return value
    starts, heads, tails = _patterns(literals)
    value = starts.sub(lambda match: match[0] + mark, value)
    if is_role:
        return value
    body = value.strip()  # templates trim
    left, right = value[: len(value) - len(value.lstrip())], value[len(value.rstrip()) :] if body else ""
    return f"{left}{mark * body.startswith(tails)}{body}{mark * body.endswith(heads)}{right}"


def _parts(text: str, literals: Mapping[str, int], mark: str) -> list[str | int]:
    """A rendered chat as text without marks and ids of the control tokens that have none inside."""
    names = sorted(literals, key=len, reverse=True)
    # A mark cannot be inside one character; there it follows.
    escaped = [re.escape(name) + (f"(?!{mark})" if len(name) == 1 else "") for name in names]
    pieces = re.split(f"({'|'.join(escaped)})", text)
    kept = mark if mark == _ZERO_WIDTH_SPACE else ""
    return [literals[p] if i % 2 else p.replace(mark, kept) for i, p in enumerate(pieces)]


class _Renderer:
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
        code = "import sys; sys.path = sys.argv[2:]; from serried.text.chat import _serve; _serve(int(sys.argv[1]))"
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


_renderer = _Renderer()
atexit.register(_renderer.close)


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
