"""The block formats of GGML, from bytes to numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from serried.weights.checkpoint import Array
from serried.weights.files import READABLE
from serried.weights.gguf_file import BlockType

_Bytes = npt.NDArray[np.uint8]


def dequantize(raw: _Bytes, kind: BlockType) -> Array:
    """Bytes [rows, blocks] to float32 (or to the plain type that they are), [rows, elements].

    The frequent simple types are done here, several times as fast as by the library and to the same bits.
    Raises NotImplementedError for types that the library cannot do.
    """
    if kind.name in READABLE:
        return raw.view(READABLE[kind.name])
    if kind.name not in _FAST:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as dequantize_any

        if kind.name not in GGMLQuantizationType.__members__:
            raise NotImplementedError(kind.name)
        values: Array = dequantize_any(raw, GGMLQuantizationType[kind.name])
        return values
    return _FAST[kind.name](raw.reshape(-1, kind.nbytes)).reshape(raw.shape[0], -1)


def _halves(blocks: _Bytes, at: int) -> npt.NDArray[np.float32]:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """The low halves of 16 bytes, then the high halves: [blocks, 32]."""
    out = np.empty((packed.shape[0], 32), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :16])
    np.right_shift(packed, 4, out=out[:, 16:])
    return out


def _q4_0(blocks: _Bytes) -> npt.NDArray[np.float32]:
    signed = _nibbles(blocks[:, 2:])
    signed -= 8
    return signed.view(np.int8) * _halves(blocks, 0)


def _q4_1(blocks: _Bytes) -> npt.NDArray[np.float32]:
    values = _nibbles(blocks[:, 4:]) * _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q8_0(blocks: _Bytes) -> npt.NDArray[np.float32]:
    return blocks[:, 2:].view(np.int8) * _halves(blocks, 0)


_FAST: Mapping[str, Callable[[_Bytes], npt.NDArray[np.float32]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}
