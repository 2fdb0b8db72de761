"""The links of a box: one for each instance and direction, under roots that some of them share and
the host's memory that all share, and the disk that all share.

The GPUs of an instance copy their shares side by side, so an instance's link has the rate of one of
them. Under a root with k GPUs in use each has a k-th of its rate, in each direction. Of the rate of
the memory each has a k-th, too; a GPU that copies in both directions counts twice there.
"""

from __future__ import annotations

from appliance.lab.hardware import Box
from appliance.lab.noise import EXACT, Deviation
from appliance.lab.sim.event_queue import Agenda
from appliance.lab.sim.link import Link, Root
from appliance.vocabulary import InstanceId

WEIGHTS, KV_IN, KV_OUT = "weights", "kv_in", "kv_out"
"""Lanes of the links."""
KV = "kv"
"""A lane of the disk; the others are of the instances that read weights."""


class Wiring:
    """Of one box."""

    def __init__(self, agenda: Agenda, box: Box, deviation: Deviation = EXACT) -> None:
        self._agenda = agenda
        self._rate = box.gpu.link_bytes_per_second * deviation.link_factor
        gpus = box.gpus_per_root
        # Of each GPU of an instance, if no other instance is at it.
        self._root_rate = box.root_bytes_per_second * deviation.link_factor / min(box.tp, gpus)
        self._instances_per_root = max(1, gpus // box.tp)
        self._roots: dict[tuple[str, int], Root] = {}
        # Of each GPU of an instance, if no other instance copies.
        memory_rate = box.host_bytes_per_second * deviation.link_factor / box.tp
        ample = memory_rate >= 2 * box.instances * self._rate
        self._memory = () if ample else (Root(memory_rate),)
        self.disk = Link(agenda, box.gpu.disk_bytes_per_second)

    def inwards(self, instance: InstanceId) -> Link:
        """From the host to an instance."""
        return self._link("inwards", instance)

    def outwards(self, instance: InstanceId) -> Link:
        """From an instance to the host."""
        return self._link("outwards", instance)

    def _link(self, direction: str, instance: InstanceId) -> Link:
        if self._root_rate >= self._rate * self._instances_per_root:
            return Link(self._agenda, self._rate, *self._memory)  # the root is never short
        number = instance // self._instances_per_root
        root = self._roots.setdefault((direction, number), Root(self._root_rate))
        return Link(self._agenda, self._rate, root, *self._memory)
