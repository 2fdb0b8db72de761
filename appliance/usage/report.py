"""Sums of the ledger as an admin asks for them: by key, organization, model, day, month,
outcome."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from appliance.usage.entries import DAY_SECONDS, Amounts, Cell, date_of, day_of

DIMENSIONS: Final = ("key", "organization", "model", "day", "month", "outcome")


class ReportRefused(ValueError):
    """What is asked cannot be reported: `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one group; what it is not grouped by is left out. A key is "" for requests that
    needed none, an organization for keys that belonged to none."""

    key: str | msgspec.UnsetType = msgspec.UNSET
    organization: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    day: str | msgspec.UnsetType = msgspec.UNSET
    """``2026-11-28``, in UTC."""
    month: str | msgspec.UnsetType = msgspec.UNSET
    """``2026-11``, in UTC."""
    outcome: str | msgspec.UnsetType = msgspec.UNSET
    """``whole``, or ``cut`` for answers that ended early."""
    requests: int
    input_tokens: int
    cached_tokens: int
    """Of the input, what the prefix cache had."""
    output_tokens: int
    gpu_seconds: float
    """Time of devices; what requests computed together is divided among them."""
    waiting_seconds: float


MEASURES: Final = UsageRow.__struct_fields__[len(DIMENSIONS) :]


def grouped_by(text: str) -> tuple[str, ...]:
    """The dimensions of ``key,model``. Raises `ReportRefused`."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in DIMENSIONS]:
        raise ReportRefused("by", f"{unknown[0][:40]!r} is none of {', '.join(DIMENSIONS)}")
    if len(set(names)) < len(names):
        raise ReportRefused("by", "names one of them twice")
    return names


def bound_day(field: str, text: str, now: float) -> int:
    """The day of ``2026-11-28``, or that of ``30d`` before now. Raises `ReportRefused`."""
    if text.endswith("d") and text[:-1].isascii() and text[:-1].isdecimal() and len(text) <= 6:
        return int(now // DAY_SECONDS) - int(text[:-1])
    try:
        return day_of(text)
    except ValueError as error:
        raise ReportRefused(
            field, f"{text[:40]!r} is neither a date, such as 2026-11-01, nor days, such as 30d"
        ) from error


def report(
    rows: Iterable[tuple[Cell, Amounts]],
    by: Sequence[str],
    since: int | None = None,
    until: int | None = None,
) -> list[UsageRow]:
    """The sums of each group from the day `since` to the day `until`, both included, sorted by what
    they are grouped by. O(rows)."""
    sums: dict[tuple[str, ...], Amounts] = {}
    for cell, amounts in rows:
        if (since is None or cell.day >= since) and (until is None or cell.day <= until):
            group = tuple([_value(cell, name) for name in by])
            sums[group] = sums.get(group, Amounts()) + amounts
    return [_row(by, group, amounts) for group, amounts in sorted(sums.items())]


def as_csv(by: Sequence[str], rows: Iterable[UsageRow]) -> str:
    """The same as CSV (RFC 4180), with a line of names first. Names that a spreadsheet would take
    for a formula have an apostrophe in front."""
    return rows_as_csv(by, map(msgspec.structs.asdict, rows))


def rows_as_csv(by: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The same of rows by name."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*by, *MEASURES])
    for row in rows:
        names = [_harmless(row[name]) for name in by]
        writer.writerow([*names, *[row[name] for name in MEASURES]])
    return out.getvalue()


def _value(cell: Cell, name: str) -> str:
    match name:
        case "day":
            return date_of(cell.day)
        case "month":
            return date_of(cell.day)[:7]
        case _:
            return str(getattr(cell, name))


def _row(by: Sequence[str], group: tuple[str, ...], amounts: Amounts) -> UsageRow:
    return UsageRow(
        **dict(zip(by, group, strict=True)),
        requests=amounts.requests,
        input_tokens=amounts.input_tokens,
        cached_tokens=amounts.cached_tokens,
        output_tokens=amounts.output_tokens,
        gpu_seconds=amounts.device_microseconds / 1e6,
        waiting_seconds=amounts.waiting_microseconds / 1e6,
    )


def _harmless(name: str) -> str:
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name
