"""Models and KV that come and go on a device, checked by fingerprints after every move."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from appliance.memory.arena import Arena, PoolExhausted, Region
from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer, TransferKind
from tests.devices.bench import Bench

Fingerprint = Callable[[int, int], int]

POOL_SLABS = 12
MODELS = {"a": 5, "b": 3, "c": 6}
"""Slabs of their weights: no two of them fit beside the KV and another."""
KV_BYTES = 96 * 1024
REQUESTS = 5


class Floor:
    """Three models in the host tier, five requests' KV, and a pool that is too small for all."""

    def __init__(self, bench: Bench, fingerprint: Fingerprint, host: Fingerprint) -> None:
        self.bench = bench
        self.fingerprint = fingerprint
        self.arena = Arena(bench.vmm(POOL_SLABS))
        vmm = self.arena.vmm
        self.streams = {kind: vmm.stream(f"swap-{kind}") for kind in TransferKind}
        dice = random.Random(1)
        size = bench.slab_bytes
        self.images: dict[str, tuple[Region, int, int]] = {}  # region, host address, fingerprint
        offset = 0
        for name, slabs in MODELS.items():
            bench.host.view(offset, slabs * size)[:] = dice.randbytes(slabs * size)
            place = bench.host.address(offset, slabs * size)
            region = self.arena.reserve(name, slabs)
            self.images[name] = (region, place, host(place, slabs * size))
            offset += slabs * size
        self.kv = self.arena.reserve("kv", 1)
        self.kv.map([0])
        self.parked = [bench.host.address(offset + i * KV_BYTES, KV_BYTES) for i in range(REQUESTS)]
        self.prints: list[int] = []
        for i, place in enumerate(self.parked):
            bench.host.view(offset + i * KV_BYTES, KV_BYTES)[:] = dice.randbytes(KV_BYTES)
            self.prints.append(host(place, KV_BYTES))

    def start(
        self, kind: TransferKind, copies: list[Copy], needs: tuple[Transfer, ...] = ()
    ) -> Transfer:
        transfer = Transfer(kind, "m", sum(c.nbytes * c.rows for c in copies), time.monotonic())
        self.streams[kind].run(transfer, copies, needs=needs)
        return transfer

    def load(self, name: str) -> Transfer:
        region, place, _ = self.images[name]
        size = self.arena.slab_bytes
        return self.start(
            TransferKind.WEIGHTS,
            [Copy(region.slot_address(i), place + i * size, size) for i in range(region.slots)],
        )

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        for region, _, _ in self.images.values():
            region.release()
        self.kv.release()
        self.arena.check_integrity()
        assert self.arena.free == POOL_SLABS


class SwapConformance:
    """Tests for fixtures `bench`, `fingerprint` (of device memory) and `host_fingerprint`."""

    rounds = 40

    @pytest.fixture
    def swaps(
        self, bench: Bench, fingerprint: Fingerprint, host_fingerprint: Fingerprint
    ) -> Iterator[Floor]:
        floor = Floor(bench, fingerprint, host_fingerprint)
        yield floor
        floor.close()

    def test_swaps_keep_every_byte(self, swaps: Floor) -> None:
        """Whatever model comes and whichever KV goes and returns: the bytes are the same."""
        dice = random.Random(2)
        size = swaps.arena.slab_bytes
        for _ in range(self.rounds):
            name = dice.choice(list(MODELS))
            region, _, expected = swaps.images[name]
            try:
                if not region.mapped:
                    region.map(range(region.slots))
            except PoolExhausted:
                for other, _, _ in swaps.images.values():
                    other.unmap(range(other.mapped))
                region.map(range(region.slots))
            weights = swaps.load(name)
            request = dice.randrange(REQUESTS)
            block = swaps.kv.address + dice.randrange(size // KV_BYTES) * KV_BYTES
            came = swaps.start(TransferKind.KV_IN, [Copy(block, swaps.parked[request], KV_BYTES)])
            came.wait()
            assert swaps.fingerprint(block, KV_BYTES) == swaps.prints[request]
            # It goes out and comes back elsewhere at once; only `needs` keeps these two apart.
            other = swaps.kv.address + dice.randrange(size // KV_BYTES) * KV_BYTES
            went = swaps.start(TransferKind.KV_OUT, [Copy(swaps.parked[request], block, KV_BYTES)])
            copies = [Copy(other, swaps.parked[request], KV_BYTES)]
            swaps.start(TransferKind.KV_IN, copies, needs=(went,)).wait()
            assert swaps.fingerprint(other, KV_BYTES) == swaps.prints[request]
            weights.wait()
            assert swaps.fingerprint(region.address, region.slots * size) == expected
        for request, place in enumerate(swaps.parked):
            block = swaps.kv.address
            swaps.start(TransferKind.KV_IN, [Copy(block, place, KV_BYTES)]).wait()
            assert swaps.fingerprint(block, KV_BYTES) == swaps.prints[request]

    def test_a_fingerprint_sees_a_changed_byte(self, swaps: Floor) -> None:
        """What the test above relies on: one wrong byte on the device is another fingerprint."""
        region, _, expected = swaps.images["b"]
        size = region.slots * swaps.arena.slab_bytes
        region.map(range(region.slots))
        swaps.load("b").wait()
        assert swaps.fingerprint(region.address, size) == expected
        old = swaps.bench.read(swaps.arena.vmm, region.address + size - 1, 1)
        swaps.bench.write(swaps.arena.vmm, region.address + size - 1, bytes([old[0] ^ 1]))

        assert swaps.fingerprint(region.address, size) != expected
