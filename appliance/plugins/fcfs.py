"""Request-level first come, first served: what everybody does today, and our baseline.

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
from appliance.scheduling.questions import (
    FloorView,
    InstanceView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role

UNTIL_DONE_SECONDS = 86400.0


class Fcfs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set."""

    max_group: Annotated[int, Meta(ge=1)] = 64
    """Requests of one model that are taken on together at most; others wait behind the rest, or a
    busy model could keep everybody waiting for ever."""

    @hookimpl
    def place(self, floor: FloorView) -> Sequence[Placement]:
        return [Placement(role=Role.MIXED)] * len(floor.instances)

    @hookimpl
    def prefill(self, request: RequestView, instances: Sequence[InstanceView]) -> PrefillChoice:
        """With the waiting requests of its model; else where least is to do, at equal load where
        the model runs already."""
        for view in instances:
            for index, group in enumerate(view.groups):
                if group.model == request.model and group.admitted < self.max_group:
                    return PrefillChoice(instance=view.id, group=index)
        best = min(
            instances, key=lambda view: (view.load, view.current_model != request.model, view.id)
        )
        return PrefillChoice(instance=best.id)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        offered = [view.id for view in instances]
        return prefilled_on if prefilled_on in offered else offered[0]

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        joins = instance.groups[0].model == instance.current_model
        return Phase.PREFILL if joins else Phase.DECODE

    @hookimpl
    def preempt(self, instance: InstanceView) -> float:
        """Who is first in line and of the model that runs joins at once."""
        groups = instance.groups
        return 0.0 if groups and groups[0].model == instance.turn else math.inf

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        runnable = [batch.model for batch in instance.batches if batch.runnable]
        current = instance.current_model
        model = current if current in runnable else runnable[0]
        return [PlannedTurn(model=model, quota_seconds=UNTIL_DONE_SECONDS)]

    @hookimpl
    def prefetch(self) -> Sequence[ModelName]:
        """Nothing: a swap begins when the last request is done."""
        return []
