"""Which connection is closed when descriptors are short: the oldest one without a request.

A connection costs its client nothing, and this process a descriptor for as long as a head may take.
Without a bound, one client could use them all, so that no other is answered and no worker started.
The peer that has most of the connections loses one.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Final

RESERVED: Final = 128
"""Descriptors that are kept for operators, workers and files; of few, half of them."""
LEAST_CLOSED: Final = 8
CLOSED_SHARE: Final = 64
"""So many connections are closed at once, or this part of the descriptors: to count them takes time
in proportion to how many there are."""
EACH: Final = 3
"""Descriptors that a connection takes at most: under TLS its own, and a pair to its front end."""
LOOKED_AT: Final = 64
"""Connections of a peer that are looked at for one without a request."""
LOG_SECONDS: Final = 60.0
"""How often it is logged that connections were closed."""

log = logging.getLogger(__name__)


class Room(Enum):
    """Whether a process may take another connection."""

    THERE = auto()
    SOON = auto()
    """In the next round of the event loop: others were closed for it."""
    NONE = auto()
    """All that are open have a request."""


def raise_descriptor_limit() -> None:
    """Have this process, and those that it starts, use all descriptors that the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_descriptors() -> int:
    """How many may be in use when a client's connection is accepted."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 2, soft - RESERVED)


def descriptors_in_use() -> int:
    """Of this process. O(n)."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Crowd:
    """The connections of a process that may have to give way. Used on one event loop."""

    def __init__(
        self,
        most: int | None,
        clock: Callable[[], float] = time.monotonic,
        in_use: Callable[[], int] = descriptors_in_use,
    ) -> None:
        """`most` descriptors may be in use; None: as many as there are."""
        self._most = most
        self._clock = clock
        self._in_use = in_use
        self._unseen = 0
        """Connections that may come before descriptors are counted again."""
        self._peers: dict[str, OrderedDict[object, Callable[[], bool]]] = {}
        """By peer the connections, the oldest first."""
        self._peer_of: dict[object, str] = {}
        self._closed = 0
        """Since the last line of the log."""
        self._log_at = -LOG_SECONDS

    def enter(self, connection: object, address: object, give_way: Callable[[], bool]) -> None:
        """A connection is there. `give_way` closes it unless a request of it is under way, and says
        whether it did. O(1)."""
        peer = peer_name(address)
        self._peer_of[connection] = peer
        self._peers.setdefault(peer, OrderedDict())[connection] = give_way

    def leave(self, connection: object) -> None:
        """It is gone; without effect if it was not there. O(1)."""
        peer = self._peer_of.pop(connection, None)
        if peer is not None:
            del self._peers[peer][connection]
            if not self._peers[peer]:
                del self._peers[peer]

    def room(self) -> Room:
        """Whether another connection may be taken: asked before each. Some that have no request are
        closed where descriptors are short. Amortized O(1), and O(peers) for each that is closed.
        """
        if self._most is None:
            return Room.THERE
        if self._unseen > 0:
            self._unseen -= 1
            return Room.THERE
        spare = self._most - self._in_use()
        if spare > 0:
            self._unseen = spare // EACH - 1  # this one is not counted yet
            return Room.THERE
        wanted = max(LEAST_CLOSED, self._most // CLOSED_SHARE)
        closed = 0
        while closed < wanted and self._close_one():
            closed += 1
        self._log(closed)
        return Room.SOON if closed else Room.NONE

    def _log(self, closed: int) -> None:
        self._closed += closed
        now = self._clock()
        if now - self._log_at < LOG_SECONDS:
            return
        log.warning(
            "%d descriptors are in use: %d connections without a request were closed; %s has most "
            "of those that are open",
            self._most,
            self._closed,
            max(self._peers, key=self._count, default="no client"),
        )
        self._log_at, self._closed = now, 0

    def _count(self, peer: str) -> int:
        return len(self._peers[peer])

    def _close_one(self) -> bool:
        """Close the oldest without a request of the peer with most; those that have one are looked
        at again after all others."""
        if not self._peers:
            return False
        peer = max(self._peers, key=self._count)
        connections = self._peers[peer]
        for _ in range(min(LOOKED_AT, len(connections))):
            connection, give_way = next(iter(connections.items()))
            if give_way():
                self.leave(connection)
                return True
            connections.move_to_end(connection)
        return False


def peer_name(address: object) -> str:
    """Who is at the other end: an address, or a network where each client has one (IPv6)."""
    if not isinstance(address, tuple):
        return "a local process"
    host = str(address[0])
    try:
        known = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if known.version == 6:
        return str(ipaddress.ip_network((known, 64), strict=False))
    return str(known)
