"""What is forked from a process that is kept alive, on one of a few lines that imports nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from appliance.forking.orders import Fork
from appliance.forking.server import Child, ForkServer, wait_ended
from tests.patience import PATIENCE_SECONDS

SERVING = """
import os, socket, sys, tempfile
from appliance.forking import zygote

def tell(descriptor):
    assert not os.get_inheritable(descriptor)
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
STUCK_UNTIL = """
if not os.path.exists({path!r}):
    os.kill(os.getpid(), 19)
"""
SLOW = """
fork = os.fork

def fork_when_told():
    with open({path!r}) as pipe:
        pipe.read()
    return fork()

os.fork = fork_when_told
"""


class Asked:
    """An order and what became of it."""

    def __init__(self, forks: ForkServer, scratch: str = "") -> None:
        self.child: Child | None = None
        self.lost = False
        self.error: OSError | None = None
        self.news = asyncio.Event()
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        with theirs:
            order = Fork(forks.next_number(), "teller", scratch)
            forks.fork(order, [theirs.fileno()], self.on_forked, self.on_lost)

    def on_forked(self, child: Child) -> None:
        self.child = child
        self.news.set()

    def on_lost(self, error: OSError | None) -> None:
        self.lost, self.error = True, error
        self.news.set()

    async def told(self) -> str:
        """Its folder for temporary files."""
        said = await asyncio.get_running_loop().sock_recv(self.connection, 1024)
        return said.decode()

    async def end(self) -> None:
        """Have it end."""
        self.connection.close()
        if self.child is not None:
            await wait_ended(self.child.handle)
            os.close(self.child.handle)


def server(
    before: str = "",
    unanswered_seconds: float = PATIENCE_SECONDS,
    starting_seconds: float = PATIENCE_SECONDS,
) -> ForkServer:
    program = SERVING.format(before=before)
    command = (sys.executable, "-c", program)

    def environment(scratch: str) -> dict[str, str]:
        return {**os.environ, "TMPDIR": scratch}

    return ForkServer(command, environment, "tellers", unanswered_seconds, starting_seconds)


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
        assert not os.get_inheritable(first.child.handle)
        assert "appliance-forking-" in await first.told()
        assert await second.told() == "/"

        await forks.stop()

        for asked in (first, second):
            assert asked.child is not None
            os.kill(asked.child.pid, 0)
            await asked.end()


async def ended(connection: socket.socket) -> None:
    """Return when the process with the other end is gone, and what it has said is read."""
    while await asyncio.get_running_loop().sock_recv(connection, 1024):
        pass


async def test_a_process_can_be_waited_for() -> None:
    """From before anything can be ordered, until it is there."""
    forks, (connection, theirs) = server(), socket.socketpair()
    connection.setblocking(False)
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with theirs:
            child = await forks.child(Fork(forks.next_number(), "teller"), [theirs.fileno()])
        os.kill(child.pid, 0)
        connection.shutdown(socket.SHUT_WR)
        await ended(connection)
        await wait_ended(child.handle)
        await forks.stop()
    os.close(child.handle)
    connection.close()


async def test_a_process_that_is_not_waited_for_any_more_is_ended(tmp_path: Path) -> None:
    """It is forked after that."""
    pipe = tmp_path / "told"
    os.mkfifo(pipe)
    forks, (connection, theirs) = server(SLOW.format(path=str(pipe))), socket.socketpair()
    connection.setblocking(False)
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forks.until_there()
        with theirs:
            order = Fork(forks.next_number(), "teller")
            waits = asyncio.create_task(forks.child(order, [theirs.fileno()]))
            # It can be opened once the order was read, which waits for it.
            told = await asyncio.to_thread(pipe.open, "wb")
        with told:
            waits.cancel()
            await asyncio.wait([waits])
        await ended(connection)
        await forks.stop()
    connection.close()


async def test_a_process_that_comes_as_the_wait_is_cancelled_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both in one moment of the event loop: its handle is not left behind either."""
    forks, loop = server(), asyncio.get_running_loop()
    monkeypatch.setattr(forks, "until_there", AsyncMock())
    process = await asyncio.create_subprocess_exec("sleep", "600")
    handle = os.pidfd_open(process.pid)

    def fork(
        order: Fork, descriptors: object, on_forked: Callable[[Child], None], _: object
    ) -> None:
        loop.call_soon(on_forked, Child(process.pid, handle))
        loop.call_soon(waits.cancel)

    monkeypatch.setattr(forks, "fork", fork)
    waits = asyncio.create_task(forks.child(Fork(1, "teller"), []))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.wait([waits])
        assert waits.cancelled()
        assert await process.wait() == -signal.SIGKILL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


async def test_an_order_is_lost_with_the_process(tmp_path: Path) -> None:
    """It is told, as is one that comes while there is none; the next process forks again."""
    forks = server(DIES_AT_FIRST.format(path=str(tmp_path / "died")))
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        early = Asked(forks)
        assert early.lost, "there is no process yet"
        assert early.error is not None, "which says nothing of what was ordered"
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
            assert "too many processes" in str(asked.error)
            await asked.end()
    assert forks.deaths == 0
    assert forks.trouble() is None
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
        assert second.error is not None, "it forked before"
        await second.end()
        await forks.until_there()
        third = Asked(forks)
        await third.news.wait()
        await third.end()
    assert third.child is not None
    await forks.stop()


async def test_a_process_that_hangs_as_it_starts_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may import for long, and not without end. The log says so, once, and until then `trouble`
    does."""
    there = tmp_path / "there"
    forks = server(STUCK_UNTIL.format(path=str(there)), starting_seconds=0.5)
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forks.until_there()
        asked = [Asked(forks) for _ in range(3)]
        assert str(forks.trouble()).startswith("what tellers are forked from starts for ")
        await asked[0].news.wait()
        there.touch()  # before the next one starts
        forks._starting_seconds = PATIENCE_SECONDS
        for each in asked:
            await each.news.wait()
            assert each.lost
            assert each.error is None, "it never forked any"
            await each.end()
        assert "died 1 times before it forked any" in str(forks.trouble())
        await forks.until_there()
        last = Asked(forks)
        await last.news.wait()
        await last.end()
    assert last.child is not None
    assert forks.trouble() is None
    await forks.stop()
    killed = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.getMessage() for each in killed] == [
        "the process that tellers are forked from forked none in 0.5 s: killed"
    ]


async def test_orders_behind_others_are_given_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that answers one after the other does not hang, though the last one waits for
    longer than the limit."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = asyncio.get_running_loop()
    late = 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + late)
    forks = server(SLOW.format(path=str(pipe)))
    forks.start()
    async with asyncio.timeout(100 * PATIENCE_SECONDS):
        await forks.until_there()
        asked = [Asked(forks) for _ in range(4)]
        for each in asked:
            late += 0.75 * PATIENCE_SECONDS
            # Opens when the process reads, and is closed at once.
            await asyncio.to_thread(pipe.write_bytes, b"")
            await each.news.wait()
            assert each.child is not None
            await each.end()
    await forks.stop()


async def test_a_start_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There may be no room for its folder, or any other cause: it is logged, and ends nothing."""
    failures = iter([OSError("no space left"), ValueError("any other")])
    folder = tempfile.TemporaryDirectory

    def no_folder(**options: object) -> tempfile.TemporaryDirectory[str]:
        if error := next(failures, None):
            raise error
        return folder()

    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_folder)
    forks = server()
    forks.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forks.until_there()
        assert forks.deaths == 2
        asked = Asked(forks)
        await asked.news.wait()
        assert asked.child is not None
        await asked.end()
        await forks.stop()
    assert "no space left" in caplog.text
    assert "any other" in caplog.text
