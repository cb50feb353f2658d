"""The only decoder: one block, one stack, for every family, every split and every backend."""

from __future__ import annotations

from serried.backends.base import Backend, Handle, RopeTable
from serried.layers.attention import Attention, AttentionKind, AttentionNames
from serried.layers.layer import Layer
from serried.layers.mlp import GatedMLP
from serried.layers.norm import RMSNorm
from serried.layers.rope import RopeConfig, rope_table
from serried.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from serried.models.config import ModelConfig
from serried.parallel.comm import Communicator
from serried.parallel.partition import ModelPartition


class DecoderLayer(Layer):
    """Norm, attention, norm, MLP; the ranks meet twice, in the reductions that the norms are fused with.

    Some families also normalize what comes out of attention and of the MLP, before it is added to the residual.
    """

    def __init__(self, config: ModelConfig, index: int, partition: ModelPartition, comm: Communicator) -> None:
        names = config.family.names
        prefix = names.layer.format(i=index)
        self.rope = config.rope_of(index)
        self.input_norm = _norm(config, f"{prefix}.{names.input_norm}")
        self.attention = Attention(
            AttentionNames(
                qkv_proj=[f"{prefix}.{name}" for name in names.qkv],
                o_proj=f"{prefix}.{names.o_proj}",
                q_norm=f"{prefix}.{names.q_norm}" if config.qk_norm else None,
                k_norm=f"{prefix}.{names.k_norm}" if config.qk_norm else None,
            ),
            index,
            config.hidden_size,
            partition,
            comm,
            AttentionKind(
                rotary_dim=config.rotary_dim,
                scale=config.attention_scale,
                norm_eps=config.norm_eps,
                norm_offset=config.norm_offset,
                window=config.windows[index],
                softcap=config.attention_cap,
            ),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
        )
        self.attention_output_norm = _optional_norm(config, prefix, names.attention_output_norm)
        self.mlp_norm = _norm(config, f"{prefix}.{names.mlp_norm}")
        self.mlp = GatedMLP(
            [f"{prefix}.{name}" for name in names.gate_up],
            f"{prefix}.{names.down_proj}",
            config.hidden_size,
            partition.mlp,
            comm,
            activation=config.activation,
            bias=config.mlp_bias,
        )
        self.mlp_output_norm = _optional_norm(config, prefix, names.mlp_output_norm)


class Decoder(Layer):
    """A decoder-only model, of which this rank holds its shard.

    max_positions: the longest sequence that it will see (the length of the RoPE tables).
    """

    def __init__(self, config: ModelConfig, partition: ModelPartition, comm: Communicator, max_positions: int) -> None:
        names, hidden = config.family.names, config.hidden_size
        self.config = config
        self.max_positions = max_positions
        self.embedding = VocabParallelEmbedding(names.embedding, partition.vocab, hidden, comm, config.embedding_scale)
        self.layers = [DecoderLayer(config, i, partition, comm) for i in range(config.num_layers)]
        self.final_norm = _norm(config, names.final_norm)
        self.lm_head = ParallelLMHead(
            names.lm_head,
            partition.vocab,
            hidden,
            comm,
            tied_to=self.embedding if config.tied else None,
            softcap=config.logit_cap,
        )
        self.ropes: dict[RopeConfig, RopeTable] = {}

    def place_constants(self, ops: Backend) -> None:
        """Give the backend what no checkpoint holds: a RoPE table for each kind of layer."""
        for rope in dict.fromkeys(layer.rope for layer in self.layers):
            cos, sin = rope_table(rope, self.config.rotary_dim, self.max_positions)
            self.ropes[rope] = RopeTable(ops.constant(cos), ops.constant(sin))

    def forward(self, ops: Backend) -> Handle:
        """One step: this rank's logits of the rows that want them, float32 [Q, own vocabulary]."""
        residual = self.embedding(ops)
        h = self.layers[0].input_norm(ops, residual)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            partial = layer.attention(ops, h, self.ropes[layer.rope])
            h, residual = layer.mlp_norm.after(ops, partial, residual, layer.attention_output_norm)
            partial = layer.mlp(ops, h)
            h, residual = next_norm.after(ops, partial, residual, layer.mlp_output_norm)
        return self.lm_head(ops, h)


def _norm(config: ModelConfig, name: str) -> RMSNorm:
    return RMSNorm(name, config.hidden_size, config.norm_eps, config.norm_offset)


def _optional_norm(config: ModelConfig, prefix: str, name: str | None) -> RMSNorm | None:
    return _norm(config, f"{prefix}.{name}") if name else None
