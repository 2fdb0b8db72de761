"""The links of a box: one for each instance and direction, under roots that some of them share and
the host's memory that all share, and the disk that all share.

The GPUs of an instance copy their shares side by side, so an instance's link has the rate of one of
them. Under a root with k GPUs in use each has a k-th of its rate, in each direction. Of the rate of
the memory each has a k-th, too; a GPU that copies in both directions counts twice there.

With `Box.relay` loads go through idle instances of the same host, too (`appliance.lab.sim.relay`).
"""

from __future__ import annotations

from collections.abc import Iterator

from appliance.lab.hardware import Box
from appliance.lab.noise import EXACT, Deviation
from appliance.lab.sim.event_queue import Agenda
from appliance.lab.sim.link import Carrier, Link, Root
from appliance.lab.sim.relay import OWN_LANE, Relay, RelayedLink, peers_on_hosts
from appliance.memory.relay import RelayPlanner, Switch
from appliance.vocabulary import Direction, InstanceId

WEIGHTS, KV_IN, KV_OUT = OWN_LANE, "kv_in", "kv_out"
"""Lanes of the links."""
KV = "kv"
"""A lane of the disk; the others are of the instances that read weights."""


class Wiring:
    """Of one box."""

    def __init__(self, agenda: Agenda, box: Box, deviation: Deviation = EXACT) -> None:
        self._agenda = agenda
        self._box = box
        self._rate = box.gpu.link_bytes_per_second * deviation.link_factor
        gpus = box.gpus_per_root
        # Of each GPU of an instance, if no other instance is at it.
        self._root_rate = box.root_bytes_per_second * deviation.link_factor / min(box.tp, gpus)
        self._instances_per_root = max(1, gpus // box.tp)
        self._roots: dict[tuple[Direction, int], Root] = {}
        # Of each GPU of an instance, if no other instance copies.
        self._memory_rate = box.host_bytes_per_second * deviation.link_factor / box.tp
        ample = self._memory_rate >= 2 * box.instances * self._rate
        self._memory = () if ample else (Root(self._memory_rate),)
        self.disk = Link(agenda, box.gpu.disk_bytes_per_second)
        self._inwards: dict[InstanceId, Link] = {}
        self._relay: Relay | None = None
        peers = peers_on_hosts(box.instances, box.tp, box.gpus_per_host) if box.relay else {}
        if peers:
            self._inwards = {one: self._link(Direction.IN, one) for one in range(box.instances)}
            nvlink_rate = box.gpu.peer_bytes_per_second * deviation.link_factor
            planner = RelayPlanner(
                bytes_per_second=min(self._rate, self._root_rate, self._memory_rate),
                nvlink_bytes_per_second=nvlink_rate,
                peers=peers,
                switches=self._switches(),
            )
            self._relay = Relay(agenda, planner, self._inwards, nvlink_rate)

    def inwards(self, instance: InstanceId) -> Carrier:
        """From the host to an instance."""
        if self._relay is None:
            return self._link(Direction.IN, instance)
        return RelayedLink(self._inwards[instance], self._relay, instance, Direction.IN)

    def outwards(self, instance: InstanceId) -> Carrier:
        """From an instance to the host."""
        link = self._link(Direction.OUT, instance)
        if self._relay is None:
            return link
        return RelayedLink(link, self._relay, instance, Direction.OUT)

    @property
    def _is_root_ample(self) -> bool:
        return self._root_rate >= self._rate * self._instances_per_root

    def _link(self, direction: Direction, instance: InstanceId) -> Link:
        if self._is_root_ample:
            return Link(self._agenda, self._rate, *self._memory)  # the root is never short
        number = instance // self._instances_per_root
        root = self._roots.setdefault((direction, number), Root(self._root_rate))
        return Link(self._agenda, self._rate, root, *self._memory)

    def _switches(self) -> Iterator[Switch]:
        """The same roots and memory, as the planner of relays counts them."""
        instances, together = self._box.instances, self._instances_per_root
        if not self._is_root_ample:
            for first in range(0, instances, together):
                members = range(first, min(first + together, instances))
                yield Switch(self._root_rate, [(one, Direction.IN) for one in members])
        if self._memory:
            links = [(one, way) for one in range(instances) for way in Direction]
            yield Switch(self._memory_rate, links)
