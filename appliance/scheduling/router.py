"""Where requests go: to prefill, to decode, elsewhere when places change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Final

from appliance.memory.ledger import HostLedger
from appliance.scheduling.backpressure import Backpressure
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.device_room import DeviceRoom
from appliance.scheduling.dispatcher import Dispatcher
from appliance.scheduling.host_room import KvSpill
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.policy_api import Hold, LocalClock, PrefillChoice, Refusal
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import (
    InstanceState,
    RequestState,
    SchedulingContext,
    TurnJob,
)
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import ClockSet, ModelName, Release, Role

PLAN_SECONDS: Final = 1.0
"""Places and classes are planned as often as this, while there is work."""
PLACED_AGAIN: Final = 16
"""Requests of a group, at most, that a plan sends away from a full device: that many others rarely
have room for at once."""


class Router:
    """Asks the policy where requests go, and what each instance is for."""

    def __init__(
        self,
        context: SchedulingContext,
        requests: RequestBook,
        cluster: Cluster,
        residency: Residency,
        device_room: DeviceRoom,
        dispatcher: Dispatcher,
        backpressure: Backpressure,
        kv_spill: KvSpill,
        host: HostLedger,
        weight_cache: HostWeightCache,
    ) -> None:
        self.plan_at = -math.inf
        """When places and classes are planned next."""
        self._context = context
        self._requests = requests
        self._cluster = cluster
        self._residency = residency
        self._device_room = device_room
        self._dispatcher = dispatcher
        self._backpressure = backpressure
        self._kv_spill = kv_spill
        self._host = host
        self._weight_cache = weight_cache

    def place(self, request: RequestState) -> None:
        """Give the request to an instance: to decode if it has its KV, else to prefill (again).
        It stays unplaced while no instance is up or the policy holds it, and is refused when no
        instance will be up."""
        self._requests.displaced.pop(request.id, None)
        if self._cluster.all_quarantined(request.model):
            which = "every instance"
            if len(self._cluster.able(request.model)) < len(self._cluster.instances):
                which += f" that can serve {request.model}"
            message = f"{which} is quarantined; an operator may release one"
            self._requests.reject(request, "no_instance", message)
            return
        if request.kv is not KvPlace.NONE:
            self.place_decode(request)
            return
        candidates = self._cluster.candidates(request.spec, Role.PREFILL)
        if not candidates:
            self._requests.holds.leave(request)  # it is placed as soon as there are any
            return
        candidates = self._with_room(candidates, request) or candidates
        context = self._context
        choice = context.policy.prefill(
            context.now,
            self._cluster.request_view(request),
            self._cluster.views(candidates),
            context.costs,
        )
        if not isinstance(choice, PrefillChoice):
            if not request.accepted:
                self._turn_away(request, choice)
                return
            # It was taken on, and may have sent tokens: it goes somewhere, late or not.
            choice = PrefillChoice(instance=candidates[0].id)
        self._requests.accept(request)
        instance = self._cluster.instances[choice.instance]
        instance.queue(request, choice.group)
        request.instance = instance.id
        request.to_stage(Stage.QUEUED)
        self._dispatcher.joined(instance, request)

    def _turn_away(self, request: RequestState, answer: Refusal | Hold) -> None:
        if isinstance(answer, Hold):
            self._requests.holds.hold(request, answer, self._context.now)
        else:
            self._requests.reject(request, "overloaded", answer.reason)

    def place_held(self, *, all_of_them: bool = False) -> bool:
        """Ask again about the requests whose holds are over, and if something changed about the
        first of some lines; or about all. Whether any is held no more. O(1) if there is nothing to
        do."""
        holds = self._requests.holds
        changed, holds.changed = holds.changed, False
        if not holds.of:
            return False
        before = len(holds.of)
        names = [*holds.of] if all_of_them else holds.take_due(self._context.now)
        self.place_all([self._requests.live[name] for name in names])
        for line in holds.lines() if changed and not all_of_them else ():
            for request in holds.firsts(line):
                self.place(request)
        return len(holds.of) < before

    def set_clock(self, event: ClockSet) -> bool:
        """The clock on the wall was set: what is held until a time of day may go on now. Whether
        anything does."""
        context = self._context
        context.clock = LocalClock(
            unix_offset_seconds=event.unix_seconds - context.now,
            utc_offset_seconds=event.utc_offset_seconds,
        )
        context.policy.set_clock(context.clock)
        return self.place_held(all_of_them=True)

    def _with_room(
        self, candidates: Iterable[InstanceState], request: RequestState
    ) -> list[InstanceState]:
        """Those where the prompt need not wait for KV of others to leave the device."""
        return [instance for instance in candidates if self._device_room.takes(instance, request)]

    def place_decode(self, request: RequestState) -> None:
        """Have the policy choose where the request decodes, if any instance may."""
        candidates = self._cluster.candidates(request.spec, Role.DECODE)
        if not candidates:
            return
        context = self._context
        chosen = context.policy.decode(
            context.now,
            self._cluster.request_view(request),
            candidates[0].id if request.instance is None else request.instance,
            self._cluster.views(candidates),
            context.costs,
        )
        request.to_stage(Stage.READY)
        if self._backpressure.may_hold(request):
            request.instance = chosen
            self._backpressure.hold(request)
        else:
            self._dispatcher.join(self._cluster.instances[chosen], request)

    def place_displaced(self) -> bool:
        """Place the first of the requests whose KV was given up, if the host tier has room for
        twice its tokens, or for as many as it may have: else it would soon be given up again. A
        tier without any KV has all the room there is. O(displaced requests); whether one was
        placed."""
        displaced = self._requests.displaced
        if not displaced:
            return False
        waiting = [self._requests.live[name] for name in displaced]
        first = min(waiting, key=lambda r: (not r.interactive, r.arrived, r.id))
        shape = displaced[first.id]
        blocks = shape.blocks(first.tokens + min(first.tokens, first.remaining_tokens))
        if self._host.kv_slabs and self._host.room_for_blocks(shape.block_bytes) < blocks:
            return False
        self.place(first)
        return True

    def flow(self, instance: InstanceState) -> None:
        """Move what the policy wants to decode elsewhere."""
        context = self._context
        others = [
            other
            for other in self._cluster.instances.values()
            if other is not instance and other.serves and other.placement.role is not Role.PREFILL
        ]
        requests = self._cluster.decoding_views(instance, others)
        if not requests:
            return
        flows = context.policy.flow(
            context.now,
            self._cluster.view(instance),
            requests,
            self._cluster.views(others),
            context.costs,
        )
        for migration in flows:
            request = self._requests.live[migration.request]
            instance.leave(request)
            self._dispatcher.join(self._cluster.instances[migration.target], request)
            self._context.out.append(self._residency.swap_out(instance, request.model, [request]))

    def plan(self) -> bool:
        """Plan what each instance is for, and place queued requests again where that changed.
        Whether free instances have to be asked for what they can do."""
        context = self._context
        self.plan_at = context.now + PLAN_SECONDS
        again = False
        if short := self._host.short_slabs:
            self._weight_cache.make_kv_room(self._residency.being_read())
            again |= self._host.short_slabs < short
        # If no KV takes the room, requests wait for weights that are being read or written.
        again |= bool(self._requests.host_queue) and not self._host.kv_slabs
        self._kv_spill.make_room()
        if self._requests.short_of_host_room:  # a paused request keeps its room there
            again |= self._backpressure.let_all_go_on()
        view = self._cluster.cluster_view(context.now)
        placements = context.policy.place(context.now, view, context.costs)
        changed = self._cluster.place(
            placements, context.policy.scale(context.now, view, context.costs)
        )
        self._cluster.count_parked(context.now)
        misplaced = {r.id: r for r in [*self._misplaced(changed), *self._shut_out()]}
        for request in misplaced.values():
            self._requests.unplace(request)
        self.place_all(misplaced.values())
        moved = self._move_left_out()
        return again or changed or bool(misplaced) or moved

    def _misplaced(self, changed: bool) -> list[RequestState]:
        """Requests that wait where they are not served any more; and batch requests, whose place
        is not final, when what instances are for `changed` or one that takes them idles."""
        idle = [instance for instance in self._cluster.instances.values() if instance.idle]
        if not changed and not idle:
            return []
        where: dict[tuple[ModelName, bool], list[InstanceState]] = {}
        misplaced = []
        for instance in self._cluster.instances.values():
            for request in [r for group in instance.groups for r in group.members.values()]:
                key = (request.model, request.interactive)
                if key not in where:
                    where[key] = self._cluster.candidates(request.spec, Role.PREFILL)
                open_ = where[key]
                dealt = not request.interactive and (changed or any([i in open_ for i in idle]))
                if dealt or instance not in open_:
                    misplaced.append(request)
        return misplaced

    def _shut_out(self) -> list[RequestState]:
        """The first requests that wait for room on a device while another has some for them: one
        long prompt may fill a device for minutes. O(groups x instances) where KV is short, and for
        `PLACED_AGAIN` requests of each group the cost of `DeviceRoom.fits`."""
        short = [i for i in self._cluster.instances.values() if i.kv_short]
        waiting = [
            (instance, request)
            for instance in short
            for group in instance.groups
            for request in islice(group.members.values(), PLACED_AGAIN)
        ]
        return [request for instance, request in waiting if self._is_shut_out(instance, request)]

    def _is_shut_out(self, instance: InstanceState, request: RequestState) -> bool:
        if self._device_room.may_begin(instance, request):
            return False
        candidates = self._cluster.candidates(request.spec, Role.PREFILL)
        return instance in candidates and bool(self._with_room(candidates, request))

    def _move_left_out(self) -> bool:
        """Have requests decode elsewhere that a turn left out for lack of room, and whose KV is on
        the host already, if another instance has room for them: the youngest leave a device where a
        long request grows. Whether there was one. O(requests of the turns that lack room x
        instances)."""
        left_out = [
            request
            for instance in self._cluster.instances.values()
            if isinstance(instance.job, TurnJob) and instance.job.lacks_room
            for request in instance.runnable(instance.job.model)
            if request.kv is KvPlace.HOST
        ]
        return any([self._move(request) for request in left_out])

    def _move(self, request: RequestState) -> bool:
        """Have a request with its KV on the host decode on another instance, if one has room."""
        context, source = self._context, request.instance
        assert source is not None, "it decodes somewhere"
        candidates = self._cluster.candidates(request.spec, Role.DECODE)
        roomy = [
            instance
            for instance in candidates
            if instance.id != source and self._device_room.may_begin(instance, request)
        ]
        if not roomy:
            return False
        chosen = context.policy.decode(
            context.now,
            self._cluster.request_view(request),
            source,
            self._cluster.views(roomy),
            context.costs,
        )
        self._cluster.instances[source].leave(request)
        context.out.append(Release(instance=source, model=request.model, request=request.id))
        self._dispatcher.join(self._cluster.instances[chosen], request)
        return True

    def place_unplaced(self) -> None:
        """Place the requests that no instance has."""
        self.place_all([r for r in self._requests.live.values() if r.stage is Stage.UNPLACED])

    def place_all(self, requests: Iterable[RequestState]) -> None:
        """Place requests in the order in which they came."""
        for request in sorted(requests, key=lambda request: (request.arrived, request.id)):
            self.place(request)
