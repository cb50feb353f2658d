"""Serried: a tensor-parallel LLM engine. `LLM` and `SamplingParams` are the Python interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serried.engine.llm import LLM
    from serried.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported when first asked for, so that `import serried` and `serried --help` stay fast.
    if name == "LLM":
        from serried.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from serried.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'serried' has no attribute {name!r}")
