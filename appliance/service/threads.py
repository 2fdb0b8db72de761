"""Work that may take hours, in a thread of its own; the process ends without waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def in_own_thread(act: Callable[[], T], name: str) -> T:
    """What `act` returns or raises. A caller that is cancelled leaves the thread at work."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = act()
        except Exception as error:  # whatever it is, the caller has to have it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
