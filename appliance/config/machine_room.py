"""Whether the pools and the host cache of a configuration fit into the memory of this machine.

More than the machine has can never work, and is a problem of the configuration. More than is
available now is not: other programs may end. A daemon does not start then, and can be started
again (docs/decisions/0109-memory-of-the-machine.md).
"""

from __future__ import annotations

from typing import NamedTuple

from appliance.config.groups import plan_instances
from appliance.config.problems import ProblemReport
from appliance.config.schema import Devices
from appliance.errors import ApplianceError
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from appliance.units import human, no_more


class TooLittleMemory(ApplianceError):
    """Less memory is available now than the daemon would take."""


class HostNeeds(NamedTuple):
    """Host memory that a daemon takes, bytes. Pools of GPUs are not in it."""

    ranks: int
    pool: int
    """Of each rank."""
    host_cache: int

    @property
    def pools(self) -> int:
        return self.ranks * self.pool

    @property
    def bytes(self) -> int:
        return self.pools + self.host_cache

    @property
    def remedy(self) -> str:
        """What makes them less: pools on GPUs take none of it."""
        if not self.pools:
            return "make devices.host_cache smaller"
        host_cache = " or devices.host_cache" if self.host_cache else ""
        return f"make devices.memory{host_cache} smaller, or use fewer instances"

    def __str__(self) -> str:
        if not self.pools:
            return f"host cache {human(self.host_cache)}"
        times = f" ({self.ranks} of {human(self.pool)})" if self.ranks > 1 else ""
        return f"pools {human(self.pools)}{times} + host cache {human(self.host_cache)}"


def host_needs(devices: Devices) -> HostNeeds:
    """Of these devices, once it is known what they are."""
    ranks = sum([plan.ranks for plan in plan_instances(devices)])
    pool = 0 if devices.cuda else devices.slabs * devices.slab_bytes
    return HostNeeds(ranks, pool, int(devices.host_cache_bytes))


def check_machine(devices: Devices, report: ProblemReport) -> None:
    """Report devices that take more memory than there is, at the larger of the two keys."""
    if report.concerns("devices"):
        return  # sizes mean nothing yet
    machine, needs = machine_memory.read_memory(), host_needs(devices)
    total = machine.total_bytes
    if total is None or needs.bytes <= total:
        return
    key = "host_cache" if needs.host_cache > needs.pools else "memory"
    others = needs.bytes - (needs.host_cache if key == "host_cache" else needs.pools)
    each = (total - others) // (1 if key == "host_cache" else needs.ranks)
    fewer = ", or use fewer instances" if key == "memory" and needs.ranks > 1 else ""
    remedy = needs.remedy
    if each >= devices.slab_bytes:
        remedy = f"set it to less than {no_more(each)}{fewer}"
    report.add(
        ("devices", key),
        f"{needs} are more than the {human(total)} of memory of {machine.owner}",
        remedy,
    )


def refuse_now(devices: Devices, machine: MachineMemory) -> None:
    """Raises `TooLittleMemory` if less is available now than a daemon with these devices takes."""
    needs, available = host_needs(devices), machine.available_bytes
    if available is not None and needs.bytes > available:
        raise TooLittleMemory(
            f"{needs}: only {human(available)} of memory are available now; end what else uses "
            f"memory, or {needs.remedy}"
        )
