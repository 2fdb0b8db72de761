"""The appliance's own policy: one model runs until another one's deadline asks for the instance.

Every instance prefills and decodes. A model that runs earns slack: it makes tokens faster than
they are due. It goes on as long as nobody else would be late, takes in every request for it that
arrives meanwhile, and gives way at the last moment at which whoever is most urgent can still be in
time, the switches and prompts of those before included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.scheduling.questions import (
    Admitted,
    Costs,
    FloorView,
    InstanceView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=3600)]

@dataclass(slots=True)
class Work:
    """What an instance has to do for one model."""

    model: ModelName
    due: float = math.inf
    waiting: int = 0
    prompt_seconds: float = 0.0
    decoding: int = 0
    kv_tokens: int = 0
    runnable: int = 0


class Appliance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set."""

    longest_turn_seconds: Seconds = 60.0
    shortest_turn_seconds: Seconds = 0.5
    margin_seconds: Seconds = 0.3
    output_tokens: Seconds = 300.0
    lazy: bool = True
    slice_seconds: float = 0.0
    affinity: float = 1.0

    @hookimpl
    def place(self, floor: FloorView) -> Sequence[Placement]:
        return [Placement(role=Role.MIXED)] * len(floor.instances)

    @hookimpl
    def prefill(self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs) -> PrefillChoice:
        best = min(instances, key=lambda view: (self._cost(view, request, costs), view.id))
        for index, group in enumerate(best.groups):
            if group.model == request.model:
                return PrefillChoice(instance=best.id, group=index)
        return PrefillChoice(instance=best.id)

    def _cost(self, view: InstanceView, request: RequestView, costs: Costs) -> float:
        """Seconds until the instance would be done with everything, the request included."""
        seconds = 0.0
        here = False
        works = _works(view, costs)
        for model, work in works.items():
            here |= model == request.model
            step = costs.step_seconds(model, work.waiting + work.decoding, work.kv_tokens)
            seconds += step * self.output_tokens + work.prompt_seconds
            if model not in view.resident: seconds += costs.switch_seconds(model)
        seconds += costs.prefill_seconds(request.model, request.tokens)
        if not here:
            own = self.output_tokens * costs.step_seconds(request.model, 1, request.tokens)
            if request.model not in view.resident:
                own += costs.switch_seconds(request.model)
            seconds += own * self.affinity
        return seconds

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        offered = [view.id for view in instances]
        return prefilled_on if prefilled_on in offered else offered[0]

    def _pick(self, now: float, view: InstanceView, costs: Costs) -> tuple[ModelName, float]:
        """Who runs next, and for how long at most."""
        works = [w for w in _works(view, costs).values() if w.waiting or w.runnable]
        late = {w.model: self._latest(view, w, costs) for w in works}
        critical = [w for w in works if late[w.model] <= now]
        current = next((w for w in works if w.model == view.current_model), None)
        if critical:
            if current in critical: best=current
            else: best = min(critical, key=lambda w: (w.due, w.model))
        elif current is not None:
            best = current
        elif self.lazy:
            best = min(works, key=lambda w: (w.model not in view.resident, -(w.waiting+w.decoding), w.due))
        else:
            best = min(works, key=lambda w: (w.due, w.model))
        return best.model, self._quota(now, view, best.model, works, late, costs)

    def _quota(self, now, view, model, works, late, costs):
        end = self.longest_turn_seconds
        before = 0.0
        for w in sorted(works, key=lambda w: w.due):
            if w.model == model: continue
            end = min(end, late[w.model] - now - before)
            before += (0 if w.model in view.resident else costs.switch_seconds(w.model)) + w.prompt_seconds + self.slice_seconds
        return max(self.shortest_turn_seconds, end)

    def _latest(self, view: InstanceView, work: Work, costs: Costs) -> float:
        lead = self.margin_seconds + work.prompt_seconds
        if work.model not in view.resident:
            lead += costs.switch_seconds(work.model)
        return work.due - lead

    @hookimpl
    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        model, _ = self._pick(now, instance, costs)
        groups = instance.groups
        return sorted(range(len(groups)), key=lambda n: (groups[n].model != model, groups[n].deadline))

    @hookimpl
    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        model, _ = self._pick(now, instance, costs)
        return Phase.PREFILL if instance.groups[0].model == model else Phase.DECODE

    @hookimpl
    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        groups = instance.groups
        if any(group.model == instance.turn for group in groups):
            return 0.0
        works = list(_works(instance, costs).values())
        late = {w.model: self._latest(instance, w, costs) for w in works}
        began = self.shortest_turn_seconds - (now - instance.turn_began)
        q = self._quota(now, instance, instance.turn, works, late, costs)
        return max(0.0, began, q)

    @hookimpl
    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        runnable = [batch.model for batch in instance.batches if batch.runnable]
        model, seconds = self._pick(now, instance, costs)
        if model not in runnable:
            model = min((b for b in instance.batches if b.runnable), key=lambda b: b.deadline).model
            seconds = self.shortest_turn_seconds
        return [PlannedTurn(model=model, quota_seconds=seconds)]


def _works(view: InstanceView, costs: Costs) -> dict[ModelName, Work]:
    works: dict[ModelName, Work] = {}
    for batch in view.batches:
        works[batch.model] = Work(batch.model, batch.deadline, 0, 0.0, batch.requests, batch.kv_tokens, batch.runnable)
    for group in view.groups:
        work = works.get(group.model)
        if work is None:
            work = works[group.model] = Work(group.model)
        work.due = min(work.due, group.deadline)
        work.waiting += group.waiting
        work.kv_tokens += group.tokens
        work.prompt_seconds += group.waiting * costs.prefill_seconds(group.model, group.tokens // group.waiting)
    return works
