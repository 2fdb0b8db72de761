"""What keys used on several boxes, added up from what each box's ledger says.

Sans-IO: the boxes are asked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from appliance.errors import FleetError
from appliance.usage.report import DIMENSIONS, MEASURES

BOX: Final = "box"
"""A further name to add up by."""
_ASKED_INSTEAD: Final = ("key",)
"""What a box is asked for where only boxes are kept apart."""


class BoxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``GET /api/usage``, as another version of a box may say it, too."""

    key: str = ""
    organization: str = ""
    model: str = ""
    day: str = ""
    month: str = ""
    outcome: str = ""
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_seconds: float = 0.0
    waiting_seconds: float = 0.0


class _Answer(msgspec.Struct):
    """As much of ``GET /api/usage`` as is needed."""

    rows: list[BoxRow]


class FleetUsage(NamedTuple):
    """The sums of all boxes that answered."""

    by: tuple[str, ...]
    rows: list[dict[str, Any]]
    total: dict[str, Any] | None
    """None if there are no rows."""


def fleet_dimensions(text: str) -> tuple[str, ...]:
    """What to add up by, of ``box,key,model``. Raises `FleetError`."""
    names = tuple(part.strip() for part in text.split(","))
    known = (BOX, *DIMENSIONS)
    if unknown := [name for name in names if name not in known]:
        raise FleetError(f"--by: {unknown[0][:40]!r} is none of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise FleetError("--by: names one of them twice")
    return names


def asked_by(by: Sequence[str]) -> tuple[str, ...]:
    """What each box adds up by."""
    return tuple(name for name in by if name != BOX) or _ASKED_INSTEAD


def read_answer(body: bytes) -> list[BoxRow]:
    """The rows of a box. Raises `FleetError`."""
    try:
        return msgspec.json.decode(body, type=_Answer).rows
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FleetError("what answers is not the appliance") from error


def added_up(by: Sequence[str], answers: Mapping[str, Sequence[BoxRow]]) -> FleetUsage:
    """The sums of the rows of all boxes, sorted by what they are grouped by. O(rows)."""
    sums: dict[tuple[str, ...], list[float]] = {}
    total = [0.0] * len(MEASURES)
    for box, rows in answers.items():
        for row in rows:
            group = tuple(box if name == BOX else getattr(row, name) for name in by)
            amounts = [getattr(row, name) for name in MEASURES]
            before = sums.get(group, [0] * len(MEASURES))
            sums[group] = [one + more for one, more in zip(before, amounts, strict=True)]
            total = [one + more for one, more in zip(total, amounts, strict=True)]
    rows_of_all = [
        {**dict(zip(by, group, strict=True)), **_measured(amounts)}
        for group, amounts in sorted(sums.items())
    ]
    return FleetUsage(tuple(by), rows_of_all, _measured(total) if rows_of_all else None)


def _measured(amounts: Sequence[float]) -> dict[str, float]:
    """By name: tokens and requests are whole, times to a microsecond, as ledgers have them."""
    return {
        name: round(amount, 6) if name.endswith("_seconds") else int(amount)
        for name, amount in zip(MEASURES, amounts, strict=True)
    }
