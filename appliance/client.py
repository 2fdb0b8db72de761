"""A command's side of the daemon: its address, requests over HTTP, and how a command fails."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import click
import httpx

from appliance.platform.admin_socket import DEFAULT_PORT, UNIX, running_socket

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
UNAUTHORIZED, UNPROCESSABLE = 401, 422

KEY_VARIABLE = "APPLIANCE_API_KEY"

FC = TypeVar("FC", bound=Callable[..., Any])


def default_url() -> str:
    """The admin socket of a daemon that runs here, or where one listens by default."""
    path = running_socket()
    return DEFAULT_URL if path is None else f"{UNIX}{path}"


def url_option_named(*names: str) -> Callable[[FC], FC]:
    """`--url`, also by these names."""
    return click.option(
        "--url", *names, "url", default=default_url,
        show_default=f"the admin socket, else {DEFAULT_URL}",
        envvar="APPLIANCE_URL", show_envvar=True,
        help=f"Where the daemon listens: http(s)://HOST:PORT, with the key in ${KEY_VARIABLE} if "
        "it wants one, or unix:/PATH, its admin socket.",
    )  # fmt: skip


url_option = url_option_named()


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command: it went wrong."""
    click.echo(f"error: {message}", err=True)
    raise SystemExit(status)


def connect(url: str) -> httpx.Client:
    """A client without a limit on answers: between tokens a request may wait for other models'
    turns, which the server bounds, not we."""
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    if url.startswith(UNIX):
        transport = httpx.HTTPTransport(uds=url.removeprefix(UNIX))
        return httpx.Client(base_url="http://appliance", transport=transport, timeout=timeout)
    check_address(url)
    key = own_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout)


def own_key() -> str | None:
    """The key in the environment of the command. Ends the command if it cannot be a key."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None and not key.isascii():
        fail(f"${KEY_VARIABLE} is no API key: there are only ASCII characters in one", 2)
    return key


def check_address(url: str) -> None:
    """Ends the command for what cannot be the address of a daemon."""
    if url.startswith(UNIX):
        return
    try:
        address = httpx.URL(url)
        if address.scheme in ("http", "https") and address.host:
            return
    except httpx.InvalidURL:
        pass
    fail(f"--url: {url!r} is no address: give http(s)://HOST:PORT, or unix:/PATH", 2)


def unreachable(url: str, error: httpx.TransportError) -> NoReturn:
    fail(f"no daemon answers at {url} ({error}); start one with `appliance serve`, or give --url")


def call(method: str, url: str, path: str, body: object = None) -> Any:
    """What the daemon answers to a request of an admin; anything else ends the command."""
    try:
        with connect(url) as client:
            response = client.request(method, path, json=body, timeout=ANSWER_SECONDS)
            return checked(response).json()
    except httpx.TransportError as error:
        unreachable(url, error)
    except json.JSONDecodeError:
        fail(f"what answers at {url} is not the appliance")


def get(url: str, path: str) -> Any:
    return call("GET", url, path)


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is not an error. What cannot be done as it was said is the fault of the
    command line."""
    if response.is_success:
        return response
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        message = f"{response.request.url} answered {response.status_code}"
    if response.status_code == UNAUTHORIZED:
        message += (
            f"; put the key into ${KEY_VARIABLE}, or make one for operators with"
            " `appliance key create NAME --scope admin`"
        )
    fail(message, 2 if response.status_code == UNPROCESSABLE else 1)


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
