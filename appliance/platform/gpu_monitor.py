"""Sensors and errors of the GPUs that we use, read through NVML in a thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from appliance.platform.gpus import GpusUnknown, nvml_open

SAMPLE_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""After NVML failed."""
XIDS_OF_PROGRAMS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Critical errors that a program brings about: they end what runs, and the GPU is fine. NVIDIA's
device plugin for Kubernetes passes over the same."""

Tell: TypeAlias = Callable[[int, str], None]
"""Hears the number of a GPU that fails, and why."""

log = logging.getLogger("appliance.platform.gpus")


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

    A GPU fails when it has a critical error that no program brings about, when it has an
    uncorrectable memory error (ECC), or when it is lost: it has fallen off the bus. Of one that is
    lost is reported at every look.

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
        self._tell: Tell | None = None
        self._uncorrected: dict[int, int] = {}
        """Memory errors that were seen."""
        self._lost: set[int] = set()
        """GPUs that were lost at the last look."""

    def start(self, tell: Tell | None = None) -> None:
        """`tell` is called in the thread of the watch."""
        self._tell = tell
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
        while not self._over.is_set():
            events = nvml.nvmlEventSetCreate()
            try:
                self._watch_with(nvml, events)
            finally:
                nvml.nvmlEventSetFree(events)

    def _watch_with(self, nvml: Any, events: Any) -> None:
        """Until the watch is over, or a GPU is lost: then these events report the errors of no GPU
        any more."""
        self._look(nvml)
        present = [number for number in self._gpus if number not in self._lost]
        registered = [self._register(nvml, number, events) for number in present]
        while not self._over.is_set():
            if any(registered):
                try:
                    self._wait_for_errors(nvml, events)
                except nvml.NVMLError_GpuIsLost:  # one of ours, or any; the next look finds which
                    self._over.wait(self._every_seconds)
                    return
            else:
                self._over.wait(self._every_seconds)
            self._look(nvml)

    def _register(self, nvml: Any, number: int, events: Any) -> bool:
        """Whether the GPU will tell of its critical errors."""
        with self._unless_lost(nvml, number):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError_NotSupported:
                return False
            return True
        return False

    def _look(self, nvml: Any) -> None:
        readings = {}
        for number in self._gpus:
            with self._unless_lost(nvml, number):
                reading = _read(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
                readings[number] = reading
                if reading.ecc_uncorrected is not None:
                    self._compare(number, reading.ecc_uncorrected)
        self.readings = MappingProxyType(readings)

    def _compare(self, number: int, errors: int) -> None:
        """What happened before the watch began says nothing: the memory may have been mended."""
        new = errors - self._uncorrected.get(number, errors)
        self._uncorrected[number] = errors
        if new > 0:
            log.error("GPU %d has %d uncorrectable memory errors more", number, new)
            self._fails(number, f"uncorrectable memory errors (ECC) of GPU {number}")

    def _fails(self, number: int, reason: str) -> None:
        if self._tell is not None:
            self._tell(number, reason)

    @contextlib.contextmanager
    def _unless_lost(self, nvml: Any, number: int) -> Iterator[None]:
        try:
            yield
        except nvml.NVMLError_GpuIsLost:
            if number not in self._lost:
                log.error("GPU %d is lost: it has fallen off the bus", number)
            self._lost.add(number)
            self._fails(number, f"GPU {number} is lost: it has fallen off the bus")
        else:
            self._lost.discard(number)

    def _wait_for_errors(self, nvml: Any, events: Any) -> None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, int(self._every_seconds * 1000))
        except nvml.NVMLError_Timeout:
            return
        number, code = nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        log.error("GPU %d reports a critical error, XID %d", number, code)
        seen = self.xids.get((number, code), 0)
        self.xids = MappingProxyType({**self.xids, (number, code): seen + 1})
        if code not in XIDS_OF_PROGRAMS:
            self._fails(number, f"critical error of GPU {number}, XID {code}")


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
