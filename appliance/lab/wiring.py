"""The links of a box: one for each instance and direction, and the disk that all share.

The GPUs of an instance copy their shares side by side, so an instance's link has the rate of one.
"""

from __future__ import annotations

from appliance.lab.agenda import Agenda
from appliance.lab.deviation import EXACT, Deviation
from appliance.lab.hardware import Box
from appliance.lab.link import Link
from appliance.vocabulary import InstanceId

WEIGHTS, KV_IN, KV_OUT = "weights", "kv_in", "kv_out"
"""Lanes of the links; those of the disk are of its readers."""


class Wiring:
    """Of one box."""

    def __init__(self, agenda: Agenda, box: Box, deviation: Deviation = EXACT) -> None:
        self._agenda = agenda
        self._rate = box.gpu.link_bytes_per_second * deviation.link_factor
        self.disk = Link(agenda, box.gpu.disk_bytes_per_second)

    def inwards(self, instance: InstanceId) -> Link:
        """From the host to an instance."""
        return Link(self._agenda, self._rate)

    def outwards(self, instance: InstanceId) -> Link:
        """From an instance to the host."""
        return Link(self._agenda, self._rate)
