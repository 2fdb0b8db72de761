"""The format `exp7`: blocks of bf16 numbers whose exponents take three bits; encoder and decoder.

A block is `BLOCK_BYTES` of memory, taken as little-endian 16-bit numbers: sign, 8 bits of exponent,
7 of mantissa. Its seven most frequent exponents have the codes 0 to 6; 7 is an escape. Encoded:

    65,536 bytes    sign and mantissa of each number
    3 x 8,192       bit 0, 1 and 2 of the codes: bit i % 8 of byte i // 8 is number i's
    256 x 2         escapes before each run of 256 numbers, so that any run can be decoded by itself
    escapes         their exponents in order, and zeros up to a multiple of `ALIGNMENT`

A block that would not become much smaller, or is not whole, is kept as it is (`RAW`). So the format
takes any bytes and loses none; what it saves depends on whether they are bf16 numbers. An entry of
a table (`ENTRY`) tells where a block's bytes are and what they mean, and has their checksum.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Table: TypeAlias = np.ndarray[Any, Any]
"""Of `ENTRY`: the entries of blocks in order."""

VALUES: Final = 65536
BLOCK_BYTES: Final = 2 * VALUES
ALIGNMENT: Final = 16
RUN_VALUES: Final = 256
"""Numbers of a run. `exp7.cu` has this and the sizes below, too."""
ESCAPE: Final = 7
RAW: Final = 0xFFFFFFFF
"""In place of the number of escapes."""

_PLANE_BYTES: Final = VALUES // 8
_PLANES: Final = VALUES
_RUNS: Final = _PLANES + 3 * _PLANE_BYTES
FIXED_BYTES: Final = _RUNS + 2 * (VALUES // RUN_VALUES)
"""Of an encoded block, before its escapes."""
MOST_BYTES: Final = BLOCK_BYTES * 7 // 8
"""An encoded block takes at most this: less is not worth decoding it."""

ENTRY: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("nbytes", "<u4"),
        ("escapes", "<u4"),
        ("exponents", "u1", 8),
        ("unused", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""The eighth exponent is one that no number but those behind an escape may have."""
_SUMMED_BYTES: Final = ENTRY.itemsize - 4


class Damaged(Exception):
    """What is said to be a block is none, or is not what its checksum says."""


class Encoded(NamedTuple):
    """A block as it is kept; `exponents` and `escapes` as in its entry."""

    data: Bytes
    escapes: int
    exponents: Bytes

    def enter(self, table: Table, block: int, offset: int) -> None:
        """Fill in the entry of a block that is put at `offset`."""
        entry = table[block : block + 1]
        entry["offset"], entry["nbytes"] = offset, len(self.data)
        entry["escapes"], entry["exponents"], entry["unused"] = self.escapes, self.exponents, 0
        entry["checksum"] = _checksum(entry, self.data)


class Encoder:
    """Encodes one block after the other. For one thread."""

    def __init__(self) -> None:
        self._exponents = np.empty(VALUES, np.uint8)
        self._codes = np.empty(VALUES, np.uint8)
        self._wide = np.empty(VALUES, np.uint16)

    def encode(self, plain: Bytes) -> Encoded:
        """The bytes of a block, at most `BLOCK_BYTES` of them; they are the `data` of the answer if
        they are kept as they are."""
        if len(plain) < BLOCK_BYTES:
            return Encoded(plain, RAW, np.zeros(8, np.uint8))
        numbers, wide = plain.view("<u2"), self._wide
        np.right_shift(numbers, 7, out=wide)
        np.copyto(self._exponents, wide, casting="unsafe")
        counts = np.bincount(self._exponents, minlength=256)
        frequent = np.argsort(-counts, kind="stable")[:8].astype(np.uint8)
        escapes = VALUES - int(counts[frequent[:ESCAPE]].sum())
        end = -(-(FIXED_BYTES + escapes) // ALIGNMENT) * ALIGNMENT
        if end > MOST_BYTES:
            return Encoded(plain, RAW, np.zeros(8, np.uint8))
        code_of = np.full(256, ESCAPE, np.uint8)
        code_of[frequent[:ESCAPE]] = np.arange(ESCAPE)
        np.take(code_of, self._exponents, out=self._codes, mode="clip")
        # The sign moves from bit 15 to bit 7, where the exponent's last bit was.
        np.right_shift(numbers, 8, out=wide)
        np.bitwise_xor(wide, numbers, out=wide)
        np.bitwise_and(wide, 0x80, out=wide)
        np.bitwise_xor(wide, numbers, out=wide)
        data = np.zeros(end, np.uint8)
        np.copyto(data[:VALUES], wide, casting="unsafe")
        for bit in range(3):
            plane = data[_PLANES + bit * _PLANE_BYTES :][:_PLANE_BYTES]
            plane[:] = np.packbits(self._codes & (1 << bit), bitorder="little")
        escaped = self._codes == ESCAPE
        runs = data[_RUNS:FIXED_BYTES].view("<u2")
        np.cumsum(np.count_nonzero(escaped.reshape(-1, RUN_VALUES), axis=1)[:-1], out=runs[1:])
        data[FIXED_BYTES : FIXED_BYTES + escapes] = self._exponents[escaped]
        return Encoded(data, escapes, frequent)


class Decoder:
    """Decodes one block after the other. For one thread."""

    def __init__(self) -> None:
        self._index = np.empty(VALUES // 8, np.uint32)
        self._part = np.empty(VALUES // 8, np.uint32)
        self._wide_index = np.empty(VALUES // 4, np.intp)
        self._shifted = np.empty(VALUES // 4, np.uint64)
        self._escaped = np.empty(VALUES, np.bool_)
        self._signed = np.empty(VALUES, np.int16)

    def decode(self, entry: Table, data: Bytes, plain: Bytes) -> None:
        """Write the bytes of a block, kept as `data` according to its `entry` (a table of one),
        to `plain`. Raises `Damaged`."""
        check(entry, data, len(plain))
        escapes = int(entry["escapes"][0])
        if escapes == RAW:
            np.copyto(plain, data)
            return
        exponents = entry["exponents"][0]
        index, part, shifted = self._index, self._part, self._shifted.view(np.uint16)
        # Bits of four numbers at a time are an index of a table of their exponents: the low four
        # bits of a plane's byte go to one index, its high four to the next.
        for bit in range(3):
            plane = data[_PLANES + bit * _PLANE_BYTES :][:_PLANE_BYTES]
            target = part if bit else index
            np.multiply(plane, np.uint32(0x1001 << 4 * bit), out=target, dtype=np.uint32)
            np.bitwise_and(target, np.uint32(0xF000F << 4 * bit), out=target)
            if bit:
                np.bitwise_or(index, part, out=index)
        np.copyto(self._wide_index, index.view(np.uint16))
        quads = _quads(exponents.tobytes())
        np.take(quads, self._wide_index, out=self._shifted, mode="wrap")
        np.equal(shifted, np.uint16(int(exponents[ESCAPE]) << 7), out=self._escaped)
        places = np.flatnonzero(self._escaped)
        if len(places) != escapes:
            raise Damaged(f"it has {len(places)} escapes, not {escapes}")
        shifted[places] = data[FIXED_BYTES : FIXED_BYTES + escapes].astype(np.uint16) << 7
        # As a signed byte made wider, the sign is bit 15, too.
        signed, numbers = self._signed.view(np.uint16), plain.view("<u2")
        np.copyto(self._signed, data[:VALUES].view(np.int8))
        np.bitwise_and(signed, np.uint16(0x807F), out=signed)
        np.bitwise_or(signed, shifted, out=numbers)


def check(entry: Table, data: Bytes, plain_bytes: int) -> None:
    """Raises `Damaged` unless this is a block of `plain_bytes` whose bytes have their checksum."""
    escapes, nbytes = int(entry["escapes"][0]), int(entry["nbytes"][0])
    if escapes == RAW:
        expected = plain_bytes
    else:
        expected = -(-(FIXED_BYTES + escapes) // ALIGNMENT) * ALIGNMENT
        if plain_bytes != BLOCK_BYTES or expected > MOST_BYTES:
            raise Damaged(f"{escapes} escapes in a block of {plain_bytes} bytes")
    if nbytes != expected or len(data) != expected:
        raise Damaged(f"it has {len(data)} of {expected} bytes")
    if int(entry["checksum"][0]) != _checksum(entry, data):
        raise Damaged("its checksum is another")


def _checksum(entry: Table, data: Bytes) -> int:
    head = entry.view(np.uint8)[:_SUMMED_BYTES]
    return zlib.crc32(data.data, zlib.crc32(head.data))


@functools.lru_cache(maxsize=256)
def _quads(exponents: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """For each 12 bits of codes, three planes of four, the four exponents where a number has
    them. Of 32 KiB: it stays in a cache, as do those of the few kinds of blocks that there are."""
    index = np.arange(1 << 12)
    of_code = np.frombuffer(exponents, np.uint8).astype("<u2") << 7
    quads = np.empty((1 << 12, 4), "<u2")
    for number in range(4):
        bits = [index >> (4 * bit + number) & 1 for bit in range(3)]
        quads[:, number] = of_code[bits[0] | bits[1] << 1 | bits[2] << 2]
    return quads.view("<u8").reshape(-1)
