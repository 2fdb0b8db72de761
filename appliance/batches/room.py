"""Room for so many sequences at once, given in the order in which it was asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """What is as large as all of the room, or larger, gets all of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, sequences: int) -> AsyncIterator[None]:
        """Wait for room, and have it meanwhile."""
        wanted = min(sequences, self.size)
        ready = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, ready))
        self._give()
        try:
            await ready
            yield
        finally:
            if ready.done() and not ready.cancelled():
                self._free += wanted
            elif (wanted, ready) in self._waiting:
                self._waiting.remove((wanted, ready))
            self._give()

    def _give(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, ready = self._waiting.popleft()
            if not ready.done():
                self._free -= wanted
                ready.set_result(None)
