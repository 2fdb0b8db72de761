"""Maps of slabs: whose each one is, where something moves, and that none is left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from appliance.memory.arena import Arena
from appliance.memory.ledger import HostLedger
from appliance.memory.slab_maps import host_map, pool_map
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import TransferKind
from appliance.vocabulary import SlabMap
from tests.unit.doubles.memory import RecordingVmm
from tests.unit.doubles.stream import StreamDouble

SLAB = 10


def drawn(slabs: SlabMap) -> str:
    """A letter for each slab: that of its owner's model, large where something moves."""
    text = ""
    for place, count in slabs.runs:
        owner = slabs.owners[place]
        letter = owner.name.rpartition(":")[2][0] if owner.name != "free" else "."
        text += (letter.upper() if owner.moving else letter) * count
    return text


def swapper() -> tuple[Swapper, StreamDouble]:
    """All of its transfers are held until the test ends them."""
    stream = StreamDouble()
    stream.held = True
    return Swapper(lambda name: stream), stream


def test_every_slab_has_its_place_in_the_map() -> None:
    """In the order of addresses, whatever the order of the regions and of their slots."""
    arena = Arena(RecordingVmm(9))
    a, b = arena.reserve("weights:a", 3), arena.reserve("kv:b", 9)
    b.map([4])
    a.map(range(3))
    b.map([0, 1, 7])
    b.unmap([4])

    slabs = pool_map(arena, swapper()[0])

    assert drawn(slabs) == ".aaabbb.."
    assert slabs.slab_bytes == SLAB
    assert {owner.name for owner in slabs.owners} == {"free", "weights:a", "kv:b"}


@pytest.mark.parametrize(
    ("landed", "found"), [(0, "AAA."), (9, "AAA."), (20, "aaA."), (30, "aaa.")]
)
def test_weights_that_landed_move_no_more(landed: int, found: str) -> None:
    """They come from the first byte to the last; a slab is whole when its last byte is there."""
    arena = Arena(RecordingVmm(4))
    arena.reserve("weights:a", 3).map(range(3))
    swaps, stream = swapper()
    transfer = swaps.start(TransferKind.WEIGHTS, "weights:a", iter([]), nbytes=30)
    transfer.land(landed)

    assert drawn(pool_map(arena, swaps)) == found
    stream.end_all()
    assert drawn(pool_map(arena, swaps)) == "aaa."


@pytest.mark.parametrize("kind", [TransferKind.KV_IN, TransferKind.KV_OUT])
@pytest.mark.parametrize(
    ("offset", "nbytes", "rows", "pitch", "found"),
    [
        (0, 4, 1, 0, "Kkkkkkkk"),
        (6, 10, 1, 0, "KKkkkkkk"),
        (10, 10, 1, 0, "kKkkkkkk"),
        (12, 4, 3, 30, "kKkkKkkK"),  # a block of three layers
        (8, 4, 2, 45, "KKkkkKkk"),
    ],
)
def test_kv_on_its_way_is_reported(
    kind: TransferKind, offset: int, nbytes: int, rows: int, pitch: int, found: str
) -> None:
    """All slabs that a block of it touches, in every layer, on the side of the device."""
    arena = Arena(RecordingVmm(8))
    region = arena.reserve("kv:k", 8)
    region.map(range(8))
    at, host = region.address + offset, 7_000_000
    if kind is TransferKind.KV_IN:
        copy = Copy(at, host, nbytes, rows, pitch, nbytes)
    else:
        copy = Copy(host, at, nbytes, rows, nbytes, pitch)
    swaps, stream = swapper()
    swaps.start(kind, "kv:k", [copy, copy], nbytes=2 * nbytes * rows)

    assert drawn(pool_map(arena, swaps)) == found
    stream.end_all()
    assert drawn(pool_map(arena, swaps)) == "kkkkkkkk"


def test_a_transfer_of_an_owner_without_slabs_is_left_out() -> None:
    """Its slabs are gone already, or never were of this pool."""
    arena = Arena(RecordingVmm(2))
    region = arena.reserve("kv:k", 4)
    region.map([0])
    swaps, _ = swapper()
    copies: Sequence[Copy] = [Copy(region.slot_address(2), 0, SLAB)]
    swaps.start(TransferKind.KV_IN, "kv:k", copies, nbytes=SLAB)
    swaps.start(TransferKind.KV_IN, "kv:other", copies, nbytes=SLAB)

    assert drawn(pool_map(arena, swaps)) == "k."


def test_the_host_tier() -> None:
    """Weights from its start, KV by the size of its blocks from its end; also a run of slabs that
    is taken for one block, and one that is used in part."""
    host = HostLedger(10 * SLAB, SLAB)
    host.take_weights("a", 2)
    host.take_weights("b", 1)
    host.give_weights("a")
    host.take_blocks(4, 3)
    host.take_blocks(15, 1)

    slabs = host_map(host)

    assert [(slabs.owners[place].name, count) for place, count in slabs.runs] == [
        ("free", 2), ("weights:b", 1), ("free", 3), ("kv:15", 2), ("kv:4", 2)
    ]  # fmt: skip
