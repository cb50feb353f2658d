"""The quantization_config of a config.json: which quantized checkpoints can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serried.errors import InputError

KEY = "quantization_config"
OWN = "serried"  # the method of what `serried quantize` wrote; how to read that stands in its own file
PLAIN = ("fp8", "fbgemm_fp8")
COMPRESSED = "compressed-tensors"
COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")
_INSTEAD = (
    "take the unquantized model (with --quantization int4 or int8 it is quantized while it is loaded), or a GGUF of it"
)


@dataclass(frozen=True)
class Fp8Format:
    """Weights in eight-bit floats. block: the rows and columns that share a scale; None where blocks do not occur."""

    block: tuple[int, int] | None = None


def fp8_from_hf(raw: Mapping[str, Any], where: str) -> Fp8Format | None:
    """Read a config.json's quantization_config; None where there is none, or our own.

    How the activations would be quantized does not matter: they stay as they are. InputError names the method where
    it is another one. `where` names the file.
    """
    config = raw.get(KEY)
    if config is None:
        return None
    if not isinstance(config, dict):
        raise InputError(f"{where}: {KEY}: is {config!r}; expected an object")
    method = config.get("quant_method")
    if method == OWN:
        return None
    if method in PLAIN:
        return Fp8Format(_block(config.get("weight_block_size"), where))
    if method == COMPRESSED:
        return Fp8Format(_compressed_block(config, where))
    raise InputError(
        f"{where}: {KEY}: quant_method {method!r} is not supported, only {', '.join((*PLAIN, COMPRESSED))} in "
        f"eight-bit floats; {_INSTEAD}"
    )


def _compressed_block(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """The block of all groups of modules; most have a scale a tensor or a row, and none."""
    groups = config.get("config_groups")
    if config.get("format") not in COMPRESSED_FORMATS or not isinstance(groups, dict) or not groups:
        raise _refused(f"format {config.get('format')!r}", where)
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused("sparsity_config", where)
    blocks = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric")) if weights else None
        if weights is None or kind != ("float", 8, True):
            raise _refused(f"weights of type, bits and symmetry {kind}", where)
        if weights.get("strategy") not in {"tensor", "channel", "block"}:
            raise _refused(f"strategy {weights.get('strategy')!r}", where)
        blocks.add(_block(weights.get("block_structure"), where))
    sizes = sorted(block for block in blocks if block)
    if len(sizes) > 1:
        raise _refused(f"blocks of several sizes {sizes}", where)
    return sizes[0] if sizes else None


def _block(value: Any, where: str) -> tuple[int, int] | None:
    """Rows and columns, from [128, 128] or (in older files) "128x128"."""
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = map(int, sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise InputError(f"{where}: {KEY}: the size of a block is {value!r}; expected two positive numbers")
    return rows, columns


def _refused(what: str, where: str) -> InputError:
    return InputError(
        f"{where}: {KEY}: {COMPRESSED} with {what} is not supported, only {' and '.join(COMPRESSED_FORMATS)} of "
        f"symmetric eight-bit floats; {_INSTEAD}"
    )
