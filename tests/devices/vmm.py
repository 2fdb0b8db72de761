"""What a `Vmm` does, whatever its memory is."""

from __future__ import annotations

import pytest

from appliance.memory.arena import Arena, PoolExhausted
from tests.devices.bench import Bench


class VmmConformance:
    """Tests for a fixture `bench`."""

    def test_content_follows_the_slab(self, bench: Bench) -> None:
        """A slab is memory; an address is only where it shows."""
        vmm, size = bench.vmm(2), bench.slab_bytes
        base = vmm.reserve(3 * size)
        vmm.map(base, 1)
        bench.write(vmm, base, b"hello")
        vmm.unmap(base)
        vmm.map(base + 2 * size, 1)

        assert bench.read(vmm, base + 2 * size, 5) == b"hello"
        vmm.unmap(base + 2 * size)
        vmm.release(base, 3 * size)

    def test_a_run_of_slabs_is_one_piece_of_memory(self, bench: Bench) -> None:
        """Slabs mapped by one call follow each other, and are unmapped one by one or together."""
        vmm, size = bench.vmm(4), bench.slab_bytes
        base = vmm.reserve(8 * size)
        vmm.map(base, 1, 3)
        bench.write(vmm, base + size - 3, b"border")
        vmm.unmap(base + size)
        vmm.map(base + 4 * size, 2)
        assert bench.read(vmm, base + 4 * size, 3) == b"der"
        vmm.map(base + size, 0)
        vmm.unmap(base, 3)
        vmm.map(base, 1)

        assert bench.read(vmm, base + size - 3, 3) == b"bor"
        vmm.release(base, 8 * size)

    def test_release_takes_what_is_mapped_along(self, bench: Bench) -> None:
        """A range given back with slabs in it leaves them for others to map."""
        vmm, size = bench.vmm(2), bench.slab_bytes
        base = vmm.reserve(2 * size)
        vmm.map(base, 0, 2)
        bench.write(vmm, base + size, b"kept")
        vmm.release(base, 2 * size)
        again = vmm.reserve(size)
        vmm.map(again, 1)

        assert bench.read(vmm, again, 4) == b"kept"
        vmm.release(again, size)

    def test_copies_in_every_direction(self, bench: Bench) -> None:
        """Host to device, device to device, device to host, of odd sizes at odd addresses."""
        vmm, size = bench.vmm(2), bench.slab_bytes
        base = vmm.reserve(2 * size)
        vmm.map(base, 0, 2)
        data = bytes(range(256)) * 41 + b"odd"
        bench.write(vmm, base + 3, data)
        vmm.copy(base + size + 17, base + 3, len(data))
        vmm.copy(base, base + size, 0)

        assert bench.read(vmm, base + size + 17, len(data)) == data
        first, second = bench.host.address(1, len(data)), bench.host.address(1 << 20, len(data))
        bench.host.view(1, len(data))[:] = data
        vmm.copy(second, first, len(data))
        assert bench.host.view(1 << 20, len(data)) == data
        vmm.release(base, 2 * size)

    @pytest.mark.parametrize(("slab", "count"), [(-1, 1), (2, 1), (1, 2), (0, 0), (0, -1)])
    def test_only_slabs_it_has_are_mapped(self, bench: Bench, slab: int, count: int) -> None:
        """A slab that does not exist is refused by its number, with nothing mapped."""
        vmm, size = bench.vmm(2), bench.slab_bytes
        base = vmm.reserve(4 * size)
        with pytest.raises(ValueError, match=r"slab -?\d+ is not one of 2"):
            vmm.map(base, slab, count)
        vmm.map(base, 0, 2)
        vmm.release(base, 4 * size)

    @pytest.mark.parametrize(("slabs", "excess"), [(0, 0), (-1, 0), (1, 1), (1, -1)])
    def test_impossible_pools(self, bench: Bench, slabs: int, excess: int) -> None:
        """A size that cannot be mapped is refused with what it has to be."""
        with pytest.raises(ValueError, match=r"at least one slab|not a multiple of"):
            bench.vmm(slabs, bench.slab_bytes + excess)

    def test_close_can_be_repeated(self, bench: Bench) -> None:
        """Closing a pool twice is closing it once."""
        vmm = bench.vmm(1)
        vmm.close()
        vmm.close()

    def test_arena_over_it(self, bench: Bench) -> None:
        """Regions of an arena hold their bytes while others come and go; too much is an answer."""
        arena, size = Arena(bench.vmm(4)), bench.slab_bytes
        first, second = arena.reserve("first", 4), arena.reserve("second", 4)
        first.map([0, 2])
        bench.write(arena.vmm, first.slot_address(2), b"first")
        second.map([3])
        with pytest.raises(PoolExhausted):
            second.map([0, 1])
        first.unmap([0])
        second.map([0, 1])
        bench.write(arena.vmm, second.slot_address(1) - 2, b"second")

        assert bench.read(arena.vmm, first.slot_address(2), 5) == b"first"
        assert bench.read(arena.vmm, second.slot_address(1) - 2, 6) == b"second"
        assert arena.usage() == {"first": 1, "second": 3, "free": 0}
        first.release()
        second.release()
        arena.check_integrity()
        assert arena.free == 4
        assert size == arena.slab_bytes
