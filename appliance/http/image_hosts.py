"""Where images may be fetched from: the hosts that an admin names, and the addresses they may have.

Nothing here resolves or connects. Hosts are compared as `normal_host` has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address

_PORTS: Final = {"https": 443, "http": 80}
_EMBEDDING: Final = tuple(
    IPv6Network(network)
    for network in ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")
)
"""Addresses of IPv6 that mean one of IPv4: a gateway or this system translates them. Prefixes of
NAT64 that a network chose for itself are not known."""
_SPECIAL: Final[tuple[IPv4Network | IPv6Network, ...]] = (
    IPv6Network("3fff::/20"),
    IPv4Network("192.88.99.0/24"),
)
"""For documentation, and for relays of 6to4: `ipaddress` takes them for public ones."""

_HOST: Final = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<star>\*\.)?"
    r"(?P<host>[^/?#@:\s\[\]*]+|\[[^/?#@%\s\[\]]+\])(?::(?P<port>[0-9]{1,5}))?",
    re.IGNORECASE,
)
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_MAX_NAME: Final = 253


class AllowedHost(NamedTuple):
    """One of `api.image_hosts`."""

    scheme: str
    host: str
    """Behind the star and its dot, if there is one; IPv6 without brackets."""
    port: int
    below: bool
    """Whether it is all names that end with a dot and `host`, and not `host` itself."""

    def allows(self, scheme: str, host: str, port: int) -> bool:
        if (scheme, port) != (self.scheme, self.port):
            return False
        return host.endswith(f".{self.host}") if self.below else host == self.host


def parse_host(text: str) -> AllowedHost:
    """Of ``images.example.org``, ``*.example.org``, ``http://store:8080``. Raises `ValueError`,
    which says why it is none."""
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError(f'{text!r} is no host such as "images.example.org"')
    scheme = (found["scheme"] or "https").lower()
    port = int(found["port"] or _PORTS[scheme])
    if not 0 < port < 1 << 16:
        raise ValueError(f"{text!r} has no port between 1 and 65535")
    host = normal_host(found["host"])
    if found["star"] and _is_address(host):
        raise ValueError(f"{text!r}: there are no names below an address")
    return AllowedHost(scheme, host, port, bool(found["star"]))


def normal_host(text: str) -> str:
    """A name in lower case and as IDNA has it, or an address in its shortest form and without
    brackets. Raises `ValueError`, which says why it is none."""
    host = text.strip("[]") if text.startswith("[") else text.lower()
    if ":" in host:
        return str(IPv6Address(host))
    if not host.isascii():
        host = _idna(host)
    labels = host.split(".")
    if not labels[-1]:
        raise ValueError(f"{text!r} ends with a dot: leave it out")
    if len(host) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(
            f"{text!r} is no name of a host: between dots are 1 to 63 letters, digits, hyphens or "
            f"underscores, no hyphen first or last, and all have at most {_MAX_NAME} characters"
        )
    # What looks like one is taken for one when it is looked up.
    return str(IPv4Address(host)) if labels[-1].isdigit() else host


def _idna(host: str) -> str:
    from httpx import URL, InvalidURL  # takes a while, and few need it

    try:
        return URL(scheme="https", host=host).raw_host.decode("ascii")
    except InvalidURL as error:
        raise ValueError(str(error)) from error


def _is_address(host: str) -> bool:
    return ":" in host or host.rpartition(".")[2].isdigit()


class ImageHosts:
    """All that may be fetched from."""

    def __init__(self, hosts: Iterable[str] = (), networks: Iterable[str] = ()) -> None:
        """`api.image_hosts` and `api.image_networks`. Raises `ValueError`."""
        self._hosts = tuple(parse_host(host) for host in hosts)
        self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(map(ip_network, networks))

    def allows(self, scheme: str, host: str, port: int | None) -> bool:
        """Whether a URL with these parts may be fetched; without a port it is the scheme's own."""
        wanted = _PORTS.get(scheme) if port is None else port
        return wanted is not None and any(
            allowed.allows(scheme, host, wanted) for allowed in self._hosts
        )

    def may_be_at(self, address: str) -> bool:
        """Whether a host may have this address: a public one, or one of the networks."""
        try:
            found = ip_address(address)
        except ValueError:  # with the name of an interface, which only local ones have
            return False
        return is_public(found) or _in(found, self._networks)


def _in(address: Address, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet, and does not mean another one."""
    if _in(address, _EMBEDDING) or _in(address, _SPECIAL):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or getattr(address, "is_site_local", False)
        or getattr(address, "teredo", None) is not None
    )
