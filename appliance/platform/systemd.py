"""systemd's protocols for services: signs of life to the manager, listening sockets from it.

Both are datagrams and environment variables (sd_notify(3), sd_listen_fds(3)), so no library is
needed. Without systemd nothing is sent and nothing is taken.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

from appliance.errors import ApplianceError

FIRST_FD = 3
"""Where passed descriptors begin (SD_LISTEN_FDS_START)."""


class SocketsRefused(ApplianceError):
    """A socket that was passed cannot be served; the text says which and why."""


class Notifier:
    """Reports the daemon's state to the service manager; sends nothing if none listens.

    The manager expects ``WATCHDOG=1`` at least every `watchdog_seconds`; None if it expects none.
    """

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        """`address` is a path, or the name of an abstract socket behind an ``@``."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog_seconds = watchdog_seconds if address else None

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Notifier:
        """The one that the variables name. They are removed: they are not for our children."""
        address = environment.pop("NOTIFY_SOCKET", "")
        micros = environment.pop("WATCHDOG_USEC", "")
        ours = environment.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        return cls(address, int(micros) / 1e6 if ours and micros.isdecimal() else None)

    @property
    def listened_to(self) -> bool:
        return bool(self._address)

    def tell(self, **words: str | int) -> None:
        """Send assignments such as ``READY=1``, in one datagram. A manager that is gone is no
        reason to stop."""
        if not self._address:
            return
        message = "\n".join(f"{name}={value}" for name, value in words.items())
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)  # a manager that does not read must not stop the event loop
            sender.sendto(message.encode(), self._address)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """The configuration is read again meanwhile."""
        self.tell(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
        try:
            yield
        finally:
            self.tell(READY=1)


def take_sockets(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening TCP sockets passed to this process, in order; none without socket activation.

    The variables are removed, and children do not inherit the sockets. Raises `SocketsRefused`
    for one that does not listen, or is of another kind.
    """
    ours = environment.pop("LISTEN_PID", "") == str(os.getpid())
    count = environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if not (ours and count.isdecimal()):
        return []
    taken = []
    for index in range(int(count)):
        name = names[index] if index < len(names) and names[index] else f"number {index}"
        taken.append(_take(FIRST_FD + index, name))
    return taken


def refuse_foreign(sockets: Sequence[socket.socket]) -> None:
    """Raises `SocketsRefused` for one that other machines can reach: without keys the daemon must
    not answer other machines, also on a socket that another process opened."""
    for listener in sockets:
        host, port = listener.getsockname()[:2]
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        if not (mapped or address).is_loopback:
            raise SocketsRefused(
                f"the passed socket at {host}, port {port} can be reached from outside this "
                "machine, and there are no keys: add api.keys and make one with `appliance key "
                "create NAME`, or use ListenStream=127.0.0.1:PORT"
            )


def _take(descriptor: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        taken = socket.socket(fileno=descriptor)
    except OSError as error:
        raise SocketsRefused(f"the passed socket {name!r} is none: {error}") from error
    tcp = taken.family in (socket.AF_INET, socket.AF_INET6) and taken.type == socket.SOCK_STREAM
    if not (tcp and taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        raise SocketsRefused(
            f"the passed socket {name!r} is no listening TCP socket: "
            "use ListenStream=ADDRESS:PORT and Accept=no in the socket unit"
        )
    taken.setblocking(False)
    return taken
