"""Weights that come from the files to memory that the host cannot write to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.mapping import view
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed
from appliance.memory.vmm_host import HostVmm
from appliance.memory.weights import DeviceWeights, Image, StoredTensor, WeightLayout, Write
from tests.patience import PATIENCE_SECONDS

SLAB = 1 << 20
NBYTES = 9 * SLAB + 17
"""More than one piece of a copy, and no whole number of anything."""

CONTENT = bytes(range(251)) * (NBYTES // 251 + 1)


def write(transfer: Transfer, image: Image) -> None:
    """The whole content, as a checkpoint's threads would."""
    done = 0
    for part in image.views(0, NBYTES):
        part[:] = CONTENT[done : done + len(part)]
        done += len(part)
        transfer.land(len(part))


Staged = Callable[[Write], DeviceWeights]


@pytest.fixture
def staged() -> Iterator[Staged]:
    """Weights of `NBYTES` bytes that a function writes, over a pool that has room for them."""
    vmm, host = HostVmm(12, SLAB), HostTier.create(SLAB)
    arena = Arena(vmm)
    swapper = Swapper(vmm.stream)
    layout = WeightLayout.plan([StoredTensor("w", "uint8", (NBYTES,), (1,), NBYTES)])

    def make(write: Write) -> DeviceWeights:
        return DeviceWeights("weights:m", layout, arena, host, swapper, write, staged=True)

    yield make
    swapper.close()
    assert arena.free == 12
    host.close()
    vmm.close()


def test_staged_weights_arrive_whole(staged: Staged) -> None:
    """What lands is on the device, not merely read; and the write never saw the device."""
    begun = threading.Event()
    loads: list[Transfer] = []
    landed: list[int] = []
    written: list[range] = []

    def spying(transfer: Transfer, image: Image) -> None:
        assert begun.wait(PATIENCE_SECONDS)
        written.extend(range(start, start + size) for start, size in image.parts(0, NBYTES))
        write(transfer, image)
        landed.append(loads[0].landed)

    weights = staged(spying)
    loads.append(weights.begin_load())
    begun.set()
    loads[0].wait()

    assert bytes(view(weights.region.address, NBYTES)) == CONTENT[:NBYTES]
    assert landed == [0]
    assert not any(weights.region.address in part for part in written)
    weights.evict()


def test_a_cancelled_load_stops_reading(staged: Staged) -> None:
    """An eviction reaches whoever reads the files, and nothing lands."""

    def endless(transfer: Transfer, image: Image) -> None:
        while not transfer.cancelled:
            pass
        raise TransferCancelled("seen")

    weights = staged(endless)
    transfer = weights.begin_load()
    weights.evict()

    assert isinstance(transfer.error, TransferCancelled)
    assert transfer.landed == 0


def test_files_that_cannot_be_read_fail_the_load(staged: Staged) -> None:
    """With the reason, for whoever waits."""

    def broken(transfer: Transfer, image: Image) -> None:
        raise OSError("gone")

    weights = staged(broken)
    with pytest.raises(TransferFailed, match="gone"):
        weights.begin_load().wait()
    weights.evict()
