"""NVML as a machine with GPUs has it, in the place of the bindings."""

from __future__ import annotations

import queue
import sys
from types import ModuleType, SimpleNamespace

import pytest


class PretendNvml(ModuleType):
    """Answers for GPUs of these sizes; fails as the real one does when there is no driver."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        pass

    class NVMLError_NoPermission(NVMLError):  # noqa: N801
        pass

    class NVMLError_Timeout(NVMLError):  # noqa: N801
        pass

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801
        pass

    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, sizes: list[int], broken: bool = False) -> None:
        super().__init__("pynvml")
        self.sizes = sizes
        self.broken = broken
        self.open = 0
        self.lacking: set[str] = set()
        """Sensors, by their function, that these GPUs have not."""
        self.errors: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        """What happens next: a GPU and its XID; a GPU of -1 breaks the driver."""
        self.waits: queue.SimpleQueue[None] = queue.SimpleQueue()
        """An item for every time that a thread begins to wait for an error."""
        self.reads: queue.SimpleQueue[int] = queue.SimpleQueue()
        """An item for every time that a GPU begins to be read."""
        self.registered: list[int] = []
        self.lost: set[int] = set()
        """GPUs that fell off the bus."""
        self.uncorrected = 0
        """Memory errors of every GPU that could not be corrected."""
        self.cuda = 13000
        """The driver's CUDA: a thousand for each major version, ten for each minor one."""
        self.users: dict[int, list[int]] = {}
        """Processes that compute, by GPU."""
        self.lanes = 16
        """Of every GPU's link, now."""

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.sizes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index in self.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"Pretend {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        self.reads.put(handle)
        size, used = self.sizes[handle], self.sizes[handle] // 4
        return SimpleNamespace(total=size, used=used, free=size - used)

    def _sensor(self, name: str) -> None:
        if name in self.lacking:
            raise self.NVMLError_NotSupported("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        self._sensor("utilization")
        return SimpleNamespace(gpu=50 + handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        self._sensor("power")
        return 300_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        self._sensor("temperature")
        return 60 + handle

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        self._sensor("ecc")
        return 7 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else self.uncorrected

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:  # noqa: N802
        self.registered.clear()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:  # noqa: N802
        self._sensor("events")
        assert kinds == self.nvmlEventTypeXidCriticalError
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:  # noqa: N802
        self.waits.put(None)
        if self.lost.intersection(self.registered):
            raise self.NVMLError_GpuIsLost("GPU is lost")
        try:
            handle, code = self.errors.get(timeout=milliseconds / 1000)
        except queue.Empty:
            raise self.NVMLError_Timeout("Timeout") from None
        if handle < 0:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(device=handle, eventType=8, eventData=code)

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        if handle in self.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return handle

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:3{'BCDEF'[handle]}:00.0".encode())

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:  # noqa: N802
        return [9, 0]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        self._sensor("link")
        return 1

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return self.lanes

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:  # noqa: N802
        self._sensor("persistence")
        return 1

    def nvmlDeviceGetComputeRunningProcesses(  # noqa: N802
        self, handle: int
    ) -> list[SimpleNamespace]:
        if "users" in self.lacking:
            raise self.NVMLError_NoPermission("Insufficient Permissions")
        return [SimpleNamespace(pid=pid) for pid in self.users.get(handle, [])]

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.1"


def install(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], *, broken: bool = False
) -> PretendNvml:
    """Until the test is over, this is the machine's NVML."""
    nvml = PretendNvml(sizes, broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml
