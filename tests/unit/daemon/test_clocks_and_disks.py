"""Faults of the machine around us: a wall clock that jumps, and a disk that is full."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from appliance.access.keys import Key, KeyFile, digest
from appliance.errors import KeysError
from appliance.observability.tracing import Traces
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.daemon import Box, box_maker

ROOT = Path(__file__).parents[3]
MakeBox = Callable[..., Box]

WALL_CLOCK = {
    "access/auth.py": "when keys end",
    "api/batch/runner.py": "when batches were made, and end",
    "api/ollama/catalog.py": "`expires_at`",
    "cli/ceilings.py": "when ceilings were measured",
    "cli/keys.py": "when keys end",
    "daemon/autopilot/runner.py": "which hour of the week it is, and how long a choice is barred",
    "daemon/daemon.py": "when a snapshot was taken, and spans were",
    "daemon/decision_loop.py": "what policies are shown, in events that the journal has",
    "daemon/gauges.py": "when what is resident was last looked at, which routers read",
    "daemon/policy_history.py": "when policies were chosen",
    "fleet/plan_cli.py": "of which days usage is asked for",
    "frontend/ollama/replies.py": "`created_at`",
    "frontend/serving/published.py": "`completed_at`",
    "observability/tracing.py": "when spans were",
    "platform/wall_clock.py": "when files, batches and keys expire",
    "service/event_log.py": "when something happened",
}
"""Where the time of day is asked for, and what it is told for: never to measure, nor to decide, but
for the autopilot, which remembers hours of the week, and policies that go by the time of day."""


@pytest.fixture
def make_box(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBox]:
    with box_maker(monkeypatch, slabs=20) as make:
        yield make


def asks_for_the_time_of_day(path: Path) -> bool:
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in wall
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_only_what_is_reported_depends_on_the_time_of_day() -> None:
    """Everything that waits, measures or decides goes by a clock that cannot jump; who needs the
    time of day says what for, above."""
    package = ROOT / "appliance"

    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if asks_for_the_time_of_day(path)
    }

    assert found == WALL_CLOCK.keys()


async def test_a_clock_that_jumps_changes_no_answer(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Years ahead and back at every look: requests end as ever, what is measured is what passed,
    and events keep their order."""
    jumps = cycle([0.0, 4e9, 1.7e9, 1.0])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr("appliance.observability.tracing.LAST_SECONDS", PATIENCE_SECONDS)
    box, exporter = make_box(), InMemorySpanExporter()
    traces = Traces(exporter, wall_clock=time.time)
    box.daemon._requests.trace(traces)
    box.start()
    stream = box.ask("r", "a", output=8)
    before = box.daemon.feed.newest
    box.settle()

    assert [produced.token async for batch in stream for produced in batch] == [*range(1, 9)]
    assert stream.times is not None
    assert all(0 <= seconds < PATIENCE_SECONDS for seconds in stream.times.phases.values())
    assert box.daemon.readiness().ok
    numbers = [notice.number for notice in box.daemon.feed._ring]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > before
    assert box.samples("vllm:e2e_request_latency_seconds_sum")["model_name=a"] < PATIENCE_SECONDS
    await traces.stop()
    spans = exporter.get_finished_spans()
    assert spans
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time < PATIENCE_SECONDS * 1e9


LOG_TO_A_FULL_DISK = """
import logging, os, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
from appliance.platform import logs
logs.begin("json", "info")
log = logging.getLogger("appliance.requests")
def held():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
log.info("request", extra={"fields": {"text": "x" * 1000}})
before = held()
for _ in range(10_000):
    log.info("request", extra={"fields": {"text": "x" * 1000}})
print(held() - before < 6_000_000)
"""


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    """The lines of requests go to a disk that is full: they are lost, and not kept either."""
    done = subprocess.run(
        [sys.executable, "-c", LOG_TO_A_FULL_DISK],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )

    assert (done.returncode, done.stdout) == (0, "True\n")


def test_keys_that_cannot_be_written_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full is told; who has a key keeps it, and nothing is left over."""
    file = KeyFile(tmp_path / "keys.json")
    file.add(Key(name="alice", sha256=digest("sk-alice"), created_seconds=1.0))
    before, names = file.read(), sorted(tmp_path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeysError, match=r"keys\.json: cannot be written: No space left"):
        file.add(Key(name="bob", sha256=digest("sk-bob"), created_seconds=1.0))

    assert file.read() == before
    assert sorted(tmp_path.iterdir()) == names
