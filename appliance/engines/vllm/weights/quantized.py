"""Quantized linear layers, converted by vLLM's own code into the form that its CPU kernel reads.

vLLM converts the tensors of such a layer after it has loaded them
(`process_weights_after_loading`). No recipe of copies says where their bits go, so the conversion
is noted, and run when the weights are read:

    build   a few output columns, random bits  ->  which tensors come out, of what shape and type
    fill    the layer's tensors, some output columns at a time  ->  their bytes of the image

Output columns are converted independently of each other. That is tried on every layer before it is
relied on; where it does not hold, a layer is converted in one piece.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMarlinLinearMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.models.utils import WeightsMapper

from appliance.checkpoints.language_models import RENAMED
from appliance.errors import CheckpointError

VERSION: Final = 1
"""To be raised with what `LayerConversion.convert` makes: images that were kept are made anew."""
TRIED_COLUMNS: Final = 32
"""Output columns of a trial: the fewest that the kernel takes."""
SLICE_BYTES: Final = 1 << 18
"""About what is converted at a time: it takes many times as much meanwhile, and should stay in a
cache."""

_METHODS: Final = (
    AutoGPTQLinearMethod,
    AutoAWQMarlinLinearMethod,
    CompressedTensorsLinearMethod,
)
_SHAPE: Final = "weight_shape"
"""What compressed-tensors store besides, and vLLM loads and never reads."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A tensor of the layer as it is loaded; `columns` is the dimension that output columns lie
    along, `per_element` how many of them an element has."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: int | None
    per_element: int
    kind: type[torch.nn.Parameter] = field(repr=False, compare=False)
    attributes: Mapping[str, Any] = field(repr=False, compare=False)

    def sized(self, columns: int) -> tuple[int, ...]:
        """The shape of so many output columns."""
        if self.columns is None:
            return self.shape
        shape = list(self.shape)
        shape[self.columns] = columns // self.per_element
        return tuple(shape)

    def part(self, tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Some of its output columns."""
        if self.columns is None:
            return tensor
        return tensor.narrow(self.columns, first // self.per_element, count // self.per_element)


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A tensor of the layer as the kernel reads it; `columns` is the dimension along which slices
    of output columns are joined, None if all of them have the same."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: int | None

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class LayerConversion:
    """How the tensors of one layer are converted, `step` output columns at a time."""

    method: str
    stored: tuple[StoredForm, ...]
    kernel: tuple[KernelForm, ...]
    columns: int
    step: int
    layer: torch.nn.Module = field(repr=False, compare=False)
    """The layer as vLLM built it, without tensors."""

    @property
    def digest(self) -> str:
        """Equal for converted bytes that are read alike."""
        return f"{self.method} {VERSION}"

    def convert(self, stored: Tensors, place: Callable[[str, int, torch.Tensor], None]) -> None:
        """Convert the layer's tensors, given by name. `place` gets contiguous tensors: the name of
        what each is a part of, and at which byte of it the part begins."""
        joined = {
            form.name: torch.empty(form.shape, dtype=form.dtype)
            for form in self.kernel
            if form.columns != 0
        }
        for first in range(0, self.columns, self.step):
            count = min(self.step, self.columns - first)
            parts = {form.name: form.part(stored[form.name], first, count) for form in self.stored}
            made = _processed(self.layer, self.stored, parts)
            for form in self.kernel:
                part = made[form.name].data
                if form.columns == 0:
                    start = first * form.nbytes // self.columns
                    place(form.name, start, part.contiguous())
                elif form.columns is None:
                    joined[form.name].copy_(part)
                else:
                    width = part.shape[form.columns]
                    start = first * form.shape[form.columns] // self.columns
                    joined[form.name].narrow(form.columns, start, width).copy_(part)
        for name, whole in joined.items():
            place(name, 0, whole)


class Converted(NamedTuple):
    """A layer whose tensors are converted, and what it was loaded into."""

    conversion: LayerConversion
    stored: dict[str, torch.nn.Parameter]
    kernel: dict[str, torch.nn.Parameter]


def name_as_text(config: VllmConfig) -> None:
    """Have vLLM look for layers of a language model, which are quantized or not, by the names that
    it has where it is served without what reads images, and not by those in its files."""
    if config.quant_config is not None:
        config.quant_config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=dict(RENAMED)))


def convert_layers(model: torch.nn.Module) -> Iterator[tuple[str, Converted]]:
    """Give each layer that vLLM's CPU kernel for 4-bit weights computes the parameters that the
    kernel reads, which hold nothing yet, and have vLLM not convert it again. By name. Raises
    `CheckpointError` for a quantized layer that vLLM computes otherwise."""
    for name, layer in model.named_modules():
        method: Any = getattr(layer, "quant_method", None)
        known = type(method) in _METHODS
        if known and type(_kernel_of(layer)) is CPUWNA16LinearKernel:
            yield name, _convert(layer, method)
        elif known or "qweight" in layer._parameters:
            raise CheckpointError(
                f"vLLM computes {name} with {type(method).__name__}, which is not supported here"
            )


def _kernel_of(layer: Any) -> Any:
    """What computes the layer: its method has it, or its scheme, for compressed-tensors."""
    return getattr(getattr(layer, "scheme", layer.quant_method), "kernel", None)


def _convert(layer: torch.nn.Module, method: Any) -> Converted:
    stored = {
        name: parameter
        for name, parameter in layer.named_parameters(recurse=False)
        if name != _SHAPE
    }
    kernel = _kernel_of(layer)
    columns = int(kernel.config.partition_weight_shape[1])
    forms = tuple(_stored_form(name, parameter, columns) for name, parameter in stored.items())
    bare = _with_parameters(layer, {})
    step = _slice_columns(forms, columns)
    kernel_forms = _try(bare, forms, columns) if step < columns else None
    if kernel_forms is None:
        step, kernel_forms = columns, _try_whole(bare, forms, columns)
    # vLLM notes on the layer itself how it is to be computed.
    few = {form.name: torch.zeros(form.sized(TRIED_COLUMNS), dtype=form.dtype) for form in forms}
    made = _process(layer, forms, few)
    read = {
        form.name: _like(made[form.name], torch.empty(form.shape, dtype=form.dtype))
        for form in kernel_forms
    }
    for name in list(layer._parameters):
        layer._parameters[name] = read.get(name)
    method.process_weights_after_loading = _is_done
    described = f"{type(method).__name__} {type(kernel).__name__}"
    conversion = LayerConversion(described, forms, kernel_forms, columns, step, bare)
    return Converted(conversion, stored, read)


def _is_done(layer: torch.nn.Module) -> None:
    """What vLLM calls to convert a layer that is converted when it is read."""


def _stored_form(name: str, parameter: torch.nn.Parameter, columns: int) -> StoredForm:
    dimension = getattr(parameter, "output_dim", None)
    per_element = 1 if dimension is None else columns // parameter.shape[dimension]
    return StoredForm(
        name,
        parameter.dtype,
        tuple(parameter.shape),
        dimension,
        per_element,
        type(parameter),
        dict(vars(parameter)),
    )


def _slice_columns(forms: tuple[StoredForm, ...], columns: int) -> int:
    """How many columns are converted at a time."""
    nbytes = sum(torch.Size(form.shape).numel() * form.dtype.itemsize for form in forms)
    return max(1, SLICE_BYTES * columns // nbytes // TRIED_COLUMNS) * TRIED_COLUMNS


def _try(
    layer: torch.nn.Module, forms: tuple[StoredForm, ...], columns: int
) -> tuple[KernelForm, ...] | None:
    """What comes out, if two slices give alone what they give together; else None."""
    dice = torch.Generator().manual_seed(0)
    both = {form.name: _random(form.sized(2 * TRIED_COLUMNS), form.dtype, dice) for form in forms}
    whole = _processed(layer, forms, both)
    one, other = (
        _processed(
            layer,
            forms,
            {form.name: form.part(both[form.name], first, TRIED_COLUMNS) for form in forms},
        )
        for first in (0, TRIED_COLUMNS)
    )
    if not whole.keys() == one.keys() == other.keys():
        return None
    found = []
    for name, tensor in whole.items():
        grown = [d for d, size in enumerate(tensor.shape) if size != one[name].shape[d]]
        if not grown:
            alike = _same(tensor, one[name]) and _same(tensor, other[name])
        else:
            joined = torch.cat([one[name].data, other[name].data], grown[0])
            alike = len(grown) == 1 and _same(tensor, joined)
        if not alike:
            return None
        shape = list(tensor.shape)
        if grown:
            shape[grown[0]] = shape[grown[0]] * columns // (2 * TRIED_COLUMNS)
        dimension = grown[0] if grown else None
        found.append(KernelForm(name, tensor.dtype, tuple(shape), dimension))
    return tuple(found)


def _try_whole(
    layer: torch.nn.Module, forms: tuple[StoredForm, ...], columns: int
) -> tuple[KernelForm, ...]:
    zeros = {form.name: torch.zeros(form.shape, dtype=form.dtype) for form in forms}
    made = _processed(layer, forms, zeros)
    return tuple(
        KernelForm(name, tensor.dtype, tuple(tensor.shape), None) for name, tensor in made.items()
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, dice: torch.Generator) -> torch.Tensor:
    """Any bits for integers; numbers for what vLLM may compute with."""
    if dtype.is_floating_point:
        return torch.rand(shape, generator=dice).to(dtype)
    bits = torch.empty(shape, dtype=dtype)
    bits.view(torch.uint8).random_(generator=dice)
    return bits


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.data, other.data)


def _processed(
    layer: torch.nn.Module, forms: tuple[StoredForm, ...], tensors: Tensors
) -> dict[str, torch.nn.Parameter]:
    """What vLLM makes of these tensors, by name; the layer is left as it is."""
    return _process(_with_parameters(layer, {}), forms, tensors)


def _process(
    layer: torch.nn.Module, forms: tuple[StoredForm, ...], tensors: Tensors
) -> dict[str, torch.nn.Parameter]:
    """The same on the layer itself, whose parameters they become."""
    for form in forms:
        # vLLM's parameters are made with more than their data, and say of themselves how they lie.
        made = torch.Tensor._make_subclass(form.kind, tensors[form.name].contiguous(), False)
        vars(made).update(form.attributes)
        layer._parameters[form.name] = made
    method: Any = layer.quant_method
    type(method).process_weights_after_loading(method, layer)
    return dict(layer.named_parameters(recurse=False))


def _like(parameter: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    made: torch.nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, False)
    vars(made).update(vars(parameter))
    return made


def _with_parameters(
    layer: torch.nn.Module, parameters: dict[str, torch.nn.Parameter | None]
) -> torch.nn.Module:
    """The same layer with other parameters."""
    other = copy.copy(layer)
    vars(other)["_parameters"] = parameters
    return other
