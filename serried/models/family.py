"""What distinguishes one family of decoders from another: names and switches, no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Windows = Literal["none", "all", "upper", "pattern"]


@dataclass(frozen=True)
class Names:
    """Checkpoint names of a decoder's tensors, in Hugging Face's terms. `{i}` is the layer's index.

    mlp_norm: of what goes into the MLP. attention_output_norm, mlp_output_norm: of what comes out, before it is added
    to the residual; None where there is no such norm. qkv_proj, gate_up_proj: the one tensor that holds q, k and v (or
    gate and up), one below the other; None where each has its own.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{i}"
    input_norm: str = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    qkv_proj: str | None = None
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up_proj: str | None = None
    gate_proj: str = "mlp.gate_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"

    @property
    def qkv(self) -> tuple[str, ...]:
        """The tensors of q, k and v: one, or one each."""
        return (self.qkv_proj,) if self.qkv_proj else (self.q_proj, self.k_proj, self.v_proj)

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The tensors of gate and up: one, or one each."""
        return (self.gate_up_proj,) if self.gate_up_proj else (self.gate_proj, self.up_proj)


@dataclass(frozen=True)
class Family:
    """A family: the architectures that it answers to, its names, its switches.

    qk_norm: q and k are RMS-normalized head by head before RoPE. qkv_bias: q, k and v have biases whatever the config
    says, and o has none. norm_offset: what is added to a norm's values in a Hugging Face checkpoint to make its weight.
    scaled_embedding: embeddings are multiplied with the square root of the hidden size. attention_cap, logit_cap: the
    config may ask for a soft cap of attention scores, of logits. partial_rotary: the config may have only the first
    columns of a head rotated. tied: whether the LM head is tied where the config does not say.
    windows: the layers that see a window only: none, all, `upper` (from max_window_layers on, if use_sliding_window is
    set), or by a `pattern` (all but every so-manieth, `pattern`); where the config lists layer_types, they decide.
    local_theta: layers with a window have a RoPE of their own, with this base where the config gives none.
    rope_kinds: other names for kinds of RoPE. activation, activation_key: the default, and where the config has it.
    defaults: keys of config.json with the values that they have where they are missing.
    nested: the key of config.json that holds the decoder's own config. ignored: how the names of tensors begin that
    belong to other parts of the model than the decoder.
    refused: keys of config.json that change the computation in a way that is not built, with the values that do not.
    unused: keys of config.json that would, but have no effect in this family.
    gguf_names: names of tensors in GGUF files that differ from Llama's. gguf_scales: for numbers of layers at which
    attention scores are scaled by hidden size / heads instead of the head dimension (GGUF has no key for it).
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    attention_cap: bool = False
    logit_cap: bool = False
    partial_rotary: bool = False
    tied: bool = False
    windows: Windows = "none"
    pattern: int = 0
    local_theta: float | None = None
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    activation: str = "silu"
    activation_key: str = "hidden_act"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nested: str | None = None
    names: Names = field(default_factory=Names)
    ignored: tuple[str, ...] = ()
    refused: tuple[tuple[str, tuple[object, ...]], ...] = ()
    unused: tuple[str, ...] = ()
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_scales: tuple[int, ...] = ()
