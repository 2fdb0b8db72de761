"""The `Stream` of a GPU: copies that the driver does, in line on one of its streams.

One thread hands pieces to the driver, a bounded number ahead, and puts an event behind each;
another sleeps until the oldest event and tells that its piece has landed:

    pieces     | landed | in line: event, event, event | not issued yet |
                          ^ the second thread            ^ the first; a cancel ends it here

Other streams wait for these events on the device. Nothing waits in the thread that computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from appliance.memory.cuda.driver import CudaContext, CudaError, call, driver
from appliance.memory.cuda.events import EventPool, Flights, SharedEvent, open_event
from appliance.memory.cuda.pinning import HostPinning, cut
from appliance.memory.streams import Copy, pieces, require
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind

PIECE_BYTES: Final = 16 << 20
"""Larger than on the host: handing a piece over costs the same for any size, and links are fast.
An H200 copied pieces of 4 MiB at 96.6 % of its link's rate, of 16 MiB at 99.4 %, and of 64 MiB, for
which a cancel would wait four times as long, at 99.9 %."""

AHEAD_PIECES: Final = 32
"""Pieces in line with the driver: enough that it never runs dry, few enough to cancel soon."""

FOLLOWS_COMPUTE: Final = frozenset({TransferKind.KV_IN, TransferKind.KV_OUT})
"""What touches blocks that a step already in line may still write (a swap out reads them, a swap
in may get those of a request just ended). Weights go to slabs that no step knows."""


class _Job:
    """One transfer in line."""

    def __init__(
        self,
        transfer: Transfer,
        copies: Iterable[Copy],
        after: Sequence[Transfer],
        needs: Sequence[Transfer],
    ) -> None:
        self.transfer = transfer
        self.copies = copies
        self.after = after
        self.needs = needs
        self.computed: Any = None  # recorded on the compute stream when the job came
        self.start: Any = None  # recorded before the first piece
        self.error: BaseException | None = None
        self.broken = False  # the device failed; what seems to land does not count


class _Foreign(NamedTuple):
    """Another process's event that everything after it in line waits for."""

    event: Any


class _Mark(NamedTuple):
    """A piece in line with the driver.

    A job's first mark has no bytes: its start. Behind its last comes one without an event.
    """

    job: _Job
    event: Any
    nbytes: int


class _Adoption:
    """Makes the one thread that calls it a thread of the context's, until that was not refused."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._done = False

    def __call__(self) -> None:
        """Raises `CudaError`; then the next call tries again."""
        if not self._done:
            self._context.adopt_thread()
            self._done = True


class CudaStream:
    """One stream of a device, and the two threads that serve it."""

    def __init__(
        self,
        name: str,
        context: CudaContext,
        flights: Flights,
        *,
        compute: Callable[[], int],
        pinnings: list[HostPinning],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compute` tells the raw handle of the stream that engines compute on.

        Raises `CudaError`.
        """
        context.use()
        self._handle = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._context = context
        self._issuing, self._landing = _Adoption(context), _Adoption(context)
        self._flights = flights
        self._compute = compute
        self._pinnings = pinnings
        self._clock = clock
        self._events = EventPool()
        self._line: deque[_Job | _Foreign] = deque()
        self._jobs: set[_Job] = set()  # given and not over
        self._marks: deque[_Mark | None] = deque()  # None: no more will come
        self._closed = False
        self._disordered: CudaError | None = None  # of a wait for another process that was refused
        self._changed = threading.Condition()
        self._name = name
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True)
            for work, what in ((self._issue_all, "issue"), (self._land_all, "land"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def handle(self) -> int:
        """Raw handle of the driver's stream."""
        return int(self._handle)

    def run(
        self,
        transfer: Transfer,
        copies: Iterable[Copy],
        *,
        after: Sequence[Transfer] = (),
        needs: Sequence[Transfer] = (),
    ) -> None:
        """As `Stream.run`. KV also waits for all that the compute stream has been given by now."""
        job = _Job(transfer, copies, after, needs)
        with self._changed:
            if self._closed:
                raise RuntimeError(f"stream {self._name} is closed")
            if transfer.kind in FOLLOWS_COMPUTE:
                try:
                    self._context.use()
                    job.computed = self._events.record(self._compute())
                except CudaError as error:
                    job.error = error
            self._flights.enter(transfer)
            self._jobs.add(job)
            self._line.append(job)
            self._changed.notify_all()

    def export(self, transfer: Transfer) -> SharedEvent:
        """An event that another process can wait for instead of this stream's transfer.

        Returns when all of the transfer is in line. Raises `TransferFailed` if it has failed by
        then, `CudaError`. The caller closes the event once the other process has opened it.
        """
        shared = SharedEvent(self._context)
        try:
            # All of it is in line by then, on whatever stream, and what is recorded here behind it.
            self._flights.compute_waits(transfer, self._handle, None)
            call("cuEventRecord", shared.event, self._handle)
        except BaseException:
            with contextlib.suppress(CudaError):
                shared.close()
            raise
        return shared

    def await_event(self, handle: bytes) -> None:
        """All that is run from now on comes after another process's event; see `export`.

        Its maker must have recorded it before. Raises `CudaError`, `ValueError`, and
        `RuntimeError` when the stream is closed.
        """
        self._context.use()
        event = open_event(handle)
        with self._changed:
            if not self._closed:
                self._line.append(_Foreign(event))
                self._changed.notify_all()
                return
        with contextlib.suppress(CudaError):
            call("cuEventDestroy", event)
        raise RuntimeError(f"stream {self._name} is closed")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.transfer.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _issue_all(self) -> None:
        with contextlib.suppress(CudaError):  # what is broken shows with the first transfer
            self._issuing()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._closed)
                item = self._line.popleft() if self._line else None
            if item is None:
                self._put(None)
                return
            if isinstance(item, _Foreign):
                self._follow(item.event)
            else:
                self._issue(item)

    def _follow(self, foreign: Any) -> None:
        """Have all that is issued from now on come after another process's event."""
        try:
            self._issuing()
            try:
                call("cuStreamWaitEvent", self._handle, foreign, 0)
            except CudaError:
                call("cuEventSynchronize", foreign)  # this thread can wait instead
        except CudaError as error:
            self._disordered = error
        with contextlib.suppress(CudaError):
            call("cuEventDestroy", foreign)

    def _issue(self, job: _Job) -> None:
        transfer = job.transfer
        try:
            self._begin(job)
            issued = 0
            for piece in pieces(job.copies, PIECE_BYTES):
                for part in cut(piece, self._pinnings):
                    size = part.nbytes * part.rows
                    with self._changed:
                        self._changed.wait_for(lambda: len(self._marks) < AHEAD_PIECES)
                    _go_on(job)
                    if size:
                        self._copy(part)
                        self._mark(job, size)
                        issued += size
            if issued != transfer.nbytes:
                raise ValueError(f"{issued} bytes copied, not {transfer.nbytes}")
            self._flights.complete(transfer)
        except BaseException as error:  # whatever it is, a waiting thread needs it
            job.error = job.error or error
        self._put(_Mark(job, None, 0))

    def _begin(self, job: _Job) -> None:
        """Have the stream wait for all that comes before the job, and mark where it starts."""
        self._issuing()
        for earlier in (*job.after, *job.needs):
            self._flights.follow(earlier, self._handle)
        if self._disordered is not None:
            raise self._disordered
        require(job.transfer, [earlier for earlier in job.needs if earlier.done])
        _go_on(job)
        if job.computed is not None:
            call("cuStreamWaitEvent", self._handle, job.computed, 0)
        job.start = self._mark(job, 0)

    def _copy(self, copy: Copy) -> None:
        what = f"{copy.rows} rows of {copy.nbytes} bytes"
        if copy.rows == 1:
            target, source = copy.destination, copy.source
            call("cuMemcpyAsync", target, source, copy.nbytes, self._handle, of=what)
        else:
            cuda = driver()
            area = cuda.CUDA_MEMCPY2D()
            area.srcMemoryType = area.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
            area.srcDevice, area.srcPitch = copy.source, copy.source_pitch
            area.dstDevice, area.dstPitch = copy.destination, copy.destination_pitch
            area.WidthInBytes, area.Height = copy.nbytes, copy.rows
            call("cuMemcpy2DAsync", area, self._handle, of=what)

    def _mark(self, job: _Job, nbytes: int) -> Any:
        event = self._events.record(self._handle)
        self._flights.issue(job.transfer, nbytes, event)
        self._put(_Mark(job, event, nbytes))
        return event

    def _put(self, mark: _Mark | None) -> None:
        with self._changed:
            self._marks.append(mark)
            self._changed.notify_all()

    def _land_all(self) -> None:
        with contextlib.suppress(CudaError):
            self._landing()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._marks)
                mark = self._marks[0]
            if mark is None:
                break
            if mark.event is None:
                self._end(mark.job)
            else:
                self._land(mark)
            with self._changed:
                self._marks.popleft()
                self._changed.notify_all()
        with contextlib.suppress(CudaError):
            self._context.use()  # it may not have been to be had when this thread began
        self._events.close()
        with contextlib.suppress(CudaError):
            call("cuStreamDestroy", self._handle)

    def _land(self, mark: _Mark) -> None:
        """Wait for a piece in line, and tell that it has landed."""
        job, event, nbytes = mark
        transfer = job.transfer
        try:
            self._landing()
            call("cuEventSynchronize", event, of=f"{transfer.kind} of {transfer.owner}")
            if transfer.began is None and nbytes:
                # The driver's clock says how long it took, not when; so count back from now.
                took = call("cuEventElapsedTime", job.start, event) / 1000
                transfer.begin(self._clock() - took)
        except CudaError as error:
            job.error, job.broken = job.error or error, True
        self._flights.land(transfer)
        if nbytes:  # the start is read again, and goes back at the end
            self._events.give(event)
            if not job.broken:
                transfer.land(nbytes)

    def _end(self, job: _Job) -> None:
        """Everything of the job is off the device; it is over when all before it is."""
        for earlier in (*job.after, *job.needs):
            earlier.join()
        if job.broken or isinstance(job.error, CudaError):
            # A copy may be in line without its mark, or with one that could not be waited for.
            with contextlib.suppress(CudaError):
                self._landing()
                call("cuStreamSynchronize", self._handle)
        for event in (job.start, job.computed):
            if event is not None:
                self._events.give(event)
        try:
            # Also those that were in line already when ours was put behind them, and failed then.
            require(job.transfer, job.needs)
        except TransferFailed as error:
            job.error = job.error or error
        if job.error is None:
            job.transfer.finish(self._clock())
        else:
            job.transfer.fail(job.error, self._clock())
        self._flights.leave(job.transfer)
        with self._changed:
            self._jobs.discard(job)


def _go_on(job: _Job) -> None:
    if job.error is not None:
        raise job.error
    if job.transfer.cancelled:
        raise TransferCancelled(f"{job.transfer.kind} of {job.transfer.owner} was cancelled")
