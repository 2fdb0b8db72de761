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
from typing import Final, NamedTuple

import msgspec

from appliance.forking.orders import ORDER_BYTES, Fork, Forked
from appliance.forking.pauses import FIRST_PAUSE_SECONDS, pause_after

UNANSWERED_SECONDS: Final = 60.0
"""A process that has forked others, and answers no order for so long, hangs."""

log = logging.getLogger(__name__)


class Child(NamedTuple):
    """A process that was forked. `handle` is its pidfd, which the receiver closes."""

    pid: int
    handle: int


class _Waiting(NamedTuple):
    """An order without an answer."""

    on_forked: Callable[[Child], None]
    on_lost: Callable[[], None]


class ForkServer:
    """Forks processes. Used on one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[str], Mapping[str, str]],
        children: str,
        unanswered_seconds: float = UNANSWERED_SECONDS,
    ) -> None:
        """`command`, with the number of the socket of orders behind it, starts what is forked from;
        `environment` makes its variables, given the folder for its temporary files. `children`
        names in the log what is forked."""
        self.deaths = 0
        """In a row, before it forked anything."""
        self._command = tuple(command)
        self._environment = environment
        self._children = children
        self._unanswered_seconds = unanswered_seconds
        self._numbers = itertools.count(1)
        self._orders: socket.socket | None = None
        """While there is a process."""
        self._process: asyncio.subprocess.Process | None = None
        self._forking: dict[int, _Waiting] = {}
        self._began = asyncio.Event()
        self._worked = False
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and go on keeping it. Without effect if that was done."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End the process, which ends none that was forked from it."""
        self._stopping.set()
        self._kill()
        if self._task is not None:
            await self._task

    async def until_there(self) -> None:
        """Return when something can be ordered: it is forked once vLLM is imported."""
        await self._began.wait()

    def next_number(self) -> int:
        """The number of a process that is to be forked."""
        return next(self._numbers)

    def fork(
        self,
        order: Fork,
        descriptors: Sequence[int],
        on_forked: Callable[[Child], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Order a process. It gets copies of the descriptors. `on_forked` is called when it is
        there, or `on_lost` if there will be none: the copies are closed then."""
        if self._orders is None:
            on_lost()
            return
        message = msgspec.msgpack.encode(order)
        try:
            socket.send_fds(self._orders, [message], descriptors, socket.MSG_DONTWAIT)
        except OSError as error:  # the process is dying, or reads nothing
            log.warning("a process was not ordered: %s", error)
            on_lost()
            return
        self._forking[order.number] = _Waiting(on_forked, on_lost)
        loop = asyncio.get_running_loop()
        loop.call_later(self._unanswered_seconds, self._check, order.number, self._process)

    def _check(self, number: int, process: asyncio.subprocess.Process | None) -> None:
        """End a process that hangs. One that still imports vLLM may take its time."""
        if number in self._forking and process is self._process and self._worked:
            log.error("the process that %s are forked from hangs, and is killed", self._children)
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _keep(self) -> None:
        with tempfile.TemporaryDirectory(
            prefix="appliance-forking-", ignore_cleanup_errors=True
        ) as scratch:
            pause = FIRST_PAUSE_SECONDS
            while True:
                self._worked = False
                try:
                    await self._run_once(scratch)
                except OSError:
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
            loop.add_reader(ours, self._answered, ours)
            self._orders, self._process = ours, process
            if self._stopping.is_set():
                process.kill()
            self._began.set()
            await process.wait()
            self._began.clear()
            self._orders = self._process = None
            loop.remove_reader(ours)
            while self._answered(ours):  # what it said before
                pass
            lost, self._forking = self._forking, {}
            for waiting in lost.values():
                waiting.on_lost()

    def _answered(self, orders: socket.socket) -> bool:
        try:
            message, handles, _, _ = socket.recv_fds(orders, ORDER_BYTES, 1, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not message:
            asyncio.get_running_loop().remove_reader(orders)
            return False
        forked = msgspec.msgpack.decode(message, type=Forked)
        self._worked = True
        self.deaths = 0
        waiting = self._forking.pop(forked.number, None)
        if not handles:
            if waiting is not None:
                waiting.on_lost()
        elif waiting is not None:
            waiting.on_forked(Child(forked.pid, handles[0]))
        else:
            kill(handles[0])
            os.close(handles[0])
        return True


def kill(process: int) -> None:
    """End the process of a pidfd by force."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
