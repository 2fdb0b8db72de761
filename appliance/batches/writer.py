"""Writes the records of one batch: several at once, in order, and each before it counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from appliance.batches.disk import Disk
from appliance.batches.log import BatchLog
from appliance.batches.records import Batch, LineDone, Record
from appliance.errors import IllegalTransition

RETRY_SECONDS: Final = 5.0
"""How long after a disk refused to write it is asked again."""

log = logging.getLogger("appliance.batches")


class _Waiting(NamedTuple):
    record: Record
    on_written: Callable[[], None]
    written: asyncio.Future[None]


class BatchWriter:
    """Takes records of a batch until it is stopped. While the disk does not take them (it is full,
    say), callers that bring one wait."""

    def __init__(
        self, batch: Batch, written: BatchLog, disk: Disk, *, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._batch = batch
        self._log = written
        self._disk = disk
        self._retry_seconds = retry_seconds
        self._queue: deque[_Waiting] = deque()
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.stuck = False
        """Whether the disk refused what was tried last."""

    async def write(self, record: Record, on_written: Callable[[], None] = lambda: None) -> None:
        """The batch has this record from now on, also after a power cut. Raises `IllegalTransition`
        for one that it cannot have any more. A record is not taken back by not waiting for it.

        `on_written` is called in the step in which the batch gets the record, so that it counts
        even if this call is cancelled: the record may be the last that the batch waits for."""
        if self._task.done():  # though the caller that stopped it may not know yet
            raise IllegalTransition(f"{self._batch.id}: it is over, and then {record!r:.200}")
        written = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(record, on_written, written))
        self._idle.clear()
        self._news.set()
        await written

    async def flush(self) -> None:
        """Returns when all that was brought is written, also records whose callers left."""
        await self._idle.wait()

    async def stop(self) -> None:
        """End when all that was brought is written, or the disk refuses it."""
        self._stopping.set()
        self._news.set()
        await self._task

    async def _run(self) -> None:
        while self._queue or not self._stopping.is_set():
            if not self._queue:
                self._idle.set()
                self._news.clear()
                await self._news.wait()
                continue
            if not await self._write(self._take()):
                return

    def _take(self) -> list[_Waiting]:
        """What may be written together: outcomes, which do not depend on one another."""
        group = [self._queue.popleft()]
        if isinstance(group[0].record, LineDone):
            while self._queue and isinstance(self._queue[0].record, LineDone):
                group.append(self._queue.popleft())
        return group

    async def _write(self, group: list[_Waiting]) -> bool:
        legal = []
        for waiting in group:
            if self._batch.allows(waiting.record):
                legal.append(waiting)
            elif not waiting.written.done():
                text = f"{self._batch.id}: {self._batch.status} and then {waiting.record!r:.200}"
                waiting.written.set_exception(IllegalTransition(text))
        if not legal:
            return True
        if not await self._put([waiting.record for waiting in legal]):
            return False
        for waiting in legal:
            self._batch.apply(waiting.record)
            waiting.on_written()
            if not waiting.written.done():
                waiting.written.set_result(None)
        return True

    async def _put(self, records: list[Record]) -> bool:
        """Whether they are on the disk; if not, we are to stop."""
        while True:
            try:
                await self._disk(self._log.append, records)
            except OSError as error:
                if not self.stuck:
                    log.error("%s is paused: %s", self._batch.id, error)
                self.stuck = True
            else:
                if self.stuck:
                    log.info("%s goes on", self._batch.id)
                self.stuck = False
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._retry_seconds)
            if self._stopping.is_set():
                return False
