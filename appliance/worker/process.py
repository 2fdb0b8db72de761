"""Worker processes as the daemon sees them: started, fed with frames, listened to, restarted.

A worker talks over one end of a socket pair it inherits, so there is no path to leave behind. Its
death is the end of the stream; a new one is started after a pause that grows while workers die
without having done anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from appliance import framing
from appliance.forking.pauses import FIRST_PAUSE_SECONDS, pause_after
from appliance.forking.server import NotForked
from appliance.vocabulary import InstanceId
from appliance.worker import frames
from appliance.worker.starts import Life, Start, start_fresh

READ_BYTES = 1 << 18
SHUTDOWN_SECONDS = 2.0
LAST_SECONDS = 10.0
"""How long a killed worker may take to be gone; a driver in trouble may keep it for ever."""

log = logging.getLogger("appliance.worker")


class WorkerProcess:
    """Keeps one instance's worker alive. Callbacks run on the event loop.

    `on_message` gets every frame, `on_lost` is called once for each death after a `Hello`,
    `on_stillborn` for each before one, with how many there were in a row, and `on_failure` when
    keeping the worker alive itself failed (a callback raised).
    """

    def __init__(
        self,
        configuration: frames.Configure,
        host_fd: int,
        on_message: Callable[[frames.Up], None],
        on_lost: Callable[[InstanceId], None],
        on_stillborn: Callable[[InstanceId, int], None],
        on_failure: Callable[[BaseException], None],
        start: Start = start_fresh,
    ) -> None:
        self.instance = configuration.instance
        self.pid: int | None = None
        self.restarts = 0
        self.stillborn = 0
        """Deaths in a row before a `Hello`."""
        self._configuration = configuration
        self._host_fd = host_fd
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_stillborn = on_stillborn
        self._on_failure = on_failure
        self._start = start
        self._life: Life | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._held = False
        """Whether there is to be no worker."""
        self._worked = False
        self._greeted = False
        self._began = False

    def add(self, model: frames.WorkerModel) -> None:
        """Have this worker, and those that come after it, know another model."""
        self.drop(model.name)
        models = [*self._configuration.models, model]
        self._configuration = msgspec.structs.replace(self._configuration, models=models)
        self.send(frames.AddModel(model))

    def drop(self, name: str) -> None:
        """Have those that come after this worker not know the model."""
        models = [model for model in self._configuration.models if model.name != name]
        self._configuration = msgspec.structs.replace(self._configuration, models=models)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_alive())
        self._task.add_done_callback(self._ended)

    def hold(self) -> None:
        """End the worker by force, and start none before `let_go`. Its death is reported as any."""
        self._held = True
        self._kill()

    def let_go(self) -> None:
        """Start a worker again, after `hold`."""
        self._held = False
        self.stillborn = 0
        if self._task is not None and self._task.done() and not self._stopping.is_set():
            self.start()

    def send(self, message: frames.Down) -> None:
        """Order something; without effect if the worker is dead, as its death is reported."""
        if self._writer is not None:
            self._writer.write(framing.encode(message))

    async def stop(self) -> None:
        """End the worker, by force if it does not end by itself."""
        self._stopping.set()
        self.send(frames.Shutdown())
        if self._task is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._task), SHUTDOWN_SECONDS)
        except TimeoutError:
            self._kill()
            await self._task

    def _kill(self) -> None:
        if self._life is not None:
            self._life.kill()
        if self._writer is not None:
            # Ends the listening: the stream of a worker that a driver keeps from dying has no end.
            self._writer.close()
            self._writer = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _keep_alive(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._over:
            self._worked = False
            try:
                await self._run_once()
            except OSError:
                log.exception("worker of instance %d could not be started", self.instance)
            self._count_death()
            if self._over:
                return
            pause = pause_after(pause, worked=self._worked)
            log.warning("worker of instance %d died; next in %.2f s", self.instance, pause)
            self.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    @property
    def _over(self) -> bool:
        return self._stopping.is_set() or self._held

    def _count_death(self) -> None:
        if self._greeted:
            self.stillborn = 0
        elif self._began and not self._over:  # what could not be started says nothing of it
            self.stillborn += 1
            self._on_stillborn(self.instance, self.stillborn)

    async def _run_once(self) -> None:
        """One life of the worker. What it leaves in its temporary directory goes with it."""
        self._greeted = self._began = False
        with tempfile.TemporaryDirectory(
            prefix="appliance-worker-", ignore_cleanup_errors=True
        ) as scratch:
            await self._run_in(scratch)

    async def _run_in(self, scratch: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            life = await self._unless_stopped(self._start(theirs, self._host_fd, scratch))
        except OSError:
            ours.close()
            raise
        except NotForked:
            self._began = True  # a death as that of a worker that cannot import vLLM
            life = None
        finally:
            theirs.close()
        if life is None:
            ours.close()
            return
        self._life, self.pid, self._began = life, life.pid, True
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            if not self._over:
                self._writer = writer
                self.send(self._configuration)
                await self._listen(reader)
        finally:
            self._writer = None
            writer.close()
            life.kill()
            try:
                await asyncio.wait_for(life.wait(), LAST_SECONDS)
            except TimeoutError:
                log.error("process %d was killed and does not end", life.pid)
            self._life = self.pid = None
            if self._greeted:
                self._on_lost(self.instance)

    async def _unless_stopped(self, start: Coroutine[Any, Any, Life]) -> Life | None:
        """The process that is started; None if the worker is stopped before it is there."""
        starting = asyncio.ensure_future(start)
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return None
        return starting.result()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        decoder = frames.decoder_of_reports()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                try:
                    messages = decoder.feed(data)
                except (msgspec.DecodeError, ValueError):
                    log.exception("instance %d sent a bad frame", self.instance)
                    return
                for message in messages:
                    self._greeted = self._greeted or isinstance(message, frames.Hello)
                    self._worked = self._worked or isinstance(message, frames.Tokens)
                    self._on_message(message)
