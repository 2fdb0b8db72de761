"""Whether a checkpoint that reads images is built whole as its quantized language model says.

The language model is quantized, what reads images is not. vLLM looks for the layers of both in
lists and patterns of ``quantization_config``, by the names that it has for them:

    model.visual.blocks.0.attn.qkv                 visual.blocks.0.attn.qkv
    model.language_model.layers.0.mlp.down_proj    language_model.model.layers.0.mlp.down_proj
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.model_config import ModelConfig
from appliance.checkpoints.quantized import compressed_tensors, quantization
from appliance.checkpoints.quantized.compressed_tensors import PLAIN, Ignored
from appliance.checkpoints.safetensors import TensorEntry

_WEIGHT: Final = ".weight"
_EMBEDDING: Final = "embed"


def why_not_whole(
    config: ModelConfig, language: Iterable[TensorEntry], readers: Iterable[TensorEntry]
) -> str | None:
    """Why vLLM does not build the whole model of these tensors; None if it does. Those of the
    `language` model have the names of a checkpoint of text, `readers` those in the files."""
    found = quantization.said(config)
    if found is None:
        return None
    readers = list(readers)
    for tensor in readers:
        if tensor.dtype not in PLAIN:
            return f"{tensor.name} reads images and is quantized ({tensor.dtype})"
    if quantization.multiplied(config) is not None:
        return None
    towers = MEDIA[config.architecture].towers
    plain = _Plain(found, towers)
    for layer in _layers(readers):
        if _in_vllm(layer, towers) not in plain:
            return f"{layer} reads images, and quantization_config does not say that it is plain"
    for layer in _layers(language):
        if (layer in plain.patterns) != (f"language_model.{layer}" in plain.patterns):
            return f"a pattern of quantization_config does not match {layer} in the whole model"
    return None


class _Plain:
    """The layers that read images and that vLLM takes for plain, by its names."""

    def __init__(self, found: dict[str, Any], towers: Collection[str]) -> None:
        self._method = quantization.method_of(found)
        # Lists of other methods are not read by vLLM, and their patterns are not checked.
        compressed, gptq = (self._method == one for one in (compressed_tensors.METHOD, "gptq"))
        names = (found.get("ignore") or ()) if compressed else ()
        ignored = [_in_vllm(name, towers) for name in names]
        parts = found.get("modules_to_not_convert") or ()
        self._parts = [_in_vllm(str(part), towers) for part in parts]
        self._quantized = list(_flat(found.get("modules_in_block_to_quantize") or ()))
        dynamic = (found.get("dynamic") or ()) if gptq else ()
        rules = [rule.replace("-:", "re:", 1) for rule in dynamic]
        self._ignored = Ignored(ignored)
        self.patterns = Ignored([*rules, *(name for name in ignored if name.startswith("re:"))])

    def __contains__(self, layer: object) -> bool:
        name = str(layer)
        if self._method == compressed_tensors.METHOD:
            return name in self._ignored
        # Where a list is not there, vLLM looks which tensors of the files are quantized.
        if self._method == "awq":
            return not self._parts or any(part in name for part in self._parts)
        quantized = any(part in name for part in self._quantized)
        return not quantized or name in self.patterns


def _layers(tensors: Iterable[TensorEntry]) -> Iterator[str]:
    """Names of those that may be linear layers."""
    for tensor in tensors:
        name = tensor.name
        if len(tensor.shape) == 2 and name.endswith(_WEIGHT) and _EMBEDDING not in name:
            yield name.removesuffix(_WEIGHT)


def _in_vllm(name: str, towers: Collection[str]) -> str:
    """What vLLM calls a layer, or a part of layers, that reads images."""
    bare = name.removeprefix("model.")
    return bare if bare.partition(".")[0] in towers and "." in bare else name


def _flat(names: Any) -> Iterator[str]:
    """vLLM takes lists of lists of names, too."""
    for name in names if isinstance(names, list | tuple) else ():
        if isinstance(name, str):
            yield name
        else:
            yield from _flat(name)
