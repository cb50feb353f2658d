"""The torch backend: each operator runs at once. The readable reference, and the way to CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from serried.backends.base import (
    AttentionSpec,
    Backend,
    Partial,
    RopeTable,
)
from serried.backends.picks import gather_best, unpack_picks
from serried.backends.step import Int32, StepInput
from serried.backends.survey import NumpyChoices
from serried.errors import InputError
from serried.kv.cache import CacheShape
from serried.parallel.comm import Communicator
from serried.parallel.reduction import ReductionPlan, Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows, quantize_rows
from serried.weights.checkpoint import Array
from serried.weights.spec import Kind, Parameter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def choose_torch_device(device: str, ranks: int, local_rank: int) -> str:
    """`cuda` where it is asked for or (auto) where there is a GPU for each rank, else `cpu`; makes it current."""
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and gpus < ranks:
        raise InputError(f"--device cuda: {ranks} ranks, but PyTorch sees {gpus} GPUs; take --device cpu")
    if device == "cpu" or gpus < ranks:
        return "cpu"
    torch.cuda.set_device(local_rank)
    return "cuda"


def to_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of a NumPy array; bfloat16 (which torch cannot take from NumPy) too."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Destination:
    """A NumPy array that becomes the tensor: rounding to bfloat16 happens on assignment.

    Of a quantized parameter it holds the numbers that the blocks stand for.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic], device: torch.device, method: Method | None
    ) -> None:
        self._array = np.empty(shape, dtype)
        self._device = device
        self._method = method

    def write(self, row: int, values: Array) -> None:
        if self._method is None:
            self._array[row : row + values.shape[0]] = values
        else:
            self.write_blocks(row, quantize_rows(self._method, values))

    def write_blocks(self, row: int, rows: QuantizedRows) -> None:
        self._array[row : row + rows.shape[0]] = rows.values()

    def finish(self) -> torch.Tensor:
        return to_tensor(self._array).to(self._device)


@dataclass(frozen=True)
class _Step:
    """A step's inputs as tensors, and what several layers ask of them."""

    inputs: StepInput
    block_size: int
    device: torch.device

    def _long(self, array: Int32) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    @cached_property
    def tokens(self) -> torch.Tensor:
        return self._long(self.inputs.tokens)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._long(self.inputs.positions)

    @cached_property
    def slots(self) -> torch.Tensor:
        return self._long(self.inputs.slots)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        return self._long(self.inputs.logit_rows)

    @cached_property
    def sequences(self) -> list[tuple[slice, torch.Tensor]]:
        """For each sequence its rows of T, and the cache slots of its positions in order."""
        s = self.inputs
        result = []
        for r in range(s.requests):
            blocks = s.blocks[s.block_starts[r] : s.block_starts[r + 1]]
            offsets = np.arange(self.block_size, dtype=np.int32)
            slots: Int32 = (blocks[:, None] * np.int32(self.block_size) + offsets).ravel()
            rows = slice(int(s.row_starts[r]), int(s.row_starts[r + 1]))
            result.append((rows, self._long(slots[: s.kv_lens[r]])))
        return result


class TorchBackend:
    """Operators in PyTorch. Handles are tensors; the residual stream and what comes out of a fold are float32.

    In float32 on a CPU a row-parallel linear sums leaf by leaf, so that the reduction tree is kept; in bfloat16 or on
    CUDA each node is one product (rounding every leaf to bfloat16 would cost accuracy, and small products cost speed).
    """

    name = "torch"
    isa = "torch"

    def __init__(self, dtype: str, device: str = "cpu", threads: int | None = None) -> None:
        self.dtype = dtype
        self._dtype = DTYPES[dtype]
        self._device = torch.device(device)
        self._by_leaf = dtype == "float32" and self._device.type == "cpu"
        if threads is not None:
            torch.set_num_threads(threads)

    # Around the operators

    def destination(self, shape: tuple[int, ...], kind: Kind, method: Method | None = None) -> _Destination:
        wide = kind == "vector" or self.dtype == "float32"
        return _Destination(shape, np.dtype(np.float32 if wide else ml_dtypes.bfloat16), self._device, method)

    def constant(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def allocate_cache(self, shape: CacheShape) -> None:
        sizes = (shape.layers, 2, shape.slots, shape.kv_heads, shape.head_dim)
        self._cache = torch.empty(sizes, dtype=self._dtype, device=self._device)
        self._block_size = shape.block_size

    def compile(self, forward: Callable[[Backend], torch.Tensor]) -> _TorchProgram:
        return _TorchProgram(self, forward)

    def run(self, forward: Callable[[Backend], torch.Tensor], step: StepInput) -> torch.Tensor:
        """Run a forward for one step."""
        self._step = _Step(step, self._block_size, self._device)
        with torch.inference_mode():
            return forward(self)

    # The operators

    def embed(self, weight: Parameter, rows: Span, comm: Communicator, scale: float = 1.0) -> torch.Tensor:
        tokens = self._step.tokens  # [T]
        owned = (tokens >= rows.start) & (tokens < rows.stop)
        found = weight.value[(tokens[owned] - rows.start)].float() * scale
        # Bits are summed as integers: exactly one rank brings a row, so the sum is that row, -0 and all.
        bits = torch.zeros((tokens.numel(), weight.shape[1]), dtype=torch.int32, device=self._device)
        bits[owned] = found.view(torch.int32)
        reduced: torch.Tensor = comm.all_reduce(bits)
        return reduced.view(torch.float32)  # [T, hidden]

    def norm(self, x: torch.Tensor, weight: Parameter, eps: float) -> torch.Tensor:
        return rms_norm(x, weight.value, eps).to(self._dtype)

    def reduce(self, partial: Partial) -> torch.Tensor:
        y: torch.Tensor = partial.comm.reduce_nodes(partial.nodes, partial.plan)
        return y if partial.bias is None else y + partial.bias.value

    def reduce_add_norm(
        self, partial: Partial, residual: torch.Tensor, weight: Parameter, eps: float, inner: Parameter | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.reduce(partial)
        residual = residual + (y if inner is None else rms_norm(y, inner.value, eps))
        return self.norm(residual, weight, eps), residual

    def linear(self, x: torch.Tensor, weight: Parameter, bias: Parameter | None) -> torch.Tensor:
        y = F.linear(x.to(self._dtype), weight.value)
        return y if bias is None else (y.float() + bias.value).to(self._dtype)

    def linear_nodes(self, x: torch.Tensor, weight: Parameter, plan: ReductionPlan, rank: int) -> torch.Tensor:
        x = x.to(self._dtype)
        spans = plan.leaves[rank] if self._by_leaf else plan.nodes[rank]
        sums = [F.linear(x[:, a:b], weight.value[:, a:b]).float() for a, b in spans]
        if self._by_leaf:
            sums = plan.within[rank].run(sums, torch.add)
        if not sums:
            return torch.empty((x.shape[0], 0, weight.shape[0]), device=self._device)
        return torch.stack(sums, dim=1)  # [T, own nodes, outputs]

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return ACTIVATIONS[name](x)

    def gated_activation(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[name](gate) * up

    def attention(
        self,
        qkv: torch.Tensor,
        spec: AttentionSpec,
        rope: RopeTable,
        q_norm: Parameter | None,
        k_norm: Parameter | None,
    ) -> torch.Tensor:
        heads = qkv.float().view(qkv.shape[0], -1, spec.head_dim)  # [T, q | k | v heads, head_dim]
        q, k, v = torch.split(heads, [spec.query_heads, spec.kv_heads, spec.kv_heads], dim=1)
        positions = self._step.positions
        cos, sin = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm.value, spec.norm_eps), rms_norm(k, k_norm.value, spec.norm_eps)
        q, k = rotate(q, cos, sin).to(self._dtype), rotate(k, cos, sin).to(self._dtype)
        cache = self._cache[spec.layer]  # [2, slots, kv_heads, head_dim]
        cache[0].index_copy_(0, self._step.slots, k)
        cache[1].index_copy_(0, self._step.slots, v.to(self._dtype))
        kv_map = list(spec.kv_map)
        out = [
            attend(q[rows], cache[0][slots][:, kv_map], cache[1][slots][:, kv_map], positions[rows], spec)
            for rows, slots in self._step.sequences
        ]
        return torch.cat(out).flatten(1)  # [T, query_heads * head_dim]

    def columns(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        return x[..., span.start : span.stop].contiguous()

    def all_gather_columns(self, x: torch.Tensor, comm: Communicator, parts: Sequence[int]) -> torch.Tensor:
        gathered: torch.Tensor = comm.all_gather(x.contiguous(), parts, dim=1)
        return gathered

    def select_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._step.logit_rows]

    def logits(self, x: torch.Tensor, weight: Parameter, softcap: float = 0.0) -> torch.Tensor:
        y = self.linear(x, weight, None).float()
        return softcap * torch.tanh(y / softcap) if softcap else y


@dataclass(frozen=True)
class _TorchProgram(NumpyChoices):
    """A forward that is called anew for every step."""

    backend: TorchBackend
    forward: Callable[[Backend], torch.Tensor]

    def run(self, step: StepInput) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = self.backend.run(self.forward, step).cpu().numpy()
        return logits

    def choose(self, step: StepInput, first: int, comm: Communicator) -> list[int] | None:
        own = self.run(step)
        if own.shape[1]:
            places, scores = self.pick(own, first, *unpack_picks(step.picks))
        else:  # a rank without a part of the vocabulary
            places, scores = np.zeros(len(own), np.int64), np.full(len(own), -np.inf)
        return gather_best(places + first, scores, comm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [T, heads, head_dim]: of the columns that cos has angles for, the first half against the second."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Causal attention of one sequence: q [t, heads, head_dim]; k, v [n, heads, head_dim]; positions of q [t]."""
    at, last = torch.arange(k.shape[0], device=q.device), positions[:, None]
    seen = at <= last  # [t, n]
    if spec.window:
        seen = seen & (at > last - spec.window)
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    if spec.softcap:
        out = capped_attention(q, k, v, seen, spec)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=spec.scale)
    return out.transpose(0, 1)


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention with a soft cap, which PyTorch's own does not have; all [heads, ...], scores in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = spec.softcap * torch.tanh(q.to(wide) @ k.to(wide).mT * spec.scale / spec.softcap)
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.to(wide)).to(q.dtype)
