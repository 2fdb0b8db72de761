"""Unix time that jumps of the system clock do not move."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.platform.wall_clock import JUMP_SECONDS, WallClock, newest_change

START = 1_800_000_000.0
DAY = 86400.0


class Machine:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.system, self.steady = START, 500.0

    def clock(self, not_before: float = 0.0) -> WallClock:
        return WallClock(
            not_before=not_before, system=lambda: self.system, steady=lambda: self.steady
        )

    def wait(self, seconds: float) -> None:
        self.system += seconds
        self.steady += seconds


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3600), st.just(0.0) | st.floats(JUMP_SECONDS + 4000, 1e9) | st.just(-DAY)
        ),
        max_size=20,
    )
)
def test_no_jump_moves_time(steps: list[tuple[float, float]]) -> None:
    """However often the clock is set, `now` goes as fast as time, and `latest` is never before."""
    machine = Machine()
    clock = machine.clock()
    passed = 0.0
    for seconds, jump in steps:
        machine.wait(seconds)
        machine.system += jump
        passed += seconds
        now = clock.now()
        assert abs(now - (START + passed)) <= JUMP_SECONDS * len(steps)
        assert clock.latest() == pytest.approx(max(now, machine.system))


def test_small_corrections_are_followed() -> None:
    """But not back: no time comes twice."""
    machine = Machine()
    clock = machine.clock()
    machine.wait(10)
    machine.system += 3
    assert clock.now() == START + 13
    machine.system -= 5
    assert clock.now() == START + 13
    machine.wait(10)
    assert clock.now() == START + 18


def test_a_jump_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    machine = Machine()
    clock = machine.clock()
    machine.system += 40 * DAY
    for _ in range(3):
        machine.wait(1)
        clock.now()
    machine.system -= 40 * DAY
    machine.wait(1)
    assert clock.now() == START + 4
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "jumped by 3456000 s, to 2027-02-24T08:00:01Z" in caplog.text


def test_a_clock_that_begins_in_the_past(caplog: pytest.LogCaptureFixture) -> None:
    """A machine without a battery: what was over when a file was written last stays over. Nothing
    is deleted for a file that was written while the clock was ahead."""
    machine = Machine()
    machine.system = 0.0
    clock = machine.clock(not_before=START)
    machine.wait(7)
    assert (clock.now(), clock.latest()) == (7, START + 7)
    assert "before a file was written" in caplog.text


def test_the_real_clocks() -> None:
    clock = WallClock()
    assert clock.now() <= clock.now() <= clock.latest()


def test_when_files_changed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for path, seconds in ((old, 10.0), (new, 20.0)):
        path.touch()
        os.utime(path, (seconds, seconds))
    assert newest_change([new, old, tmp_path / "gone"]) == 20.0
    assert newest_change([]) == 0.0
