"""`serried bench`: what this machine allows, and what fraction of it is reached."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from serried.backends.registry import resolve_backend
from serried.bench.allreduce import bench_allreduce
from serried.bench.forward import bench_decode, bench_prefill
from serried.bench.kernels import bench_kernels
from serried.bench.limits import bench_membw
from serried.bench.peers import bench_peers
from serried.bench.quality import bench_quality
from serried.bench.steps import Layout
from serried.cli.bench_serving import SERVING_KINDS, add_serving_arguments, measure_serving
from serried.cli.options import add_engine_arguments, add_tp_argument, engine_options, integer, integers
from serried.config import EngineConfig
from serried.errors import InputError
from serried.machine import available_cores
from serried.models.registry import ModelSource, open_model
from serried.progress import progress_bar

KINDS = ("membw", "allreduce", "kernels", "decode", "prefill", "peers", "quality", *SERVING_KINDS)
# The columns of long tables that fit a terminal; everything else is in the JSON document.
COLUMNS = {
    "peers": {
        "measure": "measure", "batch_size": "batch", "context": "context",
        "serried_tokens_per_s": "tokens/s Serried", "llama_cpp_tokens_per_s": "tokens/s llama.cpp", "ratio": "ratio",
        "fraction_of_memory_serried": "fraction Serried", "fraction_of_memory_llama_cpp": "fraction llama.cpp",
    },
    "quality": {
        "run": "weights", "perplexity": "perplexity", "kl_mean": "KL mean", "kl_p99": "KL p99",
        "top1_agreement": "top-1 agreement",
    },
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    add_engine_arguments(parser, model="*")
    add_tp_argument(parser)
    parser.add_argument("--layouts", help="several in turn, TP x threads: 1x2,2x1")
    parser.add_argument("--batch-size", type=integer("--batch-size"), default=1, help="sequences of decode (1)")
    parser.add_argument("--context", type=integer("--context"), default=128, help="positions of decode (128)")
    parser.add_argument("--input-len", type=integer("--input-len"), default=512, help="tokens of prefill (512)")
    parser.add_argument("--rounds", type=integer("--rounds"), default=9, help="measurements of each figure (9)")
    parser.add_argument("--ranks", type=integers("--ranks"), default=(2,), help="of allreduce: 2,3,4 (default 2)")
    parser.add_argument("--tokens", type=integer("--tokens"), default=2000, help="of the text of quality (2000)")
    parser.add_argument("--window", type=integer("--window"), default=512, help="of quality: tokens a sequence (512)")
    parser.add_argument("--cache-dir", metavar="DIR", help="of peers: keep the GGUF files that it writes here")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_serving_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.kind not in KINDS:
        raise InputError(f"{args.kind}: no such benchmark; choose from {', '.join(KINDS)}")
    for option in ("batch_size", "context", "input_len", "rounds"):
        if getattr(args, option) < 1:
            raise InputError(f"--{option.replace('_', '-')} {getattr(args, option)}: expected at least 1")
    if args.kind != "peers" and len(args.model) > 1:
        raise InputError(f"bench {args.kind}: {' '.join(args.model)}: expected one MODEL")
    result = _measure(args)
    if args.json:
        print(json.dumps(result))
    else:
        _print(args.kind, result)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.kind == "peers":
        config = resolve_backend(EngineConfig.create("peers", **engine_options(args)))
        return bench_peers(args.model, config, args.cache_dir, args.rounds)
    if args.kind == "quality":
        source, config = _model(args, args.model or ["demo"])
        return bench_quality(source, config, args.tokens, args.window)
    if args.kind in SERVING_KINDS:
        return measure_serving(args, _model(args, args.model)[1] if args.kind == "throughput" else None)
    with progress_bar(args.kind) as progress:
        return _measure_in_turn(args, progress or (lambda done, total: None))


def _measure_in_turn(args: argparse.Namespace, report: Callable[[int, int], None]) -> dict[str, Any]:
    if args.kind == "membw":
        return bench_membw(available_cores(), args.rounds, report)
    if args.kind == "allreduce":
        return bench_allreduce(args.ranks, args.rounds, report)
    source, config = _model(args, args.model)
    if args.kind == "kernels":
        return bench_kernels(source, config, args.rounds, report)
    layouts = Layout.parse_all(args.layouts) if args.layouts else [Layout(config.tensor_parallel_size, config.threads)]
    for layout in layouts:
        source.config.partition((1,) * layout.tp)
    if args.kind == "decode":
        runs = bench_decode(source, config, layouts, args.batch_size, args.context, args.rounds, report)
    else:
        runs = bench_prefill(source, config, layouts, args.input_len, args.rounds, report)
    return runs[0] if not args.layouts else {"bench": args.kind, "runs": runs}


def _model(args: argparse.Namespace, names: Sequence[str]) -> tuple[ModelSource, EngineConfig]:
    if not names:
        raise InputError(f"bench {args.kind}: give a MODEL, for example qwen3-0.6b --load-format dummy")
    config = resolve_backend(EngineConfig.create(names[0], **engine_options(args)))
    return open_model(config.model, config.revision, weights=config.load_format != "dummy"), config


def _print(kind: str, result: dict[str, Any]) -> None:
    runs = result.get("runs", [result])
    if kind == "peers":
        print(f"{result['threads']} threads each; fraction: of the speed at which memory is read")
        print("\n".join(f"{peer}: {result[f'{peer}_version']}" for peer in ("serried", "llama_cpp")))
    tables = groupby(runs, lambda run: f"{run['file']} ({run['types']})") if kind == "peers" else [(kind, runs)]
    for title, group in tables:
        columns = COLUMNS.get(kind)
        print_table(title, [{name: run.get(key) for key, name in columns.items()} if columns else run for run in group])


def print_table(title: str, runs: Sequence[dict[str, Any]]) -> None:
    """A few runs of many figures: one column a run. Many runs: one row a run."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    figures = list(dict.fromkeys(key for run in runs for key in run))
    cells = [[_readable(name, run.get(name)) for name in figures] for run in runs]
    upright = len(runs) <= 4
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=not upright, padding=(0, 1), collapse_padding=True)
    for heading in ("figure", *("" for _ in runs)) if upright else figures:
        words = heading == "figure" or isinstance(runs[0].get(heading), str)
        table.add_column(heading.replace("_", " "), justify="left" if words else "right", no_wrap=words)
    for row in zip(figures, *cells, strict=True) if upright else cells:
        table.add_row(*row)
    Console().print(table)


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.startswith("fraction") or name.endswith(("share", "agreement")):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
