"""The appliance's own policy: one model runs until another one's deadline asks for the instance.

Every instance prefills and decodes. A model that runs makes tokens faster than they are due, and so
earns slack. It goes on while no other model would be late for it, takes in every request for it
that comes meanwhile, and gives way when it has earned as much as a new request may wait, and at the
last moment at which the most urgent request is still in time. The order in which models come next
is known ahead, and their weights are brought in meanwhile. docs/policies/appliance.md derives it
and says what each part is worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins import parking
from appliance.plugins.aegaeon import UNLIMITED
from appliance.plugins.homes import Homes, find_seekers
from appliance.plugins.instance_work.costly import CostlySwitches, CostlyTurn, soonest
from appliance.plugins.instance_work.expected import Expectations, Expected
from appliance.plugins.instance_work.loads import Loads
from appliance.plugins.instance_work.outlook import ModelWork, Outlooks, Terms
from appliance.plugins.lone_model import (
    SMALLEST_CHUNK,
    LoneModel,
    count_kv_tokens,
    find_batch,
)
from appliance.plugins.separation import MIXED_FACTOR
from appliance.plugins.shedding import (
    OwnCosts,
    Shed,
    Shedding,
    is_hopeless,
    refusal_reason,
)
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    ClusterView,
    Costs,
    DecodingView,
    Fleet,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, RequestClass

PROMPT_TOKENS = 2048
"""Of prompts that are computed together: more take proportionally longer, so nothing is gained."""
APART_TURN_SECONDS = 0.1
"""The longest turn of a model whose instances prefill or decode: requests whose KV comes from
elsewhere join with the next turn."""
NO_MORE_SECONDS = 1e-3
"""A turn ends at once, and does not go on with the rest of its quota, as it would after 0."""
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]


class Appliance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What can be set. What each question costs is said there, where "changes" are those of
    `Outlooks.of`: O(groups + batches) of the instance if its view changed since the last question,
    and O(groups + deadlines) of the models whose figures hold no more."""

    margin: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """How long before its deadline a request starts to run at the latest, as a share of its
    TTFT target."""
    shortest_turn_seconds: Seconds = 0.05
    """The shortest turn of a model. No turn is shorter than it takes to bring in the next model
    either, or switching would be all that is done when all are late."""
    longest_step: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """A step that computes part of a prompt takes at most this share of the TBT target of the
    requests that decode in the same steps."""
    max_lateness_seconds: Seconds = 30.0
    """How much later than the model that runs, if that is late itself, another one may be."""
    renewal_seconds: Seconds = 30.0
    """On an instance that is behind, a request that is late by more than its margin is due again so
    much later, and waits until then for requests that can still be in time. An instance is behind
    from when a token there is late by more than a TTFT target, until none is late."""
    slack_target: Annotated[float, Meta(gt=0)] = 2.0
    """A model that has earned this many times the TTFT target of its requests lets others go on; on
    an instance that is behind, at most one."""
    pace: Annotated[float, Meta(ge=0, le=1)] = 0.8
    """Tokens of a model with a tight TTFT are due so much of that target earlier. A mean time
    between tokens counts from the first token, and that comes about so long before it is due."""
    longest_turn_seconds: Seconds = 60.0
    """The longest turn while no other model has work."""
    home_share: Annotated[float, Meta(gt=0)] = 0.35
    """A model has homes, which it does not leave for each request, if a switch to it takes more
    than this share of its TTFT target."""
    shed: Shed = Shed.NEVER
    """Which requests are refused at once: "never" any, or those that are "hopeless", as they would
    wait for others longer than their TTFT target and a tenth of it, wherever they went. Batch work
    never is, nor what was taken on."""
    output_tokens: Annotated[int, Meta(ge=1)] = 300
    """How long an answer is taken to be, of any model: it counts who has more to do, and whether a
    switch is costly. (Estimates of each model, from its own answers, made it worse: they vary more
    than the truth.)"""

    separate: bool = True
    """Where one model has all the work, some instances prefill, others decode (`LoneModel`)."""
    park: bool = False
    """Instances rest that are not needed for what is asked (`appliance.plugins.parking`)."""
    park_load: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of their time that the open instances are to be busy."""
    park_seconds: Seconds = 30.0
    """An instance rests when it has not been needed for so long."""

    def __post_init__(self) -> None:
        self._weights: dict[ModelName, int] = {}
        self._expectations = Expectations()
        self._loads = Loads(self._expectations, self.output_tokens)
        terms = Terms(
            self.margin, self.slack_target, self.renewal_seconds, self.pace, self.output_tokens
        )
        self._outlooks = Outlooks(terms, self._expectations)
        self._costly = CostlySwitches(self.longest_turn_seconds)
        self._homes = Homes()
        self._parking = parking.Parking(self.park_load, self.park_seconds)
        self._placements: list[Placement] = []
        self._shedding = Shedding()
        self._lone = LoneModel(self.margin, self.longest_step, float(self.output_tokens))

    def take_over(self, before: Appliance) -> None:
        """Models keep their homes when another one of this kind, with other parameters perhaps,
        decided until now: where their weights are. Else all would be planned anew, and moved."""
        self._homes.of = before._homes.of

    # --- where requests go -----------------------------------------------------------------------

    @hookimpl
    def place(self, now: float, cluster: ClusterView, costs: Costs) -> Sequence[Placement]:
        """Models whose loads take long against their TTFT target have homes; the others may run
        everywhere. What is expected of models is renewed, the oldest first; of those
        that are there no more it is forgotten. O(models + instances); each `PERIOD_SECONDS`, as
        homes are planned, O(models x homes x instances)."""
        self._weights = {model.name: model.weight_bytes for model in cluster.models}
        self._expectations.renew(now, self._weights, costs)
        there = (
            [(view.id, view.up) for view in cluster.instances],
            list(self._weights),
            [model.instances for model in cluster.models],
        )
        if self._homes.are_due(now, there):
            seekers = find_seekers(cluster.models, costs, self.home_share, self.output_tokens)
            self._placements = self._homes.placements(cluster, seekers)
        if self.separate:
            self._lone.plan(now, cluster, costs)
        self._shedding.note_rest(cluster)
        return self._placements

    @hookimpl
    def scale(self, now: float, cluster: ClusterView, costs: Costs) -> Fleet | None:
        """As few instances as will do, if it is to park any. Those with homes need all. O(1); with
        `park`, O(models + groups + batches) of all instances."""
        if not self.park:
            return None
        demands = parking.find_demands(cluster.models, costs, self.output_tokens)
        asked = parking.read(now, cluster, costs, demands)
        needed = self._parking.open_instances(now, asked, len(cluster.instances))
        if len(self._homes.of) > 1 or not parking.may_park(cluster):
            needed = len(cluster.instances)
        fleet = parking.fleet(cluster, needed)
        self._shedding.note_rest(cluster, fleet.mixed)
        return fleet

    @hookimpl
    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice | Refusal:
        """Where everything, the request included, would be done first. With others of its model
        it costs little, as steps are shared; elsewhere a switch, and a whole answer that shares
        no steps. What that costs depends on the other models: while half of the instances would do
        for all models with work, nothing. Then the KV that steps read counts instead; where models
        crowd, it would keep requests of a model from gathering. If requests are shed and its first
        token would be late there: where that comes first. Hopeless requests are refused.
        O(instances), and O(groups + batches) of two that changed (`Loads.of`); where requests are
        shed, of all that changed."""
        model = request.model
        self._lone.note(request)
        apart = self._lone.is_apart(model)
        if apart:
            view = self._lone.prefill(now, request, instances, costs)
            if view is not None:
                return PrefillChoice(instance=view.id, group=_own_group(now, request, view))
        expected = self._expectations.of(model, now, costs)
        alone = expected.of_answers(model, 1, costs, self.output_tokens)
        found = self._loads.of(now, instances, costs)
        models = max([len(load.models) for load in found])
        if models < len(instances):  # there may be as many all the same
            models = len(frozenset().union(*[load.models for load in found]))
        crowded = min(1.0, max(0.0, 2 * models / len(instances) - 1))
        alone *= crowded
        best, soonest = instances[0], math.inf
        for view, load in zip(instances, found, strict=True):
            seconds = load.seconds + (1.0 - crowded) * load.kv_seconds
            if model not in load.models:
                seconds += alone
                if model not in view.resident:
                    seconds += expected.switch_seconds
            if seconds < soonest or (seconds == soonest and view.id < best.id):
                best, soonest = view, seconds
        if self.shed is Shed.HOPELESS and not apart and self._shedding.may_refuse(request):
            estimate = self._shedding.soonest(
                now,
                request,
                OwnCosts(expected.of_prompt(request.tokens), expected.switch_seconds),
                [best, *[view for view in instances if view is not best]],
                lambda view: self._outlooks.of(now, view, costs),
                costs,
            )
            if is_hopeless(now, request, estimate.wait_seconds):
                return Refusal(reason=refusal_reason(now, request, estimate.seconds))
            best = estimate.view
        self._loads.choose(best.id)
        return PrefillChoice(instance=best.id, group=_own_group(now, request, best))

    @hookimpl
    def decode(
        self,
        request: RequestView,
        prefilled_on: InstanceId,
        instances: Sequence[InstanceView],
        costs: Costs,
    ) -> InstanceId:
        """Where its KV is, or where the least has to be read; for a model whose instances prefill
        or decode, first where those have room that decode. O(1) in the first case, else
        O(instances + their batches)."""
        if self._lone.is_apart(request.model):
            target = self._lone.decode(request, prefilled_on, instances, costs)
            if target is not None:
                return target
        if any([view.id == prefilled_on for view in instances]):
            return prefilled_on
        return min([(count_kv_tokens(view), view.id) for view in instances])[1]

    @hookimpl
    def flow(
        self,
        instance: InstanceView,
        requests: Sequence[DecodingView],
        others: Sequence[InstanceView],
        costs: Costs,
    ) -> Sequence[Migration] | None:
        """Of a model whose instances prefill or decode, to those that decode. Of a model that has
        homes, but not here any more, to a home. O(requests) where nothing goes, O(1) without homes;
        elsewhere as `LoneModel.flow` and `Homes.moves` say."""
        moves = self._lone.flow(instance, requests, others, costs)
        if moves is None and self._homes.of:
            return self._homes.moves(instance, requests, others) or None
        return moves

    @hookimpl
    def batch(
        self, now: float, model: ModelName, instance: InstanceView, costs: Costs
    ) -> BatchLimits:
        """As many as there are. A prompt in the same steps is computed in parts that keep steps in
        their TBT target, unless it is urgent, and the model does not have all the work: then there
        is no slack for steps that take longer. Prompts are computed one by one where other models
        have work, so that what comes next is decided after each. O(groups + batches), and
        changes."""
        batch = find_batch(instance, model)
        expected = self._expectations.of(model, now, costs)
        others = any([group.model != model for group in instance.groups])
        others |= any([other.model != model for other in instance.batches])
        whole = BatchLimits(requests=UNLIMITED, prompt_tokens=0 if others else PROMPT_TOKENS)
        if batch is None or expected.prompt_seconds_per_token <= 0:
            return whole
        token_seconds, kv_tokens = expected.prompt_seconds_per_token, batch.kv_tokens
        alone = self.separate and self._lone.is_alone(model)
        if alone:
            token_seconds = _token_seconds(model, instance, expected, costs)
            if not self._lone.is_apart(model):  # else few steps of those that decode have prompts
                kv_tokens = round(MIXED_FACTOR * kv_tokens)
        step = costs.step_seconds(model, batch.requests, kv_tokens)
        chunk = int((self.longest_step * self._lone.step_target(batch) - step) / token_seconds)
        work = self._outlooks.of(now, instance, costs)[model]
        if chunk < SMALLEST_CHUNK or (
            work.latest + (work.promised - work.due) <= now
            and now + work.prompt_seconds < batch.deadline
            and not alone
        ):
            return whole
        return BatchLimits(
            requests=UNLIMITED, chunk_tokens=chunk, prompt_tokens=whole.prompt_tokens
        )

    # --- who runs --------------------------------------------------------------------------------

    @hookimpl
    def admit(self, now: float, instance: InstanceView, costs: Costs) -> Admitted:
        """Prompts of the model that runs next come first, then the most urgent. Of a model that
        runs next for its short prompts, those that are late already do not come before these.
        O(groups log groups + models with work), and changes."""
        work, groups = self._next(now, instance, costs), instance.groups
        deadlines = [group.deadline for group in groups]
        first: list[int] = []
        rest: list[int] = []
        # Sorting numbers, once, takes a fraction of what sorting tuples does.
        for index in sorted(range(len(groups)), key=deadlines.__getitem__):
            (first if groups[index].model == work.model else rest).append(index)
        if not work.short:
            return first + rest
        return _late_last(now, first, deadlines) + _late_last(now, rest, deadlines)

    @hookimpl
    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        """The prompts of the model that runs next are computed before it decodes: then they decode
        with the others. O(models with work), and changes."""
        first, work = instance.groups[0], self._next(now, instance, costs)
        if first.model != work.model:
            return Phase.DECODE
        if work.short:
            seconds = self._expectations.of(work.model, now, costs).of_prompt(
                first.tokens // first.waiting
            )
            self._outlooks.precedence.use(now, instance.id, seconds)
        return Phase.PREFILL

    @hookimpl
    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        """One turn, and in which order the others are likely to follow. O(n log n) for n models
        with work, and changes."""
        runnable = {batch.model for batch in instance.batches if batch.runnable}
        works = self._outlooks.of(now, instance, costs)
        first = self._next(now, instance, costs, prompts=False)
        if first.model not in runnable:
            first = min((works[model] for model in runnable), key=_deadline)
        costly = self._costly_turn(now, instance, costs) is not None
        late = costly and self._outlooks.condition(instance.id).behind
        others = [work for work in works.values() if work is not first]
        rest = sorted(others, key=soonest if late else _latest)
        outlook = [
            PlannedTurn(model=w.model, quota_seconds=self.longest_turn_seconds, firm=False)
            for w in rest
        ]
        seconds = self._quota(now, instance, first.model, costs, now)
        if self._lone.has_arrivals(now, first.model):
            seconds = min(seconds, APART_TURN_SECONDS)
        return [PlannedTurn(model=first.model, quota_seconds=seconds), *outlook]

    @hookimpl
    def preempt(self, now: float, instance: InstanceView, costs: Costs) -> float:
        """A prompt of the model that runs joins at once, and a short one of another model begins at
        once, unless switches are costly and the instance is behind. One that came before the turn
        began is taken to wait for room, and cuts nothing. For the rest the turn is cut when that
        has to begin. O(groups + n log n) for n models with work, and changes."""
        model = instance.turn
        if model is None or any([group.model == model for group in instance.groups]):
            return 0.0
        works = self._outlooks.of(now, instance, costs)
        began, costly = instance.turn_began, self._costly_turn(now, instance, costs)
        short = any([works[g.model].short and g.arrived >= began for g in instance.groups])
        if short and (costly is None or costly.work.model != model):
            return 0.0
        seconds = self._quota(now, instance, model, costs, instance.turn_began)
        if self._lone.has_arrivals(now, model):
            left = instance.turn_began + APART_TURN_SECONDS - now
            seconds = min(seconds, max(NO_MORE_SECONDS, left))
        return seconds

    def _next(
        self, now: float, view: InstanceView, costs: Costs, prompts: bool = True
    ) -> ModelWork:
        """Where switches are costly, what `CostlySwitches` says. Else, if `prompts` can begin, a
        model with short ones. Then the urgent model with the earliest
        deadline. If none is urgent, the one that is late for longest; if none is late either, the
        model that runs, as that costs no switch, until it has its slack target; then the model
        whose deadline is next. A running model that is late itself, or would be on its way back,
        goes on: it soon will not be. If it stays late, as more is asked of it than it can do,
        others do not wait for that."""
        if (costly := self._costly_turn(now, view, costs)) is not None:
            return costly.work
        works = self._outlooks.of(now, view, costs)
        able = [work for work in works.values() if work.runs]
        if prompts and (short := [work for work in able if work.short]):
            return min(short, key=_deadline)
        urgent = [work for work in able if work.latest <= now]
        first = min(urgent or able, key=_deadline)
        if not urgent and (urgent := [work for work in able if work.overdue <= now]):
            first = min(urgent, key=_overdue)
        current = works.get(view.current_model or "")
        if current is None or not current.runs:
            return first
        if urgent:
            late = current.latest <= now or (first.latest > now and current.overdue <= now)
            if not late and self._may_leave(now, view, current, first, costs):
                return first
            return current if current.due - first.due <= self.max_lateness_seconds else first
        if current.slack_seconds(now) < current.slack_target_seconds:
            return current
        wanted = [work for work in able if work.wanted <= now and work is not current]
        return min([current, *wanted], key=_deadline)

    def _costly_turn(self, now: float, view: InstanceView, costs: Costs) -> CostlyTurn | None:
        """None if no switch is costly, or other rules decide: see `CostlySwitches.next`."""
        works = self._outlooks.of(now, view, costs)
        return self._costly.next(now, view, works, self._outlooks.condition(view.id))

    def _quota(
        self, now: float, view: InstanceView, model: ModelName, costs: Costs, began: float
    ) -> float:
        """How long the model, which runs since `began`, may go on: until it has its slack target,
        if another model waits, and until another model has to begin, after those that are more
        urgent have loaded and computed their prompts."""
        costly = self._costly_turn(now, view, costs)
        if costly is not None and costly.work.model == model:
            return costly.seconds
        works = self._outlooks.of(now, view, costs)
        seconds, before, shortest = self.longest_turn_seconds, 0.0, 0.0
        own = works.get(model)
        if own is not None and len(works) > 1 and (earns := _earns(view, model, costs)) > 0:
            earned = (own.slack_target_seconds - own.slack_seconds(now)) / earns
            others = [work.wanted for work in works.values() if work is not own and work.runs]
            seconds = min(seconds, max(earned, min(others, default=now) - now))
        waiting = [work for work in works.values() if work.runs and work.model != model]
        waiting.sort(key=_deadline)
        for work in waiting:
            left = work.latest - now - before
            seconds = left if left < seconds else seconds
            before += work.prompt_seconds + work.switch_seconds
            shortest = shortest or work.switch_seconds
        return max(0.0, began + max(self.shortest_turn_seconds, shortest) - now, seconds)

    def _may_leave(
        self, now: float, view: InstanceView, current: ModelWork, other: ModelWork, costs: Costs
    ) -> bool:
        """Whether the model that runs would be in time if it went on after the prompts of the other
        one, or that one has waited for too long. Where the device cannot hold both, its own weights
        then have to come back."""
        weights = self._weights.get(other.model, 0) + self._weights.get(current.model, 0)
        late_seconds = now - min(other.due, other.overdue)
        if (
            weights <= view.total_bytes
            or late_seconds > self.max_lateness_seconds
            or current.model not in view.resident
        ):
            return True
        back = self._expectations.of(current.model, now, costs).switch_seconds
        return current.latest - other.switch_seconds - other.prompt_seconds - back > now


def _earns(view: InstanceView, model: ModelName, costs: Costs) -> float:
    """Seconds of slack that a second of decoding earns."""
    batch = find_batch(view, model)
    if batch is None:
        return 0.0
    step = costs.step_seconds(model, batch.requests, batch.kv_tokens)
    return batch.slo.tbt_seconds / step - 1


def _own_group(now: float, request: RequestView, view: InstanceView) -> int | None:
    """The group of its model and class: interactive requests do not queue behind batch work, nor
    those that can be in time behind late ones."""
    interactive = request.request_class is RequestClass.INTERACTIVE
    for index, group in enumerate(view.groups):
        if (
            group.model == request.model
            and (group.interactive > 0) == interactive
            and group.deadline >= now
        ):
            return index
    return None


def _token_seconds(
    model: ModelName, instance: InstanceView, expected: Expected, costs: Costs
) -> float:
    """What a token takes of the model's prompts that wait, in the mean: more in long ones, as each
    reads those before it. O(groups)."""
    tokens = waiting = 0
    for group in instance.groups:
        if group.model == model:
            tokens += group.tokens
            waiting += group.waiting
    mean = tokens // max(1, waiting)
    if not mean:
        return expected.prompt_seconds_per_token
    whole = costs.prefill_seconds(model, mean) - expected.prompt_seconds
    return max(expected.prompt_seconds_per_token, whole / mean)


def _late_last(now: float, indexes: Sequence[int], deadlines: Sequence[float]) -> list[int]:
    """The same in two parts, each in its order: those that are due from now on, and the others."""
    ahead = [index for index in indexes if deadlines[index] >= now]
    return ahead + [index for index in indexes if deadlines[index] < now]


_deadline = attrgetter("due", "model")
_overdue = attrgetter("overdue", "model")
_latest = attrgetter("latest", "model")
