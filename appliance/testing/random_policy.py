"""A policy that throws dice: it answers some questions with anything that is allowed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

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
    RequestView,
)
from appliance.vocabulary import InstanceId, ModelName, Role

PLAN_SHARE = 0.2
"""Places and classes stay for a while; a cluster that changes every second serves no request."""
SHARE = 0.5
"""Of the other questions that it answers."""
HELD_SHARE, MOST_HELD_SECONDS = 0.2, 10.0
"""So many requests are held, until they came so long ago."""

T = TypeVar("T")


class RandomPolicy:
    """Every hook. The same seed and questions make the same answers, in every process."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._placements: list[Placement] | None = None
        self._fleet: Fleet | None = None

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement] | None:
        """All of them on the first instance, some on the others."""
        if self._dice.random() < PLAN_SHARE:
            names = [model.name for model in cluster.models]
            self._placements = [
                Placement(
                    role=self._dice.choice(list(Role)),
                    models=frozenset(self._some(names)) if view.id else None,
                    ahead=tuple(self._some(names)),
                )
                for view in cluster.instances
            ]
        return self._placements

    @hookimpl
    def scale(self, cluster: ClusterView) -> Fleet | None:
        if self._dice.random() < PLAN_SHARE:
            count = len(cluster.instances)
            mixed = self._dice.randint(1, count)
            batch = self._dice.randint(0, count - mixed)
            interactive = self._dice.randint(0, count - mixed - batch)
            self._fleet = Fleet(interactive=interactive, mixed=mixed, batch=batch)
        return self._fleet

    @hookimpl
    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView]
    ) -> PrefillChoice | Hold | None:
        if self._passes():
            return None
        fresh = not request.accepted and now < request.arrived + MOST_HELD_SECONDS
        if fresh and self._dice.random() < HELD_SHARE:
            return Hold(until=now + self._dice.choice([0.01, 0.5, 20.0]), reason="dice")
        view = self._dice.choice(instances)
        groups = [n for n, group in enumerate(view.groups) if group.model == request.model]
        return PrefillChoice(instance=view.id, group=self._dice.choice([*groups, None]))

    @hookimpl
    def decode(self, instances: Sequence[InstanceView]) -> InstanceId | None:
        return None if self._passes() else self._dice.choice(instances).id

    @hookimpl
    def admit(self, instance: InstanceView) -> Admitted | None:
        return None if self._passes() else self._some(range(len(instance.groups)))

    @hookimpl
    def phase(self) -> Phase | None:
        return None if self._passes() else self._dice.choice(list(Phase))

    @hookimpl
    def round(self, instance: InstanceView) -> Sequence[PlannedTurn] | None:
        models = [batch.model for batch in instance.batches if batch.runnable]
        if self._passes():
            return None
        chosen = self._some(models) or models[:1]
        return [PlannedTurn(model=m, quota_seconds=self._dice.choice([0.1, 2.0])) for m in chosen]

    @hookimpl
    def preempt(self) -> float | None:
        return None if self._passes() else self._dice.choice([0.0, 0.2, math.inf])

    @hookimpl
    def batch(self) -> BatchLimits | None:
        if self._passes():
            return None
        return BatchLimits(
            requests=self._dice.randint(1, 16),
            chunk_tokens=self._dice.choice([0, 128]),
            prompt_tokens=self._dice.choice([0, 2048]),
        )

    @hookimpl
    def flow(
        self, requests: Sequence[DecodingView], others: Sequence[InstanceView]
    ) -> Sequence[Migration] | None:
        if self._dice.random() < 0.9:
            return None
        request = self._dice.choice(requests)
        on = request.instances
        able = [view for view in others if on is None or view.id in on]
        return [Migration(request=request.id, target=self._dice.choice(able).id)] if able else []

    @hookimpl
    def evict(self, victims: Sequence[ModelName]) -> Sequence[ModelName] | None:
        return None if self._passes() else self._some(victims)

    @hookimpl
    def prefetch(self, upcoming: Sequence[ModelName]) -> Sequence[ModelName] | None:
        return None if self._passes() else self._some(upcoming)[:1]

    def _passes(self) -> bool:
        return self._dice.random() >= SHARE

    def _some(self, things: Iterable[T]) -> list[T]:
        offered = list(things)
        return self._dice.sample(offered, self._dice.randint(0, len(offered)))
