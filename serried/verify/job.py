"""A verification: which splits of which model, on which prompt, and what must hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serried.backends.registry import resolve_backend
from serried.config import EngineConfig, TorchrunWorld
from serried.engine.executor import check_world, create_executor
from serried.errors import InputError
from serried.machine import available_cores
from serried.models.decoder import Decoder
from serried.models.registry import ModelSource, open_model
from serried.models.sabotage import why_not
from serried.parallel.comm import LocalComm
from serried.progress import progress_bar
from serried.text.tokenizer import Tokenizer
from serried.verify.child import run_in_child
from serried.verify.compare import Bounds, Logits, compare
from serried.verify.report import Report
from serried.verify.run import RunResult, run_greedy
from serried.weights.checkpoint import Checkpoint
from serried.weights.dequantized import DequantizedCheckpoint
from serried.weights.load import assign_methods, check_tensors, describe_methods
from serried.weights.spec import Parameter

# The prompt of the document that this engine follows: a chat turn in Qwen3's ids, thinking off.
DOCUMENT_PROMPT = (
    151644, 872, 198, 105043, 100165, 11319, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271,
)  # fmt: skip
DEFAULT_SIZES = (1, 2)
DEFAULT_TOLERANCE = 1e-4  # what float32 keeps, where the order of addition may differ
CHAIN_TOLERANCE = 1e-3  # native kernels add each output in one chain, which keeps less of float32 than blocks do
# Quantized weights multiply activations in int8. One rounding errs by 0.5% of a vector; those of all layers leave the
# logits 2% (two layers) to 8% (thirty, a prompt of random ids) of their spread from exact ones. Damage: 40% and more.
QUANTIZED_SHARE = 0.25


@dataclass(frozen=True)
class VerifyJob:
    """One config for each run, all of one model; the first is what the others are compared with.

    A single size, and damaged ones, are compared with the unsplit model, which is put before them.
    """

    source: ModelSource
    configs: tuple[EngineConfig, ...]
    prompt: tuple[int, ...]
    tokens: int
    bounds: Bounds
    weights: str | None
    with_reference: bool
    world: TorchrunWorld | None

    @classmethod
    def create(
        cls,
        model: str,
        *,
        sizes: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        tokens: int = 20,
        tolerance: float | None = None,
        with_reference: bool = True,
        world: TorchrunWorld | None = None,
    ) -> VerifyJob:
        """Check everything that can be checked before anything is loaded; InputError says what is wrong."""
        if tokens < 1:
            raise InputError(f"--tokens {tokens}: expected at least 1")
        if sizes is None:
            sizes = DEFAULT_SIZES if world is None else (world.size,)
        given = dict(options or {})
        if world is None and 1 not in sizes and (len(sizes) == 1 or given.get("sabotage")):
            sizes = (1, *sizes)  # there must be something unsplit, and undamaged, to compare with
        source = open_model(model, given.pop("revision", None), weights=given.get("load_format") != "dummy")
        ids = tuple(prompt_ids) if prompt_ids is not None else _prompt(source, prompt)
        if bad := [i for i in ids if not 0 <= i < source.config.vocab_size]:
            raise InputError(f"--prompt-ids: {bad[0]} is not in the vocabulary of {source.config.vocab_size}")
        # The same threads in every run: PyTorch's products may depend on their number.
        settings = {
            "max_model_len": min(source.config.max_position, len(ids) + tokens),
            "max_num_batched_tokens": max(len(ids), 1),
            "threads_per_rank": max(1, available_cores() // max(*sizes, 1)),
            **given,
        }
        configs = tuple(
            resolve_backend(
                EngineConfig.create(source.location, **{**settings, "tensor_parallel_size": size, **unsplit})
            )
            for size in sizes
            for unsplit in [{"tp_weights": None} if size == 1 < max(sizes) else {}]
        )
        for config in configs:
            source.config.partition(config.weights)
            if world is not None:
                check_world(config, world)
        with_reference = with_reference and importlib.util.find_spec("torch") is not None
        _check_sabotage(source, configs, with_reference)
        weights, quantized = _weights(source, configs[0])
        bounds = _bounds(configs[0], tolerance, quantized)
        return cls(source, configs, ids, tokens, bounds, weights, with_reference, world)


def verify(job: VerifyJob) -> Report | None:
    """Run every split, each in processes of its own, and compare. None on a rank of torchrun's above 0."""
    runs = (
        [run_in_world(job)] if job.world is not None else [run_in_child(c, job.prompt, job.tokens) for c in job.configs]
    )
    results = [run for run in runs if run is not None]
    if not results:
        return None
    references = reference_logits(job, results) if job.with_reference else {}
    binding = job.bounds.reference is not None
    comparisons = tuple(
        compare(results[0], run, references.get(tuple(run.tokens)), len(job.prompt), binding=binding) for run in results
    )
    return Report(job.source.name, job.configs[0], job.prompt, comparisons, job.bounds, job.weights)


def run_in_world(job: VerifyJob) -> RunResult | None:
    """One run in the world that torchrun made; the result on rank 0."""
    executor = create_executor(job.configs[0], job.source)
    try:
        if executor.decides:
            return run_greedy(executor, job.prompt, job.tokens)
        executor.follow()
        return None
    finally:
        executor.close()


def reference_logits(job: VerifyJob, runs: Sequence[RunResult]) -> dict[tuple[int, ...], Logits]:
    """The reference's logits for the tokens of each run (runs with the same tokens share them).

    It is fed the run's own tokens, so one forward gives all positions; where its greedy choice differs from the
    run's, `compare` sees it.
    """
    from serried.verify.reference import Reference

    config = job.configs[0]
    parameters, stored = _open_weights(job.source, config)
    checkpoint = DequantizedCheckpoint(stored, parameters, config.quantization)
    with progress_bar("reference") as progress:
        reference = Reference(
            job.source.config,
            checkpoint,
            config.resolve(tensor_parallel_size=1).threads,
            progress,
            longest=config.max_model_len,
            ignored=job.source.ignores,
        )
    checkpoint.close()
    distinct = {tuple(run.tokens) for run in runs}
    return {tokens: reference.logits([*job.prompt, *tokens[:-1]]) for tokens in distinct}


def _prompt(source: ModelSource, text: str | None) -> tuple[int, ...]:
    if text is not None:
        if source.gguf is not None:
            return tuple(Tokenizer.from_gguf(source.gguf.metadata).encode(text))
        if source.directory is not None:
            return tuple(Tokenizer.from_directory(source.directory).encode(text))
        raise InputError(f"--prompt: {source.name} has no tokenizer; give --prompt-ids")
    size = source.config.vocab_size
    if max(DOCUMENT_PROMPT) < size:
        return DOCUMENT_PROMPT
    # Low ids: in a byte-pair vocabulary they are the frequent tokens, and the rest may never have been trained.
    return tuple(int(i) for i in np.random.default_rng(0).integers(0, min(size, 1000), len(DOCUMENT_PROMPT)))


def _check_sabotage(source: ModelSource, configs: Sequence[EngineConfig], with_reference: bool) -> None:
    kind = configs[0].sabotage
    if kind is None:
        return
    reasons = [why_not(kind, source.config, source.config.partition(config.weights)) for config in configs]
    if all(reasons):
        raise InputError(f"--sabotage {kind}: {reasons[-1]}")
    if len(configs) == 1 and not with_reference:
        raise InputError(f"--sabotage {kind}: there is nothing undamaged to compare with; add a size to -tp")


def _open_weights(source: ModelSource, config: EngineConfig) -> tuple[list[Parameter], Checkpoint]:
    """The unsplit model's parameters, and its checkpoint."""
    parameters = list(Decoder(source.config, source.config.partition((1,)), LocalComm(), max_positions=1).parameters())
    return parameters, source.checkpoint(parameters, config.load_format, config.seed)


def _weights(source: ModelSource, config: EngineConfig) -> tuple[str | None, bool]:
    """What the file's tensors become, and whether any weight is quantized in the end."""
    parameters, checkpoint = _open_weights(source, config)
    try:
        check_tensors(parameters, checkpoint, source.ignores)
        assign_methods(parameters, checkpoint, config.quantization)
        return describe_methods(parameters, checkpoint, config.dtype), any(p.method for p in parameters)
    finally:
        checkpoint.close()


def _bounds(config: EngineConfig, given: float | None, quantized: bool) -> Bounds:
    """How far runs may lie from the first one, and from the reference."""
    if given is not None and not 0 <= given < float("inf"):
        raise InputError(f"--tolerance {given}: expected a number of at least 0")
    wide = config.dtype == "float32"
    if config.backend == "native":  # exact: what is allowed concerns the reference alone
        if given is not None:
            return Bounds(given, given)
        if quantized:
            return Bounds(0.0, None, QUANTIZED_SHARE)
        return Bounds(0.0, CHAIN_TOLERANCE if wide else None)
    if given is None and not wide:
        raise InputError(
            f"--tolerance: must be given for --dtype {config.dtype} on the torch backend, whose sums are not exact "
            "in it; or take --dtype float32"
        )
    allowed = DEFAULT_TOLERANCE if given is None else given
    return Bounds(allowed, allowed)
