"""Llumnix-like scaling by utilisation (OSDI'24): the baseline of Chiron (§6).

The average use of KV memory is kept within a band by adding and removing instances, one at a time;
requests go to the freest instance, and on from the fullest to the freest while they decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.serverlessllm import at_the_end, everywhere
from appliance.scheduling.policy_api import (
    ClusterView,
    DecodingView,
    Fleet,
    InstanceView,
    Migration,
    Placement,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceClass, InstanceId

Share = Annotated[float, Meta(ge=0, le=1)]


class Utilization(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set. The papers give no numbers: Chiron sweeps the band per workload."""

    low: Share = 0.3
    """An instance is removed below this average use of KV memory."""
    high: Share = 0.7
    """One is added above."""
    pause_seconds: Annotated[float, Meta(ge=0)] = 10.0
    """Between two changes at least."""
    imbalance: Annotated[float, Meta(gt=1)] = 2.0
    """How many times as free as this one another instance has to be, the request counted there, for
    a request to go there."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError("low has to be below high")
        self._changed = -math.inf

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        return everywhere(cluster)

    @hookimpl
    def scale(self, now: float, cluster: ClusterView) -> Fleet:
        """One instance more, one less, or as many as there are."""
        open_ = [view for view in cluster.instances if not parked(view)]
        count = len(open_)
        if now >= self._changed + self.pause_seconds:
            use = utilization(cluster, [view for view in open_ if view.up])
            wanted = count + (use > self.high) - (use < self.low)
            wanted = min(max(wanted, 1), len(cluster.instances))
            if wanted != count:
                self._changed, count = now, wanted
        return Fleet(interactive=0, mixed=count, batch=0)

    @hookimpl
    def prefill(self, request: RequestView, instances: Sequence[InstanceView]) -> PrefillChoice:
        """The freest instance; of equals one that has the model."""
        best = max(
            instances,
            key=lambda view: (freeness(view), request.model in view.resident, -view.id),
        )
        return at_the_end(request, best)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        """Where it was prefilled, or the freest if that takes nothing any more."""
        best = max(instances, key=lambda view: (view.id == prefilled_on, freeness(view), -view.id))
        return best.id

    @hookimpl
    def flow(
        self,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
    ) -> Sequence[Migration]:
        """All of an instance that is being removed; else the shortest of those that got a token
        here and can go to an instance that is that much freer: the freest of these."""
        targets = [view for view in others if not parked(view)]
        if parked(instance):
            return spread(requests, targets)
        wanted = self.imbalance * freeness(instance)
        much_freer = [view for view in targets if freeness(view, 1) >= wanted]
        moving = [one for one in requests if one.here_tokens and able(one, much_freer)]
        if not moving:
            return []
        shortest = min(moving, key=lambda request: (request.tokens, request.id))
        return [Migration(request=shortest.id, target=freest(able(shortest, much_freer)).id)]


def parked(view: InstanceView) -> bool:
    """Whether the instance takes nothing new."""
    return view.instance_class is InstanceClass.PARKED


def freeness(view: InstanceView, more: int = 0) -> float:
    """Memory that holds no KV in use, per request there, `more` and the next one counted (Llumnix:
    steps until it is full, up to a factor)."""
    return (view.total_bytes - view.kv_bytes) / (view.load + more + 1)


def freest(views: Sequence[InstanceView]) -> InstanceView:
    return max(views, key=lambda view: (freeness(view), -view.id))


def able(request: DecodingView, views: Sequence[InstanceView]) -> list[InstanceView]:
    """Those that can serve the request's model."""
    return [view for view in views if request.instances is None or view.id in request.instances]


def spread(requests: Sequence[DecodingView], targets: Sequence[InstanceView]) -> list[Migration]:
    """Each request to the freest target that can serve its model, those before it counted; a
    request without any stays."""
    came = dict.fromkeys([view.id for view in targets], 0)
    flows = []
    for request in requests:
        views = able(request, targets)
        if not views:
            continue
        best = max(views, key=lambda view: (freeness(view, came[view.id]), -view.id))
        came[best.id] += 1
        flows.append(Migration(request=request.id, target=best.id))
    return flows


def utilization(cluster: ClusterView, instances: Sequence[InstanceView]) -> float:
    """Mean over the instances of the KV in use and asked for by waiting prompts, by what the
    weights of the models at work there leave; 1 where they leave nothing, and without instances."""
    models = {model.name: model for model in cluster.models}
    shares = []
    for view in instances:
        busy = {g.model for g in view.groups} | {b.model for b in view.batches}
        room = view.total_bytes - sum([models[name].weight_bytes for name in busy])
        waiting = sum([g.tokens * models[g.model].kv_bytes_per_token for g in view.groups])
        shares.append(min(1.0, (view.kv_bytes + waiting) / room) if room > 0 else 1.0)
    return sum(shares) / len(shares) if shares else 1.0
