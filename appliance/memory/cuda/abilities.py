"""What a GPU and its driver can do, as the driver tells without a context."""

from __future__ import annotations

from typing import NamedTuple

from appliance.memory.cuda.driver import call, driver


class Abilities(NamedTuple):
    """What the pool and the processes that share it need of a GPU."""

    maps_memory: bool
    """Virtual memory management: the slabs of the pool are mapped where they are needed."""
    shares_events: bool
    """Events between processes: a copy of one process is waited for in another."""


def read_abilities(bus: str) -> Abilities:
    """Of the GPU at this address of the PCI bus. Raises `OSError` if the driver cannot be asked."""
    attributes = driver().CUdevice_attribute
    device = call("cuDeviceGetByPCIBusId", bus.encode("ascii"), of=f"GPU at {bus}")

    def has(attribute: object) -> bool:
        return bool(call("cuDeviceGetAttribute", attribute, device))

    return Abilities(
        maps_memory=has(attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        shares_events=has(attributes.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
    )
