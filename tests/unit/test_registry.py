"""Finding a model and reading its config: what is unknown, and would change the result, is an error with its key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serried.errors import InputError
from serried.layers.rope import RopeConfig, inverse_frequencies, rope_table
from serried.models import registry
from serried.models.hf_config import config_from_hf
from serried.models.registry import DEMO_COMMAND, demo_path, open_model, preset_json, preset_names

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> Any:
    return config_from_hf({**CONFIG, **changes}, "dir/config.json")


def test_defaults() -> None:
    config = read()
    assert (config.head_dim, config.norm_eps, config.activation, config.tied) == (12, 1e-6, "silu", False)
    assert config.rope == RopeConfig(10000.0)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (False, False, False)
    assert (config.eos_ids, config.bos_id) == ((5,), None)
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(head_dim=20).head_dim == 20
    assert read(attention_bias=True).attention_output_bias is True


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["MambaForCausalLM"]),
        ("architectures", []),
        ("architectures", None),
        *[("hidden_act", value) for value in ("relu", "gelu_new", "quick_gelu", 3)],
        *[("hidden_size", value) for value in (None, 0, -64, "64", 64.5, True, math.nan, math.inf)],
        *[("num_hidden_layers", value) for value in (None, 0, [2])],
        ("vocab_size", 1 << 40),
        ("max_position_embeddings", None),
        *[("rms_norm_eps", value) for value in (0, -1e-6, "small", math.inf)],
        *[("rope_theta", value) for value in (0, -1, "big", math.inf)],
        *[("head_dim", value) for value in (0, 15, -2)],
        ("attention_bias", "yes"),
        ("mlp_bias", 1.5),
        ("tie_word_embeddings", "no"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("num_experts", 8),
        ("num_local_experts", 8),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("eos_token_id", "five"),
        ("eos_token_id", [5, -1]),
        ("rope_scaling", "linear"),
    ],
)
def test_what_is_unknown_is_an_error_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=r"^dir/config\.json: ") as caught:
        read(**{key: value})
    named = {"architectures": "architecture"}.get(key, key)
    assert named in str(caught.value)


@pytest.mark.parametrize("kind", ["mrope", "proportional", "su", 3])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_kinds_of_rope(kind: Any, where: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"dir/config\.json: {where}: rope_type: is '?{kind}'?") as caught:
        read(**{where: {key: kind, "factor": 4.0}})
    assert "default, linear, dynamic, yarn, longrope, llama3" in str(caught.value)


@pytest.mark.parametrize("missing", [key for key in LLAMA3 if key != "rope_type"])
def test_a_number_of_llama3_is_missing(missing: str) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != missing}
    with pytest.raises(InputError, match=f"rope_scaling: {missing}: is missing"):
        read(rope_scaling=scaling)


def test_spellings_of_rope() -> None:
    """`type` or `rope_type`, beside rope_theta or with it in rope_parameters: the same."""
    older = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}
    wanted = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert read(rope_theta=5e5, rope_scaling=LLAMA3).rope == wanted
    assert read(rope_theta=5e5, rope_scaling=older).rope == wanted
    assert read(rope_parameters={**LLAMA3, "rope_theta": 5e5}).rope == wanted
    assert read(rope_parameters={**LLAMA3, "rope_theta": 5e5}, rope_theta=7.0).rope == wanted
    for plain in ({}, {"rope_type": "default"}, {"type": "default"}):
        assert read(rope_theta=5e5, rope_scaling=plain).rope == RopeConfig(5e5)
    assert read(rope_scaling=None, rope_theta=5e5).rope == RopeConfig(5e5)


def test_frequencies_of_llama3() -> None:
    """Meta's apply_scaling, frequency by frequency, at Llama 3.1's own numbers."""
    base = 5e5 ** -(np.arange(0, 128, 2) / 128)
    wanted = []
    for frequency in base:
        length = 2 * math.pi / frequency
        smooth = (8192 / length - 1) / 3
        between = (1 - smooth) * frequency / 8 + smooth * frequency
        wanted.append(frequency / 8 if length > 8192 else frequency if length < 2048 else between)
    got = inverse_frequencies(RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 128)
    assert np.allclose(got, wanted, rtol=1e-5)
    factors = tuple(float(f) for f in base / np.array(wanted))
    assert np.allclose(inverse_frequencies(RopeConfig(5e5, "factors", factors=factors), 128), wanted, rtol=1e-5)


def test_the_rope_table() -> None:
    cos, sin = rope_table(RopeConfig(100.0), 6, 9)
    assert cos.shape == sin.shape == (9, 3)
    assert cos.dtype == np.float32
    assert np.allclose(cos**2 + sin**2, 1, atol=1e-6)
    assert np.allclose(sin[8], np.sin(8 / 100.0 ** (np.arange(3) / 3)), atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_activations(name: str) -> None:
    from transformers.activations import ACT2FN

    from serried.backends.torch import ACTIVATIONS

    x = torch.linspace(-6, 6, 1001)
    assert torch.allclose(ACTIVATIONS[name](x), ACT2FN[name](x), atol=1e-6)
    assert read(hidden_act=name).activation == name


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(InputError, match=r"dir/config\.json: 4 query heads are not a multiple of 3 KV heads"):
        read(num_key_value_heads=3)


def write(path: Path, config: Any, generation: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("own", "generation", "ends"),
    [
        (5, None, (5,)),
        ([5, 7], None, (5, 7)),
        (None, None, ()),
        (5, {"eos_token_id": [8, 5, 9]}, (8, 5, 9)),
        (5, {"eos_token_id": 6}, (6, 5)),
        (5, {"eos_token_id": None}, (5,)),
        (5, {}, (5,)),
    ],
)
def test_end_tokens(own: Any, generation: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path, {**CONFIG, "eos_token_id": own}, generation)
    assert open_model(str(path)).config.eos_ids == ends


@pytest.mark.parametrize("bad", ["end", [1, "2"], [-1], {"id": 3}])
def test_bad_end_tokens(bad: Any, tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG, {"eos_token_id": bad})
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id"):
        open_model(str(path))


@pytest.mark.parametrize(("text", "said"), [("{", "JSON"), ("[1]", "expected an object"), ("\ufeff{}", "JSON")])
def test_a_config_that_is_no_object(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path / "config.json")) as caught:
        open_model(str(write(tmp_path, text)))
    assert said in str(caught.value)


def test_what_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such directory, \.gguf file or preset") as caught:
        open_model("no/such/model")
    assert all(name in str(caught.value) for name in (*preset_names(), "demo"))
    with pytest.raises(InputError, match=f"{tmp_path}: has no config.json"):
        open_model(str(tmp_path))
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=f"did you mean {tmp_path / 'weights.gguf'}"):
        open_model(str(tmp_path))
    with pytest.raises(InputError, match=r"weights\.gguf"):
        open_model(str(tmp_path / "weights.gguf"))
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors: not a \.gguf file"):
        open_model(str(other))


def test_the_demo_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^demo: ") as caught:
        open_model("demo")
    assert DEMO_COMMAND in str(caught.value)
    assert "--no-deps" in DEMO_COMMAND


def test_the_demo_package_is_found_but_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would pull in other packages; and one that holds no model is as good as none."""
    package = tmp_path / registry.DEMO_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="not installed"):
        demo_path()
    (package / "small.gguf").write_bytes(b"GGUF")
    assert demo_path() == package / "small.gguf"


@pytest.mark.parametrize("name", preset_names())
def test_presets(name: str) -> None:
    source = open_model(name)
    assert source.directory is None
    assert source.gguf is None
    assert source.config.partition([1] * 2).ranks == 2
    assert source.config.vocab_size == json.loads(preset_json(name))["vocab_size"]
    with pytest.raises(InputError, match=f"{name}: .*--load-format dummy.*serried init {name}"):
        source.checkpoint([], "auto", 0)
