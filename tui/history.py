"""Spans from before the dashboard was opened, of one window, as far as the daemon keeps them."""

from __future__ import annotations

import math

from tui.messages import DaemonRefused, DaemonSource, Document
from tui.state import State

PATH = "/api/timeline"
MOST_PAST = 8000
"""Spans of a window that are asked for; a wider window has its newest ones."""


class PastSpans:
    """What the state has not: the spans of the window that was asked for last."""

    def __init__(self) -> None:
        self._daemon = 0
        self._forget()

    def _forget(self) -> None:
        self.spans: dict[str, Document] = {}
        """By number, in order."""
        self._since = math.inf
        """All spans that ended since then are known, until those of the state follow."""
        self._asked: tuple[float, float] | None = None

    def lacks(self, state: State, left: float, right: float) -> bool:
        """Whether spans between these times (Unix seconds) are to be asked for."""
        if self._daemon != state.daemons:
            self._forget()
            self._daemon = state.daemons
        if left >= state.complete_since:
            return False
        if self._asked is None:
            return True
        since, until = self._asked
        return left < since or min(right, state.complete_since) > until

    def known_since(self, state: State) -> float:
        """Spans that ended before are not known, whether there were any or not."""
        return min(self._since, state.complete_since)

    async def fetch(self, source: DaemonSource, since: float, until: float) -> None:
        """Ask for what went on between these times, page by page. A daemon that has no answer has
        nothing to show."""
        self._asked = since, until
        found: dict[str, Document] = {}
        known, before = since, None
        try:
            while True:
                page = await source.ask("GET", _path(since, until, before))
                found |= {str(span["number"]): span for span in page["spans"]}
                before, kept = page["before"], page["kept_since_unix_seconds"]
                if before is None:
                    known = since if kept is None else max(since, kept)
                    break
                if len(found) >= MOST_PAST:
                    known = min(span["ended_unix_seconds"] for span in page["spans"])
                    break
        except DaemonRefused:
            found, known = {}, math.inf
        self.spans = dict(sorted(found.items(), key=lambda one: int(one[0])))
        self._since = known


def _path(since: float, until: float, before: int | None) -> str:
    rest = "" if before is None else f"&before={before}"
    return f"{PATH}?since={since:.3f}&until={until:.3f}{rest}"
