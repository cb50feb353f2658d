"""The shape of the paged KV cache of one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheShape:
    """Paged K and V of a rank: for each layer [blocks * block_size, kv_heads, head_dim], twice.

    The rows are slots: position p of a sequence lies in slot blocks[p // block_size] * block_size + p % block_size.
    """

    layers: int
    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.itemsize
