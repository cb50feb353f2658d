"""Keys of prefixes: a chain of SHA-256 over the tokens, a link a block. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


class PrefixChain:
    """The keys of a sequence's full blocks, made as it grows.

    A key stands for all tokens up to the end of its block, and for the salt: requests with different salts never share
    a block, so that nobody can learn from the time to the first token what others have asked.
    """

    def __init__(self, block_size: int, salt: str | None = None) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self._root = hashlib.sha256(b"serried:" + (salt or "").encode("utf-8", "surrogatepass")).digest()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the blocks that `tokens`, the whole sequence so far, has filled."""
        size = self.block_size
        for start in range(len(self.keys) * size, len(tokens) - size + 1, size):
            before = self.keys[-1] if self.keys else self._root
            self.keys.append(hashlib.sha256(before + array("q", tokens[start : start + size]).tobytes()).digest())
