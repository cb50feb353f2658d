"""`serried serve`: an HTTP server with OpenAI's and Anthropic's interfaces, and a web page."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import fields, replace
from typing import Any

from serried.cli.layers import fill
from serried.cli.options import add_engine_arguments, add_tp_argument, engine_options, integer, number
from serried.config import EngineConfig, environment_options, torchrun_environment
from serried.engine.build import end_tokens, load_tokenizer
from serried.engine.client import ProcessEngine
from serried.engine.interface import ModelInfo
from serried.errors import InputError
from serried.models.registry import ModelSource, open_model
from serried.server.options import ServerConfig
from serried.server.run import serve

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
    """Start the engine in a process of its own."""
    weights = config.load_format != "dummy"
    source = await asyncio.to_thread(open_model, config.model, config.revision, weights=weights)
    tokenizer = None if server.skip_tokenizer_init else await asyncio.to_thread(load_tokenizer, source)
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
    engine = await ProcessEngine.start(found, info, tokenizer, server.max_queued_requests + 1)
    if engine.up is not None:
        engine.model = replace(info, max_model_len=engine.up.max_model_len)
    return engine


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
