"""Room in the host tier: a request gets some before it is computed, and more as it grows.

Interactive requests get it before batch work, and then the one that asked first. A request holds
places for the KV it has and `AHEAD_TOKENS` more, so KV that leaves a device mostly has a place.
Where it has none it is given up and computed again (decision 46). While room is short, KV that
waits in the host tier goes to disk, if there is a folder for it, and comes back later (decision
49).
"""

from __future__ import annotations

import math
from typing import Final

from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import RequestState, SchedulingContext
from appliance.vocabulary import KvRestored, KvShape, KvSpilled

AHEAD_TOKENS: Final = 64
"""Tokens beyond those it has that a request gets room for at a time: four blocks of 16 tokens."""

SHORT: Final = 1 / 16
"""KV goes to disk while less than this share of KV's room in the host tier is free."""
ENOUGH: Final = 1 / 8
"""It goes until this share is free, and comes back if it then still is: what computes meanwhile
grows into that. Between the two shares nothing moves."""
LONG_SECONDS: Final = 5.0
"""Only KV of a request without a new token for so long goes: it is not about to run. That of a
request whose client reads too slowly goes at once."""
RETRY_SECONDS: Final = 60.0
"""For so long nothing is written to a disk that refused a write."""


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
        """Whether others get room before this request: those whose KV was given up or is on disk,
        or the next of the queue."""
        others = [self._requests.live[name] for name in self._requests.displaced]
        others += self._requests.awaiting_restore()
        if (first := self.next()) not in (None, request):
            others.append(first)
        return any([other.interactive or not request.interactive for other in others])


class KvSpill:
    """Which KV goes from the host tier to disk, and when it comes back.

    KV that waits long goes while room in the host tier is short: first that of requests whose
    clients read too slowly, then that of batch work. That of interactive requests goes only while
    KV of others was given up, the youngest first: prompts wait until it is back. None goes that
    made no token since it was last on disk, so every way there and back is for at least a token.
    Without a folder for it nothing does.
    """

    def __init__(
        self,
        context: SchedulingContext,
        host: HostLedger,
        disk: DiskLedger,
        requests: RequestBook,
        cluster: Cluster,
    ) -> None:
        self._context = context
        self._host = host
        self._disk = disk
        self._requests = requests
        self._cluster = cluster
        self._refused_until = -math.inf

    def make_room(self) -> None:
        """Have KV go to disk if room in the host tier is short, or requests wait for some: then all
        of those go whose clients read too slowly. O(requests with KV on disk) if it is not, else
        O(n log n) in the live requests; O(1) without a disk."""
        book = self._requests
        if not self._disk.total_bytes or self._context.now < self._refused_until:
            return
        short = self._lacking(SHORT) > 0
        if not short and not (book.paused and book.short_of_host_room):
            return
        lacking = self._lacking(ENOUGH) if short else 0.0
        candidates = [r for r in book.live.values() if self._may_go(r)]
        for request in sorted(candidates, key=_goes_first):
            paused = request.stage is Stage.PAUSED and book.short_of_host_room
            if lacking <= 0 and not paused:
                return
            shape = self._cluster.kv_shape(request.model)
            if shape is not None and book.spill(request, shape):
                lacking -= len(request.host_offsets) * shape.block_bytes

    def restore_next(self) -> bool:
        """Have the KV of the next request that waits for that come back: interactive ones first,
        then the one that came first. Whether any did. O(requests with KV on disk)."""
        awaiting = self._requests.awaiting_restore()
        first = min(awaiting, key=lambda r: (not r.interactive, r.arrived, r.id), default=None)
        if first is None:
            return False
        shape = self._requests.on_disk[first.id]
        nbytes = shape.blocks(first.kv_tokens) * shape.block_bytes
        alone = not self._host.kv_slabs
        if not alone and self._lacking(ENOUGH) + nbytes > 0:
            return False
        comes = self._requests.restore(first)
        if alone and not comes:  # weights have the room: it waits for some as a prompt does
            self._requests.lose_on_disk(first)
        return alone or comes

    def spilled(self, event: KvSpilled) -> bool:
        """KV was written to disk, or not. What it leaves is room for others."""
        request = self._requests.live.get(event.request)
        if request is None:
            self._requests.moved(event.request)
        elif event.ok:
            request.to_kv(KvPlace.DISK, None)
            request.spilled_tokens = request.tokens
            self._requests.uncover(request)
        else:
            request.to_kv(KvPlace.HOST, None)
            self._requests.left_disk(request)
            self._refused_until = self._context.now + RETRY_SECONDS
        self.make_room()
        return True

    def restored(self, event: KvRestored) -> bool:
        """KV was read from disk, or is lost: then it is computed again."""
        request = self._requests.live.get(event.request)
        if request is None:
            self._requests.moved(event.request)
        elif event.ok:
            request.to_kv(KvPlace.HOST, None)
            self._requests.left_disk(request)
        else:
            self._requests.lose_on_disk(request)
        return True

    def _may_go(self, request: RequestState) -> bool:
        """Whether its KV waits long in the host tier, and has grown since it was last on disk."""
        if request.kv is not KvPlace.HOST or request.tokens == request.spilled_tokens:
            return False
        if request.stage is Stage.PAUSED:
            return True
        long = self._context.now - request.progressed >= LONG_SECONDS
        wanted = request.interactive and not self._requests.displaced
        return request.stage is Stage.READY and long and not wanted

    def _lacking(self, share: float) -> float:
        """Bytes that lack until this share of KV's room is free, with what is on its way to disk;
        below 0 if more is. O(KV on disk or on its way)."""
        host = self._host
        leaving = sum(
            [
                self._disk.held[name]
                for name in self._requests.on_disk
                if self._requests.live[name].kv is KvPlace.SPILLING
            ]
        )
        free = host.kv_free_slabs * host.slab_bytes + leaving
        return share * host.kv_room_slabs * host.slab_bytes - free


def _goes_first(request: RequestState) -> tuple[bool, bool, float, str]:
    return request.stage is not Stage.PAUSED, request.interactive, -request.arrived, request.id
