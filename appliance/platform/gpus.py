"""GPUs of this machine, as NVIDIA's management library (NVML) tells of them. Makes no context."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """One GPU. `number` is NVML's, in the order of the bus; `memory_bytes` is all that it has."""

    number: int
    name: str
    memory_bytes: int


class GpusUnknown(OSError):
    """NVML cannot be asked; the text says why, and what to do."""


def list_gpus() -> list[Gpu]:
    """All GPUs, by number. Raises `GpusUnknown` if there is no NVML, or it fails."""
    with nvml_open() as nvml:
        found = []
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            name = nvml.nvmlDeviceGetName(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            # Older bindings answer in bytes.
            found.append(
                Gpu(number, name.decode() if isinstance(name, bytes) else name, int(memory.total))
            )
        return found


def driver_version() -> str:
    """Of NVIDIA's kernel driver. Raises `GpusUnknown`."""
    with nvml_open() as nvml:
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)


@contextlib.contextmanager
def nvml_open() -> Iterator[Any]:
    """The bindings, initialised. Imported here: a machine without a GPU does not need them.

    Raises `GpusUnknown`, also for what fails inside.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise GpusUnknown(
            'NVIDIA\'s management library cannot be asked: install the extra "gpu" of this package'
        ) from error
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise GpusUnknown(
            f"NVIDIA's management library fails: {error}; check the driver with `nvidia-smi`"
        ) from error
