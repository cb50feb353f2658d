"""Loading: stream each parameter's slices from the checkpoint into the backend, and account for every tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from serried.backends.base import Backend
from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Checkpoint
from serried.weights.spec import Parameter, Piece

CHUNK_BYTES = 8 << 20  # what is read at once: small beside a rank's memory, large beside a system call

Progress = Callable[[int, int], None]  # (elements done, elements in all)


def load_parameters(
    parameters: Sequence[Parameter],
    checkpoint: Checkpoint,
    backend: Backend,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter. A tensor missing, left over or of another shape is a CheckpointError that names it.

    ignored: tells which tensors of the checkpoint may be left over (a tied LM head's copy, RoPE buffers).
    """
    check_tensors(parameters, checkpoint, ignored)
    total = sum(parameter.elements for parameter in parameters)
    done = 0
    for parameter in parameters:
        destination = backend.destination(parameter.shape, parameter.kind)
        row = 0
        for piece in parameter.spec.pieces:
            for rows in _chunks(piece):
                values = checkpoint.read(piece.tensor, rows, piece.columns)
                if parameter.kind == "vector":
                    values = values.astype(np.float32)
                destination.write(row, values)
                row += rows.size
                done += values.size
                if progress:
                    progress(done, total)
        parameter.value = destination.finish()


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
    for name, info in checkpoint.tensors.items():
        if name not in wanted and not ignored(name):
            raise CheckpointError(
                f"{info.file}: tensor {name} of shape {list(info.shape)} is left over: "
                "the model's config has no place for it"
            )


def tensor_shapes(parameters: Iterable[Parameter]) -> Mapping[str, tuple[int, ...]]:
    """The whole tensors that the parameters are cut from, by name."""
    return {piece.tensor: piece.shape for parameter in parameters for piece in parameter.spec.pieces}


def _chunks(piece: Piece) -> Iterable[Span]:
    """A piece's rows in runs of about CHUNK_BYTES of float32."""
    width = piece.local_shape[1] if len(piece.shape) > 1 else 1
    step = max(1, CHUNK_BYTES // (4 * max(1, width)))
    for start in range(piece.rows.start, piece.rows.stop, step):
        yield Span(start, min(start + step, piece.rows.stop))
