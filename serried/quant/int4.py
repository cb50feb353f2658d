"""int4: groups of 32, with a scale (4.5 bits a weight, GGML's Q4_0) or a scale and a minimum (5 bits, Q4_1)."""

from __future__ import annotations

import numpy as np

from serried.quant.method import GROUP, Bytes, Floats, Method, Part, halves, inverse, put_halves

# A byte holds columns i and 16 + i of its group, the first in its low half.
HALF = GROUP // 2


class _Int4(Method):
    """w = scale * (q - 8), with q from 0 to 15; the value of the largest magnitude lies at -8."""

    name = "int4"
    title = "int4"
    ggml = "Q4_0"
    parts = (Part("_scale", "F16", 0, 2), Part("", "U8", 2, 2 + HALF))

    def _quantize(self, groups: Floats, blocks: Bytes) -> None:
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1, keepdims=True), axis=1)
        scales = largest / np.float32(-8)
        put_halves(blocks, 0, scales)
        _pack(groups * inverse(scales) + np.float32(8.5), blocks[:, 2:])

    def _dequantize(self, blocks: Bytes) -> Floats:
        signed = _unpack(blocks[:, 2:])
        signed -= 8
        return signed.view(np.int8) * halves(blocks, 0)


class _Int4Min(Method):
    """w = scale * q + minimum, with q from 0 to 15."""

    name = "int4_min"
    title = "int4 with minimum"
    ggml = "Q4_1"
    parts = (Part("_scale", "F16", 0, 2), Part("_min", "F16", 2, 4), Part("", "U8", 4, 4 + HALF))

    def _quantize(self, groups: Floats, blocks: Bytes) -> None:
        least = groups.min(axis=1, keepdims=True)
        scales = (groups.max(axis=1, keepdims=True) - least) / np.float32(15)
        put_halves(blocks, 0, scales)
        put_halves(blocks, 2, least)
        _pack((groups - least) * inverse(scales) + np.float32(0.5), blocks[:, 4:])

    def _dequantize(self, blocks: Bytes) -> Floats:
        values = _unpack(blocks[:, 4:]) * halves(blocks, 0)
        values += halves(blocks, 2)
        return values


def _pack(values: Floats, packed: Bytes) -> None:
    """Cut [n, 32] to whole numbers of 4 bits, two in each byte of [n, 16]."""
    digits = np.minimum(values.astype(np.uint8), 15)
    np.left_shift(digits[:, HALF:], 4, out=packed)
    packed |= digits[:, :HALF]


def _unpack(packed: Bytes) -> Bytes:
    """The low halves of 16 bytes, then the high halves: [n, 32]."""
    out = np.empty((packed.shape[0], GROUP), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :HALF])
    np.right_shift(packed, 4, out=out[:, HALF:])
    return out


INT4 = _Int4()
INT4_MIN = _Int4Min()
