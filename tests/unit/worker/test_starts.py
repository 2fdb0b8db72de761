"""Workers that are forked, from a process of a few lines that imports no engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from appliance import framing
from appliance.worker import frames, starts
from appliance.worker.process import WorkerProcess
from appliance.worker.starts import ForkedStart
from tests.patience import PATIENCE_SECONDS

CONFIGURATION = frames.Configure(
    version=frames.PROTOCOL_VERSION,
    instance=3,
    cpus="0-3",
    slabs=20,
    slab_bytes=10,
    host_bytes=1000,
    models=[],
)
PROGRAM = """
import os, socket, sys
from appliance.forking import zygote
from appliance.platform.children import die_with_writer

def work(connection, host_fd, daemon):
    die_with_writer(daemon)
    with socket.socket(fileno=connection) as daemon:
        daemon.recv(65536)
        daemon.sendall({hello!r})
        daemon.recv(65536)
    return 0

{before}
zygote.serve_orders(socket.socket(fileno=int(sys.argv[-1])), {{"worker": work}})
"""


class Keeper:
    """A `WorkerProcess` whose workers are forked, and what it told."""

    def __init__(self, host_fd: int) -> None:
        self.greeted = 0
        self.lost = 0
        self.stillborn = 0
        self.news = asyncio.Event()
        self.start = ForkedStart("0-3", 2)
        self.process = WorkerProcess(
            CONFIGURATION,
            host_fd,
            lambda _: self.count("greeted"),
            lambda _: self.count("lost"),
            lambda _, deaths: self.count("stillborn"),
            lambda error: pytest.fail(str(error)),
            self.start,
        )

    def count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.news.set()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not done():
                self.news.clear()
                await self.news.wait()

    async def stop(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.process.stop()
            await self.start.stop()


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Keeper]]:
    """Makes a keeper of workers that are forked after this piece of Python."""
    host_fd = os.open("/dev/null", os.O_RDONLY)
    hello = framing.encode(frames.Hello(3, 42, 20))

    def make(before: str = "") -> Keeper:
        program = PROGRAM.format(hello=hello, before=before)

        def command(module: str, *arguments: str) -> tuple[str, ...]:
            assert (module, *arguments) == ("appliance.worker.zygote", "0,1")
            return (sys.executable, "-c", program)

        monkeypatch.setattr(starts, "module_command", command)
        return Keeper(host_fd)

    yield make
    os.close(host_fd)


async def test_a_forked_worker_that_dies_is_forked_again(keep: Callable[[str], Keeper]) -> None:
    """Its pid is known, its death is told once, and another one follows. What they are forked from
    is prepared for the processors of the first rank."""
    keeper = keep("")
    keeper.process.start()
    await keeper.until(lambda: keeper.greeted == 1)
    first = keeper.process.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)
    await keeper.until(lambda: keeper.greeted == 2)

    second = keeper.process.pid
    assert second not in (None, first)
    assert (keeper.lost, keeper.stillborn, keeper.process.restarts) == (1, 0, 1)
    await keeper.stop()
    assert (keeper.lost, keeper.process.pid) == (2, None)


async def test_a_worker_that_is_held_is_ended(keep: Callable[[str], Keeper]) -> None:
    """By force; it is forked again when it is let go."""
    keeper = keep("")
    keeper.process.start()
    await keeper.until(lambda: keeper.greeted == 1)

    keeper.process.hold()
    await keeper.until(lambda: keeper.lost == 1)
    keeper.process.let_go()
    await keeper.until(lambda: keeper.greeted == 2)

    await keeper.stop()


async def test_what_cannot_import_has_no_workers(keep: Callable[[str], Keeper]) -> None:
    """Each attempt counts as a worker that died before it greeted, as one that cannot import vLLM
    does; it ends all the same when it is told to."""
    keeper = keep("raise SystemExit(1)")
    keeper.process.start()

    await keeper.until(lambda: keeper.stillborn == 2)

    await keeper.stop()
    assert (keeper.greeted, keeper.lost) == (0, 0)


async def test_a_worker_that_is_waited_for_can_be_stopped(keep: Callable[[str], Keeper]) -> None:
    """What it is to be forked from still imports vLLM then."""
    keeper = keep("os.read(int(sys.argv[-1]), 0); import signal; signal.pause()")
    keeper.process.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await keeper.start._forks.until_there()

    await keeper.stop()

    assert (keeper.greeted, keeper.lost, keeper.stillborn) == (0, 0, 0)


UNABLE_AT_FIRST = """
fork, failures = os.fork, iter(range(2))

def fork_later():
    for _ in failures:
        raise BlockingIOError("there are too many processes")
    return fork()

os.fork = fork_later
"""
DIES_AT_SECOND = """
fork, forks = os.fork, iter([True])

def fork_once():
    if next(forks, False):
        return fork()
    os.kill(os.getpid(), 9)

os.fork = fork_once
"""


async def test_a_fork_that_fails_says_nothing_of_the_worker(keep: Callable[[str], Keeper]) -> None:
    """There may be too many processes for the moment: it is tried again, and no death is told,
    which would end in quarantine."""
    keeper = keep(UNABLE_AT_FIRST)
    keeper.process.start()

    await keeper.until(lambda: keeper.greeted == 1)

    assert (keeper.stillborn, keeper.process.restarts) == (0, 2)
    assert keeper.start.trouble() is None
    await keeper.stop()


async def test_an_order_that_is_lost_says_nothing_of_the_worker(
    keep: Callable[[str], Keeper],
) -> None:
    """What had forked workers before died with the order."""
    keeper = keep(DIES_AT_SECOND)
    keeper.process.start()
    await keeper.until(lambda: keeper.greeted == 1)
    assert keeper.process.pid is not None

    os.kill(keeper.process.pid, signal.SIGKILL)
    await keeper.until(lambda: keeper.greeted == 2)

    assert (keeper.lost, keeper.stillborn) == (1, 0)
    await keeper.stop()
