"""`serried quantize`: write a model in 8 or 4 bits, as a directory that loads as it is."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from serried.cli.options import integer, output_directory
from serried.errors import InputError
from serried.models.decoder import Decoder
from serried.models.fp8_config import KEY, OWN
from serried.models.hf_writer import hf_from_config
from serried.models.reader import read_json
from serried.models.registry import ModelSource, open_model, preset_json
from serried.parallel.comm import LocalComm
from serried.progress import progress_bar
from serried.quant.method import GROUP
from serried.text.tokenizer import Tokenizer
from serried.weights.load import check_tensors, describe_methods
from serried.weights.quantize import write_quantized

FORMATS = ("int8", "int4")
# What stands beside the weights of a Hugging Face directory and is copied as it is.
BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face directory, a .gguf file, a hub id, `demo`, or a preset's name"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
    parser.add_argument("--to", metavar="FORMAT", required=True, help="int8, or int4")
    parser.add_argument("--output", "-o", metavar="DIR", required=True, help="the directory to write, new or empty")
    parser.add_argument("--load-format", default="auto", help="auto (default), or dummy: random weights from the seed")
    parser.add_argument("--seed", type=integer("--seed"), default=0, help="of dummy weights (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    if args.to not in FORMATS:
        raise InputError(f"--to {args.to}: choose from {', '.join(FORMATS)}")
    directory = output_directory(args.output)
    source = open_model(args.model, args.revision, weights=args.load_format != "dummy")
    config = {**_config(source), KEY: _declaration(args.to)}
    tokenizer = Tokenizer.from_gguf(source.gguf.metadata) if source.gguf else None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        summary = _write_weights(source, directory / "model.safetensors", args)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(directory)
        _copy_beside(source, directory)
    except OSError as error:
        raise InputError(f"--output {directory}: cannot be written: {error.strerror or error}") from None
    size = (directory / "model.safetensors").stat().st_size
    if args.json:
        print(json.dumps({"directory": str(directory), "to": args.to, "bytes": size, "tensors": summary}))
    else:
        print(f"{directory}: {source.name} in {args.to}, {size / 1e9:.2f} GB; {summary}")
        if not (directory / "tokenizer.json").is_file():
            print(f"{source.name} has no tokenizer.json, so {directory} takes token ids only", file=sys.stderr)
    return 0


def _config(source: ModelSource) -> dict[str, Any]:
    """The model's config.json."""
    if source.directory is not None:
        return read_json(source.directory / "config.json")
    if source.gguf is None:
        return dict(json.loads(preset_json(source.name)))
    config = hf_from_config(source.config, source.name)
    ends = {*source.config.eos_ids, *Tokenizer.from_gguf(source.gguf.metadata).eos_ids}
    return {**config, "eos_token_id": sorted(ends)}


def _copy_beside(source: ModelSource, directory: Path) -> None:
    for name in BESIDE:
        if source.directory is not None and (source.directory / name).is_file():
            shutil.copyfile(source.directory / name, directory / name)


def _declaration(to: str) -> dict[str, Any]:
    return {"quant_method": OWN, "format": to, "group_size": GROUP}


def _write_weights(source: ModelSource, file: Path, args: argparse.Namespace) -> str:
    """Write the weights; what became what."""
    config = source.config
    parameters = list(Decoder(config, config.partition((1,)), LocalComm(), max_positions=1).parameters())
    checkpoint = source.checkpoint(parameters, args.load_format, args.seed)
    try:
        check_tensors(parameters, checkpoint, source.ignores)
        with progress_bar(f"writing {source.name}") as progress:
            write_quantized(file, parameters, checkpoint, args.to, progress)
        return describe_methods(parameters, checkpoint, None) or ""
    finally:
        checkpoint.close()
