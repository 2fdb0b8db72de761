"""How a policy fares at one decision: questions, faults, and how long it took to answer."""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final

from appliance.policywords import DecisionTally

RECENT: Final = 256
"""Questions of which quantiles are told."""


class Tally:
    """Counts. A question costs O(1); the quantiles are sorted out when they are asked for."""

    def __init__(self) -> None:
        self.calls = 0
        self.faults = 0
        self._seconds = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def took(self, seconds: float) -> None:
        """A question was answered, or not in time, after so long."""
        self._seconds += seconds
        self._recent.append(seconds)

    def told(self) -> DecisionTally:
        recent = sorted(self._recent)
        return DecisionTally(
            calls=self.calls,
            faults=self.faults,
            seconds=self._seconds,
            p50_seconds=_quantile(recent, 0.5),
            p99_seconds=_quantile(recent, 0.99),
            max_seconds=_quantile(recent, 1.0),
        )


def _quantile(ordered: list[float], share: float) -> float | None:
    """The least one that so many are not above."""
    return ordered[ceil(share * len(ordered)) - 1] if ordered else None
