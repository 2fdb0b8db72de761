"""Whether the daemon can serve, and whether something still happens, read off its books."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from appliance.scheduling.machine import Machine
from appliance.scheduling.state import BuildJob, PrefillJob
from appliance.service.interface import Readiness
from appliance.worker.process import WorkerProcess

WATCHDOG_PATIENCE: Final = 10
"""Times the progress deadline without any sign of a worker until the daemon counts as stuck."""


def readiness(
    machine: Machine,
    workers: Collection[WorkerProcess],
    now: float,
    progress_seconds: float,
    no_front_end: str | None = None,
    no_start: str | None = None,
) -> Readiness:
    """Ready is a daemon with an instance that is up (`no_start` says why none could be started)
    and a front end that is ready (`no_front_end` says why there is none), while every request got a
    token, or came, in the last `progress_seconds`. Degraded is one with an instance in quarantine,
    or with models that no instance which is up can serve. It names no model: probes need no key."""
    instances = machine.instances.values()
    quarantined = [instance.id for instance in instances if instance.quarantine is not None]
    reasons = []
    if not any(instance.up for instance in instances):
        deaths = sum(worker.stillborn for worker in workers)
        about = f", {deaths} died before they were; see the log" if deaths else ""
        if quarantined:
            about += f", {len(quarantined)} of {len(workers)} instances are quarantined"
        if no_start is not None:
            about += f"; {no_start}"
        reasons.append(f"no worker is up{about}")
    if no_front_end is not None:
        reasons.append(no_front_end)
    oldest = machine.oldest_progress()
    if oldest is not None and now - oldest > progress_seconds:
        reasons.append(f"a request made no progress for {now - oldest:.0f} s")
    degraded = [f"instance {number} is quarantined" for number in quarantined]
    up = [instance.id for instance in instances if instance.up]
    if up:  # else it is the reason, and of all models
        idle = sum([not any(map(spec.fits, up)) for spec in machine.models.values()])
        if idle:
            degraded.append(
                f"no instance is up that can serve {idle} of {len(machine.models)} models"
            )
    return Readiness(ok=not reasons, reasons=tuple(reasons), degraded=tuple(degraded))


def progresses(
    machine: Machine, now: float, last_frame: float, progress_seconds: float, *, broken: bool
) -> bool:
    """Whether something still happens, or nothing has to. The newest frame came at `last_frame`;
    a `broken` daemon decides nothing more.

    A request that waits while workers report, start, build, load or compute a prompt is not stuck
    in a way that a new daemon would mend; of the latter they report nothing before the end.
    """
    oldest = machine.oldest_progress()
    if oldest is None or now - max(oldest, last_frame) <= WATCHDOG_PATIENCE * progress_seconds:
        return not broken
    return any(
        not (instance.up or instance.quarantine)
        or isinstance(instance.job, BuildJob | PrefillJob)
        or instance.ledger.loading
        for instance in machine.instances.values()
    )
