"""Random weights from a seed: any slice is made without the rest, and is the same for every split.

The recipe. A C++ twin must follow it to the bit; all numbers are unsigned and wrap at 32 bits.
- k0, k1: the first two little-endian 32-bit words of SHA-256 of the UTF-8 text "<seed>:<tensor name>".
- Element i (its flat index, row-major, in the whole tensor) is byte i % 4, counted from the lowest, of the
  word with the index w = i / 4:  word(w) = mix(low(w) + k0, k1 ^ mix(high(w), 0)), where low and high are the
  32-bit halves of w. (Below 2^34 elements high(w) is 0, and so is mix(0, 0).)
- mix(x, key):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= key;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
  (the finalizer "lowbias32" with a key between its rounds).
- A byte u becomes (2u - 255) * 2^-13: uniform, never 0, with a standard deviation of 0.018, exact in
  bfloat16. In an attention output (the name ends in o_proj.weight) it becomes (2u - 255) * 2^-15: attention
  by random weights averages over all positions, and at full size the average drowns what tells the positions
  apart, so that greedy decoding repeats one token for ever (measured: 1 distinct token of 20; so: 20). In the weight
  of a norm (one dimension, "norm" in the name, which ends in "weight") it becomes 1 + ((u >> 4) - 8) * 2^-7.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import slice_shape

_Words = npt.NDArray[np.uint32]

# Words made at a time: four buffers of them and the table of pairs stay in a second-level cache.
PIECE = 1 << 15
_MASK = 0xFFFFFFFF
AVERAGED = "o_proj.weight"


class DummyCheckpoint:
    """Tensors of the given shapes, in bfloat16, made of a seed by the recipe above."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(shape), "BF16", f"random weights (seed {seed})") for name, shape in shapes.items()
        }
        self._seed = seed

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        if name not in self.tensors:
            raise CheckpointError(f"random weights (seed {self._seed}): there is no tensor {name!r}")
        info = self.tensors[name]
        shape = slice_shape(name, info, rows, columns)
        stride = math.prod(info.shape[1:])
        first = rows.start * stride + (columns.start if columns else 0)
        width = math.prod(shape[1:])
        # A slice of whole rows is one long row.
        matrix = (1, rows.size * width) if width == stride else (rows.size, width)
        out = np.empty(matrix, np.uint16)
        _fill(out, first, stride, tensor_keys(self._seed, name), _pair_table(name, info.shape))
        values: Array = out.view(ml_dtypes.bfloat16)
        return values.reshape(shape)

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> None:
        """See Checkpoint.read_blocks: there are none."""

    @property
    def bytes_read(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


def tensor_keys(seed: int, name: str) -> tuple[int, int]:
    """The keys k0, k1 of a tensor."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _pair_table(name: str, shape: tuple[int, ...]) -> _Words:
    """For each pair of bytes, lowest first: the bits of its two bfloat16 values, lowest first."""
    u = np.arange(256)
    norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
    exponent = -15 if name.endswith(AVERAGED) else -13
    values = 1 + ((u >> 4) - 8) * 2.0**-7 if norm else (2 * u - 255) * 2.0**exponent
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    pairs = np.empty((256, 256, 2), np.uint16)
    pairs[:, :, 0], pairs[:, :, 1] = bits, bits[:, None]
    return pairs.view(np.uint32).reshape(-1)


def _fill(out: npt.NDArray[np.uint16], first: int, stride: int, keys: tuple[int, int], table: _Words) -> None:
    """Set out[i, j] to the bits of element first + i * stride + j."""
    scratch = np.empty(4 * (PIECE + 1), np.uint32)
    # Rows of one phase start at the same byte of a word, whatever the stride.
    phases = 4 // math.gcd(stride, 4)
    words_apart = phases * stride // 4
    for phase in range(min(phases, out.shape[0])):
        part = out[phase::phases]
        for column in range(0, out.shape[1], 4 * PIECE):
            piece = part[:, column : column + 4 * PIECE]
            word, byte = divmod(first + phase * stride + column, 4)
            words = -(-(byte + piece.shape[1]) // 4)
            step = max(1, PIECE // words)
            for i in range(0, piece.shape[0], step):
                target = piece[i : i + step]
                buffers = scratch[: 4 * len(target) * words].reshape(4, len(target), words)
                x, spare, pairs = buffers[0], buffers[1], buffers[2:].reshape(len(target), 2 * words)
                _make_words(x, spare, word + i * words_apart, words_apart, keys)
                # mode: indices of 16 bits are always in range; "raise" would go through another buffer.
                np.take(table, x.view(np.uint16), out=pairs, mode="wrap")
                target[...] = pairs.view(np.uint16)[:, byte : byte + target.shape[1]]


def _make_words(x: _Words, spare: _Words, first: int, stride: int, keys: tuple[int, int]) -> None:
    """Set x[i, j] to word first + i * stride + j."""
    rows, words = x.shape
    starts = np.arange(rows, dtype=np.int64)[:, None] * stride + first
    np.add(starts.astype(np.uint32), np.arange(words, dtype=np.uint32), out=x)
    x += np.uint32(keys[0])
    if first >> 32 == (first + (rows - 1) * stride + words - 1) >> 32:
        high = np.array([first >> 32], np.uint32)
    else:
        high = ((starts + np.arange(words)) >> 32).astype(np.uint32)
    _mix(high, np.empty_like(high), np.uint32(0))
    _mix(x, spare, high ^ np.uint32(keys[1]))


def _mix(x: _Words, spare: _Words, key: _Words | np.uint32) -> None:
    """The function mix of the recipe, on x in place."""
    np.bitwise_xor(x, np.right_shift(x, np.uint32(16), out=spare), out=x)
    np.multiply(x, np.uint32(0x7FEB352D), out=x)
    np.bitwise_xor(x, key, out=x)
    np.bitwise_xor(x, np.right_shift(x, np.uint32(15), out=spare), out=x)
    np.multiply(x, np.uint32(0x846CA68B), out=x)
    np.bitwise_xor(x, np.right_shift(x, np.uint32(16), out=spare), out=x)
