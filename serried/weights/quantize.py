"""Writing a checkpoint anew in 8 or 4 bits, a chunk in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows, quantize_rows
from serried.weights.checkpoint import Checkpoint
from serried.weights.files import READABLE
from serried.weights.load import Progress, assign_methods, chunks, read_finite, tensor_shapes
from serried.weights.safetensors_blocks import declare, part_shape, split_blocks
from serried.weights.safetensors_writer import Entry, SafetensorsWriter
from serried.weights.spec import Parameter, Piece


def write_quantized(
    path: Path,
    parameters: Sequence[Parameter],
    checkpoint: Checkpoint,
    quantization: str,
    progress: Progress | None = None,
) -> None:
    """Write the whole tensors of unsplit parameters as a safetensors file that is loaded as it is.

    quantization: as in EngineConfig. What the file holds in the chosen method already is copied bit for bit.
    """
    assign_methods(parameters, checkpoint, quantization)
    # One parameter may hold all parts of a fused tensor, which is written once.
    methods = {piece.tensor: parameter.method for parameter in parameters for piece in parameter.spec.pieces}
    wholes = [Piece(name, shape, Span(0, shape[0])) for name, shape in tensor_shapes(parameters).items()]
    declared = {piece.tensor: (method, piece.shape[1]) for piece in wholes if (method := methods[piece.tensor])}
    entries = [entry for piece in wholes for entry in _entries(piece, methods[piece.tensor], checkpoint)]
    total, done = sum(piece.elements for piece in wholes), 0
    with SafetensorsWriter(path, entries, **declare(declared)) as writer:
        for piece in wholes:
            method = methods[piece.tensor]
            for rows in chunks(piece):
                values = read_finite(checkpoint, piece, rows, method)
                if method is not None:
                    blocks = values if isinstance(values, QuantizedRows) else quantize_rows(method, values)
                    for part, array in split_blocks(blocks.method, blocks.blocks):
                        writer.append(piece.tensor + part.suffix, array)
                else:
                    writer.append(piece.tensor, np.asarray(values))
                done += math.prod(values.shape)
                if progress:
                    progress(done, total)


def _entries(whole: Piece, method: Method | None, checkpoint: Checkpoint) -> list[Entry]:
    """The tensors of a file that a tensor is written as."""
    if method is None:
        stored = checkpoint.tensors[whole.tensor].format
        return [Entry(whole.tensor, stored if stored in READABLE else "F32", whole.shape)]
    return [Entry(whole.tensor + part.suffix, part.dtype, part_shape(part, *whole.shape)) for part in method.parts]
