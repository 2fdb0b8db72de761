"""Weights on host memory: layout, a scattered master image, load and evict."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import CheckpointError
from appliance.memory import mapping, streams
from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Stream
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.memory.vmm_host import HostVmm
from appliance.memory.weights import DeviceWeights, Image, StoredTensor, WeightLayout
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.stream import StreamDouble

PAGE = mmap.PAGESIZE

both_sources = pytest.mark.parametrize("places", [[], [0, 2 * PAGE, PAGE]], ids=["files", "image"])
"""Where the master image is; without places loads read the files."""


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


@given(
    order=st.permutations(range(5)),
    spans=st.lists(st.tuples(st.integers(0, 5 * PAGE - 1), st.integers(1, 5 * PAGE)), max_size=8),
)
def test_an_image_is_in_order_wherever_it_lies(
    order: list[int], spans: list[tuple[int, int]]
) -> None:
    """What is written at an offset is read there, and its parts are as few as can be."""
    tier = HostTier.create(5 * PAGE)
    try:
        image = Image([tier.address(slab * PAGE, PAGE) for slab in order], PAGE)
        model = bytearray(5 * PAGE)
        for number, (offset, wanted) in enumerate(spans, start=1):
            size = min(wanted, 5 * PAGE - offset)
            text = ctypes.create_string_buffer(bytes([number]) * size, size)
            image.put(offset, ctypes.addressof(text), size)
            model[offset : offset + size] = text.raw
        assert b"".join(image.views(0, 5 * PAGE)) == model
        breaks = sum(after != before + 1 for before, after in pairwise(order))
        assert len(list(image.parts(0, 5 * PAGE))) == 1 + breaks
    finally:
        tier.close()


class Bench:
    """Weights of two and a half pages, and a `Write` that can be made to fail."""

    def __init__(self, stream: Callable[[str], Stream] | None = None) -> None:
        self.arena = Arena(HostVmm(4, PAGE))
        self.host = HostTier.create(8 * PAGE)
        self.swapper = Swapper(stream or self.arena.vmm.stream)
        self.content = bytes(i * 31 % 251 for i in range(2 * PAGE + 100))
        self.error: Exception | None = None
        self.writes = 0
        layout = WeightLayout.plan([tensor("a", len(self.content))])
        self.weights = DeviceWeights(
            "weights:m", layout, self.arena, self.host, self.swapper, self.write
        )

    def write(self, transfer: Transfer, image: Image) -> None:
        self.writes += 1
        for start in range(0, len(self.content), 3000):
            part = self.content[start : start + 3000]
            source = ctypes.create_string_buffer(part, len(part))
            image.put(start, ctypes.addressof(source), len(part))
            transfer.land(len(part))
            if transfer.cancelled:
                raise TransferCancelled("not wanted")
            if self.error is not None:
                raise self.error

    def on_device(self) -> bytes:
        return bytes(mapping.view(self.weights.region.address, len(self.content)))

    def check(self) -> None:
        """After `evict`: all slabs are free, and nothing is under way."""
        self.arena.check_integrity()
        assert self.arena.free == 4
        self.swapper.settle()
        assert self.swapper.pending == 0
        self.swapper.check_integrity()

    def end(self) -> None:
        self.weights.evict()
        self.check()
        self.swapper.close()
        self.host.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """All slabs are free again in the end, and no load is under way."""
    made = Bench()
    yield made
    made.end()


class HeldCopy:
    """Lets no copy within this process be done before `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._copy = mapping.copy
        monkeypatch.setattr(mapping, "copy", self.copy)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.reached.set()
        assert self.go_on.wait(PATIENCE_SECONDS)
        self._copy(destination, source, nbytes)


def test_load_brings_a_scattered_image(bench: Bench) -> None:
    """The image's slabs may lie anywhere; on the device their bytes are in order."""
    weights = bench.weights
    with pytest.raises(ValueError, match="3 slabs in 2 places"):
        weights.store([0, PAGE], fill=True)
    with pytest.raises(ValueError, match="outside"):
        weights.store([0, PAGE, 8 * PAGE], fill=True)
    weights.store([6 * PAGE, 0, 3 * PAGE], fill=True)
    assert weights.filling is not None
    assert weights.filling.landed == len(bench.content)
    transfer = weights.begin_load()
    transfer.wait()
    assert transfer.landed == len(bench.content)
    assert weights.loaded
    assert weights.begin_load() is transfer is weights.transfer
    assert bench.on_device() == bench.content
    assert bytes(bench.host.view(6 * PAGE, PAGE)) == bench.content[:PAGE]
    assert bench.writes == 1
    weights.evict()
    weights.evict()
    assert bench.arena.free == 4
    assert not weights.loaded
    assert weights.transfer is None


def test_weights_are_mapped_as_they_are_copied(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slabs are taken at once, so that no other model gets them; each part is mapped when the
    copies before it have been handed out."""
    monkeypatch.setattr("appliance.memory.weights.MAPPED_AHEAD_BYTES", PAGE)
    bench.weights.store([6 * PAGE, 0, 3 * PAGE], fill=True)
    steps: list[str] = []
    map_slab = bench.arena.vmm.map

    def noted(address: int, slab: int, count: int = 1) -> None:
        steps.append(f"map {count}")
        map_slab(address, slab, count)

    monkeypatch.setattr(bench.arena.vmm, "map", noted)
    region = bench.weights.region
    region.set_aside(range(region.slots))
    assert (bench.arena.free, steps) == (1, [])
    assert bench.weights.master is not None

    for copy in bench.weights._copies(bench.weights.master):
        mapping.copy(copy.destination, copy.source, copy.nbytes)
        steps.append("copy")

    assert steps == ["map 1", "copy"] * 3
    assert bench.on_device() == bench.content
    region.unmap(range(region.slots))


@pytest.mark.parametrize("stored", [True, False], ids=["from an image", "from files"])
def test_a_switch_maps_and_unmaps_nothing_itself(
    monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The thread that evicts one model and loads the next, and computes, leaves that to others;
    the weights of the next are right."""
    arena = Arena(HostVmm(30, PAGE))
    host, swapper = HostTier.create(60 * PAGE), Swapper(arena.vmm.stream)
    calls: list[tuple[str, int]] = []
    for name in ("map", "unmap"):
        real = getattr(arena.vmm, name)

        def noted(*args: int, name: str = name, real: Callable[..., None] = real) -> None:
            calls.append((name, threading.get_ident()))
            real(*args)

        monkeypatch.setattr(arena.vmm, name, noted)
    models = []
    for number, value in enumerate((11, 22)):
        content = bytes([value]) * (29 * PAGE + 5)

        def write(transfer: Transfer, image: Image, content: bytes = content) -> None:
            source = ctypes.create_string_buffer(content, len(content))
            image.put(0, ctypes.addressof(source), len(content))
            transfer.land(len(content))

        layout = WeightLayout.plan([tensor("a", len(content))])
        weights = DeviceWeights(f"weights:{number}", layout, arena, host, swapper, write)
        if stored:
            weights.store([(30 * number + i) * PAGE for i in range(30)], fill=True)
        models.append((weights, content))

    for weights, content in models * 2:
        weights.begin_load().wait()
        assert bytes(mapping.view(weights.region.address, len(content))) == content
        weights.evict()

    arena.settle()
    assert {name for name, _ in calls} == {"map", "unmap"}
    assert threading.get_ident() not in {thread for _, thread in calls}
    assert arena.free == 30
    arena.check_integrity()
    swapper.close()
    host.close()


def test_an_image_of_another_instance_is_not_filled(bench: Bench) -> None:
    """What lies in the tier is what comes onto the device."""
    for page, offset in enumerate((6 * PAGE, 0, 3 * PAGE)):
        bench.host.view(offset, PAGE)[:] = bytes([page]) * PAGE
    bench.weights.store([6 * PAGE, 0, 3 * PAGE], fill=False)
    bench.weights.begin_load().wait()
    assert bench.writes == 0
    assert bench.on_device() == bytes(PAGE) + b"\x01" * PAGE + b"\x02" * 100


def test_without_slabs_every_load_reads_the_files(bench: Bench) -> None:
    """An image can be given up and had again elsewhere; loads find their bytes every time."""
    for number, places in enumerate(([], [0, PAGE, 2 * PAGE], [], [5 * PAGE, 0, PAGE]), start=1):
        bench.weights.store(places, fill=True)
        bench.weights.begin_load().wait()
        assert bench.on_device() == bench.content
        assert bench.writes == number
        with pytest.raises(RuntimeError, match="on the device"):
            bench.weights.store([], fill=False)
        bench.weights.evict()
        bench.host.view(0, 8 * PAGE)[:] = bytes(8 * PAGE)


def test_a_fill_that_fails_leaves_no_image(bench: Bench) -> None:
    """The error is the one of the files, and no load takes half an image for a whole one."""
    bench.error = CheckpointError("model.safetensors was replaced")
    with pytest.raises(CheckpointError, match="replaced"):
        bench.weights.store([0, PAGE, 2 * PAGE], fill=True)
    assert bench.weights.filling is not None
    assert bench.weights.filling.done
    bench.error = None
    bench.weights.begin_load().wait()
    assert bench.writes == 2
    assert bench.on_device() == bench.content


def test_a_load_that_fails_can_be_evicted_and_begun_again(bench: Bench) -> None:
    """Who waits for it hears why; the slabs come back, and the next load is a new one."""
    bench.error = CheckpointError("model.safetensors was replaced")
    failed = bench.weights.begin_load()
    with pytest.raises(TransferFailed, match=r"weights:m: .* was replaced") as caught:
        failed.wait()
    assert caught.value.__cause__ is bench.error
    assert not bench.weights.loaded
    assert bench.weights.begin_load() is failed
    bench.weights.evict()
    bench.check()
    bench.error = None
    bench.weights.begin_load().wait()
    assert bench.on_device() == bench.content


def test_a_copy_from_the_image_that_fails_can_be_begun_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is heard as a failure of the files is, and the image is as good as before."""
    bench.weights.store([0, 2 * PAGE, PAGE], fill=True)
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "copy", broken_copy)
        failed = bench.weights.begin_load()
        with pytest.raises(TransferFailed, match="weights of weights:m: broken"):
            failed.wait()
    assert not bench.weights.loaded
    bench.weights.evict()
    bench.check()
    bench.weights.begin_load().wait()
    assert bench.on_device() == bench.content
    assert bench.writes == 1


def broken_copy(destination: int, source: int, nbytes: int) -> None:
    raise OSError("broken")


@both_sources
def test_a_load_is_reaped_once(bench: Bench, places: list[int]) -> None:
    """The worker is woken by its end and finds it; filling the image was none of the swapper's."""
    woken = threading.Event()
    bench.swapper.on_end = woken.set
    bench.weights.store(places, fill=True)
    assert (bench.swapper.pending, woken.is_set()) == (0, False)
    transfer = bench.weights.begin_load()
    assert (bench.swapper.pending, bench.swapper.is_over(transfer)) == (1, False)
    assert woken.wait(PATIENCE_SECONDS)

    assert bench.swapper.reap() == [transfer]
    assert bench.weights.begin_load() is transfer
    assert (bench.swapper.reap(), bench.swapper.is_over(transfer)) == ([], True)
    trace = transfer.trace()
    assert (trace.kind, trace.owner) == (TransferKind.WEIGHTS, "weights:m")
    assert trace.moved_bytes == len(bench.content)


def test_loads_from_images_take_turns_and_those_from_files_do_not() -> None:
    """Only a copy from memory is worth a place in the line of the stream."""
    stream = StreamDouble()
    stream.held = True
    bench = Bench(lambda name: stream)
    bench.weights.begin_load().wait()
    assert bench.on_device() == bench.content
    bench.weights.evict()
    bench.weights.store([0, 2 * PAGE, PAGE], fill=True)

    transfer = bench.weights.begin_load()
    assert (stream.line, bench.weights.loaded) == ([transfer], False)
    stream.end_all()
    assert bench.weights.loaded
    bench.end()


def test_evict_gives_up_a_load_that_has_not_begun() -> None:
    """What waits in line lands no byte, and the next load is another."""
    stream = StreamDouble()
    stream.held = True
    bench = Bench(lambda name: stream)
    bench.weights.store([0, 2 * PAGE, PAGE], fill=True)
    given_up = bench.weights.begin_load()
    bench.weights.evict()
    assert (given_up.done, given_up.landed) == (True, 0)
    assert isinstance(given_up.error, TransferCancelled)
    bench.check()

    transfer = bench.weights.begin_load()
    assert transfer is not given_up
    assert bench.swapper.pending == 1
    stream.end_all()
    assert bench.weights.loaded
    bench.end()


@both_sources
def test_evict_stops_a_load_and_waits_until_it_let_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, places: list[int]
) -> None:
    """No thread writes to the region when it is unmapped, and those who waited are told."""
    bench.weights.store(places, fill=True)
    held = HeldCopy(monkeypatch)
    transfer = bench.weights.begin_load()
    assert held.reached.wait(PATIENCE_SECONDS)
    cancelled, cancel = threading.Event(), transfer.cancel

    def cancel_and_tell() -> None:
        cancel()
        cancelled.set()

    monkeypatch.setattr(transfer, "cancel", cancel_and_tell)
    evicting = threading.Thread(target=bench.weights.evict)
    evicting.start()
    assert cancelled.wait(PATIENCE_SECONDS)
    assert evicting.is_alive()
    assert bench.arena.free == 1
    held.go_on.set()
    evicting.join(PATIENCE_SECONDS)
    assert bench.arena.free == 4
    assert bench.weights.transfer is None
    with pytest.raises(TransferCancelled):
        transfer.wait()
    assert 0 < transfer.landed < len(bench.content)
    assert not bench.swapper.is_over(transfer)
    bench.check()
    assert bench.swapper.is_over(transfer)


def test_a_copy_from_the_image_stops_at_the_next_piece(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch that is not wanted any more costs no more than the piece under way."""
    monkeypatch.setattr(streams, "pieces", partial(streams.pieces, piece_bytes=1000))
    bench.weights.store([0, 2 * PAGE, PAGE], fill=True)
    held = HeldCopy(monkeypatch)
    transfer = bench.weights.begin_load()
    assert held.reached.wait(PATIENCE_SECONDS)
    transfer.cancel()
    held.go_on.set()
    bench.weights.evict()
    assert transfer.landed == 1000
    with pytest.raises(TransferCancelled):
        transfer.wait()


def test_exhausted_load_maps_nothing(bench: Bench) -> None:
    """A load that does not fit leaves the pool as it was, and works once there is room."""
    other = bench.arena.reserve("other", 2)
    other.map([0, 1])
    with pytest.raises(PoolExhausted):
        bench.weights.begin_load()
    assert bench.arena.free == 2
    assert not bench.weights.loaded
    assert bench.swapper.pending == 0
    other.unmap([0, 1])
    bench.weights.begin_load().wait()
    assert bench.on_device() == bench.content
