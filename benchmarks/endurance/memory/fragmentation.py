"""Unused memory of every KV shape over time, as in Aegaeon §7.3 and its figure 16."""

from __future__ import annotations

import time
from collections import Counter, defaultdict


class Fragmentation:
    """Unused memory by shape, looked at again and again. Sizes are bytes, times seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._unused: dict[str, int] = {}
        self._allocated: dict[str, int] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._allocated_sums: defaultdict[str, float] = defaultdict(float)
        self._worst: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()

    def look(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Used and allocated bytes of every shape, from now on."""
        now = time.monotonic()
        for shape, unused in self._unused.items():
            self._sums[shape] += unused * (now - self._last)
            self._allocated_sums[shape] += self._allocated[shape] * (now - self._last)
        self._last = now
        self._unused = {shape: there - used for shape, (used, there) in shapes.items()}
        self._allocated = {shape: there for shape, (_, there) in shapes.items()}
        self._unused["overall"] = sum(self._unused.values())
        self._allocated["overall"] = sum(self._allocated.values())
        for shape, unused in self._unused.items():
            self._worst[shape] = max(self._worst[shape], unused)
            self._peaks[shape] = max(self._peaks[shape], self._allocated[shape])

    def report(self) -> dict[str, dict[str, float]]:
        seconds = self._last - self._began
        return {
            shape: {
                "peak_allocated_bytes": peak,
                "unused_by_peak_mean": round(self._sums[shape] / seconds / peak, 5),
                "unused_by_peak_worst": round(self._worst[shape] / peak, 5),
                "unused_by_allocated_mean": round(
                    self._sums[shape] / max(self._allocated_sums[shape], 1e-9), 5
                ),
            }
            for shape, peak in sorted(self._peaks.items())
            if peak
        }
