"""StepInput: everything that a forward needs to know besides weights and cache, as flat int32 arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepInput:
    """The tokens of one step, of all its sequences in one row; prefill and decode mixed.

    tokens, positions, slots: [T] token ids, positions in their sequences, cache slots (block * block size + offset)
    that their K and V go to.
    row_starts: [R + 1] where each sequence's tokens begin in T. kv_lens: [R] how many positions of each sequence the
    cache holds once this step's are written; of these, no sequence reads what another one writes in the same step.
    block_starts: [R + 1] where each sequence's blocks begin in `blocks`, its block table: [B] cache blocks in order.
    logit_rows: [Q] the rows of T whose logits are wanted, ascending. picks: how their tokens are chosen, where all that
    is wanted of every row is a token that one candidate of each rank is enough for: [6 Q], see picks.py. sampling: else
    what is wanted of them (packed Wants, see engine/wants.py, with sparse edits of logits and bitmasks of allowed
    tokens). Neither: the logits themselves.
    """

    tokens: Int32
    positions: Int32
    slots: Int32
    row_starts: Int32
    kv_lens: Int32
    block_starts: Int32
    blocks: Int32
    logit_rows: Int32
    picks: Int32
    sampling: Int32

    @cached_property
    def flat(self) -> Int32:
        """All arrays in one: their sizes, then their contents. What the ranks are sent."""
        arrays = [getattr(self, name) for name in _NAMES]
        return np.concatenate([np.array([a.size for a in arrays], np.int32), *arrays])

    @classmethod
    def unpack(cls, flat: Int32) -> StepInput:
        """The inverse of flat."""
        arrays, start = [], len(_NAMES)
        for size in flat[: len(_NAMES)].tolist():
            arrays.append(flat[start : start + size])
            start += size
        step = cls(*arrays)
        step.__dict__["flat"] = flat
        return step

    @property
    def requests(self) -> int:
        return int(self.kv_lens.size)


_NAMES = tuple(field.name for field in fields(StepInput))
