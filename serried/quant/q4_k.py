"""Q4_K, GGML's superblocks of 256, as blocks of int4 with minimum.

A superblock is {float16 d, float16 dmin, 12 bytes of 6-bit scales and minima of its eight groups, 128 bytes of
digits}; a weight is (d * scale) * q - dmin * minimum. The products are rounded to float16, the digits stay. Bytes 32 j
to 32 j + 31 of the digits hold group 2 j in their low halves and group 2 j + 1 in their high halves.
"""

from __future__ import annotations

import numpy as np

from serried.quant.int4 import HALF, INT4_MIN
from serried.quant.kernels import native_kernels
from serried.quant.method import GROUP, Bytes, halves, put_halves

SUPERBLOCK = 256
GROUPS = SUPERBLOCK // GROUP
SUPERBLOCK_BYTES = 144


def repack_q4_k(raw: Bytes) -> Bytes:
    """Rows of superblocks, [rows, n * 144], to rows of blocks, [rows, n * 8 * 20]."""
    rows, superblocks = raw.shape[0], raw.shape[1] // SUPERBLOCK_BYTES
    width = superblocks * GROUPS * INT4_MIN.block_bytes
    kernels = native_kernels()
    if kernels is None or not raw.size:
        return _repack(raw.reshape(-1, SUPERBLOCK_BYTES)).reshape(rows, width)
    raw = np.ascontiguousarray(raw)
    blocks = np.empty((rows, width), np.uint8)
    kernels.repack_q4_k(raw.ctypes.data, raw.shape[1], rows, superblocks, blocks.ctypes.data, width)
    return blocks


def _repack(raw: Bytes) -> Bytes:
    """[n, 144] to [n * 8, 20]."""
    packed, digits = raw[:, 4:16], raw[:, 16:].reshape(-1, GROUPS // 2, GROUP)
    low, high, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 2 & 48)], axis=1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 2 & 48)], axis=1)
    blocks = np.empty((raw.shape[0] * GROUPS, INT4_MIN.block_bytes), np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        put_halves(blocks, 0, (halves(raw, 0) * scales).reshape(-1, 1))
        put_halves(blocks, 2, -(halves(raw, 2) * minima).reshape(-1, 1))
    split = np.stack([digits & 15, digits >> 4], axis=2).reshape(-1, 2, HALF)  # [n * 8, first and second half, 16]
    np.left_shift(split[:, 1], 4, out=blocks[:, 4:])
    blocks[:, 4:] |= split[:, 0]
    return blocks
