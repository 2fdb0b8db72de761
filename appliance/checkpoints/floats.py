"""Weights in floats of 8 bits, which are multiplied by their factors as they are read.

vLLM's CPU kernels for them need AMX. So the model is served as if its checkpoint had the products,
in the type that it is computed in:

    NAME.weight            F8_E4M3  [out, in]
    NAME.weight_scale_inv  a factor for each block of it             [out / rows, in / columns]
    NAME.weight_scale      the same; or for each row, or all of it   [out, 1], [1] or []
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

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
    return found.get("quant_method") == "fp8"


def why_not(found: Mapping[str, Any]) -> str | None:
    """Why weights of this ``quantization_config`` are not served; None if they are."""
    if found.get("activation_scheme") not in ("dynamic", "static"):
        return f"quantization_config.activation_scheme is {found.get('activation_scheme')!r}"
    block = found.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size <= _LONGEST_BLOCK for size in block)
    ):
        return f"quantization_config.weight_block_size is {block!r}"
    for key, known in (("fmt", (None, "e4m3", "float8_e4m3fn")), ("scale_fmt", (None,))):
        if found.get(key) not in known:
            return f"quantization_config.{key} is {found[key]!r}"
    if found.get("store_dtype"):
        return "quantization_config.store_dtype is there"
    return None


def why_not_tensors(found: Mapping[str, Any], known: Mapping[str, TensorEntry]) -> str | None:
    """Why the products cannot be made of these tensors; None if they can."""
    for name, tensor in known.items():
        if tensor.dtype.startswith("F8"):
            if tensor.dtype != FLOAT or len(tensor.shape) != 2 or not name.endswith(_WEIGHT):
                return f"{name} is a tensor {list(tensor.shape)} of {tensor.dtype}, and no weight"
            if factors(found, tensor, known) is None:
                return f"{name} has no factors of the shape that quantization_config says"
        if name.endswith((".k_scale", ".v_scale")):
            return f"{name} is there: a quantized KV cache is not computed here"
    return None


def factors(
    found: Mapping[str, Any], tensor: TensorEntry, known: Mapping[str, TensorEntry]
) -> Factors | None:
    """The factors of a weight; None if they are not there in the right shape."""
    rows, columns = tensor.shape
    stem = tensor.name.removesuffix(_WEIGHT)
    scale = next((known[stem + own] for own in _SCALES if stem + own in known), None)
    if scale is None or scale.dtype not in _FLOATS or not rows or not columns:
        return None
    block = found.get("weight_block_size")
    if block:
        wanted = (-(-rows // block[0]), -(-columns // block[1]))
        return Factors(scale, block[0], block[1]) if tuple(scale.shape) == wanted else None
    if tuple(scale.shape) in ((), (1,)):
        return Factors(scale, rows, columns)
    return Factors(scale, 1, columns) if tuple(scale.shape) == (rows, 1) else None


def is_unused(tensor: TensorEntry) -> bool:
    """Whether a tensor of such a checkpoint is no parameter of the model."""
    return tensor.name.endswith(_UNUSED)


def widened(tensors: Iterable[TensorEntry], element: int) -> int:
    """Bytes that the products take besides, of `element` bytes each."""
    return sum(tensor.nbytes * (element - 1) for tensor in tensors if tensor.dtype == FLOAT)


def forget(config: Any) -> None:
    """Have vLLM not see that weights are floats of 8 bits, in transformers' configuration."""
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and is_of(found):
        del config.quantization_config
