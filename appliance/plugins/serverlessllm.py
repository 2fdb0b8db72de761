"""ServerlessLLM (OSDI'24) as Aegaeon runs it: request-level first come, first served.

A model keeps its instance until its requests are done: those that waited together, and those that
come while no other model waits. Every switch is paid between requests, never within one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import (
    ClusterView,
    InstanceView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role

UNTIL_DONE_SECONDS = 86400.0


class ServerlessLlm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What can be set."""

    max_group: Annotated[int, Meta(ge=1)] = 64
    """Requests of one model that are taken on together at most; others wait behind the rest, or a
    busy model could keep everybody waiting for ever."""

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """Every instance serves every model, from the prompt to the end."""
        return everywhere(cluster)

    @hookimpl
    def prefill(self, request: RequestView, instances: Sequence[InstanceView]) -> PrefillChoice:
        """With the waiting requests of its model; else where it runs and no request waits; else
        where the fewest models are."""
        waiting = open_group(request, instances, self.max_group)
        if waiting is not None:
            return waiting
        return PrefillChoice(instance=least_loaded(request, instances).id)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        """Where it was prefilled."""
        return in_place(prefilled_on, instances)

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        """Only who joins the model that ran last goes before what decodes."""
        return Phase.PREFILL if joins(instance, instance.current_model) else Phase.DECODE

    @hookimpl
    def preempt(self, instance: InstanceView) -> float:
        """Who is first in line and of the model that runs joins at once."""
        return 0.0 if joins(instance, instance.turn) else math.inf

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        """One model until it is done: the one that ran last, if it has anything to run."""
        runnable = [batch.model for batch in instance.batches if batch.runnable]
        current = instance.current_model
        model = current if current in runnable else runnable[0]
        return [PlannedTurn(model=model, quota_seconds=UNTIL_DONE_SECONDS)]

    @hookimpl
    def prefetch(self) -> Sequence[ModelName]:
        """Nothing: a switch begins when the last request is done."""
        return []


def everywhere(cluster: ClusterView) -> Sequence[Placement]:
    """All instances alike: every model, prompts and decoding."""
    return [Placement(role=Role.MIXED)] * len(cluster.instances)


def open_group(
    request: RequestView, instances: Sequence[InstanceView], max_group: int
) -> PrefillChoice | None:
    """The first group of the request's model that has not admitted `max_group` yet. O(groups)."""
    for view in instances:
        for index, group in enumerate(view.groups):
            if group.model == request.model and group.admitted < max_group:
                return PrefillChoice(instance=view.id, group=index)
    return None


def least_loaded(request: RequestView, instances: Sequence[InstanceView]) -> InstanceView:
    """The instance where the request can join its model at once; else that with the fewest models
    to wait for, of equals that with the fewest requests, and then one where the model ran last."""

    def rank(view: InstanceView) -> tuple[bool, int, int, bool, InstanceId]:
        here = view.current_model == request.model
        others = view.groups or any([batch.model != request.model for batch in view.batches])
        waits = len(view.groups) + len(view.batches)
        return not here or bool(others), waits, view.load, not here, view.id

    return min(instances, key=rank)


def at_the_end(request: RequestView, view: InstanceView) -> PrefillChoice:
    """Last in the queue of the instance, in its last group if that is of the same model."""
    last = len(view.groups) - 1
    joined = last >= 0 and view.groups[last].model == request.model
    return PrefillChoice(instance=view.id, group=last if joined else None)


def in_place(prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
    """The instance that has the KV, if it is offered."""
    offered = [view.id for view in instances]
    return prefilled_on if prefilled_on in offered else offered[0]


def lone_turn(instance: InstanceView, seconds: float) -> Sequence[PlannedTurn] | None:
    """A turn for a lone model; none where several share the instance."""
    models = [batch.model for batch in instance.batches if batch.runnable]
    if len(models) > 1:
        return None
    return [PlannedTurn(model=models[0], quota_seconds=seconds)]


def joins(instance: InstanceView, model: ModelName | None) -> bool:
    """Whether the first prompt in line is of this model, and no other model waits to go on."""
    groups = instance.groups
    return (
        bool(groups)
        and groups[0].model == model
        and all([batch.model == model for batch in instance.batches])
    )
