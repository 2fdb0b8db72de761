"""Images on disk: written once, read instead of packing, never believed when they are wrong."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.checkpoints.safetensors import WeightFile
from appliance.errors import CheckpointError
from appliance.memory.host_tier import HostTier
from appliance.memory.transfers import Transfer, TransferCancelled, TransferKind
from appliance.memory.weight_cache import images
from appliance.memory.weight_cache.image_file import (
    PAGE_BYTES,
    UNIT_BYTES,
    Head,
    digest,
    image_name,
    prepare_folder,
)
from appliance.memory.weight_cache.image_writer import ImageWriter, Job, write_image
from appliance.memory.weight_cache.images import ImageFolder, KeptImage
from appliance.memory.weights import Image, StoredTensor, WeightLayout

SLAB = 64 << 10
CPUS = sorted(os.sched_getaffinity(0))
SIZES = (UNIT_BYTES + 100, UNIT_BYTES, 300_001)
"""Of the tensors: three units in all, with a gap between tensors and a last page in part."""


class WriterDouble(ImageWriter):
    """Keeps the jobs until it is told to write."""

    def __init__(self, host: HostTier) -> None:
        super().__init__(host)
        self.jobs: list[Job] = []

    def put(self, job: Job) -> None:
        self.jobs.append(job)


class Box:
    """A checkpoint, a folder for images, and a host tier with an image's places in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "images"
        prepare_folder(self.folder, ())
        self.file = folder / "model.safetensors"
        self.file.write_bytes(b"weights")
        tensors = [StoredTensor(str(n), "torch.uint8", (n,), (1,), n) for n in SIZES]
        self.layout = WeightLayout.plan(tensors)
        slabs = self.layout.slabs(SLAB)
        self.host = HostTier.create(slabs * SLAB)
        self.offsets = list(reversed(range(0, slabs * SLAB, SLAB)))
        self.image = Image([self.host.address(offset, SLAB) for offset in self.offsets], SLAB)
        self.writer = WriterDouble(self.host)
        self.content = b"".join(
            (bytes(i % 251 for i in range(1, 1009)) * (-(-size // 1008)))[:size]
            + bytes(-size % 256)
            for size in SIZES
        )[: self.layout.nbytes]
        self.packed = 0
        """How often the image was made from the checkpoint."""
        self.shelf = ImageFolder(self.folder, 0, self.writer).shelf("/models/m", "float32", 1)

    def pack(self, transfer: Transfer, image: Image) -> None:
        self.packed += 1
        for start, tensor in zip(self.layout.offsets, self.layout.tensors, strict=True):
            part = self.content[start : start + tensor.nbytes]
            source = ctypes.create_string_buffer(part, len(part))
            image.put(start, ctypes.addressof(source), len(part))
        if transfer.landed < transfer.nbytes:
            transfer.land(transfer.nbytes - transfer.landed)

    def kept(self, *, verify: bool = True, **made_from: object) -> KeptImage:
        """As an engine has it that was just built."""
        status = self.file.stat()
        file = WeightFile(self.file, status.st_size, status.st_mtime_ns, status.st_ino, ())
        key = {"dtype": "float32", **made_from}
        return KeptImage(self.shelf, key, self.layout, [file], self.pack, cpus=CPUS, verify=verify)

    def transfer(self) -> Transfer:
        return Transfer(TransferKind.WEIGHTS, "m", self.layout.nbytes, 0.0)

    def fill(self, kept: KeptImage) -> Transfer:
        """The image is made or read, over what other weights have left in its places."""
        self.host.view(0, self.host.nbytes)[:] = b"\xff" * self.host.nbytes
        transfer = self.transfer()
        kept(transfer, self.image)
        assert transfer.landed == self.layout.nbytes
        for start, tensor in zip(self.layout.offsets, self.layout.tensors, strict=True):
            found = b"".join(self.image.views(start, tensor.nbytes))
            assert found == self.content[start : start + tensor.nbytes]
        return transfer

    def first_start(self) -> None:
        """Packs, and leaves an image."""
        kept = self.kept()
        self.fill(kept)
        kept.keep(self.image, self.offsets)
        (job,) = self.writer.jobs
        assert write_image(job, self.host.fd)
        self.writer.jobs.clear()
        self.packed = 0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.host.close()


def names(box: Box) -> list[str]:
    return sorted(path.name for path in box.folder.iterdir())


def test_what_was_packed_is_read_the_next_time(box: Box) -> None:
    """Byte for byte, to other places, with zeros between tensors, and without packing."""
    box.first_start()
    assert names(box) == [image_name("/models/m", "float32", 0, 1)]

    kept = box.kept()
    box.offsets.sort()
    box.image = Image([box.host.address(offset, SLAB) for offset in box.offsets], SLAB)
    box.fill(kept)

    assert (box.packed, kept.packed) == (0, False)
    assert b"".join(box.image.views(0, box.layout.nbytes)) == box.content


def test_an_image_goes_to_memory_in_one_piece(box: Box) -> None:
    """As when weights are brought to the device without a master image."""
    box.first_start()
    target = ctypes.create_string_buffer(box.layout.nbytes)
    transfer = box.transfer()
    box.kept()(transfer, Image([ctypes.addressof(target)], box.layout.nbytes))
    assert target.raw == box.content
    assert box.packed == 0


def flip(at: Callable[[Head], int]) -> Callable[[Path, Head], None]:
    def damage(path: Path, head: Head) -> None:
        with path.open("r+b") as stream:
            stream.seek(at(head))
            (byte,) = stream.read(1)
            stream.seek(at(head))
            stream.write(bytes([byte ^ 0x10]))

    return damage


DAMAGES: dict[str, Callable[[Path, Head], None]] = {
    "magic": flip(lambda head: 0),
    "key": flip(lambda head: len(head.start) - 5),
    "digests": flip(lambda head: len(head.start) + 9),
    "first byte": flip(lambda head: head.image_offset),
    "a byte in the midst": flip(lambda head: head.image_offset + UNIT_BYTES + 12345),
    "last byte": flip(lambda head: head.file_bytes - 1),
    "truncated": lambda path, head: os.truncate(path, head.file_bytes - 1),
    "truncated to the key": lambda path, head: os.truncate(path, len(head.start)),
    "empty": lambda path, head: os.truncate(path, 0),
    "longer": lambda path, head: os.truncate(path, head.file_bytes + 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_image_is_packed_anew(
    box: Box, damage: Callable[[Path, Head], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, removed, and written again; the weights are right all the same."""
    box.first_start()
    kept = box.kept()
    damage(box.shelf.path, kept._head)

    box.fill(kept)

    assert (box.packed, kept.packed) == (1, True)
    assert str(box.shelf.path) in caplog.text
    assert names(box) == []
    box.first_start()
    box.fill(box.kept())
    assert box.packed == 0


@pytest.mark.parametrize("verify", [True, False])
def test_bytes_are_held_against_digests_where_files_are_verified(box: Box, verify: bool) -> None:
    """Else they are taken as those of a checkpoint are; what a file claims is looked at anyway."""
    box.first_start()
    changed = box.kept(verify=verify)
    flip(lambda head: head.file_bytes - 1)(box.shelf.path, changed._head)

    changed(box.transfer(), box.image)

    assert changed.packed == verify
    box.first_start()
    DAMAGES["truncated"](box.shelf.path, changed._head)
    changed(box.transfer(), box.image)
    assert changed.packed


def test_what_landed_before_the_damage_lands_once(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass may be computing with the first bytes when the last turn out to be wrong."""
    monkeypatch.setattr(images, "LANDED_BYTES", UNIT_BYTES)
    box.first_start()
    kept = box.kept()
    flip(lambda head: head.file_bytes - 1)(box.shelf.path, kept._head)
    landed: list[int] = []
    pack = box.pack

    def packing(transfer: Transfer, image: Image) -> None:
        landed.append(transfer.landed)
        pack(transfer, image)

    kept._write = packing
    transfer = box.fill(kept)
    assert landed == [2 * UNIT_BYTES]
    assert transfer.landed == transfer.nbytes


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"torch": "another"}])
def test_an_image_of_something_else_is_packed_anew(box: Box, change: dict[str, str]) -> None:
    """Made from other files, in another type, or by another version."""
    box.first_start()
    box.fill(box.kept(**change))
    assert box.packed == 1
    assert names(box) == []


def test_a_checkpoint_that_was_replaced_is_an_error(box: Box) -> None:
    """Whether or not its image is there: the same as without images."""
    box.first_start()
    kept = box.kept()
    box.file.write_bytes(b"others!")
    os.utime(box.file, ns=(0, 0))
    with pytest.raises(CheckpointError, match="replaced while it was served"):
        kept(box.transfer(), box.image)
    assert box.packed == 0


def test_a_cancelled_read_leaves_the_image(box: Box) -> None:
    """Nobody wants the bytes any more; that says nothing about the file."""
    box.first_start()
    transfer = box.transfer()
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        box.kept()(transfer, box.image)
    assert len(names(box)) == 1
    assert box.packed == 0


def test_what_left_the_host_cache_is_not_written(box: Box) -> None:
    """Places go to other weights or to KV before their turn comes: no byte of those is kept."""
    kept = box.kept()
    box.fill(kept)
    kept.keep(box.image, box.offsets)
    (job,) = box.writer.jobs
    box.host.view(box.offsets[-1], 8)[:] = b"somebody"
    with pytest.raises(LookupError, match="left the host cache"):
        write_image(job, box.host.fd)
    assert names(box) == []


def test_one_process_writes(box: Box) -> None:
    """Two instances, or a daemon that is not quite gone: who comes second lets the first go on."""
    kept = box.kept()
    box.fill(kept)
    kept.keep(box.image, box.offsets)
    (job,) = box.writer.jobs
    part = box.shelf.path.with_name(box.shelf.path.name + ".part")
    with part.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert not write_image(job, box.host.fd)
        prepare_folder(box.folder, ())
        assert names(box) == [part.name]
    assert write_image(job, box.host.fd)
    written = box.shelf.path.stat().st_mtime_ns
    assert not write_image(job, box.host.fd)
    assert box.shelf.path.stat().st_mtime_ns == written
    assert names(box) == [box.shelf.path.name]


def test_an_older_image_is_replaced(box: Box) -> None:
    """Whatever has the name of the image, if it is not the same."""
    kept = box.kept()
    box.fill(kept)
    kept.keep(box.image, box.offsets)
    box.shelf.path.write_bytes(b"something older")
    assert write_image(box.writer.jobs[0], box.host.fd)
    box.fill(box.kept())
    assert box.packed == 1


@contextmanager
def no_larger_files_than(nbytes: int) -> Iterator[None]:
    """For this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_process_writes_in_the_background(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    """The real writer: when the disk is full, that is said; when it is not, the image is there."""
    kept = box.kept()
    box.fill(kept)
    kept.keep(box.image, box.offsets)
    writer = ImageWriter(box.host)
    with no_larger_files_than(UNIT_BYTES):
        writer.put(box.writer.jobs[0])
        writer.join()
    assert names(box) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(box.shelf.path) in record.message
    assert "File too large" in record.message

    writer.put(box.writer.jobs[0])
    writer.join()
    assert names(box) == [box.shelf.path.name]
    assert len(caplog.records) == 1
    box.fill(box.kept())
    assert box.packed == 1


def test_a_folder_that_is_gone_is_said(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    """Weights come from the checkpoint, and the folder is named once they cannot be kept."""
    box.folder.rmdir()
    kept = box.kept()
    box.fill(kept)
    kept.keep(box.image, box.offsets)
    writer = ImageWriter(box.host)
    writer.put(box.writer.jobs[0])
    writer.join()
    (record,) = caplog.records
    assert str(box.folder) in record.message
    assert "No such file or directory" in record.message


def test_a_folder_is_cleared_of_what_is_not_needed(box: Box) -> None:
    """Images of other models, and what a crash left; never what is not ours."""
    box.first_start()
    wanted = box.shelf.path
    left = [wanted.with_name(name) for name in ("gone-0123.packed", "half-4567.packed.part")]
    left[0].write_bytes(wanted.read_bytes())
    left[1].write_bytes(b"")
    foreign = [wanted.with_name(name) for name in ("notes.txt", "luggage.packed")]
    for path in foreign:
        path.write_text("mine")
    prepare_folder(box.folder, {wanted.name})
    assert names(box) == sorted(path.name for path in (wanted, *foreign))


def test_every_rank_and_type_has_a_place_of_its_own() -> None:
    """And so have models in folders of the same name."""
    places = {
        image_name(*place)
        for place in [
            ("/a/m", "auto", 0, 1),
            ("/b/m", "auto", 0, 1),
            ("/a/m", "float32", 0, 1),
            ("/a/m", "auto", 0, 2),
            ("/a/m", "auto", 1, 2),
        ]
    }
    assert len(places) == 5
    assert all(name.startswith("m-") and name.endswith(".packed") for name in places)


CONTENT = bytes(i * i % 251 for i in range(5 * PAGE_BYTES + 77))


@given(cuts=st.sets(st.integers(1, 5), max_size=5))
def test_a_digest_does_not_depend_on_where_bytes_lie(cuts: set[int]) -> None:
    """In one piece or in several slabs, as on disk."""
    bounds = [0, *(cut * PAGE_BYTES for cut in sorted(cuts)), len(CONTENT)]
    views = [memoryview(CONTENT)[a:b] for a, b in pairwise(bounds)]
    assert digest(views) == digest([memoryview(CONTENT)])


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c[PAGE_BYTES : 2 * PAGE_BYTES] + c[:PAGE_BYTES] + c[2 * PAGE_BYTES :],
        lambda c: bytes(PAGE_BYTES) + c[PAGE_BYTES:],
        lambda c: c[:-1] + bytes([c[-1] ^ 1]),
        lambda c: c[:777] + bytes([c[777] ^ 128]) + c[778:],
        lambda c: c[:-1],
    ],
    ids=["pages swapped", "a page of zeros", "last bit", "a bit", "shorter"],
)
def test_a_digest_tells(change: Callable[[bytes], Any]) -> None:
    """What happens to files, it finds."""
    assert digest([memoryview(change(CONTENT))]) != digest([memoryview(CONTENT)])
