"""From what the scheduler chose to a StepInput."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from serried.backends.picks import pack_pick, pack_picks
from serried.backends.step import Int32, StepInput
from serried.engine.scheduler import Scheduled
from serried.engine.wants import Want, pack_wants

_NOTHING = np.empty(0, np.int32)


def build_step(scheduled: Sequence[Scheduled], block_size: int, *, whole_logits: bool = False) -> StepInput:
    """Lay the tokens of all scheduled requests in one row.

    A token is wanted after the last row of each request that samples, and log-probabilities at the rows of a prompt
    that gives them; or (whole_logits) the logits of every row.
    """
    tokens, positions, slots, blocks = array("i"), array("i"), array("i"), array("i")
    row_starts, block_starts, logit_rows = array("i", [0]), array("i", [0]), array("i")
    wants = []
    for part in scheduled:
        request, at = part.request, range(part.start, part.stop)
        held = request.blocks[: -(-part.stop // block_size)]
        tokens.extend(request.tokens(part.start, part.stop))
        positions.extend(at)
        slots.extend([held[i // block_size] * block_size + i % block_size for i in at])
        blocks.extend(held)
        first = row_starts[-1]
        row_starts.append(len(tokens))
        block_starts.append(len(blocks))
        logit_rows.extend([first + position - part.start for position in part.scored])
        wants += [Want.of_prompt(request, position) for position in part.scored]
        if part.samples:
            logit_rows.append(len(tokens) - 1)
            wants.append(Want.of(request))
    rows = array("i", range(len(tokens))) if whole_logits else logit_rows
    return StepInput(
        tokens=_int32(tokens),
        positions=_int32(positions),
        slots=_int32(slots),
        row_starts=_int32(row_starts),
        kv_lens=_int32(array("i", [part.stop for part in scheduled])),
        block_starts=_int32(block_starts),
        blocks=_int32(blocks),
        logit_rows=_int32(rows),
        **_choices([] if whole_logits else wants),
    )


def _choices(wants: Sequence[Want]) -> dict[str, Int32]:
    """What is wanted of the rows of logits, in the form that fits: a step's picks, or its sampling."""
    if all(want.plain for want in wants):
        picks = pack_picks(pack_pick(want.divisor, want.seed, want.position) for want in wants)
        return {"picks": picks, "sampling": _NOTHING}
    return {"picks": _NOTHING, "sampling": pack_wants(wants)}


def _int32(values: array[int]) -> Int32:
    return np.array(values, np.int32)
