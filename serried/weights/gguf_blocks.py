"""The block formats of GGML, from bytes to numbers, or to the blocks of a method."""

from __future__ import annotations

from functools import cache

import numpy as np

from serried.quant.method import Bytes, Method
from serried.quant.q4_k import repack_q4_k
from serried.quant.registry import EXACT, Q4_K, method_of_ggml
from serried.weights.checkpoint import Array
from serried.weights.files import READABLE
from serried.weights.gguf_file import BlockType


def dequantize(raw: Bytes, kind: BlockType) -> Array:
    """Bytes [rows, blocks] to float32 (or to the plain type that they are), [rows, elements].

    The frequent simple types are done here, several times as fast as by the library and to the same bits.
    Raises NotImplementedError for types that the library cannot do.
    """
    if kind.name in READABLE:
        return raw.view(READABLE[kind.name])
    if kind.name in EXACT:
        return EXACT[kind.name].dequantize(raw, raw.shape[1] // kind.nbytes * kind.elements)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_any

    if kind.name not in GGMLQuantizationType.__members__:
        raise NotImplementedError(kind.name)
    values: Array = dequantize_any(raw, GGMLQuantizationType[kind.name])
    return values


@cache
def can_dequantize(kind: BlockType) -> bool:
    """Whether `dequantize` knows a type."""
    try:
        dequantize(np.zeros((1, kind.nbytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def as_blocks(raw: Bytes, kind: BlockType) -> Bytes:
    """Bytes [rows, blocks] of a type that `keeps` a method's blocks, as those."""
    return repack_q4_k(raw) if kind.name == Q4_K else raw


def keeps(kind: BlockType, method: Method) -> bool:
    """Whether blocks of a type become those of a method with no value quantized anew."""
    return method_of_ggml(kind.name) is method and (kind.name in EXACT or kind.name == Q4_K)
