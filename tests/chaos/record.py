"""What was disturbed when, and which ends of requests that explains."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

AFTERMATH_SECONDS = 30.0
"""For how long after a disturbance its effects may be noticed."""
PASSING = 429
"""The status of "not now": no disturbance is needed for it."""

CUT_OFF, NO_CONNECTION = "cut off", "no connection"
"""How requests end that are not answered. A refusal has a name of its own."""

RESTARTS = frozenset({"daemon_kill", "daemon_restart"})
FRONT_ENDS = frozenset({"front_end_kill", "front_end_parent_kill", "front_end_freeze"})
COMPILER = frozenset({"guide_compiler_kill", "guide_compiler_freeze", "front_end_parent_kill"})
EXPLAINED_BY = {
    NO_CONNECTION: RESTARTS,
    CUT_OFF: RESTARTS | FRONT_ENDS,
    "shutting_down": RESTARTS,
    "starting": RESTARTS | FRONT_ENDS,
    "front_end_lost": RESTARTS | FRONT_ENDS,  # a stopping one ends with clients that do not read
    "storage_failed": RESTARTS | {"disk_full"},
    "storage_full": RESTARTS | {"disk_full"},
    "not_saved": RESTARTS | {"disk_full"},
    "guide_unanswered": RESTARTS | COMPILER | {"worker_kill", "worker_oom", "worker_freeze"},
    "invalid_guide": RESTARTS | COMPILER,
}
"""Kinds of disturbances that make requests end so. Names that are not here are explained by
restarts and front ends: Anthropic's dialect has types of errors that are less exact."""
ANY = RESTARTS | FRONT_ENDS
LASTING = frozenset({"invalid_guide"})
"""Refusals that are remembered: a disturbance explains them however long it is ago."""


@dataclass
class Hit:
    """A disturbance that happened. Times are seconds since the beginning."""

    kind: str
    began: float
    what: str = ""
    """What it hit."""
    ended: float | None = None
    missed: str | None = None
    """Why there was nothing to hit."""


@dataclass(frozen=True)
class End:
    """A request that ended otherwise than with its answer. Times are seconds since the
    beginning."""

    request: str
    """Its kind and model."""
    name: str | None
    """Of the refusal, or how it ended without one; None: it was refused without a name."""
    status: int
    began: float
    ended: float
    said: str = ""


@dataclass
class Record:
    """What happened, in the order in which it began."""

    hits: list[Hit] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """What could not be done on this machine, and why."""
    _began: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @contextmanager
    def hit(self, kind: str) -> Iterator[Hit]:
        """A disturbance, while it lasts."""
        hit = Hit(kind, round(self.now(), 2))
        self.hits.append(hit)
        try:
            yield hit
        finally:
            hit.ended = round(self.now(), 2)

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.setdefault(what, why)

    def counts(self) -> dict[str, int]:
        """How many disturbances of each kind hit."""
        return dict(sorted(Counter(hit.kind for hit in self.hits if hit.missed is None).items()))

    def missed(self) -> dict[str, int]:
        """How many had nothing to hit."""
        return dict(sorted(Counter(hit.kind for hit in self.hits if hit.missed).items()))

    def named(self) -> dict[str, int]:
        """How many requests ended how."""
        return dict(sorted(Counter(str(end.name) for end in self.ends).items()))

    def unexplained(self) -> list[str]:
        """A complaint for each request that ended without a name, or so that nothing explains it.
        O(requests that ended so, times hits)."""
        found = []
        for end in self.ends:
            if end.name is None:
                found.append(f"{end.request}: {end.status} without a name: {end.said}")
            elif end.status != PASSING and not self._explains(end):
                found.append(
                    f"{end.request}, from {end.began:.1f} to {end.ended:.1f} s: {end.status} "
                    f"{end.name}, which nothing explains: {end.said}"
                )
        return found

    def _explains(self, end: End) -> bool:
        kinds = EXPLAINED_BY.get(str(end.name), ANY)
        return any(
            hit.kind in kinds
            and hit.missed is None
            and hit.began <= end.ended
            and (
                end.name in LASTING
                or hit.ended is None
                or end.began <= hit.ended + AFTERMATH_SECONDS
            )
            for hit in self.hits
        )
