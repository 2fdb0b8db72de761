"""Weights that are read from an image on disk if there is one, and leave one there if not.

Packing weights takes a CPU longer than reading them. So what was packed is kept, and read at the
next start as plain weights are: in parallel, in order, straight to its place. Whatever is wrong
with the file, the weights come from the checkpoint then, as without it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from appliance.checkpoints.adapters import AdapterPlace, AdapterRoom
from appliance.checkpoints.safetensors import WeightFile
from appliance.errors import CheckpointError
from appliance.memory.transfers import Transfer, TransferKind
from appliance.memory.weight_cache.image_file import (
    DIGEST_BYTES,
    UNIT_BYTES,
    Head,
    ImageRefused,
    digest,
    image_name,
)
from appliance.memory.weight_cache.image_writer import ImageWriter, Job
from appliance.memory.weight_cache.pipeline import make_pieces
from appliance.memory.weights import Image, WeightLayout, Write

LANDED_BYTES: Final = 8 << 20
"""What lands at a time: little, so that no thread is busy for long when the others are done."""

log = logging.getLogger("appliance.memory.weight_cache.images")


class Shelf(NamedTuple):
    """The place of one engine's image, and who writes it there."""

    path: Path
    writer: ImageWriter

    def clear(self) -> None:
        """No image is kept here any more. That there is none, or that it stays, does not matter."""
        with contextlib.suppress(OSError):
            self.path.unlink()


@dataclass(frozen=True)
class ImageFolder:
    """Where one rank of an instance keeps images, and who writes them."""

    path: Path
    rank: int
    writer: ImageWriter

    def shelf(
        self,
        checkpoint: str,
        dtype: str,
        ranks: int,
        adapters: Sequence[AdapterPlace] = (),
        room: AdapterRoom | None = None,
        embedding_task: str = "",
    ) -> Shelf:
        """The place for the image of a model in a configured type, with the adapters that it begins
        with and the room for others, and with that of a task."""
        paths = [adapter.path for adapter in adapters]
        name = image_name(checkpoint, dtype, self.rank, ranks, paths, room, embedding_task)
        return Shelf(self.path / name, self.writer)


class KeptImage:
    """The image of one engine: an `appliance.memory.weights.Write` in front of another one."""

    def __init__(
        self,
        shelf: Shelf,
        made_from: Mapping[str, object],
        layout: WeightLayout,
        checkpoint: Sequence[WeightFile],
        write: Write,
        *,
        cpus: Collection[int],
        verify: bool,
    ) -> None:
        """`write` makes the image from the checkpoint's files; `made_from` is whatever decides its
        bytes, in JSON's types. With `verify`, what is read is held against its digests."""
        self.packed = False
        """Whether the last image was made, rather than read."""
        self._shelf = shelf
        self._head = Head.of(made_from, layout.nbytes)
        self._layout = layout
        self._checkpoint = tuple(checkpoint)
        self._write = write
        self._cpus = cpus
        self._verify = verify

    def __call__(self, transfer: Transfer, image: Image) -> None:
        """Raises `CheckpointError` for a checkpoint that is not what it was, and whatever the
        other `Write` raises."""
        self.packed = False
        if not self._read(transfer, image):
            self._write(transfer, image)
            self.packed = True

    def keep(self, image: Image, host_offsets: Sequence[int]) -> None:
        """Have the image that was made last, in slabs at these places of the host tier, written to
        the disk in the background. Once this returns, the slabs may go to others: what is not the
        image any more is not written."""
        # What lies between tensors is what was there before.
        spans = zip(self._layout.offsets, self._layout.tensors, strict=True)
        bounds = [(start, start + tensor.nbytes) for start, tensor in spans]
        for (_, end), (start, _) in pairwise(bounds):
            for view in image.views(end, start - end):
                view[:] = bytes(len(view))
        summing = _Summing(self._head, image)
        summed = Transfer(TransferKind.WEIGHTS, "digests", self._head.nbytes, time.monotonic())
        make_pieces(_spans(self._head), summed, lambda: summing, self._cpus)
        path, digests = str(self._shelf.path), bytes(summing.digests)
        self._shelf.writer.put(Job(path, self._head, digests, image.slab_bytes, list(host_offsets)))

    def _read(self, transfer: Transfer, image: Image) -> bool:
        """Bring the image from its file; False if that is none."""
        path = self._shelf.path
        with ExitStack() as stack:
            for source in self._checkpoint:
                stack.enter_context(source.open())
            try:
                file, fd, digests = stack.enter_context(self._head.opened(path))
                expected = digests if self._verify else None
                make_pieces(
                    _spans(self._head),
                    transfer,
                    lambda: _Reading(self._head, file, fd, expected, image),
                    self._cpus,
                )
            except FileNotFoundError:
                return False
            except (ImageRefused, CheckpointError, OSError) as error:
                log.warning("packing anew, as %s is not used: %s", path, error)
                self._shelf.clear()
                return False
        return True


class _Span(NamedTuple):
    """A piece of the image."""

    offset: int
    nbytes: int

    def units(self) -> Iterator[tuple[int, int, slice]]:
        """Offset and size of each of its units, and where among the digests theirs is."""
        for start in range(self.offset, self.offset + self.nbytes, UNIT_BYTES):
            place = start // UNIT_BYTES * DIGEST_BYTES
            size = min(UNIT_BYTES, self.offset + self.nbytes - start)
            yield start, size, slice(place, place + DIGEST_BYTES)


def _spans(head: Head) -> list[_Span]:
    return [
        _Span(start, min(LANDED_BYTES, head.nbytes - start))
        for start in range(0, head.nbytes, LANDED_BYTES)
    ]


class _Reading:
    """Reads an image from its open file, straight to its place. Without digests, whatever is in a
    file that is as long as it should be is taken for right, as it is of a checkpoint."""

    def __init__(
        self, head: Head, file: WeightFile, fd: int, digests: bytes | None, image: Image
    ) -> None:
        self._first = head.image_offset
        self._file = file
        self._fd = fd
        self._digests = digests
        self._image = image

    def announce(self, piece: _Span) -> None:
        self._file.read_ahead(self._fd, self._first + piece.offset, piece.nbytes)

    def make(self, piece: _Span) -> None:
        if self._digests is None:
            views = self._image.views(piece.offset, piece.nbytes)
            self._file.read_into(self._fd, views, self._first + piece.offset)
            return
        for start, size, place in piece.units():
            views = self._image.views(start, size)
            self._file.read_into(self._fd, views, self._first + start)
            if digest(views) != self._digests[place]:
                raise ImageRefused(f"it is damaged within {size} bytes at {self._first + start}")


class _Summing:
    """Takes the digests of an image; for all threads."""

    def __init__(self, head: Head, image: Image) -> None:
        self.digests = bytearray(head.units * DIGEST_BYTES)
        self._image = image

    def announce(self, piece: _Span) -> None:
        """It is in memory."""

    def make(self, piece: _Span) -> None:
        for start, size, place in piece.units():
            self.digests[place] = digest(self._image.views(start, size))
