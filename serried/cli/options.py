"""Options that several commands share, under vLLM's names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serried.errors import InputError

ENGINE_OPTIONS = (
    "revision",
    "dtype",
    "quantization",
    "backend",
    "device",
    "load_format",
    "seed",
    "tp_weights",
    "threads_per_rank",
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "block_size",
    "collective_timeout",
    "allreduce_algorithm",
)


def add_engine_arguments(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """What to load and how to run it; everything but the tensor-parallel size. model: `?` where it may be left out."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=model,
        help="a Hugging Face directory, a .gguf file, a hub id (owner/name, or owner/name:FILE.gguf), `demo`, or a "
        "preset's name",
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
    group.add_argument(
        "--dtype", help="bfloat16 (default) or float32: of activations, and of weights that are not quantized"
    )
    group.add_argument("--quantization", help="int8, int4 or none, of weights (default: as the checkpoint has them)")
    group.add_argument("--backend", help="auto (default), native or torch")
    group.add_argument("--device", help="auto (default), cpu or cuda")
    group.add_argument("--load-format", help="auto (default), or dummy: random weights from the seed")
    group.add_argument("--seed", type=integer("--seed"), help="of dummy weights, and of sampling (default 0)")
    group.add_argument(
        "--tp-weights", type=integers("--tp-weights"), help="the ranks' shares, e.g. 2,1 (default: equal)"
    )
    group.add_argument("--threads-per-rank", type=integer("--threads-per-rank"), help="default: cores / ranks")
    group.add_argument("--max-model-len", type=integer("--max-model-len"), help="longest sequence, in tokens")
    group.add_argument("--max-num-batched-tokens", type=integer("--max-num-batched-tokens"), help="tokens in one step")
    group.add_argument("--kv-cache-memory", type=integer("--kv-cache-memory"), help="bytes of KV cache of each rank")
    group.add_argument("--block-size", type=integer("--block-size"), help="tokens in a cache block (default 32)")
    group.add_argument(
        "--collective-timeout", type=number("--collective-timeout"), help="seconds to wait for a peer (300)"
    )
    group.add_argument("--allreduce-algorithm", help="auto (default), one-shot or two-shot: of the native backend")


def add_tp_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=integer("--tensor-parallel-size"),
        help="ranks that the model is split over (default 1; under torchrun, its world size)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as keyword arguments of EngineConfig."""
    names = (*ENGINE_OPTIONS, "tensor_parallel_size")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def output_directory(path: str) -> Path:
    """The directory of --output, which must be new or empty."""
    directory = Path(path)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"--output {directory}: exists already; give a directory that is new or empty")
    return directory


def integer(option: str) -> Callable[[str], int]:
    """A parser of whole numbers whose error names the option."""

    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise InputError(f"{option} {text}: expected a whole number") from None

    return parse


def number(option: str) -> Callable[[str], float]:
    """A parser of numbers whose error names the option."""

    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise InputError(f"{option} {text}: expected a number") from None

    return parse


def integers(option: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of whole numbers with commas between them."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise InputError(f"{option} {text}: expected whole numbers with commas between them") from None

    return parse
