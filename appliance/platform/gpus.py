"""GPUs of this machine, as NVIDIA's management library (NVML) tells of them. Makes no context."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from appliance.platform.installation import remedy_for

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


class Gpu(NamedTuple):
    """One GPU. `number` is NVML's, in the order of the bus; `memory_bytes` is all that it has,
    `free_bytes` what no program uses."""

    number: int
    name: str
    memory_bytes: int
    free_bytes: int


class Link(NamedTuple):
    """A PCIe link: its generation, and how many lanes it has."""

    generation: int
    lanes: int


class GpuFacts(NamedTuple):
    """One GPU as it is set up in this machine. None where the driver does not tell."""

    gpu: Gpu
    bus: str
    """Its address on the PCI bus."""
    capability: tuple[int, int]
    """Of computing: major and minor."""
    link: Link | None
    """As negotiated; the generation may be lower while the GPU is idle."""
    most_link: Link | None
    """What GPU and slot could do."""
    persistent: bool | None
    """Whether the driver keeps it initialised while it is not used."""
    users: tuple[int, ...]
    """Processes that compute on it."""
    node: int | None
    """NUMA node; None if the machine has one only."""
    uuid: str = ""
    """Which stays with the GPU in whatever slot it is."""


def show_gpus(numbers: Sequence[int]) -> str:
    """The GPUs of an instance as its device: ``cuda:0``, or ``cuda:0,1`` for two ranks."""
    return f"cuda:{','.join(map(str, numbers))}"


def read_gpu_numbers(device: str) -> tuple[int, ...]:
    """The GPUs of a device as `show_gpus` writes it, in the order of its ranks; of the CPU none."""
    kind, _, numbers = device.partition(":")
    return tuple([int(number) for number in numbers.split(",")]) if kind == "cuda" else ()


class GpusUnknown(OSError):
    """NVML cannot be asked; the text says why, and what to do."""


def list_gpus() -> list[Gpu]:
    """All GPUs, by number. Raises `GpusUnknown` if there is no NVML, or it fails."""
    with nvml_open() as nvml:
        found = []
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = _text(nvml.nvmlDeviceGetName(handle))
            found.append(Gpu(number, name, int(memory.total), int(memory.free)))
        return found


def read_gpus(devices: Path = PCI_DEVICES) -> list[GpuFacts]:
    """All GPUs, by number, as they are set up. Raises `GpusUnknown`."""
    found = []
    gpus = list_gpus()
    with nvml_open() as nvml:
        for gpu in gpus:
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu.number)
            bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
            running = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            persistent = _told(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
            found.append(
                GpuFacts(
                    gpu=gpu,
                    bus=bus,
                    capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
                    link=_link(nvml, handle, "Curr"),
                    most_link=_link(nvml, handle, "Max"),
                    persistent=None if persistent is None else bool(persistent),
                    users=tuple(int(process.pid) for process in running),
                    node=_node(devices, bus),
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                )
            )
    return found


def read_link(number: int) -> Link | None:
    """The PCIe link of a GPU as it is now. Raises `GpusUnknown`."""
    with nvml_open() as nvml:
        return _link(nvml, nvml.nvmlDeviceGetHandleByIndex(number), "Curr")


def _link(nvml: Any, handle: Any, which: str) -> Link | None:
    generation = _told(nvml, getattr(nvml, f"nvmlDeviceGet{which}PcieLinkGeneration"), handle)
    lanes = _told(nvml, getattr(nvml, f"nvmlDeviceGet{which}PcieLinkWidth"), handle)
    return None if generation is None or lanes is None else Link(generation, lanes)


def _told(nvml: Any, ask: Callable[[Any], Any], handle: Any) -> Any | None:
    """The answer; None if this GPU or this user gets none."""
    try:
        return ask(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
        return None


def _node(devices: Path, bus: str) -> int | None:
    """NVML writes eight digits of the domain, the kernel four."""
    try:
        node = int((devices / bus.lower()[-12:] / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def driver_version() -> str:
    """Of NVIDIA's kernel driver. Raises `GpusUnknown`."""
    with nvml_open() as nvml:
        return _text(nvml.nvmlSystemGetDriverVersion())


def driver_cuda_version() -> tuple[int, int]:
    """The newest CUDA that the driver runs: major and minor. Raises `GpusUnknown`."""
    with nvml_open() as nvml:
        version = int(nvml.nvmlSystemGetCudaDriverVersion())
        return version // 1000, version % 1000 // 10


def _text(value: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


@contextlib.contextmanager
def nvml_open() -> Iterator[Any]:
    """The bindings, initialised. Imported here: a machine without a GPU does not need them.

    Raises `GpusUnknown`, also for what fails inside.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise GpusUnknown(
            f"NVIDIA's management library cannot be asked: {remedy_for('gpu')} (drivers older than "
            f"580: {remedy_for('gpu-cuda12')})"
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
