"""`serried init`: write a preset as a checkpoint with dummy weights."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from serried.cli.options import integer, output_directory
from serried.errors import InputError
from serried.models.decoder import Decoder
from serried.models.registry import open_model, preset_json, preset_names
from serried.parallel.comm import LocalComm
from serried.parallel.reduction import Span
from serried.progress import progress_bar
from serried.weights.checkpoint import Array
from serried.weights.dummy import DummyCheckpoint
from serried.weights.load import tensor_shapes
from serried.weights.safetensors_writer import TensorSource, write_safetensors

ROWS = 1024  # written at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", metavar="PRESET", help=f"one of {', '.join(preset_names())}")
    parser.add_argument("--output", "-o", metavar="DIR", required=True, help="the directory to write, new or empty")
    parser.add_argument("--seed", type=integer("--seed"), default=0, help="of the weights (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    if args.preset not in preset_names():
        raise InputError(f"{args.preset}: no such preset; choose from {', '.join(preset_names())}")
    directory = output_directory(args.output)
    if not 0 <= args.seed < 1 << 64:
        raise InputError(f"--seed {args.seed}: expected 0 to 2^64 - 1")
    parameters, size = write_preset(args.preset, directory, args.seed)
    if args.json:
        print(json.dumps({"directory": str(directory), "parameters": parameters, "bytes": size}))
    else:
        print(f"{directory}: {args.preset}, {parameters:,} parameters, {size / 1e9:.2f} GB, bfloat16, seed {args.seed}")
    return 0


def write_preset(preset: str, directory: Path, seed: int) -> tuple[int, int]:
    """Write config.json and model.safetensors; the number of parameters, and of bytes."""
    config = open_model(preset).config
    model = Decoder(config, config.partition((1,)), LocalComm(), max_positions=1)
    shapes = tensor_shapes(model.parameters())
    checkpoint = DummyCheckpoint(shapes, seed)
    total = sum(math.prod(shape) for shape in shapes.values())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(preset_json(preset), encoding="utf-8")
        file = directory / "model.safetensors"
        with progress_bar(f"writing {preset}") as progress:
            chunks = _Chunks(checkpoint, total, progress)
            write_safetensors(
                file, [TensorSource(name, "BF16", shape, chunks.of(name)) for name, shape in shapes.items()]
            )
    except OSError as error:
        raise InputError(f"--output {directory}: cannot be written: {error.strerror or error}") from None
    return total, file.stat().st_size


class _Chunks:
    """Makes each tensor's chunks, and counts what has been made."""

    def __init__(self, checkpoint: DummyCheckpoint, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._checkpoint = checkpoint
        self._total = total
        self._progress = progress
        self._done = 0

    def of(self, name: str) -> Callable[[], Iterator[Array]]:
        return lambda: self._read(name)

    def _read(self, name: str) -> Iterator[Array]:
        rows = self._checkpoint.tensors[name].shape[0]
        for start in range(0, rows, ROWS):
            chunk = self._checkpoint.read(name, Span(start, min(start + ROWS, rows)))
            self._done += chunk.size
            if self._progress:
                self._progress(self._done, self._total)
            yield chunk
