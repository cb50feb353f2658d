"""What distinguishes one family of decoders from another: names and switches, no code."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Names:
    """Checkpoint names of a decoder's tensors, in Hugging Face's terms. `{i}` is the layer's index."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{i}"
    input_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_proj: str = "mlp.gate_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"


@dataclass(frozen=True)
class Family:
    """A family: the architectures that it answers to, its names, its switches.

    qk_norm: q and k are RMS-normalized head by head before RoPE.
    refused: keys of config.json that change the computation in a way that is not built, with the values that do not.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    qk_norm: bool = False
    names: Names = field(default_factory=Names)
    refused: tuple[tuple[str, tuple[object, ...]], ...] = ()
