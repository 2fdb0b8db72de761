"""`PlacedWeights`: the weights of a model that vLLM has built, at their addresses for good.

They come from the checkpoint's files, or from an image on a shelf that was kept of them, packed,
converted or multiplied by factors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from appliance.checkpoints.adapters import Adapter
from appliance.checkpoints.safetensors import WeightFile, verify_sums
from appliance.engines.protocol import Verdict
from appliance.engines.vllm.device import Device
from appliance.engines.vllm.lora.stacks import Stack, place_pieces, stack_adapters
from appliance.engines.vllm.weights import parameters
from appliance.engines.vllm.weights.convolutions import forget_unpacked
from appliance.engines.vllm.weights.loading import CheckpointImage, made_from
from appliance.engines.vllm.weights.recipe import Ingredients, RecipeRecording
from appliance.engines.vllm.weights.tensors import bytes_at
from appliance.kernels.exp7 import BLOCK_BYTES, Decoder
from appliance.kernels.reference import fingerprint
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.weight_cache.encoded import EncodedImage, Exp7
from appliance.memory.weight_cache.images import KeptImage, Shelf
from appliance.memory.weight_cache.pipeline import process_cpus
from appliance.memory.weights import DeviceWeights, Image, WeightLayout
from appliance.vocabulary import ModelName

log = logging.getLogger("appliance.engines.vllm.weights")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """What images of a model's weights are made from: of these files, which those of adapters
    follow."""

    files: tuple[WeightFile, ...]
    adapters: tuple[Adapter, ...]
    layout: WeightLayout
    ingredients: Mapping[str, Ingredients]
    image: CheckpointImage
    shelf: Shelf | None
    cpus: Collection[int]
    verify: bool

    def kept(self) -> KeptImage | None:
        """The image on the shelf, if it is to be there: where weights are packed, converted or
        multiplied by factors. Of others the shelf is cleared."""
        if self.shelf is None:
            return None
        if not self.image.packs:
            self.shelf.clear()
            return None
        files = (*self.files, *(adapter.file for adapter in self.adapters))
        key = made_from(files, self.layout, self.ingredients, verify=self.verify)
        return KeptImage(
            self.shelf, key, self.layout, files, self.image, cpus=self.cpus, verify=self.verify
        )

    def changed(self, adapters: Sequence[Adapter], stacks: Mapping[str, Stack]) -> ImageSource:
        """The same with other adapters in their places."""
        first = len(self.files)
        made = {name: stack.ingredients(adapters, first) for name, stack in stacks.items()}
        ingredients = {**self.ingredients, **made}
        files = (*self.files, *(adapter.file for adapter in adapters))
        return replace(
            self,
            adapters=tuple(adapters),
            ingredients=ingredients,
            image=self.image.remade(files, ingredients),
        )


@dataclass(slots=True)
class PlacedWeights:
    """The weights of one model on one device; `weights` loads and evicts them."""

    weights: DeviceWeights
    packings: parameters.Packings
    source: ImageSource
    kept: KeptImage | None
    device: Device
    encoded: bool
    stacks: Mapping[str, Stack]
    """The places of adapters."""

    @classmethod
    def place(
        cls,
        name: ModelName,
        recorded: RecipeRecording,
        arena: Arena,
        host: HostTier,
        swapper: Swapper,
        device: Device,
        shelf: Shelf | None,
        verify: bool,
        encoded: bool,
        model: torch.nn.Module,
    ) -> PlacedWeights:
        """Give the model's parameters, which hold nothing yet, their addresses for good.

        They are kept on the `shelf`, if there is one (`ImageSource.kept`). With `verify`, files are
        compared with their checksums when they are first read. Master images are `encoded`, or
        plain.
        """
        forget_unpacked(model)
        stacks = stack_adapters(model, recorded) if recorded.stacks.slots else {}
        ingredients = recorded.ingredients(model)
        packings = parameters.pack(model)
        layout = parameters.plan(model, ingredients, packings)
        cpus = process_cpus()
        image = CheckpointImage(
            recorded.files, layout, ingredients, packings, cpus=cpus, verify=verify
        )
        source = ImageSource(
            recorded.files[: recorded.adapter_files],
            tuple(recorded.adapters),
            layout,
            ingredients,
            image,
            shelf,
            cpus,
            verify,
        )
        kept = source.kept()
        weights = DeviceWeights(
            f"weights:{name}",
            layout,
            arena,
            host,
            swapper,
            kept or image,
            staged=not device.host_memory,
            codec=Exp7(cpus) if encoded else None,
        )
        try:
            parameters.rehome(model, weights, packings, device)
        except BaseException:
            weights.region.release()
            raise
        return cls(weights, packings, source, kept, device, encoded, stacks)

    def store(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        """`DeviceWeights.store`; a master image that was packed for it is kept on the shelf."""
        taken = self.weights.store(host_offsets, fill=fill)
        master, kept = self.weights.master, self.kept
        if fill and master is not None and kept is not None and kept.packed:
            kept.keep(master, host_offsets)
        return taken

    def put_adapters(
        self, adapters: Sequence[Adapter], slots: Collection[int], *, master: bool
    ) -> None:
        """Have these adapters from now on, and write these places anew on the device, if the
        weights are there, and, if `master`, in the master image, which has to stay meanwhile.

        Raises `CheckpointError` for files that cannot be read; the adapters are the new ones then,
        and what is in the places is undefined.
        """
        if self.source.verify:
            for adapter in adapters:
                if adapter.place.slot in slots:
                    verify_sums(adapter.file.path.parent)
        self.source = self.source.changed(adapters, self.stacks)
        self.kept = self.source.kept()
        self.weights.read_from(self.kept or self.source.image)
        pieces = place_pieces(
            self.stacks, self.source.layout, adapters, len(self.source.files), slots
        )
        self.weights.rewrite(partial(self.source.image.write, pieces), master=master)

    def compare(self) -> Verdict:
        """The weights on the device with their master image; reads all of both."""
        master, region = self.weights.master, self.weights.region
        if not self.weights.loaded:
            return Verdict.NOT_LOADED
        if master is None:
            return Verdict.NO_IMAGE
        layout = self.weights.layout
        if self.encoded:
            encoded = EncodedImage(master, layout.nbytes)
            damage = list(encoded.damage())
            for error in damage:
                log.error("%s: %s", region.owner, error)
            if damage:
                return Verdict.DAMAGED
            parts = _decoded_parts(encoded)
        else:
            parts = partial(_plain_parts, master)
        # Tensor by tensor: what lies between them belongs to no tensor, and may differ.
        for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
            device = region.address + start
            for part in parts(start, tensor.nbytes):
                here = self.device.bytes_at(device, part.nbytes)
                if fingerprint(here) != fingerprint(part):
                    return Verdict.DIFFERS
                device += part.nbytes
        return Verdict.OK


Parts: TypeAlias = Callable[[int, int], Iterator[torch.Tensor]]
"""So many plain bytes of a master image from an offset on, in pieces good until the next one."""


def _plain_parts(master: Image, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
    for address, size in master.parts(offset, nbytes):
        yield bytes_at(address, size)


def _decoded_parts(encoded: EncodedImage) -> Parts:
    """Neighbouring parts of one block are decoded once."""
    decoder, plain, decoded = Decoder(), np.empty(BLOCK_BYTES, np.uint8), -1

    def parts(offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        nonlocal decoded
        while nbytes:
            block, start = divmod(offset, BLOCK_BYTES)
            if block != decoded:
                encoded.decode(block, decoder, plain[: encoded.size(block)])
                decoded = block
            size = min(nbytes, BLOCK_BYTES - start)
            yield torch.from_numpy(plain[start : start + size])
            offset, nbytes = offset + size, nbytes - size

    return parts
