"""What is made ready for later: weights loaded during a job, because a turn or an operator wants
them next or a policy wants them ahead, or taken away; engines built."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Final

from appliance.scheduling.cluster import Cluster
from appliance.scheduling.lifecycle import EngineStage
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import BuildJob, InstanceState, SchedulingContext
from appliance.vocabulary import BuildModel, EvictModel, ModelName

AHEAD_FREE_SHARE: Final = 0.2
"""Of a device's memory stays free where weights are loaded ahead: KV is not to wait for room."""


class Prefetcher:
    """One prefetch at a time on each instance. A call costs O(models on the device + models that
    run there next, or are loaded ahead)."""

    def __init__(
        self,
        context: SchedulingContext,
        cluster: Cluster,
        residency: Residency,
        failed: Collection[ModelName],
    ) -> None:
        """Models in `failed` are not built."""
        self.preloads: dict[ModelName, None] = {}
        """Models that an operator wants on a device, and that have not come yet."""
        self.unloaded: set[ModelName] = set()
        """Models that an operator took off the devices: not loaded ahead until they run again."""
        self._context = context
        self._cluster = cluster
        self._residency = residency
        self._failed = failed

    def prefetch(self, instance: InstanceState, model: ModelName) -> None:
        """Stop a prefetch of what is not wanted any more; order one of what is wanted next."""
        context, upcoming = self._context, instance.upcoming()
        self.unloaded.discard(model)
        kept = {model, *upcoming, *self.preloads}
        if not _waits_for_link(instance, model, upcoming):
            kept.update(instance.placement.ahead)
        for name in sorted(instance.ledger.loading - kept):
            context.out.append(self._residency.evict(instance, name))
            instance.view = None
        gone = self._gone()
        wanted = [
            name
            for name in upcoming
            if name != model
            and name not in gone
            and instance.engines[name].stage is EngineStage.COLD
        ]
        if wanted and not instance.ledger.loading - {model}:
            view = self._cluster.view(instance)
            target = context.policy.prefetch(context.now, view, wanted, context.costs)
            if target is not None:
                context.out += self._residency.prefetch(instance, model, target)
                instance.view = None
        self.preload(instance, model)

    def preload(self, instance: InstanceState, running: ModelName | None) -> None:
        """Load a model that an operator wants, or else one that is to be there ahead, during
        whatever runs: one at a time."""
        if (
            (self.preloads or instance.placement.ahead)
            and not instance.ledger.loading - {running}
            and not self._load_wanted(instance, running)
        ):
            self._load_ahead(instance, running)

    def _load_wanted(self, instance: InstanceState, running: ModelName | None) -> bool:
        """Load a model that an operator wants, where there is room, and on one instance; whether
        one is loaded now."""
        gone = self._gone()
        for model in self.preloads:
            engine = instance.engines.get(model)  # none where the model cannot be
            stored = engine is not None and engine.stage is EngineStage.COLD
            if stored and model not in gone and instance.may_serve(model) and not self._here(model):
                commands = self._residency.prefetch(instance, running, model)
                self._context.out += commands
                if commands:
                    # As if it had run: what was wanted just now is not the first to make room.
                    instance.engines[model].used = self._context.now
                    instance.view = None
                    return True
        return False

    def _load_ahead(self, instance: InstanceState, running: ModelName | None) -> None:
        """Load the first model that the policy wants here ahead, where memory is free anyway."""
        ledger, gone = instance.ledger, self._gone()
        room = ledger.free_slabs - AHEAD_FREE_SHARE * ledger.total_slabs
        for model in instance.placement.ahead:
            engine = instance.engines.get(model)  # none where the model cannot be
            if (
                engine is not None
                and engine.stage is EngineStage.COLD
                and engine.weight_slabs <= room
                and instance.may_serve(model)
                and model not in gone
                and model not in self.unloaded
            ):
                self._context.out += self._residency.prefetch(instance, running, model)
                instance.view = None
                return

    def _gone(self) -> set[ModelName]:
        """Models that go with this job: their loads may be about to be reported, and would be
        taken for new ones."""
        return {c.model for c in self._context.out if isinstance(c, EvictModel)}

    def _here(self, model: ModelName) -> bool:
        """Whether the model is on some device, or on its way to one."""
        instances = self._cluster.instances.values()
        return any([model in instance.ledger.weights for instance in instances])

    def evict_as_requested(self, instance: InstanceState) -> None:
        """Give back what models hold here whose eviction was requested. One that still loads is
        evicted when it is there: its load may be reported soon, and would pass for a later one."""
        for model in [m for m in instance.evict_requested if m not in instance.ledger.loading]:
            del instance.evict_requested[model]
            self._context.out += self._residency.dismiss(instance, model)
            instance.view = None

    def build_next(self, instance: InstanceState) -> None:
        """Build the engine expected to be needed first: of a waiting model, of one that an operator
        wants, else in the order of the catalogue."""
        if not instance.unbuilt:
            return
        # Of a thousand models mostly the first is taken, so no list of all is made.
        others = filter(instance.may_serve, chain(self.preloads, instance.unbuilt))
        for model in chain(instance.upcoming(), others):
            if model in instance.unbuilt and model not in self._failed:
                self.build(instance, model)
                return

    def build(self, instance: InstanceState, model: ModelName) -> None:
        instance.engines[model].to_stage(EngineStage.BUILDING, model)
        del instance.unbuilt[model]
        instance.job = BuildJob(model)
        self._context.out.append(BuildModel(instance=instance.id, model=model))


def _waits_for_link(
    instance: InstanceState, model: ModelName, upcoming: Collection[ModelName]
) -> bool:
    """Whether weights of the model that runs, or of one that runs next, are not there yet."""
    waited_for = [name for name in upcoming if instance.engines[name].stage is EngineStage.COLD]
    return model in instance.ledger.loading or bool(waited_for)
