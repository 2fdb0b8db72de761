"""Bytes on their way: what one thread copies, and others wait for, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class TransferKind(StrEnum):
    """What moves. Each kind has a stream of its own, so kinds overlap and one kind keeps order."""

    WEIGHTS = "weights"
    KV_IN = "kv_in"
    KV_OUT = "kv_out"


class TransferTrace(NamedTuple):
    """One transfer that is over; the three times are seconds of `time.monotonic`."""

    kind: TransferKind
    owner: str
    moved_bytes: int
    queued: float
    began: float
    ended: float


class TransferFailed(Exception):
    """The bytes did not arrive, and never will; what is at the target is undefined."""


class TransferCancelled(TransferFailed):
    """The bytes are not needed any more."""


class Transfer:
    """`nbytes` bytes for `owner`, landing in order. One thread advances it, any may wait.

    Bytes land from the first to the last, so a wait for the first layers of a model is a wait
    for as many bytes as those take. `finish` or `fail` is called exactly once, by the executor.
    """

    def __init__(self, kind: TransferKind, owner: str, nbytes: int, now: float) -> None:
        self.kind = kind
        self.owner = owner
        self.nbytes = nbytes
        self.queued = now
        self.began: float | None = None
        self.ended: float | None = None
        self.landed = 0
        self.error: BaseException | None = None
        self.on_end: Callable[[Transfer], None] | None = None
        """Called once, by the executor's thread, when it is over; set before it is handed in."""
        self._cancelled = False
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self.ended is not None

    @property
    def cancelled(self) -> bool:
        """Whether the executor should stop at the next piece."""
        return self._cancelled

    def wait(self, nbytes: int | None = None) -> None:
        """Return when the first `nbytes` bytes (all, if None) are in place.

        Raises `TransferFailed`, or `TransferCancelled`, if they will not arrive.
        """
        wanted = self.nbytes if nbytes is None else min(nbytes, self.nbytes)
        if self.landed >= wanted and (nbytes is not None or self.done) and self.error is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self.done or (nbytes is not None and self.landed >= wanted)
            )
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        """Return when it is over, well or not."""
        if not self.done:
            with self._changed:
                self._changed.wait_for(lambda: self.done)

    def cancel(self) -> None:
        """Ask for an end at the next piece; idempotent, without effect once it is over."""
        self._cancelled = True

    def begin(self, now: float) -> None:
        self.began = now

    def land(self, nbytes: int) -> None:
        """So many more bytes are in place."""
        with self._changed:
            self.landed += nbytes
            self._changed.notify_all()

    def finish(self, now: float) -> None:
        """All bytes are in place."""
        with self._changed:
            self.landed = self.nbytes
            self._end(now)
        self._tell()

    def fail(self, error: BaseException, now: float) -> None:
        """No more bytes will come. Waiters get a `TransferFailed` that names `error`."""
        if not isinstance(error, TransferFailed):
            failed = TransferFailed(f"{self.kind} of {self.owner}: {error}")
            failed.__cause__ = error
            error = failed
        with self._changed:
            self.error = error
            self._end(now)
        self._tell()

    def _end(self, now: float) -> None:
        assert self.ended is None, f"{self.kind} of {self.owner} ends twice"
        self.ended = now
        self._changed.notify_all()

    def _tell(self) -> None:
        if self.on_end is not None:
            self.on_end(self)

    def trace(self) -> TransferTrace:
        """What happened; only once it is over."""
        assert self.ended is not None, "the transfer is not over"
        began = self.ended if self.began is None else self.began
        return TransferTrace(
            kind=self.kind,
            owner=self.owner,
            moved_bytes=self.landed,
            queued=self.queued,
            began=began,
            ended=self.ended,
        )
