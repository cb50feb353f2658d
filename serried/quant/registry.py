"""The methods by their name, and the one that a type of GGML is kept in."""

from __future__ import annotations

from collections.abc import Mapping

from serried.quant.int4 import INT4, INT4_MIN
from serried.quant.int8 import INT8
from serried.quant.method import Method

METHODS: Mapping[str, Method] = {method.name: method for method in (INT8, INT4, INT4_MIN)}
EXACT: Mapping[str, Method] = {method.ggml: method for method in METHODS.values()}  # their blocks are taken as they are
Q4_K = "Q4_K"  # superblocks whose scales and minima are products: these are rounded to float16


def method_of_ggml(kind: str) -> Method:
    """What a block type of GGML is kept in: its own bits where we have them, else int8."""
    return INT4_MIN if kind == Q4_K else EXACT.get(kind, INT8)
