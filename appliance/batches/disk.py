"""Work that waits for the disk, off the event loop: in threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

_THREADS: Final = 4

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Disk:
    """A few threads. Work that has begun goes on even if its caller stops waiting."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "disk")
        self._works: set[asyncio.Future[Any]] = set()

    async def __call__(self, work: Callable[_P, _R], *arguments: _P.args, **named: _P.kwargs) -> _R:
        return await asyncio.shield(self.begin(work, *arguments, **named))

    def begin(
        self, work: Callable[_P, _R], *arguments: _P.args, **named: _P.kwargs
    ) -> asyncio.Future[_R]:
        """Done when the work is over; a caller that may stop waiting shields it."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, lambda: work(*arguments, **named))
        self._works.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._works.discard(work)
        if not work.cancelled():
            work.exception()  # its caller gets it; asyncio need not report it

    async def close(self) -> None:
        """Returns when all that was begun is over."""
        await asyncio.gather(*self._works, return_exceptions=True)
        self._threads.shutdown()
