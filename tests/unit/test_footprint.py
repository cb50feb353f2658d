"""What each rank will hold, before anything is loaded: the same as afterwards; and what does not fit is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Models

from serried.cli.options import add_engine_arguments, add_tp_argument, engine_options
from serried.config import EngineConfig
from serried.engine import footprint as module
from serried.engine.executor import create_executor
from serried.engine.footprint import check_fit, describe, footprint, option_words
from serried.errors import InputError, Misfit
from serried.models.registry import open_model

BILLION = 1 << 30


def config_of(path: Path | str, **options: Any) -> EngineConfig:
    return EngineConfig.create(str(path), **{"backend": "native", "threads_per_rank": 1, **options})


def checked(config: EngineConfig) -> None:
    source = open_model(config.model)
    check_fit(config, source, footprint(config, source))


def parsed(words: str) -> EngineConfig:
    """The config that some words on a command line make."""
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    add_tp_argument(parser)
    args = parser.parse_args(words.split())
    return EngineConfig.create(args.model, **engine_options(args))


@pytest.mark.parametrize("name", ["llama-tied", "split-9-3", "phi3-partial"])
@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}, {"dtype": "float32", "block_size": 8}])
def test_it_is_what_the_ranks_hold_then(tiny: Models, name: str, options: dict[str, Any]) -> None:
    config = config_of(tiny.directory(name), max_model_len=64, tensor_parallel_size=2, **options)
    source = open_model(config.model)
    whole = footprint(config, source)
    executor = create_executor(config, source)
    try:
        held = [(info.parameters, info.query_heads, info.kv_heads) for info in executor.ranks]
        assert [(rank.parameters, rank.query_heads, rank.kv_heads) for rank in whole.ranks] == held
        assert whole.ranks[0].block_bytes == executor.worker.cache.bytes_per_block
        matrices = executor.worker.weight_bytes_per_step
        vectors = 4 * sum(p.elements for p in executor.worker.model.parameters() if p.kind == "vector")
        looked_up = 0.0
        if not source.config.tied:
            looked_up = executor.worker.model.embedding.weight.nominal_bytes(config.dtype)
        assert whole.ranks[0].weight_bytes == pytest.approx(matrices + vectors + looked_up, abs=2)
    finally:
        executor.close()
    lines = "\n".join(describe(config, source, whole))
    assert "on 2 ranks of 1 thread" in lines
    assert f"rank 1: {whole.ranks[1].parameters / 1e6:,.1f} M parameters" in lines


@pytest.mark.parametrize(
    ("options", "free", "says", "fits"),
    [
        ({"tensor_parallel_size": 99}, 40, "legal sizes are 1 to 40", "--tensor-parallel-size"),
        ({"max_model_len": 1 << 20}, 60, "the model's context is 40960", "--max-model-len 40960"),
        ({}, 20, r"weights need 27.57 GiB on 1 rank, and 20.00 GiB are free", "--quantization int8"),
        ({}, 10, r"weights need 27.57 GiB on 1 rank, and 10.00 GiB are free", "--quantization int4"),
        ({}, 1, "not in 8 or 4 bits either: take a smaller model", ""),
        ({"kv_cache_memory": 60 << 30}, 40, "beside the weights 12.43 GiB are free", "--kv-cache-memory"),
        ({"kv_cache_memory": 1000}, 40, "too small for one block of 32 tokens", "--kv-cache-memory"),
        ({"kv_cache_memory": 1 << 30, "max_model_len": 30000}, 40, "needs 4.58 GiB of KV cache", "--max-model-len"),
        ({"max_model_len": 40000}, 31, "there would be", "--max-model-len"),
    ],
    ids=str,
)  # fmt: skip
def test_a_misfit(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], free: int, says: str, fits: str) -> None:
    """It is told before anything is loaded, with words that make a config which does fit."""
    monkeypatch.setattr(module, "available_memory", lambda: free * BILLION)
    config = config_of("qwen3-14b", load_format="dummy", **options)
    with pytest.raises(Misfit, match=says) as caught:
        checked(config)
    assert fits in caught.value.fits
    if fits:
        assert "this would fit: qwen3-14b " in str(caught.value)
        checked(parsed(caught.value.fits))
    with pytest.raises(InputError, match=says):
        create_executor(config, open_model("qwen3-14b"))


def test_the_words_of_a_config() -> None:
    config = EngineConfig.create("demo", tensor_parallel_size=2, tp_weights=(2, 1), dtype="float32", max_num_seqs=3)
    words = option_words(config)
    assert words == "demo --dtype float32 --tensor-parallel-size 2 --tp-weights 2,1 --max-num-seqs 3"
    assert option_words(EngineConfig.create("demo", enable_prefix_caching=False)) == "demo --no-enable-prefix-caching"
    assert parsed(words.removesuffix(" --max-num-seqs 3")) == config.resolve(max_num_seqs=64)
