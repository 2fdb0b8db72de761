"""What instances, models and requests do now, as the API shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

from appliance.daemon.models import ModelAdministration
from appliance.engines.protocol import KvBytes
from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.observability.slo_window import SloWindow
from appliance.observability.timeline import Timeline
from appliance.observability.work_counters import WorkCounters
from appliance.platform.gpu_monitor import GpuReading, GpuWatch
from appliance.platform.gpus import read_gpu_numbers
from appliance.scheduling.cluster import parked_seconds
from appliance.scheduling.lifecycle import EngineStage, Stage
from appliance.scheduling.machine import Machine
from appliance.scheduling.reports.box_load import machine_load
from appliance.scheduling.state import InstanceState
from appliance.scheduling.wait_reasons import wait_reason
from appliance.service.interface import (
    COMPUTED_PHASES,
    GpuActivity,
    InstanceActivity,
    KvShapeActivity,
    KvTierActivity,
    Load,
    ModelActivity,
    ModelCard,
    ModelTerms,
    RequestActivity,
    RequestNotFound,
)
from appliance.vocabulary import InstanceClass, InstanceId, ModelName, RequestId
from appliance.worker.fragmentation import KvMeter, by_shape, fragmentation, together
from appliance.worker.frames import PoolReport
from appliance.worker.process import WorkerProcess

PHASES: Final[Mapping[Stage, str]] = {Stage.READY: "preempted"}
"""The phase of a request, where that is not the name of its stage: "ready" says too little of one
that waits for its next turn."""


class InstanceActivities:
    """Reads the books of the machine and what workers reported last; changes nothing."""

    def __init__(
        self,
        machine: Machine,
        workers: Mapping[InstanceId, WorkerProcess],
        pools: Mapping[InstanceId, PoolReport],
        counters: WorkCounters,
        timeline: Timeline,
        runtime_slabs: int,
        gpus: GpuWatch | None,
        devices: Sequence[str],
        groups: Sequence[tuple[str, int]],
        clock: Callable[[], float],
    ) -> None:
        """`devices[i]` is what instance i computes on, if there are `gpus`; `groups[i]` is its
        group, and its ranks. The `clock` is that of the machine's events."""
        self._clock = clock
        self._groups = groups
        self._machine = machine
        self._workers = workers
        self._pools = pools
        self._counters = counters
        self._timeline = timeline
        self._runtime_slabs = runtime_slabs
        self._gpus = gpus
        self._devices = devices

    def all(self) -> tuple[InstanceActivity, ...]:
        return tuple(self._activity_of(instance) for instance in self._machine.instances.values())

    def _activity_of(self, instance: InstanceState) -> InstanceActivity:
        worker = self._workers[instance.id]
        report = self._pools.get(instance.id)
        state = "up" if instance.serves else "lost" if worker.restarts else "starting"
        if instance.quarantine is not None:
            state = "quarantined"
        size = self._machine.host.slab_bytes
        work = self._timeline.work[instance.id]
        return InstanceActivity(
            instance=instance.id,
            role=instance.placement.role.value,
            state=state,
            quarantine=instance.quarantine,
            pid=worker.pid,
            model=self._counters.running(instance.id),
            pool_bytes={} if report is None else {k: n * size for k, n in report.slabs.items()},
            pool_high_water_bytes=0 if report is None else report.high_water_slabs * size,
            runtime_bytes=self._runtime_slabs * size,
            prefetched=self._counters.prefetched(instance.id),
            busy_seconds=work.busy_seconds,
            parked=instance.instance_class is InstanceClass.PARKED,
            parked_seconds=parked_seconds(instance, self._clock()),
            switches=work.switches,
            moved_bytes=dict(work.moved_bytes),
            group=self._groups[instance.id][0],
            ranks=self._groups[instance.id][1],
            gpus=()
            if self._gpus is None
            else gpu_activities(self._gpus.readings, self._devices[instance.id]),
        )


class ModelActivities:
    """Reads the catalogue and the books of the machine; changes nothing."""

    def __init__(
        self,
        machine: Machine,
        catalogue: ModelAdministration,
        windows: Mapping[ModelName, SloWindow],
        drafts: Mapping[ModelName, tuple[int, int]],
        groups: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        """A model without a window delivered nothing; `drafts` are `WorkCounters.drafts`, and
        `groups[i]` is the group of instance i, "" if there are none."""
        self._machine = machine
        self._catalogue = catalogue
        self._windows = windows
        self._drafts = drafts
        self._groups = groups
        self._clock = clock

    def all_cards(self) -> list[ModelCard]:
        return list(chain.from_iterable(map(self.cards, self._catalogue.names())))

    def card(self, name: ModelName) -> ModelCard:
        """Raises `ModelNotFound`."""
        base = self._catalogue.base_of(name)
        return next(card for card in self.cards(base) if card.id == name)

    def cards(self, name: ModelName) -> list[ModelCard]:
        """A model as clients see it, and the same by its aliases, and with each of its adapters."""
        card, served = self._card(name), self._catalogue.served[name]
        replace = msgspec.structs.replace
        aliases = (replace(card, id=alias, root=name) for alias in served.aliases)
        adapters = (replace(card, id=adapter, base=name) for adapter in served.adapters)
        return [card, *aliases, *adapters]

    def _card(self, name: ModelName) -> ModelCard:
        served = self._catalogue.served[name]
        return ModelCard(
            id=name,
            created=served.created,
            max_context_tokens=served.spec.max_context_tokens,
            tool_parser=served.tool_parser,
            reasoning_parser=served.reasoning_parser,
            state=self._state(name),
            architecture=served.architecture,
            dtype=served.dtype,
            weight_bytes=served.spec.weight_bytes,
            task=served.worker.task,
            images=served.worker.images,
            sounds=served.worker.sounds,
        )

    def one(self, name: ModelName) -> ModelActivity:
        """Also of a model that is being removed. Raises `ModelNotFound`."""
        if name not in self._catalogue.removing:
            self._catalogue.find(name)
        mine = [r for r in self._machine.requests.values() if r.model == name]
        running = sum(phase_of(r.stage) in COMPUTED_PHASES for r in mine)
        return self._activity_of(name, running, len(mine) - running)

    def all(self) -> tuple[ModelActivity, ...]:
        """All of them, for which every request is looked at once."""
        live = self._machine.requests.values()
        total = Counter([request.model for request in live])
        running = Counter([r.model for r in live if phase_of(r.stage) in COMPUTED_PHASES])
        return tuple(
            self._activity_of(name, running[name], total[name] - running[name])
            for name in self._catalogue.served
        )

    def load(self, *, draining: bool) -> Load:
        """What a router asks each second. It costs O(models + images + live requests)."""
        now = self._clock()
        found = machine_load(self._machine, now)
        recent = [window.recent(now) for window in self._windows.values()]
        tokens, late = (sum(counts) for counts in zip(*recent, strict=True)) if recent else (0, 0)
        catalogue, resident = self._named(self._catalogue.served), self._named(found.resident)
        return Load(
            catalogue=catalogue,
            resident=resident,
            coming=self._named(found.coming),
            host=self._named(found.host),
            waiting=found.waiting,
            waiting_by_model=dict(found.waiting_by_model),
            running=found.running,
            queue_age_seconds=found.queue_age_seconds,
            pool_free_bytes=found.pool_free_bytes,
            requests_by_model={
                each: count
                for name, count in found.requests_by_model.items()
                for each in self._names_of(name)
            },
            asked_models=found.asked_models,
            resident_models=found.resident_models,
            coming_models=found.coming_models,
            attainment=1 - late / tokens if tokens else None,
            draining=draining,
            version=Load.version_of(catalogue, resident),
        )

    def _named(self, models: Collection[ModelName]) -> tuple[str, ...]:
        """All names by which requests may ask for those of these that are served."""
        return tuple(
            each
            for name in self._catalogue.names()
            if name in models
            for each in self._names_of(name)
        )

    def _names_of(self, model: ModelName) -> tuple[str, ...]:
        """All names by which requests may ask for it; none once it is not served any more."""
        served = self._catalogue.served.get(model)
        return () if served is None else (model, *served.aliases, *served.adapters)

    def _activity_of(self, name: ModelName, running: int, waiting: int) -> ModelActivity:
        served = self._catalogue.served[name]
        spec = served.spec
        window = self._windows.get(name)
        drafted, accepted = self._drafts.get(name, (0, 0))
        return ModelActivity(
            model=name,
            state=self._state(name),
            failure=None if name in self._catalogue.removing else self._failure(name),
            residency=self._residency(name),
            groups=tuple(
                dict.fromkeys(
                    group
                    for number, group in enumerate(self._groups)
                    if group and spec.fits(number)
                )
            ),
            running=running,
            waiting=waiting,
            draining=spec.draining,
            load_requested=name in self._machine.dispatcher.prefetcher.preloads,
            output_tokens=0 if window is None else window.output_tokens,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            window=None if window is None else window.window(self._clock()),
            terms=ModelTerms(
                slo=spec.slo,
                batch_slo=spec.batch_slo,
                max_queue=served.max_queue,
                pinned=spec.pinned,
                aliases=served.aliases,
            ),
            facts=served.facts,
        )

    def _failure(self, name: ModelName) -> str | None:
        return self._machine.failed.get(name) or self._catalogue.refused.get(name)

    def _residency(self, name: ModelName) -> dict[str, str]:
        return {
            str(instance.id): instance.engines[name].stage.value
            for instance in self._machine.instances.values()
            if instance.up and name in instance.engines
        }

    def _state(self, name: ModelName) -> str:
        """The model's state on the instance that is closest to serving it."""
        if name in self._catalogue.removing:
            return "removing"
        if self._failure(name) is not None:
            return EngineStage.FAILED.value
        order = [
            EngineStage.ABSENT,
            EngineStage.BUILDING,
            EngineStage.COLD,
            EngineStage.LOADING,
            EngineStage.LOADED,
        ]
        stages = [EngineStage(stage) for stage in self._residency(name).values()]
        best = max((order.index(stage) for stage in stages if stage in order), default=0)
        return order[best].value


def phase_of(stage: Stage) -> str:
    """What the API calls it."""
    return PHASES.get(stage, stage.value)


def request_activity(machine: Machine, name: RequestId, now: float) -> RequestActivity:
    """A live request. Raises `RequestNotFound`."""
    state = machine.requests.get(name)
    if state is None:
        raise RequestNotFound(name)
    return RequestActivity(
        id=state.id,
        model=state.model,
        request_class=state.spec.request_class,
        phase=phase_of(state.stage),
        age_seconds=now - state.arrived,
        prompt_tokens=state.spec.prompt_tokens,
        output_tokens=state.generated,
        max_tokens=state.spec.max_tokens,
        instance=state.instance,
        kv=state.kv.value,
        reason=wait_reason(machine, state, now),
    )


def gpu_activities(readings: Mapping[int, GpuReading], device: str) -> tuple[GpuActivity, ...]:
    """The GPUs that an instance computes on (`show_gpus`), as far as NVML tells of them."""
    return tuple(
        GpuActivity(
            gpu=number,
            utilization=reading.utilization,
            power_watts=reading.power_watts,
            celsius=reading.celsius,
            memory_used_bytes=reading.memory_used_bytes,
            memory_bytes=reading.memory_bytes,
        )
        for number in read_gpu_numbers(device)
        if (reading := readings.get(number)) is not None
    )


def host_bytes(host: HostLedger) -> dict[str, int]:
    """The host tier by owner: weights:<model>, kv, free."""
    slab = host.slab_bytes
    sizes = {f"weights:{model}": slabs * slab for model, slabs in host.weights.items()}
    return sizes | {"kv": host.kv_slabs * slab, "free": host.free_slabs * slab}


def disk_bytes(disk: DiskLedger) -> dict[str, int]:
    """The folder for KV on disk by use: kv, free. Empty if there is none."""
    if not disk.total_bytes:
        return {}
    return {"kv": disk.held_bytes, "free": disk.total_bytes - disk.held_bytes}


def kv_uses(kv: KvTierActivity) -> dict[tuple[str, str], int]:
    """Bytes by shape and use."""
    return {
        (shape, use): size
        for shape, activity in kv.shapes.items()
        for use, size in (
            ("mapped", activity.mapped_bytes),
            ("used", activity.used_bytes),
            ("cold", activity.cold_bytes),
        )
    }


def kv_tier(shapes: Mapping[int, KvBytes], peak_bytes: int) -> KvTierActivity:
    overall = together(shapes.values())._replace(peak_bytes=peak_bytes)
    return KvTierActivity(
        fragmentation=fragmentation(overall),
        shapes={
            str(shape): KvShapeActivity(**use._asdict(), fragmentation=fragmentation(use))
            for shape, use in shapes.items()
            if use.peak_bytes
        },
    )


class KvActivities:
    """KV of all instances, each with a peak of its own, and of the host tier, whose shapes have
    the peaks that were seen at reports."""

    def __init__(self, host: HostLedger, pools: Mapping[InstanceId, PoolReport]) -> None:
        self._host = host
        self._pools = pools
        self._host_meter = KvMeter()

    def tiers(self) -> dict[str, KvTierActivity]:
        """``device`` and ``host``."""
        reports = self._pools.values()
        device = by_shape(chain.from_iterable(report.kv.items() for report in reports))
        device_peak = sum(report.kv_peak_bytes for report in reports)
        host = self._host_meter.measure(
            (shape, KvBytes(slabs, used, 0, slabs))
            for shape, (used, slabs) in self._host.kv_use().items()
        )
        host_peak = self._host.peak_kv_slabs * self._host.slab_bytes
        return {"device": kv_tier(device, device_peak), "host": kv_tier(host, host_peak)}
