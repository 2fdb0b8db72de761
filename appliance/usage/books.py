"""The books of the ledger: entries in, changes of rows out, without a disk or a clock.

A change is planned first, and applied once the disk has it. What is planned and not applied leaves
no trace, so the same entries may be planned again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from appliance.platform.database import Change, Delete, Put, Row
from appliance.usage.entries import Amounts, Cell, Entry, date_of, first_day, month_of

MIGRATIONS: Final = (
    """
    CREATE TABLE usage (
        day INTEGER NOT NULL,     -- since 1970-01-01, in UTC
        key TEXT NOT NULL,        -- the name of the API key, '' without one
        model TEXT NOT NULL,
        outcome TEXT NOT NULL,    -- 'whole' or 'cut'
        requests INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        device_microseconds INTEGER NOT NULL,
        waiting_microseconds INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        PRIMARY KEY (day, key, model, outcome)
    ) WITHOUT ROWID;
    CREATE TABLE recent (
        number INTEGER PRIMARY KEY,  -- of the transaction
        entries BLOB NOT NULL,       -- its entries as MessagePack
        checksum INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE organization_usage (  -- what was used within organizations, in no other table
        day INTEGER NOT NULL,
        key TEXT NOT NULL,
        model TEXT NOT NULL,
        outcome TEXT NOT NULL,
        organization TEXT NOT NULL,
        requests INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        device_microseconds INTEGER NOT NULL,
        waiting_microseconds INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        PRIMARY KEY (day, key, model, outcome, organization)
    ) WITHOUT ROWID
    """,
)
TABLES: Final = ("usage", "organization_usage")
"""Those with sums: of keys without an organization, and of the others."""

RECENT_SECONDS: Final = 49 * 3600.0
"""How long an entry can be replaced: a line of a batch may be asked again until its day is over."""
MAX_RECENT: Final = 65_536
"""Entries that can be replaced; of more, the oldest cannot be any longer."""

_entries: Final = msgspec.msgpack.Decoder(tuple[Entry, ...])


class Plan(NamedTuple):
    """What a transaction changes. A day that leaves the ledger is in `dropped`."""

    number: int
    entries: tuple[Entry, ...]
    cells: dict[Cell, Amounts]
    dropped: frozenset[int]
    forgotten: int
    """So many of the oldest transactions' entries cannot be replaced any more."""

    @property
    def changes(self) -> list[Change]:
        """The same as rows of the database."""
        found: list[Change] = [
            Delete(table, (day,)) for day in sorted(self.dropped) for table in TABLES
        ]
        for cell, amounts in self.cells.items():
            if cell.day in self.dropped:
                continue
            values = msgspec.structs.astuple(amounts)
            table, key = _row(cell)
            found.append(Put(table, (*key, *values)) if amounts else Delete(table, key))
        found.append(Put("recent", (self.number, msgspec.msgpack.encode(self.entries))))
        return found


class Books:
    """Sums by day, key, model, outcome and organization, and the entries that came lately. An entry
    costs O(1); rows leave when they are older than `months` whole months, or when there are more
    than `max_rows`: then whole days do, the oldest first. Those of this month stay, as budgets
    count them: there are at most 31 days of each key, model, outcome and organization."""

    def __init__(
        self,
        *,
        months: int,
        max_rows: int,
        rows: Iterable[Row] = (),
        of_organizations: Iterable[Row] = (),
        recent: Iterable[Row] = (),
    ) -> None:
        """`rows`, `of_organizations` and `recent` are those of the database's tables."""
        self._months = months
        self._max_rows = max_rows
        self._cells: dict[Cell, Amounts] = {}
        self._days: Counter[int] = Counter()
        self._spent: Counter[tuple[str, str]] = Counter()
        self._spent_of: Counter[tuple[str, str]] = Counter()
        """By organization and month; that above is by key and month."""
        self._recent: dict[str, Entry] = {}
        self._transactions: deque[tuple[int, tuple[Entry, ...]]] = deque()
        self._recent_count = 0
        for found, size in ((rows, len(Cell._fields) - 1), (of_organizations, len(Cell._fields))):
            for row in found:
                cell, amounts = msgspec.convert((row[:size], row[size:]), tuple[Cell, Amounts])
                self._set(cell, amounts)
        for number, entries in recent:
            assert isinstance(number, int)
            assert isinstance(entries, bytes)
            self._remember(number, _entries.decode(entries))

    # --- reading ---------------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Cell, Amounts]]:
        """All sums, in no order."""
        return iter(self._cells.items())

    def recent(self) -> Iterator[Entry]:
        """The entries that can still be replaced."""
        return iter(self._recent.values())

    def spent_tokens(self, key: str, month: str) -> int:
        """Of a key in a month, such as ``2026-11``, input and output. O(1)."""
        return self._spent[key, month]

    def spent_tokens_of(self, organization: str, month: str) -> int:
        """The same of all keys of an organization while they belonged to it. O(1)."""
        return self._spent_of[organization, month]

    # --- writing ---------------------------------------------------------------------------------

    def plan(self, entries: Sequence[Entry], now: float) -> Plan:
        """What these entries change, at the Unix time `now`. An entry that is there already changes
        nothing; one with the id of another one takes its place. O(entries + what leaves)."""
        cells: dict[Cell, Amounts] = {}
        new: dict[str, Entry] = {}
        for entry in entries:
            old = new.get(entry.id, self._recent.get(entry.id))
            if old == entry:
                continue
            if old is not None and (old.cell in cells or old.cell in self._cells):
                cells[old.cell] = self._planned(cells, old.cell) - old.amounts
            cells[entry.cell] = self._planned(cells, entry.cell) + entry.amounts
            new[entry.id] = entry
        number = self._transactions[-1][0] + 1 if self._transactions else 0
        dropped = self._too_old(cells, now)
        forgotten = self._over(len(new), now)
        return Plan(number, tuple(new.values()), cells, dropped, forgotten)

    def changes(self, plan: Plan) -> list[Change]:
        """A plan as changes of the database's rows."""
        gone = [number for number, _ in islice(self._transactions, plan.forgotten)]
        return [*plan.changes, *(Delete("recent", (number,)) for number in gone)]

    def apply(self, plan: Plan) -> None:
        """The disk has the plan."""
        for cell, amounts in plan.cells.items():
            self._set(cell, amounts)
        if plan.dropped:
            for cell in [cell for cell in self._cells if cell.day in plan.dropped]:
                self._set(cell, Amounts())
        for _ in range(plan.forgotten):
            _, entries = self._transactions.popleft()
            self._recent_count -= len(entries)
            for entry in entries:
                if self._recent.get(entry.id) is entry:
                    del self._recent[entry.id]
        self._remember(plan.number, plan.entries)

    def _planned(self, cells: dict[Cell, Amounts], cell: Cell) -> Amounts:
        return cells[cell] if cell in cells else self._cells.get(cell, Amounts())

    def _set(self, cell: Cell, amounts: Amounts) -> None:
        old = self._cells.pop(cell, None)
        if old is not None:
            self._days[cell.day] -= 1
        if amounts:
            self._cells[cell] = amounts
            self._days[cell.day] += 1
        elif not self._days[cell.day]:
            del self._days[cell.day]
        month, more = date_of(cell.day)[:7], amounts.tokens - (0 if old is None else old.tokens)
        _add(self._spent, (cell.key, month), more)
        if cell.organization:
            _add(self._spent_of, (cell.organization, month), more)

    def _remember(self, number: int, entries: tuple[Entry, ...]) -> None:
        self._transactions.append((number, entries))
        self._recent_count += len(entries)
        for entry in entries:
            self._recent[entry.id] = entry

    def _too_old(self, cells: dict[Cell, Amounts], now: float) -> frozenset[int]:
        """The days that leave."""
        month = month_of(now)
        oldest, of_this_month = first_day(month, -self._months), first_day(month)
        days = self._days | Counter({cell.day: 1 for cell in cells})
        dropped = {day for day in days if day < oldest}
        count = len(self._cells) + sum(cell not in self._cells for cell in cells)
        if count > self._max_rows:
            for day in sorted(day for day in days if day < of_this_month):
                dropped.add(day)
                count -= days[day]
                if count <= self._max_rows:
                    break
        return frozenset(dropped)

    def _over(self, coming: int, now: float) -> int:
        """How many of the oldest transactions need not be known any more."""
        count, left = 0, self._recent_count + coming
        for _, entries in self._transactions:
            newest = max((entry.ended for entry in entries), default=0.0)
            if left <= MAX_RECENT and newest + RECENT_SECONDS > now:
                break
            left -= len(entries)
            count += 1
        return count


def _row(cell: Cell) -> tuple[str, Row]:
    """The table of a cell, and its key there."""
    return ("organization_usage", cell) if cell.organization else ("usage", cell[:-1])


def _add(counter: Counter[tuple[str, str]], key: tuple[str, str], more: int) -> None:
    """What is 0 leaves."""
    counter[key] += more
    if not counter[key]:
        del counter[key]
