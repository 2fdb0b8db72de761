"""Boxes as commands are given them, `NAME=URL`, and what kinds of address a command can reach."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from ipaddress import AddressValueError, IPv4Address
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click

from appliance.errors import FleetError
from appliance.platform.admin_socket import DEFAULT_PORT, UNIX

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_HTTPS_PORT: Final = 443

FC = TypeVar("FC", bound=Callable[..., Any])


class Reach(Enum):
    """What kinds of address are allowed; the value is how they are written. ``http`` without a
    port means the daemon's own."""

    PICKER = "http://ADDRESS:PORT, with an IPv4 address"
    """llm-d's endpoint picker has no HTTPS and looks up no names."""
    NETWORK = "http(s)://HOST:PORT"
    HERE_TOO = "http(s)://HOST:PORT, or unix:/PATH"
    """Besides, the admin socket of a daemon on this machine."""


class Box(NamedTuple):
    """A box by its name, and where it is."""

    name: str
    url: str
    """Without a slash at its end."""
    address: str = ""
    """"" for a socket on this machine."""
    port: int = 0


def boxes_option(reach: Reach, *, required: bool = True, before: str = "") -> Callable[[FC], FC]:
    """`--box`, once for each; its help begins with `before`."""
    return click.option(
        "--box", "boxes", multiple=True, required=required, metavar="NAME=URL",
        help=f"{before}A box: {reach.value}. Give one for each.",
    )  # fmt: skip


def read_boxes(texts: Sequence[str], reach: Reach) -> tuple[Box, ...]:
    """All of them. Raises `FleetError`, also for a name or a place that two of them have."""
    boxes = tuple(_read_box(text, reach) for text in texts)
    for what, values in (
        ("name", [box.name for box in boxes]),
        ("URL", [box.url for box in boxes]),
    ):
        for value in values:
            if values.count(value) > 1:
                raise FleetError(f"--box: two boxes have the {what} {value}")
    return boxes


def _read_box(text: str, reach: Reach) -> Box:
    """A box of ``NAME=URL``. Raises `FleetError`, which says what is wrong."""
    name, _, url = text.partition("=")
    if not _NAME.fullmatch(name):
        raise FleetError(
            f"--box {text!r}: give NAME=URL, with a name of small letters, digits, '-' and '.'"
        )
    if reach is Reach.HERE_TOO and url.startswith(f"{UNIX}/"):
        return Box(name, url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FleetError(f"--box {text!r}: {error}; give {reach.value}") from error
    if parts.scheme == "https" and reach is Reach.PICKER:
        raise FleetError(f"--box {text!r}: the picker has no HTTPS; give {reach.value}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FleetError(f"--box {text!r}: {url!r} is no address of a box; give {reach.value}")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise FleetError(f"--box {text!r}: {url!r} has more than an address; give {reach.value}")
    if port is None and parts.scheme == "http":
        port = DEFAULT_PORT
    if reach is Reach.PICKER:
        _check_ipv4(text, parts.hostname)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    where = f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"
    return Box(name, where, parts.hostname, port or _HTTPS_PORT)


def _check_ipv4(text: str, host: str) -> None:
    """Raises `FleetError` for what is none."""
    try:
        IPv4Address(host)
    except AddressValueError as error:
        raise FleetError(
            f"--box {text!r}: {host!r} is no IPv4 address; the picker looks up no names"
        ) from error
