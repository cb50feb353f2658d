"""Method: one way to keep weights in fewer bits. It declares its blocks, its tensors in a file and its kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

GROUP = 32  # columns that share a scale; a unit of every split is a multiple of it

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """One field of every block: its bytes [start, stop) there, and the tensor that holds it in a safetensors file.

    The tensor is called as the weight with `suffix` behind it, and has the fields of a row side by side.
    """

    suffix: str
    dtype: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Method(ABC):
    """A row of a weight as blocks of GGML, one for each group of 32 columns; the last group is filled up with zeros.

    name: what users and the native kernels call it. title: the same, for people. ggml: the type of GGML whose blocks
    these are. parts: the fields of a block, in order.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    ggml: ClassVar[str]
    parts: ClassVar[tuple[Part, ...]]

    @property
    def block_bytes(self) -> int:
        return self.parts[-1].stop

    @property
    def bits(self) -> float:
        """Bits of a weight, its share of the scale included."""
        return 8 * self.block_bytes / GROUP

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many columns."""
        return groups_of(columns) * self.block_bytes

    def quantize(self, values: npt.NDArray[np.generic]) -> Bytes:
        """Values [rows, columns] to blocks [rows, row_bytes], to the bit as ggml's reference does it."""
        rows, columns = values.shape
        padded = np.zeros((rows, groups_of(columns) * GROUP), np.float32)
        padded[:, :columns] = values
        blocks = np.empty((rows * groups_of(columns), self.block_bytes), np.uint8)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            self._quantize(padded.reshape(-1, GROUP), blocks)
        return blocks.reshape(rows, self.row_bytes(columns))

    def dequantize(self, blocks: Bytes, columns: int) -> Floats:
        """Blocks [rows, row_bytes] to float32 [rows, columns]."""
        with np.errstate(invalid="ignore", over="ignore"):
            values = self._dequantize(blocks.reshape(-1, self.block_bytes))
        return values.reshape(blocks.shape[0], groups_of(columns) * GROUP)[:, :columns]

    @abstractmethod
    def _quantize(self, groups: Floats, blocks: Bytes) -> None:
        """Fill blocks [n, block_bytes] from groups [n, 32]."""

    @abstractmethod
    def _dequantize(self, blocks: Bytes) -> Floats:
        """Blocks [n, block_bytes] to [n, 32]."""


def groups_of(columns: int) -> int:
    return -(-columns // GROUP)


def halves(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of every block, as [n, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def put_halves(blocks: Bytes, at: int, values: Floats) -> None:
    """Store [n, 1] as the float16 at a byte of every block."""
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8)


def inverse(scales: Floats) -> Floats:
    """1 / scale; 0 where the scale is 0."""
    return np.where(scales == 0, np.float32(0), np.float32(1) / scales).astype(np.float32)
