"""What a box has to do and what is where, by the machine's books: what a router of boxes asks.

The daemon answers `GET /api/load` with it, and the lab's boxes are polled with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from appliance.scheduling.lifecycle import Stage
from appliance.scheduling.machine import Machine
from appliance.vocabulary import ModelName

COMPUTED_STAGES: Final = frozenset({Stage.PREFILLING, Stage.RUNNING})
"""Those of a request that is computed now. In all others it waits."""
QUEUED_STAGES: Final = frozenset({Stage.UNPLACED, Stage.QUEUED})
"""Those of a request of which nothing was computed yet."""


class MachineLoad(NamedTuple):
    """Models by their own names; a model that is `resident` is not `coming`."""

    resident: frozenset[ModelName]
    """Their weights are whole on a device of an instance that is up."""
    coming: frozenset[ModelName]
    """They are loaded now, an operator wants them on a device, or queued requests wait for them."""
    host: frozenset[ModelName]
    """Their image in the host cache is whole."""
    waiting: int
    """Live requests that are not computed now."""
    waiting_by_model: Mapping[ModelName, int]
    """The same by model, without those of which none waits."""
    running: int
    """Those that are."""
    queue_age_seconds: float
    """How long the oldest queued request has waited; 0 if none is."""
    pool_free_bytes: int
    """Of the memory of all instances that are up, what neither weights nor KV hold."""
    requests_by_model: Mapping[ModelName, int]
    """Live requests by model, for models that have any."""
    asked_models: int
    """So many have any."""
    resident_models: int
    """How many are resident."""
    coming_models: int
    """How many are coming."""


def machine_load(machine: Machine, now: float) -> MachineLoad:
    """As of `now`. O(models on devices + images + live requests)."""
    resident: set[ModelName] = set()
    coming: set[ModelName] = set(machine.dispatcher.prefetcher.preloads)
    free_slabs = 0
    for instance in machine.instances.values():
        if instance.up:
            ledger = instance.ledger
            resident.update(ledger.weights.keys() - ledger.loading)
            coming |= ledger.loading
            free_slabs += ledger.free_slabs
    running, oldest = 0, now
    waiting: Counter[ModelName] = Counter()
    requests: Counter[ModelName] = Counter()
    for request in machine.requests.values():
        requests[request.model] += 1
        if request.stage in COMPUTED_STAGES:
            running += 1
        else:
            waiting[request.model] += 1
        if request.stage in QUEUED_STAGES:
            coming.add(request.model)
            oldest = min(oldest, request.arrived)
    return MachineLoad(
        resident=frozenset(resident),
        coming=frozenset(coming - resident),
        host=machine.weight_cache.whole,
        waiting=len(machine.requests) - running,
        waiting_by_model=waiting,
        running=running,
        queue_age_seconds=now - oldest,
        pool_free_bytes=free_slabs * machine.host.slab_bytes,
        requests_by_model=requests,
        asked_models=len(requests),
        resident_models=len(resident),
        coming_models=len(coming - resident),
    )
