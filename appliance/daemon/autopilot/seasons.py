"""What is remembered of each hour of the week: which policies kept how much, and which ones won.

Without input, output or clock: a time is an *hour*, counted since the begin of 1970 by local clocks
(`local_hour`). The hours of one weekday and time of day, of all weeks, share a *cell*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from appliance.service.autopilot import HOUR_SECONDS, RememberedChoice
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Word

CELLS: Final = 7 * 24
MOST_CHOICES: Final = 4
"""Of a cell."""
MOST_CHOICE_BYTES: Final = 1024
"""As JSON; what is longer is not remembered. So the file has a largest size."""
HALF_LIFE_HOURS: Final = 4 * CELLS
"""After so long an observation counts half as much as a new one."""
LEAST_WEIGHT: Final = 0.1
"""What counts less is forgotten: a single observation after thirteen weeks."""
LEAST_WINS: Final = 2
"""Of different weeks, before a choice may decide ahead of a replay."""
FIRST_WEEKDAY_HOURS: Final = 3 * 24
"""1970 began on a Thursday, and a week begins on Monday."""
LARGEST_HOUR: Final = 10**8

Share = Annotated[float, Meta(ge=-1, le=1)]
Hour = Annotated[int, Meta(ge=-LARGEST_HOUR, le=LARGEST_HOUR)]


def local_hour(unix_seconds: float, utc_offset_seconds: float) -> int:
    """The hour that local clocks show. Where they are set back, one hour comes twice."""
    return int((unix_seconds + utc_offset_seconds) // HOUR_SECONDS)


def cell_of(hour: int) -> int:
    """0 is Monday, from 0 to 1 o'clock."""
    return (hour + FIRST_WEEKDAY_HOURS) % CELLS


def set_by_hand(configured: PolicyChoice) -> str:
    """A digest of the decisions and parameters of a configuration. What is remembered holds for
    these alone: a choice has some of them, and would bring them back after they were removed."""
    tables = {name: table for name, table in configured.parameters.items() if table}
    text = msgspec.json.encode((configured.decisions, tables), order="deterministic")
    return hashlib.sha256(text).hexdigest()


class Mean(Word, frozen=True):
    """Of observations that count less as they grow old."""

    value: Share = 0.0
    weight: Annotated[float, Meta(ge=0, le=1e9)] = 0.0

    @property
    def known(self) -> float | None:
        """The mean, if anything is known."""
        return self.value if self.weight >= LEAST_WEIGHT else None

    def after(self, hours: int) -> Mean:
        """The same, so much later."""
        weight = self.weight * 0.5 ** (max(0, hours) / HALF_LIFE_HOURS)
        return Mean(value=self.value, weight=weight) if weight >= LEAST_WEIGHT else Mean()

    def with_value(self, value: float) -> Mean:
        """With a new observation."""
        value = max(-1.0, min(1.0, value))
        weight = min(self.weight, 1e6)
        return Mean(value=(self.value * weight + value) / (weight + 1), weight=weight + 1)


class Remembered(Word, frozen=True):
    """Of a choice, in a cell."""

    choice: PolicyChoice
    hour: Hour
    """Of the newest observation."""
    kept: Mean = Mean()
    """The mean of the shares of tokens and of requests in time, as clients got it."""
    gain: Mean = Mean()
    """How far it was ahead of what it was compared with, in the lab or as clients got it."""
    error: Mean = Mean()
    """By which these comparisons may be wrong."""
    wins: Annotated[int, Meta(ge=0, le=10**6)] = 0
    """Hours in which it was ahead by more than the error, since it was last behind by as much."""
    judged: Hour | None = None
    """The newest of these hours, or the one in which it was behind: the next win comes later."""

    def after(self, hour: int) -> Remembered:
        """The same, in a later hour."""
        hours = hour - self.hour
        gain = self.gain.after(hours)
        return replace(
            self,
            hour=hour,
            kept=self.kept.after(hours),
            gain=gain,
            error=self.error.after(hours),
            wins=self.wins if gain.weight else 0,
        )

    @property
    def weight(self) -> float:
        """How much there is to know of it."""
        return self.kept.weight + self.gain.weight

    @property
    def wins_clearly(self) -> bool:
        """Whether it is ahead by more than the error."""
        return self.wins > 0 and self.gain.value > self.error.value


class Cell(Word, frozen=True):
    """What is remembered of an hour of the week."""

    number: Annotated[int, Meta(ge=0, lt=CELLS)]
    choices: Annotated[tuple[Remembered, ...], Meta(max_length=MOST_CHOICES)]


class Seasons:
    """The memory. At most `CELLS` times `MOST_CHOICES` choices; every call costs so many at most,
    but `table` alone looks at all cells."""

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        self._cells = {cell.number: list(cell.choices) for cell in cells}
        self._hour: int | None = None

    def began(self, hour: int) -> bool:
        """Whether it is another hour than the last time that this was asked; not the first time:
        that is no begin of an hour."""
        before, self._hour = self._hour, hour
        return before is not None and before != hour

    # --- what happens ----------------------------------------------------------------------------

    def kept(self, hour: int, choice: PolicyChoice, share: float) -> None:
        """Clients got this share in time while the choice decided."""
        found = self._found(hour, choice)
        self._put(hour, replace(found, kept=found.kept.with_value(share)))

    def compared(self, hour: int, choice: PolicyChoice, gain: float, error: float) -> None:
        """The choice was so far ahead of another, or behind if that is negative. It wins once an
        hour at most."""
        found = self._found(hour, choice)
        wins, judged = found.wins, found.judged
        if gain < -error:
            wins, judged = 0, hour
        elif gain > error and judged != hour:
            wins, judged = min(wins + 1, 10**6), hour
        gains, errors = found.gain.with_value(gain), found.error.with_value(error)
        self._put(hour, replace(found, gain=gains, error=errors, wins=wins, judged=judged))

    def failed(self, hour: int, choice: PolicyChoice) -> None:
        """It was rolled back, for whatever reason: what it won there before does not count."""
        found = self._found(hour, choice)
        if found.weight > 0:
            self._put(hour, replace(found, wins=0, judged=hour))

    # --- what follows ----------------------------------------------------------------------------

    def candidates(self, hour: int) -> tuple[PolicyChoice, ...]:
        """What a replay is to try: the winner of this cell, and the newest winner at the same time
        of another day."""
        here = _best(self._alive(hour))
        days = [_best(self._alive(hour, cell_of(hour + 24 * day))) for day in range(1, 7)]
        others = [one for one in days if one is not None]
        other = max(others, key=lambda one: one.judged or 0, default=None)
        found = [one.choice for one in (here, other) if one is not None]
        return tuple(choice for n, choice in enumerate(found) if choice not in found[:n])

    def ahead(self, hour: int, active: PolicyChoice) -> Remembered | None:
        """What may decide without a replay: the winner of this cell, if it won often enough, does
        not decide now, and kept more than what decides now, as far as that is known."""
        found = self._alive(hour)
        best = _best(found)
        now = active.pruned()
        if best is None or best.wins < LEAST_WINS or best.choice == now:
            return None
        mine = best.kept.known
        theirs = next((one.kept.known for one in found if one.choice == now), None)
        if mine is not None and theirs is not None and mine <= theirs + best.error.value:
            return None
        return best

    def report(self, hour: int) -> tuple[RememberedChoice, ...]:
        """Of this cell, for operators; the best first."""
        found = sorted(self._alive(hour), key=lambda one: (-one.wins, -one.gain.value))
        return tuple(
            RememberedChoice(
                choice=one.choice,
                wins=one.wins,
                kept=one.kept.known,
                gain=one.gain.known,
                error=one.error.known,
            )
            for one in found
        )

    def table(self) -> tuple[Cell, ...]:
        """All of it, to be written down."""
        return tuple(Cell(number=n, choices=tuple(self._cells[n])) for n in sorted(self._cells))

    def _alive(self, hour: int, number: int | None = None) -> list[Remembered]:
        """What a cell has, as old as it is now; what was written under a wrong clock, far ahead, is
        left out."""
        rows = self._cells.get(cell_of(hour) if number is None else number, ())
        aged = [one.after(hour) for one in rows if one.hour <= hour + CELLS]
        return [one for one in aged if one.weight > 0]

    def _found(self, hour: int, choice: PolicyChoice) -> Remembered:
        choice = choice.pruned()
        for one in self._alive(hour):
            if one.choice == choice:
                return one
        return Remembered(choice=choice, hour=hour)

    def _put(self, hour: int, new: Remembered) -> None:
        """In place of what there is of the choice, or of the choice that counts least."""
        if len(msgspec.json.encode(new.choice)) > MOST_CHOICE_BYTES:
            return
        others = [one for one in self._alive(hour) if one.choice != new.choice]
        others.sort(key=lambda one: (one.wins, one.weight), reverse=True)
        self._cells[cell_of(hour)] = [*others[: MOST_CHOICES - 1], new]


def _best(rows: Iterable[Remembered]) -> Remembered | None:
    """The one that is furthest ahead, of those that win clearly."""
    winners = (one for one in rows if one.wins_clearly)
    return max(winners, key=lambda one: one.gain.value, default=None)
