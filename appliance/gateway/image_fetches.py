"""The images that one front end has fetched: each is sent, and counts until the front end read it.

What a front end has not read is in the core's memory, and one that leaves too much unread counts as
hung. So one file is on the way to it at a time, and nothing but its reading, or its end, makes
room for the next one: also if the call is over that wanted the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from appliance.gateway.image_wire import NotFetched
from appliance.gateway.remote_images import RemoteImages, TooManyFetches
from appliance.service.front_frames import FetchedImage, FetchImage

log = logging.getLogger("appliance.gateway")


class ImageFetches:
    """Of one front end, one at a time for each of its calls."""

    def __init__(
        self, images: Callable[[], RemoteImages], send: Callable[[FetchedImage], None]
    ) -> None:
        self._images = images
        self._send = send
        self._fetching: dict[int, asyncio.Task[None]] = {}
        """By call, until the file is sent."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._was_read = asyncio.Event()

    def ask(self, frame: FetchImage, owner: str) -> None:
        """Fetch an image of a client."""
        if frame.call in self._fetching:
            self._send(FetchedImage(call=frame.call, refused="another one is being fetched"))
            return
        task = asyncio.get_running_loop().create_task(self._fetch(frame, owner))
        self._fetching[frame.call] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def read(self) -> None:
        """The front end has read the file that was sent last."""
        self._was_read.set()

    def stop(self, call: int) -> None:
        """The call is over."""
        if (task := self._fetching.pop(call, None)) is not None:
            task.cancel()

    def lost(self) -> None:
        """The front end is gone, and with it what it has not read."""
        self._fetching.clear()
        for task in self._tasks:
            task.cancel()

    async def _fetch(self, frame: FetchImage, owner: str) -> None:
        try:
            async with self._images().fetched(owner, frame.url) as file, self._sending:
                del self._fetching[frame.call]  # nothing stops it any more
                self._was_read.clear()
                self._send(FetchedImage(call=frame.call, file=file))
                await self._was_read.wait()
        except NotFetched as error:
            busy = isinstance(error, TooManyFetches)
            self._refuse(FetchedImage(call=frame.call, refused=str(error), busy=busy))
        except Exception:
            log.exception("an image cannot be fetched")
            self._refuse(FetchedImage(call=frame.call, refused="it cannot be fetched"))

    def _refuse(self, answer: FetchedImage) -> None:
        self._fetching.pop(answer.call, None)
        self._send(answer)
