"""The stacked tensors of a model's adapters: parameters like the others, with recipes of their own.

vLLM's layers with adapters keep, for each slice of their output (q, k and v are three), two tensors
with a place for each adapter: A ``[slots, 1, rank, in]`` and B ``[slots, 1, out, rank]``. Here they
are parameters: they lie with the base's weights, in its image, come and go with it, and are read by
the same code. An adapter is in one place for good, so vLLM never has to load one.

B is stored times ``alpha / r``, as vLLM makes it. What an adapter does not have is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from appliance.checkpoints.adapters import LowRank, UnsupportedAdapter, stacked_ranks
from appliance.checkpoints.safetensors import TensorEntry
from appliance.engines.vllm.lora.products import AdapterProducts
from appliance.engines.vllm.weights.recipe import (
    DTYPES,
    Axis,
    Ingredients,
    Origin,
    RecipeRecording,
    Write,
)

_STACKS: Final = ("lora_a_stacked", "lora_b_stacked")


def stack_adapters(model: Any, recorded: RecipeRecording) -> None:
    """Give the layers of a model that vLLM built for adapters their stacked parameters, which hold
    nothing yet, and `AdapterProducts` to compute with.

    Raises `UnsupportedAdapter` for a layer that vLLM computes in another way.
    """
    manager, adapters = model.lora_manager, recorded.adapters
    products = AdapterProducts(len(adapters))
    ranks = stacked_ranks(adapters)
    placed: set[str] = set()
    for name, layer in manager.modules.items():
        names = _slices(name, manager.packed_modules, layer)
        stacks = _Stacks(layer, names, ranks, recorded)
        for attribute, tensors in zip(_STACKS, stacks.make(), strict=True):
            # Registered, they are parameters of the layer; vLLM looks for them in a tuple.
            for number, parameter in enumerate(tensors):
                layer.register_parameter(f"{attribute}_{number}", parameter)
            setattr(layer, attribute, tensors)
        layer.set_mapping(products)
        placed.update(names)
    if missing := sorted(ranks.keys() - placed):
        raise UnsupportedAdapter(f"vLLM has no place for the adapters of {missing[0]}")
    # Nothing of what vLLM loads, moves or counts adapters with is in use from here on.
    manager.punica_wrapper_mapping = {}
    model.lora_manager = products


def _slices(name: str, packed: Mapping[str, Sequence[str]], layer: Any) -> list[str]:
    """The layers of the checkpoint that one of vLLM's is made of."""
    names = list(packed.get(name, (name,)))
    if len(names) != layer.n_slices or layer.tp_size != 1:
        raise UnsupportedAdapter(f"vLLM divides {name} otherwise than its checkpoint")
    return names


class _Stacks:
    """The stacked tensors of one of vLLM's layers."""

    def __init__(
        self,
        layer: Any,
        names: Sequence[str],
        ranks: Mapping[str, int],
        recorded: RecipeRecording,
    ) -> None:
        self._layer = layer
        self._names = names
        self._ranks = ranks
        self._recorded = recorded
        self._adapters = recorded.adapters

    def make(self) -> tuple[tuple[torch.nn.Parameter, ...], ...]:
        """Of A and of B, the parameter of each slice."""
        both: tuple[list[torch.nn.Parameter], ...] = ([], [])
        for number, name in enumerate(self._names):
            old_a = self._layer.lora_a_stacked[number]
            old_b = self._layer.lora_b_stacked[number]
            slots, rank = len(self._adapters), self._ranks.get(name, 0)
            shapes = ((slots, 1, rank, old_a.shape[3]), (slots, 1, old_b.shape[2], rank))
            for made, shape, is_b in zip(both, shapes, (False, True), strict=True):
                parameter = torch.nn.Parameter(
                    torch.empty(shape, dtype=old_a.dtype), requires_grad=False
                )
                if rank:
                    writes = self._writes(name, shape, is_b=is_b)
                    self._recorded.note(parameter, Ingredients(old_a.dtype, shape, tuple(writes)))
                made.append(parameter)
        return tuple(tuple(made) for made in both)

    def _writes(self, name: str, shape: tuple[int, ...], *, is_b: bool) -> list[Write]:
        writes: list[Write] = []
        rows, columns = shape[2:]
        for slot, adapter in enumerate(self._adapters):
            start = slot * rows * columns
            low = adapter.layers.get(name)
            if low is None:
                writes.append(Write(0.0, (Axis(rows * columns, 0, 1),), start))
                continue
            writes += _placed(
                low, self._recorded.adapter_files + slot, rows, columns, start, is_b=is_b
            )
        return writes


def _placed(
    low: LowRank, file: int, rows: int, columns: int, start: int, *, is_b: bool
) -> list[Write]:
    """What writes one adapter's A, or B, to its place of `rows` times `columns` elements."""
    stored = low.b if is_b else low.a
    origin = _origin(stored, file, low.scale if is_b else 1.0)
    height, width = stored.shape
    if width == columns:
        writes = [Write(origin, (Axis(height * width, 1, 1),), start)]
    else:
        writes = [Write(origin, (Axis(height, width, columns), Axis(width, 1, 1)), start)]
    if height < rows:  # A of a lower rank than others
        rest = (rows - height) * columns
        writes.append(Write(0.0, (Axis(rest, 0, 1),), start + height * columns))
    if width < columns:  # B of one
        axes = (Axis(rows, 0, columns), Axis(columns - width, 0, 1))
        writes.append(Write(0.0, axes, start + width))
    return writes


def _origin(tensor: TensorEntry, file: int, scale: float) -> Origin:
    return Origin(file, tensor.offset, DTYPES[tensor.dtype], factor=scale)
