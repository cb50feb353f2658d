"""Each run of `verify` in processes of its own, so that its peak memory is its own: the child that holds rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec
import numpy as np

from serried.config import EngineConfig, child_environment
from serried.engine.executor import START_TIMEOUT, create_executor
from serried.engine.worker import RankInfo
from serried.errors import INPUT_ERRORS, RankFailed, SerriedError
from serried.models.registry import open_model
from serried.parallel.launch import RankProcesses
from serried.parallel.link import ChildLink
from serried.progress import progress_bar
from serried.verify.run import RunResult, run_greedy


class Task(msgspec.Struct):
    """What the child is asked for."""

    config: EngineConfig
    prompt: list[int]
    tokens: int


class Message(msgspec.Struct, omit_defaults=True):
    """What the child answers: progress of loading, then an error of the user's or a rank's, or the result.

    The logits follow a result in a frame of their own.
    """

    progress: tuple[int, int] | None = None
    error: tuple[str, str] | None = None
    failed: tuple[int, str, str] | None = None
    ranks: list[RankInfo] = []
    all_reduces: int = 0
    bytes: int = 0
    tokens: list[int] = []
    isa: str = ""


def run_in_child(config: EngineConfig, prompt: Sequence[int], tokens: int) -> RunResult:
    """One run in fresh processes. Raises what the child raised: InputError, or RankFailed with its rank."""
    task = msgspec.msgpack.encode(Task(config, list(prompt), tokens))
    label = f"tp {config.tensor_parallel_size}"
    with (
        RankProcesses(__spec__.name, 1, task, config.threads, child_environment(), first=0) as child,
        progress_bar(label) as progress,
    ):
        while True:
            message = msgspec.msgpack.decode(child.recv(0, START_TIMEOUT), type=Message)
            if message.progress is None:
                break
            if progress:
                progress(*message.progress)
        if message.error:
            kind, text = message.error
            raise INPUT_ERRORS[kind](text)
        if message.failed:
            raise RankFailed(*message.failed)
        logits = np.frombuffer(child.recv(0, START_TIMEOUT), np.float32)
    rows = len(prompt) + tokens - 1
    return RunResult(
        config.tensor_parallel_size,
        message.ranks,
        message.all_reduces,
        message.bytes,
        message.tokens,
        logits.reshape(rows, -1),
        message.isa,
    )


def main() -> None:
    """Load, run, answer."""
    with ChildLink.from_argv() as link:

        def say(**fields: object) -> None:
            link.send(msgspec.msgpack.encode(Message(**fields)))  # type: ignore[arg-type]

        task = msgspec.msgpack.decode(link.payload, type=Task)
        try:
            executor = create_executor(
                task.config,
                open_model(task.config.model),
                lambda done, total: say(progress=(done, total)),
            )
            try:
                result = run_greedy(executor, task.prompt, task.tokens)
            finally:
                executor.close()
        except RankFailed as error:
            say(failed=(error.rank, error.reason, error.traceback))
        except SerriedError as error:
            say(error=(type(error).__name__, str(error)))
        else:
            say(
                ranks=[RankInfo(**asdict(info)) for info in result.ranks],
                all_reduces=result.all_reduces_prefill,
                bytes=result.collective_bytes_prefill,
                tokens=result.tokens,
                isa=result.isa,
            )
            link.send(result.logits.tobytes())


if __name__ == "__main__":
    main()
