"""A progress bar on stderr, shown only to a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

DRAW_EVERY = 0.1  # seconds


class Draw(Protocol):
    """Draws how much is done. note: what else there is to say."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Meter:
    """Counts prompts that are answered, and tokens; draws both, with the tokens a second since it was made."""

    def __init__(self, draw: Draw | None, prompts: int) -> None:
        self._draw, self._prompts = draw, prompts
        self._answered = self._tokens = 0
        self._started = self._drawn = time.perf_counter()

    def take(self, tokens: int, *, answered: bool) -> None:
        """Some new tokens, which may have ended a prompt's last answer."""
        self._answered += answered
        self._tokens += tokens
        now = time.perf_counter()
        if self._draw and (now - self._drawn >= DRAW_EVERY or self._answered == self._prompts):
            self._drawn = now
            speed = self._tokens / (now - self._started)
            self._draw(self._answered, self._prompts, f"{speed:,.0f} tokens/s")


@contextmanager
def progress_bar(label: str, *, unit: str = "") -> Iterator[Draw | None]:
    """Gives a function (done, total, note="") that draws; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%") if not unit else MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None, note="")

        def draw(done: int, total: int, note: str = "") -> None:
            progress.update(task, completed=done, total=total, note=note)

        yield draw
