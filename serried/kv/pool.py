"""BlockPool: which cache blocks are free, who holds the others, and which hold a prefix that can be used again.

A block is held by any number of requests at once (it is counted), or by none; then it is free, and the free blocks
stand in a queue. A full block whose content is known has a key: the hash of all tokens up to its end (prefix.py). It
keeps the key while it is free, so that a later request with the same prefix finds it, until its turn comes to be
handed out anew: the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out cache blocks by number."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # the first is handed out next
        self._holders = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._known: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `keys` that is known. They are not held yet: see share."""
        found = []
        for key in keys:
            block = self._known.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def available(self, found: Sequence[int]) -> int:
        """How many blocks can be taken once the blocks `found` are held."""
        return self.free - sum(self._holders[block] == 0 for block in found)

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found, beside those who hold them already."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """`count` blocks of unknown content, or None (and nothing taken) where there are not so many."""
        if count > self.free:
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._holders[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let go of blocks that are held; one that is not is a bug of the caller, and raises.

        The end of a sequence is handed out again before its beginning, which more requests may share; blocks without
        a key, which nobody can use again, before all others.
        """
        for block in reversed(blocks):
            if self._holders[block] < 1:
                raise KeyError(block)
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Say what a held block holds, now that it is full. Of two that hold the same, the first is known."""
        if self._holders[block] < 1:
            raise KeyError(block)
        if self._keys[block] is None and key not in self._known:
            self._keys[block] = key
            self._known[key] = block

    def forget_all(self) -> None:
        """No prefix is known any more."""
        self._known.clear()
        self._keys = [None] * self.blocks

    def check(self) -> None:
        """Raise RuntimeError where the books do not balance (for tests)."""
        held = {block for block, count in enumerate(self._holders) if count}
        if held & self._free.keys() or len(held) + self.free != self.blocks:
            raise RuntimeError("a block is both held and free, or neither")
        if any(count < 0 for count in self._holders):
            raise RuntimeError("a block with a negative number of holders")
        keys = {key: block for block, key in enumerate(self._keys) if key is not None}
        if keys != self._known:
            raise RuntimeError("a known prefix whose block does not know of it, or the other way round")

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._known[key]
            self._keys[block] = None
