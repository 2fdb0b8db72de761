"""A registry of metrics that also knows what it has, for the documentation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Family(NamedTuple):
    """A metric as a scraper names it. `kind` is ``counter``, ``gauge`` or ``histogram``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


class Registry:
    """The metrics of one daemon; no globals."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self._registry = CollectorRegistry()

    def exposition(self) -> bytes:
        """The text format that a scraper reads."""
        return generate_latest(self._registry)

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        self.families.append(Family(f"{name}_total", "counter", labels, about))
        return Counter(name, about, labels, registry=self._registry)

    def gauge(self, name: str, about: str, *labels: str) -> Gauge:
        self.families.append(Family(name, "gauge", labels, about))
        return Gauge(name, about, labels, registry=self._registry)

    def histogram(self, name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
        self.families.append(Family(name, "histogram", labels, about))
        return Histogram(name, about, labels, registry=self._registry, buckets=tuple(buckets))

    def weighted(
        self, name: str, about: str, buckets: Sequence[float], label: str
    ) -> WeightedHistogram:
        self.families.append(Family(name, "histogram", (label,), about))
        collector = WeightedHistogram(name, about, label, buckets)
        self._registry.register(collector)
        return collector


class WeightedHistogram(Collector):
    """A histogram by one label that takes several equal observations at once, in one list update.

    The library's own takes one at a time, under a lock; this one is fed per token
    or per question.
    """

    def __init__(self, name: str, about: str, label: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._about = about
        self._label = label
        self._bounds = tuple(buckets)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, label: str, value: float, count: int = 1) -> None:
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
            self._sums[label] = 0.0
        counts[bisect_left(self._bounds, value)] += count
        self._sums[label] += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._about, labels=(self._label,))
        bounds = [*map(str, self._bounds), "+Inf"]
        for label, counts in self._counts.items():
            cumulated = zip(bounds, map(float, accumulate(counts)), strict=True)
            family.add_metric((label,), list(cumulated), self._sums[label])
        yield family
