"""The sampler in the words of its definitions: one full row of logits, plain loops, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from serried import SamplingParams
from serried.backends.philox import gumbel_noise


def edited(
    logits: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    ends: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """The logits after everything but temperature: float64."""
    row = [float(x) for x in logits]
    for i in range(len(row)):
        if params.allowed_token_ids is not None and i not in params.allowed_token_ids:
            row[i] = -math.inf
    for *before, last in bad_words:
        if list(output[len(output) - len(before) :]) == before:
            row[last] = -math.inf
    for i in (*ends, *params.stop_token_ids):
        if len(output) < params.min_tokens:
            row[i] = -math.inf
    for i, bias in (params.logit_bias or {}).items():
        row[i] += bias
    for i in {*prompt, *output}:
        row[i] = row[i] / params.repetition_penalty if row[i] > 0 else row[i] * params.repetition_penalty
    for i in set(output):
        row[i] -= params.frequency_penalty * list(output).count(i)
        row[i] -= params.presence_penalty
    return row


def candidates(row: Sequence[float], params: SamplingParams) -> list[int]:
    """The ids that temperature, min_p, top_k and top_p leave, in vLLM's order; none where all are forbidden."""
    order = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    if params.temperature == 0:
        return order[:1]
    weights = {i: math.exp((row[i] - row[order[0]]) / params.temperature) for i in order}
    order = [i for i in order if weights[i] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    kept, total, whole = [], 0.0, sum(weights[i] for i in order)
    for i in order:
        kept.append(i)
        total += weights[i]
        if total >= params.top_p * whole:
            break
    return kept


def chosen(row: Sequence[float], params: SamplingParams, seed: int, position: int) -> int | None:
    """The token: the candidate with the largest logit / temperature + noise, the lowest id of equals."""
    kept = candidates(row, params)
    if not kept:
        return None
    if params.temperature == 0:
        return kept[0]
    noise = gumbel_noise(seed, position, np.arange(len(row)))
    return max(kept, key=lambda i: (row[i] / params.temperature + noise[i], -i))


def log_softmax(logits: Any) -> Any:
    """float64 [..., vocabulary]."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
