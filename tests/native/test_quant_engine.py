"""Engines with quantized weights: the oracle's logits but for rounded activations, the same bits for every split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import SPECS, Models

from serried import LLM, SamplingParams
from serried.config import EngineConfig
from serried.engine.batch import build_step
from serried.engine.executor import create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.models.registry import demo_path, open_model
from serried.parallel.partition import ModelPartition
from serried.quant.int4 import INT4_MIN
from serried.quant.method import GROUP
from serried.weights.safetensors import SafetensorsCheckpoint
from serried.weights.safetensors_blocks import declare, split_blocks
from serried.weights.safetensors_writer import Entry, SafetensorsWriter

LENGTH = 40
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def logits_of(path: Path | str, tp: int = 1, **options: Any) -> np.ndarray:
    """The logits of every position of a prompt: float32 [LENGTH, vocabulary]."""
    settings = {"backend": "native", "threads_per_rank": 1, "max_model_len": 64, "tensor_parallel_size": tp, **options}
    source = open_model(str(path))
    executor = create_executor(EngineConfig.create(str(path), **settings), source)
    try:
        size = executor.config.block_size
        prompt = [int(t) for t in np.random.default_rng(3).integers(0, min(1000, source.config.vocab_size), LENGTH)]
        request = Request(0, prompt, SamplingParams(temperature=0, max_tokens=1), 0)
        request.blocks = executor.new_pool().take(-(-LENGTH // size)) or []
        return executor.execute(build_step([Scheduled(request, 0, LENGTH)], size, whole_logits=True)).logits
    finally:
        executor.close()


def oracle(path: Path | str, **options: Any) -> np.ndarray:
    """The torch backend's, in float32: of the very numbers that the blocks stand for."""
    return logits_of(path, **{"backend": "torch", "dtype": "float32", **options})


def share(found: np.ndarray, expected: np.ndarray) -> float:
    """The root mean square of the differences over the spread."""
    return float(np.sqrt(np.square(found - expected, dtype=np.float64).mean()) / expected.std())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.int32) == b.view(np.int32)).all())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", SPECS)
def test_quantized_while_loading(tiny: Models, name: str, quantization: str) -> None:
    """Activations in int8 cost 1% to 3% of the spread; a group at a wrong place would cost many times that."""
    path = tiny.directory(name)
    expected = oracle(path, quantization=quantization)
    for dtype in ("float32", "bfloat16"):
        assert 1e-3 < share(logits_of(path, dtype=dtype, quantization=quantization), expected) < 0.03
    plain = share(oracle(path), expected)
    assert (0.001, 0.01)[quantization == "int4"] < plain < (0.05, 0.4)[quantization == "int4"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "MIXED", "F16"])
@pytest.mark.parametrize("name", ["gguf-llama", "gguf-rope3"])
def test_gguf_files_keep_their_format(tiny: Models, name: str, kind: str) -> None:
    """At every size the same bits, close to the file's own numbers; `none` dequantizes and comes closer."""
    path = tiny.gguf(name, kind)
    one, two = logits_of(path), logits_of(path, 2)
    assert same_bits(one, two)
    kept, exact = oracle(path), oracle(path, quantization="none")
    as_it_is = kind not in {"Q5_0", "MIXED"}  # else something is quantized anew
    assert np.array_equal(kept, exact) == as_it_is
    assert share(one, kept) < 0.03
    assert share(logits_of(path, quantization="none"), exact) < 0.015


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("name", "sizes"), [("split-9-3", (2, 3, 4)), ("split-5", (3, 5)), ("llama-uneven", (3, 9))])
def test_the_same_bits_at_every_size(tiny: Models, name: str, sizes: Sequence[int], quantization: str) -> None:
    """Odd widths, ranks without an MLP or a vocabulary."""
    path = tiny.directory(name)
    one = logits_of(path, quantization=quantization)
    assert np.isfinite(one).all()
    for tp in sizes:
        assert same_bits(logits_of(path, tp, quantization=quantization), one)


def test_weight_groups_that_straddle_an_edge(tmp_path: Path) -> None:
    """Groups of 128 over heads of 64, as AWQ has them: both ranks at an edge keep the group's scale."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 200, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "serried", "format": "int4", "group_size": 32},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    split = ModelPartition(6, 2, 64, 640, 200, (1, 1, 1, 1))
    assert any(span.start % 128 for span in split.attention.spans)
    rng = np.random.default_rng(9)
    layer = "model.layers.0"
    shapes = {
        f"{layer}.self_attn.q_proj": (384, 128), f"{layer}.self_attn.k_proj": (128, 128),
        f"{layer}.self_attn.v_proj": (128, 128), f"{layer}.self_attn.o_proj": (128, 384),
        f"{layer}.mlp.gate_proj": (640, 128), f"{layer}.mlp.up_proj": (640, 128),
        f"{layer}.mlp.down_proj": (128, 640), "model.embed_tokens": (200, 128),
    }  # fmt: skip
    norms = [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"]
    blocks = {f"{name}.weight": in_groups_of_128(rng, *shape) for name, shape in shapes.items()}
    tensors = {f"{name}.weight": ("F32", np.ones(128, np.float32)) for name in norms}
    for name, rows in blocks.items():
        tensors |= {name + part.suffix: (part.dtype, array) for part, array in split_blocks(INT4_MIN, rows)}
    entries = [Entry(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    columns = {name: (INT4_MIN, rows.shape[1] // 20 * GROUP) for name, rows in blocks.items()}
    with SafetensorsWriter(tmp_path / "model.safetensors", entries, **declare(columns)) as writer:
        for name, (_, array) in tensors.items():
            writer.append(name, array)
    with_minimum = SafetensorsCheckpoint(tmp_path).tensors[f"{layer}.self_attn.o_proj.weight"]
    assert with_minimum.method is INT4_MIN
    one = logits_of(tmp_path)
    assert share(one, oracle(tmp_path)) < 0.03
    for tp in (2, 3, 4):
        assert same_bits(logits_of(tmp_path, tp), one)


def in_groups_of_128(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Random blocks of int4 with minimum in which four neighbours have one scale and one minimum."""
    groups = columns // 128
    scales = rng.uniform(0.5, 1.5, (rows, groups)) * columns**-0.5 / 4
    pairs = np.stack([scales, -scales * rng.uniform(6, 9, scales.shape)], -1).astype(np.float16)
    blocks = rng.integers(0, 256, (rows, groups * 4, INT4_MIN.block_bytes)).astype(np.uint8)
    blocks[:, :, :4] = np.repeat(pairs, 4, axis=1).view(np.uint8)
    return blocks.reshape(rows, -1)


def test_the_demo_as_it_is() -> None:
    """A real file in Q4_1 with its embedding in Q8_0, with the rows of Q and K permuted."""
    path = demo_path()
    one = logits_of(path)
    assert share(one, oracle(path)) < 0.12
    assert all(same_bits(logits_of(path, tp), one) for tp in (2, 3))


def test_generating_from_a_quantized_file(tiny: Models) -> None:
    """Greedy tokens at each size, and what the ranks hold: nominal bytes by hand."""
    path = tiny.gguf("gguf-llama", "Q4_1")
    prompts = [[5, 6, 7, 8], [9] * 20]
    found = []
    for tp in (1, 2, 3):
        with LLM(str(path), tp, threads_per_rank=1) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)])
            if tp == 1:
                (info,) = llm.executor.ranks
    assert found[1:] == found[:1] * 2
    layer = 96 * (6 + 2 + 2 + 6) * 32 + 3 * 96 * 224
    assert info.weight_bytes == (2 * layer + 300 * 96) * 5 / 8  # five bits each; the embedding is only looked up
