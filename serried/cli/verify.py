"""`serried verify`: prove on the user's own model that the split changes nothing."""

from __future__ import annotations

import argparse
import json

from serried.cli.options import add_engine_arguments, engine_options, integer, integers, number
from serried.config import SABOTAGES, torchrun_environment
from serried.verify.job import VerifyJob, verify
from serried.verify.report import print_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=integers("--tensor-parallel-size"),
        help="the sizes to run, e.g. 1,2,4 (default 1,2; a single size N: 1,N; under torchrun, its world size)",
    )
    parser.add_argument("--prompt", help="text, for a model that has a tokenizer")
    parser.add_argument("--prompt-ids", type=integers("--prompt-ids"), help="a prompt as token ids: 1,2,3")
    parser.add_argument("--tokens", type=integer("--tokens"), default=20, help="greedy tokens (default 20)")
    parser.add_argument(
        "--tolerance",
        type=number("--tolerance"),
        help="largest logit difference (default 1e-4 in float32; must be given for bfloat16 on torch)",
    )
    parser.add_argument("--no-reference", action="store_true", help="do not run the unsplit reference decoder")
    parser.add_argument("--sabotage", metavar="KIND", help=f"damage one rank on purpose: {', '.join(SABOTAGES)}")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    options = engine_options(args)
    options.pop("tensor_parallel_size", None)
    job = VerifyJob.create(
        args.model,
        sizes=args.tensor_parallel_size,
        options={**options, "sabotage": args.sabotage},
        prompt=args.prompt,
        prompt_ids=args.prompt_ids,
        tokens=args.tokens,
        tolerance=args.tolerance,
        with_reference=not args.no_reference,
        world=torchrun_environment(),
    )
    report = verify(job)
    if report is None:  # a rank of torchrun's world that is not the first
        return 0
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        print_report(report)
    return 0 if report.ok else 1
