"""The process that replays: its answer, its limits, and whatever else may become of it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from appliance.daemon.autopilot.replay_process import ReplayFailed, replay
from appliance.service.autopilot import AutopilotMode, AutopilotTerms
from appliance.service.policy_report import PolicyChoice
from tests.patience import PATIENCE_SECONDS
from tests.unit.daemon.autopilot.test_runner import IN_TIME, Rig
from tests.unit.doubles.daemon import Box, box_maker
from tests.unit.lab.test_journal_workload import write
from tests.unit.policies.strangers import HEAD, install

pytestmark = pytest.mark.thorough

AEGAEON = PolicyChoice(use=("aegaeon",))
IN_LINE = (
    sys.executable,
    "-P",
    "-c",
    "import sys; from appliance.lab.advice.__main__ import main\n"
    "sys.exit(main(sys.argv[1:], step_back=lambda: None))",
)
"""The process without the lowest priority: with it, it waits as long as other tests run."""
CPU_SECONDS = 5.0
"""Of a replay, which is enough for the winner to show with this journal."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a box with the wrong policy."""
    path = tmp_path_factory.mktemp("wrong") / "journal"
    write(path, policy="aegaeon")
    return path


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Box]]:
    with box_maker(monkeypatch, slabs=40) as make:
        yield make


@pytest.fixture
async def rig(make_box: Callable[..., Box], tmp_path: Path, journal: Path) -> AsyncIterator[Rig]:
    """A daemon whose journal is that one."""
    rig = Rig(make_box(policy="aegaeon", journal=tmp_path / "own"), tmp_path)
    rig.pilot.replay = partial(replay, command=IN_LINE)
    rig.terms = AutopilotTerms(
        mode=AutopilotMode.APPLY,
        interval_seconds=10.0,
        watch_seconds=10.0,
        cpu_seconds=CPU_SECONDS,
        journal=str(journal),
    )
    rig.pilot.configure(rig.terms, AEGAEON)
    yield rig
    await rig.pilot.stop()
    rig.box.daemon._decisions.close()


def children() -> list[psutil.Process]:
    """The process of the replay, once it is there."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if "appliance.lab.advice" in process.cmdline():
                found.append(process)
    return found


def weight(process: psutil.Process) -> str:
    """Of its session, among others; nothing where the kernel does not group by sessions."""
    path = Path(f"/proc/{process.pid}/autogroup")
    return path.read_text().split()[-1] if path.exists() else ""


async def test_a_wrong_policy_is_replaced(rig: Rig) -> None:
    """From the file of the journal, by a process of its own, to the policies that decide."""
    rig.serve_until_due(IN_TIME)
    await rig.noted(1)
    (note,) = rig.pilot.report().notes
    assert note.what == "applied", note.reason
    assert (note.gain or 0) > 0.3 > (note.error or 1)
    assert (await rig.active()).use != ("aegaeon",)


async def test_what_won_earlier_is_tried(journal: Path) -> None:
    """The process is told: what wins may be one that it would not have tried itself."""
    both = PolicyChoice(use=("appliance", "aegaeon"))
    found = await replay(
        AutopilotTerms(journal=str(journal)), CPU_SECONDS, 45.0, (both,), command=IN_LINE
    )
    assert found.chosen is not None
    assert found.chosen == both


async def test_its_limits(rig: Rig) -> None:
    """It has the lowest priority, also as a session, and an end of its processor time and memory,
    and it does not outlive the daemon's interest."""
    rig.pilot.replay = replay
    rig.serve_until_due(IN_TIME)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := children()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (process,) = found
        while process.rlimit(resource.RLIMIT_DATA)[1] != 4 << 30:  # noqa: ASYNC110
            # The last that it sets.
            await asyncio.sleep(0.01)
    assert process.nice() == 19
    assert weight(process) in ("", "19")
    assert process.rlimit(resource.RLIMIT_CPU) == (10, 10)
    await rig.pilot.stop()
    assert not process.is_running()


PRINTER = """
    @hookimpl
    def round(self):
        print("a round")
        os.write(1, b"{}\\n")
        open(__file__ + ".asked", "w").close()
"""
PRINTS = "import os\nprint('imported')\nprint('x' * 500_000)\n"


def asked(folder: Path) -> list[Path]:
    """What the printer left when it was asked."""
    return list(folder.glob("*.asked"))


async def test_policies_that_print_do_not_spoil_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, journal: Path
) -> None:
    """When they are imported, and when they are asked, in Python or below it: the answer has a
    descriptor of its own, and what they print is taken, and forgotten."""
    install(tmp_path, "printer", PRINTER, head=PRINTS + HEAD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    first = (PolicyChoice(use=("printer",)),)  # so there is CPU time for it
    terms = AutopilotTerms(journal=str(journal))
    found = await replay(terms, CPU_SECONDS, 45.0, first, command=IN_LINE)
    assert found.current == AEGAEON
    assert asked(tmp_path)


async def ended(journal: Path | str, command: tuple[str, ...] = IN_LINE) -> str:
    """Why there is no recommendation."""
    with pytest.raises(ReplayFailed) as caught:
        await replay(AutopilotTerms(journal=str(journal)), 40.0, 45.0, command=command)
    return str(caught.value)


async def test_what_cannot_be_advised_on(tmp_path: Path, journal: Path) -> None:
    """A journal that says too little, or is none."""
    short = tmp_path / "short"
    write(short, until=2.0)
    said = await ended(short)
    assert said.startswith("policy.autopilot_window: ")
    assert "requests arrived" in said
    (tmp_path / "none").write_text("no journal\n")
    assert "none: JSON is malformed" in await ended(tmp_path / "none")
    assert "No such file" in await ended(tmp_path / "gone")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9, without an answer"),
        ("raise SystemExit(3)", "ended with status 3, without an answer"),
        ("raise OSError('no\\nluck')", "status 1, without an answer; it said: Traceback"),
        ("raise OSError('no\\nluck')", "OSError: no luck"),
        ("print('{')", "ended with status 0, without an answer"),
        ("print('x' * (1 << 22))", "longer than 1048576 bytes"),
        ("while True: pass", "ended by signal 9, without an answer"),
    ],
)
async def test_a_process_that_goes_wrong(program: str, said: str) -> None:
    """It crashes, babbles, or computes until its processor time is over."""
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    assert said in await ended("journal", (sys.executable, "-c", limits + program))


async def test_one_that_cannot_be_started() -> None:
    assert "cannot be started" in await ended("journal", ("/nowhere",))


LEAVES = """
import os, sys, time
child = os.fork()
if child == 0:
    {child}
    time.sleep({seconds})
    os._exit(0)
open(sys.argv[1], "w").write(str(child))
{parent}
"""
ANSWER = 'print("{\\"error\\": \\"an answer\\"}", flush=True)'


@pytest.mark.parametrize(
    ("parent", "said"),
    [
        (ANSWER, "an answer"),
        (ANSWER + "\ntime.sleep(10**6)", "an answer"),
        ("", "ended with status 0, without an answer"),
    ],
)
@pytest.mark.parametrize("holds", ["pass", "os.close(1)", "os.close(1); os.close(2)"])
async def test_what_a_policy_leaves_behind_is_ended(
    tmp_path: Path, parent: str, said: str, holds: str
) -> None:
    """A child that sleeps, with the pipes of the process or without them: it does not hold the
    answer, and is gone."""
    program = LEAVES.format(child=holds, parent=parent, seconds=10 * PATIENCE_SECONDS)
    file = tmp_path / "child"
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert said in await ended(file, (sys.executable, "-c", program))
    left = int(file.read_text())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_left_the_session_does_not_hold_the_answer(tmp_path: Path) -> None:
    """It has the pipes, and no signal reaches it."""
    program = LEAVES.format(child="os.setsid()", parent=ANSWER, seconds=10 * PATIENCE_SECONDS)
    file, open_before = tmp_path / "child", psutil.Process().num_fds()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await ended(file, (sys.executable, "-c", program)) == "an answer"
    os.kill(int(file.read_text()), signal.SIGKILL)
    await asyncio.sleep(0)  # closed pipes are closed
    assert psutil.Process().num_fds() <= open_before


async def test_long_words_are_cut() -> None:
    """A policy's error is one of them, of any length; notes and events keep them."""
    program = "import json; print(json.dumps({'error': 'x' * 500_000}))"
    assert await ended("journal", (sys.executable, "-c", program)) == "x" * 1000 + "…"
