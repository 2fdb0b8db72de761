"""What a check of the doctor found, and what to do about it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """What one check found, and what to do about it."""

    level: Level
    what: str
    finding: str
    remedy: str = ""

    def __str__(self) -> str:
        return "  ".join(filter(None, (f"{self.level:<4}", self.what, self.finding, self.remedy)))


def ok(what: str, finding: str) -> Finding:
    return Finding(Level.OK, what, finding)


def warn(what: str, finding: str, remedy: str) -> Finding:
    return Finding(Level.WARN, what, finding, remedy)


def fail(what: str, finding: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, what, finding, remedy)
