"""GGUF files of the tiny models, as llama.cpp's converter makes them of each family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {"mistral": "llama"}  # of families whose own name it is not
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


# Types of the kind MIXED, by the module in GGUF (others are Q8_0): fused parameters of several types, and a plain one.
MIXED = {
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q4_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q8_0",
    "attn_output": "Q5_0",
    "ffn_down": "F16",
    "token_embd": "Q4_1",
}


def write_gguf(path: Path, model: Any, family: str, kind: str, **options: int) -> None:
    """Write transformers' model with its matrices in a type of block, or MIXED. options: of gguf.GGUFWriter."""
    import gguf

    config = model.config
    arch = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, arch, **options)
    _write_metadata(writer, config)
    _of_the_family(family)(writer, config)
    for name, values in [*_rope_tensors(model), *_tensors(model, family, arch)]:
        own = MIXED.get(name.split(".")[-2], "Q8_0") if kind == "MIXED" else kind
        stored = gguf.GGMLQuantizationType[own if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any, family: str, arch: str) -> Iterator[tuple[str, Any]]:
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _permuted(values, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        yield _gguf_name(name, family), values


def _gguf_name(name: str, family: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{(_GEMMA if family.startswith('gemma') else _LAYER)[module]}.{kind}"


def _permuted(weight: Any, heads: int) -> Any:
    """The rows of q or k as convert_hf_to_gguf.py orders them for the Llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    """What the config says of RoPE, that of layers that see everything."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def _write_metadata(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_file_type(0)
    _write_rope_scaling(writer, _rope(config))
    _write_vocabulary(writer, config.vocab_size)


def _write_rope_scaling(writer: Any, rope: dict[str, Any]) -> None:
    import gguf

    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _of_the_family(family: str) -> Callable[[Any, Any], None]:
    """What writes the keys that only some families have."""
    return {"gemma2": _write_gemma, "gemma3": _write_gemma, "phi3": _write_phi3}.get(family, _write_llama)


def _write_llama(writer: Any, config: Any) -> None:
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_vocab_size(config.vocab_size)


def _write_gemma(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    if config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_phi3(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    original = config.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(
        int(rope["partial_rotary_factor"] * config.hidden_size) // config.num_attention_heads
    )
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)


def _write_vocabulary(writer: Any, size: int) -> None:
    """The 256 bytes, one merge, and unused tokens up to the size."""
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens.append(tokens[0] + tokens[1])
    spare = [f"[PAD{i}]" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *spare])
    writer.add_token_types([1] * len(tokens) + [5] * len(spare))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(2)


def _rope_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """What llama.cpp divides each RoPE frequency by, where the kind of RoPE has no key of its own."""
    rope = _rope(model.config)
    if rope["rope_type"] == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)
    elif rope["rope_type"] == "llama3":
        dim = _head_dim(model.config)
        plain = rope["rope_theta"] ** -(np.arange(0, dim, 2, dtype=np.float32) / dim)
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
