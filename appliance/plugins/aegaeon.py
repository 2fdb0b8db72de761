"""Aegaeon (SOSP'25): grouped prefill, weighted round-robin decoding with quotas, prefetch.

Alg. 1 (§4.2) dispatches prompts into groups of one model; Alg. 2 and Eq. 2-3 (§4.3) give each model
of a round a quota so that all keep the same share of their token deadlines. Printed slips are
corrected: c counts the switches of the round's models, a lone model needs none and runs on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    BatchView,
    ClusterView,
    Costs,
    Fleet,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role

Positive: TypeAlias = Annotated[float, Meta(gt=0, le=86400)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]

UNLIMITED = 1 << 20
"""More requests than any batch has."""

GROWTH_TOKENS = 64
"""Room that each request of a batch is given to grow; the paper says nothing, its code this."""


def quotas(
    deadline_seconds: Sequence[float],
    step_seconds: Sequence[float],
    switch_seconds: float,
    q_max_seconds: float,
    alpha_floor: float,
) -> list[float]:
    """Quotas q_i = c / (n_i (alpha - S)) of a round (Eq. 2-3), in seconds of decoding.

    n_i = d_i / t_i, S = sum of 1/n_i, c = all switches of the round,
    alpha = max(c / (min n * Q_MAX) + S, floor). Without a switch every quota is Q_MAX. Computed
    with alpha - S at once, which is exact for a small c where alpha and S nearly cancel.
    """
    if switch_seconds <= 0:
        return [q_max_seconds] * len(step_seconds)
    ratios = [d / t for d, t in zip(deadline_seconds, step_seconds, strict=True)]
    share = sum(1 / n for n in ratios)
    gap = max(switch_seconds / (min(ratios) * q_max_seconds), alpha_floor - share)
    return [switch_seconds / (n * gap) for n in ratios]


class Aegaeon(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters as in the paper's evaluation (§7.2)."""

    max_group: Count = 8
    """MAX_GPSIZE: requests of one model prefilled back to back."""
    q_max_seconds: Positive = 4.0
    """Q_MAX: the longest turn."""
    alpha_floor: Positive = 0.5
    """Smallest alpha of Eq. 3; caps how far ahead of its deadlines a model may run."""
    prefill_share: Annotated[float, Meta(gt=0, lt=1)] = 0.375
    """Share of the instances that prefill (6 of 16)."""
    interleave_seconds: Positive = 0.25
    """On an instance that also prefills: the longest turn while prompts wait. (The paper has no
    such instances.)"""

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """The prefill partition and the decoding one (§4.1)."""
        return partitions(len(cluster.instances), self.prefill_share)

    @hookimpl
    def scale(self, cluster: ClusterView) -> Fleet:
        """All instances, for everybody."""
        return Fleet(interactive=0, mixed=len(cluster.instances), batch=0)

    @hookimpl
    def prefill(
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice:
        """Alg. 1: the first open group of the model, else a new one where least time waits."""
        for view in instances:
            for index, group in enumerate(view.groups):
                if group.model == request.model and group.admitted < self.max_group:
                    return PrefillChoice(instance=view.id, group=index)
        best = min(instances, key=lambda view: (queued_seconds(view, costs), view.load, view.id))
        return PrefillChoice(instance=best.id)

    @hookimpl
    def decode(self, request: RequestView, instances: Sequence[InstanceView]) -> InstanceId:
        """Alg. 2: the first batch of the model that has room for its KV; else a new batch where the
        fewest are, or in a full one where there is nothing else."""
        full = set()
        for view in instances:
            for batch in view.batches:
                if batch.model == request.model:
                    if has_room(request, batch, view):
                        return view.id
                    full.add(view.id)
        best = min(instances, key=lambda view: (view.id in full, len(view.batches), view.id))
        return best.id

    @hookimpl
    def admit(self, instance: InstanceView) -> Admitted:
        """First come, first served; groups of batch work only come last."""
        groups = instance.groups
        return sorted(range(len(groups)), key=lambda number: not groups[number].interactive)

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        """On a mixed instance: prompts come between turns, one group's worth at most before the
        next turn."""
        owed = instance.prefills_since_turn >= self.max_group
        return Phase.DECODE if owed else Phase.PREFILL

    @hookimpl
    def preempt(self, instance: InstanceView) -> float:
        """A prompt joins the model that runs at once; those of others wait."""
        groups = instance.groups
        return 0.0 if groups and groups[0].model == instance.turn else math.inf

    @hookimpl
    def round(self, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        """Alg. 2: one turn for each model, with the quotas of Eq. 2-3; shorter while prompts wait
        here, and a single step for the model that the next prompt is for, which costs no switch."""
        batches = [batch for batch in instance.batches if batch.runnable]
        switches = [costs.switch_seconds(batch.model) for batch in batches]
        steps = [
            costs.step_seconds(batch.model, batch.requests, batch.kv_tokens) for batch in batches
        ]
        lengths = quotas(
            [batch.slo.tbt_seconds for batch in batches],
            steps,
            sum(switches) if len(batches) > 1 else 0.0,
            self.q_max_seconds,
            self.alpha_floor,
        )
        return [
            PlannedTurn(
                model=batch.model, quota_seconds=min(length, self._longest(instance, batch, step))
            )
            for batch, length, step in zip(batches, lengths, steps, strict=True)
        ]

    def _longest(self, instance: InstanceView, batch: BatchView, step_seconds: float) -> float:
        if not instance.groups:
            return self.q_max_seconds
        if instance.groups[0].model != batch.model:
            return self.interleave_seconds
        return self.q_max_seconds if instance.kv_short else step_seconds

    @hookimpl
    def batch(self) -> BatchLimits:
        """As many as the model allows; prompts whole."""
        return BatchLimits(requests=UNLIMITED)

    @hookimpl
    def flow(self) -> Sequence[Migration]:
        """None: requests stay where they decode."""
        return []

    @hookimpl
    def evict(self, victims: Sequence[ModelName]) -> Sequence[ModelName]:
        """Idle models first, then the one that runs again last."""
        return victims

    @hookimpl
    def prefetch(self, upcoming: Sequence[ModelName]) -> Sequence[ModelName]:
        """The very next model (§5.3)."""
        return upcoming[:1]


def partitions(instances: int, prefill_share: float) -> list[Placement]:
    """The first instances prefill, the others decode, at least one each; a lone one does both."""
    if instances == 1:
        return [Placement(role=Role.MIXED)]
    prefill = min(instances - 1, max(1, round(instances * prefill_share)))
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * (instances - prefill)
    return [Placement(role=role) for role in roles]


def has_room(request: RequestView, batch: BatchView, view: InstanceView) -> bool:
    """Whether the KV of the batch with the request fits the instance next to the weights, with
    nothing else there."""
    tokens = batch.kv_tokens + request.tokens + (batch.requests + 1) * GROWTH_TOKENS
    return request.weight_bytes + tokens * request.kv_bytes_per_token <= view.total_bytes


def queued_seconds(view: InstanceView, costs: Costs) -> float:
    """Time that the queued prompts of an instance take, with a switch at each change of model
    (§4.2)."""
    seconds, model = 0.0, view.current_model
    for group in view.groups:
        if group.model != model and group.model not in view.resident:
            seconds += costs.switch_seconds(group.model)
        model = group.model
        mean = group.tokens // group.waiting
        seconds += group.waiting * costs.prefill_seconds(group.model, mean)
    return seconds
