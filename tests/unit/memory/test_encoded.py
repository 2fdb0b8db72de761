"""Master images that are encoded where they lie: fewer slabs, the same bytes, damage by name."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.exp7 import BLOCK_BYTES, VALUES
from appliance.memory import mapping
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferKind
from appliance.memory.vmm_host import HostVmm
from appliance.memory.weight_cache.encoded import EncodedImage, Exp7
from appliance.memory.weight_cache.pipeline import process_cpus
from appliance.memory.weights import (
    DeviceWeights,
    Image,
    ImageDamaged,
    StoredTensor,
    WeightLayout,
)

SLAB = 16 * mmap.PAGESIZE
SLABS = 24
CASES = settings(max_examples=40, deadline=None, derandomize=True)


def content(nbytes: int, noise: Sequence[int] = (), seed: int = 1) -> bytes:
    """bf16 weights, but for blocks of noise."""
    dice = np.random.default_rng(seed)
    words = (dice.standard_normal(-(-nbytes // 2)) * 0.02).astype(np.float32).view(np.uint32)
    numbers = (words >> 16).astype(np.uint16)
    for block in noise:
        numbers[block * VALUES :][:VALUES] = dice.integers(0, 1 << 16, VALUES, np.uint16)[
            : len(numbers[block * VALUES :][:VALUES])
        ]
    return numbers.tobytes()[:nbytes]


class Bench:
    """A host tier of which an image has slabs in a given order."""

    def __init__(self) -> None:
        self.host = HostTier.create(SLABS * SLAB)
        self.codec = Exp7(process_cpus())

    def image(self, order: Sequence[int]) -> Image:
        return Image([self.host.address(slab * SLAB, SLAB) for slab in order], SLAB)

    def encoded(self, plain: bytes, order: Sequence[int]) -> Image:
        """In the slabs that are left; all others have other owners now."""
        room = self.codec.slabs(len(plain), SLAB)
        image = self.image(order[:room])
        image.put(0, np.frombuffer(plain, np.uint8).ctypes.data, len(plain))
        taken = self.codec.encode(image, len(plain))
        for slab in order[taken:]:
            self.host.view(slab * SLAB, SLAB)[:] = b"\xa5" * SLAB
        return self.image(order[:taken])

    def decoded(self, image: Image, nbytes: int, to: Image | None = None) -> bytes:
        room = np.zeros(nbytes, np.uint8)
        transfer = Transfer(TransferKind.WEIGHTS, "m", nbytes, 0.0)
        self.codec.decode(image, nbytes, transfer, to or Image([room.ctypes.data], nbytes))
        assert transfer.landed == nbytes
        return room.tobytes()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.host.close()


@CASES
@given(
    nbytes=st.integers(1, 10 * BLOCK_BYTES),
    noise=st.lists(st.integers(0, 9), max_size=10),
    order=st.permutations(range(SLABS)),
    seed=st.integers(0, 1 << 20),
)
def test_an_image_comes_back(nbytes: int, noise: list[int], order: list[int], seed: int) -> None:
    """Any bytes in slabs anywhere, of which it never takes more than it was written to."""
    bench = Bench()
    plain = content(nbytes, noise, seed)

    image = bench.encoded(plain, order)

    assert bench.decoded(image, nbytes) == plain
    assert image.slabs <= bench.codec.slabs(nbytes, SLAB)
    if not noise and nbytes >= 8 * BLOCK_BYTES:
        assert image.slabs * SLAB < 0.85 * nbytes
    bench.host.close()


def test_it_is_decoded_to_slabs_anywhere(bench: Bench) -> None:
    """Where the target is in parts that end within a block."""
    plain = content(3 * BLOCK_BYTES + 77, [1])
    image = bench.encoded(plain, range(12))
    places = [23, 13, 21, 15, 19, 17, 14]

    bench.decoded(image, len(plain), bench.image(places))

    found = b"".join(bytes(bench.host.view(slab * SLAB, SLAB)) for slab in places)
    assert found[: len(plain)] == plain


@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_damaged_block_is_named(bench: Bench, block: int) -> None:
    """One bit of a block, wherever it lies: that one by its number and its bytes, no other."""
    plain = content(3 * BLOCK_BYTES + 500)
    image = bench.encoded(plain, range(SLABS))
    encoded = EncodedImage(image, len(plain))
    assert (encoded.blocks, list(encoded.damage())) == (4, [])
    offset = int(encoded._table["offset"][block]) + 99
    image.views(offset, 1)[0][0] ^= 32

    (found,) = encoded.damage()

    first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(plain)) - 1
    assert f"block {block} of 4, bytes {first} to {last} of the weights" in str(found)
    with pytest.raises(ImageDamaged, match=f"block {block} of 4"):
        bench.decoded(image, len(plain))


@pytest.mark.parametrize("byte", range(32))
def test_a_damaged_table_is_told(bench: Bench, byte: int) -> None:
    """Whatever part of an entry is wrong, nothing outside of the image is read for it."""
    plain = content(2 * BLOCK_BYTES)
    image = bench.encoded(plain, range(SLABS))
    image.views(image.slabs * SLAB - 32 + byte, 1)[0][0] ^= 0x80

    assert [str(found)[:14] for found in EncodedImage(image, len(plain)).damage()] == [
        "block 1 of 2, "
    ]


@pytest.mark.parametrize("byte", [0, 0xFF])
def test_a_table_that_is_gone_is_told(bench: Bench, byte: int) -> None:
    """Of every block, and no other error comes of it."""
    plain = content(3 * BLOCK_BYTES)
    image = bench.encoded(plain, range(SLABS))
    image.views(image.slabs * SLAB - 3 * 32, 3 * 32)[0][:] = bytes([byte]) * 3 * 32

    assert [str(found)[:14] for found in EncodedImage(image, len(plain)).damage()] == [
        f"block {block} of 3, " for block in range(3)
    ]
    with pytest.raises(ImageDamaged, match=r"of 3, bytes .* its entry in the table"):
        bench.decoded(image, len(plain))


def test_what_is_not_wanted_any_more_is_not_decoded(bench: Bench) -> None:
    """As every other `Write`, it ends soon after it was cancelled."""
    plain = content(2 * BLOCK_BYTES)
    image = bench.encoded(plain, range(SLABS))
    transfer = Transfer(TransferKind.WEIGHTS, "m", len(plain), 0.0)
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        bench.codec.decode(image, len(plain), transfer, bench.image(range(20, 24)))
    assert transfer.landed == 0


def test_weights_are_loaded_from_an_encoded_image(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """By the instance that filled it and by one that adopts it; what is damaged is read from the
    files."""
    plain = content(4 * BLOCK_BYTES)
    tensor = StoredTensor("a", "torch.bfloat16", (len(plain) // 2,), (1,), len(plain))
    arena = Arena(HostVmm(2 * 8, SLAB))
    swapper = Swapper(arena.vmm.stream)
    reads = []

    def write(transfer: Transfer, image: Image) -> None:
        reads.append(image)
        image.put(0, np.frombuffer(plain, np.uint8).ctypes.data, len(plain))
        transfer.land(len(plain) - transfer.landed)

    filling, adopting = (
        DeviceWeights(
            f"weights:{name}",
            WeightLayout.plan([tensor]),
            arena,
            bench.host,
            swapper,
            write,
            codec=bench.codec,
        )
        for name in ("m", "other")
    )
    places = [slab * SLAB for slab in (5, 3, 9, 1, 2, 8, 0, 7, 6)]
    assert (filling.region.slots, filling.host_slabs) == (8, 9)
    with pytest.raises(ValueError, match="9 slabs in 8 places"):
        filling.store(places[:8], fill=True)

    taken = filling.store(places, fill=True)
    assert taken == adopting.store(places[:taken], fill=False) == 6
    for weights in (filling, adopting):
        weights.begin_load().wait()
        assert bytes(_region(weights, len(plain))) == plain
        weights.evict()
    assert len(reads) == 1

    bench.host.view(places[0] + 5, 1)[0] ^= 1
    table = bench.host.view(places[taken - 1] + SLAB - 4 * 32, 4 * 32)
    for times, change in enumerate((bytes(table), bytes(4 * 32), b"\xff" * 4 * 32), 2):
        table[:] = change
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            adopting.begin_load().wait()
        assert bytes(_region(adopting, len(plain))) == plain
        assert len(reads) == times
        assert "weights:other is loaded from its files: block 0 of 4" in caplog.text
        adopting.evict()
    swapper.close()


def _region(weights: DeviceWeights, nbytes: int) -> memoryview:
    return mapping.view(weights.region.address, nbytes)
