"""Loading: stream each parameter's slices from the checkpoint into the backend, and account for every tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from serried.backends.base import Backend
from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows
from serried.quant.select import choose_method
from serried.weights.checkpoint import Array, Checkpoint, read_rows
from serried.weights.finite import check_finite
from serried.weights.spec import Parameter, Piece

CHUNK_BYTES = 8 << 20  # what is read at once: small beside a rank's memory, large beside a system call

Progress = Callable[[int, int], None]  # (elements done, elements in all)


def load_parameters(
    parameters: Sequence[Parameter],
    checkpoint: Checkpoint,
    backend: Backend,
    *,
    quantization: str | None = None,
    ignored: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter. A tensor that is missing, left over, of another shape or not finite is a CheckpointError.

    quantization: as in EngineConfig. ignored: tells which tensors of the checkpoint may be left over (a tied LM
    head's copy, RoPE buffers).
    """
    check_tensors(parameters, checkpoint, ignored)
    assign_methods(parameters, checkpoint, quantization)
    total = sum(parameter.elements for parameter in parameters)
    done = 0
    for parameter in parameters:
        destination = backend.destination(parameter.shape, parameter.kind, parameter.method)
        row = 0
        for piece in parameter.spec.pieces:
            for rows in chunks(piece):
                values = read_finite(checkpoint, piece, rows, parameter.method)
                if isinstance(values, QuantizedRows):
                    destination.write_blocks(row, values)
                elif parameter.kind == "vector":
                    destination.write(row, values.astype(np.float32) + np.float32(parameter.offset))
                else:
                    destination.write(row, values)
                row += rows.size
                done += math.prod(values.shape)
                if progress:
                    progress(done, total)
        parameter.value = destination.finish()


def assign_methods(parameters: Iterable[Parameter], checkpoint: Checkpoint, quantization: str | None) -> None:
    """Decide what each parameter is kept in."""
    for parameter in parameters:
        stored = [checkpoint.tensors[piece.tensor].method for piece in parameter.spec.pieces]
        parameter.method = choose_method(quantization, parameter.kind, stored)


def describe_methods(parameters: Iterable[Parameter], checkpoint: Checkpoint, dtype: str | None) -> str | None:
    """What the file's tensors became, counted: "210 Q4_1 -> int4 with minimum, 61 F32 -> float32".

    dtype: the engine's, of what is not quantized (None: that stays as it was). None where nothing was quantized in
    the file, and nothing is now.
    """
    counts: Counter[str] = Counter()
    quantized = False
    for parameter in parameters:
        plain = "float32" if dtype and parameter.kind == "vector" else dtype
        for piece in parameter.spec.pieces:
            info = checkpoint.tensors[piece.tensor]
            quantized |= info.method is not None or parameter.method is not None
            kept = parameter.method.title if parameter.method else plain
            counts[f"{info.format} -> {kept}" if kept else info.format] += 1
    return ", ".join(f"{count} {what}" for what, count in counts.most_common()) if quantized else None


def read_finite(checkpoint: Checkpoint, piece: Piece, rows: Span, method: Method | None) -> Array | QuantizedRows:
    """Some rows of a piece for a parameter of a method, in blocks where the file has them; they must be finite."""
    with np.errstate(all="ignore"):  # a scale that is not finite is told of by the error alone
        values = read_rows(checkpoint, piece.tensor, rows, piece.columns, method)
        check_finite(piece.tensor, checkpoint.tensors[piece.tensor], values, rows, piece.columns)
    return values


def check_tensors(parameters: Iterable[Parameter], checkpoint: Checkpoint, ignored: Callable[[str], bool]) -> None:
    """Compare what the model wants with what the checkpoint has, before anything is read."""
    wanted = tensor_shapes(parameters)
    for name, shape in wanted.items():
        found = checkpoint.tensors.get(name)
        if found is None:
            files = sorted({info.file for info in checkpoint.tensors.values()})
            where = files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "") if files else "checkpoint"
            raise CheckpointError(f"{where}: tensor {name} of shape {list(shape)} is missing")
        if found.shape != shape:
            raise CheckpointError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}; the model's config wants {list(shape)}"
            )
        checkpoint.read(name, Span(0, 0))  # reads nothing, but refuses a dtype that cannot be read
    for name, info in checkpoint.tensors.items():
        if name not in wanted and not ignored(name):
            raise CheckpointError(
                f"{info.file}: tensor {name} of shape {list(info.shape)} is left over: "
                "the model's config has no place for it"
            )


def tensor_shapes(parameters: Iterable[Parameter]) -> Mapping[str, tuple[int, ...]]:
    """The whole tensors that the parameters are cut from, by name."""
    return {piece.tensor: piece.shape for parameter in parameters for piece in parameter.spec.pieces}


def chunks(piece: Piece) -> Iterable[Span]:
    """A piece's rows in runs of about CHUNK_BYTES of float32."""
    width = piece.local_shape[1] if len(piece.shape) > 1 else 1
    step = max(1, CHUNK_BYTES // (4 * max(1, width)))
    for start in range(piece.rows.start, piece.rows.stop, step):
        yield Span(start, min(start + step, piece.rows.stop))
