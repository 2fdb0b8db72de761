"""What a simulated box says of its load when its router polls it."""

from __future__ import annotations

from appliance.fleet.ranking import BoxLoad
from appliance.scheduling.machine import Machine
from appliance.vocabulary import ModelName


def box_load(machine: Machine, catalogue: frozenset[ModelName], now: float) -> BoxLoad:
    """As of `now`. O(models on devices + images + requests)."""
    resident: set[ModelName] = set()
    coming: set[ModelName] = set()
    free_slabs = 0
    for instance in machine.instances.values():
        ledger = instance.ledger
        resident.update([model for model in ledger.weights if model not in ledger.loading])
        coming.update(ledger.loading)
        coming.update([group.model for group in instance.groups])
        free_slabs += ledger.free_slabs
    waiting = [request.arrived for request in machine.requests.values() if not request.generated]
    return BoxLoad(
        catalogue=catalogue,
        resident=frozenset(resident),
        coming=frozenset(coming - resident),
        host=machine.weight_cache.whole,
        waiting=len(waiting),
        running=len(machine.requests) - len(waiting),
        queue_age_seconds=now - min(waiting, default=now),
        pool_free_bytes=free_slabs * machine.host.slab_bytes,
    )
