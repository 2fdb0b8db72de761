"""The metrics of what is counted elsewhere, brought up to date for each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from appliance.daemon.status import (
    InstanceActivities,
    KvActivities,
    ModelActivities,
    disk_bytes,
    kv_uses,
)
from appliance.observability.metrics import Metrics
from appliance.platform.gpu_monitor import GpuWatch
from appliance.scheduling.machine import Machine
from appliance.scheduling.reports.box_load import QUEUED_STAGES
from appliance.service.interface import Load
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker.process import WorkerProcess


class Gauges:
    """Reads what there is and writes the registry. A refresh costs O(instances + models +
    requests)."""

    def __init__(
        self,
        metrics: Metrics,
        machine: Machine,
        workers: Mapping[InstanceId, WorkerProcess],
        instances: InstanceActivities,
        models: ModelActivities,
        kv: KvActivities,
        gpus: GpuWatch | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._machine = machine
        self._workers = workers
        self._instances = instances
        self._models = models
        self._kv = kv
        self._gpus = gpus
        self._clock = clock
        self._wall_clock = wall_clock
        self._preemptions: Counter[ModelName] = Counter()
        """Of each model, as far as the metrics have them."""
        self._recomputed: Counter[ModelName] = Counter()
        self._restarts: Counter[InstanceId] = Counter()
        self._parked_seconds: dict[InstanceId, float] = {}

    def forget_model(self, model: ModelName) -> None:
        """The model is gone; one that gets its name begins at 0."""
        del self._preemptions[model]
        del self._recomputed[model]

    def refresh(self) -> None:
        """Bring what is counted elsewhere into the registry."""
        pools = self._refresh_instances()
        self._refresh_models(pools)
        self._refresh_box(pools)
        self._refresh_memory()
        if self._gpus is not None:
            self._metrics.gpus.refresh(self._gpus.readings, self._gpus.xids)

    def load(self, *, draining: bool) -> Load:
        """What a router asks each second; the metrics without labels are of it."""
        return self._models.load(draining=draining)

    def _refresh_box(self, pools: Counter[str]) -> None:
        kv = sum(size for owner, size in pools.items() if owner.startswith("kv:"))
        self._metrics.box(self.load(draining=False), kv / max(1, pools.total()), self._wall_clock())

    def _refresh_instances(self) -> Counter[str]:
        """Bytes of all pools by owner."""
        pools: Counter[str] = Counter()
        activities = self._instances.all()
        for shown in activities:
            self._metrics.pool(shown.instance, shown.pool_bytes, shown.pool_high_water_bytes)
            self._metrics.quarantined(shown.instance, shown.quarantine is not None)
            before = self._parked_seconds.get(shown.instance, 0.0)
            self._metrics.parked(shown.instance, shown.parked_seconds - before)
            self._parked_seconds[shown.instance] = shown.parked_seconds
            pools.update(shown.pool_bytes)
        self._metrics.instances(shown.state for shown in activities)
        for number, worker in self._workers.items():
            for _ in range(worker.restarts - self._restarts[number]):
                self._metrics.worker_restart(number)
            self._restarts[number] = worker.restarts
        return pools

    def _refresh_models(self, pools: Counter[str]) -> None:
        activities = self._models.all()
        for shown in activities:
            name = shown.model
            self._metrics.kv_usage(name, pools[f"kv:{name}"] / max(1, pools.total()))
            self._metrics.queues(name, shown.running, shown.waiting)
            for _ in range(self._machine.preemptions[name] - self._preemptions[name]):
                self._metrics.preemption(name)
            self._preemptions[name] = self._machine.preemptions[name]
            tokens = self._machine.recomputed_tokens[name]
            self._metrics.kv_recomputed(name, tokens - self._recomputed[name])
            self._recomputed[name] = tokens
        self._refresh_ages(shown.model for shown in activities)

    def _refresh_ages(self, models: Iterable[ModelName]) -> None:
        now = self._clock()
        waits = dict.fromkeys(models, 0.0)
        for request in self._machine.requests.values():
            if request.stage in QUEUED_STAGES:
                waits[request.model] = max(waits[request.model], now - request.arrived)
        oldest = self._machine.oldest_progress()
        self._metrics.ages(waits, 0.0 if oldest is None else now - oldest)

    def _refresh_memory(self) -> None:
        host = self._machine.host
        for owner, slabs in (
            ("weights", host.weight_slabs),
            ("kv", host.kv_slabs),
            ("free", host.free_slabs),
        ):
            self._metrics.host(owner, slabs * host.slab_bytes)
        for use, size in disk_bytes(self._machine.disk).items():
            self._metrics.kv_disk(use, size)
        for tier, kv in self._kv.tiers().items():
            shapes = {shape: use.fragmentation for shape, use in kv.shapes.items()}
            self._metrics.kv_fragmentation(tier, shapes, kv.fragmentation)
            self._metrics.kv(tier, kv_uses(kv))
