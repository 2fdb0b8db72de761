"""Memory and sensors as the API shows them, from the books and meters that keep them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from appliance.engines.protocol import KvBytes
from appliance.fragmentation import KvMeter, by_shape, fragmentation, together
from appliance.gpuwatch import GpuReading
from appliance.memory.ledger import HostLedger
from appliance.service.interface import GpuActivity, KvShapeActivity, KvTierActivity
from appliance.vocabulary import InstanceId
from appliance.wire import PoolReport


def gpu_activities(readings: Mapping[int, GpuReading], device: str) -> tuple[GpuActivity, ...]:
    """The GPU that an instance computes on (``cuda:N``), as far as NVML tells of it."""
    return tuple(
        GpuActivity(
            gpu=number,
            utilization=reading.utilization,
            power_watts=reading.power_watts,
            celsius=reading.celsius,
            memory_used_bytes=reading.memory_used_bytes,
            memory_bytes=reading.memory_bytes,
        )
        for number, reading in readings.items()
        if device == f"cuda:{number}"
    )


def host_bytes(host: HostLedger) -> dict[str, int]:
    """The host tier by owner: weights:<model>, kv, free."""
    slab = host.slab_bytes
    sizes = {f"weights:{model}": slabs * slab for model, slabs in host.weights.items()}
    return sizes | {"kv": host.kv_slabs * slab, "free": host.free_slabs * slab}


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
    the peaks that were seen when somebody looked."""

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
