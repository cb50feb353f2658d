"""BlockPool: which cache blocks are free, and who holds the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Hands out cache blocks by number, oldest freed first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = deque(range(blocks))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing taken) where there are not so many."""
        if count > self.free:
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks that were taken; one that is not held is a bug of the caller, and raises."""
        for block in blocks:
            self._held.remove(block)
            self._free.append(block)
