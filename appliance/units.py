"""Quantities of the configuration: read from what people write, written back the same way."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

_SIZE_UNITS: Final = {
    "": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SHARE: Final = re.compile(r"[1-9][0-9]{0,5}/[1-9][0-9]{0,5}|[01](\.[0-9]{1,9})?")
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class Bytes(int):
    """A size: ``"192MiB"``, ``"4GiB"``, or a whole number of bytes."""

    @classmethod
    def read(cls, value: object) -> Bytes:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(value)
        size = _quantity(value, _SIZE_UNITS, 'a size, such as "192MiB"')
        if size < 1 or size != int(size):
            raise ValueError("expected a whole number of bytes, more than 0")
        return cls(int(size))


class Memory(Bytes):
    """A size, or a share of a GPU's memory: ``"90%"``. A share has no size until it is `taken`."""

    share: float | None = None

    @classmethod
    def read(cls, value: object) -> Memory:
        if not isinstance(value, str) or not value.endswith("%"):
            return cls(super().read(value))
        percent = _quantity(value.removesuffix("%"), {"": 1}, 'a share, such as "90%"')
        if not 0 < percent <= 100:
            raise ValueError("expected a share of more than 0% and at most 100%")
        memory = cls(0)
        memory.share = percent / 100
        return memory

    def taken(self, whole_bytes: int) -> Memory:
        """The size that this is of so many bytes; itself if it is no share."""
        return self if self.share is None else Memory(int(self.share * whole_bytes))


class Share(str):
    """A part of a whole, more than 0 and at most 1: ``0.25`` or ``"1/4"``."""

    @classmethod
    def read(cls, value: object) -> Share:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        text = str(value) if number or isinstance(value, str) else ""
        if _SHARE.fullmatch(text) is None or not 0 < Fraction(text) <= 1:
            raise ValueError('expected a share of more than 0 and at most 1, such as 0.25 or "1/4"')
        return cls(text)

    @property
    def fraction(self) -> Fraction:
        """Exactly so much: a third is no decimal number."""
        return Fraction(self)


class Seconds(float):
    """A duration: ``"10s"``, ``"100ms"``, ``"2m"``."""

    @classmethod
    def read(cls, value: object) -> Seconds:
        seconds = cls(_quantity(value, _DURATION_UNITS, 'a duration, such as "10s" or "100ms"'))
        if seconds <= 0:
            raise ValueError("expected a duration of more than 0")
        return seconds


class Delay(Seconds):
    """A duration, or none: ``"0s"``."""

    @classmethod
    def read(cls, value: object) -> Delay:
        return cls(_quantity(value, _DURATION_UNITS, 'a duration, such as "10ms" or "0s"'))


class Address(str):
    """``host:port`` of a TCP socket; an IPv6 host is in brackets."""

    @classmethod
    def read(cls, value: object) -> Address:
        host, separator, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        bare = host.removeprefix("[").removesuffix("]")
        number = int(port) if port.isascii() and port.isdigit() else -1
        if not separator or not bare or (":" in bare and bare == host) or not 0 <= number < 65536:
            raise ValueError('expected "host:port", such as "127.0.0.1:11500"')
        return cls(value)

    @property
    def host(self) -> str:
        return self.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        return int(self.rpartition(":")[2])

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host == "localhost"
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def _quantity(value: object, units: Mapping[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected} (units: {', '.join(u for u in units if u)})")
    return float(match[1]) * units[match[2]]


def human(size: int) -> str:
    """A size as people write it: exact where that is short, else rounded to a tenth."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = int(_SIZE_UNITS[unit])
        if size >= scale:
            return f"{size // scale}{unit}" if size % scale == 0 else f"{size / scale:.1f}{unit}"
    return f"{size}B"


def no_less(size: int) -> str:
    """A size for a file to have, where less would not do: rounded up by a hundredth at most."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = int(_SIZE_UNITS[unit])
        if size >= scale and 2 * size % scale == 0:
            return f"{size / scale:g}{unit}"
        if size >= 100 * scale:
            return f"{-(-size // scale)}{unit}"
    return f"{size}B"


def no_more(size: int) -> str:
    """A size for a file to have, where more would not do: rounded down by a hundredth at most."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = int(_SIZE_UNITS[unit])
        if size >= scale and 2 * size % scale == 0:
            return f"{size / scale:g}{unit}"
        if size >= 100 * scale:
            return f"{size // scale}{unit}"
    return f"{size}B"


def toml(value: object) -> str:
    """A scalar, or a tuple of scalars, as a TOML file would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Bytes):
        return f'"{human(value)}"'
    if isinstance(value, Seconds):
        return f'"{value:g}s"' if value >= 1 or not value else f'"{value * 1000:g}ms"'
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    return str(value)
