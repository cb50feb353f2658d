"""From what the scheduler chose to a StepInput."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serried.backends.step import Int32, StepInput
from serried.engine.scheduler import Scheduled
from serried.engine.wants import Want, pack_wants


def build_step(scheduled: Sequence[Scheduled], block_size: int, *, whole_logits: bool = False) -> StepInput:
    """Lay the tokens of all scheduled requests in one row.

    A token is wanted after the last row of each request that samples, and log-probabilities at the rows of a prompt
    that gives them; or (whole_logits) the logits of every row.
    """
    tokens, positions, slots, blocks = [], [], [], []
    row_starts, block_starts, logit_rows, wants = [0], [0], [], []
    for part in scheduled:
        request = part.request
        at = np.arange(part.start, part.stop, dtype=np.int32)
        held = np.array(request.blocks[: -(-part.stop // block_size)], np.int32)
        tokens.append(np.array(request.tokens(part.start, part.stop), np.int32))
        positions.append(at)
        slots.append(held[at // block_size] * block_size + at % block_size)
        blocks.append(held)
        row_starts.append(row_starts[-1] + at.size)
        block_starts.append(block_starts[-1] + held.size)
        logit_rows += [row_starts[-2] + position - part.start for position in part.scored]
        wants += [Want.of_prompt(request, position) for position in part.scored]
        if part.samples:
            logit_rows.append(row_starts[-1] - 1)
            wants.append(Want.of(request))
    return StepInput(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        row_starts=_int32(row_starts),
        kv_lens=_int32([part.stop for part in scheduled]),
        block_starts=_int32(block_starts),
        blocks=np.concatenate(blocks),
        logit_rows=np.arange(row_starts[-1], dtype=np.int32) if whole_logits else _int32(logit_rows),
        sampling=pack_wants([] if whole_logits else wants),
    )


def _int32(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)
