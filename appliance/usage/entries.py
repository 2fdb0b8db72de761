"""What an answer came to, and the cells of the ledger that such entries are added up in."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

DAY_SECONDS: Final = 86_400

WHOLE: Final = "whole"
"""The outcome of an answer that the appliance made to its end."""
CUT: Final = "cut"
"""That of an answer which ended early: the client left, it was cancelled, or it failed."""


class Amounts(msgspec.Struct, frozen=True, array_like=True):
    """Whole numbers, so that sums do not depend on their order."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Of the input, what the prefix cache had."""
    output_tokens: int = 0
    device_microseconds: int = 0
    waiting_microseconds: int = 0

    @property
    def tokens(self) -> int:
        """What a budget counts."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Amounts) -> Amounts:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Amounts(*[one + another for one, another in zip(mine, theirs, strict=True)])

    def __sub__(self, other: Amounts) -> Amounts:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Amounts(*[one - another for one, another in zip(mine, theirs, strict=True)])

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self))


class Cell(NamedTuple):
    """A row of the ledger. It is counted by the day of the end, in UTC."""

    day: int
    """Days since 1970-01-01."""
    key: str
    """The name of the API key, "" without one."""
    model: str
    outcome: str
    organization: str = ""
    """Which the key belonged to when the request came, "" if to none."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One sequence that is over, or one line of a batch. An entry with the `id` of another one
    takes its place."""

    id: str
    ended: float
    """Unix time."""
    key: str
    model: str
    outcome: str
    amounts: Amounts
    request: str = ""
    """The id that `/api/requests` and the log have for it."""
    organization: str = ""
    """That of the key, "" if it belongs to none."""

    @property
    def cell(self) -> Cell:
        day = int(self.ended // DAY_SECONDS)
        return Cell(day, self.key, self.model, self.outcome, self.organization)


def day_of(date: str) -> int:
    """The day of ``2026-11-01``. Raises `ValueError`."""
    parsed = datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=UTC)
    return int(parsed.timestamp() // DAY_SECONDS)


def date_of(day: int) -> str:
    """``2026-11-01``"""
    return time.strftime("%Y-%m-%d", time.gmtime(day * DAY_SECONDS))


def month_of(seconds: float) -> str:
    """The month of a Unix time in UTC: ``2026-11``."""
    return time.strftime("%Y-%m", time.gmtime(seconds))


def first_day(month: str, later: int = 0) -> int:
    """The first day of a month, or of one so many months `later`."""
    year, number = map(int, month.split("-"))
    years, index = divmod(number - 1 + later, 12)
    return day_of(f"{year + years:04}-{index + 1:02}-01")
