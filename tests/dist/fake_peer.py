"""A peer of `serried bench peers` that computes nothing: 100 tokens a second, and logits that say what it was told."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from serried.bench.peer import About, Setup, Task, serve
from serried.errors import InputError

SPEED = 100.0


class FakeEngine:
    """Fails in the way that the name of the file asks for."""

    speed = SPEED

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.setup = setup
        stack.callback(Path(setup.path).with_suffix(".closed").touch)
        if "refused" in setup.path:
            raise InputError(f"{setup.path}: the fake cannot load it")
        self.about = About("fake 1.0", "NOTHING", 0.5, 12.0)
        self.task: Task | None = None

    def prepare(self, task: Task) -> None:
        self.task = task

    def run(self) -> float:
        assert self.task is not None
        if "crash" in self.setup.path:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "raise" in self.setup.path:
            raise ValueError("out of fakes")
        return self.task.timed_tokens / self.speed

    def logits(self, prompt: Sequence[int]) -> Any:
        return np.array([len(prompt), *prompt[:3], self.setup.threads], np.float32)


if __name__ == "__main__":
    serve(FakeEngine)
