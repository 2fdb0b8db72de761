"""Where a browser's request was sent, and which site's page sent it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_local(address: str) -> bool:
    """Whether ``host``, or ``host:port``, can only be this machine."""
    try:
        host = urlsplit(f"//{address}").hostname or ""
        number = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" if "[" not in address else False
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback


def is_own(origin: str | None, host: str, *, encrypted: bool) -> bool:
    """Whether a request to `host` was sent by a page that came from there. Those of browsers say
    where they come from; with `encrypted` that is to be HTTPS."""
    if origin is None:
        return False
    scheme, separator, site = origin.partition("://")
    schemes = ("https",) if encrypted else ("http", "https")  # a proxy may encrypt for us
    return bool(separator) and scheme in schemes and site.lower() == host.lower()
