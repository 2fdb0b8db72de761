"""Counts what clients got of what they were promised, of all models together."""

from __future__ import annotations

from appliance.service.autopilot import Promises


class PromiseCount:
    """All that ever was, so that two of them say what was between. Every call costs O(1)."""

    def __init__(self) -> None:
        self._tokens = self._late = self._requests = self._missed = 0

    def tokens(self, count: int, late: int) -> None:
        """So many came, of which so many were late."""
        self._tokens += count
        self._late += late

    def ended(self, *, missed: bool) -> None:
        """A request ended, or was refused."""
        self._requests += 1
        self._missed += missed

    def with_live(self, missed: int) -> Promises:
        """With so many live requests that miss a target already: without them, who is never
        answered would never count."""
        return Promises(
            tokens=self._tokens,
            late=self._late,
            requests=self._requests + missed,
            missed=self._missed + missed,
        )
