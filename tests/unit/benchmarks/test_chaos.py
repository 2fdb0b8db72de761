"""What `make chaos` (`tests/chaos`) does when, and what it takes for wrong: it must not miss it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.access.keys import Key, KeyFile, digest
from benchmarks.endurance import batches as endured
from benchmarks.endurance.answers import Said
from benchmarks.endurance.asks import Ask, Book
from benchmarks.endurance.clients import PolicyStats
from benchmarks.endurance.connection import Connection
from benchmarks.endurance.watch import SLACK, Sample
from tests.chaos import batches, disturbances, load, moved_clock
from tests.chaos.batches import LastingBatches
from tests.chaos.daemon import Daemon
from tests.chaos.disk import small_disk
from tests.chaos.disturbances import World, disturb
from tests.chaos.flips import Files, flip_bit, is_content
from tests.chaos.load import LastingClient
from tests.chaos.moved_clock import ClockFile
from tests.chaos.record import AFTERMATH_SECONDS, CUT_OFF, NO_CONNECTION, End, Hit, Record
from tests.chaos.report import EXPECTED, defects, percentile, returned
from tests.chaos.schedule import schedule
from tests.hostile.bodies import CHAT
from tests.patience import PATIENCE_SECONDS

KINDS = ("a", "b", "c", "d")


# --- the schedule --------------------------------------------------------------------------------


def test_a_schedule_is_that_of_its_seed() -> None:
    """The same again for a seed, and another for another one."""
    first = schedule(1, 600.0, KINDS, 6.0)

    assert schedule(1, 600.0, KINDS, 6.0) == first
    assert schedule(2, 600.0, KINDS, 6.0) != first


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_before_one_comes_again(seed: int) -> None:
    """In time, within the time, and none twice in a row."""
    due = schedule(seed, 240.0, KINDS, 6.0)

    kinds = [one.kind for one in due]
    assert all(set(kinds[start : start + 4]) == set(KINDS) for start in range(0, len(kinds) - 3, 4))
    assert all(one != other for one, other in pairwise(kinds))
    assert all(3.0 <= b.at_seconds - a.at_seconds <= 9.1 for a, b in pairwise(due))
    assert due[-1].at_seconds < 240.0
    assert max(Counter(kinds).values()) - min(Counter(kinds).values()) <= 1


# --- what is hit ---------------------------------------------------------------------------------


def test_a_process_that_has_just_gone_is_not_the_one_that_is_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two disturbances may come at one moment, and the daemon tells of a worker for a while after
    its end: another one is drawn, and none is drawn before one is up."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    with subprocess.Popen(["sleep", "600"]) as living:
        shown = iter(([gone.pid], [], [living.pid]))
        world = World(Daemon.__new__(Daemon), Record(), Files.__new__(Files), None)
        world.daemon.up = asyncio.Event()
        world.daemon.up.set()

        async def workers() -> list[int]:
            return next(shown)

        monkeypatch.setattr(world.daemon, "workers", workers)
        monkeypatch.setattr(disturbances, "FREEZE_SECONDS", (0.0, 0.0))
        asyncio.run(disturb(world, "worker_freeze", 1))
        living.kill()

    (hit,) = world.record.hits
    assert (hit.missed, hit.what) == (None, f"process {living.pid} for 0.0 s")


# --- what explains the end of a request ----------------------------------------------------------


def unexplained(name: str | None, status: int, *hits: Hit) -> list[str]:
    """Complaints about a request from 100 to 110 s."""
    record = Record(hits=list(hits))
    record.ends.append(End("chat of a", name, status, 100.0, 110.0))
    return record.unexplained()


def hit(kind: str, began: float = 101.0, ended: float | None = 105.0) -> Hit:
    return Hit(kind, began, "", ended)


@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        (CUT_OFF, 0, "daemon_kill"),
        (CUT_OFF, 0, "front_end_kill"),
        (NO_CONNECTION, 0, "daemon_restart"),
        ("shutting_down", 503, "daemon_restart"),
        ("front_end_lost", 200, "front_end_kill"),
        ("front_end_lost", 200, "daemon_restart"),
        ("storage_failed", 507, "disk_full"),
        ("api_error", 500, "front_end_kill"),
    ],
)
def test_ends_that_are_explained(name: str, status: int, kind: str) -> None:
    """By a disturbance of the right kind at that time, and by nothing else."""
    assert unexplained(name, status, hit(kind)) == []
    assert unexplained(name, status, hit(kind, ended=None)) == []
    assert unexplained(name, status, hit(kind, 0.0, 100.0 - AFTERMATH_SECONDS)) == []
    for other in (
        (),
        (hit("clients_drop"),),
        (hit(kind, 110.1),),
        (hit(kind, 0.0, 99.0 - AFTERMATH_SECONDS),),
        (Hit(kind, 101.0, "", 105.0, missed="there was none"),),
    ):
        (complaint,) = unexplained(name, status, *other)
        assert "which nothing explains" in complaint


def test_refusals() -> None:
    """One that says to come later needs no disturbance; one without a name is never right."""
    assert unexplained("queue_full", 429) == []
    (complaint,) = unexplained(None, 503, hit("daemon_kill"))
    assert "without a name" in complaint


def test_a_guide_refused_for_good_is_explained_by_what_was_long_ago() -> None:
    """The compiler was ended with it: that is remembered for an hour."""
    long_ago = hit("guide_compiler_kill", 1.0, 2.0)

    assert unexplained("invalid_guide", 400, long_ago) == []
    assert unexplained("guide_unanswered", 503, long_ago) != []


# --- clients that go on ---------------------------------------------------------------------------


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, int]]:
    """A daemon that gives these answers, one on each connection, and hangs up behind each."""
    left = iter(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head, re.I)[1])  # type: ignore[index]
        await reader.readexactly(length)
        writer.write(next(left))
        writer.close()

    async with asyncio.timeout(PATIENCE_SECONDS):
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            yield host, port


def whole(status: int, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def begun(*tokens: int) -> bytes:
    """A stream that is cut off behind these tokens."""
    choice = {"index": 0, "delta": {}, "token_ids": tokens, "finish_reason": None}
    event = b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"
    head = b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n" % (len(event), event)


ASK = Ask("chat", CHAT, "c", {"model": "a", "stream": True}, 1, (Said("", [1, 2, 3], "stop"),))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not wait before they ask again."""
    monkeypatch.setattr(load, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(batches, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(endured, "LOOK_SECONDS", 0.0)


class Staying(LastingClient):
    def fate(self) -> str:
        return "stay"


@pytest.mark.parametrize(
    ("answer", "name", "complaints"),
    [
        (begun(1, 2), CUT_OFF, 0),
        (begun(1, 9), CUT_OFF, 1),
        (b"", CUT_OFF, 0),
        (whole(503, {"error": {"message": "m", "code": "starting"}}), "starting", 0),
        (whole(503, {"error": {"message": "m"}}), None, 0),
    ],
)
async def test_a_request_that_ends_otherwise(
    answer: bytes, name: str | None, complaints: int
) -> None:
    """How it ended is noted; what came of its answer has to be the beginning of the right one."""
    record, stats = Record(), PolicyStats()
    async with answering(answer) as address:
        book = Book({}, Path())
        client = Staying(Connection(*address), book, stats, random.Random(0), 0.0, record)
        await client.once(ASK)

    assert [end.name for end in record.ends] == [name]
    assert len(stats.complaints) == complaints


async def test_a_batch_that_is_gone() -> None:
    """It was acknowledged, and the API says by name that it is not there: it was harmed."""
    gone = {"error": {"message": "there is no batch b1", "code": "batch_not_found"}}
    record, stats, over = Record(), PolicyStats(), asyncio.Event()
    made = whole(200, {"id": "b1", "status": "validating"})
    async with answering(b"", whole(200, {"id": "f1"}), made, whole(404, gone)) as address:
        book = Empty({}, Path())
        client = Waiting(Connection(*address), book, stats, NeverCancels(), record)
        client.over = over
        await client.run(over)

    assert client.acknowledged == {"b1": "f1"}
    assert list(client.harmed) == ["b1"]
    assert [end.name for end in record.ends] == [CUT_OFF]
    assert stats.complaints == []


class NeverCancels(random.Random):
    def random(self) -> float:
        return 0.9


class Empty(Book):
    def batch_line(self, dice: random.Random) -> Ask:
        return ASK


class Waiting(LastingBatches):
    """Makes one batch."""

    over: asyncio.Event

    async def run_one(self) -> None:
        self.over.set()
        await super().run_one()


# --- flipped bits --------------------------------------------------------------------------------


def files(folder: Path) -> Files:
    """A state with a record and a content, a configuration with a drop-in, and a key."""
    state, config = folder / "state", folder / "appliance.toml"
    (state / "batches").mkdir(parents=True)
    (state / "batches" / "one").write_bytes(b"\0" * 64)
    (state / "batches" / "content").write_text('{"custom_id": "a"}\n')
    (state / "batches" / "empty").touch()
    keys = KeyFile(folder / "keys.json")
    keys.add(Key(name="a", sha256=digest("a"), created_seconds=0.0))
    return Files(state, config, keys.path)


@pytest.mark.parametrize("copied", [True, False])
def test_flips_are_in_what_the_daemon_keeps(tmp_path: Path, copied: bool) -> None:
    """In records and keys, not in contents. Keys with a copy stay damaged; of others, those that
    can still be read are as they were, and those that cannot are to be refused."""
    content = tmp_path / "state" / "batches" / "content"
    found = files(tmp_path)
    if not copied:
        (tmp_path / "keys.json.copy").unlink()
    keys = (tmp_path / "keys.json").read_bytes()
    refused = repaired = 0
    for seed in range(200):
        (tmp_path / "state" / "batches" / "one").write_bytes(b"\0" * 64)
        (tmp_path / "keys.json").write_bytes(keys)
        flipped = found.flip(1, random.Random(seed))
        record = (tmp_path / "state" / "batches" / "one").read_bytes()
        ones = sum(byte.bit_count() for byte in record)
        assert (len(flipped.places), ones) == (1, flipped.stored)
        refused += len(flipped.refused)
        repaired += len(flipped.repaired)
        assert all(not guard.readable for guard, _ in flipped.refused)
        assert all(path.read_bytes() != whole for path, whole in flipped.repaired)
        assert {whole for _, whole in flipped.refused + flipped.repaired} <= {keys}
        if not flipped.refused and not flipped.repaired:
            assert (tmp_path / "keys.json").read_bytes() == keys
    assert content.read_text() == '{"custom_id": "a"}\n'
    hits = found.found["keys.json"]
    assert found.found["batches"] + hits == 200
    if copied:
        assert (refused, repaired) == (0, hits)
    else:
        assert 0 < refused <= hits
        assert repaired == 0


def test_a_bit(tmp_path: Path) -> None:
    """Is flipped, and back."""
    path = tmp_path / "file"
    path.write_bytes(b"ab")
    flip_bit(path, 9)
    assert path.read_bytes() == b"a`"
    flip_bit(path, 9)
    assert path.read_bytes() == b"ab"
    assert not is_content(path)


# --- the clock, times and memory -----------------------------------------------------------------


def test_a_clock_that_is_moved(tmp_path: Path) -> None:
    """Another process that follows the file is wrong by as much, while it runs."""
    clock = ClockFile(tmp_path / "clock")
    source = (
        "import sys, time; from pathlib import Path; from tests.chaos.moved_clock import follow\n"
        "follow(Path(sys.argv[1]))\n"
        "for _ in sys.stdin: print(time.time(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, str(clock.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(moved_clock.__file__).parents[2],
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seconds in (0.0, -86_400.0, 1e7):
            clock.move(seconds)
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert abs(float(process.stdout.readline()) - time.time() - seconds) < 3600.0
        process.stdin.close()


def test_a_percentile() -> None:
    """The least that so many are not above."""
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def sample(daemon_bytes: int) -> Sample:
    return Sample(0.0, daemon_bytes, 0, 0, 0, 0, 3, 0, 0, ready=True)


def test_memory_that_does_not_return() -> None:
    """More than the slack is told from less."""
    early = [sample(80 << 20)] * 3
    assert all(one["ok"] for one in returned(early, [sample(84 << 20)] * 3).values())
    late = [sample((100 << 20) + SLACK["daemon_bytes"])] * 3
    assert [name for name, one in returned(early, late).items() if not one["ok"]] == [
        "daemon_bytes"
    ]


# --- a full disk ---------------------------------------------------------------------------------

WRITER = """
import sys
for path in sys.stdin:
    try:
        with open(path.strip(), "ab") as stream:
            stream.write(b"more" * 4096)
        print("written", flush=True)
    except OSError as error:
        print("refused", flush=True)
"""


@pytest.mark.parametrize("mounts", [True, False])
def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, mounts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process can write before and afterwards, and not meanwhile; where no file system may
    be mounted, too."""
    if not mounts:
        monkeypatch.setattr("tests.chaos.disk._mount", lambda *_: False)
    with (
        small_disk(tmp_path, 1) as disk,
        subprocess.Popen(
            [sys.executable, "-c", WRITER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def write() -> str:
            process.stdin.write(f"{tmp_path / 'file'}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline().strip()  # type: ignore[union-attr]

        before = write()
        disk.fill(process.pid)
        meanwhile = write()
        disk.free(process.pid)
        assert (before, meanwhile, write()) == ("written", "refused", "written")
        process.stdin.close()


def test_exceptions_in_the_log(tmp_path: Path) -> None:
    """One that was not expected is a complaint; one of a process that ends, and an error that the
    daemon tells of, are not."""
    log = tmp_path / "daemon.log"
    records = [
        {"level": "error", "logger": "a", "message": "no space"},
        {
            "level": "error",
            "logger": "b",
            "message": EXPECTED[0],
            "exception": "Traceback",
            "time": "t",
        },
        {"level": "error", "logger": "c", "message": "m", "exception": "Traceback"},
    ]
    log.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))

    (found,) = defects(log)
    assert json.loads(found) == records[-1]
