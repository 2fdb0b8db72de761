"""The `Vmm` of a GPU: physical slabs made once, mapped by the driver's virtual memory calls."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from appliance.memory.cuda.driver import CudaContext, CudaError, call, driver
from appliance.memory.cuda.events import Flights
from appliance.memory.cuda.pinning import CHUNK_BYTES, HostPinning, cut
from appliance.memory.cuda.streams import CudaStream
from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer


class CudaVmm:
    """Slabs of one GPU's memory, all of them taken at the start.

    Every slab is an allocation of its own: the driver maps an allocation from its beginning only.
    No other process gets the memory of the pool, and none is asked of the driver later.
    """

    def __init__(self, device: int, slabs: int, slab_bytes: int) -> None:
        """Raises `ValueError` for a size the device cannot map, `CudaError` if memory is short.

        Then everything taken so far has been given back.
        """
        if slabs < 1:
            raise ValueError(f"a pool needs at least one slab, not {slabs}")
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self.compute_stream = 0
        """Raw handle of the stream the engines compute on; CUDA's legacy default at first."""
        self.context = CudaContext(device)
        self._mapped: set[int] = set()  # addresses that have a slab
        self._left: set[int] = set()  # of these, what a mapping that failed could not take away
        self._handles: list[Any] = []
        self._copying = threading.Lock()
        self._copies: Any = None
        self._computed: Any = None
        self._flights = Flights()
        self._pinnings: list[HostPinning] = []
        try:
            self.context.use()
            self._take()
        except BaseException:
            self.close()
            raise

    def reserve(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ValueError(f"a range of {nbytes} bytes")
        size = self._whole(nbytes)
        self.context.use()
        return int(call("cuMemAddressReserve", size, self._granularity, 0, 0, of=f"{size} bytes"))

    def map(self, address: int, slab: int, count: int = 1) -> None:
        if slab < 0 or count < 1 or slab + count > self.slabs:
            last = slab + count - 1
            raise ValueError(f"slab {slab if slab < 0 else last} is not one of {self.slabs}")
        self.context.use()
        size = self.slab_bytes
        places = range(address, address + count * size, size)
        for place in self._left.intersection(places):
            self.unmap(place)
        done = 0
        try:
            for handle in self._handles[slab : slab + count]:
                place = address + done * size
                call("cuMemMap", place, size, 0, handle, 0, of=f"{size} bytes at {place:#x}")
                self._mapped.add(place)
                done += 1
            call("cuMemSetAccess", address, count * size, [self._access], 1, of=f"{count} slabs")
        except CudaError:
            with contextlib.suppress(CudaError):
                self.unmap(address, done)
            # What it refuses to unmap, the next mapping there, or `release`, tries again.
            self._left.update(self._mapped.intersection(places))
            raise

    def unmap(self, address: int, count: int = 1) -> None:
        self.context.use()
        for place in range(address, address + count * self.slab_bytes, self.slab_bytes):
            if place in self._mapped:  # else a call before that failed took it away
                # One by one: the driver takes away exactly what one `cuMemMap` put there.
                call("cuMemUnmap", place, self.slab_bytes, of=f"{place:#x}")
                self._mapped.remove(place)
                self._left.discard(place)

    def release(self, address: int, nbytes: int) -> None:
        size = self._whole(nbytes)
        self.unmap(address, size // self.slab_bytes)
        call("cuMemAddressFree", address, size, of=f"{size} bytes at {address:#x}")

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """As `Vmm.copy`; what was given to the compute stream before happens before."""
        self.context.use()
        # Not cuMemcpy: that may return early, and would wait for every stream of the process.
        with self._copying:
            call("cuEventRecord", self._computed, self.compute_stream)
            call("cuStreamWaitEvent", self._copies, self._computed, 0)
            try:
                for part in cut(Copy(destination, source, nbytes), self._pinnings):
                    if part.nbytes:
                        what = f"{part.nbytes} bytes"
                        call("cuMemcpyAsync", *part[:3], self._copies, of=what)
            finally:  # also of parts before one that was refused
                call("cuStreamSynchronize", self._copies, of=f"a copy of {nbytes} bytes")

    def stream(self, name: str) -> CudaStream:
        return CudaStream(
            name,
            self.context,
            self._flights,
            compute=lambda: self.compute_stream,
            pinnings=self._pinnings,
        )

    def adopt_thread(self) -> None:
        self.context.adopt_thread()

    def compute_waits(self, transfer: Transfer, nbytes: int | None = None) -> None:
        """Have all that is given to the compute stream from now on wait for a transfer's bytes.

        The first `nbytes` of them, or all if None. The calling thread waits until their copy has
        been handed to the driver, not until it is done. Raises `TransferFailed` if they will not
        arrive.
        """
        self.context.use()
        self._flights.compute_waits(transfer, self.compute_stream, nbytes)

    def register(self, address: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> HostPinning:
        """Page-lock the host tier for this device, in the background; see `HostPinning`."""
        pinning = HostPinning(self.context, address, nbytes, chunk_bytes)
        self._pinnings.append(pinning)
        pinning.start()
        return pinning

    def close(self) -> None:
        """As `Vmm.close`, and stop pinning host memory; idempotent. Close its streams before."""
        for pinning in self._pinnings:
            pinning.close()
        self._pinnings.clear()
        with contextlib.suppress(CudaError):
            self.context.use()
        # One that fails (a context that an error has broken) does not keep the others.
        while self._handles:
            with contextlib.suppress(CudaError):
                call("cuMemRelease", self._handles.pop())
        if self._copies is not None:
            with contextlib.suppress(CudaError):
                call("cuStreamDestroy", self._copies)
            self._copies = None
        if self._computed is not None:
            with contextlib.suppress(CudaError):
                call("cuEventDestroy", self._computed)
            self._computed = None
        with contextlib.suppress(CudaError):
            self.context.close()

    def _take(self) -> None:
        cuda = driver()
        place = cuda.CUmemLocation()
        place.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = self.context.device
        kind = cuda.CUmemAllocationProp()
        kind.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location = place
        self._access = cuda.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(call("cuMemGetAllocationGranularity", kind, least))
        if self.slab_bytes < 1 or self.slab_bytes % self._granularity:
            raise ValueError(
                f"slab size {self.slab_bytes} is not a multiple of {self._granularity}, which is "
                f"what device {self.context.device} maps at least; set devices.slab to a multiple"
            )
        # Before the slabs: the driver needs some memory for these itself.
        self._copies = call("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._computed = call("cuEventCreate", cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        for slab in range(self.slabs):
            of = f"{self.slab_bytes} bytes (slab {slab + 1} of {self.slabs})"
            self._handles.append(call("cuMemCreate", self.slab_bytes, kind, 0, of=of))

    def _whole(self, nbytes: int) -> int:
        return -(-nbytes // self._granularity) * self._granularity
