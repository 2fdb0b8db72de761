"""What NVML tells of the GPUs, as metrics; none where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.observability.registry import Registry
from appliance.platform.gpu_monitor import GpuReading


class GpuMetrics:
    """Gauges of the last look, and the critical errors since the daemon began."""

    def __init__(self, registry: Registry) -> None:
        gauge = registry.gauge
        self._gauges = {
            "utilization": gauge(
                "appliance_gpu_utilization_ratio", "Share of the time in which it computed.", "gpu"
            ),
            "memory_used_bytes": gauge(
                "appliance_gpu_memory_used_bytes", "Memory of the GPU in use, by anyone.", "gpu"
            ),
            "memory_bytes": gauge("appliance_gpu_memory_bytes", "Memory of the GPU.", "gpu"),
            "power_watts": gauge("appliance_gpu_power_watts", "Power it draws.", "gpu"),
            "celsius": gauge("appliance_gpu_temperature_celsius", "Temperature of the GPU.", "gpu"),
        }
        self._ecc = gauge(
            "appliance_gpu_ecc_errors",
            "Memory errors since the driver was loaded: corrected, uncorrected.",
            "gpu",
            "kind",
        )
        self._xids = registry.counter(
            "appliance_gpu_xid_errors", "Critical errors, by NVIDIA's code.", "gpu", "xid"
        )
        self._counted: dict[tuple[int, int], int] = {}

    def refresh(
        self, readings: Mapping[int, GpuReading], xids: Mapping[tuple[int, int], int]
    ) -> None:
        """`readings` by GPU, `xids` counted by GPU and code. What has no sensor is not shown."""
        for sensor, gauge in self._gauges.items():
            gauge.clear()
            for number, reading in readings.items():
                value = getattr(reading, sensor)
                if value is not None:
                    gauge.labels(number).set(value)
        self._ecc.clear()
        for number, reading in readings.items():
            for kind in ("corrected", "uncorrected"):
                errors = getattr(reading, f"ecc_{kind}")
                if errors is not None:
                    self._ecc.labels(number, kind).set(errors)
        for (number, code), count in xids.items():
            self._xids.labels(number, code).inc(count - self._counted.get((number, code), 0))
            self._counted[number, code] = count
