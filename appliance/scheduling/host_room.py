"""Room in the host tier: a request gets it for its KV at full length before it is prefilled.

In the order of asking, interactive requests before batch work: then a swap outwards can never fail,
and any single request can always be brought to its end by swapping out everything else.
"""

from __future__ import annotations

from appliance.memory.ledger import HostLedger
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import RequestState
from appliance.vocabulary import KvShape


class HostRoom:
    """The queue for the host tier. To ask costs O(requests that wait for it)."""

    def __init__(self, host: HostLedger, requests: RequestBook, residency: Residency) -> None:
        self.rejected = False
        """Whether a request was rejected since this was reset: others may have room now."""
        self._host = host
        self._requests = requests
        self._residency = residency

    def next(self) -> RequestState | None:
        """The request that gets room next: interactive ones first, then the longest waiting."""
        queue = [self._requests.live[name] for name in self._requests.host_queue]
        return min(queue, key=lambda request: not request.interactive, default=None)

    def waits(self, request: RequestState) -> bool:
        """Whether others get room in the host tier before this request, whatever is running."""
        if request.host_offsets:
            return False
        first = self.next()
        return first is not None and (first.interactive or not request.interactive)

    def reserve(self, request: RequestState, shape: KvShape) -> bool:
        """Take room for the request's KV at full length, in its turn.

        False if there is none now. If no request holds any, and there is too little even without
        weights, there never will be enough: the request is rejected.
        """
        self._requests.host_queue.setdefault(request.id)
        if self.next() is not request:
            return False
        blocks = shape.blocks(request.spec.prompt_tokens + request.spec.max_tokens)
        offsets = self._host.take_blocks(shape.block_bytes, blocks)
        if offsets is None and not self._host.kv_slabs:
            later = self._residency.clear_kv_room()
            offsets = self._host.take_blocks(shape.block_bytes, blocks)
            if offsets is None and not later and not self._host.short_slabs:
                message = f"its KV at full length ({blocks} blocks) exceeds the host cache"
                self._requests.reject(request, "kv_too_large", message)
                self.rejected = True
        if offsets is None:
            return False
        del self._requests.host_queue[request.id]
        request.host_offsets = offsets
        return True

    def give_up(self, request: RequestState) -> None:
        """A request that has to be prefilled (again) queues for the host tier like any other: only
        requests that can run hold places there, so some always come free."""
        self._host.give_blocks(request.host_offsets)
        request.host_offsets = ()
