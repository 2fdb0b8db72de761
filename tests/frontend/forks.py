"""What the front ends of tests are forked from, as those of a daemon are: vLLM is imported once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from appliance.forking.orders import Fork
from appliance.forking.server import Child
from appliance.gateway.front_forks import front_forks
from appliance.service.front_frames import Role

T = TypeVar("T")


class FrontForks:
    """One for all tests of a process. They have event loops of their own, which come and go, so it
    has one, too, in a thread; nothing is started before the first order."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def fork(self, descriptors: Sequence[int]) -> Child:
        """A front end with copies of the descriptors of frames and of connections. Raises `OSError`
        if there is none."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="forks")
            self._thread.start()
            self._server = front_forks()
        return await asyncio.wrap_future(self._soon(self._fork(descriptors)))

    def stop(self) -> None:
        """No more; returns when it has ended."""
        if self._loop is not None and self._thread is not None:
            self._soon(self._server.stop()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _soon(self, work: Coroutine[Any, Any, T]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _fork(self, descriptors: Sequence[int]) -> Child:
        self._server.start()
        await self._server.until_there()
        forked: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

        def lost(error: OSError | None) -> None:
            forked.set_exception(error or OSError("the front end died at once"))

        order = Fork(self._server.next_number(), Role.FRONT_END)
        self._server.fork(order, descriptors, forked.set_result, lost)
        return await forked
