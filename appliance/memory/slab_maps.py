"""Draws maps of slabs: of a pool from what is mapped and moved, of the host tier from its books.

A map is drawn at one moment during whatever is computed and copied, so it costs those nothing but
the lock of the arena for as long as it takes to copy its tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from appliance.memory.arena import Arena, Holding
from appliance.memory.ledger import HostLedger
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferKind
from appliance.vocabulary import SlabMap, SlabOwner

FREE: Final = SlabOwner(name="free")


def pool_map(arena: Arena, swapper: Swapper) -> SlabMap:
    """The pool of an instance. Safe to call from any thread; takes O(slabs + copies under way)."""
    under_way = swapper.under_way()
    holdings = arena.holdings()
    owned: list[tuple[SlabOwner, Iterable[int]]] = [
        (SlabOwner(name=one.owner), one.slabs.values()) for one in holdings
    ]
    regions = {one.owner: one for one in holdings}
    for transfer, copies in under_way:
        if (holding := regions.get(transfer.owner)) is not None:
            slots = _touched(transfer, copies, holding, arena.slab_bytes)
            slabs = [holding.slabs[slot] for slot in slots if slot in holding.slabs]
            owned.append((SlabOwner(name=transfer.owner, moving=True), slabs))
    return _drawn(arena.slabs, arena.slab_bytes, owned)


def host_map(host: HostLedger) -> SlabMap:
    """The host tier, as it is planned. O(runs) but for a fast search: the daemon draws it between
    its orders."""
    owners = [FREE]
    rows: list[tuple[int, int, int]] = []
    for name, held in host.rows().items():
        if held:
            rows += [(row.start, row.stop, len(owners)) for row in held]
            owners.append(SlabOwner(name=name))
    runs: list[tuple[int, int]] = []
    at = 0
    for first, end, place in [*sorted(rows), (host.total_slabs, host.total_slabs, 0)]:
        if at < first:
            runs.append((0, first - at))
        if first < end:
            runs.append((place, end - first))
        at = end
    return SlabMap(slab_bytes=host.slab_bytes, owners=tuple(owners), runs=tuple(runs))


def _touched(
    transfer: Transfer, copies: Iterable[Copy], holding: Holding, slab_bytes: int
) -> Iterable[int]:
    """Slots of a region where a transfer reads or writes, or will."""
    if transfer.kind is TransferKind.WEIGHTS:  # they land from the first to the last
        first = transfer.landed // slab_bytes
        return [slot for slot in holding.slabs if slot >= first]
    inwards = transfer.kind is TransferKind.KV_IN
    # Blocks side by side mostly lie in the same slabs of every layer.
    stretches: dict[tuple[int, int, int, int], None] = {}
    for copy in copies:
        begin = (copy.destination if inwards else copy.source) - holding.address
        pitch = copy.destination_pitch if inwards else copy.source_pitch
        if pitch % slab_bytes == 0:
            first, last = begin // slab_bytes, (begin + copy.nbytes - 1) // slab_bytes
            stretches[first, last, copy.rows, pitch // slab_bytes] = None
        else:
            for row in range(copy.rows):
                at = begin + row * pitch
                first, last = at // slab_bytes, (at + copy.nbytes - 1) // slab_bytes
                stretches[first, last, 1, 0] = None
    return _slots(stretches)


def _slots(stretches: Mapping[tuple[int, int, int, int], None]) -> Iterator[int]:
    for first, last, rows, pitch in stretches:
        for row in range(rows):
            yield from range(first + row * pitch, last + row * pitch + 1)


def _drawn(
    count: int, slab_bytes: int, owned: Iterable[tuple[SlabOwner, Iterable[int]]]
) -> SlabMap:
    """What has no owner is free; of several owners of a slab the last one is shown."""
    places: dict[SlabOwner, int] = {FREE: 0}
    drawn = array("H", bytes(2 * count))
    for owner, slabs in owned:
        place = places.setdefault(owner, len(places))
        for slab in slabs:
            drawn[slab] = place
    return SlabMap(
        slab_bytes=slab_bytes,
        owners=tuple(places),
        runs=tuple((place, len(list(run))) for place, run in groupby(drawn)),
    )
