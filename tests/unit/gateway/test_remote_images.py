"""Images named by URL: fetched of a host that is allowed, at the address that was looked at."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore
import pytest

from appliance.gateway import remote_images
from appliance.gateway.image_wire import FREE_PIECES, MAX_FILE_BYTES, NotFetched, Wire
from appliance.gateway.remote_images import AT_ONCE, OF_CLIENT, RemoteImages, TooManyFetches
from appliance.http.image_hosts import ImageHosts
from tests.unit.doubles.certificates import certify

FILE = b"\x89PNG" + bytes(300)


class Store:
    """A server of images on this machine. `answer` is all that it says; None: nothing."""

    def __init__(self) -> None:
        self.answer: bytes | None = said(FILE)
        self.asked: list[bytes] = []
        self.port = 0
        self._news = asyncio.Condition()
        self.closed = asyncio.Event()
        """Set when a client hangs up that got no answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        async with self._news:
            self._news.notify_all()
        if self.answer is None:
            await reader.read()
            self.closed.set()
        else:
            writer.write(self.answer)
        writer.close()

    async def has_asked(self, count: int) -> None:
        """Wait until so many requests came."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.asked) >= count)


def said(file: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(file)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + file


@asynccontextmanager
async def running(tls: ssl.SSLContext | None = None) -> AsyncIterator[Store]:
    store = Store()
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0, ssl=tls)
    store.port = server.sockets[0].getsockname()[1]
    try:
        yield store
    finally:
        server.close()


def fetcher(port: int, **options: Any) -> RemoteImages:
    return RemoteImages(
        ImageHosts([f"http://store.lan:{port}", f"store.lan:{port}"], ["127.0.0.1/32"]), **options
    )


async def fetch(images: RemoteImages, owner: str, url: str) -> bytes:
    async with images.fetched(owner, url) as file:
        return file


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by host; each name is looked up in a list that it is taken from."""
    known = {"store.lan": ["127.0.0.1"]}
    monkeypatch.setattr(remote_images, "_resolve", lambda host: known[host])
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    return known


@pytest.mark.usefixtures("names")
async def test_a_file_is_fetched() -> None:
    """By the name that was asked for, without anything of the caller or the environment."""
    async with running() as store:
        images = fetcher(store.port)
        assert await fetch(images, "a", f"http://store.lan:{store.port}/x.png?y=1#z") == FILE
    (asked,) = store.asked
    line, *headers = asked.decode().strip().split("\r\n")
    assert line == "GET /x.png?y=1 HTTP/1.1"
    names = {header.partition(":")[0].lower(): header.partition(": ")[2] for header in headers}
    assert names.pop("host") == f"store.lan:{store.port}"
    assert names.keys() == {"accept", "accept-encoding", "connection", "user-agent"}


async def test_the_address_is_the_one_that_was_looked_at(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that has another address when it is looked up again has it in vain."""
    lookups: list[str] = []

    def resolve(host: str) -> list[str]:
        lookups.append(host)
        return ["169.254.169.254", "127.0.0.1"] if len(lookups) == 1 else ["127.0.0.2"]

    monkeypatch.setattr(remote_images, "_resolve", resolve)
    monkeypatch.setattr(socket, "getaddrinfo", _only_numbers(socket.getaddrinfo))
    async with running() as store:
        assert await fetch(fetcher(store.port), "a", f"http://store.lan:{store.port}/") == FILE
    assert lookups == ["store.lan"]


def _only_numbers(resolve: Callable[..., Any]) -> Callable[..., Any]:
    def numbers(host: Any, *args: Any, **options: Any) -> Any:
        socket.inet_aton(host if isinstance(host, str) else host.decode())
        return resolve(host, *args, **options)

    return numbers


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other.lan:{port}/", "nothing is fetched from http://other.lan:.* api.image_hosts"),
        ("http://store.lan/", "nothing is fetched from http://store.lan, which is not in"),
        ("http://127.0.0.1:{port}/", "nothing is fetched from http://127.0.0.1"),
        ("http://user:secret@store.lan:{port}/", "has a user or a password"),
        ("http://store.lan:{port}@evil.org/", "has a user or a password"),
        ("http://[::1", "it is no URL"),
        ("http://store.lan:{port}/" + "a" * 5000, "more than 4096 characters"),
        ("http://a..lan:{port}/", "it is no URL: 'a..lan' is no name of a host"),
        ("http://" + "a" * 64 + ".lan:{port}/", "it is no URL: .* 1 to 63 letters"),
        ("http://store.lan.:{port}/", "it is no URL: .* ends with a dot"),
        ("gopher://store.lan:{port}/", "nothing is fetched from gopher://"),
    ],
)
@pytest.mark.usefixtures("names")
async def test_urls_that_are_not_fetched(url: str, reason: str) -> None:
    async with running() as store:
        with pytest.raises(NotFetched, match=reason):
            await fetch(fetcher(store.port), "a", url.format(port=store.port))
    assert store.asked == []


@pytest.mark.parametrize(
    "address", ["127.0.0.2", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fe80::1%lo"]
)
async def test_addresses_that_are_not_public(names: dict[str, list[str]], address: str) -> None:
    names["store.lan"] = [address]
    async with running() as store:
        with pytest.raises(NotFetched, match=r"no public address, and none that api\.image_net"):
            await fetch(fetcher(store.port), "a", f"http://store.lan:{store.port}/")
    assert store.asked == []


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + bytes(MAX_FILE_BYTES + 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said(b"", "302 Found", "location: http://169.254.169.254/"), "redirects to another URL"),
        (said(b"", "404 Not Found"), "answers with status 404"),
        (said(FILE, "200 OK", "content-encoding: gzip"), "sends it compressed"),
        (LONG, "more than 20971520 bytes"),
        (said(FILE).replace(b"304", b"999999999"), "more than 20971520 bytes"),
        (said(FILE)[:-9], "cannot be asked for it"),
        (CHUNKED + b"1\r\nx\r\n" * 10_000, "in too small pieces"),
        (CHUNKED + (b"1;" + b"y" * 9_000 + b"\r\nx\r\n") * 2500, "sends too much around the file"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000, "more than 16384 bytes before the file"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 9000, "more than 16384 bytes before the file"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "cannot be asked for it"),
    ],
)
@pytest.mark.usefixtures("names")
async def test_answers_that_are_not_taken(answer: bytes, reason: str) -> None:
    async with running() as store:
        store.answer = answer
        with pytest.raises(NotFetched, match=reason):
            await fetch(fetcher(store.port), "a", f"http://store.lan:{store.port}/")


async def test_hosts_that_cannot_be_had(names: dict[str, list[str]]) -> None:
    async with running() as store:
        store.answer = None
        url = f"http://store.lan:{store.port}/"
        with pytest.raises(NotFetched, match=r"has not sent it within 0\.1 s"):
            await fetch(fetcher(store.port, max_seconds=0.1), "a", url)
    with pytest.raises(NotFetched, match="cannot be asked for it"):
        await fetch(fetcher(store.port), "a", url)


@pytest.mark.usefixtures("names")
async def test_a_client_has_so_many_at_once() -> None:
    """Others do not wait for it, and one that hangs up lets go of the connection."""
    async with running() as store:
        store.answer = None
        images, url = fetcher(store.port), f"http://store.lan:{store.port}/"
        many = [asyncio.create_task(fetch(images, "many", url)) for _ in range(OF_CLIENT + 3)]
        await store.has_asked(OF_CLIENT)
        store.answer = said(FILE)
        assert await fetch(images, "other", url) == FILE
        assert len(store.asked) == OF_CLIENT + 1
        for task in many[:OF_CLIENT]:
            task.cancel()
        await store.closed.wait()
        assert await asyncio.gather(*many[OF_CLIENT:]) == [FILE] * 3


async def test_certificates(tmp_path: Path, names: dict[str, list[str]]) -> None:
    """Have to be of the host that the URL names, whatever address it has."""
    certificate, key = certify(tmp_path, "store", hosts=["store.lan"])
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    shown: list[str | None] = []
    serving.sni_callback = lambda _, name, __: shown.append(name)
    async with running(serving) as store:
        url = f"https://store.lan:{store.port}/"
        trusting = ssl.create_default_context(cafile=certificate)
        assert await fetch(fetcher(store.port, verify=trusting), "a", url) == FILE
        assert shown == ["store.lan"]
        with pytest.raises(NotFetched, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch(fetcher(store.port), "a", url)
        other = ImageHosts([f"other.lan:{store.port}"], ["127.0.0.1/32"])
        names["other.lan"] = ["127.0.0.1"]
        with pytest.raises(NotFetched, match="Hostname mismatch"):
            await fetch(RemoteImages(other, verify=trusting), "a", url.replace("store", "other"))


async def test_a_trickle_ends() -> None:
    """Each read costs, however small it is; reads of whole packets are as many as a file needs."""
    wire = Wire("store.lan")
    await wire.file(httpcore.Response(200))
    for _ in range(FREE_PIECES):
        wire.came(0)
    with pytest.raises(NotFetched, match="in too small pieces"):
        wire.came(1)
    wire = Wire("store.lan")
    await wire.file(httpcore.Response(200))
    for _ in range(MAX_FILE_BYTES // 1400):
        wire.came(1400)


@pytest.mark.usefixtures("names")
async def test_others_have_turns_between_pieces() -> None:
    """A whole answer that has come already is not read at a stretch."""
    async with running() as store:
        store.answer = CHUNKED + b"1\r\nx\r\n" * 3000 + b"0\r\n\r\n"
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        other = asyncio.create_task(others())
        file = await fetch(fetcher(store.port), "a", f"http://store.lan:{store.port}/")
        other.cancel()
    assert file == b"x" * 3000
    assert turns >= 3000 // 16


async def test_a_name_server_that_does_not_answer(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes the turns of the client that asked, also when that hangs up, and none of others."""
    answering, asked = threading.Event(), threading.Semaphore(0)
    known = remote_images._resolve

    def resolve(host: str) -> list[str]:
        if host == "slow.lan":
            asked.release()
            answering.wait()
        return known(host)

    monkeypatch.setattr(remote_images, "_resolve", resolve)
    names["slow.lan"] = ["127.0.0.1"]
    async with running() as store:
        hosts = ImageHosts([f"http://*.lan:{store.port}"], ["127.0.0.1/32"])
        images = RemoteImages(hosts, max_wait_seconds=0.05)
        slow, url = f"http://slow.lan:{store.port}/", f"http://store.lan:{store.port}/"
        for _ in range(OF_CLIENT):
            leaving = asyncio.create_task(fetch(images, "one", slow))
            await asyncio.to_thread(asked.acquire)
            leaving.cancel()
            await asyncio.wait([leaving])
        with pytest.raises(TooManyFetches, match="try again later"):
            await fetch(images, "one", url)
        assert await fetch(images, "other", url) == FILE
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "fetching")
        answering.set()
        images = RemoteImages(hosts)
        assert await fetch(images, "one", url) == FILE


@pytest.mark.usefixtures("names")
async def test_a_file_counts_until_it_is_let_go() -> None:
    async with running() as store:
        images = fetcher(store.port, max_wait_seconds=0.05)
        url = f"http://store.lan:{store.port}/"
        async with AsyncExitStack() as held:
            for number in range(AT_ONCE):
                await held.enter_async_context(images.fetched(str(number), url))
            with pytest.raises(TooManyFetches):
                await fetch(images, "last", url)
        assert await fetch(images, "last", url) == FILE


async def test_other_addresses_are_tried(names: dict[str, list[str]]) -> None:
    """One that nothing listens at does not keep a host from being asked at the next."""
    names["store.lan"] = ["127.0.0.2", "127.0.0.2", "127.0.0.1"]
    async with running() as store:
        hosts = ImageHosts([f"http://store.lan:{store.port}"], ["127.0.0.0/8"])
        assert await fetch(RemoteImages(hosts), "a", f"http://store.lan:{store.port}/") == FILE


async def test_names_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str) -> list[str]:
        raise UnicodeError("label too long")

    monkeypatch.setattr(remote_images, "_resolve", resolve)
    with pytest.raises(NotFetched, match="cannot be asked for it: label too long"):
        await fetch(fetcher(80), "a", "http://store.lan:80/")
