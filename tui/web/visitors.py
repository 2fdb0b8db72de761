"""Who was let in: cookies, and links that open once."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Protocol

KEPT_SECONDS = 12 * 3600.0
MOST = 64


class Open(Protocol):
    """Something that a visitor has open."""

    async def close(self) -> object:
        """End it."""


class Visitor:
    """A browser that was let in, until then. Its dashboards send this key to the daemon; `by_link`:
    they have the server's own rights."""

    def __init__(self, key: str | None, until: float, *, by_link: bool) -> None:
        self.key = key
        self.until = until
        self.by_link = by_link
        self.open: set[Open] = set()


class Visitors:
    """All that are let in, found by their cookies. Of those only hashes are kept: how long a search
    takes tells nothing of a cookie."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds, from any start."""
        self._clock = clock
        self._known: dict[bytes, Visitor] = {}
        self._link: str | None = None

    def admit(self, key: str | None, *, by_link: bool = False) -> str:
        """Admit a visitor; the cookie. The oldest of too many without an open page is forgotten."""
        self._forget_expired()
        if len(self._known) >= MOST:
            idle = (name for name, visitor in self._known.items() if not visitor.open)
            self._known.pop(next(idle, next(iter(self._known))))
        cookie = secrets.token_urlsafe(32)
        until = self._clock() + KEPT_SECONDS
        self._known[_hash(cookie)] = Visitor(key, until, by_link=by_link)
        return cookie

    def find(self, cookie: str) -> Visitor | None:
        self._forget_expired()
        return self._known.get(_hash(cookie))

    def forget(self, cookie: str) -> Visitor | None:
        """They have to be let in again; who it was."""
        return self._known.pop(_hash(cookie), None)

    def open(self) -> Iterator[Open]:
        """All that is open."""
        return (one for visitor in list(self._known.values()) for one in list(visitor.open))

    def link(self) -> str:
        """The secret of a new link; the one before opens nothing any more."""
        self._link = secrets.token_urlsafe(32)
        return self._link

    def redeem(self, link: str) -> bool:
        """Whether it is the link that opens; it does so once."""
        known = self._link
        if known is None or not hmac.compare_digest(known.encode(), link.encode(errors="replace")):
            return False
        self._link = None
        return True

    def _forget_expired(self) -> None:
        now = self._clock()
        self._known = {name: one for name, one in self._known.items() if one.until > now}


def _hash(cookie: str) -> bytes:
    return sha256(cookie.encode(errors="replace")).digest()
