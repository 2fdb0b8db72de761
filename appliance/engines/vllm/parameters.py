"""A built model's parameters: their layout, their move into the arena, and the proof of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils as vllm_layers

from appliance.engines.vllm.tensors import bytes_at
from appliance.memory.weights import DeviceWeights, StoredTensor, WeightLayout


class PackedWeights(RuntimeError):
    """A layer computes with a private copy of its weights, which cannot be unmapped."""


def forbid_packing() -> None:
    """Keep vLLM's CPU linear layers from packing copies of their weights. Process-wide.

    `check_unpacked` proves, per model, that it took effect.
    """
    assert hasattr(vllm._custom_ops, "_supports_onednn"), "vLLM's oneDNN switch has moved"
    assert hasattr(vllm_layers, "check_cpu_sgl_kernel"), "vLLM's SGL switch has moved"
    vllm._custom_ops._supports_onednn = False
    vllm_layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


def plan(model: torch.nn.Module) -> WeightLayout:
    """Every distinct parameter storage, in the order of `named_parameters`; tied weights once."""
    return WeightLayout.plan(
        StoredTensor(
            name=name,
            dtype=str(parameter.dtype),
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            nbytes=parameter.untyped_storage().nbytes(),
        )
        for name, parameter in _distinct(model)
    )


def fill(model: torch.nn.Module, weights: DeviceWeights) -> None:
    """Write the master image from the model's private parameters."""
    for (_, parameter), offset in zip(_distinct(model), weights.layout.offsets, strict=True):
        storage = parameter.untyped_storage()
        weights.fill(offset, storage.data_ptr(), storage.nbytes())


def rehome(model: torch.nn.Module, weights: DeviceWeights) -> None:
    """Point every parameter at its place in the region, and let go of the private copies."""
    region = bytes_at(weights.region.address, weights.layout.nbytes)
    places = {
        parameter.untyped_storage().data_ptr(): offset
        for (_, parameter), offset in zip(_distinct(model), weights.layout.offsets, strict=True)
    }
    # All of them are looked up before one is moved: aliases share the storage they are found by.
    moves = [
        (parameter, places[parameter.untyped_storage().data_ptr()])
        for parameter in model.parameters()
        if parameter.numel()
    ]
    for parameter, offset in moves:
        start = offset + parameter.storage_offset() * parameter.element_size()
        typed = region[start : start + _span(parameter)].view(parameter.dtype)
        parameter.data = typed.as_strided(parameter.shape, parameter.stride())
    # The C library keeps freed heap for itself; this much of it belongs to the others here.
    ctypes.CDLL(None).malloc_trim(0)


def check_unpacked(model: torch.nn.Module, weights: DeviceWeights, kv: range) -> None:
    """Raise `PackedWeights` if a layer holds weights outside of the region.

    vLLM's packing leaves a `cpu_linear` that closes over a handle or a packed tensor, or a tensor
    that is neither parameter nor buffer. `kv` are the addresses of the KV cache.
    """
    region = range(weights.region.address, weights.region.address + max(weights.layout.nbytes, 1))
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.data_ptr() not in region:
            raise PackedWeights(f"{name} was not moved")
    for name, module in model.named_modules():
        linear = vars(module).get("cpu_linear")
        if getattr(linear, "__closure__", None):
            raise PackedWeights(f"{name} multiplies with a packed copy of its weight")
        for attribute, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or value.ndim < 2:
                continue
            if value.data_ptr() not in region and value.data_ptr() not in kv:
                raise PackedWeights(f"{name}.{attribute} is a tensor of the layer's own")


def _distinct(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The first parameter of every storage that holds anything."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        address = parameter.untyped_storage().data_ptr()
        if parameter.numel() and address not in seen:
            seen.add(address)
            yield name, parameter


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to behind its last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()
