"""What a checkpoint is to the loader: names, shapes, and slices read on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows

Array = npt.NDArray[np.generic]


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint: its shape (outermost dimension first), its format's own name, the file it is in.

    method: what it is kept in unless the user wants otherwise; None where the file holds plain numbers.
    """

    shape: tuple[int, ...]
    format: str
    file: str
    method: Method | None = None


class Checkpoint(Protocol):
    """A set of named tensors, under the names that Hugging Face gives them, of which any slice can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint."""
        ...

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """Read rows [start, stop) of the first dimension, and columns of the second where given (2-D only).

        Reads from disk no more than that slice (for block formats: the blocks that it touches). Returns float32,
        float16 or bfloat16, whichever holds the stored values exactly: [rows] or [rows, columns]. Raises
        CheckpointError, naming file and tensor, where the file is damaged.
        """
        ...

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> QuantizedRows | None:
        """As `read`, but in the blocks of a method, where the file holds that very method.

        None where it does not, or where the columns do not start with a group: read and quantize then.
        """
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read from disk so far."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def read_rows(
    checkpoint: Checkpoint, name: str, rows: Span, columns: Span | None, method: Method | None
) -> Array | QuantizedRows:
    """A slice for a parameter of a method: its blocks where the file has them, else values."""
    blocks = checkpoint.read_blocks(name, rows, columns, method) if method else None
    return checkpoint.read(name, rows, columns) if blocks is None else blocks
