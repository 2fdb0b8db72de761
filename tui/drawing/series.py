"""How fast a counter goes up, and how fast it went up lately."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import pairwise

MOST_SAMPLES = 600


class Counter:
    """Samples of something that only goes up; who samples it when it changes misses nothing."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST_SAMPLES)
        self._values: deque[float] = deque(maxlen=MOST_SAMPLES)

    def sample(self, at: float, value: float) -> None:
        """It is `value` at the time `at`. One that went down was begun anew, as by a restart."""
        if self._values and value < self._values[-1]:
            self._times.clear()
            self._values.clear()
        self._times.append(at)
        self._values.append(value)

    def rate(self, now: float, seconds: float) -> float:
        """Per second, over the last `seconds`, or since it is known."""
        if not self._values:
            return 0.0
        start = max(now - seconds, self._times[0])
        return (self._values[-1] - self._at(start)) / max(seconds / 10, now - start)

    def increases(self, now: float, buckets: int, seconds: float) -> list[float]:
        """By how much it went up in each of the last buckets of `seconds`, the oldest first. They
        begin at multiples of `seconds`, so that they do not flicker."""
        if not self._values:
            return [0.0] * buckets
        end = now // seconds * seconds
        edges = [self._at(end - seconds * (buckets - index)) for index in range(buckets + 1)]
        return [after - before for before, after in pairwise(edges)]

    def _at(self, time: float) -> float:
        place = bisect_right(self._times, time)
        return self._values[max(0, place - 1)]
