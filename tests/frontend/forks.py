"""What the front ends of tests are forked from, as those of a daemon are: vLLM is imported once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from appliance.forking.orders import Fork
from appliance.forking.server import Child, ForkServer
from appliance.gateway.front_forks import front_forks
from appliance.service.front_frames import Role
from tests.patience import PATIENCE_SECONDS

T = TypeVar("T")


class FrontForks:
    """One for all tests of a process. Their event loops come and go, so it has one of its own, in a
    thread. Nothing is started before the first order."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: ForkServer | None = None

    async def fork(self, descriptors: Sequence[int]) -> Child:
        """A front end with copies of the descriptors of frames and of connections. If there is
        none, raises `OSError`, `NotForked` or `TimeoutError`."""
        return await asyncio.wrap_future(self._soon(self._fork(descriptors)))

    def stop(self) -> None:
        """No more; returns when the process has ended that front ends were forked from."""
        if self._loop is not None and self._thread is not None:
            self._soon(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="forks", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        if self._server is not None:
            await self._server.stop()

    async def _fork(self, descriptors: Sequence[int]) -> Child:
        if self._server is None:
            self._server = front_forks()
            self._server.start()
        order = Fork(self._server.next_number(), Role.FRONT_END)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._server.child(order, descriptors)
