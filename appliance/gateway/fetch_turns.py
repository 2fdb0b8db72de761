"""Whose image is fetched: so many fetches at once, and so many of one client.

A turn lasts until all is over that works for it: a thread that waits for a name server cannot be
ended, so the client that it works for waits for it, too, and others do not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class NoTurn(Exception):
    """None came within the time that a client waits for one."""


class Turn:
    """That of one fetch."""

    def __init__(self) -> None:
        self._jobs: list[Future[Any]] = []

    async def in_thread(self, function: Callable[[str], T], value: str) -> T:
        """What a function returns that a thread of its own calls. If this is cancelled, the thread
        goes on, and the turn with it; the end of the process does not wait for it."""
        job: Future[T] = Future()
        job.set_running_or_notify_cancel()

        def work() -> None:
            try:
                job.set_result(function(value))
            except Exception as error:
                job.set_exception(error)

        self._jobs.append(job)
        threading.Thread(target=work, name="fetching", daemon=True).start()
        return await asyncio.wrap_future(job)

    def then(self, release: Callable[[], None]) -> None:
        """Call `release` when no thread works for it any more."""
        jobs = [asyncio.wrap_future(job) for job in self._jobs if not job.done()]
        if jobs:
            working = asyncio.gather(*jobs, return_exceptions=True)
            working.add_done_callback(lambda _: release())
        else:
            release()


class FetchTurns:
    """Those of all clients."""

    def __init__(self, at_once: int, of_client: int, max_wait_seconds: float) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._each = of_client
        self._max_wait_seconds = max_wait_seconds
        self._of_client: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[Turn]:
        """Wait for a turn of a client. Raises `NoTurn`."""
        mine = self._of_client.setdefault(owner, asyncio.Semaphore(self._each))
        try:
            # A client with many waits for its own first, and not in front of others.
            async with asyncio.timeout(self._max_wait_seconds), AsyncExitStack() as waiting:
                await waiting.enter_async_context(mine)
                await waiting.enter_async_context(self._free)
                waiting.pop_all()
        except TimeoutError as error:
            raise NoTurn from error

        def release() -> None:
            self._free.release()
            mine.release()

        turn = Turn()
        try:
            yield turn
        finally:
            turn.then(release)
