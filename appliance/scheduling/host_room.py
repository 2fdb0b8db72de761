"""Room in the host tier: a request gets some before it is computed, and more as it grows.

Interactive requests get it before batch work, and then the one that asked first. A request holds
places for the KV it has and `AHEAD_TOKENS` more, so KV that leaves a device mostly has a place.
Where it has none it is given up and computed again (decision 46).
"""

from __future__ import annotations

from typing import Final

from appliance.memory.ledger import HostLedger
from appliance.scheduling.lifecycle import Stage
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import RequestState
from appliance.vocabulary import KvShape

AHEAD_TOKENS: Final = 64
"""Tokens beyond those it has that a request gets room for at a time: four blocks of 16 tokens."""


class HostRoom:
    """The queue for the host tier. To ask costs O(requests that wait for it)."""

    def __init__(self, host: HostLedger, requests: RequestBook, residency: Residency) -> None:
        self._host = host
        self._requests = requests
        self._residency = residency

    def next(self) -> RequestState | None:
        """The request that gets room next: interactive ones first, then the longest waiting."""
        queue = [self._requests.live[name] for name in self._requests.host_queue]
        return min(queue, key=lambda request: not request.interactive, default=None)

    def waits(self, request: RequestState) -> bool:
        """Whether others get room in the host tier before this request, whatever is running."""
        if request.stage is not Stage.QUEUED:
            return False
        return request.id in self._requests.host_queue or self._others_first(request)

    def reserve(self, request: RequestState, shape: KvShape) -> bool:
        """Take room for the KV of a request that is about to be computed, in its turn.

        False if there is none now. A request too large for the whole tier starts without when no
        other has KV there: it is computed again if its KV has to leave the device.
        """
        self._requests.host_queue.setdefault(request.id)
        if self._others_first(request):
            return False
        if not self.extend(request, shape):
            if self._host.kv_slabs:
                return False
            later = self._residency.clear_kv_room()
            if not self.extend(request, shape) and later:
                return False
        del self._requests.host_queue[request.id]
        return True

    def reserve_also(self, request: RequestState, shape: KvShape) -> bool:
        """Take room for the KV of a request that is computed with one that got some. False if there
        is none, or others get it first; then the request does not wait for it."""
        if self._others_first(request) or not self.extend(request, shape):
            return False
        self._requests.host_queue.pop(request.id, None)
        return True

    def extend(self, request: RequestState, shape: KvShape) -> bool:
        """Have the request's places hold its KV and some tokens more; False if there is no room."""
        if shape.blocks(request.tokens) <= len(request.host_offsets):
            return True
        more = min(AHEAD_TOKENS, request.remaining_tokens)
        return self._requests.cover(request, shape, request.tokens + more)

    def _others_first(self, request: RequestState) -> bool:
        """Whether others get room before this request: those whose KV was given up, or the next of
        the queue."""
        others = [self._requests.live[name] for name in self._requests.displaced]
        if (first := self.next()) not in (None, request):
            others.append(first)
        return any([other.interactive or not request.interactive for other in others])
