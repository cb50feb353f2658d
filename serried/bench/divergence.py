"""How far one next-token distribution lies from another. Pure NumPy, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


def log_softmax(logits: Logits) -> Float64:
    """Natural logarithms of the probabilities: float64 [rows, vocabulary] from float32 of the same shape."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def kl_divergence(reference: Logits, other: Logits) -> Float64:
    """KL(reference || other) of each row, in nats: float64 [rows] from two float32 [rows, vocabulary]."""
    p, q = log_softmax(reference), log_softmax(other)
    divergence: Float64 = np.einsum("rv,rv->r", np.exp(p), p - q)
    return divergence
