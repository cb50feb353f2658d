"""A plain decoder of its own: unsplit, no cache, no parallel layer, no code shared with what it checks.

Only the config and the checkpoint's reader are common. It computes a whole sequence at once: short, and easy to hold
against a textbook. It keeps the weights in float32 and computes in float64, so that what differs is the error of the
run that it is compared with, not its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin: [length, 1, rotary_dim]


class Reference:
    """Logits of a whole sequence from a whole checkpoint, computed in float64.

    longest: the longest sequence that the run allows, which decides on some kinds of RoPE (None: the model's own).
    ignored: tells which tensors of the checkpoint are not the decoder's.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        threads: int,
        progress: Progress | None = None,
        longest: int | None = None,
        ignored: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.config = config
        self.longest = longest or config.max_position
        torch.set_num_threads(threads)
        names = [name for name in checkpoint.tensors if not ignored(name)]
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
        if c.family.scaled_embedding:
            x = x * c.hidden_size**0.5
        for i in range(c.num_layers):
            layer = names.layer.format(i=i)
            h = self._attention(self._norm(x, f"{layer}.{names.input_norm}"), layer, i)
            x = x + (self._norm(h, f"{layer}.{names.attention_output_norm}") if names.attention_output_norm else h)
            h = self._mlp(self._norm(x, f"{layer}.{names.mlp_norm}"), layer)
            x = x + (self._norm(h, f"{layer}.{names.mlp_output_norm}") if names.mlp_output_norm else h)
        y = self._linear(self._norm(x, names.final_norm), names.embedding if c.tied else names.lm_head)
        if c.logit_cap:
            y = c.logit_cap * torch.tanh(y / c.logit_cap)
        result: npt.NDArray[np.float32] = y.float().numpy()
        return result

    def _attention(self, h: torch.Tensor, layer: str, index: int) -> torch.Tensor:
        c, names = self.config, self.config.family.names
        q, k, v = self._projected(h, layer, names.qkv, (c.num_heads, c.num_kv_heads, c.num_kv_heads), c.head_dim)
        if c.qk_norm:
            q = self._norm(q, f"{layer}.{names.q_norm}")
            k = self._norm(k, f"{layer}.{names.k_norm}")
        window = c.windows[index]
        rope = c.local_rope if window and c.local_rope else c.rope
        rotation = _rotation(rope, c.rotary_dim, len(h), self.longest)
        q, k = _turn(q, rotation), _turn(k, rotation)
        group = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.attention_scale
        if c.attention_cap:
            scores = c.attention_cap * torch.tanh(scores / c.attention_cap)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)  # the future, and what has left the window
        if window:
            hidden = hidden | torch.ones_like(hidden).tril(-window)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{layer}.{names.o_proj}")

    def _mlp(self, h: torch.Tensor, layer: str) -> torch.Tensor:
        c, names = self.config, self.config.family.names
        gate, up = self._projected(h, layer, names.gate_up, (1, 1), c.intermediate_size)
        product = _activate(gate, c.activation) * up
        return self._linear(product.flatten(1), f"{layer}.{names.down_proj}")

    def _projected(
        self, h: torch.Tensor, layer: str, names: tuple[str, ...], heads: tuple[int, ...], columns: int
    ) -> tuple[torch.Tensor, ...]:
        """Several projections, each [length, its heads, columns], of a tensor each or of one tensor."""
        y = torch.cat([self._linear(h, f"{layer}.{name}") for name in names], dim=-1)
        return torch.split(y.view(len(h), -1, columns), list(heads), dim=1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"].double())
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"].double() + self.config.norm_offset
        return F.rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)


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


def _rotation(rope: RopeConfig, dim: int, length: int, longest: int) -> Rotation:
    theta = rope.theta
    if rope.kind == "dynamic" and longest > rope.original_max_position:
        stretch = rope.factor * longest / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    plain = [theta ** -(2 * i / dim) for i in range(dim // 2)]
    frequencies = torch.tensor([_scaled(i, f, rope, dim, longest) for i, f in enumerate(plain)], dtype=torch.float64)
    angles = torch.outer(torch.arange(length).double(), frequencies).repeat(1, 2)
    return angles.cos()[:, None] * rope.attention_factor, angles.sin()[:, None] * rope.attention_factor


def _scaled(i: int, frequency: float, rope: RopeConfig, dim: int, longest: int) -> float:
    """The frequency of pair i as the kind of RoPE changes it."""
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "longrope" and longest > rope.original_max_position:
        return frequency / rope.long_factors[i]
    if rope.kind in ("longrope", "factors"):
        return frequency / rope.factors[i]
    if rope.kind == "yarn":
        return _yarn(i, frequency, rope, dim)
    if rope.kind == "llama3":
        return _llama3(frequency, rope)
    return frequency


def _yarn(i: int, frequency: float, rope: RopeConfig, dim: int) -> float:
    """YaRN (section 3.2 of its paper), with the edges of its ramp in pairs instead of turns, as it was published."""
    # Pair x turns r times over the original context where theta^(-2x / dim) * context = 2 pi r.
    context = rope.original_max_position / (2 * math.pi)
    low, high = (dim / 2 * math.log(context / turns, rope.theta) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = min(max((i - low) / (high - low), 0.0), 1.0)
    return (1 - ramp) * frequency + ramp * frequency / rope.factor


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


def _turn(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = rotation
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)
