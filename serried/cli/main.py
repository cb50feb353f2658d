"""The command line: picks the command, imports that one alone, turns an error into one line and an exit code.

Exit codes: 0; 1 something does not hold, or a defect of Serried (with its traceback); 2 bad input; 3 a rank
failed; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from serried import __version__
from serried.errors import InputError, RankFailed, SerriedError

# Name: its module, and what it does.
COMMANDS = {
    "generate": ("serried.cli.generate", "generate text from a prompt"),
    "chat": ("serried.cli.chat", "talk with a model in the terminal"),
    "serve": ("serried.cli.serve", "serve a model over HTTP, as OpenAI and Anthropic do"),
    "tokenize": ("serried.cli.tokenize", "show the tokens of a text, or the text of tokens"),
    "verify": ("serried.cli.verify", "prove that splitting the model changes no bit"),
    "layout": ("serried.cli.layout", "show the groups that the ranks of a world form"),
    "bench": ("serried.cli.bench", "measure this machine, and what fraction of it is reached"),
    "quantize": ("serried.cli.quantize", "write a model in 8 or 4 bits, ready to load"),
    "init": ("serried.cli.init", "write a model directory with random weights"),
    "completion": ("serried.cli.completion", "print a script that completes commands and options in a shell"),
}

INTERRUPTED = 130
READER_GONE = 141  # what a shell reports of a command that died of SIGPIPE


class Command(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its options."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""
        ...


class Parser(argparse.ArgumentParser):
    """An argument parser that raises InputError and never takes part of an option's name for the whole."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # allow_abbrev=False stops short of options with a single dash: -t would still be read as -tp.
        return []


class _Version(argparse.Action):
    """Prints the version and what the native kernels were chosen for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from serried import _native

        native = f"native kernels: {_native.choose_isa()}" if _native.available() else "without native kernels"
        print(f"serried {__version__} ({native})")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    try:
        code = _execute(words, name)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SerriedError as error:
        _report("serried" if name not in COMMANDS else f"serried {name}", error)
        return error.exit_code
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Python flushes stdout once more on its way out, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _execute(words: list[str], name: str | None) -> int:
    if name is not None and name not in COMMANDS:
        raise InputError(f"unknown command {name}{_suggestion(name, COMMANDS)}")
    parser = Parser(prog="serried", description="A tensor-parallel LLM engine.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and the native kernels chosen")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for each, (_, summary) in COMMANDS.items():
        subparsers.add_parser(each, help=summary)
    try:
        if name is None or any(word in parser._option_string_actions for word in words[: words.index(name)]):
            parser.parse_args(words)  # --help, --version, or no command at all
            return 0
        at = words.index(name)
        return _command(name, words[:at] + words[at + 1 :])
    except SystemExit:  # --help and --version have printed
        return 0


def _command(name: str, words: list[str]) -> int:
    module, summary = COMMANDS[name]
    command = cast(Command, import_module(module))
    parser = Parser(prog=f"serried {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    command.add_arguments(parser)
    # Intermixed: options may stand between MODEL and PROMPT.
    args, unknown = parser.parse_known_intermixed_args(words)
    _refuse(parser, unknown)
    with _log_on_stderr():
        return command.run(args)


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """What a command has to tell besides its result: a line each, on rank 0 alone."""
    import logging

    from serried.config import is_main_rank

    logger, handler = logging.getLogger("serried"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[rank 0] %(message)s"))
    before = logger.level
    logger.setLevel(logging.INFO if is_main_rank() else logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _refuse(parser: Parser, unknown: Sequence[str]) -> None:
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        raise InputError(f"unknown argument {word}{_suggestion(word, parser._option_string_actions)}")


def _suggestion(word: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _report(prog: str, error: SerriedError) -> None:
    """Say on stderr what went wrong: once, where all ranks of a torchrun were given the same bad input."""
    from serried.config import is_main_rank

    if isinstance(error, InputError) and not is_main_rank():
        return
    if isinstance(error, RankFailed) and error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
    message = " ".join(line.strip() for line in str(error).splitlines())
    print(f"{prog}: error: {message}", file=sys.stderr)


def _reader_is_gone() -> bool:
    """Whether it was our own output that nobody reads any more; any other broken pipe is a defect."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)  # no events asked for: only an error or a hang-up is reported
    return bool(poll.poll(0))
