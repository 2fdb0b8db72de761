"""What is forked from a process that is kept alive, on one of a few lines that imports nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

from appliance.forking.orders import Fork
from appliance.forking.server import Child, ForkServer
from tests.patience import PATIENCE_SECONDS

SERVING = """
import os, socket, sys, tempfile
from appliance.forking import zygote

def tell(descriptor):
    with socket.socket(fileno=descriptor) as daemon:
        daemon.sendall(tempfile.gettempdir().encode())
        daemon.recv(1)
    return 0

{before}
zygote.serve_orders(socket.socket(fileno=int(sys.argv[-1])), {{"teller": tell}})
"""
DIES_AT_FIRST = """
if not os.path.exists({path!r}):
    open({path!r}, "x")
    os.kill(os.getpid(), 9)
"""
UNABLE = """
def no_fork():
    raise BlockingIOError("there are too many processes")

os.fork = no_fork
"""
STUCK_AT_SECOND = """
fork, forks = os.fork, iter([True])

def fork_once():
    if next(forks, False):
        return fork()
    os.kill(os.getpid(), 19)

os.fork = fork_once
"""


class Asked:
    """An order and what became of it."""

    def __init__(self, forks: ForkServer, scratch: str = "") -> None:
        self.child: Child | None = None
        self.lost = False
        self.news = asyncio.Event()
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        with theirs:
            order = Fork(forks.next_number(), "teller", scratch)
            forks.fork(order, [theirs.fileno()], self.on_forked, self.on_lost)

    def on_forked(self, child: Child) -> None:
        self.child = child
        self.news.set()

    def on_lost(self) -> None:
        self.lost = True
        self.news.set()

    async def told(self) -> str:
        """Its folder for temporary files."""
        said = await asyncio.get_running_loop().sock_recv(self.connection, 1024)
        return said.decode()

    async def end(self) -> None:
        """Have it end."""
        self.connection.close()
        loop = asyncio.get_running_loop()
        if self.child is not None:
            gone = asyncio.Event()
            loop.add_reader(self.child.handle, gone.set)
            await gone.wait()
            loop.remove_reader(self.child.handle)
            os.close(self.child.handle)


def server(before: str = "", unanswered_seconds: float = PATIENCE_SECONDS) -> ForkServer:
    program = SERVING.format(before=before)
    command = (sys.executable, "-c", program)

    def environment(scratch: str) -> dict[str, str]:
        return {**os.environ, "TMPDIR": scratch}

    return ForkServer(command, environment, "tellers", unanswered_seconds)


async def test_a_process_is_forked_for_each_order() -> None:
    """It gets the descriptors, and a folder of its own if the order names one. Its process is told
    by number and by a handle that tells its end; it outlives what it was forked from."""
    forks = server()
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forks.until_there()
        first, second = Asked(forks), Asked(forks, "/")
        await first.news.wait()
        await second.news.wait()
        assert first.child is not None
        assert second.child is not None
        assert first.child.pid != second.child.pid
        assert "appliance-forking-" in await first.told()
        assert await second.told() == "/"

        await forks.stop()

        for asked in (first, second):
            assert asked.child is not None
            os.kill(asked.child.pid, 0)
            await asked.end()


async def test_an_order_is_lost_with_the_process(tmp_path: Path) -> None:
    """It is told, as is one that comes while there is none; the next process forks again."""
    forks = server(DIES_AT_FIRST.format(path=str(tmp_path / "died")))
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        early = Asked(forks)
        assert early.lost, "there is no process yet"
        await early.end()
        asked = early
        while asked.lost:
            await asked.end()
            await forks.until_there()
            asked = Asked(forks)
            await asked.news.wait()
        await asked.end()
    assert (tmp_path / "died").exists()
    await forks.stop()


async def test_a_process_that_cannot_fork_says_so() -> None:
    """There may be too many processes for the moment: it stays, with all that it imported."""
    forks = server(UNABLE)
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forks.until_there()
        for _ in range(2):
            asked = Asked(forks)
            await asked.news.wait()
            assert asked.lost
            await asked.end()
    assert forks.deaths == 0
    await forks.stop()


async def test_a_process_that_hangs_is_replaced() -> None:
    """It forked before, so it has imported what it had to, and no answer comes any more."""
    forks = server(STUCK_AT_SECOND, unanswered_seconds=0.5)
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forks.until_there()
        first = Asked(forks)
        await first.news.wait()
        await first.end()
        second = Asked(forks)
        await second.news.wait()
        assert second.lost
        await second.end()
        await forks.until_there()
        third = Asked(forks)
        await third.news.wait()
        await third.end()
    assert third.child is not None
    await forks.stop()
