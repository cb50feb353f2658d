"""DequantizedCheckpoint: the numbers that an engine computes with, read from the checkpoint that it was loaded from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows, quantize_rows
from serried.weights.checkpoint import Array, Checkpoint, TensorInfo, read_rows
from serried.weights.load import assign_methods
from serried.weights.spec import Parameter


class DequantizedCheckpoint:
    """A checkpoint whose values have gone through the methods that the parameters are kept in.

    quantization: as in EngineConfig. It owns the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, parameters: Iterable[Parameter], quantization: str | None) -> None:
        parameters = list(parameters)
        assign_methods(parameters, checkpoint, quantization)
        self._checkpoint = checkpoint
        self._methods = {piece.tensor: p.method for p in parameters for piece in p.spec.pieces}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._checkpoint.tensors

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        method = self._methods.get(name)
        values = read_rows(self._checkpoint, name, rows, columns, method)
        if method is not None and not isinstance(values, QuantizedRows):
            values = quantize_rows(method, values)
        return values.values() if isinstance(values, QuantizedRows) else values

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> None:
        """See Checkpoint.read_blocks: there are none."""

    @property
    def bytes_read(self) -> int:
        return self._checkpoint.bytes_read

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()
