"""The appliance's own policy: one model runs until another one's deadline asks for the instance.

Every instance prefills and decodes. A model that runs makes tokens faster than they are due, and so
earns slack. It goes on while nobody else would be late for it, takes in every request for it that
comes meanwhile, and gives way at the last moment at which whoever is most urgent is still in time.
The order in which models come next is known ahead, and their weights are brought in meanwhile.
docs/policies/appliance.md derives it and says what each part is worth.
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

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]


@dataclass(slots=True)
class Work:
    """What an instance has to do for one model."""

    model: ModelName
    due: float = math.inf
    """When the next token of the most urgent request is due."""
    requests: int = 0
    kv_tokens: int = 0
    prompt_seconds: float = 0.0
    """What the prompts that wait take."""
    runs: bool = False
    """Whether something of it could run now."""
    latest: float = math.inf
    """When it has to come to run, to be in time."""


@dataclass(slots=True, frozen=True)
class Outlook:
    """What is known of an instance as long as its view is the same."""

    view: InstanceView
    works: dict[ModelName, Work]
    """By model."""
    seconds: float
    """About how long everything here takes."""


class Appliance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set. A question costs O(groups + batches) of the instances that changed since
    the last one."""

    margin_seconds: Seconds = 1.0
    """How long before its deadline a request comes to run at the latest."""
    shortest_turn_seconds: Seconds = 1.0
    """Less is not run of a model, or switching would be all that is done when everybody is late.
    About the time a load takes, which goes on beside it."""
    longest_turn_seconds: Seconds = 60.0
    """The longest turn while nobody else waits."""
    output_tokens: Annotated[int, Meta(ge=1)] = 300
    """How long an answer is taken to be until some have ended."""

    def __post_init__(self) -> None:
        self._outlooks: dict[InstanceId, Outlook] = {}
        self._outputs: dict[ModelName, float] = {}

    # --- where requests go -----------------------------------------------------------------------

    @hookimpl
    def place(self, floor: FloorView) -> Sequence[Placement]:
        """Everything everywhere."""
        self._outputs = {model.name: model.output_tokens for model in floor.models}
        return [Placement(role=Role.MIXED)] * len(floor.instances)

    @hookimpl
    def prefill(
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice:
        """Where everything, the request included, would be done first. Beside others of its model
        it costs its prompt; elsewhere a switch and a whole answer that nobody shares."""
        best = min(instances, key=lambda view: (self._done(view, request, costs), view.id))
        for index, group in enumerate(best.groups):
            if group.model == request.model:
                return PrefillChoice(instance=best.id, group=index)
        return PrefillChoice(instance=best.id)

    def _done(self, view: InstanceView, request: RequestView, costs: Costs) -> float:
        outlook = self._look(view, costs)
        seconds = outlook.seconds + costs.prefill_seconds(request.model, request.tokens)
        if request.model in outlook.works:
            return seconds
        alone = costs.step_seconds(request.model, 1, request.tokens)
        return seconds + self._answer_seconds(view, request.model, alone, costs)

    @hookimpl
    def decode(self, prefilled_on: InstanceId, instances: Sequence[InstanceView]) -> InstanceId:
        """Where its KV is."""
        offered = [view.id for view in instances]
        return prefilled_on if prefilled_on in offered else offered[0]

    # --- who runs --------------------------------------------------------------------------------

    @hookimpl
    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        """Prompts of the model that runs next come first, then the most urgent."""
        model = self._next(now, instance, costs).model
        groups = instance.groups
        return sorted(
            range(len(groups)), key=lambda n: (groups[n].model != model, groups[n].deadline)
        )

    @hookimpl
    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        """The prompts of the model that runs next are computed before it decodes: then they decode
        with the others."""
        joins = instance.groups[0].model == self._next(now, instance, costs).model
        return Phase.PREFILL if joins else Phase.DECODE

    @hookimpl
    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        """One turn, and in which order the others are likely to follow."""
        runnable = {batch.model for batch in instance.batches if batch.runnable}
        works = self._look(instance, costs).works
        first = self._next(now, instance, costs)
        if first.model not in runnable:
            first = min((works[model] for model in runnable), key=_urgency)
        rest = sorted((w for w in works.values() if w is not first), key=_urgency)
        outlook = [
            PlannedTurn(model=w.model, quota_seconds=self.longest_turn_seconds, firm=False)
            for w in rest
        ]
        seconds = self._quota(now, instance, first.model, costs)
        return [PlannedTurn(model=first.model, quota_seconds=seconds), *outlook]

    @hookimpl
    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        """A prompt of the model that runs joins at once; for any other the turn is cut when that
        has to begin."""
        model = instance.turn
        if model is None or any([group.model == model for group in instance.groups]):
            return 0.0
        rest = instance.turn_began + self.shortest_turn_seconds - now
        return max(0.0, rest, self._quota(now, instance, model, costs))

    def _next(self, now: float, view: InstanceView, costs: Costs) -> Work:
        """Who has to run now, the earliest deadline first; else the one that runs, as that costs no
        switch; else whose deadline is next. Who runs and is late itself goes on: it soon will not
        be."""
        works = [work for work in self._look(view, costs).works.values() if work.runs]
        pressing = [work for work in works if work.latest <= now]
        for work in pressing or works:
            if work.model == view.current_model:
                return work
        return min(pressing or works, key=_urgency)

    def _quota(self, now: float, view: InstanceView, model: ModelName, costs: Costs) -> float:
        """How long the model may run before somebody else has to begin, if the more urgent of them
        load and compute their prompts before."""
        seconds, before = self.longest_turn_seconds, 0.0
        for work in sorted(self._look(view, costs).works.values(), key=_urgency):
            if work.model == model:
                continue
            seconds = min(seconds, work.latest - now - before)
            before += work.prompt_seconds
            if work.model not in view.resident:
                before += costs.switch_seconds(work.model)
        return max(self.shortest_turn_seconds, seconds)

    # --- what is known of an instance ------------------------------------------------------------

    def _look(self, view: InstanceView, costs: Costs) -> Outlook:
        known = self._outlooks.get(view.id)
        if known is None or known.view is not view:
            known = self._outlooks[view.id] = self._make_outlook(view, costs)
        return known

    def _make_outlook(self, view: InstanceView, costs: Costs) -> Outlook:
        works: dict[ModelName, Work] = {}
        for batch in view.batches:
            works[batch.model] = Work(
                model=batch.model,
                due=batch.deadline,
                requests=batch.requests,
                kv_tokens=batch.kv_tokens,
                runs=batch.runnable > 0,
            )
        for group in view.groups:
            work = works.setdefault(group.model, Work(model=group.model))
            work.due = min(work.due, group.deadline)
            work.requests += group.waiting
            work.kv_tokens += group.tokens
            mean = group.tokens // group.waiting
            work.prompt_seconds += group.waiting * costs.prefill_seconds(group.model, mean)
            work.runs = True
        seconds = 0.0
        for work in works.values():
            lead = self.margin_seconds + work.prompt_seconds
            if work.model not in view.resident:
                lead += costs.switch_seconds(work.model)
            work.latest = work.due - lead
            step = costs.step_seconds(work.model, work.requests, work.kv_tokens)
            seconds += work.prompt_seconds + self._answer_seconds(view, work.model, step, costs)
        return Outlook(view, works, seconds)

    def _answer_seconds(
        self, view: InstanceView, model: ModelName, step_seconds: float, costs: Costs
    ) -> float:
        """An answer of usual length, and the switch to its model."""
        switch = 0.0 if model in view.resident else costs.switch_seconds(model)
        return switch + step_seconds * (self._outputs.get(model) or self.output_tokens)


def _urgency(work: Work) -> tuple[float, ModelName]:
    return work.latest, work.model
