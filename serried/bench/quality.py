"""`serried bench quality`: how far quantized weights move the next-token distribution, over a real text.

The text is the first chapter of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain), in
alice.txt, shortened at its end.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from serried.backends.registry import resolve_backend
from serried.bench.divergence import Float64, Logits, log_softmax
from serried.bench.rounded import RoundedSource
from serried.config import EngineConfig
from serried.engine.batch import build_step
from serried.engine.executor import Executor, create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.errors import InputError
from serried.models.registry import ModelSource
from serried.progress import progress_bar
from serried.sampling_params import SamplingParams
from serried.text.tokenizer import Tokenizer

TEXT = "alice.txt"
ROWS = 128  # positions whose logits are in memory at once


@dataclass
class Scores:
    """What each position gave; all but `agrees` in nats. `loss` has no value where the text ends."""

    divergence: list[Float64] = field(default_factory=list)
    loss: list[Float64] = field(default_factory=list)
    agrees: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, reference: Float64, other: Float64, targets: npt.NDArray[np.int64]) -> None:
        """Log-probabilities [rows, vocabulary] of both; the ids that follow, one fewer where the text ends."""
        self.divergence.append(np.einsum("rv,rv->r", np.exp(reference), reference - other))
        self.agrees.append(reference.argmax(axis=1) == other.argmax(axis=1))
        self.loss.append(-other[np.arange(targets.size), targets])

    def figures(self) -> dict[str, float]:
        divergence = np.concatenate(self.divergence)
        return {
            "kl_mean": float(divergence.mean()),
            "kl_p99": float(np.quantile(divergence, 0.99)),
            "top1_agreement": float(np.concatenate(self.agrees).mean()),
            "perplexity": float(np.exp(np.concatenate(self.loss).mean())),
        }


@dataclass(frozen=True)
class Text:
    """The text's ids, and how they are fed: windows of so many, each a sequence of its own."""

    ids: tuple[int, ...]
    window: int

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(start of the window, start, stop) of each step, in order."""
        for first in range(0, len(self.ids), self.window):
            last = min(first + self.window, len(self.ids))
            for start in range(first, last, ROWS):
                yield first, start, min(start + ROWS, last)

    def targets(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The ids that follow positions [start, stop)."""
        return np.array(self.ids[start + 1 : stop + 1], np.int64)


def bench_quality(source: ModelSource, config: EngineConfig, tokens: int, window: int) -> dict[str, Any]:
    """Each form of the weights against float32 on the torch backend (the fields: docs/benchmarks.md).

    config: of the run `as given`. The others are in it too, but for their weights.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("bench quality: the reference needs PyTorch; pip install 'serried[torch]'")
    if config.tensor_parallel_size != 1:
        raise InputError("--tensor-parallel-size: bench quality runs on one rank, since a split changes nothing")
    text = _text(source, tokens, window)
    config = config.resolve(max_model_len=window, max_num_batched_tokens=ROWS, max_num_seqs=1)
    reference = resolve_backend(config.resolve(backend="torch", dtype="float32", quantization="none"))
    rounded = RoundedSource.of(source)
    plan: list[tuple[str, ModelSource, EngineConfig]] = [
        ("as given", source, config),
        ("plain", source, config.resolve(quantization="none")),
        ("int8 of bfloat16", rounded, config.resolve(quantization="int8")),
        ("int4 of bfloat16", rounded, config.resolve(quantization="int4")),
    ]
    with tempfile.TemporaryFile(prefix="serried-quality-") as file:  # a model's logits may be more than its weights
        runs = [{"run": "reference", **_settings(reference), **_write_reference(source, reference, text, file)}]
        for name, weights, settings in plan:
            runs.append({"run": name, **_settings(settings), **_compare(name, weights, settings, text, file)})
    return {
        "bench": "quality",
        "model": source.name,
        "text": TEXT,
        "tokens": len(text.ids),
        "window": window,
        "runs": runs,
    }


def _text(source: ModelSource, tokens: int, window: int) -> Text:
    if source.gguf is not None:
        tokenizer = Tokenizer.from_gguf(source.gguf.metadata)
    elif source.directory is not None:
        tokenizer = Tokenizer.from_directory(source.directory)
    else:
        raise InputError(f"bench quality: {source.name} has no tokenizer; give a checkpoint that has one")
    ids = tokenizer.encode((files("serried.bench") / TEXT).read_text(encoding="utf-8"))
    if not 2 <= tokens <= len(ids):
        raise InputError(f"--tokens {tokens}: expected 2 to {len(ids)}, which the text has of this model's tokens")
    if not 2 <= window <= source.config.max_position:
        raise InputError(f"--window {window}: expected 2 to {source.config.max_position}, the model's context")
    return Text(tuple(ids[:tokens]), window)


def _settings(config: EngineConfig) -> dict[str, str]:
    return {
        "backend": config.backend,
        "dtype": config.dtype,
        "quantization": config.quantization or "as the file has it",
    }


def _write_reference(source: ModelSource, config: EngineConfig, text: Text, file: IO[bytes]) -> dict[str, float]:
    """Leave the reference's logits in the file; its perplexity."""
    loss = []

    def take(start: int, stop: int, logits: Logits) -> None:
        logits.tofile(file)
        targets = text.targets(start, stop)
        loss.append(-log_softmax(logits)[np.arange(targets.size), targets])

    _run("reference", source, config, text, take)
    return {"perplexity": float(np.exp(np.concatenate(loss).mean()))}


def _compare(name: str, source: ModelSource, config: EngineConfig, text: Text, file: IO[bytes]) -> dict[str, float]:
    scores = Scores()
    file.seek(0)

    def take(start: int, stop: int, logits: Logits) -> None:
        reference = np.fromfile(file, np.float32, logits.size).reshape(logits.shape)
        scores.add(log_softmax(reference), log_softmax(logits), text.targets(start, stop))

    _run(name, source, config, text, take)
    return scores.figures()


def _run(
    name: str, source: ModelSource, config: EngineConfig, text: Text, take: Callable[[int, int, Logits], None]
) -> None:
    """Load a model, feed it the text, and hand over the logits of every position, chunk by chunk."""
    executor = create_executor(config, source)
    try:
        with progress_bar(name) as progress:
            for first, start, stop in text.chunks():
                take(start, stop, _logits(executor, text.ids[first:stop], start - first))
                if progress:
                    progress(stop, len(text.ids))
    finally:
        executor.close()


def _logits(executor: Executor, ids: Sequence[int], start: int) -> Logits:
    """The logits of positions [start, len(ids)) of a sequence whose earlier ones are in the cache."""
    size = executor.config.block_size
    request = Request(0, list(ids), SamplingParams(temperature=0, ignore_eos=True), 0)
    blocks = executor.new_pool().take(-(-executor.max_model_len // size))
    if blocks is None or len(ids) > executor.max_model_len:
        raise InputError(f"--window: the KV cache holds {executor.max_model_len} positions; give fewer")
    request.blocks = blocks
    return executor.execute(build_step([Scheduled(request, start, len(ids))], size, whole_logits=True)).logits
