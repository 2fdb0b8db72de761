"""Weights in MXFP4, as gpt-oss is published: floats of 4 bits, of which 32 share a power of two.

vLLM's CPU kernel for them needs AMX. So the model is served as if its checkpoint had the products,
in the type that it is computed in:

    NAME_blocks  U8  [experts, out, in / 32, 16]  two floats (e2m1) in a byte, the lower bits first
    NAME_scales  U8  [experts, out, in / 32]      s, of the power 2^(s - 127); 255 is no number
    NAME             [experts, in, out]           the products, as a checkpoint in bfloat16 has them
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from appliance.checkpoints.quantized import compressed_tensors
from appliance.checkpoints.safetensors import TensorEntry

METHOD: Final = "mxfp4"
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"
BLOCK: Final = 32
"""Numbers that share a power."""
BLOCK_BYTES: Final = 16
_STORED: Final = "U8"
_EXPERTS: Final = tuple(f".mlp.experts.{own}" for own in ("gate_up_proj", "down_proj"))


def is_of(found: Mapping[str, Any]) -> bool:
    """Whether this ``quantization_config`` is of such weights."""
    return found.get("quant_method") == METHOD


def why_not(found: dict[str, Any]) -> str | None:
    """Why weights of this ``quantization_config`` are not served; None if they are."""
    if unknown := sorted(found.keys() - _KNOWN):
        return f"quantization_config.{unknown[0][:80]} is not known"
    return None


_KNOWN: Final = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
"""Keys of which none says how numbers lie: the tensors show it."""


def why_not_tensors(known: Mapping[str, TensorEntry]) -> str | None:
    """Why the products cannot be made of these tensors; None if they can."""
    for name, tensor in known.items():
        if tensor.dtype in compressed_tensors.PLAIN:
            continue
        if tensor.dtype != _STORED or not name.endswith((BLOCKS, SCALES)):
            return f"{name} is of {tensor.dtype}, and not quantized as quantization_config says"
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if not stem.endswith(_EXPERTS):
            return f"{name} is of no experts: only their weights are computed here"
        if stem in known:
            return f"{name} is there, and {stem}, too"
        if _has_blocks(tensor) and scales_of(tensor, known) is None:
            return f"{name} is no tensor of blocks with as many scales"
        if stem + BLOCKS not in known:
            return f"{name} is there without {stem}{BLOCKS}"
    return None


def scales_of(tensor: TensorEntry, known: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """The scales of a tensor of blocks. None if it has no blocks, or not the scales of its
    shape."""
    scales = known.get(tensor.name.removesuffix(BLOCKS) + SCALES)
    if (
        not _has_blocks(tensor)
        or len(tensor.shape) != 4
        or tensor.shape[-1] != BLOCK_BYTES
        or not math.prod(tensor.shape)
        or scales is None
        or scales.dtype != _STORED
        or tuple(scales.shape) != tuple(tensor.shape[:-1])
    ):
        return None
    return scales


def shape_of(tensor: TensorEntry) -> tuple[int, int, int]:
    """The shape of the products of a tensor of blocks, in their order: ``[experts, out, in]``."""
    experts, out, count, _ = tensor.shape
    return experts, out, count * BLOCK


def is_unused(tensor: TensorEntry) -> bool:
    """Whether a tensor of such a checkpoint is no parameter of the model."""
    return tensor.dtype == _STORED and tensor.name.endswith(SCALES)


def unused(tensors: Iterable[TensorEntry]) -> set[str]:
    """Names of the tensors of such a checkpoint that are no parameters of the model."""
    return {tensor.name for tensor in tensors if is_unused(tensor)}


def numbers(tensor: TensorEntry) -> int:
    """Weights that are in a tensor: there are two in each byte of a block."""
    return math.prod(tensor.shape) * (2 if _has_blocks(tensor) else 1)


def widened(tensors: Iterable[TensorEntry], element: int) -> int:
    """Bytes that the products take besides, of `element` bytes each."""
    return sum(one.nbytes * (2 * element - 1) for one in tensors if _has_blocks(one))


def _has_blocks(tensor: TensorEntry) -> bool:
    return tensor.dtype == _STORED and tensor.name.endswith(BLOCKS)
