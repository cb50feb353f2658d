"""int8: groups of 32 with a float16 scale, 8.5 bits a weight. GGML calls it Q8_0."""

from __future__ import annotations

import numpy as np

from serried.quant.method import GROUP, Bytes, Floats, Method, Part, halves, inverse, put_halves


class _Int8(Method):
    """w = scale * q, with q from -127 to 127."""

    name = "int8"
    title = "int8"
    ggml = "Q8_0"
    parts = (Part("_scale", "F16", 0, 2), Part("", "I8", 2, 2 + GROUP))

    def _quantize(self, groups: Floats, blocks: Bytes) -> None:
        scales = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
        scaled = groups * inverse(scales)
        whole = np.floor(np.abs(scaled))
        whole += np.floor(2 * (np.abs(scaled) - whole))  # to nearest, halves away from zero
        put_halves(blocks, 0, scales)
        blocks[:, 2:] = np.copysign(whole, scaled).astype(np.int8).view(np.uint8)

    def _dequantize(self, blocks: Bytes) -> Floats:
        return blocks[:, 2:].view(np.int8) * halves(blocks, 0)


INT8 = _Int8()
