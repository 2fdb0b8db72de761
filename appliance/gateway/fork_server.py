"""The process that front ends and the compiler of guides are forked from, kept alive.

It has imported vLLM (`appliance.frontend.zygote`), so that what is forked is there at once.
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
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from appliance.platform.children import module_command, without_secrets
from appliance.service.front_frames import Fork, Forked, Role
from appliance.worker.process import FIRST_PAUSE_SECONDS, pause_after

ZYGOTE: Final = module_command("appliance.frontend.zygote")
ANSWER_BYTES: Final = 1024

log = logging.getLogger(__name__)


class ForkServer:
    """Forks processes. Used on one event loop."""

    def __init__(self, command: Sequence[str] = ZYGOTE) -> None:
        """`command`, with the number of the socket of orders behind it, is what is forked from."""
        self.deaths = 0
        """In a row, before it forked anything."""
        self._command = tuple(command)
        self._numbers = itertools.count(1)
        self._orders: socket.socket | None = None
        """While there is a process."""
        self._process: asyncio.subprocess.Process | None = None
        self._forking: dict[int, Callable[[int], None]] = {}
        self._began = asyncio.Event()
        self._worked = False
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process, and go on keeping it."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End the process, which ends none that was forked from it."""
        self._stopping.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
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
        number: int,
        role: Role,
        sockets: Sequence[socket.socket],
        on_forked: Callable[[int], None],
    ) -> None:
        """Order a process. It gets the sockets, which are closed here, and `on_forked` its pidfd.
        If there will be none, the other ends of the sockets come to their end."""
        order = msgspec.msgpack.encode(Fork(number, role))
        with contextlib.ExitStack() as closing:
            for one in sockets:
                closing.enter_context(one)
            if self._orders is None:
                return
            self._forking[number] = on_forked
            descriptors = [one.fileno() for one in sockets]
            with contextlib.suppress(OSError):  # the process is dying
                socket.send_fds(self._orders, [order], descriptors, socket.MSG_DONTWAIT)

    async def _keep(self) -> None:
        with tempfile.TemporaryDirectory(
            prefix="appliance-front-", ignore_cleanup_errors=True
        ) as scratch:
            pause = FIRST_PAUSE_SECONDS
            while True:
                self._worked = False
                try:
                    await self._run_once(scratch)
                except OSError:
                    log.exception("the process to fork from could not be started")
                if self._stopping.is_set():
                    return
                self.deaths = 0 if self._worked else self.deaths + 1
                pause = pause_after(pause, worked=self._worked)
                log.warning(
                    "the process that front ends are forked from died; next in %.2f s", pause
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
                    env=_environment(scratch),
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
            self._forking.clear()

    def _answered(self, orders: socket.socket) -> bool:
        try:
            message, handles, _, _ = socket.recv_fds(orders, ANSWER_BYTES, 1, socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not message:
            asyncio.get_running_loop().remove_reader(orders)
            return False
        number = msgspec.msgpack.decode(message, type=Forked).number
        self._worked = True
        self.deaths = 0
        on_forked = self._forking.pop(number, None)
        for handle in handles:
            if on_forked is None:
                kill(handle)
                os.close(handle)
            else:
                on_forked(handle)
        return True


def kill(process: int) -> None:
    """End the process of a pidfd by force."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)


def _environment(scratch: str) -> dict[str, str]:
    """No device, no threads that a fork would leave behind."""
    return {
        **without_secrets(os.environ),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TMPDIR": scratch,
    }
