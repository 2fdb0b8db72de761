"""Weights: how a model's tensors are laid out, and how they come onto the device.

One layout serves two places. On the device it fills the engine's region from its first byte; in
the host tier the same bytes are cut in slabs, which need not be neighbours:

    region   | embed |qkv.0 .. |      |      |      addresses fixed for the engine's life
    image    [ slab 0 ] ... [ slab 2 ] .. [ slab 1 ]  offsets given by the ledger
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

from appliance.memory.arena import Arena, Region
from appliance.memory.hosttier import HostTier
from appliance.memory.transfers import Transfer, TransferKind

ALIGNMENT: Final = 256


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One distinct tensor storage, named after the first parameter that uses it.

    `packing` tells apart what the same bytes can mean to an engine; empty for a plain tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    packing: str = ""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Where every storage begins, in bytes from the start of the image."""

    tensors: tuple[StoredTensor, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def plan(cls, tensors: Iterable[StoredTensor]) -> WeightLayout:
        """Place storages one behind the other, in the order given."""
        ordered = tuple(tensors)
        offsets, end = [], 0
        for tensor in ordered:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            offsets.append(start)
            end = start + tensor.nbytes
        return cls(ordered, tuple(offsets), end)

    @property
    def digest(self) -> str:
        """Equal for engines that can share one master image."""
        digest = hashlib.sha256()
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            digest.update(repr((astuple(tensor), offset)).encode())
        return digest.hexdigest()

    def slabs(self, slab_bytes: int) -> int:
        return -(-self.nbytes // slab_bytes)


class DeviceWeights:
    """The weights of one engine: a region of the arena, filled from slabs of the host tier.

    Weights are read-only, so `evict` copies nothing. `load` and `evict` must not overlap.
    """

    def __init__(self, owner: str, layout: WeightLayout, arena: Arena, host: HostTier) -> None:
        self.layout = layout
        self.region: Region = arena.reserve(owner, layout.slabs(arena.slab_bytes))
        self._transfer: Transfer | None = None
        self._vmm = arena.vmm
        self._slab_bytes = arena.slab_bytes
        self._host = host
        self._sources: tuple[int, ...] = ()

    def attach(self, host_offsets: Sequence[int]) -> None:
        """Say where the image's slabs lie in the host tier, in order, in bytes.

        Raises `ValueError` for the wrong number of slabs or a place outside the tier.
        """
        if len(host_offsets) != self.region.slots:
            raise ValueError(f"{self.region.slots} slabs in {len(host_offsets)} places")
        self._sources = tuple(self._host.address(o, self._slab_bytes) for o in host_offsets)

    def fill(self, offset: int, source: int, nbytes: int) -> None:
        """Write bytes at `source`, a host address, to the image, `offset` from its start."""
        while nbytes:
            slab, start = divmod(offset, self._slab_bytes)
            part = min(nbytes, self._slab_bytes - start)
            self._vmm.copy(self._sources[slab] + start, source, part)
            offset, source, nbytes = offset + part, source + part, nbytes - part

    def begin_load(self) -> Transfer:
        """Map the region and copy the image in, unless it is in place already.

        Raises `PoolExhausted` with nothing mapped.
        """
        if self._transfer is not None:
            return self._transfer
        if not self._sources:
            raise RuntimeError(f"{self.region.owner} has no master image yet")
        owner, nbytes = self.region.owner, self.layout.nbytes
        transfer = Transfer(TransferKind.WEIGHTS, owner, nbytes, time.monotonic())
        self.region.map(range(self.region.slots))
        transfer.begin(time.monotonic())
        for slot, source in enumerate(self._sources):
            size = min(self._slab_bytes, self.layout.nbytes - slot * self._slab_bytes)
            self._vmm.copy(self.region.slot_address(slot), source, size)
            transfer.land(size)
        transfer.finish(time.monotonic())
        self._transfer = transfer
        return transfer

    @property
    def loaded(self) -> bool:
        return self._transfer is not None

    def evict(self) -> None:
        """Unmap; idempotent."""
        if self._transfer is not None:
            self._transfer = None
            self.region.unmap(range(self.region.slots))
