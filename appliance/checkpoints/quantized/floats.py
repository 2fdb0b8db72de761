"""Weights in floats of 8 bits, which are multiplied by their factors as they are read.

vLLM's CPU kernels for them need AMX, or convert a whole weight for each product. So the model is
served as if its checkpoint had the products, in the type that it is computed in:

    NAME.weight            F8_E4M3  [out, in]
    NAME.weight_scale_inv  a factor for each block of it             [out / rows, in / columns]
    NAME.weight_scale      the same; or for each row, or all of it   [out, 1], [1] or []
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from appliance.checkpoints.quantized import compressed_tensors
from appliance.checkpoints.safetensors import TensorEntry

FLOAT: Final = "F8_E4M3"
_WEIGHT: Final = ".weight"
_SCALES: Final = (".weight_scale_inv", ".weight_scale")
_UNUSED: Final = (*_SCALES, ".input_scale")
"""Factors of activations are not used: these are not rounded to 8 bits."""
_FLOATS: Final = ("F32", "F16", "BF16")
_LONGEST_BLOCK: Final = 1024


class Factors(NamedTuple):
    """The factors of a weight: one for each block of so many rows and columns."""

    tensor: TensorEntry
    rows: int
    columns: int


def is_of(found: Mapping[str, Any]) -> bool:
    """Whether this ``quantization_config`` is of such weights, as far as the method says."""
    method = found.get("quant_method")
    return method == "fp8" or (
        method == compressed_tensors.METHOD and found.get("format") == "float-quantized"
    )


def why_not(found: dict[str, Any]) -> str | None:
    """Why weights of this ``quantization_config`` are not served; None if they are."""
    if found["quant_method"] == compressed_tensors.METHOD:
        return compressed_tensors.why_not_whole(found) or _why_not_compressed(found)
    if found.get("activation_scheme") not in ("dynamic", "static"):
        return f"quantization_config.activation_scheme is {found.get('activation_scheme')!r}"
    block = found.get("weight_block_size")
    if block is not None and not _is_block(block):
        return f"quantization_config.weight_block_size is {block!r}"
    for key, known in (("fmt", (None, "e4m3", "float8_e4m3fn")), ("scale_fmt", (None,))):
        if found.get(key) not in known:
            return f"quantization_config.{key} is {found[key]!r}"
    if found.get("store_dtype"):
        return "quantization_config.store_dtype is there"
    return None


def _why_not_compressed(found: dict[str, Any]) -> str | None:
    where, group = compressed_tensors.sole_group(found)
    weights = group["weights"]
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    for key, value in wanted.items():
        if weights.get(key) != value:
            return f"{where}.weights.{key} is {weights.get(key)!r}, not {value!r}"
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("block", "channel", "tensor") or (strategy == "block") != bool(block):
        return f"{where}.weights.strategy is {strategy!r} with block_structure {block!r}"
    if block and not _is_block(block):
        return f"{where}.weights.block_structure is {block!r}"
    return None


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size <= _LONGEST_BLOCK for size in block)
    )


def _block(found: Mapping[str, Any]) -> list[int] | None:
    """Rows and columns that share a factor, where all of a row or of a matrix do not."""
    if found["quant_method"] != compressed_tensors.METHOD:
        return found.get("weight_block_size")
    _, group = compressed_tensors.sole_group(dict(found))
    block: list[int] | None = group["weights"].get("block_structure")
    return block


def why_not_tensors(found: Mapping[str, Any], known: Mapping[str, TensorEntry]) -> str | None:
    """Why the products cannot be made of these tensors; None if they can."""
    for name, tensor in known.items():
        if tensor.dtype.startswith("F8"):
            if tensor.dtype != FLOAT or len(tensor.shape) != 2 or not name.endswith(_WEIGHT):
                return f"{name} is a tensor {list(tensor.shape)} of {tensor.dtype}, and no weight"
            if factors(found, tensor, known) is None:
                return f"{name} has no factors of the shape that quantization_config says"
        elif name.endswith(_WEIGHT) and tensor.dtype not in compressed_tensors.PLAIN:
            return f"{name} is of {tensor.dtype}, and not quantized as quantization_config says"
        if name.endswith((".k_scale", ".v_scale")):
            return f"{name} is there: a quantized KV cache is not computed here"
    return None


def factors(
    found: Mapping[str, Any], tensor: TensorEntry, known: Mapping[str, TensorEntry]
) -> Factors | None:
    """The factors of a weight; None if they are not there in the right shape."""
    if len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    stem = tensor.name.removesuffix(_WEIGHT)
    scale = next((known[stem + own] for own in _SCALES if stem + own in known), None)
    if scale is None or scale.dtype not in _FLOATS or not rows or not columns:
        return None
    block = _block(found)
    if block:
        wanted = (-(-rows // block[0]), -(-columns // block[1]))
        return Factors(scale, block[0], block[1]) if tuple(scale.shape) == wanted else None
    if tuple(scale.shape) in ((), (1,)):
        return Factors(scale, rows, columns)
    return Factors(scale, 1, columns) if tuple(scale.shape) == (rows, 1) else None


def is_unused(tensor: TensorEntry) -> bool:
    """Whether a tensor of such a checkpoint is no parameter of the model."""
    return tensor.name.endswith(_UNUSED)


def unused(tensors: Iterable[TensorEntry]) -> set[str]:
    """Names of the tensors of such a checkpoint that are no parameters of the model."""
    return {tensor.name for tensor in tensors if is_unused(tensor)}


def numbers(tensor: TensorEntry) -> int:
    """Weights that are in a tensor."""
    return math.prod(tensor.shape)


def widened(tensors: Iterable[TensorEntry], element: int) -> int:
    """Bytes that the products take besides, of `element` bytes each."""
    return sum(tensor.nbytes * (element - 1) for tensor in tensors if tensor.dtype == FLOAT)
