"""What a model delivered, ever and in the last minute: tokens, in time or late, and how fast."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from appliance.service.interface import WindowStats

WINDOW_SECONDS = 60.0
SLICE_SECONDS = 5.0
"""The window moves on by so much at a time."""
STEP = math.log(1.1)
"""Times are kept to within 5 %: each as the tenth part more that it is nearest to."""
LEAST_SECONDS = 1e-6


class _Times:
    """How often times of each size occurred."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> int:
        size = round(math.log(max(seconds, LEAST_SECONDS)) / STEP)
        self._counts[size] += count
        return size

    def forget(self, sizes: Counter[int]) -> None:
        self._counts -= sizes

    def quantile(self, share: float) -> float | None:
        """The time that this share of them was not above; None if there were none."""
        left = math.ceil(share * self._counts.total())
        for size in sorted(self._counts):
            left -= self._counts[size]
            if left <= 0:
                return math.exp(size * STEP)
        return None


@dataclass(slots=True)
class _Slice:
    """A stretch of the window that began at `began`."""

    began: float
    tokens: int = 0
    late: int = 0
    first: Counter[int] = field(default_factory=Counter)
    between: Counter[int] = field(default_factory=Counter)


class SloWindow:
    """Of one model. Tokens cost O(1); asking costs O(different times). Time is an argument."""

    def __init__(self) -> None:
        self.output_tokens = 0
        """All there ever were."""
        self._slices: deque[_Slice] = deque()
        self._tokens = 0
        self._late = 0
        self._first = _Times()
        self._between = _Times()

    def tokens(self, now: float, count: int, late: int) -> None:
        """So many tokens came, of which so many were late; none of prompts that were pooled."""
        self.output_tokens += count
        self._tokens += count
        self._late += late
        piece = self._slice(now)
        piece.tokens += count
        piece.late += late

    def first_token(self, now: float, seconds: float) -> None:
        """One was the first, so long after its request."""
        self._slice(now).first[self._first.add(seconds)] += 1

    def next_token(self, now: float, seconds: float, count: int = 1) -> None:
        """So many came, each so long after the one before."""
        self._slice(now).between[self._between.add(seconds, count)] += count

    def recent(self, now: float) -> tuple[int, int]:
        """Tokens of the last minute, and how many of them were late."""
        self._forget(now)
        return self._tokens, self._late

    def window(self, now: float) -> WindowStats | None:
        """The last minute; None if nothing came in it."""
        self._forget(now)
        if not self._slices:
            return None
        return WindowStats(
            attainment=None if not self._tokens else 1 - self._late / self._tokens,
            ttft_p50_seconds=self._first.quantile(0.5),
            ttft_p99_seconds=self._first.quantile(0.99),
            tbt_p50_seconds=self._between.quantile(0.5),
            tbt_p99_seconds=self._between.quantile(0.99),
        )

    def _slice(self, now: float) -> _Slice:
        if not self._slices or now - self._slices[-1].began >= SLICE_SECONDS:
            self._forget(now)
            self._slices.append(_Slice(now))
        return self._slices[-1]

    def _forget(self, now: float) -> None:
        while self._slices and now - self._slices[0].began >= WINDOW_SECONDS:
            gone = self._slices.popleft()
            self._tokens -= gone.tokens
            self._late -= gone.late
            self._first.forget(gone.first)
            self._between.forget(gone.between)
