"""The errors that a user can meet. The command line turns each into one line and an exit code."""

from __future__ import annotations


class SerriedError(Exception):
    """Base of all errors that Serried raises on purpose."""

    exit_code = 1


class InputError(SerriedError):
    """Something that the user gave is wrong: says which option or file, what is wrong, what would work."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint is damaged or does not fit the model: names the file and the tensor."""


class Misfit(InputError):
    """The model, so split, does not fit this machine. fits: the model and the options that would; empty: none would."""

    def __init__(self, problem: str, fits: str = "") -> None:
        self.problem, self.fits = problem, fits
        super().__init__(f"{problem}; this would fit: {fits}" if fits else problem)


class RankFailed(SerriedError):
    """A rank raised, died or fell silent: names the rank and carries its traceback where it has one.

    input_error: what the rank raised, where that was about the user's input (a part of a file that it alone reads).
    """

    exit_code = 3

    def __init__(self, rank: int, reason: str, traceback: str = "", input_error: InputError | None = None) -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        self.input_error = input_error
        super().__init__(f"rank {rank}: {reason}")

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str, str, InputError | None]]:
        return RankFailed, (self.rank, self.reason, self.traceback, self.input_error)


class EngineDead(SerriedError):
    """The engine cannot answer: a rank failed and it is not (yet) back. Says why."""

    exit_code = 3


class QueueFull(SerriedError):
    """As many requests wait as may wait. retry_after: the seconds after which to try again."""

    def __init__(self, waiting: int, retry_after: float = 1.0) -> None:
        self.waiting = waiting
        self.retry_after = retry_after
        super().__init__(f"{waiting} requests are waiting, which is the limit; try again in {retry_after:.0f} s")

    def __reduce__(self) -> tuple[type[QueueFull], tuple[int, float]]:
        return QueueFull, (self.waiting, self.retry_after)


# By name, as they travel between processes.
INPUT_ERRORS: dict[str, type[InputError]] = {kind.__name__: kind for kind in (InputError, CheckpointError, Misfit)}
