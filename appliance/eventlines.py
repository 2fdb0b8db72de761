"""The lines of a stream of server-sent events, from the bytes that it comes in.

A line feed ends one, and nothing else: the JSON in it may hold U+2028, U+2029 and U+0085 as they
are, at which `str.splitlines`, and so `httpx.Response.iter_lines`, would cut it in two.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


class _Lines:
    """What came of a line that has not ended."""

    def __init__(self) -> None:
        self._begun = b""

    def ended_by(self, data: bytes) -> list[str]:
        """The lines that are whole now, without their ends."""
        *whole, self._begun = (self._begun + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def event_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Lines of a stream that is read, `httpx.Response.iter_bytes`."""
    lines = _Lines()
    for data in pieces:
        yield from lines.ended_by(data)


async def event_lines_async(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The same of `httpx.Response.aiter_bytes`."""
    lines = _Lines()
    async for data in pieces:
        for line in lines.ended_by(data):
            yield line
