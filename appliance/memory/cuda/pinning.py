"""Page-locking host memory for a GPU: once, in the background, a chunk at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from appliance.memory import mapping
from appliance.memory.cuda.driver import CudaContext, CudaError, call, driver
from appliance.memory.streams import Copy

CHUNK_BYTES: Final = 256 << 20
"""What is registered at one go; the driver serves no other thread during that."""


class HostPinning:
    """A host range on its way to being page-locked. Copies work at any time, slower before.

    A copy must not cross from one chunk to another: the driver knows each as memory of its own,
    and refuses. `within` cuts copies accordingly.
    """

    def __init__(
        self, context: CudaContext, address: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.nbytes = nbytes
        self.pinned_bytes = 0
        """Locked so far, from the start of the range."""
        self.error: CudaError | None = None
        """Why the rest is not locked."""
        self._context = context
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._stopping = False
        self._thread = threading.Thread(target=self._pin, name="pin-host", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Return when all is page-locked. Raises `CudaError` if the driver refused."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def within(self, start: int, nbytes: int) -> Iterator[int]:
        """Sizes of the parts, each inside of one chunk or outside of all, of `nbytes` bytes."""
        while nbytes > 0:
            past = start - self._address
            if 0 <= past < self.nbytes:
                room = min(self._chunk_bytes - past % self._chunk_bytes, self.nbytes - past)
            else:
                room = -past if past < 0 else nbytes
            part = min(room, nbytes)
            yield part
            start, nbytes = start + part, nbytes - part

    def close(self) -> None:
        """Unlock; idempotent. No copy may be under way."""
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join()
        while self.pinned_bytes:
            start = (self.pinned_bytes - 1) // self._chunk_bytes * self._chunk_bytes
            with contextlib.suppress(CudaError):
                self._context.use()
            with contextlib.suppress(CudaError):
                call("cuMemHostUnregister", self._address + start)
            self.pinned_bytes = start

    def _pin(self) -> None:
        try:
            self._context.adopt_thread()
            # Portable: whatever context of this process copies from it finds it locked.
            portable = driver().CU_MEMHOSTREGISTER_PORTABLE
            for start in range(0, self.nbytes, self._chunk_bytes):
                if self._stopping:
                    return
                size = min(self._chunk_bytes, self.nbytes - start)
                # While the driver makes pages itself, 2 GB of them a second, all other calls wait.
                with contextlib.suppress(OSError):  # of a kernel that does not know how
                    mapping.populate(self._address + start, size)
                where = f"{size} bytes, {start} into the host tier"
                call("cuMemHostRegister", self._address + start, size, portable, of=where)
                self.pinned_bytes = start + size
        except CudaError as error:
            self.error = error


def cut(copy: Copy, pinnings: list[HostPinning]) -> Iterator[Copy]:
    """The same bytes in the same order, in copies that cross from no chunk to another."""
    sides = ((copy.destination, copy.destination_pitch), (copy.source, copy.source_pitch))
    whole = all(
        len(list(pinning.within(start, (copy.rows - 1) * pitch + copy.nbytes))) <= 1
        for start, pitch in sides
        for pinning in pinnings
    )
    if whole:
        yield copy
        return
    for row in range(copy.rows):
        destination = copy.destination + row * copy.destination_pitch
        source = copy.source + row * copy.source_pitch
        done = 0
        while done < copy.nbytes:
            part = copy.nbytes - done
            for pinning in pinnings:
                part = next(pinning.within(destination + done, part))
                part = next(pinning.within(source + done, part))
            yield Copy(destination + done, source + done, part)
            done += part
