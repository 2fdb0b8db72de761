"""The process that others are forked from, kept alive, as the daemon sees it.

It has imported vLLM (`appliance.forking.zygote`), so that what is forked is there at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from appliance.forking.orders import ORDER_BYTES, Fork, Forked
from appliance.forking.pauses import FIRST_PAUSE_SECONDS, pause_after
from appliance.platform.descriptors import receive_descriptors

UNANSWERED_SECONDS: Final = 60.0
"""A process that has forked others, and answers no order for so long, hangs."""
STARTING_SECONDS: Final = 600.0
"""The same for one that has forked none yet: it imports vLLM while workers do. On few
processors that takes minutes, and a process that is killed for it would never get further."""

log = logging.getLogger(__name__)


class NotForked(Exception):
    """The process died at once, or the one that it was to be forked from died before it had forked
    any."""


class Child(NamedTuple):
    """A process that was forked. `handle` is its pidfd, which the receiver closes."""

    pid: int
    handle: int


OnLost: TypeAlias = Callable[[OSError | None], None]
"""Called when no process comes of an order. An error: none could be forked, which says nothing of
what the process was to be. None: as with `NotForked`."""


class _Waiting(NamedTuple):
    """An order without an answer. `since` is the event loop's time."""

    since: float
    on_forked: Callable[[Child], None]
    on_lost: OnLost


class ForkServer:
    """Forks processes. Used on one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[str], Mapping[str, str]],
        children: str,
        unanswered_seconds: float = UNANSWERED_SECONDS,
        starting_seconds: float = STARTING_SECONDS,
    ) -> None:
        """`command`, with the number of the socket of orders behind it, starts what is forked from;
        `environment` makes its variables, given the folder for its temporary files. `children`
        names what is forked, in the log and in `trouble`. A process that answers no order for so
        many seconds is killed: `starting_seconds` before it forked anything, and
        `unanswered_seconds` afterwards."""
        self.deaths = 0
        """In a row, before it forked anything."""
        self._command = tuple(command)
        self._environment = environment
        self._children = children
        self._unanswered_seconds = unanswered_seconds
        self._starting_seconds = starting_seconds
        self._numbers = itertools.count(1)
        self._orders: socket.socket | None = None
        """While there is a process."""
        self._process: asyncio.subprocess.Process | None = None
        self._forking: dict[int, _Waiting] = {}
        self._began = asyncio.Event()
        self._worked = False
        self._alive_at = 0.0
        """When the process was started, or answered last, by the event loop's time."""
        self._alarm: asyncio.TimerHandle | None = None
        """While orders wait for an answer."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and go on keeping it. Without effect if that was done."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())
            self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End the process, which ends none that was forked from it."""
        self._stopping.set()
        self._kill()
        if self._task is not None:
            await asyncio.wait((self._task,))  # how it ended was logged

    async def until_there(self) -> None:
        """Return when something can be ordered: it is forked once vLLM is imported."""
        await self._began.wait()

    def trouble(self) -> str | None:
        """What keeps processes from being forked, as far as is known."""
        if self._process is not None and self._forking and not self._worked:
            seconds = asyncio.get_running_loop().time() - self._alive_at
            tries = f", after {self.deaths} that died" if self.deaths else ""
            return f"what {self._children} are forked from starts for {seconds:.0f} s now{tries}"
        if self.deaths:
            return (
                f"what {self._children} are forked from died {self.deaths} times before it forked "
                "any; see the log"
            )
        return None

    def next_number(self) -> int:
        """The number of a process that is to be forked."""
        return next(self._numbers)

    def fork(
        self,
        order: Fork,
        descriptors: Sequence[int],
        on_forked: Callable[[Child], None],
        on_lost: OnLost = lambda _: None,
    ) -> None:
        """Order a process. It gets copies of the descriptors. `on_forked` is called when it is
        there, or `on_lost` if there will be none: the copies are closed then."""
        if self._orders is None:
            on_lost(OSError(f"what {self._children} are forked from is not there"))
            return
        message = msgspec.msgpack.encode(order)
        try:
            socket.send_fds(self._orders, [message], descriptors, socket.MSG_DONTWAIT)
        except OSError as error:  # the process is dying, or reads nothing
            log.warning("a process was not ordered: %s", error)
            on_lost(error)
            return
        now = asyncio.get_running_loop().time()
        self._forking[order.number] = _Waiting(now, on_forked, on_lost)
        self._watch()

    async def child(self, order: Fork, descriptors: Sequence[int]) -> Child:
        """Order a process as soon as something can be ordered, which may take minutes, and wait
        until it is there. The descriptors stay open until then. If this is cancelled, the process
        is ended. Raises `OSError`, and `NotForked`."""
        await self.until_there()
        born: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

        def end(child: Child) -> None:
            kill(child.handle)
            os.close(child.handle)

        def on_forked(child: Child) -> None:
            if born.done():  # it is not waited for any more
                end(child)
            else:
                born.set_result(child)

        def on_lost(error: OSError | None) -> None:
            if not born.done():
                born.set_exception(error or NotForked())

        self.fork(order, descriptors, on_forked, on_lost)
        try:
            return await born
        except asyncio.CancelledError:
            if not born.cancelled() and born.exception() is None:  # it came in the same moment
                end(born.result())
            raise

    def _watch(self) -> None:
        """Set the alarm anew, if orders wait."""
        self._silence()
        if self._forking and self._orders is not None:
            self._alarm = asyncio.get_running_loop().call_at(self._due(), self._hangs)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _due(self) -> float:
        """When the process has hung for too long: it answers one order after the other, so the
        time counts from its last answer, or from the oldest order if that came later."""
        oldest = next(iter(self._forking.values()))
        limit = self._unanswered_seconds if self._worked else self._starting_seconds
        return max(self._alive_at, oldest.since) + limit

    def _hangs(self) -> None:
        """End the process."""
        doing = "hangs" if self._worked else f"forked none in {self._starting_seconds:g} s"
        log.error("the process that %s are forked from %s: killed", self._children, doing)
        self._forget()
        self._kill()

    def _forget(self) -> None:
        """Give the process no more orders."""
        self._began.clear()
        self._orders = None
        self._silence()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("no %s can be forked any more", self._children, exc_info=error)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        with contextlib.ExitStack() as folders:
            scratch = None
            while True:
                self._worked = False
                try:
                    # What is forked keeps the folder, also when the process is another one.
                    scratch = scratch or folders.enter_context(
                        tempfile.TemporaryDirectory(
                            prefix="appliance-forking-", ignore_cleanup_errors=True
                        )
                    )
                    await self._run_once(scratch)
                except Exception:  # whatever it is, nothing else would start the next one
                    log.exception(
                        "the process to fork %s from could not be started", self._children
                    )
                if self._stopping.is_set():
                    return
                self.deaths = 0 if self._worked else self.deaths + 1
                pause = pause_after(pause, worked=self._worked)
                log.warning(
                    "the process that %s are forked from died; next in %.2f s",
                    self._children,
                    pause,
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                if self._stopping.is_set():
                    return

    async def _run_once(self, scratch: str) -> None:
        """One life of the process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=self._environment(scratch),
                )
            try:
                loop.add_reader(ours, self._answered, ours)
                self._orders, self._process = ours, process
                self._alive_at = loop.time()
                if self._stopping.is_set():
                    process.kill()
                self._began.set()
                await process.wait()
            finally:
                self._kill()
                self._forget()
                self._process = None
                loop.remove_reader(ours)
            while self._answered(ours):  # what it said before
                pass
            lost, self._forking = self._forking, {}
            error = None
            if self._worked:
                error = OSError(f"what {self._children} are forked from died")
            for waiting in lost.values():
                waiting.on_lost(error)

    def _answered(self, orders: socket.socket) -> bool:
        try:
            message, handles = receive_descriptors(orders, ORDER_BYTES, 1, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not message:
            asyncio.get_running_loop().remove_reader(orders)
            return False
        forked = msgspec.msgpack.decode(message, type=Forked)
        self._worked = True
        self._alive_at = asyncio.get_running_loop().time()
        self.deaths = 0
        waiting = self._forking.pop(forked.number, None)
        self._watch()
        if not handles:
            if waiting is not None:
                waiting.on_lost(OSError(forked.error) if forked.error else None)
        elif waiting is not None:
            waiting.on_forked(Child(forked.pid, handles[0]))
        else:
            kill(handles[0])
            os.close(handles[0])
        return True


async def wait_ended(process: int) -> None:
    """Return when the process of a pidfd has ended."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(process)


def kill(process: int) -> None:
    """End the process of a pidfd by force."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
