"""`serried chat`: talk with a model in the terminal; or through a pipe, a line a message."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from serried.cli.options import add_engine_arguments, add_tp_argument, engine_options
from serried.cli.sampling import add_sampling_arguments, sampling_params
from serried.cli.screen import Pipe, Terminal
from serried.cli.watch import Watch, memory_speed
from serried.config import torchrun_environment
from serried.engine.llm import LLM
from serried.engine.outputs import Delta
from serried.errors import InputError
from serried.sampling_params import SamplingParams
from serried.text.chat import encode_chat, read_template
from serried.text.conversation import Conversation, Message, Prompt, Turn
from serried.text.reasoning import ReasoningSplitter, opens_reasoning
from serried.text.tokenizer import Tokenizer

MAX_TOKENS: Final = 1024
TAIL: Final = 16  # tokens at the end of a prompt that may open the reasoning
COMMANDS: Final = {
    "/help": "this list",
    "/clear": "forget the turns so far",
    "/system TEXT": "set the system prompt, from the next message on; without TEXT: show it",
    "/stats": "figures of the last answer",
    "/save FILE": "write the chat to a file, as JSON",
    "/exit": "end the chat, as Ctrl-D does",
    "//...": "a message that begins with a slash",
    "...\\": "a message that goes on in the next line",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_tp_argument(parser)
    parser.add_argument("--system", help="the system prompt")
    parser.add_argument("--chat-template", metavar="FILE", help="a template instead of the model's own")
    parser.add_argument("--stats", action="store_true", help="figures after each answer")
    parser.add_argument("--json", action="store_true", help="of a piped chat: one JSON document on stdout at the end")
    add_sampling_arguments(parser, max_tokens=MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if params.n != 1 or (params.logprobs, params.prompt_logprobs) != (None, None):
        raise InputError("--n, --logprobs, --prompt-logprobs: a chat has one answer, and shows text; leave them out")
    if torchrun_environment() is not None:
        raise InputError("chat: torchrun's ranks cannot wait for a person; start it alone, with --tensor-parallel-size")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if args.json and is_terminal:
        raise InputError("--json: it is for a chat whose messages come from a pipe; leave it out in a terminal")
    template = read_template(args.chat_template)
    with LLM(args.model, **engine_options(args)) as llm:
        tokenizer = llm.tokenizer
        if tokenizer is None or (template or tokenizer.chat_template) is None:
            lacks = "tokenizer" if tokenizer is None else "chat template (--chat-template gives it one)"
            raise InputError(f"{llm.source.name}: has no {lacks}, so it cannot chat; see `serried generate`")
        screen = Terminal(COMMANDS) if is_terminal else Pipe(quiet=args.json)
        if is_terminal:
            screen.note(f"{llm.source.name}, context of {llm.executor.max_model_len} tokens; /help says what there is")
        chat = Chat(llm, tokenizer, params, Conversation(args.system), template, screen, with_stats=args.stats)
        chat.talk()
        if args.json:
            print(json.dumps(chat.document(), ensure_ascii=False))
    return 0


class Chat:
    """One conversation on one screen."""

    def __init__(
        self,
        llm: LLM,
        tokenizer: Tokenizer,
        params: SamplingParams,
        conversation: Conversation,
        template: str | None,
        screen: Pipe,
        *,
        with_stats: bool,
    ) -> None:
        self._llm, self._tokenizer, self._params = llm, tokenizer, params
        self._conversation, self._template, self._screen = conversation, template, screen
        self._with_stats = with_stats
        self._last: tuple[str, Watch] | None = None  # what is known of the last answer
        self._memory_speed: float | None = None
        self._turns: list[dict[str, Any]] = []
        self._saved: set[Path] = set()

    def talk(self) -> None:
        """Take messages and commands until they end, or one says so."""
        for message in self._screen.messages():
            if not message.strip():
                continue
            try:
                if message.startswith("/") and not message.startswith("//"):
                    if self._command(message):
                        return
                else:
                    self._answer(message[1:] if message.startswith("//") else message)
            except InputError as error:
                if not self._screen.forgives:
                    raise
                self._screen.note(f"error: {error}")

    def document(self) -> dict[str, Any]:
        """The chat as JSON: the messages, and figures of each turn."""
        usage = {key: sum(turn[key] for turn in self._turns) for key in ("prompt_tokens", "completion_tokens")}
        usage["total_tokens"] = sum(usage.values())
        return {**self._conversation.record(), "turns": self._turns, "usage": usage}

    def _answer(self, message: str) -> None:
        prompt = self._conversation.prompt(
            message, self._encode, self._llm.executor.max_model_len, self._params.max_tokens
        )
        if prompt.forgotten:
            turns = "the oldest turn is" if prompt.forgotten == 1 else f"the {prompt.forgotten} oldest turns are"
            self._screen.note(f"the context is full: {turns} forgotten")
        with self._screen.stoppable() as stopped:
            parts, reason = self._stream(prompt, stopped)
        if reason == "length":
            self._screen.note(f"cut after {prompt.max_tokens} tokens")
        elif reason == "interrupted":
            self._screen.note("stopped" if parts[False] else "stopped before the answer: the message is taken back")
        if parts[False] or reason != "interrupted":
            self._conversation.add(Turn(message, parts[False], parts[True]))
        if self._with_stats:
            self._screen.note(self._stats())

    def _stream(self, prompt: Prompt, stopped: Callable[[], bool]) -> tuple[dict[bool, str], str]:
        """Show an answer as it comes; its text and (True) its reasoning, and why it ended."""
        splitter = ReasoningSplitter(opens_reasoning(self._tokenizer.decode(prompt.ids[-TAIL:], skip_special=False)))
        params, watch = replace(self._params, max_tokens=prompt.max_tokens), Watch(self._llm)
        parts = {True: "", False: ""}
        reason, tokens, first = "interrupted", 0, 0.0
        start = time.perf_counter()
        stream = cast(Generator[Delta, None, None], self._llm.stream([prompt.ids], params))
        with closing(stream) as deltas:
            for delta in watch.over(deltas):
                first = first or time.perf_counter() - start
                pieces, tokens = splitter.add(delta.text), len(delta.completion.token_ids)
                if delta.completion.finish_reason:
                    pieces += splitter.finish()
                    reason = delta.completion.finish_reason
                for piece in pieces:
                    self._screen.show(piece)
                    parts[piece.is_reasoning] += piece.text
                if stopped():
                    break
        self._screen.end_answer()
        self._last = f"{len(prompt.ids)} tokens of prompt in {first:.2f} s, {tokens} of answer", watch
        self._turns.append(
            {
                "prompt_tokens": len(prompt.ids),
                "completion_tokens": tokens,
                "finish_reason": reason,
                "forgotten_turns": prompt.forgotten,
            }
        )
        return parts, reason

    def _stats(self) -> str:
        """Figures of the last answer; the memory is measured when they are first asked for."""
        if self._last is None:
            return "no answer yet"
        if self._memory_speed is None:
            config = self._llm.config
            self._memory_speed = memory_speed(config.threads * config.tensor_parallel_size)
        counts, watch = self._last
        return f"{counts}; {watch.line(self._memory_speed)}"

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        return encode_chat(self._tokenizer, messages, chat_template=self._template)

    def _command(self, line: str) -> bool:
        """Carry a command out; whether it ends the chat."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name == "/exit":
            return True
        if name == "/clear":
            self._conversation.clear()
            self._screen.note("the turns are forgotten; the system prompt stays")
        elif name == "/system":
            if rest:
                self._conversation.system = rest
            self._screen.note(f"system prompt: {self._conversation.system or 'none of yours'}")
        elif name == "/stats":
            self._screen.note(self._stats())
        elif name == "/save":
            self._save(rest)
        elif name == "/help":
            for command, meaning in COMMANDS.items():
                self._screen.note(f"{command:13}  {meaning}")
        else:
            raise InputError(f"unknown command {name}; /help lists them, and // begins a message with a slash")
        return False

    def _save(self, name: str) -> None:
        if not name:
            raise InputError("/save: give the name of a file")
        path = Path(name).expanduser()
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(json.dumps(self._conversation.record(), ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"/save {name}: {error.strerror or error}; give another name") from None
        self._saved.add(path)
        self._screen.note(f"saved to {path}")
