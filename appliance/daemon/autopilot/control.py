"""What the autopilot does next: a state machine without input, output or clock.

It gets the time, what clients got, and what became of its actions; it answers with actions. It
waits, replays, has other policies decide, and watches them, one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from appliance.daemon.autopilot.budget import CpuBudget
from appliance.service.autopilot import (
    CPU_SHARE,
    HOUR_SECONDS,
    AutopilotMode,
    AutopilotNote,
    AutopilotReport,
    AutopilotStep,
    AutopilotTerms,
    Barred,
    Promises,
    Recommendation,
)
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Word

START_CPU_SECONDS: Final = 5.0
"""Of a replay's process, for its start; charged, too."""
PATIENCE: Final = 20.0
"""Times its CPU time a replay may last: on a busy machine the lowest priority is slow."""
LEAST_REQUESTS: Final = 20
"""To judge a change by, before it and after it: with fewer, one request is five points."""
LONGEST_WATCH: Final = 4
"""Times `watch_seconds` it waits for so many requests."""
BARRED_SECONDS: Final = 24 * HOUR_SECONDS
MOST_BARRED: Final = 64
MOST_NOTES: Final = 20
SAMPLES: Final = 60
"""Of what clients got, in the time that a change is judged by."""


class Moment(Word, frozen=True):
    """Now: `seconds` never go back, `unix_seconds` go on while the daemon does not run."""

    seconds: float
    unix_seconds: float


class Seen(Word, frozen=True):
    """How things are."""

    active: PolicyChoice
    promises: Promises
    """Up to now."""
    ailing: str = ""
    """A policy of these that failed too often, and is not asked any more."""
    journaled: bool = True


class StartReplay(Word, frozen=True):
    """Replay the journal's end. Answered with `Control.advised` or `Control.failed`."""

    cpu_seconds: float
    hard_cpu_seconds: float
    """That the process may take at most; so many were charged."""


class EndReplay(Word, frozen=True):
    """End the process of the replay. Its answer does not count any more."""


class Use(Word, frozen=True):
    """Have these decide, unless an operator chooses meanwhile. Answered with `Control.used` or
    `Control.failed`."""

    choice: PolicyChoice


class Bar(Word, frozen=True):
    """Remember, also over a restart, what is not to be applied."""

    barred: tuple[Barred, ...]


Action: TypeAlias = StartReplay | EndReplay | Use | Bar | AutopilotNote


@dataclass(frozen=True)
class _Waiting:
    name = "waiting"


@dataclass(frozen=True)
class _Replaying:
    since: float
    name = "replaying"


@dataclass(frozen=True)
class _Changing:
    """To what is recommended, or back."""

    found: Recommendation
    target: PolicyChoice
    before: PolicyChoice
    kept: float
    """Before the change."""
    after: float | None = None
    back: str = ""
    """Why it goes back, if it does."""
    name = "changing"


@dataclass(frozen=True)
class _Watching:
    change: _Changing
    since: float
    start: Promises
    name = "watching"


class Control:
    """The autopilot's mind. `configured` are the policies of the configuration, `barred` what was
    remembered. Every call costs O(1), up to the number of `SAMPLES`."""

    def __init__(
        self, terms: AutopilotTerms, configured: PolicyChoice, barred: Iterable[Barred] = ()
    ) -> None:
        self.terms = terms
        self._configured = configured
        self._budget = CpuBudget(CPU_SHARE * HOUR_SECONDS)
        self._barred = list(barred)
        self._held = False
        self._phase: _Waiting | _Replaying | _Changing | _Watching = _Waiting()
        self._next: float | None = None
        """When the next replay is due; an interval after the first tick."""
        self._samples: deque[tuple[float, Promises]] = deque()
        """Under the policies that decide now."""
        self._active: PolicyChoice | None = None
        self._notes: deque[AutopilotNote] = deque(maxlen=MOST_NOTES)

    @property
    def tick_seconds(self) -> float:
        """How often it is to see how things are."""
        return min(5.0, self.terms.interval_seconds / 10, self.terms.watch_seconds / SAMPLES)

    @property
    def may_change(self) -> bool:
        """Whether what it wanted to have decide may still decide."""
        return self._free and isinstance(self._phase, _Changing)

    @property
    def _free(self) -> bool:
        return self.terms.mode is AutopilotMode.APPLY and not self._held

    def report(self, at: Moment) -> AutopilotReport:
        """For operators."""
        off = self.terms.mode is AutopilotMode.OFF
        self._forget_barred(at)
        return AutopilotReport(
            mode=self.terms.mode,
            phase="off" if off else self._phase.name,
            held=self._held,
            cpu_seconds=self._budget.charged(at.seconds),
            cpu_seconds_per_hour=self._budget.seconds_per_hour,
            notes=tuple(self._notes),
            barred=tuple(self._barred),
        )

    # --- what happens ----------------------------------------------------------------------------

    def tick(self, at: Moment, seen: Seen) -> list[Action]:
        """Time went on."""
        self._sample(at, seen)
        if self._next is None:
            self._next = at.seconds + self.terms.interval_seconds
        match self._phase:
            case _Waiting() if at.seconds >= self._next:
                return self._begin(at, seen)
            case _Replaying(since) if at.seconds - since > PATIENCE * self._charge:
                reason = f"the replay had no answer after {at.seconds - since:.0f} s; it was ended"
                return [EndReplay(), *self.failed(at, reason)]
            case _Watching():
                return self._judge(at, seen, self._phase)
        return []

    def advised(self, at: Moment, seen: Seen, found: Recommendation) -> list[Action]:
        """The replay has an answer."""
        if not isinstance(self._phase, _Replaying):
            return []
        self._phase = _Waiting()
        evidence = {"gain": found.gain, "error": found.error, "before": found.observed}
        if found.current != seen.active:
            reason = "other policies decide now than those whose end of the journal was replayed"
            return [self._note(at, AutopilotStep.KEPT, reason, None, **evidence)]
        if found.chosen is None or not _wins(found):
            return [self._note(at, AutopilotStep.KEPT, found.reason, None, **evidence)]
        target = _with_tables(found.chosen, self._configured)
        kept = self._before(at, seen)
        if obstacle := self._obstacle(at, target, kept):
            reason = f"{found.reason} Not applied: {obstacle}."
            return [self._note(at, AutopilotStep.PROPOSED, reason, target, **evidence)]
        assert kept is not None
        self._phase = _Changing(found, target, seen.active, kept)
        return [Use(choice=target)]

    def used(self, at: Moment, seen: Seen) -> list[Action]:
        """What it wanted decides now."""
        change = self._phase
        if not isinstance(change, _Changing):
            return []
        self._sample(at, seen)
        evidence = {"gain": change.found.gain, "error": change.found.error, "before": change.kept}
        if change.back:
            self._phase = _Waiting()
            evidence["after"] = change.after
            step, reason = AutopilotStep.ROLLED_BACK, change.back
        else:
            self._phase = _Watching(change, at.seconds, seen.promises)
            step, reason = AutopilotStep.APPLIED, change.found.reason
        return [self._note(at, step, reason, change.target, **evidence)]

    def failed(self, at: Moment, reason: str) -> list[Action]:
        """The replay, or the change, did not come about."""
        if not isinstance(self._phase, _Replaying | _Changing):
            return []
        choice = self._phase.target if isinstance(self._phase, _Changing) else None
        self._phase = _Waiting()
        return [self._note(at, AutopilotStep.FAILED, reason, choice)]

    def operator_chose(self, at: Moment) -> list[Action]:
        """An operator had policies decide at run time: from now on it only proposes."""
        self._held = True
        if not isinstance(self._phase, _Watching):
            return []
        choice, self._phase = self._phase.change.target, _Waiting()
        reason = "an operator chose policies: it is not watched any more, and not rolled back"
        return [self._note(at, AutopilotStep.LEFT, reason, choice)]

    def configure(
        self, at: Moment, terms: AutopilotTerms, configured: PolicyChoice
    ) -> list[Action]:
        """The configuration was read, and its policies decide: what operators chose before is
        over. A replay that runs is about earlier policies."""
        ends: list[Action] = [EndReplay()] if isinstance(self._phase, _Replaying) else []
        self.terms, self._configured = terms, configured
        self._held, self._phase = False, _Waiting()
        self._next = at.seconds + terms.interval_seconds
        return ends

    # --- what follows ----------------------------------------------------------------------------

    @property
    def _charge(self) -> float:
        return self.terms.cpu_seconds + START_CPU_SECONDS

    def _begin(self, at: Moment, seen: Seen) -> list[Action]:
        if self.terms.mode is AutopilotMode.OFF:
            return []
        if not seen.journaled:
            self._next = at.seconds + self.terms.interval_seconds
            reason = (
                "no journal is written, which a replay is made of: see `journal.path` and "
                "`journal.max_size`, and restart the daemon"
            )
            return [self._note(at, AutopilotStep.FAILED, reason)]
        if not self._budget.charge(at.seconds, self._charge):
            return []  # it begins as soon as enough of the last hour is over
        self._next = at.seconds + self.terms.interval_seconds
        self._phase = _Replaying(at.seconds)
        return [StartReplay(cpu_seconds=self.terms.cpu_seconds, hard_cpu_seconds=self._charge)]

    def _judge(self, at: Moment, seen: Seen, watch: _Watching) -> list[Action]:
        """Whether what was applied keeps as much as what was before."""
        change, seconds = watch.change, at.seconds - watch.since
        if seen.active != change.target:  # of which nothing was reported
            self._phase = _Waiting()
            reason = "other policies decide now: it is not watched any more"
            return [self._note(at, AutopilotStep.LEFT, reason, change.target)]
        got = seen.promises.since(watch.start)
        few = got.requests < LEAST_REQUESTS
        over = seconds >= self.terms.watch_seconds * (LONGEST_WATCH if few else 1)
        if not (over or seen.ailing):
            return []
        after, error = got.value, change.found.error
        assert error is not None, "only what wins by more than the error is applied"
        worse = not few and after is not None and after < change.kept - error
        if not (worse or seen.ailing):
            self._phase = _Waiting()
            reason = f"{got.requests} requests and {got.tokens} tokens in {seconds:.0f} s"
            evidence = {"gain": change.found.gain, "error": error, "before": change.kept}
            step = AutopilotStep.CONFIRMED
            return [self._note(at, step, reason, change.target, after=after, **evidence)]
        reason = f"policy {seen.ailing} failed too often"
        if not seen.ailing:
            reason = (
                f"{after:.1%} of tokens and requests were in time in {seconds:.0f} s, and"
                f" {change.kept:.1%} before, which is worse by more than the lab's error"
                f" ({error:.1%})"
            )
        self._phase = _Changing(
            change.found, change.before, change.target, change.kept, after=after, back=reason
        )
        return [self._bar(at, change.target), Use(choice=change.before)]

    def _obstacle(self, at: Moment, target: PolicyChoice, kept: float | None) -> str:
        """Why it is only proposed; empty if it may be applied."""
        if self.terms.mode is not AutopilotMode.APPLY:
            return 'policy.autopilot is "propose"'
        if self._held:
            return "an operator chose policies at run time (a reload of another [policy] ends that)"
        if taken := _taken_back(target, self._configured):
            return f"it would change what the configuration sets by hand: {taken}"
        self._forget_barred(at)
        if any(one.choice == target for one in self._barred):
            return "it was applied in the last 24 hours, kept less than before, and was rolled back"
        if kept is None:
            return (
                f"fewer than {LEAST_REQUESTS} requests in the last"
                f" {self.terms.watch_seconds:g} s under these policies, to watch it by"
            )
        return ""

    def _bar(self, at: Moment, choice: PolicyChoice) -> Bar:
        until = at.unix_seconds + BARRED_SECONDS
        self._forget_barred(at)
        self._barred = [one for one in self._barred if one.choice != choice][-MOST_BARRED + 1 :]
        self._barred.append(Barred(choice=choice, until_unix_seconds=until))
        return Bar(barred=tuple(self._barred))

    def _forget_barred(self, at: Moment) -> None:
        now = at.unix_seconds
        # One from further ahead was written under a wrong clock.
        self._barred = [
            one for one in self._barred if now < one.until_unix_seconds <= now + BARRED_SECONDS
        ]

    def _sample(self, at: Moment, seen: Seen) -> None:
        if seen.active != self._active:
            self._active = seen.active
            self._samples.clear()
        newest = self._samples[-1][0] if self._samples else None
        if newest is None or at.seconds - newest >= self.terms.watch_seconds / SAMPLES:
            self._samples.append((at.seconds, seen.promises))
        while len(self._samples) > 1 and self._samples[1][0] <= (
            at.seconds - self.terms.watch_seconds
        ):
            self._samples.popleft()

    def _before(self, at: Moment, seen: Seen) -> float | None:
        """What the policies of now kept lately; None if that cannot be said."""
        if seen.active != self._active or not self._samples:
            return None
        got = seen.promises.since(self._samples[0][1])
        return got.value if got.requests >= LEAST_REQUESTS else None

    def _note(
        self,
        at: Moment,
        what: AutopilotStep,
        reason: str,
        choice: PolicyChoice | None = None,
        **evidence: float | None,
    ) -> AutopilotNote:
        note = AutopilotNote(what=what, unix_seconds=at.unix_seconds, reason=reason, choice=choice)
        note = msgspec.structs.replace(note, **evidence)
        self._notes.append(note)
        return note


def _wins(found: Recommendation) -> bool:
    """By more than the lab's error."""
    return found.gain is not None and found.error is not None and found.gain > found.error


def _with_tables(choice: PolicyChoice, configured: PolicyChoice) -> PolicyChoice:
    """The same, with the parameters of the configuration for policies that it does not have: so
    they are there when these are tried again."""
    tables: dict[str, Mapping[str, object]] = {**configured.parameters, **choice.parameters}
    return msgspec.structs.replace(choice, parameters=tables)


def _taken_back(target: PolicyChoice, configured: PolicyChoice) -> str:
    """A key of the configuration that it has another value for, or none."""
    for hook, name in configured.decisions.items():
        if target.decisions.get(hook) != name:
            return f"policy.{hook}"
    for policy, table in configured.parameters.items():
        mine = target.parameters.get(policy, {})
        for key, value in table.items():
            if key not in mine or mine[key] != value:
                return f"policy.{policy}.{key}"
    return ""
