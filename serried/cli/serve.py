"""`serried serve`: an HTTP server with OpenAI's and Anthropic's interfaces, and a web page."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from serried.cli.layers import fill
from serried.cli.options import add_engine_arguments, add_tp_argument, engine_options, integer, number
from serried.config import EngineConfig, environment_options, torchrun_environment
from serried.engine.build import end_tokens, load_tokenizer
from serried.engine.client import ProcessEngine
from serried.engine.footprint import check_fit, describe, footprint, gib
from serried.engine.interface import ModelInfo
from serried.engine.wire import Up
from serried.errors import InputError, Misfit
from serried.models.registry import ModelSource, open_model
from serried.progress import progress_bar
from serried.server.options import ServerConfig
from serried.server.run import serve

T = TypeVar("T")
LOG_EVERY = 5.0  # seconds between two lines on how far loading is
log = logging.getLogger("serried.server")

# Options of the server: name, what argparse needs to know, help. Names are those of ServerConfig's fields.
_TEXTS = {
    "host": "address to listen on (default 127.0.0.1: this machine alone)",
    "chat_template": "a template, or the path of one, instead of the model's own",
    "tool_call_parser": "how the model writes calls: auto (default), none, hermes, llama3_json or mistral",
    "reasoning_parser": "whether <think> is split off: auto (default), none or think",
    "ssl_keyfile": "the key for TLS",
    "ssl_certfile": "the certificate for TLS",
    "ssl_ca_certs": "certificates that clients must be signed by",
    "log_level": "debug, info (default), warning or error",
}
_WHOLE = {
    "port": "port to listen on (default 8000; 0: any that is free)",
    "max_n": "most answers to one prompt (default 64)",
    "max_stop_strings": "most stop strings of a request (default 16)",
    "max_logprobs": "most likeliest tokens that a request may ask the log-probabilities of (default 20)",
    "max_output_tokens": "most tokens of an answer (default: what the context has room for)",
    "max_queued_requests": "sequences that may wait; more are answered 429 (default 256)",
    "max_body_size": "bytes of a request's body (default 8 MiB)",
    "max_header_size": "bytes of a request's headers (default 32 KiB)",
}
_SECONDS = {
    "body_timeout": "seconds that a request may take to arrive (default 60)",
    "write_timeout": "seconds that a client may leave what was sent unread (default 60)",
    "ping_interval": "seconds of silence in a stream before a comment is sent (default 15)",
    "drain_timeout": "seconds that running requests may take after SIGTERM (default 300)",
}
_LISTS = {
    "api_key": "a key that opens every route; may be repeated",
    "served_model_name": "a name under which the model answers; may be repeated",
    "allowed_origins": "an origin whose pages may ask (CORS), or *; may be repeated",
    "allowed_chat_template_kwargs": "a variable that requests may hand to the chat template; may be repeated",
}
_SWITCHES = {
    "trust_request_chat_template": "let requests bring chat templates of their own",
    "skip_tokenizer_init": "no tokenizer: token ids go in and out",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, model="?")
    add_tp_argument(parser)
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of these options, and `model`")
    parser.add_argument("--max-num-seqs", type=integer("--max-num-seqs"), help="sequences in one step (default 64)")
    prefix = "reuse the cache of prompts that begin alike (default)"
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None, help=prefix)
    group = parser.add_argument_group("server")
    for name, text in _TEXTS.items():
        group.add_argument(_option(name), help=text)
    for name, text in _WHOLE.items():
        group.add_argument(_option(name), type=integer(_option(name)), help=text)
    for name, text in _SECONDS.items():
        group.add_argument(_option(name), type=number(_option(name)), help=text)
    for name, text in _LISTS.items():
        group.add_argument(_option(name), action="append", help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(_option(name), action="store_true", default=None, help=text)
    log = "a line on stderr for each request (default)"
    group.add_argument("--access-log", action=argparse.BooleanOptionalAction, default=None, help=log)
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    if torchrun_environment() is not None:
        raise InputError("serve: the server starts its ranks itself; start it alone, with --tensor-parallel-size")
    fill(args.parser, args, environment_options())
    if args.model is None:
        raise InputError("no model: give MODEL, or `model` in the --config file, or SERRIED_MODEL")
    engine = EngineConfig.create(args.model, **_engine_options(args))
    server = server_config(args)
    serve(server, args.model, lambda: load(engine, server))
    return 0


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server's part of the options."""
    given: dict[str, Any] = {}
    for each in fields(ServerConfig):
        value = getattr(args, each.name, None)
        if value is not None:
            given[each.name] = _list(value) if each.name in _LISTS else value
    return ServerConfig(**given)


async def load(config: EngineConfig, server: ServerConfig) -> ProcessEngine:
    """Say what will be loaded, then start the engine in a process of its own."""
    weights = config.load_format != "dummy"
    source = await in_thread(lambda: open_model(config.model, config.revision, weights=weights))
    await in_thread(lambda: announce(config, source))
    tokenizer = None if server.skip_tokenizer_init else await in_thread(lambda: load_tokenizer(source))
    info = ModelInfo(
        name=source.name,
        max_model_len=source.config.max_position,
        vocab_size=source.config.vocab_size,
        eos_ids=end_tokens(source, tokenizer),
        defaults=sampling_defaults(source),
        tensor_parallel_size=config.tensor_parallel_size,
        max_num_seqs=config.max_num_seqs,
    )
    found = config.resolve(model=source.location, revision=None)
    most = server.max_queued_requests + config.max_num_seqs
    with progress_bar(f"loading {source.name}") as bar:
        engine = await ProcessEngine.start(found, info, tokenizer, most, bar or log_progress())
    if engine.up is not None:
        engine.model = replace(info, max_model_len=engine.up.max_model_len)
        log.info("%s", describe_cache(engine.up, config.block_size, config.tensor_parallel_size))
    return engine


def announce(config: EngineConfig, source: ModelSource) -> None:
    """Log what each rank will hold; InputError, with a command line that fits, where that does not fit."""
    try:
        whole = footprint(config, source)
        for line in describe(config, source, whole):
            log.info("%s", line)
        check_fit(config, source, whole)
    except Misfit as misfit:
        hint = f"; this would fit: serried serve {misfit.fits}" if misfit.fits else ""
        raise InputError(f"{misfit.problem}{hint}") from None


def describe_cache(up: Up, block_size: int, ranks: int) -> str:
    """A line for a person: the KV cache, and how many of the longest requests it holds at once."""
    tokens, longest = up.blocks * block_size, up.max_model_len
    return (
        f"KV cache: {up.blocks:,} blocks of {block_size} tokens ({tokens:,} tokens), {gib(up.cache_bytes)} on "
        f"{'the rank' if ranks == 1 else 'rank 0'}; maximum concurrency for {longest:,}-token requests: "
        f"{tokens / longest:.2f}x"
    )


def log_progress() -> Callable[[int, int], None]:
    """Progress for a log: a line every few seconds, and none where loading is quick."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= LOG_EVERY:
            told = time.monotonic()
            log.info("loading: %d%%", 100 * done // total)

    return tell


async def in_thread(work: Callable[[], T]) -> T:
    """As asyncio.to_thread, but the end of the process does not wait for it: a download may take long."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return await result


def sampling_defaults(source: ModelSource) -> dict[str, float]:
    """What the model's generation_config.json says of sampling, by the names of SamplingParams."""
    if source.directory is None:
        return {}
    path = source.directory / "generation_config.json"
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from None
    if found.get("do_sample") is False:
        return {}
    names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    names["max_tokens"] = "max_new_tokens"
    return {
        ours: found[theirs]
        for ours, theirs in names.items()
        if isinstance(found.get(theirs), int | float) and not isinstance(found[theirs], bool)
    }


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    more = {name: getattr(args, name) for name in ("max_num_seqs", "enable_prefix_caching")}
    return engine_options(args) | {name: value for name, value in more.items() if value is not None}


def _list(values: list[str]) -> tuple[str, ...]:
    """Repeated options, each a text or (as vLLM has them) a JSON list of texts."""
    made: list[str] = []
    for value in values:
        try:
            listed = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            listed = [value]
        made += [str(each) for each in listed]
    return tuple(made)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
