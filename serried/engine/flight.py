"""Flight: a request between the front end and the engine's process, which outlives that process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from serried.engine.interface import TokenDelta
from serried.engine.wire import Add
from serried.errors import EngineDead

MOST_DEATHS = 2  # that a request may see


@dataclass
class Flight:
    """How a request was handed in, what its samples have so far, where its deltas go, how many deaths it saw."""

    add: Add
    outputs: dict[int, list[int]]  # of the samples that still run
    deltas: asyncio.Queue[TokenDelta | Exception] = field(default_factory=asyncio.Queue)
    deaths: int = 0

    @property
    def rest(self) -> Add:
        """What another process is to do of it."""
        return msgspec.structs.replace(self.add, outputs=self.outputs)

    def take(self, delta: TokenDelta) -> None:
        """Note what has come, and pass it on; nothing of a sample that has been aborted meanwhile."""
        if delta.index not in self.outputs:
            return
        if delta.finish_reason:
            del self.outputs[delta.index]
        else:
            self.outputs[delta.index] += delta.tokens
        self.deltas.put_nowait(delta)

    def see_death(self) -> None:
        """The process has died. A request that sees that again may be what kills; a third time would end all others."""
        self.deaths += 1
        if self.deaths == MOST_DEATHS and self.outputs:
            self.outputs.clear()
            self.deltas.put_nowait(EngineDead("the engine has died twice while this request ran"))
