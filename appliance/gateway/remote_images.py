"""Images that requests name by URL, fetched by the core: front ends can open no socket.

A URL is fetched if its scheme, host and port are among those that the admin allows. Its host is
resolved once, and the connection is made to one of the addresses that were looked at, so another
answer of the name server changes nothing. Nothing of the caller goes along: no key, no cookie, no
proxy of the environment. What the file is, front ends look at.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import httpcore
import httpx

from appliance import __version__
from appliance.gateway.fetch_turns import FetchTurns, NoTurn, Turn
from appliance.gateway.image_wire import NotFetched, Wire
from appliance.http.image_hosts import ImageHosts, normal_host

MAX_SECONDS: Final = 15.0
"""From the name of the host to the last byte."""
MAX_WAIT_SECONDS: Final = 30.0
"""For a turn."""
AT_ONCE: Final = 4
OF_CLIENT: Final = 2
MAX_URL: Final = 4096
MOST_ADDRESSES: Final = 4
"""Of a host, that are tried."""
_HEADERS: Final = (
    ("accept", "image/png, image/jpeg, image/webp, image/gif"),
    ("accept-encoding", "identity"),  # what is small on the way could be large here
    ("connection", "close"),
    ("user-agent", f"appliance/{__version__}"),
)
_NOT_THERE: Final = (httpcore.ConnectError, httpcore.ConnectTimeout)
_FAILURES: Final = (
    *(httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException),
    *(OSError, UnicodeError),  # of names that cannot be looked up, too
)


class TooManyFetches(NotFetched):
    """Others are fetched for too long; trying again later makes sense."""


class _Place(NamedTuple):
    """Where an image is."""

    url: httpx.URL
    host: str
    """As `normal_host` has it."""


class RemoteImages:
    """Fetches for all front ends, so many at once, and so many of one client."""

    def __init__(
        self,
        hosts: ImageHosts,
        *,
        max_seconds: float = MAX_SECONDS,
        max_wait_seconds: float = MAX_WAIT_SECONDS,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        """Certificates are compared with those that the system trusts, or those of `verify`."""
        self._hosts = hosts
        self._max_seconds = max_seconds
        self._tls = verify
        self._turns = FetchTurns(AT_ONCE, OF_CLIENT, max_wait_seconds)

    @asynccontextmanager
    async def fetched(self, owner: str, url: str) -> AsyncIterator[bytes]:
        """The file of a client. Until the block ends, it counts among those that are fetched.
        Raises `NotFetched`; cancelled, it lets go of the connection."""
        where = self._checked(url)
        try:
            async with self._turns.turn(owner) as turn:
                yield await self._in_time(where, turn)
        except NoTurn as error:
            raise TooManyFetches(
                "other images are being fetched: try again later, or send it as a data URL"
            ) from error

    async def _in_time(self, where: _Place, turn: Turn) -> bytes:
        """Raises `NotFetched`."""
        try:
            async with asyncio.timeout(self._max_seconds):
                return await self._fetch(where, await self._addresses(where, turn))
        except TimeoutError as error:
            raise NotFetched(
                f"{where.host} has not sent it within {self._max_seconds:g} s"
            ) from error
        except _FAILURES as error:
            raise NotFetched(f"{where.host} cannot be asked for it: {_why(error)}") from error

    def _checked(self, text: str) -> _Place:
        """The URL, which may be fetched from. Raises `NotFetched`."""
        if len(text) > MAX_URL:
            raise NotFetched(f"the URL has more than {MAX_URL} characters")
        try:
            url = httpx.URL(text)
            host = normal_host(url.raw_host.decode("ascii"))
        except (httpx.InvalidURL, ValueError) as error:
            raise NotFetched(f"it is no URL: {error}") from error
        if url.userinfo:
            raise NotFetched("the URL has a user or a password: leave them out")
        if not self._hosts.allows(url.scheme, host, url.port):
            where = f"{url.scheme}://{url.netloc.decode('ascii')}"
            raise NotFetched(
                f"nothing is fetched from {where}, which is not in api.image_hosts: send the image "
                "as a data URL with base64"
            )
        return _Place(url, host)

    async def _addresses(self, where: _Place, turn: Turn) -> Sequence[str]:
        """Those of its host's that may be connected to. Raises `NotFetched`, `OSError`,
        `UnicodeError`."""
        found = dict.fromkeys(await turn.in_thread(_resolve, where.host))
        allowed = [address for address in found if self._hosts.may_be_at(address)]
        if not allowed:
            raise NotFetched(
                f"{where.host} has no public address, and none that api.image_networks allows: "
                "send the image as a data URL with base64"
            )
        return allowed[:MOST_ADDRESSES]

    async def _fetch(self, where: _Place, addresses: Sequence[str]) -> bytes:
        """From the first address that can be connected to, each within its share of the time."""
        if self._tls is None:  # certificates take a while to read
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        *others, last = addresses
        connect_seconds = self._max_seconds / len(addresses)
        for address in others:
            try:
                return await self._fetch_at(where, address, connect_seconds)
            except _NOT_THERE:
                continue
        return await self._fetch_at(where, last, connect_seconds)

    async def _fetch_at(self, where: _Place, address: str, connect_seconds: float) -> bytes:
        url, wire = where.url, Wire(where.host)
        asked = httpcore.URL(
            scheme=url.raw_scheme, host=address.encode(), port=url.port, target=url.raw_path
        )
        seconds = {"connect": connect_seconds, "read": self._max_seconds}
        async with (
            httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=wire) as pool,
            pool.stream(
                "GET",
                asked,
                headers=[("host", url.netloc.decode("ascii")), *_HEADERS],
                extensions={"sni_hostname": where.host, "timeout": seconds},
            ) as response,
        ):
            return await wire.file(response)


def _resolve(host: str) -> list[str]:
    """Its addresses. Raises `OSError`, `UnicodeError`."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(where[0]) for _, _, _, _, where in found]


def _why(error: Exception) -> str:
    """The end of the chain says most."""
    return str(error) or type(error).__name__
