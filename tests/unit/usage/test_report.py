"""Sums of the ledger by what an admin asks, and as CSV."""

from __future__ import annotations

import csv
import io

import pytest

from appliance.usage.entries import CUT, DAY_SECONDS, WHOLE, Amounts, Cell, day_of
from appliance.usage.report import ReportRefused, as_csv, bound_day, grouped_by, report

TODAY = day_of("2026-11-28")
NOW = TODAY * DAY_SECONDS + 5.0
ROWS = [
    (Cell(TODAY, "bob", "small", WHOLE), Amounts(1, 10, 4, 20, 1_500_000, 250_000)),
    (Cell(TODAY, "alice", "small", CUT), Amounts(2, 1, 0, 2, 0, 0)),
    (Cell(TODAY - 28, "alice", "large", WHOLE), Amounts(4, 100, 0, 200, 0, 0)),
]


def test_groups_are_sorted_and_add_up() -> None:
    """A group has the names that were asked for, in their order."""
    rows = report(ROWS, ("model", "key"))

    assert [(row.model, row.key, row.requests) for row in rows] == [
        ("large", "alice", 4), ("small", "alice", 2), ("small", "bob", 1),
    ]  # fmt: skip
    assert (rows[2].gpu_seconds, rows[2].waiting_seconds) == (1.5, 0.25)
    (total,) = report(ROWS, ())
    assert (total.requests, total.input_tokens, total.output_tokens) == (7, 111, 222)
    assert total.cached_tokens == 4


def test_days_bound_it_on_both_sides() -> None:
    """Both days are included."""
    assert [row.day for row in report(ROWS, ("day",))] == ["2026-10-31", "2026-11-28"]
    assert [row.month for row in report(ROWS, ("month",), since=TODAY)] == ["2026-11"]
    assert [row.month for row in report(ROWS, ("month",), until=TODAY - 28)] == ["2026-10"]
    assert report(ROWS, ("key",), since=TODAY + 1) == []


@pytest.mark.parametrize(
    ("text", "day"), [("2026-11-01", TODAY - 27), ("0d", TODAY), ("30d", TODAY - 30)]
)
def test_a_bound_is_a_date_or_days(text: str, day: int) -> None:
    assert bound_day("since", text, NOW) == day


@pytest.mark.parametrize("text", ["", "d", "yesterday", "2026-13-01", "-1d", "1000000d", "٣d"])
def test_other_bounds_are_refused(text: str) -> None:
    """The message names the field, and what would do."""
    with pytest.raises(ReportRefused, match=r"since: .*2026-11-01.*30d"):
        bound_day("since", text, NOW)


@pytest.mark.parametrize("text", ["", "owner", "key,", "key,key"])
def test_other_groups_are_refused(text: str) -> None:
    with pytest.raises(ReportRefused, match=r"^by: "):
        grouped_by(text)


def test_groups_may_have_spaces_between_them() -> None:
    assert grouped_by("key, model") == ("key", "model")


def test_csv_can_be_read_back_and_is_no_formula() -> None:
    """Names of models come from a configuration; a spreadsheet must not compute them."""
    rows = [(Cell(TODAY, "alice", '=HYPERLINK("x"),y', WHOLE), Amounts(1, 2, 0, 3, 0, 0))]
    by = ("key", "model")

    names, row = csv.reader(io.StringIO(as_csv(by, report(rows, by))))

    assert names[:3] == ["key", "model", "requests"]
    assert row == ["alice", '\'=HYPERLINK("x"),y', "1", "2", "0", "3", "0.0", "0.0"]
