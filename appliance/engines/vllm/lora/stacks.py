"""The stacked tensors of a model's adapters: parameters like the others, with recipes of their own.

vLLM's layers with adapters keep, for each slice of their output (q, k and v are three), two tensors
with a place for each adapter: A ``[slots, 1, rank, in]`` and B ``[slots, 1, out, rank]``. Here they
are parameters: they lie with the base's weights, in its image, come and go with it, and are read by
the same code. An adapter is in one place as long as it is there, so vLLM never has to load one; and
one place can be written anew while requests use the others.

B is stored times ``alpha / r``, as vLLM makes it. What an adapter does not have is zero, and so is
a place without one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from appliance.checkpoints.adapters import Adapter, AdapterStacks, LowRank, UnsupportedAdapter
from appliance.checkpoints.safetensors import TensorEntry
from appliance.engines.vllm.lora.products import AdapterProducts
from appliance.engines.vllm.weights.loading import WeightPiece
from appliance.engines.vllm.weights.recipe import (
    DTYPES,
    Axis,
    Ingredients,
    Origin,
    RecipeRecording,
    Write,
)
from appliance.memory.weights import WeightLayout

_PARTS: Final = ("lora_a_stacked", "lora_b_stacked")


class Stack(NamedTuple):
    """A stacked tensor: A, or B, of all adapters for one layer of the checkpoint."""

    layer: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    is_b: bool

    @property
    def place(self) -> int:
        """Elements of one adapter."""
        return self.shape[2] * self.shape[3]

    def ingredients(self, adapters: Sequence[Adapter], first_file: int) -> Ingredients:
        """What all of it is made of; the file of the first adapter has this number."""
        slots = _by_slot(adapters, first_file)
        writes = (
            write
            for slot in range(self.shape[0])
            for write in self._writes(slots.get(slot), slot * self.place)
        )
        return Ingredients(self.dtype, self.shape, tuple(writes))

    def piece(
        self, adapters: Sequence[Adapter], first_file: int, slot: int, at: int
    ) -> WeightPiece:
        """What writes one place of it, in an image that has all of it from byte `at` on."""
        found = _by_slot(adapters, first_file).get(slot)
        nbytes = self.place * self.dtype.itemsize
        writes = tuple(self._writes(found, 0))
        return WeightPiece(at + slot * nbytes, nbytes, self.dtype, self.place, writes, None)

    def _writes(self, found: tuple[Adapter, int] | None, start: int) -> Iterator[Write]:
        """What writes the place of an adapter, whose file has this number, or of none."""
        low = found[0].layers.get(self.layer) if found is not None else None
        if found is None or low is None:
            yield Write(0.0, (Axis(self.place, 0, 1),), start)
            return
        rows, columns = self.shape[2:]
        yield from _placed(low, found[1], rows, columns, start, is_b=self.is_b)


def stack_adapters(model: Any, recorded: RecipeRecording) -> dict[str, Stack]:
    """Give the layers of a model that vLLM built for adapters their stacked parameters, which hold
    nothing yet, and `AdapterProducts` to compute with. Returns the stacks by the parameters' names.

    Raises `UnsupportedAdapter` for a layer that vLLM computes in another way.
    """
    manager, stacks = model.lora_manager, recorded.stacks
    products = AdapterProducts(stacks.slots)
    made: dict[str, Stack] = {}
    placed: set[str] = set()
    for name, layer in manager.modules.items():
        names = _slices(name, manager.packed_modules, layer)
        for attribute, is_b in zip(_PARTS, (False, True), strict=True):
            tensors = []
            for number, old in enumerate(getattr(layer, attribute)):
                stack = _stack(old, names[number], stacks, is_b=is_b)
                parameter = torch.nn.Parameter(
                    torch.empty(stack.shape, dtype=stack.dtype), requires_grad=False
                )
                if stack.place:
                    made[f"{name}.{attribute}_{number}"] = stack
                    recorded.note(
                        parameter, stack.ingredients(recorded.adapters, recorded.adapter_files)
                    )
                # Registered, they are parameters of the layer; vLLM looks for them in a tuple.
                layer.register_parameter(f"{attribute}_{number}", parameter)
                tensors.append(parameter)
            setattr(layer, attribute, tuple(tensors))
        layer.set_mapping(products)
        placed.update(names)
    if missing := sorted(stacks.layers.keys() - placed):
        raise UnsupportedAdapter(f"vLLM has no place for the adapters of {missing[0]}")
    # Nothing of what vLLM loads, moves or counts adapters with is in use from here on.
    manager.punica_wrapper_mapping = {}
    model.lora_manager = products
    return made


def place_pieces(
    stacks: Mapping[str, Stack],
    layout: WeightLayout,
    adapters: Sequence[Adapter],
    first_file: int,
    slots: Collection[int],
) -> list[WeightPiece]:
    """What writes these places anew in an image of the layout, in its order."""
    return [
        stacks[tensor.name].piece(adapters, first_file, slot, offset)
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
        if tensor.name in stacks
        for slot in sorted(slots)
    ]


def _by_slot(adapters: Sequence[Adapter], first_file: int) -> dict[int, tuple[Adapter, int]]:
    """Adapters with the numbers of their files, by their places."""
    return {one.place.slot: (one, number) for number, one in enumerate(adapters, first_file)}


def _stack(old: torch.Tensor, name: str, stacks: AdapterStacks, *, is_b: bool) -> Stack:
    """What takes the place of one of vLLM's stacked tensors."""
    found = stacks.layers.get(name)
    rank = found.rank if found is not None else 0
    inner = (old.shape[2], rank) if is_b else (rank, old.shape[3])
    return Stack(name, (stacks.slots, 1, *inner), old.dtype, is_b)


def _slices(name: str, packed: Mapping[str, Sequence[str]], layer: Any) -> list[str]:
    """The layers of the checkpoint that one of vLLM's is made of."""
    names = list(packed.get(name, (name,)))
    if len(names) != layer.n_slices or layer.tp_size != 1:
        raise UnsupportedAdapter(f"vLLM divides {name} otherwise than its checkpoint")
    return names


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
