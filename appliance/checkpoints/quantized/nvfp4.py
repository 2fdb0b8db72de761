"""Weights in NVFP4 (ModelOpt, compressed-tensors): floats of 4 bits, of which 16 share a factor.

vLLM has no kernel for them on CPUs. So the model is served as if its checkpoint had the products,
in the type that it is computed in:

    ModelOpt            compressed-tensors
    NAME.weight         NAME.weight_packed        U8       [out, in / 2]   two floats in a byte
    NAME.weight_scale   NAME.weight_scale         F8_E4M3  [out, in / 16]  a factor for each 16
    NAME.weight_scale_2                           F32      one             a factor for all
                        NAME.weight_global_scale  F32      one             what all are divided by

Activations are not rounded to 4 bits, nor keys and values to 8, so their factors are not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from appliance.checkpoints.quantized import compressed_tensors
from appliance.checkpoints.safetensors import TensorEntry

METHOD: Final = "modelopt"
FORMAT: Final = "nvfp4-pack-quantized"
"""What compressed-tensors call it."""
BLOCK: Final = 16
"""Numbers that share a factor."""
BLOCK_BYTES: Final = 8

_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4")
_NUMBERS: Final = "U8"
_FACTORS: Final = "F8_E4M3"
_SCALE: Final = ".weight_scale"
_MULTIPLIER: Final = ".weight_scale_2"
_DIVISOR: Final = ".weight_global_scale"
_OWN: Final = ".weight"
_PACKED: Final = (compressed_tensors.PACKED, _OWN)
_OF_CACHE: Final = (".k_scale", ".v_scale")
_UNUSED: Final = (
    _SCALE, _MULTIPLIER, _DIVISOR, ".input_scale", ".input_global_scale", *_OF_CACHE,
)  # fmt: skip
_MOST_FILE_BYTES: Final = 1 << 20
_STORED: Final[dict[str, tuple[str | None, ...]]] = {
    "strategy": ("tensor_group", None),
    "scale_dtype": (None, "torch.float8_e4m3fn", "float8_e4m3fn"),
    "actorder": (None, "weight", "static"),
    "block_structure": (None,),
    "zp_dtype": (None, "torch.float8_e4m3fn", "float8_e4m3fn"),
}
"""What settings of compressed-tensors may be."""


class Layer(NamedTuple):
    """The tensors of a layer, whose products are ``[out, in]``."""

    name: str
    numbers: TensorEntry
    factors: TensorEntry
    whole: TensorEntry
    """The factor of all, or what all are divided by."""
    divides: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.numbers.shape
        return rows, columns * 2


def read_apart(file: Path) -> dict[str, Any] | None:
    """What ModelOpt says in a file of its own (``hf_quant_config.json``), if it is NVFP4; None if
    it is something else, or cannot be read."""
    try:
        if file.stat().st_size > _MOST_FILE_BYTES:
            return None
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return flat(found) if isinstance(found, dict) and is_of(found) else None


def is_of(found: Mapping[str, Any]) -> bool:
    """Whether this ``quantization_config`` is of such weights, as far as the method says."""
    if found.get("quant_method") == compressed_tensors.METHOD:
        return found.get("format") == FORMAT
    said = flat(found)
    return said["quant_method"] == METHOD and str(said.get("quant_algo")).upper() in _ALGORITHMS


def flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is said, of ModelOpt perhaps one level down (always in a file of its own), where no
    method need be named."""
    own = found.get("quantization")
    if isinstance(own, dict):
        return {**found, **own, "quant_method": found.get("quant_method", METHOD)}
    return {"quant_method": None, **found}


def why_not(found: dict[str, Any]) -> str | None:
    """Why weights of this ``quantization_config`` are not served; None if they are."""
    if found["quant_method"] == compressed_tensors.METHOD:
        if reason := compressed_tensors.why_not_whole(found):
            return reason
        where, group = compressed_tensors.sole_group(found)
        if group.get("format") not in (None, FORMAT):
            return f"{where}.format is {str(group['format'])[:80]!r}, not {FORMAT!r}"
        return _why_not_weights(where, group["weights"]) or _why_not_stored(
            f"{where}.weights", group["weights"]
        )
    if found.get("group_size") not in (None, BLOCK):
        return f"group_size is {found['group_size']!r}, not {BLOCK}"
    cache = found.get("kv_cache_scheme")
    said = (cache.get("type"), cache.get("num_bits")) if isinstance(cache, dict) else cache
    if said and said != ("float", 8):
        return f"quantization_config.kv_cache_scheme is {str(cache)[:80]}, not floats of 8 bits"
    if found.get("kv_cache_quant_algo") not in (None, "FP8"):
        return f"kv_cache_quant_algo is {found['kv_cache_quant_algo']!r}, not 'FP8'"
    groups = found.get("config_groups") or {}
    if not isinstance(groups, dict):
        return "quantization_config.config_groups is no table"
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{name[:80]}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            return f"{where}.weights is no table"
        if reason := _why_not_weights(where, weights):
            return reason
    return None


def _why_not_weights(where: str, weights: Mapping[str, Any]) -> str | None:
    wanted = {"num_bits": 4, "type": "float", "group_size": BLOCK}
    for key, value in wanted.items():
        if weights.get(key) != value:
            return f"{where}.weights.{key} is {weights.get(key)!r}, not {value!r}"
    if weights.get("symmetric") not in (None, True) or weights.get("dynamic") not in (None, False):
        return f"{where}.weights are not symmetric, or dynamic"
    return None


def _why_not_stored(where: str, weights: Mapping[str, Any]) -> str | None:
    """What compressed-tensors also says of how weights are stored."""
    if unknown := sorted(weights.keys() - compressed_tensors.SETTINGS):
        return f"{where}.{unknown[0][:80]} is not known"
    for key, served in _STORED.items():
        if weights.get(key) not in served:
            return f"{where}.{key} is {str(weights[key])[:80]!r}, which is not computed here"
    return None


def why_not_tensors(found: Mapping[str, Any], known: Mapping[str, TensorEntry]) -> str | None:
    """Why the products cannot be made of these tensors; None if they can."""
    compressed = found["quant_method"] == compressed_tensors.METHOD
    packed = _PACKED[0] if compressed else _PACKED[1]
    for name, tensor in known.items():
        if tensor.dtype == _NUMBERS and name.endswith(packed):
            if layer(tensor, known) is None:
                return f"{name} has no factors of the shape and type of NVFP4"
            if compressed and _stem(name) + _OWN in known:
                return f"{name} is there, and {_stem(name)}{_OWN}, too"
        elif compressed and name.endswith(_OF_CACHE):
            return f"{name} is there: a quantized KV cache is not computed here"
        elif name.endswith(_ELSEWISE):
            return f"{name} is there, which is not computed here"
        elif not name.endswith(_UNUSED) and tensor.dtype not in compressed_tensors.PLAIN:
            return f"{name} is of {tensor.dtype}, and not quantized as quantization_config says"
    return None


_ELSEWISE: Final = (".pre_quant_scale", ".weight_zero_point", ".weight_g_idx")


def layer(numbers: TensorEntry, known: Mapping[str, TensorEntry]) -> Layer | None:
    """The layer of a tensor of numbers. None where one of its tensors is missing, or has another
    shape or type."""
    stem = _stem(numbers.name)
    divides = numbers.name.endswith(_PACKED[0])
    factors = known.get(stem + _SCALE)
    whole = known.get(stem + (_DIVISOR if divides else _MULTIPLIER))
    if len(numbers.shape) != 2 or factors is None or whole is None:
        return None
    rows, columns = numbers.shape
    if not rows or not columns or columns % BLOCK_BYTES:
        return None
    if factors.dtype != _FACTORS or tuple(factors.shape) != (rows, columns // BLOCK_BYTES):
        return None
    if whole.dtype != "F32" or tuple(whole.shape) not in ((), (1,)):
        return None
    return Layer(stem + _OWN, numbers, factors, whole, divides)


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def is_packed(tensor: TensorEntry) -> bool:
    """Whether it has the numbers of a quantized layer."""
    return tensor.dtype == _NUMBERS and tensor.name.endswith(_PACKED)


def is_unused(tensor: TensorEntry) -> bool:
    """Whether a tensor of such a checkpoint is no parameter of the model."""
    return tensor.name.endswith(_UNUSED)


def unused(tensors: Iterable[TensorEntry]) -> set[str]:
    """Names of the tensors of such a checkpoint that are no parameters of the model."""
    return {tensor.name for tensor in tensors if is_unused(tensor)}


def numbers(tensor: TensorEntry) -> int:
    """Weights that are in a tensor: there are two in each byte."""
    return math.prod(tensor.shape) * (2 if is_packed(tensor) else 1)


def widened(tensors: Iterable[TensorEntry], element: int) -> int:
    """Bytes that the products take besides, of `element` bytes each."""
    return sum(one.nbytes * (2 * element - 1) for one in tensors if is_packed(one))
