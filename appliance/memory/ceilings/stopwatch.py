"""Times pieces of work in a given time. Plain Python: `benchmarks/gpu_switch.py` uses it, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

from appliance.memory.arena import Region

MOST_ROUNDS: Final = 8
LEAST_ROUNDS: Final = 2
"""Besides one that is not counted: pages and caches are met for the first time."""

Clock = Callable[[], float]


class Stopwatch:
    """Times pieces of work, each in a share of the seconds that there are for all."""

    def __init__(self, seconds: float, pieces: int, clock: Clock = time.perf_counter) -> None:
        self._each = seconds / pieces
        self._clock = clock

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one go."""
        began = self._clock()
        work()
        return self._clock() - began

    def fastest(self, work: Callable[[], object], rounds: int | None = None) -> float:
        """Seconds of the fastest round, the first not counted: so many, or as many as there is
        time for."""
        end = self._clock() + self._each
        work()
        best = self.seconds(work)
        done = 1
        while done < (rounds or MOST_ROUNDS):
            if rounds is None and done >= LEAST_ROUNDS and self._clock() >= end:
                break
            best = min(best, self.seconds(work))
            done += 1
        return best

    def mapping(self, region: Region, slabs: int, rounds: int = MOST_ROUNDS) -> tuple[float, float]:
        """Seconds, the median, in which so many slabs are mapped at once, and unmapped."""
        maps, unmaps = [], []
        for _ in range(rounds):
            maps.append(self.seconds(lambda: region.map(range(slabs))))
            unmaps.append(self.seconds(lambda: region.unmap(range(slabs))))
        return statistics.median(maps), statistics.median(unmaps)
