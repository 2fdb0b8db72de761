"""How the daemon starts a worker's process: forked from one that has imported vLLM, or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final, Protocol

from appliance.forking.orders import Fork
from appliance.forking.server import Child, ForkServer, kill
from appliance.memory import mapping
from appliance.platform.children import module_command, without_secrets
from appliance.platform.cpus import deal_cpus, read_cpus, show_cpus

ROLE: Final = "worker"
"""Of what is forked."""


class Life(Protocol):
    """A worker's process."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End it by force; without effect if it has ended."""

    async def wait(self) -> object:
        """Return when it has ended."""


class Start(Protocol):
    """Starts a worker. `connection` is its socket, `host_fd` the host tier, `scratch` the folder
    for its temporary files. Raises `OSError` if nothing could be started, and `NotForked`."""

    async def __call__(self, connection: socket.socket, host_fd: int, scratch: str, /) -> Life: ...


async def start_fresh(connection: socket.socket, host_fd: int, scratch: str) -> Life:
    """A process that imports vLLM itself, for a worker with a GPU."""
    process = await asyncio.create_subprocess_exec(
        *module_command("appliance.worker", str(connection.fileno()), str(host_fd)),
        pass_fds=(connection.fileno(), host_fd),
        stdin=asyncio.subprocess.DEVNULL,
        env=_environment(scratch),
    )
    return _Fresh(process)


class _Fresh:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> object:
        return await self._process.wait()


class ForkedStart:
    """Has workers on processors forked. What they are forked from starts with the first of them."""

    def __init__(self, cpus: str, ranks: int) -> None:
        """`cpus` are the processors of the first instance, in vLLM's notation, which its ranks
        share. OpenMP reads how many there are as it is loaded: other instances have as many, or
        set another number."""
        first = show_cpus(deal_cpus(read_cpus(cpus), ranks)[0])
        command = module_command("appliance.worker.zygote", first)
        self._forks = ForkServer(command, _environment_to_fork, "workers")

    async def __call__(self, connection: socket.socket, host_fd: int, scratch: str) -> Life:
        self._forks.start()
        # The kernel ends a worker when this is closed: its parent is not the daemon.
        theirs, ours = os.pipe()
        try:
            order = Fork(self._forks.next_number(), ROLE, scratch)
            child = await self._forks.child(order, [connection.fileno(), host_fd, theirs])
            return _Forked(child, ours)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

    def trouble(self) -> str | None:
        """What keeps workers from being forked, as far as is known."""
        return self._forks.trouble()

    async def stop(self) -> None:
        """Fork no more. Workers that live go on."""
        await self._forks.stop()


class _Forked:
    def __init__(self, child: Child, lifeline: int) -> None:
        self.pid = child.pid
        self._handle = child.handle
        self._lifeline = lifeline
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._on_end)

    def kill(self) -> None:
        if not self._ended.is_set():
            kill(self._handle)

    async def wait(self) -> object:
        return await self._ended.wait()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._handle)
        self._ended.set()
        os.close(self._handle)
        os.close(self._lifeline)


def _environment_to_fork(scratch: str) -> Mapping[str, str]:
    """numpy's products, which no engine uses, would start threads when numpy is imported."""
    return {**_environment(scratch), "OPENBLAS_NUM_THREADS": "1"}


def _environment(scratch: str) -> Mapping[str, str]:
    return {**mapping.environment(without_secrets(os.environ)), "TMPDIR": scratch}
