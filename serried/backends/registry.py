"""The backends by name, imported when first asked for."""

from __future__ import annotations

import importlib.util

from serried.backends.base import Backend
from serried.errors import InputError

NAMES = ("torch",)


def create_backend(name: str, dtype: str, device: str, threads: int) -> Backend:
    """A backend for this rank; InputError where it is unknown or its library is missing."""
    if name not in NAMES:
        raise InputError(f"--backend {name}: unknown; choose from {', '.join(NAMES)}")
    if importlib.util.find_spec("torch") is None:
        raise InputError("--backend torch: PyTorch is not installed; pip install 'serried[torch]'")
    from serried.backends.torch import TorchBackend

    return TorchBackend(dtype, device, threads)
