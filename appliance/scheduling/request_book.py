"""The live requests and their one outcome; those that the policy holds; their places in the host
tier and on disk.

A held request has no instance. It is looked at again when its time has come, and sooner when
another request ended. Requests of one key, model and class wait in a line: where the first of a
line is held again when a request ended, so are the others, without a question about each.

KV that leaves a device without room in the host tier is given up: its request is *displaced*, and
computed again from its tokens once there is room (decision 46). So is KV that cannot be read from
disk (decision 49).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeAlias

import msgspec

from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.demand import Demands
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.policy_api import Hold
from appliance.scheduling.state import RequestState, SchedulingContext
from appliance.vocabulary import (
    DropSpilledKv,
    Finish,
    InstanceId,
    KvShape,
    ModelName,
    Reject,
    Release,
    RequestClass,
    RequestId,
    RestoreKv,
    SpillKv,
)

MOVING: Final = (KvPlace.LEAVING, KvPlace.ARRIVING, KvPlace.SPILLING, KvPlace.RESTORING)
"""Where KV is while its places in the host tier are written or read."""
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


class RequestBook:
    """All requests that have not ended, by id. To end one costs O(1)."""

    def __init__(
        self,
        context: SchedulingContext,
        models: Iterable[ModelName],
        cluster: Cluster,
        demands: Demands,
        host: HostLedger,
        disk: DiskLedger,
    ) -> None:
        self.live: dict[RequestId, RequestState] = {}
        self.holds = Holds()
        """Requests that the policy holds, of those that no instance has."""
        self.host_queue: dict[RequestId, None] = {}
        """Requests that wait for room in the host tier, the longest waiting first."""
        self.paused: dict[RequestId, RequestState] = {}
        """Requests whose clients take nothing, and that wait for that."""
        self.displaced: dict[RequestId, KvShape] = {}
        """Unplaced requests whose KV was given up, and the shape that it had."""
        self.recomputed_tokens: dict[ModelName, int] = dict.fromkeys(models, 0)
        """Tokens whose KV was given up and is computed again."""
        self.pending_frees: dict[RequestId, tuple[InstanceId | None, tuple[int, ...]]] = {}
        """Ended requests whose places in the host tier an instance, or None for the disk, is still
        writing or reading."""
        self.on_disk: dict[RequestId, KvShape] = {}
        """Requests whose KV is on disk or on its way there or back, and the shape that it has."""
        self._context = context
        self._cluster = cluster
        self._demands = demands
        self._host = host
        self._disk = disk

    @property
    def short_of_host_room(self) -> bool:
        """Whether requests wait for room in the host tier. O(requests with KV on disk)."""
        return bool(self.host_queue or self.displaced or self.awaiting_restore())

    def awaiting_restore(self) -> list[RequestState]:
        """Requests that could go on if their KV came back from disk. O(requests that have some)."""
        found = [self.live[name] for name in self.on_disk]
        return [r for r in found if r.kv is KvPlace.DISK and r.stage is Stage.READY]

    def of(self, model: ModelName) -> list[RequestState]:
        """The live requests of a model. O(live requests)."""
        return [request for request in self.live.values() if request.model == model]

    def cover(self, request: RequestState, shape: KvShape, tokens: int) -> bool:
        """Have the request's places in the host tier hold the KV of so many tokens. False if there
        is no room for that: then they stay as they are. O(blocks that it has)."""
        lacking = shape.blocks(tokens) - len(request.host_offsets)
        if lacking <= 0:
            return True
        offsets = self._host.take_blocks(shape.block_bytes, lacking)
        if offsets is None:
            return False
        request.host_offsets += offsets
        return True

    def uncover(self, request: RequestState) -> None:
        """Give the request's places back. A request that has to be computed (again) gets some in
        its turn, like any other."""
        self._host.give_blocks(request.host_offsets)
        request.host_offsets = ()

    def displace(self, request: RequestState, shape: KvShape) -> None:
        """Give up the KV of a request that decodes, and is in no turn. It gets a place when the
        host tier has room; see `Router.place_displaced`."""
        assert request.kv_instance is not None, "its KV is on a device"
        engine = self._cluster.instances[request.kv_instance].engines[request.model]
        del engine.residents[request.id]
        self._give_up_kv(request, shape)

    def spill(self, request: RequestState, shape: KvShape) -> bool:
        """Have the KV of a request move from the host tier to disk. False if that has no room."""
        blocks = shape.blocks(request.kv_tokens)
        if not self._disk.take(request.id, blocks * shape.block_bytes):
            return False
        self.on_disk[request.id] = shape
        request.to_kv(KvPlace.SPILLING, None)
        self._context.out.append(
            SpillKv(
                model=request.model,
                request=request.id,
                host_offsets=request.host_offsets[:blocks],
                block_bytes=shape.block_bytes,
            )
        )
        return True

    def restore(self, request: RequestState) -> bool:
        """Have the KV of a request come back from disk. False if the host tier has no room."""
        shape = self.on_disk[request.id]
        if not self.cover(request, shape, request.kv_tokens):
            return False
        request.to_kv(KvPlace.RESTORING, None)
        self._context.out.append(
            RestoreKv(
                model=request.model,
                request=request.id,
                host_offsets=request.host_offsets,
                block_bytes=shape.block_bytes,
            )
        )
        return True

    def left_disk(self, request: RequestState) -> KvShape:
        """Nothing of the request's KV is on disk any more. The shape that it has."""
        self._disk.give(request.id)
        return self.on_disk.pop(request.id)

    def lose_on_disk(self, request: RequestState) -> None:
        """Give up KV that is on disk, or was there, and does not come back."""
        if request.kv is KvPlace.DISK:
            self._context.out.append(DropSpilledKv(request=request.id))
        self._give_up_kv(request, self.left_disk(request))

    def _give_up_kv(self, request: RequestState, shape: KvShape) -> None:
        self.recomputed_tokens[request.model] += request.kv_tokens
        self._release(request)
        request.to_kv(KvPlace.NONE, None)
        self.uncover(request)
        if request.instance is not None:
            self.unplace(request)
        self.displaced[request.id] = shape

    def accept(self, request: RequestState) -> None:
        """An instance takes the request on: the policy can neither refuse nor hold it any more."""
        self.holds.leave(request)
        if not request.accepted:
            request.accepted = True
            self._demands.taken_on(request.spec.key)

    def unplace(self, request: RequestState) -> None:
        """Take the request off its instance."""
        assert request.instance is not None, "it is placed"
        self._cluster.instances[request.instance].leave(request)
        if self.paused.pop(request.id, None) is not None:
            request.excuse(self._context.now)
        request.instance = None
        request.to_stage(Stage.UNPLACED)

    def reject(self, request: RequestState, code: str, message: str) -> None:
        """End a request that cannot be served: its client gets the reason."""
        self.abandon(request, rejection(request.id, code, message))

    def end(self, request: RequestState, outcome: Finish | Reject) -> None:
        """The request is over: nothing of it stays in the books. It has exactly one outcome."""
        request.to_stage(Stage.DONE)
        del self.live[request.id]
        self._demands.ended(request.model, request.generated)
        if request.accepted:
            self._demands.let_go(request.spec.key)
        self.holds.leave(request)
        self.holds.changed = True
        self.host_queue.pop(request.id, None)
        self.paused.pop(request.id, None)
        self.displaced.pop(request.id, None)
        if request.instance is not None:
            self._cluster.instances[request.instance].leave(request)
        if request.kv_instance is not None:
            residents = (
                self._cluster.instances[request.kv_instance].engines[request.model].residents
            )
            residents.pop(request.id, None)
        if request.id in self.on_disk:
            self.left_disk(request)
            if request.kv is not KvPlace.RESTORING:  # what was read is deleted anyway
                self._context.out.append(DropSpilledKv(request=request.id))
        if request.kv in MOVING:
            self.pending_frees[request.id] = (request.kv_instance, request.host_offsets)
        else:
            self._host.give_blocks(request.host_offsets)
        self._context.out.append(outcome)

    def abandon(self, request: RequestState, outcome: Finish | Reject) -> None:
        """End a request that did not end by itself, and have its workers forget it."""
        self.end(request, outcome)
        self._release(request)

    def _release(self, request: RequestState) -> None:
        """Have the workers that know the request forget it."""
        holders = {n for n in (request.instance, request.kv_instance) if n is not None}
        for instance in sorted(holders):
            self._context.out.append(
                Release(instance=instance, model=request.model, request=request.id)
            )

    def moved(self, request: RequestId) -> None:
        """The KV of an ended request was moved: its places are free."""
        if request in self.pending_frees:
            self._host.give_blocks(self.pending_frees.pop(request)[1])

    def lost(self, instance: InstanceId) -> None:
        """The instance will not report any move of ended requests' KV."""
        for name in [n for n, (holder, _) in self.pending_frees.items() if holder == instance]:
            self.moved(name)


def rejection(request: RequestId, code: str, message: str) -> Reject:
    return Reject(request=request, code=code, message=message)
