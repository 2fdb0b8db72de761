"""Sensors and errors of the GPUs that we use, watched through NVML beside everything else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from appliance.gpus import GpusUnknown, nvml_open

SAMPLE_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""After NVML failed."""

log = logging.getLogger("appliance.gpus")


class GpuReading(NamedTuple):
    """One GPU at a moment; None is what it has no sensor for. Errors are those since its driver
    was loaded."""

    utilization: float | None
    """Share of the time in which it computed, 0 to 1."""
    memory_used_bytes: int
    memory_bytes: int
    power_watts: float | None
    celsius: float | None
    ecc_corrected: int | None
    ecc_uncorrected: int | None


class GpuWatch:
    """Looks every few seconds, and hears of critical errors (XID) as they happen.

    `readings` by GPU and `xids` by GPU and code are replaced, never changed, by a thread of its
    own: NVML may take its time.
    """

    def __init__(self, gpus: Sequence[int], every_seconds: float = SAMPLE_SECONDS) -> None:
        """`gpus` are NVML's numbers."""
        self.readings: Mapping[int, GpuReading] = MappingProxyType({})
        self.xids: Mapping[tuple[int, int], int] = MappingProxyType({})
        self._gpus = gpus
        self._every_seconds = every_seconds
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure = ""

    def start(self) -> None:
        self._thread = threading.Thread(target=self._keep_watching, name="gpus", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends within a sample's time."""
        self._over.set()

    def join(self, seconds: float) -> bool:
        """Whether it ended in that time."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _keep_watching(self) -> None:
        while not self._over.is_set():
            try:
                with nvml_open() as nvml:
                    self._watch(nvml)
            except GpusUnknown as error:
                if str(error) != self._failure:
                    log.error("the GPUs cannot be watched: %s", error)
                self._failure = str(error)
                self.readings = MappingProxyType({})
                self._over.wait(RETRY_SECONDS)

    def _watch(self, nvml: Any) -> None:
        handles = {number: nvml.nvmlDeviceGetHandleByIndex(number) for number in self._gpus}
        events = nvml.nvmlEventSetCreate()
        try:
            heard = [_register(nvml, handle, events) for handle in handles.values()]
            while not self._over.is_set():
                self.readings = MappingProxyType(
                    {number: _read(nvml, handle) for number, handle in handles.items()}
                )
                if any(heard):
                    self._wait_for_errors(nvml, events)
                else:
                    self._over.wait(self._every_seconds)
        finally:
            nvml.nvmlEventSetFree(events)

    def _wait_for_errors(self, nvml: Any, events: Any) -> None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, int(self._every_seconds * 1000))
        except nvml.NVMLError_Timeout:
            return
        number, code = nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        log.error("GPU %d reports a critical error, XID %d", number, code)
        seen = self.xids.get((number, code), 0)
        self.xids = MappingProxyType({**self.xids, (number, code): seen + 1})


def _register(nvml: Any, handle: Any, events: Any) -> bool:
    """Whether the GPU will tell of its critical errors."""
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError_NotSupported:
        return False
    return True


def _read(nvml: Any, handle: Any) -> GpuReading:
    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates)
    milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
    return GpuReading(
        utilization=None if rates is None else rates.gpu / 100,
        memory_used_bytes=int(memory.used),
        memory_bytes=int(memory.total),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        ecc_corrected=ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        ecc_uncorrected=ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
    )
