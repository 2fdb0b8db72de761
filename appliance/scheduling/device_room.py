"""Room for KV on a device: which prompts may start, and which requests a turn takes.

A prompt that starts without room makes other requests of its model move their KV to the host, and
back later. Each move costs the time of a copy, during which the GPU computes less; once every turn
begins with such moves, it computes hardly anything. So a prompt waits until its KV has room next to
that of the requests that have begun. Where these outgrow the device nevertheless, the oldest go on
and the youngest leave (decision 45).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import InstanceState, RequestState, SchedulingContext
from appliance.vocabulary import KvShape, ModelName, ModelSpec

ADMISSION_GROWTH_TOKENS: Final = 48
"""Room to grow that a prompt leaves each request that has begun. With less, the youngest requests
often leave the device and soon come back; with more, fewer requests share a step."""
TURN_GROWTH_TOKENS: Final = 32
"""Room to grow that a turn has for each of its requests. Less than what a prompt leaves, so that
requests rarely have to leave the device right after a prompt started."""
PATIENCE: Final = 0.5
"""The share of its time to the first token for which a prompt without room lets others pass."""
PASSING: Final = 16
"""So many prompts behind one without room are asked whether they have some."""


class Selection(NamedTuple):
    """What a turn runs."""

    batch: list[RequestState]
    leaving: list[RequestState]
    """Requests that leave the device before it."""
    blocks: int
    """Blocks that the batch, and a prompt with it, need more than they have."""
    left_out: int
    """Requests that the limit of the batch kept out."""
    lacks_room: bool
    """Whether requests were left out because their KV has no room."""


class DeviceRoom:
    """Compares the KV of a model's requests on an instance with what the device can hold.

    Each question costs O(n log n) in the requests of the model that decode there.
    """

    def __init__(
        self,
        context: SchedulingContext,
        models: Mapping[ModelName, ModelSpec],
        residency: Residency,
    ) -> None:
        self._context = context
        self._models = models
        self._residency = residency

    def fits(self, instance: InstanceState, request: RequestState) -> bool:
        """Whether the KV of a prompt has room on the instance now.

        It has none while its KV, and that of the requests of its model that decode there, exceed
        the device, each `ADMISSION_GROWTH_TOKENS` longer; KV on the host counts, as it comes back.
        Batch requests do not count for an interactive one: they leave the device for it. Where no
        request of its model decodes, a prompt has room.
        """
        batch = instance.batches.get(request.model)
        engine = instance.engines[request.model]
        if batch is None or not engine.built or request.spec.max_tokens == 0:
            return True
        members = batch.members.values()
        counted = [member for member in members if member.interactive or not request.interactive]
        capacity = self._residency.capacity_blocks(instance, request.model)
        needed = _prompt_blocks(request, engine.shape) + _admitted_blocks(counted, engine.shape)
        return needed <= capacity

    def takes(self, instance: InstanceState, request: RequestState) -> bool:
        """Whether a prompt that was queued on the instance now would not wait for room: no prompt
        of its model does, and there is room for it. O(groups) while others wait, else as `fits`."""
        if not instance.kv_short:
            return True
        if any([group.model == request.model for group in instance.groups]):
            return False
        return self.may_begin(instance, request)

    def may_begin(self, instance: InstanceState, request: RequestState) -> bool:
        """Whether a request has a place and room on the instance. Costs what `fits` does."""
        return self.has_place(instance, request) and self.fits(instance, request)

    def has_place(self, instance: InstanceState, request: RequestState) -> bool:
        """Whether so few requests of its model have begun on the instance that one more may. What
        is embedded needs no place. O(1)."""
        return request.spec.max_tokens == 0 or self._places_left(instance, request.model) > 0

    def _places_left(self, instance: InstanceState, model: ModelName) -> int:
        """How many requests of the model more may begin on the instance. Those whose client reads
        too slowly are in no batch, so one client cannot take all places. O(1)."""
        most = self._models[model].max_sequences
        if most is None:
            return sys.maxsize
        batch = instance.batches.get(model)
        return most if batch is None else most - len(batch.members)

    def sequences(self, instance: InstanceState, model: ModelName) -> int:
        """How many requests of the model run at once on the instance: as many as a batch takes, and
        as have room if they are like those that have begun; at least 1. Batch requests count only
        where there are no others. O(those that have begun)."""
        spec, engine = self._models[model], instance.engines[model]
        batch = instance.batches.get(model)
        if batch is None or not batch.members or not engine.built:
            return spec.max_batch
        members = batch.members.values()
        counted = [member for member in members if member.interactive] or list(members)
        capacity = self._residency.capacity_blocks(instance, model)
        begun = _admitted_blocks(counted, engine.shape)
        return max(1, min(spec.max_batch, capacity * len(counted) // begun))

    def admits(self, instance: InstanceState, request: RequestState) -> bool:
        """Whether a request may start, or go on, on the instance: it has a place, and room. If not,
        `instance.kv_short` is set: it may be able to as others end."""
        if request.stage is not Stage.QUEUED:
            return True
        if self.may_begin(instance, request):
            return True
        if not instance.kv_short:
            instance.kv_short, instance.view = True, None
        return False

    def first_admitted(
        self, instance: InstanceState, model: ModelName | None = None
    ) -> RequestState | None:
        """The first request of the first group, of a model if one is given, that may start; None if
        none may.

        Where the first of a group may not, shorter prompts of its model pass it until half of its
        time to the first token is over; later none does, or large prompts would wait for ever.
        O(groups + PASSING), each with the cost of `fits`.
        """
        short: set[ModelName] = set()
        for group in instance.groups:
            first = group.first
            if group.model in short or model not in (None, group.model):
                continue
            if self.admits(instance, first):
                return first
            if self._context.now >= first.next_due - PATIENCE * first.spec.slo.ttft_seconds:
                short.add(group.model)
                continue
            for request in islice(group.members.values(), 1, 1 + PASSING):
                if request.tokens < first.tokens and self.admits(instance, request):
                    return request
        return None

    def step_with(
        self, instance: InstanceState, first: RequestState, tokens: int, places: int
    ) -> list[RequestState]:
        """The prompts behind one in its group that may be computed with it: as many as fit a step
        of so many tokens, so many places of a batch, and the device, next to the first and the
        requests that decode. Batch work waits until no interactive prompt waits, and what is
        embedded is computed apart. O(requests of the model that decode there + prompts taken)."""
        engine = instance.engines[first.model]
        if first.spec.max_tokens > 0:
            places = min(places, self._places_left(instance, first.model) - 1)
        room = self._residency.room_blocks(instance, first.model)
        batch = instance.batches.get(first.model)
        if batch is not None:
            begun = _admitted_blocks(batch.members.values(), engine.shape)
            room = min(room, self._residency.capacity_blocks(instance, first.model) - begun)
        room -= _prompt_blocks(first, engine.shape)
        tokens -= first.tokens
        (group,) = (group for group in instance.groups if first.id in group.members)
        others: list[RequestState] = []
        for request in group.members.values():
            if request is first:
                continue
            tokens -= request.tokens
            room -= _prompt_blocks(request, engine.shape)
            alike = request.interactive == first.interactive
            alike &= (request.spec.max_tokens == 0) == (first.spec.max_tokens == 0)
            if not alike or len(others) >= places or tokens < 0 or room < 0:
                break
            others.append(request)
        return others

    def has_room_again(self, instance: InstanceState, model: ModelName) -> bool:
        """Whether the next request that the turn of the model left out fits the device now."""
        if model not in instance.batches:
            return False
        shape = instance.engines[model].shape
        room = self._residency.capacity_blocks(instance, model)
        waiting: list[RequestState] = []
        for request in instance.batches[model].members.values():
            if request.stage is Stage.RUNNING:
                room -= _grown_blocks(request, shape)
            elif request.runnable:
                waiting.append(request)
        first = min(waiting, key=_short_order, default=None)
        return first is not None and _wanted_blocks(first, shape) <= room

    def select(
        self, instance: InstanceState, model: ModelName, limit: int, prompt_blocks: int
    ) -> Selection:
        """At most `limit` runnable requests for a turn, next to a prompt of so many blocks (0
        without one): interactive ones first, then those that ran longest ago.

        If their KV exceeds the device, interactive ones first, then those on the device, then the
        oldest: then few have to move. At least one runs, unless a prompt does.
        """
        shape = instance.engines[model].shape
        order = sorted(
            instance.runnable(model), key=lambda r: (not r.interactive, r.ran, r.arrived, r.id)
        )
        batch, leaving = order[:limit], []
        room = self._residency.room_blocks(instance, model) - prompt_blocks
        if sum([_grown_blocks(r, shape) - _held_blocks(r, shape) for r in batch]) > room:
            order.sort(key=_short_order)
            room += sum([_held_blocks(r, shape) for r in order])
            batch = _fitting(order[:limit], shape, room, at_least=0 if prompt_blocks else 1)
            leaving = _leaving(batch, order[len(batch) :], shape, room)
        more = sum([shape.blocks(r.tokens) - _held_blocks(r, shape) for r in batch])
        left_out = max(0, len(order) - limit)
        lacks_room = len(batch) + left_out < len(order)
        return Selection(batch, leaving, prompt_blocks + more, left_out, lacks_room)


def _fitting(
    order: Sequence[RequestState], shape: KvShape, room: int, at_least: int
) -> list[RequestState]:
    """The first requests that fit so many blocks and may all grow there. The very first need not be
    able to grow: it goes on step by step."""
    batch: list[RequestState] = []
    for request in order:
        room -= _wanted_blocks(request, shape) if batch else shape.blocks(request.tokens)
        if room < 0 and len(batch) >= at_least:
            break
        batch.append(request)
    return batch


def _leaving(
    batch: Sequence[RequestState], others: Sequence[RequestState], shape: KvShape, room: int
) -> list[RequestState]:
    """Of other requests on the device, the last ones: as many as have to leave so that the batch
    may grow within so many blocks."""
    staying = [request for request in others if request.kv is KvPlace.DEVICE]
    room -= sum([_grown_blocks(request, shape) for request in batch])
    room -= sum([_held_blocks(request, shape) for request in staying])
    leaving: list[RequestState] = []
    while room < 0 and staying:
        leaving.append(staying.pop())
        room += _held_blocks(leaving[-1], shape)
    return leaving


def _short_order(request: RequestState) -> tuple[bool, bool, float, str]:
    """Which requests go on where KV is short."""
    away = request.kv is not KvPlace.DEVICE
    return not request.interactive, away, request.arrived, request.id


def _admitted_blocks(requests: Iterable[RequestState], shape: KvShape) -> int:
    """Blocks of requests that each have the room to grow that a prompt leaves them."""
    return sum([_grown_blocks(request, shape, ADMISSION_GROWTH_TOKENS) for request in requests])


def _prompt_blocks(request: RequestState, shape: KvShape) -> int:
    """Blocks of a prompt while it is computed, and of its request with that room to grow."""
    grown = _grown_blocks(request, shape, ADMISSION_GROWTH_TOKENS)
    return max(grown, shape.prompt_blocks(request.tokens, request.spec.images))


def _grown_blocks(
    request: RequestState, shape: KvShape, growth_tokens: int = TURN_GROWTH_TOKENS
) -> int:
    """Blocks of a request that is so many tokens longer, or at its bound."""
    return shape.blocks(request.tokens + min(request.remaining_tokens, growth_tokens))


def _wanted_blocks(request: RequestState, shape: KvShape) -> int:
    """Blocks that a request needs to run where KV is short: more if it has to come back first, or
    it would soon leave again."""
    away = request.kv is not KvPlace.DEVICE
    return _grown_blocks(request, shape, ADMISSION_GROWTH_TOKENS if away else TURN_GROWTH_TOKENS)


def _held_blocks(request: RequestState, shape: KvShape) -> int:
    """Blocks of a runnable request that are on the device."""
    return shape.blocks(request.kv_tokens) if request.kv is KvPlace.DEVICE else 0
