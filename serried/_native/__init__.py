"""The compiled part: `core` (the extension module), and the kernels of the best instruction set that the CPU has."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from serried.config import forced_isa
from serried.errors import InputError

# The plainest first. A CPU may lack one and have a later one (AVX-512 without AVX-VNNI).
ISAS = ("baseline", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx")

core: Any = None
_why_not: ImportError | None = None
try:
    core = import_module("serried._native._core")
except ImportError as error:  # built without a compiler, or not for this Python
    _why_not = error


def available() -> bool:
    """Whether the extension was built."""
    return core is not None


def choose_isa(wanted: str | None = None) -> str:
    """The instruction set to use: `wanted`, SERRIED_ISA, or the best that this CPU can run and the build has."""
    if core is None:
        raise InputError(
            f"the native backend is not built ({_why_not}); install a C++ compiler and reinstall, or take "
            "--backend torch"
        )
    isas = runnable_isas()
    wanted = wanted or forced_isa()
    if wanted is None:
        return isas[-1]
    if wanted not in isas:
        raise InputError(f"SERRIED_ISA {wanted}: this CPU and build can run {', '.join(isas)}")
    return wanted


def runnable_isas() -> list[str]:
    """The instruction sets that this CPU can run and the build has, the plainest first."""
    return [isa for isa in core.cpu_isas() if _library(isa).is_file()]


def open_kernels(wanted: str | None = None) -> Any:
    """The kernels of an instruction set."""
    return core.KernelSet(str(_library(choose_isa(wanted))))


def _library(isa: str) -> Path:
    return Path(core.__file__).parent / f"kernels_{isa}.so"
