"""Each family's config.json and GGUF metadata: windows, RoPE, caps, biases, the presets' numbers of parameters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from serried.errors import InputError
from serried.layers.rope import RopeConfig
from serried.models.config import ModelConfig
from serried.models.decoder import Decoder
from serried.models.families import FAMILIES
from serried.models.gguf_config import config_from_gguf
from serried.models.hf_config import config_from_hf
from serried.models.registry import open_model, preset_json, preset_names

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
ARCHITECTURES = {family.name: family.architectures[0] for family in FAMILIES}


def read(family: str, **changes: Any) -> ModelConfig:
    return config_from_hf({"architectures": [ARCHITECTURES[family]], **SIZES, **changes}, "dir/config.json")


def refused(family: str, *words: str, **changes: Any) -> None:
    with pytest.raises(InputError, match=r"^dir/config\.json: ") as caught:
        read(family, **changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_no_two_families_answer_to_one_name() -> None:
    for kind in ("architectures", "gguf_architectures"):
        names = [name for family in FAMILIES for name in getattr(family, kind)]
        assert len(names) == len(set(names))


# --- Windows ---


def test_every_layer_of_mistral_has_the_window_or_none_has() -> None:
    assert read("mistral", sliding_window=32).windows == (32,) * 4
    assert read("mistral", sliding_window=None).windows == (0,) * 4
    assert read("mistral").windows == (4096,) * 4  # transformers' default
    assert read("phi3", sliding_window=2047).windows == (2047,) * 4
    refused("mistral", "sliding_window", "0", sliding_window=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_upper_layers_of_qwen(family: str) -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert read(family, sliding_window=8).windows == (0,) * 4
    assert read(family, **on, max_window_layers=3).windows == (0, 0, 0, 8)
    assert read(family, **on, max_window_layers=0).windows == (8,) * 4
    assert read(family, **on).windows == (0,) * 4  # the default is 28
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert read(family, **on, layer_types=kinds).windows == (8, 0, 0, 8)
    refused(family, "layer_types", "for each of 4 layers", **on, layer_types=kinds[:3])
    refused(family, "layer_types", "chunked", **on, layer_types=["chunked_attention"] * 4)
    refused(family, "layer_types", "no sliding_window", layer_types=kinds)


@pytest.mark.parametrize("window", [1, 7, 20, 300])
def test_what_a_token_reads(window: int) -> None:
    """Layers with a window and layers without, counted one by one."""
    config = read("gemma2", sliding_window=window)  # two of four layers
    for start, stop in ((0, 1), (0, 20), (6, 9), (19, 50), (30, 31)):
        wanted = sum(2 * min(t + 1, window) + 2 * (t + 1) for t in range(start, stop))
        assert config.positions_read(start, stop) == wanted


@pytest.mark.parametrize(("family", "whole"), [("gemma2", (1, 3)), ("gemma3", ())])
def test_the_pattern_of_gemma(family: str, whole: tuple[int, ...]) -> None:
    assert read(family, sliding_window=8).windows == tuple(0 if i in whole else 8 for i in range(4))
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        assert read(family, sliding_window=8, **{key: 3}).windows == (8, 8, 0, 8)
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert read(family, sliding_window=8, sliding_window_pattern=3, layer_types=kinds).windows == (0, 8, 8, 0)
    assert read(family).windows == tuple(0 if i in whole else 4096 for i in range(4))


# --- RoPE ---

LOCAL = RopeConfig(10_000.0)
GLOBAL = RopeConfig(1e6, "linear", 8.0)


def test_gemma3_has_two_ropes() -> None:
    """In the spelling of transformers 5 and in the older one; layers with a window take the local one."""
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 10_000, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    bare = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    for spelling in ({"rope_parameters": new}, old, bare):
        config = read("gemma3", **spelling, sliding_window_pattern=2)
        assert (config.rope, config.local_rope) == (GLOBAL, LOCAL)
        assert [config.rope_of(i) for i in range(4)] == [LOCAL, GLOBAL, LOCAL, GLOBAL]
        assert config.max_position == 128  # which counts the stretched positions
    del new["sliding_attention"]
    assert read("gemma3", rope_parameters=new).local_rope == LOCAL
    assert read("gemma3", rope_local_base_freq=500).local_rope == RopeConfig(500)
    refused("gemma3", "rope_parameters: full_attention: rope_type", rope_parameters={"full_attention": {"type": "x"}})
    refused("gemma3", "rope_parameters: sliding_attention", rope_parameters={"sliding_attention": [1]})
    refused("qwen3", "differs between layer types", rope_parameters=new)


def test_the_context_that_a_rope_gives() -> None:
    assert read("llama", rope_scaling={"type": "linear", "factor": 4.0}).max_position == 512
    assert read("llama", rope_scaling={"type": "dynamic", "factor": 2.5}).max_position == 320
    assert read("llama", rope_scaling={"type": "yarn", "factor": 4.0}).max_position == 512
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read("llama", rope_scaling=yarn).max_position == 128
    assert read("phi3", rope_scaling=longrope()).max_position == 128


def test_yarn() -> None:
    plain = read("qwen2", rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0}).rope
    assert plain == RopeConfig(
        1e6, "yarn", 4.0, original_max_position=128, attention_factor=pytest.approx(1.138629436), beta_fast=32.0
    )
    scales = {"rope_type": "yarn", "mscale": 2.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
    found = read("llama", rope_scaling=scales).rope
    assert found.factor == 4.0  # of the context
    assert found.attention_factor == pytest.approx(1.277258872 / 1.138629436)
    assert read("llama", rope_scaling={**scales, "attention_factor": 1.5}).rope.attention_factor == 1.5
    refused("llama", "rope_scaling: beta_fast", rope_scaling={**scales, "beta_fast": 1, "beta_slow": 2})
    refused("llama", "rope_scaling: truncate", rope_scaling={**scales, "truncate": "yes"})
    refused("llama", "rope_scaling: factor: is missing", rope_scaling={"type": "linear"})
    refused("llama", "rope_scaling: factor: is missing", rope_scaling={"type": "dynamic"})


def longrope(pairs: int = 8, **more: Any) -> dict[str, Any]:
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [4] * pairs, **more}


def test_longrope() -> None:
    found = read("phi3", rope_scaling=longrope(), original_max_position_embeddings=32).rope
    assert (found.kind, found.factors, found.long_factors) == ("longrope", (1.0,) * 8, (4,) * 8)
    assert found.original_max_position == 32
    assert found.attention_factor == pytest.approx((1 + 2 / 5) ** 0.5)  # log 4 / log 32
    for name in ("su", "yarn"):
        assert read("phi3", rope_scaling=longrope(type=name), original_max_position_embeddings=32).rope == found
    inside = longrope(original_max_position_embeddings=32, factor=2.0)
    assert read("phi3", rope_scaling=inside).rope.original_max_position == 4096  # the default beside it comes first
    assert read("llama", rope_scaling=inside).rope.attention_factor == pytest.approx((1 + 1 / 5) ** 0.5)
    assert read("phi3", rope_scaling=longrope()).rope.attention_factor == 1.0
    assert read("phi3", rope_scaling=longrope(attention_factor=1.2)).rope.attention_factor == 1.2
    for bad in ([1.0] * 7, [1.0] * 7 + [0], [1.0] * 7 + ["1"], None, 4.0):
        refused("phi3", "rope_scaling: long_factor", "8 positive", rope_scaling=longrope(long_factor=bad))
    refused(
        "phi3", "original_max_position_embeddings: is 1", rope_scaling=longrope(), original_max_position_embeddings=1
    )


def test_only_some_columns_are_rotated() -> None:
    for given in ({"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.75}}):
        config = read("phi3", **given)
        assert (config.rotary_dim, config.head_dim) == (12, 16)
    assert read("phi3", partial_rotary_factor=0.5, rope_scaling=longrope(4)).rope.factors == (1.0,) * 4
    assert read("phi3").rotary_dim == 16
    for bad in (0.2, 1.5, 0.01):  # 3 columns, 24, none
        refused("phi3", "partial_rotary_factor", partial_rotary_factor=bad)
    for family in ("llama", "qwen2", "gemma3"):
        refused(family, "partial_rotary_factor", "only 1", partial_rotary_factor=0.75)
        assert read(family, partial_rotary_factor=1.0).rotary_dim == 16


# --- The other switches ---


def test_soft_caps() -> None:
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    config = read("gemma2", **caps)
    assert (config.attention_cap, config.logit_cap) == (20.0, 10.0)
    config = read("gemma2")
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    config = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_cap, config.logit_cap) == (0.0, 0.0)
    config = read("gemma3", **caps)  # which caps no attention scores, as in transformers
    assert (config.attention_cap, config.logit_cap) == (0.0, 10.0)
    refused("gemma2", "final_logit_softcapping", final_logit_softcapping=-1.0)
    for key, value in caps.items():
        refused("qwen3", key, **{key: value})


def test_gemma() -> None:
    for family in ("gemma2", "gemma3"):
        config = read(family, query_pre_attn_scalar=64)
        assert (config.attention_scale, config.norm_offset, config.tied) == (0.125, 1.0, True)
        assert config.activation == "gelu_pytorch_tanh"
        assert config.embedding_scale == pytest.approx(48**0.5)
        assert read(family).attention_scale == 1 / 16
        assert not read(family, tie_word_embeddings=False).tied
        refused(family, "hidden_activation", hidden_activation="relu")
        refused(family, "use_bidirectional_attention", use_bidirectional_attention=True)
    assert read("llama").embedding_scale == 1.0
    assert read("llama").attention_scale == 0.25
    assert (read("gemma3").qk_norm, read("gemma2").qk_norm) == (True, False)


@pytest.mark.parametrize("flag", [True, False])
def test_biases(flag: bool) -> None:
    config = read("qwen2", attention_bias=flag)  # which has no such key
    assert (config.attention_bias, config.attention_output_bias) == (True, False)
    config = read("gemma3", attention_bias=flag)
    assert (config.attention_bias, config.attention_output_bias) == (flag, flag)


def test_a_model_that_sees_images() -> None:
    """As on the hub: what the text model's config leaves out has the defaults of its class."""
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {**inner, "rope_scaling": scaling},
        "vision_config": {"hidden_size": 1152},
    }
    config = config_from_hf(raw, "dir/config.json")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.rope, config.local_rope, config.eos_ids, config.bos_id) == (GLOBAL, LOCAL, (1, 106), 2)
    assert (config.windows[:6], config.max_position) == ((1024,) * 5 + (0,), 131072)
    parts = SimpleNamespace(rank=0, size=1)
    model = Decoder(config, config.partition((1,)), parts, 1)  # type: ignore[arg-type]
    assert sum(p.elements for p in model.parameters()) == 3_880_263_168  # 4B, of which 0.42 see images
    for bad in (None, [], "text"):
        with pytest.raises(InputError, match=r"dir/config\.json: text_config"):
            config_from_hf({**raw, "text_config": bad}, "dir/config.json")
    with pytest.raises(InputError, match=r"dir/config\.json: text_config: sliding_window"):
        config_from_hf({**raw, "text_config": {**inner, "sliding_window": -1}}, "dir/config.json")


# --- GGUF ---

METADATA: dict[str, Any] = {
    "vocab_size": 100,
    "embedding_length": 48,
    "feed_forward_length": 64,
    "block_count": 4,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": 128,
}


def from_gguf(arch: str, factors: dict[str, tuple[float, ...]] | None = None, **changes: Any) -> ModelConfig:
    keys = {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
    return config_from_gguf(metadata, frozenset(), factors or {}, "model.gguf")


def test_windows_in_gguf() -> None:
    key = "attention__sliding_window"
    assert from_gguf("llama").windows == (0,) * 4
    assert from_gguf("llama", **{key: 8}).windows == (8,) * 4
    assert from_gguf("phi3", **{key: 0}).windows == (0,) * 4
    assert from_gguf("phi3", **{key: 8}).windows == (8,) * 4
    assert from_gguf("gemma2", **{key: 8}).windows == (8, 0, 8, 0)
    assert from_gguf("gemma3", **{key: 8}).windows == (8,) * 4
    assert from_gguf("gemma3", **{key: 8, f"{key}_pattern": 2}).windows == (8, 0, 8, 0)
    assert from_gguf("gemma3", **{key: 8, f"{key}_pattern": [False, True, True, False]}).windows == (0, 8, 8, 0)
    with pytest.raises(InputError, match=r"model\.gguf: gemma3\.attention\.sliding_window_pattern: .* 4 layers"):
        from_gguf("gemma3", **{key: 8, f"{key}_pattern": [True]})
    with pytest.raises(InputError, match=r"model\.gguf: gemma2\.attention\.sliding_window: is missing"):
        from_gguf("gemma2")


def test_gemma_in_gguf() -> None:
    """Norms are stored as they are multiplied with; of the 27B models the scale of attention is known by the layers."""
    window = {"attention__sliding_window": 8}
    config = from_gguf("gemma2", **window)
    assert (config.norm_offset, config.attention_cap, config.logit_cap) == (0.0, 50.0, 30.0)
    assert (config.attention_scale, config.activation, config.tied) == (0.25, "gelu_pytorch_tanh", True)
    assert from_gguf("gemma2", **window, attn_logit_softcapping=2.0).attention_cap == 2.0
    assert from_gguf("gemma2", **window, block_count=46).attention_scale == 12**-0.5
    assert from_gguf("gemma3", **window, block_count=62).attention_scale == 12**-0.5
    assert from_gguf("gemma3", **window, block_count=46).attention_scale == 0.25
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 1e6}
    config = from_gguf("gemma3", **window, **linear)
    assert (config.rope, config.local_rope, config.max_position) == (GLOBAL, LOCAL, 128)
    assert from_gguf("gemma3", **window, rope__freq_base_swa=500.0).local_rope == RopeConfig(500.0)


def test_ropes_in_gguf() -> None:
    assert from_gguf("llama", {"rope_freqs.weight": (1.0,) * 8}).rope.kind == "factors"
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    found = from_gguf("qwen2", **yarn, rope__scaling__original_context_length=32)
    assert found.rope == RopeConfig(
        10000.0, "yarn", 4.0, original_max_position=32, attention_factor=pytest.approx(1.138629436)
    )
    both = {"rope_factors_short.weight": (1.0,) * 6, "rope_factors_long.weight": (2.0,) * 6}
    longest = {"rope__scaling__attn_factor": 1.25, "rope__dimension_count": 12}
    found = from_gguf("phi3", both, **longest, rope__scaling__original_context_length=32)
    assert (found.rotary_dim, found.rope.attention_factor) == (12, 1.25)
    assert (found.rope.kind, found.rope.factors, found.rope.long_factors) == ("longrope", (1.0,) * 6, (2.0,) * 6)
    for arch, key, value in (
        ("llama", "rope.scaling.type", "ntk"),
        ("llama", "rope.dimension_count", 12),
        ("phi3", "rope.dimension_count", 18),
        ("llama", "rope.freq_base_swa", 500.0),
        ("llama", "attention.value_length", 20),
        ("llama", "expert_count", 8),
    ):
        with pytest.raises(InputError, match=rf"^model\.gguf: {arch}\.{key}: "):
            from_gguf(arch, **{key.replace(".", "__"): value})
    with pytest.raises(InputError, match=r"qwen2\.rope\.scaling\.yarn_attn_factor: is 0\.5"):
        from_gguf("qwen2", **yarn, rope__scaling__yarn_attn_factor=0.5)
    with pytest.raises(InputError, match=r"model\.gguf: rope_freqs\.weight holds 7 numbers; expected 8"):
        from_gguf("llama", {"rope_freqs.weight": (1.0,) * 7})


# --- Presets ---

PARAMETERS = {
    "gemma-3-1b": 999_885_952,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "phi-3-mini": 3_821_079_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", preset_names())
def test_the_parameters_of_the_presets(name: str) -> None:
    """As published."""
    config = open_model(name).config
    parts = SimpleNamespace(rank=0, size=1)
    model = Decoder(config, config.partition((1,)), parts, 1)  # type: ignore[arg-type]
    assert sum(p.elements for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", preset_names())
def test_transformers_reads_the_presets_alike(name: str) -> None:
    """It makes the same of what the file leaves out, and its own spelling of the file is read alike."""
    from transformers import AutoConfig

    raw = json.loads(preset_json(name))
    kind = raw.pop("model_type")
    theirs = AutoConfig.for_model(kind, **raw).to_dict()
    assert config_from_hf({**theirs, "architectures": raw["architectures"]}, name) == open_model(name).config


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if "images" not in family])
def test_what_a_config_leaves_out_is_what_transformers_takes_for_it(family: str) -> None:
    """The keys that a family may lack: its class's defaults."""
    from transformers import AutoConfig

    kind = {"gemma3": "gemma3_text"}.get(family, family)
    sizes = {"vocab_size": 100, "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 32, "max_position_embeddings": 128, "eos_token_id": 5, "bos_token_id": 4}
    theirs = {**AutoConfig.for_model(kind, **sizes).to_dict(), "architectures": [ARCHITECTURES[family]]}
    given = {**sizes, "architectures": [ARCHITECTURES[family]]}
    assert config_from_hf(given, "config.json") == config_from_hf(theirs, "config.json")
    on = {"use_sliding_window": True, "max_window_layers": 10}
    theirs = {**AutoConfig.for_model(kind, **sizes, **on).to_dict(), "architectures": [ARCHITECTURES[family]]}
    assert config_from_hf({**given, **on}, "config.json") == config_from_hf(theirs, "config.json")
