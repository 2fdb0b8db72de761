"""A built model's parameters: laid out, moved into the arena, and the proof of it.

From `pack` on, the `weight` of a packed layer is a flat parameter of its packed bytes. It is
stored, moved and checked like any other; the layer's `cpu_linear` is a view of the same place. No
layer can take it for rows by mistake: it has one dimension. None of the parameters holds anything
before `rehome`: their private memory was never touched.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils as vllm_layers
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from appliance.engines.vllm.device import Device
from appliance.engines.vllm.weights import packed
from appliance.engines.vllm.weights.packed import PackedLinear, Packing
from appliance.engines.vllm.weights.recipe import Ingredients
from appliance.memory.weights import DeviceWeights, StoredTensor, WeightLayout

# By the name of the parameter that holds the packed bytes.
Packings: TypeAlias = Mapping[str, Packing]


class PrivateWeights(RuntimeError):
    """A layer computes with a private copy of its weights, which cannot be unmapped."""


HEAD: Final = "draft_head"
"""The part of a model that drafts its tokens, if it has one (`appliance.engines.vllm.drafts`)."""
_OF_A_STEP: Final = frozenset({"deepstack_input_embeds"})
"""Lists of tensors in which a model keeps what it computed in a step: Qwen3-VL, of its images."""


def forbid_packing() -> None:
    """Keep vLLM's CPU linear layers from packing copies of their weights. Process-wide.

    Loading packs them instead. `check_moved` proves, per model, that nothing was copied.
    """
    assert hasattr(vllm._custom_ops, "_supports_onednn"), "vLLM's oneDNN switch has moved"
    assert hasattr(vllm_layers, "check_cpu_sgl_kernel"), "vLLM's SGL switch has moved"
    vllm._custom_ops._supports_onednn = False
    vllm_layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


def pack(model: torch.nn.Module) -> Packings:
    """Make room for packed weights in all layers that vLLM would pack.

    A head tied to the embedding becomes a parameter of its own, as the embedding goes on reading
    plain rows: vLLM has both, too, and without it the head's share of a step takes half as long
    again. The layers cannot compute until `rehome`. Raises `SeamMoved` for another torch.
    """
    packings = {}
    head_dtypes = {m.head_dtype for m in model.modules() if isinstance(m, LogitsProcessor)}
    for name, module in model.named_modules():
        if _is_linear(module, head_dtypes) and packed.supports(module.weight.dtype):
            dtype = module.weight.dtype
            packing = packed.plan(tuple(module.weight.shape), dtype)
            flat = torch.empty(packing.nbytes // dtype.itemsize, dtype=dtype)
            module.weight = torch.nn.Parameter(flat, requires_grad=False)
            packings[f"{name}.weight"] = packing
    return packings


def plan(
    model: torch.nn.Module, made_of: Mapping[str, Ingredients], packings: Packings
) -> WeightLayout:
    """Every distinct parameter storage, in the order in which a forward pass needs them."""
    return WeightLayout.plan(
        StoredTensor(
            name=name,
            dtype=str(parameter.dtype),
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            nbytes=parameter.untyped_storage().nbytes(),
            packing=_digest(made_of[name], packings.get(name)),
        )
        for name, parameter in _stored(model)
    )


def _digest(made_of: Ingredients, linear: Packing | None) -> str:
    """What tells apart how the bytes of a parameter are read; empty for plain ones."""
    if made_of.layer is not None:
        return made_of.layer.conversion.digest
    packing = linear or made_of.packing
    return packing.digest if packing is not None else ""


def rehome(
    model: torch.nn.Module, weights: DeviceWeights, packings: Packings, device: Device
) -> None:
    """Point every parameter at its place in the region, and let go of the private ones.

    Packed layers get their view of that place. Nothing is read: the region may be unmapped.
    """
    region = device.bytes_at(weights.region.address, weights.layout.nbytes)
    places = {
        parameter.untyped_storage().data_ptr(): offset
        for (_, parameter), offset in zip(_stored(model), weights.layout.offsets, strict=True)
    }
    # All of them are looked up before one is moved: aliases share the storage they are found by.
    # A buffer is one, too, where a layer with a convolution looks at its weight in another shape.
    moves = [
        (parameter, places[parameter.untyped_storage().data_ptr()])
        for parameter in itertools.chain(model.parameters(), model.buffers())
        if parameter.numel() and parameter.untyped_storage().data_ptr() in places
    ]
    for parameter, offset in moves:
        start = offset + parameter.storage_offset() * parameter.element_size()
        typed = region[start : start + _span(parameter)].view(parameter.dtype)
        parameter.data = typed.as_strided(parameter.shape, parameter.stride())
    for name, packing in packings.items():
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        layer.cpu_linear = PackedLinear(layer.weight.data_ptr(), packing)
    # The C library keeps freed heap for itself; this much of it belongs to the others here.
    ctypes.CDLL(None).malloc_trim(0)


def check_moved(
    model: torch.nn.Module, weights: DeviceWeights, packings: Packings, kv: range
) -> None:
    """Raise `PrivateWeights` if a layer holds weights outside of the region.

    A private copy shows as a `cpu_linear` that closes over a handle or a tensor, as one that views
    another place than the layer's `weight`, or as a tensor that is neither parameter nor buffer.
    `kv` are the addresses of the KV cache.
    """
    region = range(weights.region.address, weights.region.address + max(weights.layout.nbytes, 1))
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.data_ptr() not in region:
            raise PrivateWeights(f"{name} was not moved")
    for name, module in model.named_modules():
        linear = vars(module).get("cpu_linear")
        if f"{name}.weight" in packings:
            if not isinstance(linear, PackedLinear) or linear.address != module.weight.data_ptr():
                raise PrivateWeights(f"{name} does not multiply with its weight")
        elif isinstance(linear, PackedLinear) or getattr(linear, "__closure__", None):
            raise PrivateWeights(f"{name} multiplies with a packed copy of its weight")
        for attribute, value in vars(module).items():
            if attribute in _OF_A_STEP:
                continue
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or not tensor.numel():
                    continue
                if tensor.data_ptr() not in region and tensor.data_ptr() not in kv:
                    raise PrivateWeights(f"{name}.{attribute} is a tensor of the layer's own")


def _is_linear(module: torch.nn.Module, head_dtypes: set[torch.dtype | None]) -> bool:
    """Whether vLLM would give this layer a packed copy, and read nothing else of its weight.

    An embedding has a `cpu_linear` that is never called; a layer of which vLLM reads the rows has
    torch's own function; and so does, in effect, a head that computes in another type.
    """
    linear = vars(module).get("cpu_linear")
    if linear is None or linear is torch.nn.functional.linear or module.weight.ndim != 2:
        return False
    if isinstance(module, ParallelLMHead):
        return head_dtypes <= {None, module.weight.dtype}
    return isinstance(module.quant_method, UnquantizedLinearMethod)


def _stored(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The first parameter of every storage that holds anything: embeddings, layers, norm, head."""
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            found.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))
    return sorted(found.values(), key=lambda item: _turn(model, item[0]))


def _turn(model: torch.nn.Module, name: str) -> int:
    """When the parameter is needed in a forward pass; layers go in the order of their list."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if drafts_tokens(name):
        return 5  # it begins when the model's own step is over
    if reads_images(model, name):
        return 4  # most prompts do without
    if isinstance(owner, ParallelLMHead):
        return 3
    if layer_of(model, name) is not None:
        return 1
    return 0 if isinstance(owner, VocabParallelEmbedding | torch.nn.Embedding) else 2


def reads_images(model: torch.nn.Module, name: str) -> bool:
    """Whether a parameter is of what reads images: a tower, or a projector behind it."""
    towers: list[str] = getattr(model, "_tower_model_names", [])
    return any(name.startswith(f"{tower}.") for tower in towers)


def drafts_tokens(name: str) -> bool:
    """Whether a parameter or module is of the head that drafts tokens. What the head shares with
    the model has a name there, too."""
    return name.startswith(f"{HEAD}.")


def layer_of(model: torch.nn.Module, name: str) -> str | None:
    """The name of the decoder layer (an item of a list of modules) that a name lies in, if any."""
    module, path = model, name.split(".")
    for depth, part in enumerate(path[:-1]):
        child = getattr(module, part)
        if isinstance(module, torch.nn.ModuleList):
            return ".".join(path[: depth + 1])
        module = child
    return None


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to behind its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()
