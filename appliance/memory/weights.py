"""Weights: how a model's tensors are laid out, and how they come onto the device.

One layout serves two places. On the device it fills the engine's region from its first byte; in
the host tier the same bytes are cut in slabs, which need not be neighbours:

    region   | embed |qkv.0 .. |      |      |      addresses fixed for the engine's life
    image    [ slab 0 ] ... [ slab 2 ] .. [ slab 1 ]  offsets given by the ledger

The caller makes the image from the checkpoint's files. Without room for it in the host
tier the files are read at every load. With a codec the image is in fewer slabs, and decoded at
every load.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Final, Protocol

from appliance.memory import mapping
from appliance.memory.arena import Arena, Region
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import PIECE_BYTES, Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferKind

ALIGNMENT: Final = 256

MAPPED_AHEAD_BYTES: Final = 64 << 20
"""What is mapped at one go, just before it is copied. A GPU's driver takes half as long to map a
GiB of slabs of 2 MiB as a link to copy it, so the copy must not wait for all of it."""

log = logging.getLogger("appliance.memory.weights")


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


class Image:
    """The bytes of a layout, in slabs at `addresses` of this process, in order."""

    def __init__(self, addresses: Sequence[int], slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.slabs = len(addresses)
        self._runs: list[tuple[int, int, int]] = []  # offset, address, bytes; neighbours are one
        for slab, address in enumerate(addresses):
            if self._runs and sum(self._runs[-1][1:]) == address:
                offset, first, nbytes = self._runs[-1]
                self._runs[-1] = (offset, first, nbytes + slab_bytes)
            else:
                self._runs.append((slab * slab_bytes, address, slab_bytes))
        self._offsets = [offset for offset, _, _ in self._runs]

    def parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Address and size of every piece of so many bytes from `offset` on."""
        run = bisect.bisect_right(self._offsets, offset) - 1
        while nbytes:
            first, address, length = self._runs[run]
            part = min(nbytes, first + length - offset)
            yield address + offset - first, part
            offset, nbytes, run = offset + part, nbytes - part, run + 1

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """The same as memory to write to; not to be kept longer than the slabs are mapped."""
        return [mapping.view(address, part) for address, part in self.parts(offset, nbytes)]

    def put(self, offset: int, source: int, nbytes: int) -> None:
        """Copy bytes from a host address to `offset`."""
        for address, part in self.parts(offset, nbytes):
            mapping.copy(address, source, part)
            source += part


Write = Callable[[Transfer, Image], None]
"""Writes a whole image from its first byte to its last, and has the transfer land them in order.

Raises `TransferCancelled` soon after the transfer was cancelled, and whatever goes wrong.
"""


class ImageDamaged(Exception):
    """Bytes of a master image are not what was written there; the message names them."""


class MasterCodec(Protocol):
    """Makes master images smaller; `nbytes` are those of the plain image."""

    def slabs(self, nbytes: int, slab_bytes: int) -> int:
        """The most that an image takes, which it does until it is encoded."""

    def encode(self, image: Image, nbytes: int) -> int:
        """Encode a plain image where it lies; how many of its slabs it takes from now on."""

    def decode(self, image: Image, nbytes: int, transfer: Transfer, to: Image) -> None:
        """Write the plain image, as a `Write` does, from the slabs that an encoded one takes.

        Raises `ImageDamaged`; what has landed until then is right.
        """


class DeviceWeights:
    """The weights of one engine: a region of the arena, filled from the host tier or the files.

    Weights are read-only, so `evict` copies nothing. All methods are called from one thread; bytes
    are copied in others.
    """

    def __init__(
        self,
        owner: str,
        layout: WeightLayout,
        arena: Arena,
        host: HostTier,
        swapper: Swapper,
        write: Write,
        *,
        staged: bool = False,
        codec: MasterCodec | None = None,
    ) -> None:
        """`write` brings the image from the checkpoint. It writes to host memory only: where the
        region is none, the weights are `staged` in some on their way from the files. A `codec`,
        which does so, too, is not for such a region."""
        assert codec is None or not staged, "what is encoded is decoded to host memory"
        self.layout = layout
        self.region: Region = arena.reserve(owner, layout.slabs(arena.slab_bytes))
        self.filling: Transfer | None = None
        """The last or present writing of the master image, for its progress."""
        self._write = write
        self._staged = staged
        self._copy = arena.vmm.copy
        self._swapper = swapper
        self._transfer: Transfer | None = None
        self._slab_bytes = arena.slab_bytes
        self._host = host
        self._master: Image | None = None
        self._codec = codec
        self.host_slabs = self.region.slots
        """Slabs of the host tier that a master image is written to."""
        if codec is not None:
            self.host_slabs = codec.slabs(layout.nbytes, arena.slab_bytes)

    def store(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        """Have the master image in these slabs of the host tier, given in order, in bytes; if
        `fill`, write it there first. Without slabs there is none. Returns how many of them it
        takes, from the first on: all, unless it was encoded now.

        Raises `ValueError` for the wrong number of slabs or a place outside the tier,
        `RuntimeError` while the weights are on the device or on their way, and what `write`
        raises; there is no master image then.
        """
        if self._transfer is not None:
            raise RuntimeError(f"{self.region.owner} is on the device")
        places, whole = len(host_offsets), self.host_slabs
        if places and places != whole and (fill or self._codec is None or places > whole):
            raise ValueError(f"{whole} slabs in {places} places")
        self._master = None
        if not host_offsets:
            return 0
        addresses = [self._host.address(offset, self._slab_bytes) for offset in host_offsets]
        master = Image(addresses, self._slab_bytes)
        if fill:
            self.filling = self._new_transfer(f"master:{self.region.owner}")
            _carry_out(self.filling, master, self._write)
            if self.filling.error is not None:
                raise self.filling.error.__cause__ or self.filling.error
            if self._codec is not None:
                taken = self._codec.encode(master, self.layout.nbytes)
                master = Image(addresses[:taken], self._slab_bytes)
        self._master = master
        return master.slabs

    def read_from(self, write: Write) -> None:
        """Make images so from now on; those that there are stay."""
        self._write = write

    def rewrite(self, write: Callable[[Image], None], *, master: bool) -> None:
        """Have a part written anew on the device, if the weights are there or on their way, and in
        the image that they are loaded from, if `master`: its slabs have to be the image's still.
        Waits for a load under way. Raises what `write` raises."""
        assert not self._staged, "the host writes to the device"
        if self._transfer is not None:
            self._transfer.join()
        if master and self._master is not None:
            write(self._master)
        if self.loaded:
            write(Image([self.region.address], self.region.slots * self._slab_bytes))

    def begin_load(self) -> Transfer:
        """Take slabs for the region and start to bring the image in, unless that was done already.
        They are mapped by the thread that copies, just before each part of the image, or before all
        of it where it is written by the host.

        Raises `PoolExhausted` with nothing taken.
        """
        if self._transfer is not None:
            return self._transfer
        self.region.set_aside(range(self.region.slots))
        if self._master is None or self._codec is not None:
            self._transfer = self._new_transfer(self.region.owner)
            self._swapper.follow(self._transfer)
            threading.Thread(target=self._write_region, args=(self._transfer,), daemon=True).start()
        else:
            self._transfer = self._swapper.start(
                TransferKind.WEIGHTS,
                self.region.owner,
                self._copies(self._master),
                nbytes=self.layout.nbytes,
            )
        return self._transfer

    @property
    def master(self) -> Image | None:
        """The master image that the weights are loaded from, if there is one."""
        return self._master

    @property
    def transfer(self) -> Transfer | None:
        """The load that is over or under way, if the region is mapped."""
        return self._transfer

    @property
    def loaded(self) -> bool:
        """Whether all of the image is in place."""
        return self._transfer is not None and self._transfer.done and self._transfer.error is None

    def evict(self) -> None:
        """Give the slabs back, once a load under way has let go; idempotent. They are unmapped
        later: nothing that runs or is in line may touch the weights any more."""
        if self._transfer is None:
            return
        self._transfer.cancel()
        self._transfer.join()
        self._transfer = None
        self.region.vacate(range(self.region.slots))

    def _new_transfer(self, owner: str) -> Transfer:
        return Transfer(TransferKind.WEIGHTS, owner, self.layout.nbytes, time.monotonic())

    def _write_region(self, transfer: Transfer) -> None:
        """From the files, or from a master image that is encoded."""
        size = self.region.slots * self._slab_bytes
        write = self._write_staged if self._staged else self._write
        if self._master is not None:
            write = self._write_decoded

        def map_and_write(transfer: Transfer, image: Image) -> None:
            for slots in self._steps():
                if transfer.cancelled:
                    raise TransferCancelled(f"{self.region.owner} was cancelled")
                self.region.map_aside(slots)
            write(transfer, image)

        _carry_out(transfer, Image([self.region.address], size), map_and_write)

    def _write_decoded(self, transfer: Transfer, image: Image) -> None:
        """A `Write`. What is damaged is read from the files."""
        assert self._master is not None, "there is no image"
        assert self._codec is not None, "the image is plain"
        try:
            self._codec.decode(self._master, self.layout.nbytes, transfer, image)
        except ImageDamaged as error:
            log.error("%s is loaded from its files: %s", self.region.owner, error)
            self._write(transfer, image)

    def _write_staged(self, transfer: Transfer, image: Image) -> None:
        """A `Write`, to memory that the host cannot write to. Lands when all of it was read."""
        with mmap.mmap(-1, self.layout.nbytes) as buffer:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            self._write(_Staging(transfer), Image([address], self.layout.nbytes))
            for start in range(0, self.layout.nbytes, PIECE_BYTES):
                if transfer.cancelled:
                    raise TransferCancelled(f"{self.region.owner} was cancelled")
                size = min(PIECE_BYTES, self.layout.nbytes - start)
                self._copy(self.region.address + start, address + start, size)
                transfer.land(size)

    def _copies(self, master: Image) -> Iterator[Copy]:
        """From the master image to the region, first byte to last, each part of which is mapped
        when it is asked for."""
        for slots in self._steps():
            self.region.map_aside(slots)
            start = slots.start * self._slab_bytes
            size = min(len(slots) * self._slab_bytes, self.layout.nbytes - start)
            address = self.region.address + start
            for source, nbytes in master.parts(start, size):
                yield Copy(address, source, nbytes)
                address += nbytes

    def _steps(self) -> Iterator[range]:
        """All slots, in the order of the image, as many as are mapped at one go."""
        step = max(1, MAPPED_AHEAD_BYTES // self._slab_bytes)
        for first in range(0, self.region.slots, step):
            yield range(first, min(first + step, self.region.slots))


class _Staging(Transfer):
    """The first half of a transfer; cancelled when the whole is."""

    def __init__(self, whole: Transfer) -> None:
        super().__init__(whole.kind, whole.owner, whole.nbytes, whole.queued)
        self._whole = whole

    @property
    def cancelled(self) -> bool:
        return self._whole.cancelled


def _carry_out(transfer: Transfer, target: Image, write: Write) -> None:
    """Have the transfer begin and end around `write`."""
    transfer.begin(time.monotonic())
    try:
        write(transfer, target)
    except BaseException as error:
        transfer.fail(error, time.monotonic())
    else:
        transfer.finish(time.monotonic())
