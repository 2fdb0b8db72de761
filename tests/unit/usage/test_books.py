"""The books of the ledger: whatever is repeated, replaced or lost on the way, sums are exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.platform.database import Put
from appliance.usage import books as module
from appliance.usage.books import Books
from appliance.usage.entries import CUT, DAY_SECONDS, WHOLE, Amounts, Entry, day_of, first_day
from appliance.usage.ledger import database_in

NOW = day_of("2026-11-28") * DAY_SECONDS + 3600.0
FIRST = day_of("2026-11-01") * DAY_SECONDS + 3600.0


def books(**settings: int) -> Books:
    return Books(**{"months": 13, "max_rows": 1000} | settings)


def entry(id: str, tokens: int = 1, **fields: object) -> Entry:
    given = {"ended": NOW, "key": "alice", "model": "small", "outcome": WHOLE}
    amounts = Amounts(1, tokens, 0, 2 * tokens, 3 * tokens, tokens)
    return Entry(**{"id": id, "amounts": amounts} | given | fields)  # type: ignore[arg-type]


def write(kept: Books, *entries: Entry, now: float = NOW) -> None:
    kept.apply(kept.plan(entries, now))


ENTRIES = st.builds(
    entry,
    id=st.sampled_from("abcdefgh"),
    tokens=st.integers(0, 5),
    ended=st.sampled_from([FIRST, FIRST - DAY_SECONDS]),
    key=st.sampled_from(["", "alice", "bob"]),
    model=st.sampled_from(["small", "large"]),
    outcome=st.sampled_from([WHOLE, CUT]),
    organization=st.sampled_from(["", "acme"]),
)
STEPS = st.lists(
    st.tuples(st.lists(ENTRIES, max_size=4), st.sampled_from(["written", "lost", "killed"])),
    max_size=12,
)


@given(STEPS)
def test_sums_are_exact_in_any_order_of_ends_kills_and_replays(
    steps: list[tuple[list[Entry], str]],
) -> None:
    """Each id counts once, with what was written for it last: also where a transaction was refused
    by the disk, and where the appliance was killed after one and begins with what is on the disk.
    The rows that a plan says are those that the books have afterwards."""
    kept, rows, of_organizations, recent = books(), {}, {}, {}  # type: ignore[var-annotated]
    tables = {"usage": rows, "organization_usage": of_organizations, "recent": recent}
    sizes = {"usage": 4, "organization_usage": 5, "recent": 1}
    last: dict[str, Entry] = {}
    for entries, what in steps:
        plan = kept.plan(entries, FIRST)
        if what == "lost":
            continue
        for change in kept.changes(plan):
            table = tables[change.table]
            if isinstance(change, Put):
                table[change.values[: sizes[change.table]]] = change.values
            else:
                for key in [key for key in table if key[: len(change.key)] == change.key]:
                    del table[key]
        kept.apply(plan)
        last |= {one.id: one for one in entries}
        if what == "killed":
            kept = Books(
                months=13, max_rows=1000, rows=rows.values(), recent=recent.values(),
                of_organizations=of_organizations.values(),
            )  # fmt: skip

        expected: dict[object, Amounts] = {}
        for one in last.values():
            expected[one.cell] = expected.get(one.cell, Amounts()) + one.amounts
        assert dict(kept.rows()) == {cell: sums for cell, sums in expected.items() if sums}
        on_disk = {(*row[:4], ""): row[4:] for row in rows.values()}
        on_disk |= {row[:5]: row[5:] for row in of_organizations.values()}
        assert on_disk == {tuple(cell): tuple(vars_of(sums)) for cell, sums in kept.rows()}
        spent: Counter[tuple[str, str]] = Counter()
        spent_of: Counter[tuple[str, str]] = Counter()
        for cell, sums in kept.rows():
            month = "2026-11" if cell.day > day_of("2026-10-31") else "2026-10"
            spent[cell.key, month] += sums.tokens
            spent_of[cell.organization, month] += sums.tokens
        for key in ("", "alice", "bob"):
            for month in ("2026-10", "2026-11"):
                assert kept.spent_tokens(key, month) == spent[key, month]
        for month in ("2026-10", "2026-11"):
            assert kept.spent_tokens_of("acme", month) == spent_of["acme", month]


def vars_of(amounts: Amounts) -> list[int]:
    return [getattr(amounts, name) for name in amounts.__struct_fields__]


def test_months_that_are_over_leave() -> None:
    """This month and so many before are kept, to the day."""
    kept = books(months=1)
    oldest = first_day("2026-10")
    for day in (oldest - 1, oldest):
        write(kept, entry(str(day), ended=day * DAY_SECONDS + 1.0), now=day * DAY_SECONDS + 2.0)

    write(kept, entry("today"))

    assert sorted(cell.day for cell, _ in kept.rows()) == [oldest, day_of("2026-11-28")]


def test_the_oldest_days_leave_when_there_are_too_many_rows() -> None:
    """Whole days, but none of this month: a budget that is spent stays spent."""
    kept = books(max_rows=3)
    for day in (*range(-32, -29), *range(-2, 1)):
        for key in ("alice", "bob"):
            ended = NOW + day * DAY_SECONDS
            write(kept, entry(f"{day}{key}", key=key, ended=ended), now=ended)

    days = Counter(cell.day for cell, _ in kept.rows())

    assert days == {day_of(f"2026-11-{number}"): 2 for number in (26, 27, 28)}
    assert kept.spent_tokens("alice", "2026-11") == 9
    assert kept.spent_tokens("alice", "2026-10") == 0


def test_only_so_many_entries_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more, and of those that are older than a batch may be, the oldest are forgotten: the rows
    stay."""
    monkeypatch.setattr(module, "MAX_RECENT", 2)
    kept = books()
    for name in "abc":
        write(kept, entry(name))
    assert {one.id for one in kept.recent()} == {"b", "c"}

    write(kept, entry("d", ended=NOW + module.RECENT_SECONDS), now=NOW + module.RECENT_SECONDS)

    assert {one.id for one in kept.recent()} == {"d"}
    assert sum(sums.requests for _, sums in kept.rows()) == 4


def test_the_database_has_what_the_books_have(tmp_path: Path) -> None:
    """After a start from it, the next transaction does not overwrite one of before."""
    database = database_in(tmp_path)
    database.open()
    kept = books()
    for entries in ([entry("a"), entry("b", 2)], [entry("a", 5)]):
        plan = kept.plan(entries, NOW)
        database.write(kept.changes(plan))
        kept.apply(plan)
    database.close()

    database = database_in(tmp_path)
    database.open()
    again = Books(
        months=13, max_rows=1000, rows=database.rows("usage"), recent=database.rows("recent")
    )

    assert dict(again.rows()) == dict(kept.rows())
    assert {one.id: one.amounts.input_tokens for one in again.recent()} == {"a": 5, "b": 2}
    plan = again.plan([entry("c")], NOW)
    database.write(again.changes(plan))
    assert len(database.rows("recent")) == 3
    database.close()
