"""Models with experts whose weights are integers of 4 bits (GPTQ, AWQ, compressed-tensors' W4A16)
or of 8 bits (its W8A8), and models whose weights are integers of 8 bits (GPTQ).

vLLM's CPU kernels for such experts need AMX, and it has none for GPTQ in 8 bits. So the whole model
is served as if its checkpoint had the products, (number - zero) * scale, in the type that it is
computed in. Activations are then not rounded to 8 bits. Which tensors a layer has is said in the
modules `quantization` and `compressed_tensors` of this package.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from appliance.checkpoints.quantized import compressed_tensors
from appliance.checkpoints.safetensors import TensorEntry

NUMBERS: Final = 8
"""Weights of 4 bits in a word of 32."""
GPTQ: Final = "gptq"
AWQ: Final = "awq"
_INTEGERS: Final = "I32"
_FLOATS: Final = ("F32", "F16", "BF16")
_EXPERT: Final = ".experts."


class _Endings(NamedTuple):
    """Of the names of a layer's tensors."""

    words: str
    scales: str
    zeros: str
    order: str
    """Of what is not read: of the shape, or of the order of groups."""

    @property
    def besides(self) -> tuple[str, ...]:
        return self.scales, self.zeros, self.order


_OWN: Final = _Endings(".qweight", ".scales", ".qzeros", ".g_idx")
"""Of GPTQ and AWQ."""
_COMPRESSED: Final = _Endings(
    compressed_tensors.PACKED,
    compressed_tensors.SCALE,
    compressed_tensors.ZEROS,
    compressed_tensors.SHAPE,
)
_WORDS: Final = (_OWN.words, _COMPRESSED.words)
_SINGLE: Final = _COMPRESSED._replace(words=".weight")
"""Of compressed-tensors' W8A8, which has each number in an element of its own."""
_SINGLE_TYPE: Final = "I8"


class Layer(NamedTuple):
    """The tensors of a quantized layer, whose products are ``[out, in]``."""

    name: str
    words: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    """None if the middle is the zero of all: 8 or 128, or 0 of what has a sign."""
    shape: tuple[int, int]
    each: int
    """Weights in a word; 1 if each has an element of its own."""


class Words(NamedTuple):
    """How the tensors of a checkpoint lie that has `each` weights in a word."""

    each: int

    def unused(self, tensors: Iterable[TensorEntry], /) -> set[str]:
        return unused(tensors)

    def numbers(self, tensor: TensorEntry, /) -> int:
        return math.prod(tensor.shape) * (self.each if tensor.name.endswith(_WORDS) else 1)

    def widened(self, tensors: Iterable[TensorEntry], element: int, /) -> int:
        endings = _WORDS if self.each > 1 else (_SINGLE.words,)
        kinds = (_INTEGERS, _SINGLE_TYPE)
        words = (one for one in tensors if one.name.endswith(endings) and one.dtype in kinds)
        return sum(self.numbers(tensor) * element - tensor.nbytes for tensor in words)


def per_word(found: Mapping[str, Any]) -> int:
    """Weights in an element, by a ``quantization_config`` of integers: a word of 32 bits, or, of
    W8A8, a single number."""
    if _compressed_bits(found) == 8:
        return 1
    eight = found.get("quant_method") == GPTQ and found.get("bits") == 8
    return NUMBERS // 2 if eight else NUMBERS


def is_of(found: Mapping[str, Any]) -> bool:
    """Whether this ``quantization_config`` is of weights in such integers, as far as the method
    says."""
    if found.get("quant_method") != compressed_tensors.METHOD:
        return found.get("quant_method") in (GPTQ, AWQ)
    return _compressed_bits(found) in (4, 8)


def _compressed_bits(found: Mapping[str, Any]) -> int | None:
    """Of compressed-tensors' integers; None of all others."""
    if found.get("quant_method") != compressed_tensors.METHOD:
        return None
    if compressed_tensors.why_not_whole(dict(found)):
        return None
    weights = compressed_tensors.sole_group(dict(found))[1]["weights"]
    bits = weights.get("num_bits")
    return bits if weights.get("type") == "int" and type(bits) is int else None


def has_words(found: Mapping[str, Any], tensor: TensorEntry) -> bool:
    """Whether it has the numbers of a quantized layer."""
    own = _endings(found)
    return tensor.name.endswith(own.words) and (own is not _SINGLE or tensor.dtype == _SINGLE_TYPE)


def why_not_tensors(found: Mapping[str, Any], known: Mapping[str, TensorEntry]) -> str | None:
    """Why the products cannot be made of these tensors, of which each has its shape; None if they
    can."""
    own = _endings(found)
    others = {ending for form in (_OWN, _COMPRESSED) for ending in form} - set(own)
    for tensor in known.values():
        if tensor.name.endswith(tuple(others)):
            return f"{tensor.name} is there, which {found['quant_method']} does not have"
        if has_words(found, tensor) and layer(found, tensor, known) is None:
            return f"{tensor.name} lacks scales or zeros, or these have another type than theirs"
    return None


def layer(
    found: Mapping[str, Any], words: TensorEntry, known: Mapping[str, TensorEntry]
) -> Layer | None:
    """The layer of a tensor of words. None where one of its tensors is missing, has another type,
    or is no matrix."""
    own, stem = _endings(found), words.name.rpartition(".")[0]
    scales, zeros = known.get(stem + own.scales), known.get(stem + own.zeros)
    method = found["quant_method"]
    if method == GPTQ:  # the middle is the zero of all, whatever is stored
        zeros = None
    if scales is None or (zeros is None and method == AWQ):
        return None
    kind = _SINGLE_TYPE if own is _SINGLE else _INTEGERS
    types = [(words, (kind,)), (scales, _FLOATS)]
    types += [] if zeros is None else [(zeros, (_INTEGERS,))]
    if any(one.dtype not in kinds or len(one.shape) != 2 for one, kinds in types):
        return None
    rows, columns = words.shape
    each = per_word(found)
    shape = (rows, columns * each)
    if method == GPTQ:
        shape = (columns, rows * each)
    elif method == AWQ:
        shape = (columns * each, rows)
    return Layer(f"{stem}.weight", words, scales, zeros, shape, each)


def is_unused(found: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor of such a checkpoint is no parameter of any model: experts have no bias, but
    tools may store one of zeros, which some of vLLM's loaders find no place for."""
    return _is_unused(name, _endings(found).besides)


def _is_unused(name: str, besides: tuple[str, ...]) -> bool:
    return name.endswith(besides) or (name.endswith(".bias") and _EXPERT in name)


def _endings(found: Mapping[str, Any]) -> _Endings:
    if found["quant_method"] != compressed_tensors.METHOD:
        return _OWN
    return _COMPRESSED if per_word(found) > 1 else _SINGLE


def unused(tensors: Iterable[TensorEntry]) -> set[str]:
    """Names of the tensors of such a checkpoint that are no parameters of the model, or none that
    is counted: tools store a bias, of zeros, for quantized layers that have none."""
    names = {tensor.name for tensor in tensors}
    besides = (*_OWN.besides, *_COMPRESSED.besides)
    return {
        name
        for name in names
        if _is_unused(name, besides)
        or (name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in names)
    }
