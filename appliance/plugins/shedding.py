"""Shedding: which requests are hopeless, as what waits before them makes them late everywhere.

The estimate is that of turns by deadline. Until a model runs, an instance does what is due before:
prompts that wait, and the steps of batches, each at the pace of its TBT target. A model whose
weights are away takes no less than they take to come. What a request costs itself decides where it
goes, never whether it is refused: an instance that has nothing to do refuses none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from appliance.scheduling.policy_api import (
    BatchView,
    ClusterView,
    Costs,
    GroupView,
    InstanceView,
    RequestView,
)
from appliance.vocabulary import InstanceClass, InstanceId, ModelName, RequestClass

TOLERANCE = 0.1
"""A request is hopeless if others keep it waiting for longer than its TTFT target by more than this
share of it."""
FRESH_SECONDS = 1.0
"""So long what an instance has to do is taken to be known, less the time that it has had for it."""


class Shed(StrEnum):
    """Which requests are refused."""

    NEVER = "never"
    HOPELESS = "hopeless"


class Work(Protocol):
    """What the policy knows of one model on an instance: when its most urgent token is due (of what
    is late and waits: when it is due again), and its weights if they are away."""

    due: float
    switch_seconds: float


class OwnCosts(NamedTuple):
    """What a request costs an instance, in seconds: its prompt, and the weights of its model where
    they are away."""

    prompt_seconds: float
    switch_seconds: float


class Prompts(NamedTuple):
    """Those of a group, and when the first of them is due."""

    due: float
    seconds: float
    interactive: bool


class Demand(NamedTuple):
    """What a model asks of an instance. From when its first token is due, a step is due in each
    `tbt_seconds`."""

    model: ModelName
    due: float
    prompts: Sequence[Prompts]
    switch_seconds: float
    step_seconds: float
    tbt_seconds: float

    def seconds(self, made: float, until: float, tbt_seconds: float) -> float:
        """What of it is due before `until`, looked at when it was `made`. Steps count at no faster
        pace than `tbt_seconds`, that of the request which is judged, and never take more than all
        of the time: or one client would have all others refused by a target that none can keep."""
        dues = [one.due for one in self.prompts]
        if min([self.due, *dues]) >= until:
            return 0.0
        asked = sum([one.seconds for one in self.prompts if one.due < until])
        share = min(1.0, self.step_seconds / max(self.tbt_seconds, tbt_seconds))
        asked += share * max(0.0, until - max(self.due, made))
        return max(asked, self.switch_seconds)


class Computing(NamedTuple):
    """A prompt that is being computed, and since when it is known to be."""

    model: ModelName | None
    tokens: int
    prefills: int
    since: float


class Queue(NamedTuple):
    """What an instance had to do when it was looked at (`made`)."""

    made: float
    membership_version: int
    demands: Sequence[Demand]
    computing: Computing
    prompt_left_seconds: float
    """What was left of the prompt that was computed then."""

    def wait_seconds(self, now: float, request: RequestView, view: InstanceView) -> float:
        """What others have computed before the request. With others of its model that wait or
        decode it has its turn when they have theirs, before batch work that waits. O(groups +
        batches)."""
        model, until = request.model, _due(now, request)
        seconds, others = self.prompt_left_seconds, []
        for demand in self.demands:
            if demand.model == model:
                seconds += sum([one.seconds for one in demand.prompts if one.interactive])
                until = min(until, demand.due)
            else:
                others.append(demand)
        if model != view.current_model:
            tbt = request.slo.tbt_seconds
            seconds += sum([one.seconds(self.made, until, tbt) for one in others])
        return max(0.0, seconds - (now - self.made))


class Estimate(NamedTuple):
    """Where a request has its first token first, and in how many seconds; and the least time that
    others keep it waiting, there or elsewhere."""

    view: InstanceView
    seconds: float
    wait_seconds: float


class Shedding:
    """Estimates of first tokens. What an instance has to do is kept for `FRESH_SECONDS`, while the
    same requests are there."""

    def __init__(self) -> None:
        self._queues: dict[InstanceId, Queue] = {}
        self._rests = False

    def note_rest(self, cluster: ClusterView, opened: int | None = None) -> None:
        """Whether any instance rests, or will as only so many are `opened`: it opens before
        a request is refused."""
        parked = any([one.instance_class is InstanceClass.PARKED for one in cluster.instances])
        self._rests = parked or (opened is not None and opened < len(cluster.instances))

    def may_refuse(self, request: RequestView) -> bool:
        """Batch work never is refused, nor what is embedded, nor what an instance took on before;
        and none is while an instance rests."""
        interactive = request.request_class is RequestClass.INTERACTIVE
        return interactive and request.max_tokens > 0 and not (request.accepted or self._rests)

    def soonest(
        self,
        now: float,
        request: RequestView,
        own: OwnCosts,
        instances: Sequence[InstanceView],
        look: Callable[[InstanceView], Mapping[ModelName, Work]],
        costs: Costs,
    ) -> Estimate:
        """The first of the instances if the request is in time there; else where its first token
        comes first. `look` says what an instance has to do. O(groups + batches) of an instance."""
        best = Estimate(instances[0], math.inf, math.inf)
        for view in instances:
            known = self._queues.get(view.id)
            if (
                known is None
                or known.membership_version != view.membership_version
                or now > known.made + FRESH_SECONDS
            ):
                known = self._queues[view.id] = _queue(now, view, look(view), costs, known)
            wait = known.wait_seconds(now, request, view)
            seconds = wait + own.prompt_seconds
            if request.model not in view.resident:
                seconds += own.switch_seconds
            least = min(wait, best.wait_seconds)
            if seconds < best.seconds:
                best = Estimate(view, seconds, least)
            else:
                best = best._replace(wait_seconds=least)
            if view is instances[0] and now + seconds <= _due(now, request):
                break
        return best


def is_hopeless(now: float, request: RequestView, wait_seconds: float) -> bool:
    """Whether others keep it waiting past its TTFT target by more than the tolerance."""
    return now + wait_seconds > _due(now, request) + TOLERANCE * request.slo.ttft_seconds


def refusal_reason(now: float, request: RequestView, seconds: float) -> str:
    """The message that is sent to the client."""
    return (
        f"{request.model} is overloaded: the first token would come after about"
        f" {now + seconds - request.arrived:.1f} s, the target is {request.slo.ttft_seconds:g} s;"
        " try again later"
    )


def _due(now: float, request: RequestView) -> float:
    """When its first token is due. A request that is late when it is placed has waited for an
    instance, not for other requests: it counts as if it came now."""
    return request.deadline if request.deadline > now else now + request.slo.ttft_seconds


def _queue(
    now: float,
    view: InstanceView,
    works: Mapping[ModelName, Work],
    costs: Costs,
    known: Queue | None,
) -> Queue:
    batches = {batch.model: batch for batch in view.batches}
    groups: dict[ModelName, list[GroupView]] = {}
    for group in view.groups:
        groups.setdefault(group.model, []).append(group)
    demands = [
        _demand(batches.get(model), groups.get(model, []), work, costs)
        for model, work in works.items()
    ]
    model, tokens = view.current_model, view.computing_tokens
    computing = Computing(model, tokens, view.prefills_since_turn, now)
    if known is not None and known.computing[:3] == computing[:3]:
        computing = known.computing
    left = 0.0
    if tokens and model is not None:
        left = max(0.0, costs.prefill_seconds(model, tokens) - (now - computing.since))
    return Queue(now, view.membership_version, demands, computing, left)


def _demand(
    batch: BatchView | None, groups: Sequence[GroupView], work: Work, costs: Costs
) -> Demand:
    """Of a model with work. Batch work that waits makes no steps due before interactive requests
    do; the steps of what decodes and waits together count from the first of them."""
    urgent = [group for group in groups if group.interactive > 0]
    if batch is None:
        urgent = urgent or list(groups)
    dues = [max(group.deadline, work.due) for group in urgent]
    paces = [group.slo.tbt_seconds for group in urgent]
    requests, kv_tokens = sum([group.waiting for group in urgent]), 0
    if batch is not None:
        # Work that keeps a longest gap is due sooner than scheduled, but asks for no more.
        dues.append(max(batch.scheduled[0] if batch.scheduled else batch.deadline, work.due))
        paces.append(batch.slo.tbt_seconds)
        requests, kv_tokens = requests + batch.requests, batch.kv_tokens
    model = batch.model if batch is not None else urgent[0].model
    return Demand(
        model,
        min(dues),
        [_prompts(group, work, costs) for group in groups],
        work.switch_seconds,
        costs.step_seconds(model, requests, kv_tokens),
        min(paces),
    )


def _prompts(group: GroupView, work: Work, costs: Costs) -> Prompts:
    seconds = group.waiting * costs.prefill_seconds(group.model, group.tokens // group.waiting)
    return Prompts(max(group.deadline, work.due), seconds, group.interactive > 0)
