"""Large bodies of requests that are in memory: no more than may be, and no client has them all.

A body counts from when it is large until its request is answered. When there are too many, the
client that has most loses the newest of those that are still coming in. If none of its bodies are,
the one that grows gives way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from litestar.types import HTTPReceiveMessage, Receive, Scope

from appliance.http.errors import ApiError
from appliance.service.front_frames import BodyActivity

CLIENT_SHARE: Final = 0.75
"""Of all that may be, what one client may have."""
FREE_BYTES: Final = 64 * 1024
"""Of a body that is not counted: so much the server reads of each connection anyway."""
MOST_SHOWN: Final = 32
"""Bodies that operators are shown, the largest ones."""

Client: TypeAlias = tuple[str | None, str | None]
"""The name of a key and, without one, an address."""


def client_of(key: str | None, scope: Scope) -> Client:
    """Whose body a request has."""
    peer = scope.get("client")
    return key, None if key is not None or peer is None else peer[0]


class BodiesFull(ApiError):
    """429: bodies of requests take all that they may; this one is not read any further."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            429,
            f"bodies of requests that are under way take all of the {most_bytes} bytes that they "
            "may have (api.max_bodies); try again later",
            code="too_many_bodies",
            headers={"Retry-After": "1"},
        )


class BodyTooLarge(ApiError):
    """413: what is kept with a body is more than one client may ever have."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            413,
            f"with what is kept for it the body has more than {most_bytes} bytes, "
            f"{CLIENT_SHARE} of api.max_bodies: send fewer or smaller images, or shorter sound",
            code="body_too_large",
        )


class HeldBody:
    """A body that is held, as far as it has come."""

    def __init__(self, budget: BodyBudget, client: Client, path: str, began: float) -> None:
        self.client = client
        self.path = path
        self.began = began
        self.size_bytes = 0
        self.counted_bytes = 0
        self.whole = False
        """Whether all of it has come."""
        self._budget = budget
        self._cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def keep(self, size_bytes: int) -> None:
        """Count so much that is kept with it. Raises `BodiesFull` if it is too much now, and
        `BodyTooLarge` if it always is."""
        most_bytes = int(CLIENT_SHARE * self._budget.most_bytes)
        if self.size_bytes + size_bytes > most_bytes:
            raise BodyTooLarge(most_bytes)
        self._budget.grow(self, size_bytes)
        if self._cut.done():
            raise BodiesFull(self._budget.most_bytes)

    def cut(self) -> None:
        """It makes room for others: nothing more of it is read."""
        if not self._cut.done():
            self._cut.set_result(None)

    def receiving(self, receive: Receive) -> Receive:
        """`receive` for an application, which counts the body. It raises `BodiesFull`."""

        async def counted() -> HTTPReceiveMessage:
            if self.whole:
                return await receive()  # type: ignore[return-value]
            message: Any = await self._unless_cut(receive)
            if message["type"] == "http.request":
                self._budget.grow(self, len(message.get("body", b"")))
                if self._cut.done():
                    raise BodiesFull(self._budget.most_bytes)
                self.whole = not message.get("more_body", False)
            return message  # type: ignore[no-any-return]

        return counted

    async def _unless_cut(self, receive: Receive) -> Any:
        """The next message. Most bodies come in one piece, which is there already."""
        coming = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((coming, self._cut), return_when=asyncio.FIRST_COMPLETED)
            if self._cut.done():
                raise BodiesFull(self._budget.most_bytes)
            return coming.result()
        finally:
            coming.cancel()


class BodyBudget:
    """All bodies that a process holds. A piece of a large body costs time in proportion to the
    clients with bodies, and to the bodies if there are too many."""

    def __init__(
        self,
        most_bytes: int,
        *,
        free_bytes: int = FREE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bodies of at most `free_bytes` do not count."""
        self.most_bytes = most_bytes
        self._free_bytes = free_bytes
        self._clock = clock
        self._held: dict[HeldBody, None] = {}
        """Oldest first."""
        self._of_client: Counter[Hashable] = Counter()

    @property
    def held_bytes(self) -> int:
        """Of all bodies that count."""
        return self._of_client.total()

    @contextmanager
    def hold(self, key: str | None, scope: Scope) -> Iterator[HeldBody]:
        """Meanwhile the body of a request of this key is held."""
        body = HeldBody(self, client_of(key, scope), scope["path"], self._clock())
        self._held[body] = None
        try:
            yield body
        finally:
            del self._held[body]
            self._count(body, 0)

    def grow(self, body: HeldBody, size_bytes: int) -> None:
        """More of a body came. Bodies are cut, perhaps this one, until all that are left are no
        more than may be."""
        body.size_bytes += size_bytes
        if body.size_bytes <= self._free_bytes:
            return
        self._count(body, body.size_bytes)
        most_of_client = CLIENT_SHARE * self.most_bytes
        while self._of_client[body.client] > most_of_client:
            self._cut_newest(body.client, body)
        while self.held_bytes > self.most_bytes:
            most = max(self._of_client, key=self._of_client.__getitem__)
            self._cut_newest(most, body)

    def _cut_newest(self, client: Hashable, otherwise: HeldBody) -> None:
        """Cut the newest body of a client that is still coming in; without one, the other body."""
        for body in reversed(self._held):
            if body.client == client and not body.whole and body.counted_bytes:
                break
        else:
            body = otherwise
        self._count(body, 0)
        body.cut()

    def _count(self, body: HeldBody, counted_bytes: int) -> None:
        self._of_client[body.client] += counted_bytes - body.counted_bytes
        body.counted_bytes = counted_bytes
        if not self._of_client[body.client]:
            del self._of_client[body.client]

    def coming(self) -> list[BodyActivity]:
        """Those still coming in that have come in part, the largest first."""
        bodies = [body for body in self._held if body.counted_bytes and not body.whole]
        bodies.sort(key=lambda body: -body.size_bytes)
        now = self._clock()
        return [
            BodyActivity(
                path=body.path,
                key=body.client[0],
                received_bytes=body.size_bytes,
                age_seconds=now - body.began,
            )
            for body in bodies[:MOST_SHOWN]
        ]
