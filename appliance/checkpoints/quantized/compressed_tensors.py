"""Weights as compressed-tensors has them (llm-compressor): which of them are served on the CPU.

W4A16   NAME.weight_packed  int32, eight numbers of a row in each     [out, in / 8]
        NAME.weight_scale   a factor for each group of a row          [out, in / group]
        NAME.weight_shape   two numbers, unused
W8A8    NAME.weight         int8                                      [out, in]
        NAME.weight_scale   a factor for each row                     [out, 1]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from appliance.checkpoints.safetensors import TensorEntry

METHOD: Final = "compressed-tensors"
GROUP_SIZES: Final = (32, 64, 128)
"""Numbers of a row that share a factor, where not all of them do."""
NUMBERS: Final = 8
"""Weights in an element of what is packed."""
PACKED: Final = ".weight_packed"
SCALE: Final = ".weight_scale"
SHAPE: Final = ".weight_shape"
ZEROS: Final = ".weight_zero_point"

_WEIGHT: Final = ".weight"
_MULTIPLE: Final = 32
"""What the kernel for 4 bits wants the rows and the columns of a layer to be a multiple of."""
_FORMATS: Final = {4: "pack-quantized", 8: "int-quantized"}
"""By bits: how weights are stored."""

_Said = dict[str, Any]

_ACTIVATIONS: Final[_Said] = {"num_bits": 8, "type": "int", "strategy": "token"}
SETTINGS: Final = frozenset(
    {
        "actorder",
        "block_structure",
        "dynamic",
        "group_size",
        "num_bits",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "strategy",
        "symmetric",
        "type",
        "zp_dtype",
    }
)
_ELSEWHERE: Final = ("kv_cache_scheme", "transform_config")
"""What else may be computed in another way."""


def why_not(found: _Said) -> str | None:
    """Why weights of this ``quantization_config`` are not served; None if they are."""
    if reason := why_not_whole(found):
        return reason
    where, group = sole_group(found)
    return (
        _why_not_group(where, group)
        or _why_not_format(found, group)
        or _why_not_ignored(found.get("ignore") or [])
    )


def why_not_whole(found: _Said) -> str | None:
    """Why it is not served, whatever numbers its weights are: it quantizes more than weights, or
    has not one group of layers."""
    for name in _ELSEWHERE:
        if found.get(name):
            return f"quantization_config.{name} is there, which is not computed here"
    sparsity = found.get("sparsity_config")
    if sparsity and (
        not isinstance(sparsity, dict)
        or sparsity.get("format") != "dense"
        or sparsity.get("targets")
    ):
        return "quantization_config.sparsity_config is there: sparse weights are not computed"
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        count = len(groups) if isinstance(groups, dict) else "no"
        return f"quantization_config.config_groups has {count} groups, not one"
    where, group = sole_group(found)
    if not isinstance(group, dict):
        return f"{where} is no table"
    if group.get("targets") != ["Linear"]:
        return f'{where}.targets is not ["Linear"]'
    if group.get("output_activations"):
        return f"{where}.output_activations is there, which is not computed here"
    return None if isinstance(group.get("weights"), dict) else f"{where}.weights is no table"


def sole_group(found: _Said) -> tuple[str, _Said]:
    """The group of layers that are quantized, and what to call it."""
    ((name, group),) = found["config_groups"].items()
    return f"quantization_config.config_groups.{name[:80]}", group


def _why_not_group(where: str, group: _Said) -> str | None:
    weights, inputs = group["weights"], group.get("input_activations")
    if reason := _why_not_settings(f"{where}.weights", weights, dynamic=False):
        return reason
    bits, strategy, size = (weights.get(key) for key in ("num_bits", "strategy", "group_size"))
    if bits == 4:
        if inputs:
            return f"{where}.input_activations is there: 4 bits are computed without"
        if strategy == "group":
            if type(size) is int and size in GROUP_SIZES:
                return None
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"{where}.weights.group_size is {size}, not one of {sizes}"
    elif not isinstance(inputs, dict):
        return (
            f"{where}.input_activations is not there: vLLM has no kernel on CPUs that multiplies "
            "8 bits with plain activations"
        )
    if strategy != "channel" or size not in (None, -1):
        return f"{where}.weights.strategy is {strategy!r} with group_size {size}"
    if bits == 4:
        return None
    assert isinstance(inputs, dict)
    inputs_at = f"{where}.input_activations"
    if reason := _why_not_settings(inputs_at, inputs, dynamic=True):
        return reason
    for key, value in _ACTIVATIONS.items():
        if inputs.get(key) != value:
            return f"{inputs_at}.{key} is {inputs.get(key)!r}, not {value!r}"
    return None


def _why_not_settings(where: str, said: _Said, *, dynamic: bool) -> str | None:
    """What holds for weights and for activations."""
    if unknown := sorted(said.keys() - SETTINGS):
        return f"{where}.{unknown[0][:80]} is not known"
    if said.get("type") == "float":
        return f"{where}.type is 'float', for which vLLM's CPU kernels need AMX"
    if said.get("type") != "int":
        return f"{where}.type is {said.get('type')!r}, not 'int'"
    if type(said.get("num_bits")) is not int or said["num_bits"] not in _FORMATS:
        return f"{where}.num_bits is {said.get('num_bits')!r}, not 4 or 8"
    if said.get("dynamic") is not dynamic:
        return f"{where}.dynamic is {said.get('dynamic')!r}, not {str(dynamic).lower()}"
    either = said["num_bits"] == 4 and said.get("symmetric") is False
    if said.get("symmetric") is not True and not either:
        return f"{where}.symmetric is {said.get('symmetric')!r}, not true"
    for key in ("actorder", "block_structure", "scale_dtype"):
        # Groups in the order of the weights (GPTQ's "static") are stored as if there was no order.
        if said.get(key) and (key, said[key]) not in _AS_NONE:
            return f"{where}.{key} is {said[key]!r}, which is not computed here"
    return None


_AS_NONE: Final = (("actorder", "weight"), ("actorder", "static"))


def _why_not_format(found: _Said, group: _Said) -> str | None:
    stored = group.get("format") or found.get("format")
    wanted = _FORMATS[group["weights"]["num_bits"]]
    if stored == wanted:
        return None
    bits = group["weights"]["num_bits"]
    return f"quantization_config.format is {stored!r}, not {wanted!r}, for {bits} bits"


MOST_NAMES: Final = 4096
"""Of layers that are not quantized: each is looked for among all layers."""
_MOST_PATTERNS: Final = 64
_MOST_STARS: Final = 3
_PATTERN: Final = re.compile(r"re:\^?(\w|\.\*?|\\\.)+\$?", re.ASCII)
"""A pattern for layers that are not quantized, of literal text and ``.*``."""


def _why_not_ignored(ignored: Any) -> str | None:
    """vLLM matches each pattern with the name of each layer, so patterns are to be plain."""
    where = "quantization_config.ignore"
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        return f"{where} is no list of names"
    patterns = [name for name in ignored if name.startswith("re:")]
    if len(ignored) > MOST_NAMES or len(patterns) > _MOST_PATTERNS:
        return f"{where} has more than {MOST_NAMES} names or {_MOST_PATTERNS} patterns"
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern) or pattern.count("*") > _MOST_STARS:
            return f"{where} has the pattern {pattern[:80]!r}"
    return None


def why_not_tensors(found: _Said, known: Mapping[str, TensorEntry]) -> str | None:
    """Why vLLM's layers do not come out of these tensors; None if they do."""
    _, group = sole_group(found)
    weights = group["weights"]
    ignored = Ignored(found.get("ignore") or [])
    for name, tensor in known.items():
        if name.endswith(_NEVER) or (weights["symmetric"] and name.endswith(ZEROS)):
            return f"{name} is there, which is not computed here"
        layer, _, last = name.rpartition(".")
        if (
            last == "weight"
            and tensor.dtype not in PLAIN
            and layer + SCALE not in known
            and (layer in ignored or not _is_linear(tensor))
        ):
            return f"{name} is of {tensor.dtype}, and not quantized as quantization_config says"
        if not (name.endswith((PACKED, SCALE)) or (last == "weight" and _is_linear(tensor))):
            continue
        if layer in ignored:
            if name.endswith(_WEIGHT):
                continue
            return f"{name} is quantized, and quantization_config.ignore has it"
        if not _IN_A_LAYER.search(name):
            return f"{name} is of no decoder layer, such as the output head"
        if reason := _why_not_layer(layer, weights, known):
            return reason
    return _why_not_together(known, ignored)


_NEVER: Final = (
    ".weight_g_idx", ".k_scale", ".v_scale", ".q_scale", ".input_scale",
    ".input_zero_point", ".output_scale",
)  # fmt: skip
_IN_A_LAYER: Final = re.compile(r"\.\d+\.|\.project_(in|out)\.")
_FLOATS: Final = ("F32", "F16", "BF16")
PLAIN: Final = (*_FLOATS, "F64")
"""Types of weights that are not quantized."""


def _is_linear(tensor: TensorEntry) -> bool:
    """Whether it can be the weight of a linear layer: embeddings are not in decoder layers."""
    return len(tensor.shape) == 2 and bool(_IN_A_LAYER.search(tensor.name))


class Ignored:
    """Names of layers that are not quantized."""

    def __init__(self, said: Iterable[str]) -> None:
        self._names = {name for name in said if not name.startswith("re:")}
        patterns = [name.removeprefix("re:") for name in said if name.startswith("re:")]
        self._patterns = [re.compile(_in_linear_time(pattern)) for pattern in patterns]

    def __contains__(self, layer: object) -> bool:
        name = str(layer)
        return name in self._names or any(p.match(name) for p in self._patterns)


def _in_linear_time(pattern: str) -> str:
    """A pattern of literal text and ``.*`` that matches the same names. What follows a ``.*`` is
    taken where it is found first, and looked for no further: to try all places takes the cube of a
    name's length. What has to be at the end is looked for there alone."""
    first, *others = pattern.split(".*")
    last = [others.pop()] if others and others[-1].endswith("$") else []
    return first + "".join(f"(?>.*?{text})" for text in others) + "".join(f".*{t}" for t in last)


def _why_not_layer(layer: str, said: _Said, known: Mapping[str, TensorEntry]) -> str | None:
    four = said["num_bits"] == 4
    own, kind, of = (PACKED, "I32", NUMBERS) if four else (_WEIGHT, "I8", 1)
    words = known.get(layer + own)
    if words is None or len(words.shape) != 2 or words.dtype != kind:
        return f"{layer}{own} is no matrix of {kind}, as quantization_config says"
    out, inside = words.shape[0], words.shape[1] * of
    if not out or not inside or (four and (out % _MULTIPLE or inside % _MULTIPLE)):
        return f"{words.name} is a weight {[out, inside]}, which is no multiple of {_MULTIPLE}"
    group = said["group_size"] if said["strategy"] == "group" else inside
    if inside % group:
        return f"{words.name} has rows of {inside}, which are no multiple of its groups of {group}"
    wanted: list[tuple[str, tuple[int, int], tuple[str, ...]]] = [
        (SCALE, (out, inside // group), _FLOATS)
    ]
    if not said["symmetric"]:
        wanted.append((ZEROS, (out // NUMBERS, inside // group), ("I32",)))
    for ending, shape, kinds in wanted:
        tensor = known.get(layer + ending)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in kinds:
            return f"{layer}{ending} is not there with the shape {list(shape)} of its {words.name}"
    return None


def _why_not_together(known: Mapping[str, TensorEntry], ignored: Ignored) -> str | None:
    """vLLM makes one layer of some: all of them are ignored, or none. It looks for the name of that
    layer before it looks for theirs."""
    for name in known:
        if not name.endswith(SCALE):
            continue
        stem, _, own = name.removesuffix(SCALE).rpartition(".")
        for fused, together in FUSED.items():
            if own in together and f"{stem}.{fused}" in ignored:
                return f"{stem}.{own} is quantized, and quantization_config.ignore has {fused}"
            for other in together if own in together else ():
                if f"{stem}.{other}" in ignored:
                    return f"{stem}.{own} is quantized, and {stem}.{other} is not"
    return None


FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers of which vLLM makes one, by its name."""
