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
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

import httpx

from appliance import __version__
from appliance.http.image_hosts import ImageHosts

MAX_FILE_BYTES: Final = 20 << 20
MAX_SECONDS: Final = 15.0
"""From the name of the host to the last byte."""
AT_ONCE: Final = 4
OF_CLIENT: Final = 2
MAX_URL: Final = 4096
_OK: Final = 200
_HEADERS: Final = {
    "accept": "image/png, image/jpeg, image/webp, image/gif",
    "accept-encoding": "identity",  # what is small on the way could be large here
    "user-agent": f"appliance/{__version__}",
}


class NotFetched(Exception):
    """An image that cannot be had; the message says why, in words for the client."""


class RemoteImages:
    """Fetches for all front ends, so many at once, and so many of one client."""

    def __init__(
        self,
        hosts: ImageHosts,
        *,
        max_seconds: float = MAX_SECONDS,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        """Certificates are compared with those that the system trusts, or those of `verify`."""
        self._hosts = hosts
        self._max_seconds = max_seconds
        self._tls = verify
        self._free = asyncio.Semaphore(AT_ONCE)
        self._of_client: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # Nothing else waits if a name server does not answer.
        self._resolvers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="resolving")

    async def fetch(self, owner: str, url: str) -> bytes:
        """The file of a client. Raises `NotFetched`; cancelled, it lets go of the connection."""
        where = self._checked(url)
        async with self._turn(owner):
            try:
                async with asyncio.timeout(self._max_seconds):
                    return await self._fetch(where, await self._address(where))
            except TimeoutError as error:
                raise NotFetched(
                    f"{where.host} has not sent it within {self._max_seconds:g} s"
                ) from error
            except (httpx.HTTPError, OSError) as error:
                raise NotFetched(f"{where.host} cannot be asked for it: {_why(error)}") from error

    def _checked(self, text: str) -> httpx.URL:
        """The URL, which may be fetched from. Raises `NotFetched`."""
        if len(text) > MAX_URL:
            raise NotFetched(f"the URL has more than {MAX_URL} characters")
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise NotFetched(f"it is no URL: {error}") from error
        if url.userinfo:
            raise NotFetched("the URL has a user or a password: leave them out")
        if not self._hosts.allows(url.scheme, _name(url), url.port):
            where = f"{url.scheme}://{url.netloc.decode('ascii')}"
            raise NotFetched(
                f"nothing is fetched from {where}, which is not in api.image_hosts: send the image "
                "as a data URL with base64"
            )
        return url

    async def _address(self, url: httpx.URL) -> str:
        """One of its host's that may be connected to. Raises `NotFetched`, `OSError`."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._resolvers, _resolve, _name(url))
        for address in found:
            if self._hosts.may_be_at(address):
                return address
        raise NotFetched(
            f"{url.host} has no public address, and none that api.image_networks allows: send the "
            "image as a data URL with base64"
        )

    async def _fetch(self, url: httpx.URL, address: str) -> bytes:
        if self._tls is None:  # certificates take a while to read
            loop = asyncio.get_running_loop()
            self._tls = await loop.run_in_executor(self._resolvers, ssl.create_default_context)
        headers = _HEADERS | {"host": url.netloc.decode("ascii")}
        async with (
            httpx.AsyncClient(
                verify=self._tls, trust_env=False, follow_redirects=False, timeout=self._max_seconds
            ) as client,
            client.stream(
                "GET",
                url.copy_with(host=address, fragment=None),
                headers=headers,
                extensions={"sni_hostname": _name(url)},
            ) as response,
        ):
            return await _file(url, response)

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """A client with many waits for its own first, and not in front of others."""
        mine = self._of_client.setdefault(owner, asyncio.Semaphore(OF_CLIENT))
        async with mine, self._free:
            yield


async def _file(url: httpx.URL, response: httpx.Response) -> bytes:
    """What a host answers. Raises `NotFetched`."""
    if response.is_redirect:
        raise NotFetched(f"{url.host} redirects to another URL: send that one")
    if response.status_code != _OK:
        raise NotFetched(f"{url.host} answers with status {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NotFetched(f"{url.host} sends it compressed, though that was not asked for")
    size = response.headers.get("content-length", "0")
    file = bytearray()
    too_large = size.isdigit() and int(size) > MAX_FILE_BYTES
    async for piece in response.aiter_raw():
        if too_large or len(file) + len(piece) > MAX_FILE_BYTES:
            raise NotFetched(f"it has more than {MAX_FILE_BYTES} bytes: send a smaller image")
        file += piece
    return bytes(file)


def _name(url: httpx.URL) -> str:
    """The host, as IDNA has it."""
    return url.raw_host.decode("ascii").lower()


def _resolve(host: str) -> list[str]:
    """Its addresses. Raises `OSError`."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(where[0]) for _, _, _, _, where in found]


def _why(error: Exception) -> str:
    """The end of the chain says most."""
    return str(error) or type(error).__name__
