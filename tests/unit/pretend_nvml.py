"""NVML as a machine with GPUs has it, in the place of the bindings."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest


class PretendNvml(ModuleType):
    """Answers for GPUs of these sizes; fails as the real one does when there is no driver."""

    class NVMLError(Exception):
        pass

    def __init__(self, sizes: list[int], broken: bool = False) -> None:
        super().__init__("pynvml")
        self.sizes = sizes
        self.broken = broken
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.sizes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"Pretend {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.sizes[handle])

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.1"


def install(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], *, broken: bool = False
) -> PretendNvml:
    """Until the test is over, this is the machine's NVML."""
    nvml = PretendNvml(sizes, broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml
