"""Models come and go: engines are built, weights stored and loaded, models added and removed."""

from __future__ import annotations

from typing import Final

import msgspec

from appliance.scheduling.cluster import Cluster
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.demand import Demands
from appliance.scheduling.dispatcher import Dispatcher
from appliance.scheduling.lifecycle import EngineStage
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency, store
from appliance.scheduling.state import BuildJob, InstanceState, SchedulingContext
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import (
    Command,
    DropModel,
    ImageHeld,
    InstanceId,
    KvShape,
    ModelAdded,
    ModelBuilt,
    ModelChanged,
    ModelDropped,
    ModelEvictRequested,
    ModelFailed,
    ModelLoaded,
    ModelLoadRequested,
    ModelName,
    ModelRemoved,
    ModelSpec,
    WeightsStored,
)

MAX_BUILD_LOSSES: Final = 5
"""A model whose building cost a worker its life this often in a row is not built again."""

MAX_MODEL_LOSSES: Final = 10
"""A model is given up when so many workers in a row died computing its requests, and none of these
got a token in between."""


class ModelLifecycle:
    """What events of models do to the books. Each handler returns whether a free instance may have
    something to do then."""

    def __init__(
        self,
        context: SchedulingContext,
        models: dict[ModelName, ModelSpec],
        failed: dict[ModelName, str],
        requests: RequestBook,
        cluster: Cluster,
        residency: Residency,
        dispatcher: Dispatcher,
        weight_cache: HostWeightCache,
        costs: CostModel,
        demands: Demands,
    ) -> None:
        """`models` and `failed` are changed here."""
        self.removing: dict[ModelName, set[InstanceId] | None] = {}
        """Models that were removed and are not forgotten yet, with the instances that have not
        dropped them; None while an instance holds something for them."""
        self._context = context
        self._models = models
        self._failed = failed
        self._requests = requests
        self._cluster = cluster
        self._residency = residency
        self._dispatcher = dispatcher
        self._prefetcher = dispatcher.prefetcher
        self._weight_cache = weight_cache
        self._costs = costs
        self._demands = demands
        self._layouts: dict[ModelName, str] = {}
        """How the weights lie in their master images."""
        self._build_losses: dict[ModelName, int] = {}
        self._run_losses: dict[ModelName, int] = {}

    # --- engines and weights ---------------------------------------------------------------------

    def built(self, event: ModelBuilt) -> bool:
        """An engine is there: its weights are stored next, if it can ever serve a request."""
        instance = self._cluster.instances[event.instance]
        engine = instance.engines[event.model]
        engine.weight_slabs, engine.kv = event.weight_slabs, event.kv
        engine.host_slabs = event.host_slabs
        self._cluster.model_changed(event.model)
        reason = self._failed.get(event.model) or self._why_never(
            event.model, instance, event.kv, event.layout
        )
        if reason is not None:
            self._close_build(instance, event.model, EngineStage.FAILED)
            self.fail(event.model, reason, instance.id)
            return True
        self._context.out.append(self._first_store(instance, event.model, event.host_slabs))
        return False

    def _first_store(self, instance: InstanceState, model: ModelName, slabs: int) -> Command:
        """A new engine adopts the master image, or fills it if it is the first and there is room.
        No engine waits for an image that another instance fills: it reads files until then."""
        master = self._weight_cache.get(model)
        if master is None:
            master = self._weight_cache.take(model, slabs, instance.id, self._context.now)
        if master is None or master.filler not in (None, instance.id):
            return store(instance, model, (), 0)
        fill = master.filler == instance.id
        return store(instance, model, master.offsets, master.version, fill=fill)

    def _why_never(
        self, model: ModelName, instance: InstanceState, kv: KvShape, layout: str
    ) -> str | None:
        """Why the model could never serve a request of full length here, if it could not."""
        if self._layouts.setdefault(model, layout) != layout:
            return "its weights lie otherwise than on another instance: were its files replaced?"
        longest = kv.most_blocks(self._models[model].max_context_tokens)
        needed = instance.engines[model].weight_slabs + kv.slabs(longest)
        if needed <= instance.ledger.total_slabs:
            return None
        return (
            f"its weights and the KV of one request at max_context need {needed} slabs, the pool"
            f" has {instance.ledger.total_slabs}: raise devices.memory or lower max_context"
        )

    def build_or_load_failed(self, event: ModelFailed) -> bool:
        """Its engine cannot be built, or its weights cannot be read (any more)."""
        instance = self._cluster.instances[event.instance]
        if isinstance(instance.job, BuildJob) and instance.job.model == event.model:
            self._close_build(instance, event.model, EngineStage.FAILED)
        elif instance.engines[event.model].stage is EngineStage.LOADING:
            instance.engines[event.model].to_stage(EngineStage.FAILED, event.model)
            instance.ledger.evict(event.model)
            instance.view = None
        self.fail(event.model, event.reason, instance.id)
        return True

    def stored(self, event: WeightsStored) -> bool:
        """The engine has its weights in the host cache, or knows their files."""
        instance = self._cluster.instances[event.instance]
        engine = instance.engines[event.model]
        self._weight_cache.filled(event.model, engine.attached, event.host_slabs)
        if engine.stage is not EngineStage.BUILDING:
            return False
        # Only now: what kills a worker may also be to read the weights for the first time.
        self._build_losses.pop(event.model, None)
        self._close_build(instance, event.model, EngineStage.COLD)
        return True

    def _close_build(self, instance: InstanceState, model: ModelName, stage: EngineStage) -> None:
        instance.engines[model].to_stage(stage, model)
        instance.job = None

    def loaded(self, event: ModelLoaded) -> bool:
        """The weights are on the device."""
        instance = self._cluster.instances[event.instance]
        engine = instance.engines[event.model]
        self._costs.observe_load(event.moved_bytes, event.seconds)
        if engine.stage is EngineStage.LOADING:
            engine.to_stage(EngineStage.LOADED, event.model)
            instance.ledger.loaded(event.model)
            self._prefetcher.preloads.pop(event.model, None)
        more = self._prefetcher.preloads or instance.placement.ahead
        return bool(instance.evict_requested or more)

    def fail(self, model: ModelName, reason: str, instance: InstanceId) -> None:
        """The model cannot be served, an instance reports; its requests are rejected."""
        self._failed[model] = reason
        self._prefetcher.preloads.pop(model, None)
        self._weight_cache.give_up(model, instance)
        for request in self._requests.of(model):
            self._requests.reject(request, "model_failed", reason)

    def progressed(self, model: ModelName) -> None:
        """A request of the model got a token."""
        if self._run_losses:
            self._run_losses.pop(model, None)

    def count_run_loss(self, model: ModelName, instance: InstanceId) -> None:
        """A worker died while it computed requests of the model."""
        losses = self._run_losses[model] = self._run_losses.get(model, 0) + 1
        if losses >= MAX_MODEL_LOSSES:
            self.fail(model, f"{losses} workers in a row died computing its requests", instance)

    def count_build_loss(self, model: ModelName, instance: InstanceId) -> None:
        """A worker died while it built the model's engine, or stored its weights then."""
        losses = self._build_losses[model] = self._build_losses.get(model, 0) + 1
        if losses >= MAX_BUILD_LOSSES:
            message = f"its worker died {losses} times while the engine was built"
            self.fail(model, message, instance)

    # --- what operators want ---------------------------------------------------------------------

    def changed(self, event: ModelChanged) -> bool:
        """The model is served on other terms from now on."""
        self._models[event.model] = msgspec.structs.replace(
            self._models[event.model],
            slo=event.slo,
            batch_slo=event.batch_slo,
            pinned=event.pinned,
            draining=event.draining,
        )
        self._cluster.model_changed(event.model)
        self._weight_cache.pin(event.model, event.pinned)
        return False

    def held(self, event: ImageHeld) -> bool:
        """The model's master image is to stay, or need not any more."""
        self._weight_cache.hold(event.model, event.held)
        if event.stale:
            self._weight_cache.discard(event.model)
        return False

    def wanted(self, event: ModelLoadRequested) -> bool:
        """An operator wants the model on a device."""
        if event.model in self._failed:
            return False
        self._prefetcher.unloaded.discard(event.model)
        there = [i for i in self._cluster.instances.values() if event.model in i.ledger.weights]
        loaded = [i for i in there if event.model not in i.ledger.loading]
        for instance in there:
            instance.evict_requested.pop(event.model, None)
        if not loaded:
            self._prefetcher.preloads[event.model] = None
        return True

    def evict_requested(self, event: ModelEvictRequested) -> bool:
        """An operator wants the model off all devices."""
        self._dismiss(event.model)
        return True

    def _dismiss(self, model: ModelName) -> None:
        """Have the model leave all devices."""
        self._prefetcher.preloads.pop(model, None)
        self._prefetcher.unloaded.add(model)
        for instance in self._cluster.instances.values():
            if model in instance.ledger.weights or model in instance.ledger.kv:
                self._dispatcher.dismiss(instance, model)

    # --- models that come and go -----------------------------------------------------------------

    def added(self, event: ModelAdded) -> bool:
        """A model more is served. The places are to be planned again."""
        spec = event.model
        self._models[spec.name] = spec
        self._cluster.model_changed(spec.name)
        self._demands.add(spec.name)
        self._costs.add(spec)
        self._dispatcher.preemptions[spec.name] = 0
        self._requests.recomputed_tokens[spec.name] = 0
        self._weight_cache.add(spec, event.kv_floor_slabs, self._residency.being_read())
        for instance in self._cluster.able(spec.name):
            instance.add(spec.name)
        return True

    def removed(self, event: ModelRemoved) -> bool:
        """It leaves as a failed one does, and is forgotten once no report about it can come."""
        model = event.model
        self.removing[model] = None
        self._failed[model] = f"{model} was removed"
        self._weight_cache.give_up(model, None)
        for request in self._requests.of(model):
            self._requests.reject(request, "model_removed", self._failed[model])
        self._dismiss(model)
        return True

    def dropped(self, event: ModelDropped) -> bool:
        """An instance has dropped a model that was removed."""
        awaited = self.removing[event.model]
        assert awaited is not None, "it was ordered"
        awaited.discard(event.instance)
        return False

    def lost(self, instance: InstanceId) -> None:
        """The instance drops nothing any more: it is gone."""
        for awaited in self.removing.values():
            (awaited or set()).discard(instance)

    def finish_removals(self) -> bool:
        """Have instances drop models that hold nothing any more, and forget those that all have
        dropped; whether there is one."""
        for model, awaited in self.removing.items():
            held = any([instance.holds(model) for instance in self._cluster.instances.values()])
            if awaited is None and not held and self._weight_cache.get(model) is None:
                live = [instance.id for instance in self._cluster.instances.values() if instance.up]
                self.removing[model] = set(live)
                self._context.out += [DropModel(instance=number, model=model) for number in live]
        gone = [model for model, awaited in self.removing.items() if awaited == set()]
        for model in gone:
            self._forget(model)
        return bool(gone)

    def _forget(self, model: ModelName) -> None:
        del self.removing[model]
        del self._models[model]
        del self._failed[model]
        del self._dispatcher.preemptions[model]
        del self._requests.recomputed_tokens[model]
        self._prefetcher.unloaded.discard(model)
        self._layouts.pop(model, None)
        self._build_losses.pop(model, None)
        self._run_losses.pop(model, None)
        self._weight_cache.pin(model, False)
        self._demands.forget(model)
        self._costs.forget(model)
        self._cluster.model_gone(model)
        for instance in self._cluster.instances.values():
            instance.forget(model)
