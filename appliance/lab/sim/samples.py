"""What a box held and how much of it was in use, looked at now and then in a run.

A look costs nothing between looks; so peaks are those of the looks, as with a metric that is
scraped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from appliance.lab.sim.instance_memory import Holdings
from appliance.scheduling.machine import Machine
from appliance.vocabulary import InstanceClass, InstanceId

LOOKS = 600
"""In a run, evenly spread."""

KvUse: TypeAlias = Mapping[int, tuple[int, int]]
"""By the bytes of a block: bytes of the blocks in use, and of the slabs they lie in."""


class Sample(NamedTuple):
    """One look. Instances are in their order; their bytes are those of each of their GPUs."""

    at: float
    with_work: int
    """Instances with requests."""
    opened: int
    """Instances that take requests: all that the policy does not park."""
    weights: tuple[int, ...]
    kv: tuple[int, ...]
    """Slabs of KV."""
    device: KvUse
    """Of all GPUs together."""
    host_weights: int
    host: KvUse


def look(
    at: float, machine: Machine, holdings: Mapping[InstanceId, Holdings], slab_bytes: int
) -> Sample:
    """Look at a box. O(engines)."""
    states = machine.instances.values()
    return Sample(
        at=at,
        with_work=sum([not state.idle for state in states]),
        opened=sum([state.instance_class is not InstanceClass.PARKED for state in states]),
        weights=tuple([held.weight_slabs * slab_bytes for held in holdings.values()]),
        kv=tuple([held.kv_slabs * slab_bytes for held in holdings.values()]),
        device=_together(held.kv_use() for held in holdings.values()),
        host_weights=machine.host.weight_slabs * slab_bytes,
        host=machine.host.kv_use(),
    )


def mapped_bytes(use: KvUse) -> int:
    """Of the slabs of all shapes."""
    return sum(mapped for _, mapped in use.values())


def fragmentation(uses: Sequence[KvUse]) -> float:
    """Unused / peak allocated (Aegaeon §7.3), averaged over the looks; 0 if nothing was ever
    allocated, NaN without a look."""
    if not uses:
        return float("nan")
    peak = max(map(mapped_bytes, uses))
    unused = sum(mapped - used for use in uses for used, mapped in use.values())
    return unused / peak / len(uses) if peak else 0.0


def by_shape(uses: Sequence[KvUse]) -> dict[int, float]:
    """The fragmentation of each shape that was ever there."""
    shapes = sorted({shape for use in uses for shape in use})
    alone = {shape: [{shape: use.get(shape, (0, 0))} for use in uses] for shape in shapes}
    return {shape: fragmentation(its) for shape, its in alone.items()}


def _together(uses: Iterable[KvUse]) -> KvUse:
    found: dict[int, tuple[int, int]] = {}
    for use in uses:
        for shape, (used, mapped) in use.items():
            before = found.get(shape, (0, 0))
            found[shape] = (before[0] + used, before[1] + mapped)
    return found


def times(seconds: float) -> Iterator[float]:
    """When to look in a run of so many seconds; the last time is its end."""
    yield from (seconds * look / LOOKS for look in range(1, LOOKS))
    yield seconds
