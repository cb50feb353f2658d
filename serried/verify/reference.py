"""A plain decoder of its own: unsplit, no cache, no parallel layer, no code shared with what it checks.

Only the config and the checkpoint's reader are common. It computes a whole sequence at once: short, and easy to hold
against a textbook. It keeps the weights in float32 and computes in float64, so that what differs is the error of the
run that it is compared with, not its own.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from serried.layers.rope import RopeConfig
from serried.models.config import ModelConfig
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Checkpoint
from serried.weights.load import Progress

ROWS = 4096  # read at once


class Reference:
    """Logits of a whole sequence from a whole checkpoint, computed in float64."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, threads: int, progress: Progress | None = None
    ) -> None:
        self.config = config
        torch.set_num_threads(threads)
        skipped = {f"{config.family.names.lm_head}.weight"} if config.tied else set()
        names = [name for name in checkpoint.tensors if name not in skipped]
        self.weights = {}
        for done, name in enumerate(names):
            self.weights[name] = _read(checkpoint, name)
            if progress:
                progress(done + 1, len(names))

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """float32 [len(tokens), vocabulary]."""
        c, names = self.config, self.config.family.names
        x = self.weights[f"{names.embedding}.weight"][torch.tensor(tokens)].double()
        cos, sin = _rotation(c.rope, c.head_dim, len(tokens))
        for i in range(c.num_layers):
            layer = names.layer.format(i=i)
            h = self._norm(x, f"{layer}.{names.input_norm}")
            x = x + self._attention(h, layer, cos, sin)
            h = self._norm(x, f"{layer}.{names.post_attention_norm}")
            gate = self._linear(h, f"{layer}.{names.gate_proj}")
            up = self._linear(h, f"{layer}.{names.up_proj}")
            x = x + self._linear(_activate(gate, c.activation) * up, f"{layer}.{names.down_proj}")
        x = self._norm(x, names.final_norm)
        head = names.embedding if c.tied else names.lm_head
        result: npt.NDArray[np.float32] = self._linear(x, head).float().numpy()
        return result

    def _attention(self, h: torch.Tensor, layer: str, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, names = self.config, self.config.family.names
        q = self._linear(h, f"{layer}.{names.q_proj}").view(-1, c.num_heads, c.head_dim)
        k = self._linear(h, f"{layer}.{names.k_proj}").view(-1, c.num_kv_heads, c.head_dim)
        v = self._linear(h, f"{layer}.{names.v_proj}").view(-1, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q = self._norm(q, f"{layer}.{names.q_norm}")
            k = self._norm(k, f"{layer}.{names.k_norm}")
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        group = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{layer}.{names.o_proj}")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"].double())
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"].double(), self.config.norm_eps)


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    shape = checkpoint.tensors[name].shape
    whole = torch.empty(shape)
    for start in range(0, shape[0], ROWS):
        rows = Span(start, min(start + ROWS, shape[0]))
        values = checkpoint.read(name, rows)
        whole[rows.start : rows.stop] = torch.from_numpy(values.astype(np.float32))
    return whole


def _activate(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _rotation(rope: RopeConfig, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin: [length, 1, head_dim]."""
    frequencies = rope.theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    if rope.kind == "factors":
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float64)
    elif rope.kind == "llama3":
        frequencies = torch.tensor([_llama3(f, rope) for f in frequencies.tolist()], dtype=torch.float64)
    angles = torch.outer(torch.arange(length).double(), frequencies).repeat(1, 2)
    return angles.cos()[:, None], angles.sin()[:, None]


def _llama3(frequency: float, rope: RopeConfig) -> float:
    """Llama 3.1's scaling of one frequency (its `apply_scaling`)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_max_position / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_max_position / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
