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


class RankFailed(SerriedError):
    """A rank raised, died or fell silent: names the rank and carries its traceback where it has one."""

    exit_code = 3

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        super().__init__(f"rank {rank}: {reason}")

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str, str]]:
        return RankFailed, (self.rank, self.reason, self.traceback)
