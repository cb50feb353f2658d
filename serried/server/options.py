"""ServerConfig: every choice about the server, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serried.errors import InputError

LOG_LEVELS = ("debug", "info", "warning", "error")
TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True)
class ServerConfig:
    """Where to listen, whom to let in, and how much one request may ask for. Names are vLLM's where vLLM has them.

    port: 0 for any that is free. api_key: any of these opens every route; none: all are open. served_model_name: the
    names that requests may give (none: the model's own). chat_template: a template, or the path of one.
    allowed_chat_template_kwargs: what a request may hand to the template. trust_request_chat_template: a request may
    bring a template of its own. tool_call_parser, reasoning_parser: `auto` looks at the chat template, `none` parses
    nothing.

    max_n, max_stop_strings, max_logprobs, max_output_tokens (None: the context): caps on one request.
    max_queued_requests: how many sequences may wait for a place among max_num_seqs. max_body_size,
    max_header_size: bytes. body_timeout: seconds that a request may take to arrive. write_timeout: seconds that a
    client may leave what was sent to it unread. ping_interval: seconds of silence in a stream before a comment.
    drain_timeout: seconds that the requests that run may take after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    allowed_chat_template_kwargs: tuple[str, ...] = TEMPLATE_KWARGS
    trust_request_chat_template: bool = False
    skip_tokenizer_init: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_n: int = 64
    max_stop_strings: int = 16
    max_logprobs: int = 20
    max_output_tokens: int | None = None
    max_queued_requests: int = 256
    max_body_size: int = 8 << 20
    max_header_size: int = 32 << 10
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    ping_interval: float = 15.0
    drain_timeout: float = 300.0
    log_level: str = "info"
    access_log: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"--port {self.port}: expected 0 (any that is free) to 65535")
        if self.log_level not in LOG_LEVELS:
            raise InputError(f"--log-level {self.log_level}: unknown; choose from {', '.join(LOG_LEVELS)}")
        if self.reasoning_parser not in ("auto", "none", "think"):
            raise InputError(f"--reasoning-parser {self.reasoning_parser}: unknown; choose from auto, none, think")
        for name in ("max_n", "max_stop_strings", "max_body_size", "max_header_size", "max_output_tokens"):
            if (getattr(self, name) or 1) < 1 or getattr(self, name) == 0:
                raise InputError(f"{_option(name)} {getattr(self, name)}: expected a whole number of at least 1")
        for name in ("max_logprobs", "max_queued_requests"):
            if getattr(self, name) < 0:
                raise InputError(f"{_option(name)} {getattr(self, name)}: expected a whole number of at least 0")
        for name in ("body_timeout", "write_timeout", "ping_interval", "drain_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{_option(name)} {getattr(self, name)}: expected a number of seconds")
        if any(not key for key in self.api_key):
            raise InputError("--api-key: an empty key would let everybody in; leave the option out to do so")
        self._check_files()

    def _check_files(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given, other = "keyfile", "certfile"
            if self.ssl_keyfile is None:
                given, other = other, given
            raise InputError(f"--ssl-{given} needs --ssl-{other} too")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise InputError(f"{_option(name)} {path}: no such file")

    def template(self) -> str | None:
        """The text of the chat template that was given."""
        given = self.chat_template
        if given is None or "{" in given or "\n" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {given}: cannot be read: {error}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
