"""Offers of another protocol (`Upgrade`), which are not taken: the request is served as HTTP/1.1.

Who offers HTTP/2 so (`h2c`, as Java's clients do) sends the body all the same (RFC 9110, 7.8). The
parser takes what follows such a head for the other protocol: it skips the body, and goes on
with the next request. So it gets the head once more, without the offer, before the body.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class Offered(Protocol):
    """The protocol that is parsed for. A head for which `should_upgrade()` holds is parsed
    again, as `plain_head` gives it."""

    def plain_head(self) -> bytes:
        """The head that was parsed last, without its offer."""
        ...


class PlainParser(httptools.HttpRequestParser):
    """Raises `HttpParserUpgrade` for CONNECT alone, which offers nothing else."""

    def __init__(self, connection: Offered) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                super().feed_data(self._connection.plain_head())
                rest = rest[offer.args[0] :]
