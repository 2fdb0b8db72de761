"""A fixed partition: every model has one instance, for ever. Request-level within an instance.

What a box does without any scheduler of models, and the baseline S-Partition of Prism (§7.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.serverlessllm import ServerlessLlm
from appliance.scheduling.policy_api import ClusterView, ModelView, Placement
from appliance.vocabulary import ModelName, Role, Word

Share = Annotated[float, Meta(ge=0, lt=1)]


class Partition(Word, frozen=True):
    """Which models each instance has, and those among them that do not fit with the others."""

    models: tuple[frozenset[ModelName], ...]
    unfit: frozenset[ModelName]

    def covers(self, names: frozenset[ModelName], instances: int) -> bool:
        """Whether it is of these models on as many instances."""
        return len(self.models) == instances and frozenset().union(*self.models) == names

    def placements(self) -> list[Placement]:
        return [Placement(role=Role.MIXED, models=models) for models in self.models]


class Fixed:
    """A partition that is made once, and again only for other models or instances."""

    def __init__(self, kv_share: float, rates: Mapping[ModelName, float]) -> None:
        self._kv_share = kv_share
        self._rates = rates
        self._known: Partition | None = None

    @property
    def unfit(self) -> frozenset[ModelName]:
        """Models that fit nowhere, as far as it is known."""
        return frozenset() if self._known is None else self._known.unfit

    def of(self, cluster: ClusterView) -> Partition:
        """The partition; kept from when every instance is up, as before that the memory of some
        is unknown."""
        known, names = self._known, frozenset([model.name for model in cluster.models])
        if known is not None and known.covers(names, len(cluster.instances)):
            return known
        capacities = [view.total_bytes for view in cluster.instances]
        made = partition(cluster.models, capacities, self._kv_share, self._rates)
        self._known = made if all([view.up for view in cluster.instances]) else None
        return made


class Static(ServerlessLlm, dict=True):
    """What can be set."""

    kv_share: Share = 0.15
    """The part of an instance's memory that each of its models has to find for KV, or it is not
    counted as fitting."""
    rates: Mapping[ModelName, Annotated[float, Meta(ge=0)]] = {}
    """Requests per second that each model is expected to get; 1 if it is not named."""

    def __post_init__(self) -> None:
        self._fixed = Fixed(self.kv_share, self.rates)

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """The partition, fixed once every instance was there."""
        return self._fixed.of(cluster).placements()


def partition(
    models: Sequence[ModelView],
    capacity_bytes: Sequence[int],
    kv_share: float,
    rates: Mapping[ModelName, float],
) -> Partition:
    """Greedy: first the models that the fewest instances can serve, of these the busiest first (the
    largest of equals), each where the least rate is among the instances that can serve it and that
    it fits; what fits nowhere is dealt out in turn.

    A model fits if its weights and `kv_share` of the instance's memory are left. With this a GPU of
    80 GB takes two models of 14B in FP16, as MuxServe's optimizer does (Aegaeon §7.2).
    O(models * instances).
    """
    placed: list[set[ModelName]] = [set() for _ in capacity_bytes]
    used = [0.0] * len(capacity_bytes)
    rate = [0.0] * len(capacity_bytes)
    unfit: list[ModelView] = []

    def rank(model: ModelView) -> tuple[int, float, int, str]:
        able = sum([model.fits(number) for number in range(len(capacity_bytes))])
        return able, -rates.get(model.name, 1.0), -model.weight_bytes, model.name

    for model in sorted(models, key=rank):
        weights = model.weight_bytes / model.parts
        fitting = [
            number
            for number, capacity in enumerate(capacity_bytes)
            if model.fits(number) and used[number] + weights + kv_share * capacity <= capacity
        ]
        if not fitting:
            unfit.append(model)
            continue
        best = min(fitting, key=lambda number: (rate[number], used[number], number))
        placed[best].add(model.name)
        used[best] += weights + kv_share * capacity_bytes[best]
        rate[best] += rates.get(model.name, 1.0)
    for number, model in enumerate(unfit):
        able = [models for instance, models in enumerate(placed) if model.fits(instance)]
        able[number % len(able)].add(model.name)
    names = frozenset([model.name for model in unfit])
    return Partition(models=tuple([frozenset(p) for p in placed]), unfit=names)
