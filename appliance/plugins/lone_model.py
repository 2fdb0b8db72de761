"""A model that has the box to itself: which of its instances prefill, and where its requests go.

`separation` says how many. The sides are soft: a prompt that would be late where prompts are
computed goes where steps leave time for it, and a request for which those that decode
have no room stays where its prompt was computed, until they have.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from appliance.plugins.separation import ModelLoad, Pressure, Separation
from appliance.scheduling.policy_api import (
    BatchView,
    ClusterView,
    Costs,
    DecodingView,
    InstanceView,
    Migration,
    ModelView,
    RequestView,
)
from appliance.vocabulary import InstanceClass, InstanceId, ModelName, Slo

DEMAND_SECONDS = 30.0
"""Over which rates are smoothed (`ModelView`)."""
SEEN_SECONDS = 3.0
"""How long a model is alone before its rate says anything."""
LEAST_SLOPE = 1e-5
"""Of a step that a request more adds to it, if costs know it: less is rounding."""
LEAST_RATE = 0.01
"""A model that is asked less often has no work."""
BATCHED_TOKENS = 2048
"""Of short prompts that are computed together, and share what each takes at least."""
ASSUMED_ANSWERS = 10
"""As many answers does the assumed length of an answer count as."""
AVERAGED_LOOKS, AVERAGED_PROMPTS = 60, 256
"""Of how many observations the mean length of answers that ended is, and that of prompts."""
SMALLEST_CHUNK = 64
"""Tokens of a prompt; with fewer in a step it would take several times as long as whole."""
LEAST_SHARE = 0.01
"""Of its time an instance computes prompts, if nothing is known of what they take."""
KV_SHARE = 0.9
"""Of the room for KV that requests may take when they come: answers grow."""
FLOW_SHARE = 0.8
"""Requests go on elsewhere if steps there take at most this share of the TBT target. It is less
than what new ones may take, so that none goes to and fro."""
ANY_TARGETS = Slo(ttft_seconds=math.inf, tbt_seconds=math.inf)
SETTLING_SECONDS = 10.0
"""For so long after instances mix again, KV that was on its way may come: turns stay short."""


class LoneModel:
    """The model with the only work there is, if there is one. `margin` of its TTFT target is left
    where its prompts are late, and new requests join steps of `step_share` of its TBT target."""

    def __init__(self, margin: float, step_share: float, answer_tokens: float) -> None:
        self._margin = margin
        self._step_share = step_share
        self._assumed_tokens = answer_tokens
        self._model: ModelName | None = None
        self._only = False
        """Whether the catalogue has one model."""
        self._begin()
        self._separation = Separation()
        self._settling: ModelName | None = None
        self._settled = -math.inf

    def _begin(self, model: ModelName | None = None, now: float = 0.0, rate: float = 0.0) -> None:
        self._model, self._since, self._rate_before = model, now, rate
        self._answered_share = 1.0
        self._noted, self._newest = 0, -math.inf
        self._prompts, self._prompt_tokens = 0, 0.0
        self._looks, self._ended_tokens = 0, 0.0
        self._kv_token_bytes = 0.0
        self._arrival_seconds, self._limit_share = 0.0, 1.0
        self._slo, self._most = ANY_TARGETS, math.inf
        self._prefill: frozenset[InstanceId] = frozenset()
        self._decode: frozenset[InstanceId] = frozenset()

    def is_alone(self, model: ModelName) -> bool:
        """Whether no other model had work at the last look, or there is no other."""
        return model == self._model or self._only

    def is_apart(self, model: ModelName) -> bool:
        """Whether some of the model's instances only prefill."""
        return model == self._model and bool(self._prefill)

    def has_arrivals(self, now: float, model: ModelName) -> bool:
        """Whether KV of the model may be on its way between instances."""
        return self.is_apart(model) or (model == self._settling and now < self._settled)

    def step_target(self, batch: BatchView) -> float:
        """The TBT that steps of the batch keep: the strictest, but that of the model where its
        instances are apart, as one stream would make the prompts of all wait for it."""
        own = self._slo.tbt_seconds if self.is_apart(batch.model) else 0.0
        return max(batch.slo.tbt_seconds, own)

    def note(self, request: RequestView) -> None:
        """A request is placed. One that came before others is placed again, and not counted. One
        that only embeds its prompt counts as one that is not answered."""
        if request.model != self._model or request.arrived < self._newest:
            return
        self._newest = request.arrived
        self._noted += 1
        answered = request.max_tokens > 0
        self._answered_share += (answered - self._answered_share) / min(
            self._noted, AVERAGED_PROMPTS
        )
        if answered:
            self._prompts += 1
            part = 1 / min(self._prompts, AVERAGED_PROMPTS)
            self._prompt_tokens += (request.tokens - self._prompt_tokens) * part

    # --- how many, and which ---------------------------------------------------------------------

    def plan(self, now: float, cluster: ClusterView, costs: Costs) -> None:
        """Look at everything anew, each second. O(models + instances)."""
        busy = [m for m in cluster.models if m.requests or m.arrivals_per_second > LEAST_RATE]
        self._only = len(cluster.models) == 1
        model = busy[0] if len(busy) == 1 else None
        if model is None or model.name != self._model:
            self._separation.mix(now)
            self._begin()
            if model is not None:
                self._begin(model.name, now, model.arrivals_per_second)
        if model is None:
            return
        if model.output_tokens:
            self._looks = min(self._looks + 1, AVERAGED_LOOKS)
            self._ended_tokens += (model.output_tokens - self._ended_tokens) / self._looks
        self._slo, self._most = model.slo, min(model.max_batch, model.max_sequences)
        mine = [view for view in cluster.instances if _serves(view, model)]
        separation = self._separation
        load = self._load(model, mine, costs) if self._is_simple(mine, model) else None
        if load is None or separation.prefill >= len(mine):
            separation.mix(now)
        elif now - self._since >= SEEN_SECONDS and self._prompts:
            self._arrival_seconds = load.arrival_seconds
            self._limit_share = load.decode_limit_seconds / load.limit_seconds
            rate = self._answered_share * self._rate(now, model)
            pressure = self._pressure(now, model, mine, costs)
            separation.observe(now, load, len(mine), rate, pressure)
        self._choose(mine, separation.prefill)
        if separation.prefill:
            self._settling, self._settled = model.name, now + SETTLING_SECONDS

    def _rate(self, now: float, model: ModelView) -> float:
        """Requests a second since it is alone: the smoothed rate, less what is left in it of the
        one before, over the part of the window that has passed."""
        left = math.exp((self._since - now) / DEMAND_SECONDS)
        return max(0.0, model.arrivals_per_second - self._rate_before * left) / (1 - left)

    def _is_simple(self, mine: Sequence[InstanceView], model: ModelView) -> bool:
        """Whether instances are up, with the model in place everywhere, and no batch work has to
        wait for other work: that is not weighed here."""
        return bool(mine) and all(
            [
                model.name in view.resident
                and all([group.interactive == group.waiting for group in view.groups])
                and all([batch.interactive == batch.requests for batch in view.batches])
                for view in mine
            ]
        )

    def _load(
        self, model: ModelView, mine: Sequence[InstanceView], costs: Costs
    ) -> ModelLoad | None:
        """What a mean request takes; None as long as costs do not say what one more adds to a step:
        decoding would look free."""
        name, prompt = model.name, max(1, round(self._prompt_tokens))
        answer = self._answer(model, mine)
        base = costs.prefill_seconds(name, 1) * (1 - min(1.0, prompt / BATCHED_TOKENS))
        length = prompt + round(answer / 2)
        one, many = costs.step_seconds(name, 1, length), costs.step_seconds(name, 33, 33 * length)
        each = (many - one) / 32
        if each < LEAST_SLOPE * one:
            return None
        self._kv_token_bytes = model.device_bytes_per_token
        room = min([_room_bytes(view) for view in mine])
        size = length * self._kv_token_bytes
        return ModelLoad(
            prompt_seconds=max(1e-9, costs.prefill_seconds(name, prompt) - base),
            answer_tokens=answer,
            step_seconds=max(0.0, one - each),
            request_seconds=each,
            limit_seconds=self._step_share * model.slo.tbt_seconds,
            room=room / size if size else math.inf,
            most=self._most,
            kv_seconds=costs.move_seconds(prompt * model.kv_bytes_per_token),
            target_seconds=model.slo.tbt_seconds,
        )

    def _answer(self, model: ModelView, mine: Sequence[InstanceView]) -> float:
        """How long an answer is in the mean: all tokens that were made for each answer that ended.
        The mean of those that ended is too short while the long ones go on."""
        ended = max(0, self._prompts - model.requests)
        going = sum([batch.requests for view in mine for batch in view.batches])
        made = sum([count_kv_tokens(view) for view in mine]) - going * self._prompt_tokens
        assumed = ASSUMED_ANSWERS + going / 2
        tokens = assumed * self._assumed_tokens + ended * self._ended_tokens
        return (tokens + max(0.0, made)) / (assumed + ended)

    def _pressure(
        self, now: float, model: ModelView, mine: Sequence[InstanceView], costs: Costs
    ) -> Pressure:
        """Prompts are late if one waits past its margin; steps if no instance that decodes
        has room for one more."""
        if not self._prefill:
            return Pressure()
        late = [
            group.deadline < now + self._margin * group.slo.ttft_seconds
            for view in mine
            if view.id in self._prefill
            for group in view.groups
        ]
        rooms = self._rooms(model.name, mine, costs, self._step_share)
        return Pressure(prompts=any(late), steps=rooms.find(1) is None)

    def _choose(self, mine: Sequence[InstanceView], prefill: int) -> None:
        """Those that prefill go on; then those come that decode least."""
        known = self._prefill
        order = sorted(mine, key=lambda v: (v.id not in known, count_kv_tokens(v), v.id))
        self._prefill = frozenset([view.id for view in order[:prefill]])
        self._decode = frozenset([view.id for view in order[prefill:]])

    # --- where requests go -----------------------------------------------------------------------

    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> InstanceView | None:
        """The instance for prompts that computes it first. If it is late there, one that decodes
        and where it is in time. None if none of the instances is for prompts."""
        first = [view for view in instances if view.id in self._prefill]
        if not first:
            return None
        model = request.model
        own = costs.prefill_seconds(model, request.tokens)
        part = costs.prefill_seconds(model, 1 + SMALLEST_CHUNK) - costs.prefill_seconds(model, 1)
        least = part / (part + self._step_share * self._slo.tbt_seconds) or LEAST_SHARE

        def soonest(views: Iterable[InstanceView]) -> tuple[float, InstanceId]:
            found = []
            for view in views:
                seconds, share = self._waits(own, view, model, costs)
                late = seconds / share if share > 0 else math.inf
                found.append((seconds / max(share, least), late, view.id))
            return min(found, default=(0.0, math.inf, -1))[1:]

        left = request.deadline - self._margin * request.slo.ttft_seconds - now
        best = soonest(first)
        if best[0] > left:
            need = 2 * request.tokens * self._kv_token_bytes
            decode = [view for view in instances if view.id in self._decode]
            roomy = [view for view in decode if view.free_bytes + view.idle_bytes > need]
            other = soonest(roomy)
            best = other if other[0] <= left else best
        return next(view for view in instances if view.id == best[1])

    def _waits(
        self, own: float, view: InstanceView, model: ModelName, costs: Costs
    ) -> tuple[float, float]:
        """What the prompt takes after those that wait, and the share of the time that steps leave:
        none, or less, where they are too long."""
        tokens = [(view.computing_tokens, 1)]
        tokens += [(group.tokens, group.waiting) for group in view.groups if group.model == model]
        waiting = sum(
            [many * costs.prefill_seconds(model, round(n / many)) for n, many in tokens if n]
        )
        batch = find_batch(view, model)
        if batch is None:
            return waiting + own, 1.0
        step = costs.step_seconds(model, batch.requests, batch.kv_tokens)
        return waiting + own, 1.0 - step / (self._step_share * self.step_target(batch))

    def decode(
        self,
        request: RequestView,
        prefilled_on: InstanceId,
        instances: Sequence[InstanceView],
        costs: Costs,
    ) -> InstanceId | None:
        """In place where others decode, else where they have room; None if they have none.
        O(instances + their batches)."""
        if prefilled_on in self._decode and any([v.id == prefilled_on for v in instances]):
            return prefilled_on
        rooms = self._rooms(request.model, instances, costs, self._step_share)
        return rooms.find(request.tokens)

    def flow(
        self,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
        costs: Costs,
    ) -> Sequence[Migration] | None:
        """Requests that decode where prompts are computed go on where there is room; None if no
        prompts are computed here only. O(1) where nothing goes; else O(requests + instances), and
        O(instances) for each request that goes on or is the shortest so far without room."""
        if instance.id not in self._prefill or self._model is None:
            return None
        rooms, moves = self._rooms(self._model, others, costs, FLOW_SHARE), []
        for request in requests:
            if request.model != self._model:
                continue
            target = rooms.join(request.tokens)
            if target is not None:
                moves.append(Migration(request=request.id, target=target))
        return moves

    def _rooms(
        self,
        model: ModelName,
        instances: Iterable[InstanceView],
        costs: Costs,
        step_share: float,
    ) -> _Rooms:
        """Of those of the instances that decode, where steps take at most so much of the model's
        TBT target."""
        rooms = []
        for view in instances:
            if view.id in self._decode:
                batch = find_batch(view, model)
                requests = view.computing_requests + (batch.requests if batch else 0)
                kv_tokens = count_kv_tokens(view)
                rooms.append(_Room(kv_tokens, view.id, requests, _room_bytes(view)))
        return _Rooms(
            sorted(rooms),
            partial(costs.step_seconds, model),
            step_share * self._limit_share * self._slo.tbt_seconds,
            self._most,
            self._kv_token_bytes,
            self._arrival_seconds,
        )


class _Room(NamedTuple):
    """What decodes on an instance, and how many bytes of KV it has room for in all."""

    kv_tokens: int
    instance: InstanceId
    requests: int
    room_bytes: float


@dataclass(slots=True)
class _Rooms:
    """Instances that decode, those first where the least KV is read. One more request has room for
    its `token_bytes` per token, as one of at most so many (`most`), and in a step of at most
    `limit_seconds`, of which each request that waits for KV takes `arrival_seconds`: requests that
    ask for another TBT target share their steps with those that do not."""

    rooms: list[_Room]
    step_seconds: Callable[[int, int], float]
    limit_seconds: float
    most: float
    token_bytes: float
    arrival_seconds: float
    refused: float = math.inf
    """A request with as many tokens has no room: rooms only get fuller."""

    def find(self, tokens: int) -> InstanceId | None:
        """Where a request with so many tokens has room, and the least KV is read; None if nowhere.
        O(instances)."""
        index = self._index(tokens)
        return None if index is None else self.rooms[index].instance

    def join(self, tokens: int) -> InstanceId | None:
        """The same; the request goes there. O(instances), and mostly the first has room."""
        index = self._index(tokens)
        if index is None:
            return None
        kv_tokens, instance, requests, room_bytes = self.rooms.pop(index)
        insort(self.rooms, _Room(kv_tokens + tokens, instance, requests + 1, room_bytes))
        return instance

    def _index(self, tokens: int) -> int | None:
        if tokens >= self.refused:
            return None
        for index, (kv_tokens, _, requests, room_bytes) in enumerate(self.rooms):
            grown, many = kv_tokens + tokens, 1 + requests
            if many <= self.most and grown * self.token_bytes <= room_bytes:
                step = self.step_seconds(many, grown) + many * self.arrival_seconds
                if step <= self.limit_seconds:
                    return index
        self.refused = tokens
        return None


def _serves(view: InstanceView, model: ModelView) -> bool:
    meant = view.models is None or model.name in view.models
    mixed = view.instance_class is InstanceClass.MIXED
    return view.up and meant and mixed and model.fits(view.id)


def count_kv_tokens(view: InstanceView) -> int:
    """Of all that decode there."""
    return sum([batch.kv_tokens for batch in view.batches])


def _room_bytes(view: InstanceView) -> float:
    return KV_SHARE * (view.free_bytes + view.kv_bytes + view.idle_bytes)


def find_batch(view: InstanceView, model: ModelName) -> BatchView | None:
    """The requests of the model that decode there. O(batches)."""
    for batch in view.batches:
        if batch.model == model:
            return batch
    return None
