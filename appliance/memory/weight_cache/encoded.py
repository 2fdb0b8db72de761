"""Master images that are encoded (`appliance.kernels.exp7`), in fewer slabs than plain ones.

    block 0 | block 1 | ... | not used | the blocks' table | end of the last slab

The plain image is written first, and then encoded where it lies, from its first block on: no block
becomes larger, so none is written over before it was read. What is left over at the end goes back
to the ledger. Any process that knows the slabs finds the table, and with it every block.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from appliance.kernels.exp7 import (
    BLOCK_BYTES,
    ENTRY,
    Bytes,
    Damaged,
    Decoder,
    Encoded,
    Encoder,
    Table,
    check,
)
from appliance.memory.transfers import Transfer
from appliance.memory.weight_cache.pipeline import THREADS, make_pieces
from appliance.memory.weights import Image, ImageDamaged

PIECE_BLOCKS: Final = 8
"""What one thread decodes at a time: a MiB, the grain in which weights land."""


class Exp7:
    """Encodes master images and decodes them: an `appliance.memory.weights.MasterCodec`."""

    def __init__(self, cpus: Collection[int]) -> None:
        """`cpus` are those that threads may run on."""
        self._cpus = cpus

    def slabs(self, nbytes: int, slab_bytes: int) -> int:
        """The most that an image of `nbytes` plain bytes takes, which it does until it is
        encoded."""
        return -(-(nbytes + _table_bytes(nbytes)) // slab_bytes)

    def encode(self, image: Image, nbytes: int) -> int:
        """Encode a plain image where it lies; how many of its slabs it takes from now on."""
        table = np.zeros(_blocks(nbytes), ENTRY)
        end = 0
        threads = min(THREADS, len(self._cpus), len(table))
        with ThreadPoolExecutor(threads, initializer=self._spread) as pool:
            for first in range(0, len(table), threads):
                batch = range(first, min(first + threads, len(table)))
                plain = [_read(image, block * BLOCK_BYTES, _size(nbytes, block)) for block in batch]
                for block, found in zip(batch, pool.map(_encode, plain), strict=True):
                    found.enter(table, block, end)
                    image.put(end, found.data.ctypes.data, len(found.data))
                    end += len(found.data)
        slabs = -(-(end + table.nbytes) // image.slab_bytes)
        image.put(slabs * image.slab_bytes - table.nbytes, table.ctypes.data, table.nbytes)
        return slabs

    def decode(self, image: Image, nbytes: int, transfer: Transfer, to: Image) -> None:
        """Write the plain bytes of an encoded image, `nbytes` in all, as a `Write` does.

        Raises `ImageDamaged`, which names the block; what has landed until then is right.
        """
        encoded = EncodedImage(image, nbytes)
        make_pieces(encoded.pieces(), transfer, lambda: _Decoding(encoded, to), self._cpus)

    def _spread(self) -> None:
        # A machine that took CPUs away since then makes this slower, not impossible.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)  # of this thread


class EncodedImage:
    """An image that was encoded, block by block. Threads may share one."""

    def __init__(self, image: Image, nbytes: int) -> None:
        """In the slabs that it takes; `nbytes` are its plain bytes."""
        self._image = image
        self._nbytes = nbytes
        self._room = image.slabs * image.slab_bytes - _table_bytes(nbytes)
        self._table: Table = _read(image, self._room, _table_bytes(nbytes)).view(ENTRY)

    @property
    def blocks(self) -> int:
        return len(self._table)

    def size(self, block: int) -> int:
        """Plain bytes of a block."""
        return _size(self._nbytes, block)

    def pieces(self) -> list[_Blocks]:
        """All blocks, a few at a time."""
        return [
            _Blocks(
                first * BLOCK_BYTES,
                min(PIECE_BLOCKS * BLOCK_BYTES, self._nbytes - first * BLOCK_BYTES),
            )
            for first in range(0, self.blocks, PIECE_BLOCKS)
        ]

    def decode(self, block: int, decoder: Decoder, plain: Bytes) -> None:
        """Write a block's plain bytes. Raises `ImageDamaged`."""
        entry = self._table[block : block + 1]
        try:
            decoder.decode(entry, self._data(entry), plain)
        except Damaged as error:
            raise self._damaged(block, error) from error

    def damage(self) -> Iterator[ImageDamaged]:
        """Every block whose bytes do not have their checksum."""
        for block in range(self.blocks):
            entry = self._table[block : block + 1]
            try:
                check(entry, self._data(entry), self.size(block))
            except Damaged as error:
                yield self._damaged(block, error)

    def _data(self, entry: Table) -> Bytes:
        start, size = int(entry["offset"][0]), int(entry["nbytes"][0])
        if start + size > self._room:
            raise Damaged("its entry in the table points outside of the image")
        if not size:
            raise Damaged("its entry in the table has no bytes")
        return _read(self._image, start, size)

    def _damaged(self, block: int, error: Damaged) -> ImageDamaged:
        start = block * BLOCK_BYTES
        return ImageDamaged(
            f"block {block} of {self.blocks}, bytes {start} to {start + self.size(block) - 1} of "
            f"the weights, is damaged in the host cache: {error}"
        )


class _Blocks(NamedTuple):
    """Some blocks in a row: where their plain bytes are in the image."""

    offset: int
    nbytes: int


class _Decoding:
    """What one thread decodes with, to its place."""

    def __init__(self, encoded: EncodedImage, to: Image) -> None:
        self._encoded = encoded
        self._to = to
        self._decoder = Decoder()
        self._plain = np.empty(BLOCK_BYTES, np.uint8)

    def announce(self, piece: _Blocks) -> None:
        """It is in memory."""

    def make(self, piece: _Blocks) -> None:
        first = piece.offset // BLOCK_BYTES
        for block in range(first, first - (-piece.nbytes // BLOCK_BYTES)):
            size = self._encoded.size(block)
            views = self._to.views(block * BLOCK_BYTES, size)
            if len(views) == 1:
                plain = np.frombuffer(views[0], np.uint8)
                self._encoded.decode(block, self._decoder, plain)
                continue
            self._encoded.decode(block, self._decoder, self._plain[:size])
            self._to.put(block * BLOCK_BYTES, self._plain.ctypes.data, size)


_local = threading.local()


def _encode(plain: Bytes) -> Encoded:
    """With this thread's encoder."""
    encoder: Encoder | None = getattr(_local, "encoder", None)
    if encoder is None:
        encoder = _local.encoder = Encoder()
    return encoder.encode(plain)


def _read(image: Image, offset: int, nbytes: int) -> Bytes:
    """Bytes of an image, in a row; a view of it if they are."""
    views = [np.frombuffer(view, np.uint8) for view in image.views(offset, nbytes)]
    return views[0] if len(views) == 1 else np.concatenate(views)


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def _size(nbytes: int, block: int) -> int:
    return min(BLOCK_BYTES, nbytes - block * BLOCK_BYTES)


def _table_bytes(nbytes: int) -> int:
    return _blocks(nbytes) * ENTRY.itemsize
