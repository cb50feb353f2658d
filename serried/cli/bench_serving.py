"""`serried bench serve` and `throughput`: their options, and what they run."""

from __future__ import annotations

import argparse
from typing import Any

from serried.bench.serve import ServeBench
from serried.bench.serving_metrics import parse_bounds
from serried.bench.throughput import bench_throughput
from serried.bench.workload import Workload
from serried.cli.options import integer, number
from serried.config import EngineConfig
from serried.errors import InputError
from serried.models.registry import open_model
from serried.progress import progress_bar

SERVING_KINDS = ("serve", "throughput")


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serve and throughput")
    group.add_argument("--base-url", help="of serve: the server, without /v1 (http://127.0.0.1:8000)")
    group.add_argument("--served-model", help="of serve: the model's name there (the first that it serves)")
    group.add_argument("--api-key", help="of serve")
    group.add_argument("--workload", default="random", help="random (default), or shared-prefix")
    group.add_argument("--num-prompts", type=integer("--num-prompts"), default=32, help="requests (32)")
    group.add_argument("--output-len", type=integer("--output-len"), default=128, help="tokens of an answer (128)")
    group.add_argument(
        "--prefix-len", type=integer("--prefix-len"), default=0, help="of shared-prefix: tokens in common"
    )
    group.add_argument(
        "--vocab-size",
        type=integer("--vocab-size"),
        help="of serve: prompts are token ids below it (default: text); for a server without a tokenizer",
    )
    group.add_argument("--request-rate", type=number("--request-rate"), default=float("inf"), help="a second (inf)")
    group.add_argument("--max-concurrency", type=integer("--max-concurrency"), default=256, help="requests at once")
    group.add_argument("--goodput", help="bounds in ms: ttft:500,tpot:50,e2el:9000")


def measure_serving(args: argparse.Namespace, config: EngineConfig | None) -> dict[str, Any]:
    """Run one of them. config: of throughput; serve asks a server that runs already."""
    vocab_size = args.vocab_size
    if config is not None:
        vocab_size = open_model(config.model, config.revision, weights=False).config.vocab_size
    workload = Workload(
        args.num_prompts,
        args.input_len,
        args.output_len,
        args.workload,
        args.prefix_len,
        args.request_rate,
        vocab_size,
        args.seed or 0,
    )
    with progress_bar(args.kind, unit="requests" if config is None else "rounds") as progress:
        report = progress or (lambda done, total: None)
        if config is not None:
            return bench_throughput(config, workload, report, args.rounds)
        if not args.base_url:
            raise InputError("bench serve: give --base-url, for example http://127.0.0.1:8000 of `serried serve MODEL`")
        bounds = parse_bounds(args.goodput)
        bench = ServeBench(args.base_url, args.served_model, workload, args.max_concurrency, bounds, args.api_key)
        return bench.run(report)
