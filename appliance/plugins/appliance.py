"""The appliance's own policy: one model runs until another one's deadline asks for the instance.

Every instance prefills and decodes. A model that runs makes tokens faster than they are due, and so
earns slack. It goes on while nobody else would be late for it, takes in every request for it that
comes meanwhile, and gives way when it has earned as much as a new request may wait, and at the last
moment at which whoever is most urgent is still in time.
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

ESTIMATES_SECONDS = 30.0
"""How long an estimate is kept that goes into the load of an instance."""

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]


@dataclass(slots=True)
class Work:
    """What an instance has to do for one model."""

    model: ModelName
    due: float = math.inf
    """When the next token of the most urgent request is due."""
    prompt_seconds: float = 0.0
    """What the prompts that wait take."""
    runs: bool = False
    """Whether something of it could run now."""
    latest: float = math.inf
    """When it has to come to run, to be in time."""
    earns: float = 0.0
    """Seconds of slack that a second of decoding earns."""
    enough_seconds: float = math.inf
    """Slack that is as much as it needs while others wait."""


@dataclass(slots=True, frozen=True)
class Outlook:
    """What is known of an instance as long as its view is the same."""

    view: InstanceView
    works: dict[ModelName, Work]
    """By model."""


@dataclass(slots=True, frozen=True)
class Load:
    """About how long everything on an instance takes, as long as its view is the same."""

    view: InstanceView
    decoding: dict[ModelName, int]
    """How many requests of each model decode."""
    models: frozenset[ModelName]
    """Those with work."""
    seconds: float


class Appliance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set. A question costs O(groups + batches) of the instances that changed since
    the last one."""

    margin_seconds: Seconds = 1.0
    """How long before its deadline a request comes to run at the latest."""
    shortest_turn_seconds: Seconds = 0.5
    """Less is not run of a model, or switching would be all that is done when everybody is late.
    About the time a load takes, which goes on beside it."""
    patience_seconds: Seconds = 30.0
    """How much later than the model that runs, if that is late itself, another one may be."""
    enough: Annotated[float, Meta(gt=0)] = 1.0
    """Who has earned this many times the TTFT that its requests are promised lets others go on."""
    longest_turn_seconds: Seconds = 60.0
    """The longest turn while nobody else waits."""
    output_tokens: Annotated[int, Meta(ge=1)] = 300
    """How long an answer is taken to be, of any model: only who has more to do counts. (Estimates
    of each model, from its own answers, made it worse: they vary more than the truth.)"""

    def __post_init__(self) -> None:
        self._outlooks: dict[InstanceId, Outlook] = {}
        self._estimates_until = -math.inf
        self._loads: dict[InstanceId, Load] = {}
        self._answers: dict[tuple[ModelName, int], float] = {}
        self._switches: dict[ModelName, float] = {}
        self._prompts: dict[ModelName, tuple[float, float]] = {}

    # --- where requests go -----------------------------------------------------------------------

    @hookimpl
    def place(self, now: float, floor: FloorView) -> Sequence[Placement]:
        """Everything everywhere. Estimates that are kept are looked up anew now and then."""
        if now >= self._estimates_until:
            self._estimates_until = now + ESTIMATES_SECONDS
            self._loads.clear()
            self._answers.clear()
            self._switches.clear()
            self._prompts.clear()
        return [Placement(role=Role.MIXED)] * len(floor.instances)

    @hookimpl
    def prefill(
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice:
        """Where everything, the request included, would be done first. Beside others of its model
        it costs its prompt; elsewhere a switch and a whole answer that nobody shares."""
        model = request.model
        alone = self._answer_seconds(model, 1, costs)
        switch = self._switch_seconds(model, costs)
        best, soonest = instances[0], math.inf
        for view in instances:
            load = self._loads.get(view.id)
            if load is None or load.view is not view:
                load = self._loads[view.id] = self._make_load(view, load, costs)
            seconds = load.seconds
            if model not in load.models:
                seconds += alone if model in view.resident else alone + switch
            if (seconds, view.id) < (soonest, best.id):
                best, soonest = view, seconds
        for index, group in enumerate(best.groups):
            if group.model == model:
                return PrefillChoice(instance=best.id, group=index)
        return PrefillChoice(instance=best.id)

    def _make_load(self, view: InstanceView, last: Load | None, costs: Costs) -> Load:
        """O(batches) if only tokens came since the `last` one, else O(batches + groups)."""
        decoding = {batch.model: batch.requests for batch in view.batches}
        if (
            last is not None
            and decoding == last.decoding
            and view.groups == last.view.groups
            and view.resident == last.view.resident
        ):
            return Load(view, decoding, last.models, last.seconds)
        requests, seconds = dict(decoding), 0.0
        for group in view.groups:
            model = group.model
            each, per_token = self._prompts.get(model) or self._prompt_seconds(model, costs)
            seconds += group.waiting * each + group.tokens * per_token
            requests[model] = requests.get(model, 0) + group.waiting
        for work in requests.items():
            seconds += self._answers.get(work) or self._answer_seconds(*work, costs)
        for model in requests:
            if model not in view.resident:
                seconds += self._switches.get(model) or self._switch_seconds(model, costs)
        return Load(view, decoding, frozenset(requests), seconds)

    def _answer_seconds(self, model: ModelName, requests: int, costs: Costs) -> float:
        """What answers of usual length take that share their steps."""
        known = self._answers.get((model, requests))
        if known is None:
            known = costs.step_seconds(model, requests) * self.output_tokens
            self._answers[model, requests] = known
        return known

    def _prompt_seconds(self, model: ModelName, costs: Costs) -> tuple[float, float]:
        """What a prompt takes, and each of its tokens: a line through two estimates."""
        short, long = costs.prefill_seconds(model, 1), costs.prefill_seconds(model, 1001)
        per_token = (long - short) / 1000
        self._prompts[model] = known = (short - per_token, per_token)
        return known

    def _switch_seconds(self, model: ModelName, costs: Costs) -> float:
        known = self._switches.get(model)
        if known is None:
            known = self._switches[model] = costs.switch_seconds(model)
        return known

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
            first = min((works[model] for model in runnable), key=_deadline)
        rest = sorted((w for w in works.values() if w is not first), key=_latest)
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
        switch, until it has enough; else whose deadline is next. Who runs and is late itself goes
        on: it soon will not be. If it stays late, as more is asked of it than it can do, others do
        not wait for that."""
        works = self._look(view, costs).works
        able = [work for work in works.values() if work.runs]
        pressing = [work for work in able if work.latest <= now]
        first = min(pressing or able, key=_deadline)
        current = works.get(view.current_model or "")
        if current is None or current not in (pressing or able):
            return first
        if pressing:
            return current if current.due - first.due <= self.patience_seconds else first
        return current if current.due - now < current.enough_seconds else first

    def _quota(self, now: float, view: InstanceView, model: ModelName, costs: Costs) -> float:
        """How long the model may run before it has enough, if somebody waits, and before somebody
        else has to begin, if the more urgent of them load and compute their prompts before."""
        seconds, before = self.longest_turn_seconds, 0.0
        own = self._look(view, costs).works.get(model)
        if own is not None and own.earns > 0 and len(self._look(view, costs).works) > 1:
            seconds = min(seconds, (own.enough_seconds - (own.due - now)) / own.earns)
        for work in sorted(self._look(view, costs).works.values(), key=_deadline):
            if work.model == model or not work.runs:
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
            step = costs.step_seconds(batch.model, batch.requests, batch.kv_tokens)
            works[batch.model] = Work(
                model=batch.model,
                due=batch.deadline,
                runs=batch.runnable > 0,
                earns=batch.slo.tbt_seconds / step - 1,
                enough_seconds=self.enough * batch.slo.ttft_seconds,
            )
        for group in view.groups:
            work = works.setdefault(group.model, Work(model=group.model))
            work.due = min(work.due, group.deadline)
            mean = group.tokens // group.waiting
            work.prompt_seconds += group.waiting * costs.prefill_seconds(group.model, mean)
            work.runs = True
        for work in works.values():
            lead = self.margin_seconds + work.prompt_seconds
            if work.model not in view.resident:
                lead += costs.switch_seconds(work.model)
            work.latest = work.due - lead
        return Outlook(view, works)


def _deadline(work: Work) -> tuple[float, ModelName]:
    return work.due, work.model


def _latest(work: Work) -> tuple[float, ModelName]:
    return work.latest, work.model
