"""The processor time of this process: how much it took, and an end to what takes too much."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

LOWEST_PRIORITY: Final = 19
AGAIN_SECONDS: Final = 0.1
MOST_SECONDS: Final = 1e6
"""More than any advice takes; a timer takes no number without end."""


class OutOfCpuTime(BaseException):
    """No `Exception`: what catches those to go on must not catch this."""


class CpuMeter:
    """That of this process, in its main thread."""

    def seconds(self) -> float:
        """User and system time, of all threads."""
        return time.process_time()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Raises `OutOfCpuTime` once the process took `seconds` more, and again every
        `AGAIN_SECONDS` until the end: in some places (a finalizer, a bare ``except``) it is lost.
        It ends Python code that computes, not code that sleeps or waits."""
        if seconds <= 0:
            raise OutOfCpuTime
        before = signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, min(seconds, MOST_SECONDS), AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def lower_priority() -> None:
    """Have everything else on this machine go first, from now until this process ends."""
    os.nice(LOWEST_PRIORITY)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise OutOfCpuTime
