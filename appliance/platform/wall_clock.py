"""Unix time that jumps of the system clock do not move.

Time is measured by a clock that cannot be set (CLOCK_BOOTTIME, which goes on while the machine
sleeps). The system clock is followed as long as it goes as fast. When it jumps, because it was set
wrong or right, what is deleted at its time is not deleted sooner or later for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

JUMP_SECONDS: Final = 60.0
"""What the system clock may be set by, without being taken for a jump: corrections over a network
are a fraction of it."""

log = logging.getLogger(__name__)


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WallClock:
    """Two times: `now` for what cannot be undone, as deleting what has expired; `latest` for what
    is written down, and for what may be refused too soon but not allowed too long. O(1)."""

    def __init__(
        self,
        *,
        not_before: float = 0.0,
        system: Callable[[], float] = time.time,
        steady: Callable[[], float] = _boot_time,
    ) -> None:
        """`latest` is not earlier than `not_before`, whatever the system clock says."""
        self._system = system
        self._steady = steady
        self._last_steady = steady()
        self._last = system()
        self._earliest = not_before
        self._jumped = False
        if self._last < not_before:
            log.error(
                "the system clock says %s, %.0f s before a file was written that is there: keys "
                "expire by the later time; set the clock right",
                _shown(self._last),
                not_before - self._last,
            )

    def now(self) -> float:
        """Unix time, not moved by jumps of the system clock since the start."""
        return self._read()[0]

    def latest(self) -> float:
        """The later one of `now` and what the system clock says. What is over as time has passed
        stays over when the clock is set back; what is written down does not expire too soon if it
        is `now` that is wrong."""
        return max(*self._read(), self._earliest)

    def _read(self) -> tuple[float, float]:
        system, steady = self._system(), self._steady()
        expected = self._last + (steady - self._last_steady)
        self._earliest += steady - self._last_steady
        self._last_steady = steady
        jumped = abs(system - expected) > JUMP_SECONDS
        self._last = expected if jumped else max(system, self._last)
        if jumped and not self._jumped:
            log.error(
                "the system clock jumped by %.0f s, to %s: batches and files expire by the time "
                "before; if the new time is right, restart the appliance",
                system - expected,
                _shown(system),
            )
        elif self._jumped and not jumped:
            log.info("the system clock is as expected again")
        self._jumped = jumped
        return self._last, system


def newest_change(paths: Iterable[Path]) -> float:
    """When the last of these files and folders changed, Unix time; 0 if none is there."""
    times = [0.0]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
