"""The keeper of a worker process, on a worker of a few lines that needs no engine."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance import framing
from appliance.forking import pauses
from appliance.memory import mapping
from appliance.worker import frames
from appliance.worker import process as processes
from appliance.worker.process import WorkerProcess
from tests.patience import PATIENCE_SECONDS

HELLO = frames.Hello(3, 42, 20)
CONFIGURATION = frames.Configure(
    version=frames.PROTOCOL_VERSION,
    instance=3,
    cpus="",
    slabs=20,
    slab_bytes=10,
    host_bytes=1000,
    models=[],
)

SCRIPT = """#!{python} -IS
import socket, sys
daemon = socket.socket(fileno=int(sys.argv[-2]))
configuration = daemon.recv(65536)
{body}
"""
GREET = f"daemon.sendall({framing.encode(HELLO)!r})\n"
WAIT_FOR_ONE_MORE = "daemon.recv(65536)\n"
IGNORE_EVERYTHING = "while daemon.recv(65536):\n    pass\n"


class Keeper:
    """A `WorkerProcess` and what it told."""

    def __init__(self, host_fd: int) -> None:
        self.messages: list[frames.Up] = []
        self.lost: list[int] = []
        self.stillborn: list[int] = []
        self.failures: list[BaseException] = []
        self.news = asyncio.Event()
        self.process = WorkerProcess(
            CONFIGURATION,
            host_fd,
            self.on_message,
            self.on_lost,
            self.on_stillborn,
            self.on_failure,
        )

    def on_message(self, message: frames.Up) -> None:
        self.messages.append(message)
        self.news.set()

    def on_lost(self, instance: int) -> None:
        self.lost.append(instance)
        self.news.set()

    def on_stillborn(self, instance: int, deaths: int) -> None:
        assert instance == 3
        self.stillborn.append(deaths)
        self.news.set()

    def on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self.news.set()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not done():
                self.news.clear()
                await self.news.wait()


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Keeper]]:
    """Makes a keeper of workers that do what this piece of Python says."""
    script = tmp_path / "worker"
    host_fd = os.open("/dev/null", os.O_RDONLY)

    def make(body: str) -> Keeper:
        script.write_text(SCRIPT.format(python=sys.executable, body=body), encoding="utf-8")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return Keeper(host_fd)

    yield make
    os.close(host_fd)


async def test_a_worker_is_greeted_and_ended(keep: Callable[[str], Keeper]) -> None:
    """It gets its configuration, its frames are passed on, and `stop` ends it for good."""
    keeper = keep(GREET + WAIT_FOR_ONE_MORE)
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))
    pid = keeper.process.pid
    assert pid is not None

    await keeper.process.stop()

    assert keeper.messages == [HELLO]
    assert keeper.lost == [3]
    assert keeper.process.pid is None
    assert keeper.process.restarts == 0
    assert keeper.failures == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_worker_that_dies_is_started_again(keep: Callable[[str], Keeper]) -> None:
    """Every death after a greeting is told once, and another worker greets."""
    keeper = keep(GREET)
    keeper.process.start()

    await keeper.until(lambda: len(keeper.lost) == 2)
    await keeper.process.stop()

    assert keeper.process.restarts >= 1
    assert len(keeper.messages) == len(keeper.lost)


async def test_models_come_and_go_with_the_worker(keep: Callable[[str], Keeper]) -> None:
    """One that lives is told of a new one; those that come after it know what there is then."""
    echo = "import base64\nsys.stderr.write('')\n"
    keeper = keep(
        f"{echo}{GREET}daemon.sendall(daemon.recv(65536) and {framing.encode(HELLO)!r})\n"
    )
    models = [frames.WorkerModel(name, f"/{name}", "auto", 64, 8) for name in "ab"]
    keeper.process.start()
    await keeper.until(lambda: len(keeper.messages) == 1)

    keeper.process.add(models[0])
    await keeper.until(lambda: len(keeper.messages) >= 2)
    keeper.process.add(models[1])
    keeper.process.drop("a")
    keeper.process.add(msgspec.structs.replace(models[1], path="/other"))

    assert [model.path for model in keeper.process._configuration.models] == ["/other"]
    await keeper.process.stop()


async def test_a_worker_that_never_greeted_is_not_lost(
    keep: Callable[[str], Keeper],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is told of the death of somebody they never heard of; the pauses between such
    deaths grow to their limit."""
    monkeypatch.setattr(processes, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(pauses, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_SECONDS", 0.005)
    keeper = keep("")
    deaths: list[float] = []

    def note(message: str, instance: int, pause: float) -> None:
        deaths.append(pause)
        keeper.news.set()

    monkeypatch.setattr(processes.log, "warning", note)
    keeper.process.start()
    await keeper.until(lambda: len(deaths) >= 5)
    await keeper.process.stop()

    assert (keeper.messages, keeper.lost) == ([], [])
    assert keeper.stillborn[:5] == [1, 2, 3, 4, 5]
    assert deaths[:5] == pytest.approx([0.002, 0.004, 0.005, 0.005, 0.005])


async def test_a_worker_that_cannot_be_started_has_not_died(
    keep: Callable[[str], Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the box that lacks something: it is tried again, and counts as no death."""
    monkeypatch.setattr(processes, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(pauses, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_SECONDS", 0.005)
    keeper = keep(GREET + WAIT_FOR_ONE_MORE)
    spawn, refusals = asyncio.create_subprocess_exec, iter(range(6))

    async def lacking(*given: Any, **named: Any) -> asyncio.subprocess.Process:
        if next(refusals, None) is not None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await spawn(*given, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", lacking)
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))
    await keeper.process.stop()

    assert keeper.process.restarts == 6
    assert keeper.stillborn == []


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
async def test_a_worker_that_sends_garbage_is_ended(
    keep: Callable[[str], Keeper], garbage: bytes
) -> None:
    """After a frame that is none nothing else can be believed; the next worker starts anew."""
    keeper = keep(GREET + f"daemon.sendall({garbage!r})\n" + IGNORE_EVERYTHING)
    keeper.process.start()

    await keeper.until(lambda: bool(keeper.lost))
    await keeper.process.stop()

    assert keeper.messages[0] == HELLO
    assert keeper.failures == []


async def test_a_worker_that_does_not_end_is_killed(
    keep: Callable[[str], Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stop` asks first, and then does not ask."""
    monkeypatch.setattr(processes, "SHUTDOWN_SECONDS", 0.05)
    keeper = keep(GREET + IGNORE_EVERYTHING)
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))

    await keeper.process.stop()

    assert keeper.lost == [3]
    assert keeper.process.pid is None


async def test_a_worker_that_is_held_is_not_started_again(keep: Callable[[str], Keeper]) -> None:
    """It is ended by force, its death is told, and there is none until it is let go."""
    keeper = keep(GREET + IGNORE_EVERYTHING)
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))
    first = keeper.process.pid

    keeper.process.hold()
    keeper.process.send(frames.Shutdown())
    await keeper.until(lambda: bool(keeper.lost))
    task = keeper.process._task
    assert task is not None
    await task
    assert (keeper.process.pid, keeper.process.restarts) == (None, 0)

    keeper.process.let_go()
    await keeper.until(lambda: len(keeper.messages) == 2)
    assert keeper.process.pid not in (None, first)
    await keeper.process.stop()
    assert (keeper.lost, keeper.stillborn) == ([3, 3], [])


async def test_a_worker_may_be_let_go_before_it_has_ended(keep: Callable[[str], Keeper]) -> None:
    """Then another follows as after any death."""
    keeper = keep(GREET + IGNORE_EVERYTHING)
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))

    keeper.process.hold()
    keeper.process.let_go()
    await keeper.until(lambda: len(keeper.messages) == 2)

    await keeper.process.stop()
    assert keeper.lost == [3, 3]


async def test_a_worker_that_is_held_while_it_starts_is_not_listened_to(
    keep: Callable[[str], Keeper],
) -> None:
    """It is ended before it has said anything, and that is no death of its own."""
    keeper = keep(GREET + IGNORE_EVERYTHING)
    keeper.process.start()
    await asyncio.sleep(0)

    keeper.process.hold()
    task = keeper.process._task
    assert task is not None
    await task

    assert (keeper.messages, keeper.lost, keeper.stillborn) == ([], [], [])
    await keeper.process.stop()


async def test_a_worker_that_cannot_die_is_given_up(
    keep: Callable[[str], Keeper],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its driver keeps it, and its stream open: it is lost all the same, after a while."""
    monkeypatch.setattr(processes, "LAST_SECONDS", 0.01)
    keeper = keep(GREET + "import time\ntime.sleep(600)\n")
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))
    pid = keeper.process.pid
    assert pid is not None
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda process: None)

    keeper.process.hold()
    await keeper.until(lambda: bool(keeper.lost))

    assert keeper.lost == [3]
    assert f"process {pid} was killed and does not end" in caplog.text
    os.kill(pid, signal.SIGKILL)
    await keeper.process.stop()


async def test_a_callback_that_raises_is_a_failure(
    keep: Callable[[str], Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong in the daemon's own code is told, and the worker does not outlive it."""
    keeper = keep(GREET + IGNORE_EVERYTHING)

    def refuse(message: Any) -> None:
        raise LookupError("no such instance")

    keeper.process._on_message = refuse
    keeper.process.start()

    await keeper.until(lambda: bool(keeper.failures))

    assert [str(error) for error in keeper.failures] == ["no such instance"]
    assert keeper.process.pid is None


async def test_what_is_sent_to_a_dead_worker_is_lost(keep: Callable[[str], Keeper]) -> None:
    """Nobody is listening, and its death is told anyway; so there is nothing to raise."""
    keeper = keep(GREET)

    keeper.process.send(frames.Shutdown())
    await keeper.process.stop()

    assert keeper.messages == []


async def test_a_worker_copies_weights_past_the_cache(
    keep: Callable[[str], Keeper], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """glibc hears from which size on, unless somebody set that; their other settings stay."""
    told = "import os\nprint(os.environ['GLIBC_TUNABLES'], file=open({path!r}, 'w'))\n"
    for given, found in (
        ("", "glibc.cpu.x86_non_temporal_threshold=1048576"),
        ("glibc.rtld.nns=4", "glibc.rtld.nns=4:glibc.cpu.x86_non_temporal_threshold=1048576"),
        ("glibc.cpu.x86_non_temporal_threshold=9", "glibc.cpu.x86_non_temporal_threshold=9"),
    ):
        monkeypatch.setenv("GLIBC_TUNABLES", given)
        assert mapping.environment(os.environ)["GLIBC_TUNABLES"] == found
    keeper = keep(told.format(path=str(tmp_path / "told")) + GREET + WAIT_FOR_ONE_MORE)
    keeper.process.start()
    await keeper.until(lambda: bool(keeper.messages))
    await keeper.process.stop()
    assert (tmp_path / "told").read_text() == "glibc.cpu.x86_non_temporal_threshold=9\n"
