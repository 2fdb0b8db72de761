"""Requests that the policy holds: until when, and which of them are looked at again before.

A held request has no instance. It is looked at again when its time has come, and sooner when
another request ended. Requests of one key, model and class wait in a line: where the first of a
line is held again when a request ended, so are the others, without a question about each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice
from typing import Final, TypeAlias

import msgspec

from appliance.scheduling.policy_api import Hold
from appliance.scheduling.state import RequestState
from appliance.vocabulary import ModelName, RequestClass, RequestId

LINES_LOOKED_AT: Final = 8
"""Lines whose first request is looked at again when something changed, at most: those that were
not looked at for longest."""
SHORTEST_HOLD_SECONDS: Final = 0.05
"""A hold that would be over sooner lasts so long: a policy must not be asked without a pause."""
_STALE: Final = 64
"""Alarms of holds that are over, or were prolonged, which are kept in any case."""

Line: TypeAlias = tuple[str, ModelName, RequestClass]


class Holds:
    """The held requests. To hold one and to let one go costs O(log held), amortized."""

    def __init__(self) -> None:
        self.of: dict[RequestId, Hold] = {}
        self.changed = False
        """Whether something changed since the lines were looked at."""
        self._lines: dict[Line, dict[RequestId, RequestState]] = {}
        """The requests of each line, the longest waiting first; first the line that was not looked
        at for longest."""
        self._alarms: list[tuple[float, RequestId]] = []
        """A heap of when holds are over; some of these are over, or were prolonged."""

    @property
    def alarms(self) -> int:
        """How many are kept."""
        return len(self._alarms)

    def hold(self, request: RequestState, hold: Hold, now: float) -> None:
        """Hold a request, or hold it longer: it keeps its place in its line then."""
        until = max(hold.until, now + SHORTEST_HOLD_SECONDS)
        self._lines.setdefault(_line(request), {})[request.id] = request
        known = self.of.get(request.id)
        self.of[request.id] = msgspec.structs.replace(hold, until=until)
        if known is None or known.until != until:
            heapq.heappush(self._alarms, (until, request.id))
            if len(self._alarms) > 2 * len(self.of) + _STALE:
                self._alarms = [(held.until, name) for name, held in self.of.items()]
                heapq.heapify(self._alarms)

    def leave(self, request: RequestState) -> None:
        """The request is not held any more, if it was."""
        if self.of.pop(request.id, None) is None:
            return
        line = self._lines[_line(request)]
        del line[request.id]
        if not line:
            del self._lines[_line(request)]

    def next_due(self) -> float:
        """When the next hold is over; infinity if none is."""
        while self._alarms and not self._holds(*self._alarms[0]):
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else math.inf

    def take_due(self, now: float) -> list[RequestId]:
        """The requests whose holds are over, the first first. Each is to be held anew, or to
        leave."""
        due: dict[RequestId, None] = {}
        while self._alarms and self._alarms[0][0] <= now:
            until, name = heapq.heappop(self._alarms)
            if self._holds(until, name):
                due[name] = None
        return list(due)

    def lines(self) -> list[Line]:
        """Those that are to be looked at next."""
        return list(islice(self._lines, LINES_LOOKED_AT))

    def firsts(self, line: Line) -> Iterator[RequestState]:
        """The first request of a line, then the next one if that left, and so on. Afterwards the
        line comes after all others."""
        while members := self._lines.get(line):
            first = next(iter(members.values()))
            yield first
            if first.id in self.of:
                self._lines[line] = self._lines.pop(line)
                return

    def _holds(self, until: float, name: RequestId) -> bool:
        """Whether an alarm is of a hold as it is now."""
        held = self.of.get(name)
        return held is not None and held.until == until


def _line(request: RequestState) -> Line:
    return request.spec.key, request.model, request.spec.request_class
