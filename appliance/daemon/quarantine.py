"""Instances that are taken out of service, by an operator or by what is seen of them, and back.

A quarantined instance has no worker: its worker is ended, and what it had goes on elsewhere. It
stays so until an operator releases it, or the daemon is restarted; what is still wrong then is seen
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from appliance.platform.gpus import read_gpu_numbers
from appliance.scheduling.machine import Machine
from appliance.scheduling.state import InstanceState
from appliance.service.event_log import EventLog, NoticeKind
from appliance.service.interface import InstanceNotFound
from appliance.vocabulary import Event, InstanceId, InstanceQuarantined, InstanceReleased

MOST_STILLBORN: Final = 5
"""A worker that dies so often in a row before it is up, while others serve all its models, is not
started again; if that takes so long at least: what passes by itself is waited for."""
STILLBORN_SECONDS: Final = 60.0
"""From the first of these deaths to the last."""

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Keeps a worker alive, or not."""

    def hold(self) -> None: ...

    def let_go(self) -> None: ...


class Quarantine:
    """Used on the daemon's event loop. That an instance is in quarantine, and why, is in the
    machine's books."""

    def __init__(
        self,
        machine: Machine,
        keepers: Mapping[InstanceId, Keeper],
        devices: Sequence[str],
        feed: EventLog,
        tell: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """`devices[i]` is what instance i computes on: `cuda:0` is the first GPU. `tell` is for the
        machine."""
        self._machine = machine
        self._keepers = keepers
        self._devices = devices
        self._feed = feed
        self._tell = tell
        self._clock = clock
        self._stillborn_since: dict[InstanceId, float] = {}
        """When the first of its deaths in a row was."""

    def impose(self, number: InstanceId, reason: str) -> None:
        """Take the instance out of service; without effect if it is. Raises `InstanceNotFound`."""
        if self._find(number).quarantine is not None:
            return
        log.warning("instance %d is quarantined: %s", number, reason)
        self._feed.tell(NoticeKind.INSTANCE_QUARANTINED, instance=number, reason=reason)
        self._tell(InstanceQuarantined(instance=number, reason=reason))
        self._keepers[number].hold()

    def lift(self, number: InstanceId) -> None:
        """Have the instance serve again; without effect if it may. Raises `InstanceNotFound`."""
        if self._find(number).quarantine is None:
            return
        log.warning("instance %d is released", number)
        self._feed.tell(NoticeKind.INSTANCE_RELEASED, instance=number)
        self._tell(InstanceReleased(instance=number))
        self._keepers[number].let_go()

    def gpu_failed(self, gpu: int, reason: str) -> None:
        """A GPU failed: no instance computes on it any more."""
        for number, device in enumerate(self._devices):
            if gpu in read_gpu_numbers(device):
                self.impose(number, reason)

    def stillborn(self, number: InstanceId, deaths: int) -> None:
        """A worker died before it was up, so often in a row. If no other instance serves, the
        cause may affect all instances, and the worker is started again; so it is if it has a model
        that no other instance serves, as that would be refused from then on."""
        now = self._clock()
        if deaths == 1:
            self._stillborn_since[number] = now
        lasting = now - self._stillborn_since.get(number, now) >= STILLBORN_SECONDS
        if deaths >= MOST_STILLBORN and lasting and self._is_spare(number):
            self.impose(number, f"its worker died {deaths} times in a row before it was up")

    def _is_spare(self, number: InstanceId) -> bool:
        """Whether others serve, and all models that this one can have."""
        serving = [one.id for one in self._machine.instances.values() if one.serves]
        others = [other for other in serving if other != number]
        mine = [spec for spec in self._machine.models.values() if spec.fits(number)]
        return bool(others) and all(any(map(spec.fits, others)) for spec in mine)

    def _find(self, number: InstanceId) -> InstanceState:
        instance = self._machine.instances.get(number)
        if instance is None:
            raise InstanceNotFound(number)
        return instance
