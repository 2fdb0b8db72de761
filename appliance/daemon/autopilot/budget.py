"""The processor time that replays may take: charged before it is spent, over any hour."""

from __future__ import annotations

from collections import deque

from appliance.service.autopilot import HOUR_SECONDS


class CpuBudget:
    """At most so many seconds are spent in any hour. Time is an argument, and never goes back.

    What is charged may be spent at any time until `ended`, so it is dated then: dated at its begin,
    an hour that begins between the two would have it without a charge.
    """

    def __init__(self, seconds_per_hour: float) -> None:
        self.seconds_per_hour = seconds_per_hour
        self._spending = 0.0
        self._charges: deque[tuple[float, float]] = deque()
        """When each ended, and how many."""

    def charged(self, now: float) -> float:
        """In the hour before `now`."""
        while self._charges and now - self._charges[0][0] >= HOUR_SECONDS:
            self._charges.popleft()
        return self._spending + sum(seconds for _, seconds in self._charges)

    def charge(self, now: float, seconds: float) -> bool:
        """Take so many, if there are so many left; whether it did."""
        if self.charged(now) + seconds > self.seconds_per_hour:
            return False
        self._spending += seconds
        return True

    def ended(self, now: float) -> None:
        """Nothing of what was charged is spent from now on."""
        if self._spending:
            self._charges.append((now, self._spending))
            self._spending = 0.0
