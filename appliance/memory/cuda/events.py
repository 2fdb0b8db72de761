"""CUDA events: how far the copies of a transfer are, for other streams, threads and processes.

A wait for an event that is not recorded yet is no wait. So a thread that makes a stream wait for
bytes first waits itself until the copy of these bytes is in line behind a mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from typing import Any, Final

from appliance.memory.cuda.driver import CudaContext, CudaError, call, driver
from appliance.memory.transfers import Transfer

IPC_HANDLE_BYTES: Final = 64


class EventPool:
    """Events that are used again; making one costs more than recording it."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def record(self, stream: Any) -> Any:
        """An event behind what is in line now; a thread that waits for it sleeps.

        Raises `CudaError`.
        """
        try:
            event = self._free.pop()
        except IndexError:
            event = call("cuEventCreate", driver().CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        try:
            call("cuEventRecord", event, stream)
        except CudaError:
            self.give(event)
            raise
        return event

    def give(self, event: Any) -> None:
        """Back; what waits for it already is not disturbed when it is recorded anew."""
        self._free.append(event)

    def close(self) -> None:
        """One that the driver refuses to take back does not keep the others."""
        while self._free:
            with contextlib.suppress(CudaError):
                call("cuEventDestroy", self._free.pop())


class _Flight:
    """What of one transfer has been handed to the driver."""

    def __init__(self) -> None:
        self.issued = 0
        self.whole = False
        self.marks: deque[tuple[int, Any]] = deque()  # (bytes before it, event), not yet landed


class Flights:
    """The transfers under way on all streams of a device, and the marks behind their pieces."""

    def __init__(self) -> None:
        self._flights: dict[Transfer, _Flight] = {}
        self._changed = threading.Condition()

    def enter(self, transfer: Transfer) -> None:
        """It has been given to a stream."""
        with self._changed:
            self._flights[transfer] = _Flight()

    def issue(self, transfer: Transfer, nbytes: int, mark: Any) -> None:
        """So many more bytes are in line, and `mark` is recorded behind them."""
        with self._changed:
            flight = self._flights[transfer]
            flight.issued += nbytes
            flight.marks.append((flight.issued, mark))
            self._changed.notify_all()

    def complete(self, transfer: Transfer) -> None:
        """Its last piece is in line."""
        with self._changed:
            self._flights[transfer].whole = True
            self._changed.notify_all()

    def land(self, transfer: Transfer) -> None:
        """Its oldest mark has been reached; no new wait for it begins."""
        with self._changed:
            self._flights[transfer].marks.popleft()

    def leave(self, transfer: Transfer) -> None:
        """It is over."""
        with self._changed:
            del self._flights[transfer]
            self._changed.notify_all()

    def follow(self, transfer: Transfer, stream: Any) -> None:
        """Have what is given to `stream` from now on come after all of a transfer.

        Returns as soon as that is in line; for one that is on no stream of this device, or ends
        early, when it is over.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (flight := self._flights.get(transfer)) is None or flight.whole
            )
            flight = self._flights.get(transfer)
            if flight is not None:
                if flight.marks:
                    call("cuStreamWaitEvent", stream, flight.marks[-1][1], 0)
                return
        transfer.join()

    def compute_waits(self, transfer: Transfer, stream: Any, nbytes: int | None) -> None:
        """As `follow`, for the first `nbytes` bytes. Raises `TransferFailed` if they won't come."""
        wanted = transfer.nbytes if nbytes is None else min(nbytes, transfer.nbytes)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    (flight := self._flights.get(transfer)) is None
                    or flight.whole
                    or (flight.issued >= wanted and nbytes is not None)
                )
            )
            flight = self._flights.get(transfer)
            if flight is not None:
                # None: they have all landed.
                mark = next((event for end, event in flight.marks if end >= wanted), None)
                if mark is not None:
                    call("cuStreamWaitEvent", stream, mark, 0)
                return
        transfer.wait(wanted)


class SharedEvent:
    """An event that another process may wait for: recorded here, waited for there.

    It has to live until the other process has opened it, so its maker keeps it.
    """

    def __init__(self, context: CudaContext) -> None:
        """Raises `CudaError`."""
        context.use()
        flags = driver().CUevent_flags
        both = flags.CU_EVENT_INTERPROCESS | flags.CU_EVENT_DISABLE_TIMING
        self._context = context
        self.event: Any = call("cuEventCreate", int(both))
        try:
            handle = call("cuIpcGetEventHandle", self.event)
        except CudaError:
            with contextlib.suppress(CudaError):
                self.close()
            raise
        self.handle = ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)
        """What is sent to the other process; `IPC_HANDLE_BYTES` bytes."""

    def close(self) -> None:
        """Idempotent. Raises `CudaError`; then it can be called again."""
        if self.event is not None:
            self._context.use()
            call("cuEventDestroy", self.event)
            self.event = None


def open_event(handle: bytes) -> Any:
    """Another process's event, to be destroyed by the caller.

    Raises `CudaError`, `ValueError` for what cannot be a handle.
    """
    if len(handle) != IPC_HANDLE_BYTES:
        raise ValueError(f"an event's handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
    event = driver().CUipcEventHandle()
    ctypes.memmove(int(event.getPtr()), handle, IPC_HANDLE_BYTES)
    return call("cuIpcOpenEventHandle", event)
