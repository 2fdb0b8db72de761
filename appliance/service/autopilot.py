"""What is said of the autopilot: on which terms it works, what it found, and what it did."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Word

HOUR_SECONDS: Final = 3600.0
CPU_SHARE: Final = 0.1
"""Of one core, over any hour and since the daemon began, that all replays together may take."""


class AutopilotMode(StrEnum):
    """What the autopilot may do."""

    OFF = "off"
    PROPOSE = "propose"
    APPLY = "apply"


class AutopilotTerms(Word, frozen=True):
    """How often it replays, how much, and how long it watches what it applied."""

    mode: AutopilotMode = AutopilotMode.OFF
    interval_seconds: float = 300.0
    """From the begin of a replay to that of the next one; longer where `CPU_SHARE` asks for it."""
    cpu_seconds: float = 25.0
    """Of a replay of all candidates; its process may take `START_CPU_SECONDS` more to begin."""
    window_seconds: float = 600.0
    """Of the journal's end that is replayed."""
    watch_seconds: float = 300.0
    """After a change, and compared with as long before."""
    journal: str = ""


class Promises(Word, frozen=True):
    """What clients got: all of it up to a time, or between two times. None of it ever falls, but
    `on_time`, and what is bad is a part of what there is."""

    tokens: int = 0
    late: int = 0
    """Of the tokens."""
    requests: int = 0
    """That have all they asked for, or missed a target; between two times, also those that came to
    be on time."""
    missed: int = 0
    """Of the requests: one of their tokens was late, is late already, or a policy refused them."""
    unanswered: int = 0
    """Requests that were refused, or late, before they had a token; of a key only some. Of these so
    many are missed as it had answered ones."""
    on_time: int = 0
    """Requests that are under way at a time, have a first token, and missed nothing yet: a miss is
    known at once, and that one was kept only at its end. 0 between two times."""

    def since(self, earlier: Promises) -> Promises:
        """What came after that. A request under way counts as kept from its first token on, unless
        it misses a target until then or later: so it counts once, in one time or in another."""
        ended, missed = self.requests - earlier.requests, self.missed - earlier.missed
        return Promises(
            tokens=self.tokens - earlier.tokens,
            late=self.late - earlier.late,
            # Those that were on time earlier may all have missed something since, or be cancelled.
            requests=max(missed, ended + self.on_time - earlier.on_time),
            missed=missed,
            unanswered=self.unanswered - earlier.unanswered,
        )

    @property
    def value(self) -> float | None:
        """The mean of the shares of tokens and of requests in time, as far as they are known, from
        0 to 1; None if nothing is known."""
        pairs = ((self.tokens, self.late), (self.requests, self.missed))
        shares = [min(1.0, max(0.0, 1 - bad / total)) for total, bad in pairs if total > 0]
        return sum(shares) / len(shares) if shares else None


class Recommendation(Word, frozen=True):
    """What a replay of the journal's end says. Shares are of 1."""

    current: PolicyChoice
    """The policies that decided at the journal's end."""
    chosen: PolicyChoice | None
    """Those that win by more than the error; None to keep what there is."""
    name: str
    """Of those, for people."""
    gain: float | None
    """Of the winner, or else of the best other candidate, in its worst replay."""
    error: float | None
    """By which the gain may be off."""
    reason: str
    observed: float | None
    """What was kept in the window, in truth."""
    requests: int
    seconds: float
    cpu_seconds: float


class ReplayAnswer(Word, frozen=True):
    """What the process of a replay prints: one of both."""

    found: Recommendation | None = None
    error: str = ""
    """Why there is no recommendation."""


class AutopilotStep(StrEnum):
    """What the autopilot can do."""

    KEPT = "kept"
    PROPOSED = "proposed"
    APPLIED = "applied"
    CONFIRMED = "confirmed"
    ROLLED_BACK = "rolled_back"
    LEFT = "left"
    FAILED = "failed"
    FORGOT = "forgot"


class AutopilotNote(Word, frozen=True):
    """Something that the autopilot did, with its evidence."""

    what: AutopilotStep
    unix_seconds: float
    reason: str
    choice: PolicyChoice | None = None
    """The policies that it is about."""
    gain: float | None = None
    error: float | None = None
    before: float | None = None
    """What was kept before a change: the mean of the shares of tokens and of requests in time."""
    after: float | None = None


class Barred(Word, frozen=True):
    """Policies that did not keep what the lab said: not applied again before a time."""

    choice: PolicyChoice
    until_unix_seconds: float


class RememberedChoice(Word, frozen=True):
    """What is remembered of policies at this hour of the week. Newer weeks count more; None if
    nothing is known. Shares are of 1."""

    choice: PolicyChoice
    wins: int
    """Weeks in which it was ahead of others by more than the error, since it was last as clearly
    behind, or rolled back."""
    kept: float | None
    """What clients got: the mean of the shares of tokens and of requests in time."""
    gain: float | None
    """How far it was ahead of what it was compared with, in the lab or as clients got it."""
    error: float | None
    """By which these comparisons may be wrong."""


class AutopilotReport(Word, frozen=True):
    """What the autopilot does, and did."""

    mode: AutopilotMode
    phase: str
    """`off`, `waiting`, `replaying`, `changing` or `watching`."""
    held: bool
    """An operator chose policies at run time: it only proposes."""
    cpu_seconds: float
    """Charged in the last hour, before they were spent."""
    cpu_seconds_per_hour: float
    """At most."""
    notes: tuple[AutopilotNote, ...]
    """The newest of those that changed policies, and as many of the others; the newest last."""
    barred: tuple[Barred, ...]
    hour: tuple[RememberedChoice, ...] = ()
    """At this hour of the week on earlier weeks, and now; the best first."""
