"""Weights that are quantized: what ``config.json`` says of them, and which of them are served.

Integers of compressed-tensors are (`compressed_tensors`), floats of 8 and of 4 bits (`floats`,
`microscaled`, `nvfp4`), and GPTQ and AWQ in 4 bits, as vLLM's CPU kernel computes with them, or
with experts or 8 bits as their products (`integers`); all of them modules of this package:

    NAME.qweight  int32, eight numbers in each      GPTQ [in / 8, out]        AWQ [in, out / 8]
    NAME.scales   a factor for each group of rows   [in / group, out]
    NAME.qzeros   int32, what is zero in each group [in / group, out / 8]     unused by GPTQ here
    NAME.g_idx    the group of each row             unused, as groups lie in order
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from appliance.checkpoints.language_models import (
    MEDIA,
    computed_architecture,
    language_layer,
    served_architecture,
)
from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.quantized import (
    compressed_tensors,
    floats,
    integers,
    microscaled,
    nvfp4,
)
from appliance.checkpoints.quantized.compressed_tensors import FUSED
from appliance.checkpoints.safetensors import TensorEntry

QUANTIZATION_FILE: Final = "hf_quant_config.json"
"""Where some tools write how weights are quantized."""

GROUP_SIZES: Final = (-1, 32, 64, 128)
"""Rows that share a factor; -1: all."""
TRIED: Final = frozenset(
    {
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Exaone4ForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""Architectures that `tests/engine/test_quantized.py` serves with weights in 4 bits of GPTQ, AWQ or
compressed-tensors, which share a kernel, and with those of compressed-tensors in 8 bits."""

FLOATS_TRIED: Final = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "LlamaForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures that `tests/engine/test_floats.py` serves with weights in floats of 8 bits."""

NUMBERS: Final = 8
"""Weights in an element of a ``qweight``."""
_MULTIPLE: Final = 32
"""What the kernel wants the rows and the columns of a layer to be a multiple of."""
_KEYS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "gptq": {"bits": ("bits",), "group_size": ("group_size",), "zeros": ("sym",)},
    "awq": {
        "bits": ("w_bit", "bits"),
        "group_size": ("q_group_size", "group_size"),
        "zeros": ("zero_point",),
    },
}
"""What vLLM wants to be said, by each of its names."""


MICROSCALED_TRIED: Final = frozenset({"GptOssForCausalLM"})
"""Architectures that `tests/engine/test_microscaled.py` serves with weights in MXFP4."""


NVFP4_TRIED: Final = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures that `tests/engine/test_nvfp4.py` serves with weights in NVFP4."""


EXPERTS_TRIED: Final = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures with experts that `tests/engine/test_integers.py` serves with weights in 4 bits,
and in W8A8."""


EIGHT_BITS_TRIED: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures that `tests/engine/test_integers.py` serves with weights in 8 bits of GPTQ."""


class _Products(Protocol):
    """How the tensors of a checkpoint lie whose weights are multiplied as they are read."""

    def unused(self, tensors: Iterable[TensorEntry], /) -> set[str]:
        """Names of those that are no parameters of the model."""

    def numbers(self, tensor: TensorEntry, /) -> int:
        """Weights that are in one."""

    def widened(self, tensors: Iterable[TensorEntry], element: int, /) -> int:
        """Bytes that the products take besides, of `element` bytes each."""


def quantization(config: ModelConfig) -> dict[str, Any] | None:
    """What the file says of weights that are computed as they are quantized; None if they are not
    quantized, or `multiplied`."""
    found = said(config)
    return found if found is None or _products(config) is None else None


def multiplied(config: ModelConfig) -> dict[str, Any] | None:
    """What is said of weights that are multiplied by their factors as they are read: floats
    of 8 or 4 bits, weights in 4 bits or W8A8 of a model with experts, and GPTQ's in 8 bits. None if
    they are not."""
    return said(config) if _products(config) is not None else None


def tried(config: ModelConfig) -> frozenset[str]:
    """The architectures that tests serve with weights that are quantized in this way."""
    found = said(config) or {}
    media = MEDIA.get(config.architecture)
    if media is not None and media.adapted:
        return frozenset()
    if floats.is_of(found):
        return FLOATS_TRIED
    if microscaled.is_of(found):
        return MICROSCALED_TRIED
    if nvfp4.is_of(found):
        return frozenset() if media is not None else NVFP4_TRIED
    if _is_gptq_of_eight(found):
        return frozenset() if media is not None else EIGHT_BITS_TRIED
    if not integers.is_of(found) or (media is not None and integers.per_word(found) == 1):
        return TRIED
    return TRIED | EXPERTS_TRIED


def forget(config: Any) -> None:
    """Have vLLM not see that weights are to be multiplied, in transformers' configuration: neither
    in that of the whole nor in that of its language model."""
    text = config.get_text_config()
    (architecture, *_) = getattr(config, "architectures", None) or ("",)
    served = computed_architecture(architecture, getattr(text, "model_type", ""))
    places = [(part, name) for part in (config, text) for name in _SAID_IN]
    for part, name in places:
        found = getattr(part, name, None)
        if found and isinstance(found, dict):
            if _multiplying(found, served) is not None:
                for other, key in places:
                    vars(other).pop(key, None)
            return


def _products(config: ModelConfig) -> _Products | None:
    """How the products are made, if weights are multiplied as they are read."""
    found = said(config)
    return None if found is None else _multiplying(found, served_architecture(config))


def _multiplying(found: Mapping[str, Any], architecture: str) -> _Products | None:
    if floats.is_of(found):
        return floats
    if microscaled.is_of(found):
        return microscaled
    if nvfp4.is_of(found):
        return nvfp4
    architectures = EIGHT_BITS_TRIED if _is_gptq_of_eight(found) else EXPERTS_TRIED
    if architecture not in architectures or not integers.is_of(found):
        return None
    return integers.Words(integers.per_word(found))


def _is_gptq_of_eight(found: Mapping[str, Any]) -> bool:
    return found.get("quant_method") == integers.GPTQ and found.get("bits") == 8


def said(config: ModelConfig) -> dict[str, Any] | None:
    """What the file says of quantized weights, or ModelOpt's own file of NVFP4; None if they are
    not. Layers of a language model that are not have the names by which it is served alone."""
    for values in (config.whole, config.text):
        for name in _SAID_IN:
            found = values.get(name)
            if found and isinstance(found, dict):
                found = nvfp4.flat(found) if nvfp4.is_of(found) else found
                return {key: _named(value, key, config) for key, value in found.items()}
    return nvfp4.read_apart(config.path / QUANTIZATION_FILE)


def _named(value: Any, key: str, config: ModelConfig) -> Any:
    if key not in _LEFT_OUT_NAMES or not isinstance(value, list):
        return value
    architecture = config.architecture
    return [language_layer(n, architecture) if isinstance(n, str) else n for n in value]


_SAID_IN: Final = ("quantization_config", "compression_config")
"""Where a file says it: the first that is there holds."""
_LEFT_OUT_NAMES: Final = ("ignore", "modules_to_not_convert")
"""Lists of layers that are not quantized."""


def needs_several_tensors(config: ModelConfig) -> bool:
    """Whether weights are integers or NVFP4 that are multiplied as they are read."""
    products = _products(config)
    return products is nvfp4 or isinstance(products, integers.Words)


def rounds_activations(config: ModelConfig) -> bool:
    """Whether weights and activations are integers of 8 bits."""
    found = quantization(config)
    if found is None or method_of(found) != compressed_tensors.METHOD:
        return False
    if compressed_tensors.why_not_whole(found):
        return False
    _, group = compressed_tensors.sole_group(found)
    return bool(group.get("input_activations"))


def has_four_bits(config: ModelConfig) -> bool:
    """Whether weights in 4 bits are computed as they are stored."""
    return quantization(config) is not None and not rounds_activations(config)


def method_of(found: dict[str, Any]) -> str:
    """The name of the method by which weights are quantized."""
    return str(found.get("quant_method", "an unnamed method"))


def why_not(config: ModelConfig) -> str | None:
    """Why the model's weights are not served as they are quantized. None if they are, or are not
    quantized at all."""
    found = said(config)
    if found is None:
        file = (config.path / QUANTIZATION_FILE).exists()
        return f"its weights are quantized ({QUANTIZATION_FILE})" if file else None
    method = method_of(found)
    if reason := _why_not_names(found):
        return f"its weights are quantized ({method}: {reason})"
    if floats.is_of(found):
        reason = floats.why_not(found)
    elif microscaled.is_of(found):
        reason = microscaled.why_not(found)
    elif nvfp4.is_of(found):
        reason = nvfp4.why_not(found)
    elif method == compressed_tensors.METHOD:
        reason = compressed_tensors.why_not(found)
    elif method in _KEYS:
        reason = _why_not(method, found)
    else:
        return f"its weights are quantized ({method})"
    if reason is None and method == "gptq":
        reason = _why_not_parts(found)
    return reason and f"its weights are quantized ({method}: {reason})"


def _why_not_names(found: dict[str, Any]) -> str | None:
    """Of any method: what lists and patterns are for some layers only."""
    for key in (*_LEFT_OUT_NAMES, _BLOCKS):
        names = found.get(key)
        if names is None:
            continue
        if key == _BLOCKS and isinstance(names, list):  # may have lists of names, too
            names = [n for one in names for n in (one if isinstance(one, list) else [one])]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return f"quantization_config.{key} is no list of names"
        if len(names) > compressed_tensors.MOST_NAMES:
            most = compressed_tensors.MOST_NAMES
            return f"quantization_config.{key} has more than {most} names"
    if not isinstance(found.get("dynamic") or {}, dict):
        return "quantization_config.dynamic is no table of patterns"
    return None


_BLOCKS: Final = "modules_in_block_to_quantize"


def _why_not(method: str, found: dict[str, Any]) -> str | None:
    said = {key: _said(found, key) for key in _KEYS[method]}
    for key, names in _KEYS[method].items():
        if said[key] is None:
            return f"config.json does not say {names[-1]}"
        if type(said[key]) is not (bool if key == "zeros" else int):
            return f"{names[-1]} is {said[key]!r}"
    bits = (4, 8) if method == integers.GPTQ else (4,)
    if said["bits"] not in bits:
        known = " or ".join(map(str, bits))
        return f"{said['bits']} bits, not {known}, for which vLLM has no kernel on CPUs"
    if said["group_size"] not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        return f"groups of {said['group_size']} rows, not one of {sizes}"
    if said["zeros"] is not True:
        return "not symmetric" if method == "gptq" else "without zero points"
    if found.get("lm_head"):
        return "the output head, too"
    if method == "gptq":
        if "desc_act" not in found:
            return "config.json does not say desc_act"
        if found["desc_act"] and said["group_size"] != -1:
            return "groups in the order of activations, desc_act"
        form = found.get("checkpoint_format") or "gptq"
        return None if form in ("gptq", "gptq_v2") else f"stored as {form}"
    version = str(found.get("version") or "gemm").lower()
    return None if version == "gemm" else f"stored as {version}"


def _said(found: dict[str, Any], key: str) -> Any:
    """What is said of a key, by the first of its names that is there. None if nothing is."""
    names = _KEYS[method_of(found)][key]
    return next((found[name] for name in names if name in found), None)


def _why_not_parts(found: dict[str, Any]) -> str | None:
    """Of GPTQ, which may treat some layers in another way: those that a pattern is for. vLLM
    matches each pattern with the name of each layer, so patterns are to be plain."""
    rules = found.get("dynamic") or {}
    if not isinstance(rules, dict) or len(rules) > _MOST_RULES:
        return f"dynamic is no table of at most {_MOST_RULES} patterns"
    for pattern in rules:
        if not _LEFT_OUT.fullmatch(pattern) or pattern.count("*") > _MOST_STARS:
            return f"the rule {pattern[:80]!r} for some of its layers"
    return None


_MOST_RULES: Final = 64
_MOST_STARS: Final = 3
_LEFT_OUT: Final = re.compile(r"-:\^?(\w|\.\*?|\\\.)+\$?", re.ASCII)
"""A rule by which layers are not quantized, of literal text and ``.*``."""


def why_not_tensors(config: ModelConfig, tensors: Iterable[TensorEntry]) -> str | None:
    """Why these tensors cannot be computed with; None if they can."""
    found = said(config)
    known = {tensor.name: tensor for tensor in tensors}
    if found is not None and floats.is_of(found):
        return floats.why_not_tensors(found, known)
    if found is not None and microscaled.is_of(found):
        return microscaled.why_not_tensors(known)
    if found is not None and nvfp4.is_of(found):
        return nvfp4.why_not_tensors(found, known)
    if found is None or multiplied(config) is None:
        return _why_not_integers(found, known)
    # What is not quantized is seen from the tensors: the names in the list are parts of others.
    found = {**found, "modules_to_not_convert": None}
    return _why_not_integers(found, known) or integers.why_not_tensors(found, known)


def _why_not_integers(found: dict[str, Any] | None, known: Mapping[str, TensorEntry]) -> str | None:
    if found is not None and method_of(found) == compressed_tensors.METHOD:
        return compressed_tensors.why_not_tensors(found, known)
    layers = [name.removesuffix(_WORDS) for name in known if name.endswith(_WORDS)]
    if layers and found is None:
        return f"{layers[0]}{_WORDS} is quantized, and config.json does not say how"
    for layer in layers:
        if reason := _why_not_layer(found or {}, layer, known) or _why_not_alone(layer, known):
            return reason
    return None


_WORDS: Final = "qweight"


def _why_not_layer(
    found: dict[str, Any], layer: str, known: Mapping[str, TensorEntry]
) -> str | None:
    words = known[f"{layer}{_WORDS}"]
    if len(words.shape) != 2 or words.dtype != "I32":
        return f"{words.name} is no matrix of 32-bit words"
    if layer.endswith("lm_head."):
        return f"{words.name} is the output head"
    left_out = found.get("modules_to_not_convert") or ()
    if isinstance(left_out, list) and any(str(part) in layer for part in left_out):
        return f"{words.name} is quantized, and config.json says that it is not"
    gptq = method_of(found) == "gptq"
    rows, columns = words.shape
    each = integers.per_word(found)
    rows, columns = (rows * each, columns) if gptq else (rows, columns * each)
    if not rows or not columns or rows % _MULTIPLE or columns % _MULTIPLE:
        return (
            f"{words.name} has {rows} rows and {columns} columns, which are no multiples of "
            f"{_MULTIPLE}"
        )
    size = _said(found, "group_size")
    group = rows if size == -1 else size
    if rows % group:
        return f"{words.name} has {rows} rows, which are no multiple of its groups of {group}"
    wanted = {"scales": (rows // group, columns), "qzeros": (rows // group, columns // each)}
    for own, shape in wanted.items():
        tensor = known.get(f"{layer}{own}")
        if tensor is None or tuple(tensor.shape) != shape:
            return f"{layer}{own} is not there with the shape {list(shape)} of its {words.name}"
    return None


def _why_not_alone(layer: str, known: Mapping[str, TensorEntry]) -> str | None:
    """vLLM makes one layer of some: all of them are quantized, or none."""
    stem, _, own = layer.removesuffix(".").rpartition(".")
    for together in FUSED.values():
        if own in together:
            for other in together:
                if f"{stem}.{other}.weight" in known:
                    return f"{layer}{_WORDS} is quantized, and {stem}.{other} is not"
    return None


def linear_shapes(
    config: ModelConfig, tensors: Iterable[TensorEntry]
) -> dict[str, tuple[int, ...]]:
    """Of the weight of each layer, by the layer's name: [out, in] of a linear one, quantized or
    not."""
    found = quantization(config)
    gptq = found is not None and method_of(found) == "gptq"
    shapes = {}
    for tensor in tensors:
        layer, _, own = tensor.name.rpartition(".")
        if own == "weight":
            shapes[layer] = tuple(tensor.shape)
        elif len(tensor.shape) == 2 and tensor.name.endswith(_PACKED):
            first, second = tensor.shape
            if own == "weight_packed":
                shapes[layer] = (first, second * NUMBERS)
            else:
                shapes[layer] = (second, first * NUMBERS) if gptq else (second * NUMBERS, first)
    return shapes


def unused(config: ModelConfig, tensors: Iterable[TensorEntry]) -> set[str]:
    """Names of the tensors that engines read nothing of, as the weights are quantized.

    Tools store a bias, of zeros, for quantized layers that have none. Which do have one is not
    known here, so none is counted.
    """
    if (products := _products(config)) is not None:
        return products.unused(tensors)
    found = quantization(config)
    if found is None:
        return set()
    names = {tensor.name for tensor in tensors}
    if method_of(found) == compressed_tensors.METHOD:
        return {name for name in names if name.endswith(compressed_tensors.SHAPE)}
    endings = (".g_idx", ".qzeros") if method_of(found) == "gptq" else (".g_idx",)
    return {
        name
        for name in names
        if name.endswith(endings)
        or (name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in names)
    }


def widened_bytes(config: ModelConfig, tensors: Iterable[TensorEntry], element: int) -> int:
    """Bytes that tensors take besides where numbers have `element` bytes: floats of 8 or 4 bits
    become such numbers, and the factors of integers of 8 bits stay in float32."""
    if (products := _products(config)) is not None:
        return products.widened(tensors, element)
    found = quantization(config)
    if found is None or method_of(found) != compressed_tensors.METHOD:
        return 0
    known = {tensor.name: tensor for tensor in tensors}
    return sum(
        math.prod(tensor.shape) * (4 - element)
        for name, tensor in known.items()
        if name.endswith(compressed_tensors.SCALE)
        and f"{name.removesuffix(compressed_tensors.SCALE)}.weight" in known
    )


def parameters(config: ModelConfig, tensors: Iterable[TensorEntry]) -> int:
    """Weights of the model, however many of them are in an element of a tensor."""
    if (products := _products(config)) is not None:
        tensors = list(tensors)
        left_out = products.unused(tensors)
        return sum(products.numbers(one) for one in tensors if one.name not in left_out)
    quantized = quantization(config) is not None
    return sum(
        math.prod(tensor.shape) * (NUMBERS if tensor.name.endswith(_PACKED) else 1)
        for tensor in tensors
        if not (quantized and tensor.name.endswith(_BESIDES))
    )


_PACKED: Final = (".qweight", compressed_tensors.PACKED)
_BESIDES: Final = (
    ".qzeros", ".scales", ".g_idx",
    compressed_tensors.SCALE, compressed_tensors.SHAPE, compressed_tensors.ZEROS,
)  # fmt: skip
