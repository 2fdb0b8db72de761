"""Weights on host memory: layout, a scattered master image, load and evict."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest

from appliance.memory import mapping
from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.hosttier import HostTier
from appliance.memory.vmm_host import HostVmm
from appliance.memory.weights import DeviceWeights, StoredTensor, WeightLayout

PAGE = mmap.PAGESIZE


def tensor(name: str, nbytes: int) -> StoredTensor:
    return StoredTensor(name, "torch.float32", (nbytes // 4,), (1,), nbytes)


def test_layout_is_aligned_and_in_order() -> None:
    """Storages begin at multiples of 256 bytes and do not overlap."""
    layout = WeightLayout.plan([tensor("a", 300), tensor("b", 256), tensor("c", 4)])
    assert layout.offsets == (0, 512, 768)
    assert layout.nbytes == 772
    assert layout.slabs(256) == 4


def test_digest_names_the_layout() -> None:
    """Every property that decides where bytes lie, and what they mean, changes the digest."""
    layout = WeightLayout.plan([tensor("a", 512)])
    (only,) = layout.tensors
    changes = (
        {"name": "b"},
        {"dtype": "torch.int32"},
        {"shape": (64, 2)},
        {"stride": (2,)},
        {"nbytes": 1024},
        {"packing": "blocks of 16"},
    )
    others = {WeightLayout.plan([replace(only, **change)]).digest for change in changes}
    assert len(others | {layout.digest}) == 7
    assert WeightLayout.plan([tensor("a", 512)]).digest == layout.digest


def test_load_brings_a_scattered_image() -> None:
    """The image's slabs may lie anywhere; on the device their bytes are in order."""
    arena = Arena(HostVmm(4, PAGE))
    host = HostTier.create(8 * PAGE)
    size = 2 * PAGE + 100
    content = bytes(i * 31 % 251 for i in range(size))
    weights = DeviceWeights("weights:m", WeightLayout.plan([tensor("a", size)]), arena, host)
    with pytest.raises(RuntimeError, match="no master image"):
        weights.begin_load()
    with pytest.raises(ValueError, match="3 slabs in 2 places"):
        weights.attach([0, PAGE])
    with pytest.raises(ValueError, match="outside"):
        weights.attach([0, PAGE, 8 * PAGE])
    weights.attach([6 * PAGE, 0, 3 * PAGE])

    _fill(weights, content)
    transfer = weights.begin_load()
    assert transfer.done
    assert transfer.landed == size
    assert weights.loaded
    assert weights.begin_load() is transfer
    assert bytes(mapping.view(weights.region.address, size)) == content
    assert bytes(host.view(6 * PAGE, PAGE)) == content[:PAGE]
    weights.evict()
    weights.evict()
    assert arena.free == 4
    assert not weights.loaded
    host.close()


def _fill(weights: DeviceWeights, content: bytes) -> None:
    """Write the image from private memory, in pieces that cross slab boundaries."""
    tier = HostTier.create(16 * PAGE)
    tier.view(0, len(content))[:] = content
    for start in range(0, len(content), 3000):
        size = min(3000, len(content) - start)
        weights.fill(start, tier.address(start, size), size)
    tier.close()


def test_exhausted_load_maps_nothing() -> None:
    """A load that does not fit leaves the pool as it was, and works once there is room."""
    arena = Arena(HostVmm(3, PAGE))
    host = HostTier.create(2 * PAGE)
    weights = DeviceWeights("weights:m", WeightLayout.plan([tensor("a", 2 * PAGE)]), arena, host)
    weights.attach([0, PAGE])
    other = arena.reserve("other", 2)
    other.map([0, 1])

    with pytest.raises(PoolExhausted):
        weights.begin_load()

    assert arena.free == 1
    assert not weights.loaded
    other.unmap([0, 1])
    assert weights.begin_load().landed == 2 * PAGE
    host.close()
