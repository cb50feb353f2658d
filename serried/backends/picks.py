"""Picks: how tokens are chosen where one candidate of each rank is enough, in a form that a program reads by itself.

A row's pick is six int32 words: temperature (float64), seed (uint64), position (int32), and one that is not used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from serried.backends.step import Int32
from serried.parallel.comm import Communicator

NO_TOKEN = -1  # where no token may be chosen: every logit is -inf, or none is a number
_PICK = struct.Struct("=dQii")
PICK_WORDS = _PICK.size // 4
_DTYPE = np.dtype([("temperature", "f8"), ("seed", "u8"), ("position", "i4"), ("unused", "i4")])


def pack_pick(temperature: float, seed: int, position: int) -> bytes:
    """One row's."""
    return _PICK.pack(temperature, seed, position, 0)


def pack_picks(picks: Iterable[bytes]) -> Int32:
    """All rows' in one array."""
    return np.frombuffer(b"".join(picks), np.int32)


def unpack_picks(flat: Int32) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64], Int32]:
    """Temperatures, seeds and positions, as a program's `pick` takes them."""
    rows = flat.view(_DTYPE)
    return rows["temperature"].copy(), rows["seed"].copy(), rows["position"].copy()


def gather_best(ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float64], comm: Communicator) -> list[int] | None:
    """Of each row the best of all ranks' candidates, on rank 0 (NO_TOKEN where there is none); None on the others.

    ids, scores: [rows] this rank's; a score of -inf, or that is no number, offers nothing. Equals go to the lowest id,
    which the first of the ranks holds.
    """
    worth = scores > -np.inf
    ids, scores = np.where(worth, ids, NO_TOKEN), np.where(worth, scores, -np.inf)
    count = ids.size
    # As int64: a Communicator moves bits, and float64 is none of its dtypes.
    whole: Any = comm.gather(np.concatenate([ids, scores.view(np.int64)]), [2 * count] * comm.size)
    if whole is None:
        return None
    table = whole.reshape(comm.size, 2, count)
    winners = table[:, 1].copy().view(np.float64).argmax(axis=0)
    return [int(table[rank, 0, row]) for row, rank in enumerate(winners)]
