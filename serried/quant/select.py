"""Which method a parameter gets. The one place that decides it; pure."""

from __future__ import annotations

from collections.abc import Sequence

from serried.quant.int4 import INT4, INT4_MIN
from serried.quant.int8 import INT8
from serried.quant.method import Method


def choose_method(option: str | None, kind: str, stored: Sequence[Method | None]) -> Method | None:
    """The method of a parameter, None where it stays plain.

    option: --quantization (None: as the file has it). kind: the parameter's, as in weights/spec.py. stored: what the
    file keeps each of its tensors in. Several tensors in one parameter take the widest of their methods; a plain one
    among them makes it plain. int4 leaves tables of the vocabulary in int8: each of their rows is one token's, and
    errors there do not average out.
    """
    if kind == "vector" or option == "none":
        return None
    methods = [method for method in stored if method is not None]
    widest = max(methods, key=lambda method: method.bits) if len(methods) == len(stored) else None
    if option is None:
        return widest
    if option == "int8" or kind in {"embedding", "head"}:
        return INT8
    return widest if widest in {INT4, INT4_MIN} else INT4_MIN
