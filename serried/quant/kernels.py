"""The compiled kernels that quantize and repack, where the extension was built."""

from __future__ import annotations

from functools import cache
from typing import Any

from serried import _native


@cache
def native_kernels() -> Any:
    """The kernels of the best instruction set; None without the extension. They give the bits that NumPy gives."""
    return _native.open_kernels() if _native.available() else None
