"""A policy that answers anything that is allowed, at random, so that nothing else is relied on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    ClusterView,
    DecodingView,
    Fleet,
    Hold,
    InstanceView,
    Migration,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role


class Whimsical:
    """Every hook, by the throw of seeded dice."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        names = [model.name for model in cluster.models]
        placements = []
        for view in cluster.instances:
            some = frozenset(self._some(names)) if view.id else None
            role, ahead = self._dice.choice(list(Role)), tuple(self._some(names))
            placements.append(Placement(role=role, models=some, ahead=ahead))
        return placements

    @hookimpl
    def scale(self, cluster: ClusterView) -> Fleet:
        count = len(cluster.instances)
        mixed = self._dice.randint(1, count)
        batch = self._dice.randint(0, count - mixed)
        return Fleet(
            interactive=self._dice.randint(0, count - mixed - batch), mixed=mixed, batch=batch
        )

    @hookimpl
    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice | Refusal | Hold:
        if self._dice.random() < 0.02:
            return Refusal(reason="a whim")
        if self._dice.random() < 0.1:
            return Hold(until=now + self._dice.choice([1e-3, 0.5, 5.0]), reason="another one")
        view = self._dice.choice(instances)
        groups = [n for n, group in enumerate(view.groups) if group.model == request.model]
        group = self._dice.choice([*groups, None])
        return PrefillChoice(instance=view.id, group=group)

    @hookimpl
    def decode(self, instances: Sequence[InstanceView]) -> InstanceId:
        return self._dice.choice(instances).id

    @hookimpl
    def admit(self, instance: InstanceView) -> Admitted:
        return self._some(range(len(instance.groups)))

    @hookimpl
    def phase(self) -> Phase:
        return self._dice.choice(list(Phase))

    @hookimpl
    def preempt(self) -> float:
        return self._dice.choice([0.0, 0.003, math.inf])

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn]:
        models = [batch.model for batch in instance.batches if batch.runnable]
        chosen = self._some(models) or models[:1]
        return [PlannedTurn(model=m, quota_seconds=self._dice.choice([0.01, 2.0])) for m in chosen]

    @hookimpl
    def batch(self) -> BatchLimits:
        chunk = self._dice.choice([0, 16])
        prompts = self._dice.choice([0, 100])
        return BatchLimits(
            requests=self._dice.randint(1, 8), chunk_tokens=chunk, prompt_tokens=prompts
        )

    @hookimpl
    def flow(
        self, requests: Sequence[DecodingView], others: Sequence[InstanceView]
    ) -> Sequence[Migration]:
        if self._dice.random() < 0.7:
            return []
        targets = [view.id for view in others]
        return [
            Migration(request=request.id, target=self._dice.choice(targets))
            for request in self._some(requests)
        ]

    @hookimpl
    def evict(self, victims: Sequence[ModelName]) -> Sequence[ModelName]:
        return self._some(victims)

    @hookimpl
    def prefetch(self, upcoming: Sequence[ModelName]) -> Sequence[ModelName]:
        return self._some(upcoming)[:1]

    def _some(self, things: Sequence) -> list:  # type: ignore[type-arg]
        return self._dice.sample(list(things), self._dice.randint(0, len(things)))
