"""Screens: where a chat's messages come from and where its answers go, a terminal or a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

from serried.cli.standard_input import read_lines
from serried.text.reasoning import Piece

# A model's text must not steer the terminal: its control characters are shown as pictures.
_PICTURES: Final = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SHOWN: Final = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Pipe:
    """Messages from standard input, a line each; answers on stdout, all else on stderr."""

    forgives = False  # whether a message that cannot be answered is only reported

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._last: Piece | None = None

    def messages(self) -> Iterator[str]:
        """Messages and commands, as they come."""
        return read_lines()

    def show(self, piece: Piece) -> None:
        """Show some text of an answer, or of the reasoning before it."""
        if not self._quiet:
            if self._last is not None and self._last.is_reasoning and not piece.is_reasoning:
                self._write("\n", is_reasoning=True)
            self._write(*piece)
            self._last = piece

    def end_answer(self) -> None:
        """End the line."""
        if not self._quiet:
            self._write("\n", is_reasoning=self._last is not None and self._last.is_reasoning)
            self._last = None

    def note(self, text: str) -> None:
        """Say what is not part of the chat."""
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def stoppable(self) -> Iterator[Callable[[], bool]]:
        """Gives a function that says whether the answer is to be stopped."""
        yield lambda: False

    def _write(self, text: str, is_reasoning: bool) -> None:
        print(text, end="", flush=True, file=sys.stderr if is_reasoning else sys.stdout)


class Terminal(Pipe):
    """A person: lines with history, reasoning dim above the answer; Ctrl-C stops an answer, Ctrl-D ends the chat."""

    forgives = True

    def __init__(self, commands: Iterable[str]) -> None:
        """commands: what Tab may make of the beginning of one."""
        super().__init__()
        self._console = Console(highlight=False)
        names = (command.partition(" ")[0] for command in commands)
        self._commands = [name for name in names if name[1:].isalpha()]

    def messages(self) -> Iterator[str]:
        import readline  # gives input() its history and its keys

        readline.set_completer_delims("")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        while True:
            try:
                message = input("> ")
                while message.endswith("\\"):
                    message = message[:-1] + "\n" + input("| ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                self.note("Ctrl-D or /exit ends the chat")
                continue
            yield message

    def end_answer(self) -> None:
        super().end_answer()
        self._write("\n", is_reasoning=False)

    def note(self, text: str) -> None:
        self._console.out(text, style="italic dim", highlight=False)

    @contextmanager
    def stoppable(self) -> Iterator[Callable[[], bool]]:
        """Ctrl-C is only noted: an exception inside a step would end the ranks."""
        pressed: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        try:
            yield lambda: bool(pressed)
        finally:
            signal.signal(signal.SIGINT, before)

    def _write(self, text: str, is_reasoning: bool) -> None:
        if is_reasoning:
            self._console.out(text.translate(_SHOWN), style="dim", end="", highlight=False)
        else:  # as it is: rich would make spaces of tabs
            super()._write(text.translate(_SHOWN), is_reasoning)

    def _complete(self, text: str, state: int) -> str | None:
        found = [name for name in self._commands if text.startswith("/") and name.startswith(text)]
        return found[state] if state < len(found) else None
