"""A model as if its checkpoint had been published in bfloat16: what `bench quality` quantizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np

from serried.models.registry import ModelSource
from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.weights.checkpoint import Array, Checkpoint, TensorInfo
from serried.weights.spec import Parameter


class RoundedCheckpoint:
    """A checkpoint whose matrices are dequantized and rounded to bfloat16. Vectors stay. It owns the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tensors: Mapping[str, TensorInfo] = {
            name: info._replace(method=None) for name, info in checkpoint.tensors.items()
        }

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        values = self._checkpoint.read(name, rows, columns)
        if values.ndim == 1:
            return values
        rounded: Array = values.astype(np.float32, copy=False).astype(ml_dtypes.bfloat16)
        return rounded

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> None:
        """See Checkpoint.read_blocks: there are none."""

    @property
    def bytes_read(self) -> int:
        return self._checkpoint.bytes_read

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()


@dataclass(frozen=True)
class RoundedSource(ModelSource):
    """A source of such checkpoints, for an engine in this process."""

    @classmethod
    def of(cls, source: ModelSource) -> RoundedSource:
        return cls(**{field.name: getattr(source, field.name) for field in fields(source)})

    def checkpoint(self, parameters: Sequence[Parameter], load_format: str, seed: int) -> Checkpoint:
        """See ModelSource.checkpoint."""
        return RoundedCheckpoint(super().checkpoint(parameters, load_format, seed))
