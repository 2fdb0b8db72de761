"""Fragmentation of KV memory, by shape and overall, as Aegaeon counts it: unused / peak allocated.

*Allocated* are whole slabs, *unused* is what neither used nor cold blocks (prefix cache) fill of
them (§7.3, figure 16). A shape is known by the size of its blocks in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from appliance.engines.protocol import KvBytes


def fragmentation(use: KvBytes) -> float:
    """Unused / peak allocated; 0.0 when nothing was ever allocated."""
    if not use.peak_bytes:
        return 0.0
    return (use.mapped_bytes - use.used_bytes - use.cold_bytes) / use.peak_bytes


def together(uses: Iterable[KvBytes]) -> KvBytes:
    """The sum of several. Peaks add up too, so parts that share slabs need a peak of their own."""
    return KvBytes(*map(sum, zip(KvBytes(0, 0, 0, 0), *uses, strict=True)))


def by_shape(uses: Iterable[tuple[int, KvBytes]]) -> dict[int, KvBytes]:
    """The sum for each shape, in the order of the shapes."""
    shapes: dict[int, list[KvBytes]] = {}
    for shape, use in uses:
        shapes.setdefault(shape, []).append(use)
    return {shape: together(parts) for shape, parts in sorted(shapes.items())}


class KvMeter:
    """KV of one place by shape, and the most it was at any measurement.

    Models (and shapes) take slabs from each other, so their peaks must not be added up: what is
    kept is the largest sum that was seen, or the largest peak of one model if that is more. Between
    measurements the sum may have been higher; the peak is too low then, never too high.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        """The most that all shapes took together."""
        self._peaks: dict[int, int] = {}

    def measure(self, uses: Iterable[tuple[int, KvBytes]]) -> dict[int, KvBytes]:
        """Take what each model (with its shape) has now; what each shape has."""
        uses = list(uses)
        for shape, use in uses:
            self._peaks[shape] = max(self._peaks.get(shape, 0), use.peak_bytes)
        measured = by_shape(uses)
        for shape, use in measured.items():
            self._peaks[shape] = max(self._peaks[shape], use.mapped_bytes)
            measured[shape] = use._replace(peak_bytes=self._peaks[shape])
        mapped = sum(use.mapped_bytes for use in measured.values())
        self.peak_bytes = max([self.peak_bytes, mapped, *self._peaks.values()])
        return measured
