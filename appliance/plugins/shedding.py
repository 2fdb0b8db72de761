"""Shedding: which requests are hopeless, as their first token would be late on every instance.

The estimate is that of turns by deadline. Until a model runs, an instance does what is due before:
prompts that wait, and the steps of batches, each at the pace of its TBT target. A model whose
weights are away takes no less than they take to come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from appliance.scheduling.policy_api import Costs, InstanceView, RequestView
from appliance.vocabulary import InstanceId, ModelName, RequestClass, Slo

TOLERANCE = 0.1
"""A request is hopeless if its first token would come later than its TTFT target by more than this
share of it."""
FRESH_SECONDS = 1.0
"""So long what an instance has to do is taken to be known, less the time that it has had for it."""


class Shed(StrEnum):
    """Which requests are refused."""

    NEVER = "never"
    HOPELESS = "hopeless"


class Work(Protocol):
    """What the policy knows of one model on an instance: when its most urgent token is due, what
    the prompts that wait take, and its weights if they are away."""

    due: float
    prompt_seconds: float
    switch_seconds: float


class OwnCosts(NamedTuple):
    """What a request costs an instance, in seconds: its prompt, and the weights of its model where
    they are away."""

    prompt_seconds: float
    switch_seconds: float


class Demand(NamedTuple):
    """What a model asks of an instance. The steps of its batch take `share` of the time from when
    its first token is due."""

    model: ModelName
    due: float
    prompt_seconds: float
    switch_seconds: float
    share: float

    def seconds(self, until: float) -> float:
        """What of it is due before `until`."""
        if self.due >= until:
            return 0.0
        asked = self.prompt_seconds + self.share * (until - self.due)
        return max(asked, self.switch_seconds)


class Queue(NamedTuple):
    """What an instance had to do when it was looked at (`made`)."""

    made: float
    membership_version: int
    demands: Sequence[Demand]

    def wait_seconds(
        self, now: float, request: RequestView, view: InstanceView, own: OwnCosts
    ) -> float:
        """Until the first token of the request. With others of its model that wait or decode it
        has its turn when they have theirs. O(models with work)."""
        model, until = request.model, request.deadline
        mine = 0.0 if model in view.resident else own.switch_seconds
        mine += own.prompt_seconds
        for demand in self.demands:
            if demand.model == model:
                mine += demand.prompt_seconds
                until = min(until, demand.due)
        if model == view.current_model:
            return mine
        before = [one.seconds(until) for one in self.demands if one.model != model]
        return max(0.0, sum(before) - (now - self.made)) + mine


class Estimate(NamedTuple):
    """Where a request has its first token first, and in how many seconds."""

    view: InstanceView
    seconds: float


class Shedding:
    """Estimates of first tokens. What an instance has to do is kept for `FRESH_SECONDS`, while the
    same requests are there."""

    def __init__(self) -> None:
        self._queues: dict[InstanceId, Queue] = {}

    def soonest(
        self,
        now: float,
        request: RequestView,
        own: OwnCosts,
        instances: Sequence[InstanceView],
        look: Callable[[InstanceView], Mapping[ModelName, Work]],
        costs: Costs,
    ) -> Estimate:
        """The first of the instances if the request can be in time there; else where its first
        token comes first. `look` says what an instance has to do. O(models with work) for an
        instance that is known, O(groups + batches) for another."""
        best = Estimate(instances[0], math.inf)
        for view in instances:
            queue = self._queues.get(view.id)
            if (
                queue is None
                or queue.membership_version != view.membership_version
                or now > queue.made + FRESH_SECONDS
            ):
                queue = self._queues[view.id] = _queue(now, view, look(view), costs)
            seconds = queue.wait_seconds(now, request, view, own)
            if seconds < best.seconds:
                best = Estimate(view, seconds)
            if view is instances[0] and not is_hopeless(now, request, seconds):
                break
        return best


def may_be_shed(request: RequestView) -> bool:
    """Batch work never is, nor what an instance took on before."""
    return request.request_class is RequestClass.INTERACTIVE and not request.accepted


def is_hopeless(now: float, request: RequestView, seconds: float) -> bool:
    """Whether a first token so many seconds from now is late by more than the tolerance."""
    return now + seconds > request.deadline + TOLERANCE * request.slo.ttft_seconds


def refusal_reason(now: float, request: RequestView, seconds: float) -> str:
    """The message that is sent to the client."""
    return (
        f"{request.model} is overloaded: the first token would come after about"
        f" {now + seconds - request.arrived:.1f} s, the target is {request.slo.ttft_seconds:g} s;"
        " try again later"
    )


def _queue(now: float, view: InstanceView, works: Mapping[ModelName, Work], costs: Costs) -> Queue:
    requests: dict[ModelName, int] = {}
    kv_tokens: dict[ModelName, int] = {}
    slos: dict[ModelName, Slo] = {}
    for group in view.groups:
        requests[group.model] = requests.get(group.model, 0) + group.waiting
        slos[group.model] = group.slo
    for batch in view.batches:
        requests[batch.model] = requests.get(batch.model, 0) + batch.requests
        kv_tokens[batch.model] = batch.kv_tokens
        slos[batch.model] = batch.slo
    demands = []
    for model, work in works.items():
        step = costs.step_seconds(model, requests[model], kv_tokens.get(model, 0))
        share = step / slos[model].tbt_seconds
        demands.append(Demand(model, work.due, work.prompt_seconds, work.switch_seconds, share))
    return Queue(now, view.membership_version, demands)
