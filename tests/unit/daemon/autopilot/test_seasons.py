"""What is remembered of hours of the week: by local clocks, within bounds, and for how long."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.daemon.autopilot.seasons import (
    CELLS,
    HALF_LIFE_HOURS,
    MOST_CHOICE_BYTES,
    MOST_CHOICES,
    Seasons,
    cell_of,
    local_hour,
)
from appliance.daemon.autopilot.seasons_file import (
    MOST_BYTES,
    VERSION,
    read_seasons,
    seasons_path,
    write_seasons,
)
from appliance.service.policy_report import PolicyChoice

OLD, NEW = PolicyChoice(use=("old",)), PolicyChoice(use=("new",))
MONDAY_9 = local_hour(datetime(2026, 3, 2, 9, tzinfo=UTC).timestamp(), 0)
WEEK = 7 * 24


def won(weeks: int, gain: float = 0.2, error: float = 0.05) -> Seasons:
    """`NEW` won on Monday at nine o'clock, in so many weeks up to that of `MONDAY_9`."""
    seasons = Seasons()
    for week in range(weeks):
        hour = MONDAY_9 - WEEK * (weeks - 1 - week)
        seasons.compared(hour, NEW, gain, error)
        seasons.compared(hour, OLD, -gain, error)
    return seasons


# --- hours ---------------------------------------------------------------------------------------


@given(st.integers(0, 4 * 10**9), st.integers(-14 * 4, 14 * 4))
def test_a_cell_is_a_weekday_and_an_hour_of_local_clocks(unix: int, quarters: int) -> None:
    """Whatever the offset from UTC, also by parts of an hour."""
    offset = timedelta(minutes=15 * quarters)
    clock = datetime.fromtimestamp(unix, timezone(offset))
    cell = cell_of(local_hour(unix, offset.total_seconds()))
    assert cell == 24 * clock.weekday() + clock.hour


def test_clocks_that_are_set_forward_and_back() -> None:
    """Nine o'clock stays nine o'clock. In spring an hour is skipped; in autumn one comes twice, is
    one hour to what wins in it, and begins once."""
    before = datetime(2026, 3, 28, 8, tzinfo=UTC).timestamp()  # 9 o'clock in Berlin
    after = datetime(2026, 4, 4, 7, tzinfo=UTC).timestamp()  # again, a week and a change later
    assert local_hour(after, 7200) - local_hour(before, 3600) == WEEK
    change = datetime(2026, 3, 29, 1, tzinfo=UTC).timestamp()
    assert local_hour(change, 7200) - local_hour(change - 1, 3600) == 2

    change = datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp()
    twice = local_hour(change - 1, 7200)
    assert local_hour(change, 3600) == twice
    seasons = Seasons()
    assert not seasons.began(twice - 1)
    assert [seasons.began(h) for h in (twice, twice, twice + 1)] == [True, False, True]
    seasons.compared(twice, NEW, 0.2, 0.05)
    seasons.compared(local_hour(change, 3600), NEW, 0.2, 0.05)
    assert [one.wins for one in seasons.report(twice)] == [1]


# --- what follows --------------------------------------------------------------------------------


def test_what_won_in_two_weeks_may_decide_there() -> None:
    """At the same hour of a later week, and at no other; with one win the replay tries it."""
    later = MONDAY_9 + WEEK
    assert won(1).ahead(later, OLD) is None
    assert won(1).candidates(later) == (NEW,)
    found = won(2).ahead(later, OLD)
    assert found is not None
    assert (found.choice, found.wins) == (NEW, 2)
    assert won(2).ahead(later + 1, OLD) is None
    assert won(2).ahead(later, NEW) is None  # it decides already
    assert won(2).candidates(later + 1) == ()


def test_many_wins_in_an_hour_are_one() -> None:
    seasons = Seasons()
    for _ in range(12):
        seasons.compared(MONDAY_9, NEW, 0.2, 0.05)
    assert seasons.ahead(MONDAY_9 + WEEK, OLD) is None


def test_ahead_by_less_than_the_error_is_no_win() -> None:
    """Neither once, nor on average."""
    assert won(5, gain=0.05, error=0.05).candidates(MONDAY_9) == ()
    seasons = won(2)
    for week in (1, 2, 3):
        seasons.compared(MONDAY_9 + week * WEEK, NEW, -0.1, 0.15)
    assert seasons.ahead(MONDAY_9 + 4 * WEEK, OLD) is None


@pytest.mark.parametrize("fault", [True, False])
def test_what_lost_has_to_win_anew(fault: bool) -> None:
    """Behind by more than the error, or a policy that failed: twice again, in other weeks."""
    seasons = won(5)
    lost = MONDAY_9 + WEEK
    if fault:
        seasons.failed(lost, NEW)
    else:
        seasons.compared(lost, NEW, -0.06, 0.05)
    seasons.compared(lost, NEW, 0.9, 0.05)  # in the same hour
    assert seasons.ahead(lost + WEEK, OLD) is None
    seasons.compared(lost + WEEK, NEW, 0.9, 0.05)
    assert seasons.ahead(lost + 2 * WEEK, OLD) is None
    seasons.compared(lost + 2 * WEEK, NEW, 0.9, 0.05)
    assert seasons.ahead(lost + 3 * WEEK, OLD) is not None


def test_what_kept_less_in_truth_does_not_decide_ahead() -> None:
    """Clients' share counts for more than what the lab said; within the error it does not."""
    for kept, decides in ((0.5, True), (0.85, False), (0.95, False)):
        seasons = won(2)
        seasons.kept(MONDAY_9, NEW, 0.9)
        seasons.kept(MONDAY_9, OLD, kept)
        found = seasons.ahead(MONDAY_9 + WEEK, OLD)
        assert (found is not None) is decides


def test_the_winner_of_another_day_is_tried_too() -> None:
    """Of the same time of day, the newest; it never decides ahead."""
    seasons = won(1)
    sunday = PolicyChoice(use=("sunday",))
    seasons.compared(MONDAY_9 - 24, sunday, 0.3, 0.05)
    tuesday = MONDAY_9 + 24
    assert seasons.candidates(tuesday) == (NEW,)
    assert seasons.candidates(MONDAY_9) == (NEW, sunday)
    assert seasons.candidates(tuesday + 1) == ()
    assert seasons.ahead(tuesday, OLD) is None


def test_it_is_forgotten() -> None:
    """By half in four weeks; all of it after thirteen, and of the new more counts."""
    seasons = won(2)
    assert seasons.ahead(MONDAY_9 + 12 * WEEK, OLD) is not None
    assert seasons.ahead(MONDAY_9 + 20 * WEEK, OLD) is None
    assert seasons.report(MONDAY_9 + 20 * WEEK) == ()

    seasons.kept(MONDAY_9, OLD, 0.0)
    seasons.kept(MONDAY_9 + HALF_LIFE_HOURS, OLD, 0.9)
    (kept,) = [o.kept for o in seasons.report(MONDAY_9 + HALF_LIFE_HOURS) if o.choice == OLD]
    assert kept == pytest.approx(0.6)


def test_a_clock_that_goes_wrong() -> None:
    """What was written far ahead is not seen; one that goes back makes nothing older."""
    seasons = Seasons()
    seasons.compared(MONDAY_9 + 1000 * WEEK, NEW, 0.2, 0.05)
    assert seasons.candidates(MONDAY_9) == ()
    assert won(2).ahead(MONDAY_9 - 1, OLD) is None
    assert len(won(2).report(MONDAY_9 - WEEK)) == 2


def test_parameters_without_a_policy_make_no_other_choice() -> None:
    seasons = won(1)
    same = PolicyChoice(use=("new",), parameters={"gone": {"x": 1}, "new": {}})
    seasons.compared(MONDAY_9 + WEEK, same, 0.2, 0.05)
    found = seasons.ahead(MONDAY_9 + 2 * WEEK, OLD)
    assert found is not None
    assert found.choice == NEW


# --- its bounds, and its file --------------------------------------------------------------------

OBSERVATIONS = st.lists(
    st.tuples(
        st.sampled_from(["kept", "compared", "failed"]),
        st.integers(0, 3 * CELLS),
        st.integers(0, 9),
        st.floats(-2, 2),
        st.floats(0, 2),
        st.sampled_from([1, 900, 2 * MOST_CHOICE_BYTES]),
    ),
    max_size=60,
)


@given(OBSERVATIONS)
def test_it_stays_within_its_bounds_and_survives_a_restart(
    observed: list[tuple[str, int, int, float, float, int]],
) -> None:
    """Whatever is told, in any order of hours: few choices a cell, and the file gives back all."""
    seasons = Seasons()
    for what, hour, number, gain, error, size in observed:
        choice = PolicyChoice(use=(f"p{number}",), parameters={f"p{number}": {"text": "x" * size}})
        if what == "kept":
            seasons.kept(hour, choice, gain)
        elif what == "compared":
            seasons.compared(hour, choice, gain, error)
        else:
            seasons.failed(hour, choice)
        if size > MOST_CHOICE_BYTES:
            assert all(one.choice != choice for one in seasons.report(hour))
        for one in seasons.report(hour):
            assert all(-1 <= (share or 0) <= 1 for share in (one.kept, one.gain, one.error))
    table = seasons.table()
    assert len(table) <= CELLS
    assert all(len(cell.choices) <= MOST_CHOICES for cell in table)
    with tempfile.TemporaryDirectory() as folder:
        path = seasons_path(f"{folder}/journal")
        write_seasons(path, table, OLD)
        assert path.stat().st_size <= MOST_BYTES
        assert read_seasons(path, OLD) == (table, "")
        assert Seasons(table).table() == table


def test_one_that_wins_is_not_pushed_out() -> None:
    seasons = won(2)
    for number in range(20):
        seasons.kept(MONDAY_9, PolicyChoice(use=(f"p{number}",)), 0.9)
    assert seasons.ahead(MONDAY_9 + WEEK, OLD) is not None
    assert len(seasons.report(MONDAY_9)) == MOST_CHOICES


GOOD = '{"version": 2, "by_hand": "", "cells": [{"number": 9, "choices": [%s]}]}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "Input data was truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "cannot be used"),
        (b'{"version": 2, "by_hand": "", "cells": 3}', "Expected `array`, got `int`"),
        (b'{"version": 2, "by_hand": "", "cells": [{"number": 168, "choices": []}]}', "<= 167"),
        ((GOOD % '{"choice": {"use": ["a"]}, "hour": 1e30}').encode(), "`int`"),
        ((GOOD % '{"choice": {"use": ["a"]}, "hour": 1, "kept": {"value": 9}}').encode(), "<= 1"),
        ((GOOD % ('{"choice": {"use": ["%s"]}, "hour": 1}' % ("a" * 2000))).encode(), "1024 bytes"),
        (b'{"version": 1, "hours": []}', f"version 1, and this daemon reads version {VERSION}"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, text: bytes, said: str) -> None:
    """With the reason; what is written next replaces it."""
    path = seasons_path(str(tmp_path / "journal"))
    assert read_seasons(path, OLD) == ((), "")
    path.write_bytes(text)
    cells, problem = read_seasons(path, OLD)
    assert cells == ()
    assert str(path) in problem
    assert said in problem
    write_seasons(path, won(2).table(), OLD)
    assert Seasons(read_seasons(path, OLD)[0]).ahead(MONDAY_9, OLD) is not None


@pytest.mark.parametrize(
    ("now", "holds"),
    [
        ({}, True),
        ({"use": ("new", "old")}, True),
        ({"parameters": {"old": {"b": 2, "a": 1}, "new": {}}}, True),
        ({"parameters": {}}, False),
        ({"parameters": {"old": {"a": 2, "b": 2}}}, False),
        ({"decisions": {}}, False),
    ],
)
def test_a_file_holds_for_what_was_set_by_hand(
    tmp_path: Path, now: dict[str, Any], holds: bool
) -> None:
    """Decisions and parameters; the policies in use may be others."""
    before = PolicyChoice(
        use=("old",), decisions={"round": "old"}, parameters={"old": {"a": 1, "b": 2}}
    )
    path = seasons_path(str(tmp_path / "journal"))
    write_seasons(path, won(2).table(), before)
    cells, problem = read_seasons(path, replace(before, **now))
    assert bool(cells) is holds
    assert ("other decisions or parameters" in problem) is not holds


@given(st.binary(max_size=200))
def test_no_file_stops_the_daemon(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(text)
        cells, problem = read_seasons(path, OLD)
        assert problem
        assert cells == ()


def test_a_full_memory_fits_in_the_file() -> None:
    """With the longest choices."""
    seasons = Seasons()
    for hour in range(CELLS):
        for number in range(MOST_CHOICES):
            text = "é" * ((MOST_CHOICE_BYTES - 100) // 2)
            choice = PolicyChoice(use=(f"p{number}",), parameters={f"p{number}": {"x": text}})
            seasons.compared(10**6 + hour, choice, 1 / 3, 1 / 7)
            seasons.kept(10**6 + hour + CELLS, choice, 2 / 3)
    assert all(len(cell.choices) == MOST_CHOICES for cell in seasons.table())
    assert len(msgspec.json.encode(seasons.table())) < MOST_BYTES
