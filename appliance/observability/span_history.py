"""Spans that are over, of the last half hour: compressed in blocks, and bounded in bytes.

    a span that is over  ->  the open block  ->  with 64 of them it is compressed
    compressed blocks    ->  dropped when they are too old, or take too much memory together

A span costs O(1), spread over the spans of its block.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final, NamedTuple

import msgspec

from appliance.service.interface import Span, SpanPage

KEPT_SECONDS: Final = 1800.0
MOST_BYTES: Final = 16 << 20
"""Of all compressed blocks together."""
BLOCK_SPANS: Final = 64
"""Compressed at once. More compress better, and hold the event loop for longer."""
PAGE_SPANS: Final = 512
"""In one answer, at most: the event loop waits while they are decompressed."""
BLOCK_BYTES: Final = 256
"""What Python takes for a block besides its compressed spans, rounded up."""

_LEVEL: Final = 1
"""Of zlib: the fastest one. Higher levels save little, as most of it are names of requests."""
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(tuple[Span, ...])


class _Block(NamedTuple):
    """Spans in the order of their ends."""

    number: int
    began: float
    """The earliest beginning, Unix seconds."""
    ended: float
    """The latest end."""
    packed: bytes

    @property
    def nbytes(self) -> int:
        return len(self.packed) + BLOCK_BYTES


class SpanHistory:
    """Spans are added in the order of their ends."""

    def __init__(self, most_bytes: int = MOST_BYTES, kept_seconds: float = KEPT_SECONDS) -> None:
        self._most_bytes = most_bytes
        self._kept_seconds = kept_seconds
        self._blocks: deque[_Block] = deque()
        self._open: list[Span] = []
        self._number = 0
        """Of the next block."""
        self._dropped_until: float | None = None
        self.nbytes = 0
        """What the compressed blocks take."""

    def add(self, span: Span) -> None:
        """Keep a span that is over."""
        self._open.append(span)
        if len(self._open) == BLOCK_SPANS:
            self._close()

    def page(self, since: float, until: float, before: int | None = None) -> SpanPage:
        """The newest spans of which some part is between two times (Unix seconds), in blocks before
        that number: the `before` of the page that was read last."""
        opened = self._open if before is None else []
        found = [span for span in opened if _overlaps(span, since, until)]
        rest: int | None = None
        for block in reversed(self._blocks):
            if before is not None and block.number >= before:
                continue
            if block.ended < since or block.began > until:
                continue
            if len(found) > PAGE_SPANS - BLOCK_SPANS:
                rest = block.number + 1
                break
            found += [span for span in _unpacked(block) if _overlaps(span, since, until)]
        found.sort(key=lambda span: span.number)
        return SpanPage(
            spans=tuple(found), before=rest, kept_since_unix_seconds=self._dropped_until
        )

    def _close(self) -> None:
        """Compress the open block, and drop what there is no room or time for."""
        block = _packed(self._number, self._open)
        self._number += 1
        self._open.clear()
        self._blocks.append(block)
        self.nbytes += block.nbytes
        oldest = block.ended - self._kept_seconds
        while self._blocks and (self.nbytes > self._most_bytes or self._blocks[0].ended < oldest):
            dropped = self._blocks.popleft()
            self.nbytes -= dropped.nbytes
            self._dropped_until = dropped.ended


def _packed(number: int, spans: list[Span]) -> _Block:
    return _Block(
        number,
        min([span.began_unix_seconds for span in spans]),
        max([_end(span) for span in spans]),
        zlib.compress(_encoder.encode(spans), _LEVEL),
    )


def _unpacked(block: _Block) -> tuple[Span, ...]:
    return _decoder.decode(zlib.decompress(block.packed))


def _overlaps(span: Span, since: float, until: float) -> bool:
    return span.began_unix_seconds <= until and _end(span) >= since


def _end(span: Span) -> float:
    assert span.ended_unix_seconds is not None, "it is over"
    return span.ended_unix_seconds
