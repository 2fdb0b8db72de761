"""What follows the work of instances without a say in it: counters, timelines, request phases."""

from __future__ import annotations

from typing import Protocol

from appliance.vocabulary import Command, Event, InstanceId


class Observer(Protocol):
    """Sees every command before it is sent, and every report before the machine handles it. Times
    are seconds of the daemon's clock."""

    def ordered(self, command: Command, now: float) -> None: ...

    def reported(self, event: Event, now: float) -> None: ...

    def lost(self, instance: InstanceId, now: float) -> None:
        """The instance's worker ended."""
