"""The only decoder: one block, one stack, for every family, every split and every backend."""

from __future__ import annotations

from serried.backends.base import Backend, Handle, RopeTable
from serried.layers.attention import Attention, AttentionNames
from serried.layers.layer import Layer
from serried.layers.mlp import GatedMLP
from serried.layers.norm import RMSNorm
from serried.layers.rope import rope_table
from serried.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from serried.models.config import ModelConfig
from serried.parallel.comm import Communicator
from serried.parallel.partition import ModelPartition


class DecoderLayer(Layer):
    """Norm, attention, norm, MLP; the ranks meet twice, in the reductions that the norms are fused with."""

    def __init__(self, config: ModelConfig, index: int, partition: ModelPartition, comm: Communicator) -> None:
        names = config.family.names
        prefix = names.layer.format(i=index)
        self.input_norm = RMSNorm(f"{prefix}.{names.input_norm}", config.hidden_size, config.norm_eps)
        self.attention = Attention(
            AttentionNames(
                q_proj=f"{prefix}.{names.q_proj}",
                k_proj=f"{prefix}.{names.k_proj}",
                v_proj=f"{prefix}.{names.v_proj}",
                o_proj=f"{prefix}.{names.o_proj}",
                q_norm=f"{prefix}.{names.q_norm}" if config.qk_norm else None,
                k_norm=f"{prefix}.{names.k_norm}" if config.qk_norm else None,
            ),
            index,
            config.hidden_size,
            partition,
            comm,
            norm_eps=config.norm_eps,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_output_bias,
        )
        self.post_attention_norm = RMSNorm(f"{prefix}.{names.post_attention_norm}", config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            (f"{prefix}.{names.gate_proj}", f"{prefix}.{names.up_proj}", f"{prefix}.{names.down_proj}"),
            config.hidden_size,
            partition.mlp,
            comm,
            activation=config.activation,
            bias=config.mlp_bias,
        )


class Decoder(Layer):
    """A decoder-only model, of which this rank holds its shard.

    max_positions: the longest sequence that it will see (the length of the RoPE table).
    """

    def __init__(self, config: ModelConfig, partition: ModelPartition, comm: Communicator, max_positions: int) -> None:
        names, hidden = config.family.names, config.hidden_size
        self.config = config
        self.max_positions = max_positions
        self.embedding = VocabParallelEmbedding(names.embedding, partition.vocab, hidden, comm)
        self.layers = [DecoderLayer(config, i, partition, comm) for i in range(config.num_layers)]
        self.final_norm = RMSNorm(names.final_norm, hidden, config.norm_eps)
        self.lm_head = ParallelLMHead(
            names.lm_head, partition.vocab, hidden, comm, tied_to=self.embedding if config.tied else None
        )

    def place_constants(self, ops: Backend) -> None:
        """Give the backend what no checkpoint holds: the RoPE table."""
        cos, sin = rope_table(self.config.rope, self.config.head_dim, self.max_positions)
        self.rope = RopeTable(ops.constant(cos), ops.constant(sin))

    def forward(self, ops: Backend) -> Handle:
        """One step: this rank's logits of the rows that want them, float32 [Q, own vocabulary]."""
        residual = self.embedding(ops)
        h = self.layers[0].input_norm(ops, residual)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            partial = layer.attention(ops, h, self.rope)
            h, residual = layer.post_attention_norm.after(ops, partial, residual)
            partial = layer.mlp(ops, h)
            h, residual = next_norm.after(ops, partial, residual)
        return self.lm_head(ops, h)
