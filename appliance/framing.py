"""Frames on a stream of bytes: a length, then one msgpack object. No pickle."""

from __future__ import annotations

import struct
from typing import Final, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


HEADER: Final = struct.Struct("<I")


_encoder: Final = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A whole frame."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


M = TypeVar("M")


class Decoder(Generic[M]):
    """Turns received bytes into messages of one direction (`Down` or `Up`).

    Raises `msgspec.DecodeError` on a frame of the wrong form and `ValueError` on one too long.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Messages completed by `data`; a partial frame waits for the next call."""
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages
