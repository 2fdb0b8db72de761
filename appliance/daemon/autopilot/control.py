"""What the autopilot does next: a state machine without input, output or clock.

It gets the time, what clients got, and what became of its actions; it answers with actions. It
waits, replays, has other policies decide, and watches them, one after the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import merge
from typing import Final, TypeAlias

import msgspec

from appliance.daemon.autopilot.budget import CpuBudget
from appliance.daemon.autopilot.seasons import (
    Cell,
    Remembered,
    Seasons,
    local_hour,
    set_by_hand,
)
from appliance.daemon.autopilot.tuning import REPLAYS, Streak, is_tuned, untuned
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
FIRST_SHARE: Final = 0.5
"""Of `watch_seconds`: from then on it goes back as soon as the loss is clear."""
STANDARD_ERRORS: Final = 2.0
"""Of a loss that counts when the watch is over."""
CLEAR_ERRORS: Final = 3.0
"""Standard errors of a loss that is clear before the watch is over: it is looked for often."""
LEAST_TICK_SECONDS: Final = 0.1
FIRST_RETRY_SECONDS: Final = 5.0
LONGEST_RETRY_SECONDS: Final = 300.0
"""Until a change back that failed is tried again: twice as long each time, up to so long."""
MOST_DOUBLINGS: Final = 10
BARRED_SECONDS: Final = 24 * HOUR_SECONDS
MOST_BARRED: Final = 64
MOST_NOTES: Final = 20
"""Of what changed policies, and as many of what did not: that comes with every replay."""
SAMPLES: Final = 60
"""Of what clients got, in the time that a change is judged by."""


class Moment(Word, frozen=True):
    """Now: `seconds` never go back, `unix_seconds` go on while the daemon does not run."""

    seconds: float
    unix_seconds: float
    utc_offset_seconds: float = 0.0
    """By which local clocks are ahead of UTC now."""

    def hour(self, seconds_ago: float = 0.0) -> int:
        """The hour, as `Seasons` counts it."""
        return local_hour(self.unix_seconds - seconds_ago, self.utc_offset_seconds)


class Seen(Word, frozen=True):
    """How things are."""

    active: PolicyChoice
    promises: Promises
    """Up to now. Of requests that came before a change of policies, nothing is counted after it:
    those that decide now are not to answer for them."""
    ailing: str = ""
    """A policy of these that failed too often, and is not asked any more."""
    journaled: bool = True


class StartReplay(Word, frozen=True):
    """Replay the journal's end. Answered with `Control.advised` or `Control.failed`."""

    cpu_seconds: float
    hard_cpu_seconds: float
    """That the process may take at most; so many were charged."""
    also: tuple[PolicyChoice, ...] = ()
    """To be tried first."""


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
    kept: Promises
    """In the time before the change."""
    after: float | None = None
    back: str = ""
    """Why it goes back, if it does."""
    failures: int = 0
    """How often it did not come about."""
    name = "changing"


@dataclass(frozen=True)
class _Watching:
    change: _Changing
    since: float
    start: Promises
    name = "watching"


@dataclass(frozen=True)
class _Returning:
    """The change back failed, and is tried again then."""

    change: _Changing
    again: float
    name = "changing"


class Control:
    """The autopilot's mind. `configured` are the policies of the configuration, `barred` and
    `hours` what was remembered. Every call costs O(1), up to the number of `SAMPLES`."""

    def __init__(
        self,
        terms: AutopilotTerms,
        configured: PolicyChoice,
        barred: Iterable[Barred] = (),
        hours: Iterable[Cell] = (),
    ) -> None:
        self.terms = terms
        self._configured = configured
        self._budget = CpuBudget(CPU_SHARE * HOUR_SECONDS)
        self._barred = list(barred)
        self._seasons = Seasons(hours)
        self._learned = False
        self._streak = Streak()
        self.configured_times = 0
        """What was asked for before the last time does not wait for an answer any more."""
        self._held = False
        self._phase: _Waiting | _Replaying | _Changing | _Watching | _Returning = _Waiting()
        self._next: float | None = None
        """When the next replay is due; an interval after the first tick."""
        self._paced_from = math.inf
        """The first moment, or the begin of the last replay."""
        self._samples: deque[tuple[float, Promises]] = deque()
        """Under the policies that decide now."""
        self._active: PolicyChoice | None = None
        self._noted = 0
        self._changes: deque[tuple[int, AutopilotNote]] = deque(maxlen=MOST_NOTES)
        self._others: deque[tuple[int, AutopilotNote]] = deque(maxlen=MOST_NOTES)
        """Notes by their number."""

    @property
    def tick_seconds(self) -> float:
        """How often it is to see how things are."""
        wanted = min(5.0, self.terms.interval_seconds / 10, self.terms.watch_seconds / SAMPLES)
        return max(LEAST_TICK_SECONDS, wanted)

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
            notes=tuple(note for _, note in merge(self._changes, self._others)),
            barred=tuple(self._barred),
            hour=self._seasons.report(at.hour()),
        )

    def learned(self) -> tuple[Cell, ...] | None:
        """What is to be remembered of hours, also over a restart, if there is something new since
        this was last asked. O(all that is remembered)."""
        learned, self._learned = self._learned, False
        return self._seasons.table() if learned else None

    # --- what happens ----------------------------------------------------------------------------

    def tick(self, at: Moment, seen: Seen) -> list[Action]:
        """Time went on."""
        self._sample(at, seen)
        if self._next is None:
            self._next = at.seconds + self.terms.interval_seconds
        self._paced_from = min(self._paced_from, at.seconds)
        began = self._seasons.began(at.hour())
        match self._phase:
            case _Waiting() if began and (ahead := self._ahead(at, seen)):
                return ahead
            case _Waiting() if at.seconds >= self._next:
                return self._begin(at, seen)
            case _Replaying(since) if at.seconds - since > PATIENCE * self._charge:
                reason = f"the replay had no answer after {at.seconds - since:.0f} s; it was ended"
                return [EndReplay(), *self.failed(at, reason)]
            case _Watching():
                return self._judge(at, seen, self._phase)
            case _Returning(change, again) if seen.active != change.before:
                return self._leave(at, change.before)
            case _Returning(change, again) if at.seconds >= again:
                self._phase = change
                return [Use(choice=change.target)]
        return []

    def advised(self, at: Moment, seen: Seen, found: Recommendation) -> list[Action]:
        """The replay has an answer."""
        if not isinstance(self._phase, _Replaying):
            return []
        self._end_replay(at)
        evidence = {"gain": found.gain, "error": found.error, "before": found.observed}
        if found.current != seen.active:
            reason = "other policies decide now than those whose end of the journal was replayed"
            return [self._note(at, AutopilotStep.KEPT, reason, None, **evidence)]
        self._learn_replay(at, seen, found)
        chosen = found.chosen if _wins(found) else None
        times = self._streak.add(found.current, chosen)
        if chosen is None:
            return [self._note(at, AutopilotStep.KEPT, found.reason, None, **evidence)]
        target = _with_tables(chosen, self._configured)
        kept = self._before(at, seen)
        obstacle = self._obstacle(at, target, kept)
        if not obstacle and times < REPLAYS and is_tuned(target, self._configured):
            obstacle = "the next replay, of other minutes, has to recommend these parameters, too"
        if obstacle:
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
        evidence = _evidence(change)
        if change.back:
            self._phase = _Waiting()
            evidence["after"] = change.after
            step, reason = AutopilotStep.ROLLED_BACK, change.back
        else:
            self._phase = _Watching(change, at.seconds, seen.promises)
            step, reason = AutopilotStep.APPLIED, change.found.reason
        return [self._note(at, step, reason, change.target, **evidence)]

    def failed(self, at: Moment, reason: str) -> list[Action]:
        """The replay, or the change, did not come about. A change back is tried again."""
        change = self._phase
        if isinstance(change, _Replaying):
            self._end_replay(at)
            self._streak.end()
            return [self._note(at, AutopilotStep.FAILED, reason)]
        if not isinstance(change, _Changing):
            return []
        self._phase = _Waiting()
        if change.back and self._free:
            pause = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0**change.failures)
            # More failures do not make it longer, and 2.0**1100 is too large.
            again = replace(change, failures=min(change.failures + 1, MOST_DOUBLINGS))
            self._phase = _Returning(again, at.seconds + pause)
            reason = f"{reason}; it is tried again in {pause:g} s"
        return [self._note(at, AutopilotStep.FAILED, reason, change.target)]

    def operator_chose(self, at: Moment) -> list[Action]:
        """An operator had policies decide at run time: from now on it only proposes."""
        self._held = True
        match self._phase:
            case _Watching(change):
                choice = change.target
            case _Returning(change):
                choice = change.before
            case _:
                return []
        self._phase = _Waiting()
        reason = "an operator chose policies: it is not watched any more, and not rolled back"
        return [self._note(at, AutopilotStep.LEFT, reason, choice)]

    def forgot(self, at: Moment, reason: str) -> list[Action]:
        """What was remembered of hours cannot be used: it starts anew."""
        return [self._note(at, AutopilotStep.FORGOT, reason)]

    def configure(
        self, at: Moment, terms: AutopilotTerms, configured: PolicyChoice
    ) -> list[Action]:
        """The configuration was read, and its policies decide: what operators chose before is
        over. A replay that runs is about earlier policies. What is remembered of hours is forgotten
        if other decisions or parameters are set by hand now: it has some of those before."""
        forgotten = self._forget_hours(at, configured)
        ends: list[Action] = [EndReplay()] if isinstance(self._phase, _Replaying) else []
        self._end_replay(at)
        self._streak.end()
        self.configured_times += 1
        self.terms, self._configured, self._held = terms, configured, False
        self._next = at.seconds + terms.interval_seconds
        return [*ends, *forgotten]

    # --- what follows ----------------------------------------------------------------------------

    @property
    def _charge(self) -> float:
        # The kernel counts whole seconds.
        return float(math.ceil(self.terms.cpu_seconds + START_CPU_SECONDS))

    def _forget_hours(self, at: Moment, configured: PolicyChoice) -> list[Action]:
        """If such a configuration sets other decisions or parameters by hand than that of now."""
        same = set_by_hand(configured) == set_by_hand(self._configured)
        if same or not self._seasons.table():
            return []
        self._seasons, self._learned = Seasons(), True
        return self.forgot(at, "[policy] has other decisions or parameters than before")

    def _end_replay(self, at: Moment) -> None:
        """Whatever it did, it waits now."""
        self._budget.ended(at.seconds)
        self._phase = _Waiting()

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
        if seen.promises == Promises():
            return []  # a daemon that starts for minutes is not charged for an empty journal
        if at.seconds - self._paced_from < self._charge / CPU_SHARE:
            return []  # it begins when a tenth of the time before it is as much as it may take
        if not self._budget.charge(at.seconds, self._charge):
            return []  # it begins as soon as enough of the last hour is over
        self._next = at.seconds + self.terms.interval_seconds
        self._paced_from = at.seconds
        self._phase = _Replaying(at.seconds)
        return [
            StartReplay(
                cpu_seconds=self.terms.cpu_seconds,
                hard_cpu_seconds=self._charge,
                also=self._early(at, seen),
            )
        ]

    def _early(self, at: Moment, seen: Seen) -> tuple[PolicyChoice, ...]:
        """What a replay tries first: the policies of now without changed parameters, if they have
        some; what the last replay recommended; and what won at this hour."""
        found, early = [seen.active.pruned()], self._seasons.candidates(at.hour())
        for one in (untuned(seen.active, self._configured), self._streak.wanted, *early):
            if one is not None and one not in found:
                found.append(one)
        return tuple(found[1:])

    def _ahead(self, at: Moment, seen: Seen) -> list[Action]:
        """Have decide what won at this hour on earlier weeks, without a replay, under the same
        rules; nothing if it may not."""
        found = self._seasons.ahead(at.hour(), seen.active)
        if found is None:
            return []
        target = _with_tables(found.choice, self._configured)
        kept = self._before(at, seen)
        if kept is None or self._obstacle(at, target, kept):
            return []  # the replay tries it
        self._phase = _Changing(_from_memory(found, seen.active), target, seen.active, kept)
        return [Use(choice=target)]

    def _learn_replay(self, at: Moment, seen: Seen, found: Recommendation) -> None:
        """What the replay says of the hour that most of it was in, and what clients got lately; not
        what an operator tries at run time, which is not to come back in other weeks."""
        if self._held:
            return
        kept = self._before(at, seen)
        if kept is not None and kept.value is not None:
            self._seasons.kept(at.hour(self.terms.watch_seconds / 2), seen.active, kept.value)
            self._learned = True
        hour = at.hour(max(0.0, min(found.seconds, self.terms.window_seconds)) / 2)
        if found.chosen is not None and found.gain is not None and found.error is not None:
            self._seasons.compared(hour, found.chosen, found.gain, found.error)
            self._seasons.compared(hour, found.current, -found.gain, found.error)
            self._learned = True

    def _learn_watch(
        self, at: Moment, watch: _Watching, got: Promises | None, rolled_back: bool
    ) -> None:
        """What clients got under what was applied; `got` is None if there were too few."""
        hour, change = at.hour((at.seconds - watch.since) / 2), watch.change
        before, after = change.kept.value, None if got is None else got.value
        if got is not None and before is not None and after is not None:
            self._seasons.kept(hour, change.target, after)
            self._seasons.compared(hour, change.target, after - before, _margin(change, got))
        if rolled_back:
            self._seasons.failed(hour, change.target)
        self._learned = True

    def _judge(self, at: Moment, seen: Seen, watch: _Watching) -> list[Action]:
        """Whether what was applied keeps as much as what was before."""
        change, seconds = watch.change, at.seconds - watch.since
        if seen.active != change.target:
            return self._leave(at, change.target)
        got = seen.promises.since(watch.start)
        few = got.requests < LEAST_REQUESTS
        starved = few and got.unanswered >= LEAST_REQUESTS
        patient = few and not (starved and got.requests == 0)
        over = seconds >= self.terms.watch_seconds * (LONGEST_WATCH if patient else 1)
        if not (over or seen.ailing or self._clearly_bad(change, got, seconds)):
            return []
        after = got.value
        if seen.ailing:
            reason = f"policy {seen.ailing} failed too often"
        elif starved:
            reason = (
                f"at least {got.unanswered} requests had no answer in time, or were refused, in"
                f" {seconds:.0f} s, and {got.requests} others count"
            )
        else:
            reason = "" if few else _worse(change, got, seconds)
        self._learn_watch(at, watch, None if few else got, bool(reason))
        if not reason:
            self._phase = _Waiting()
            said = f"{got.requests} requests and {got.tokens} tokens in {seconds:.0f} s"
            step = AutopilotStep.CONFIRMED
            return [self._note(at, step, said, change.target, after=after, **_evidence(change))]
        self._phase = _Changing(
            change.found, change.before, change.target, change.kept, after=after, back=reason
        )
        return [self._bar(at, change.target), Use(choice=change.before)]

    def _clearly_bad(self, change: _Changing, got: Promises, seconds: float) -> bool:
        """Whether so much is lost that the rest of the watch need not be waited for."""
        if seconds < FIRST_SHARE * self.terms.watch_seconds:
            return False
        if got.requests < LEAST_REQUESTS:
            return got.requests == 0 and got.unanswered >= LEAST_REQUESTS
        return bool(_worse(change, got, seconds, CLEAR_ERRORS))

    def _leave(self, at: Moment, choice: PolicyChoice) -> list[Action]:
        """Others decide than those that it applied, of which nothing was reported."""
        self._phase = _Waiting()
        reason = "other policies decide now: it is not watched any more"
        return [self._note(at, AutopilotStep.LEFT, reason, choice)]

    def _obstacle(self, at: Moment, target: PolicyChoice, kept: Promises | None) -> str:
        """Why it is only proposed; empty if it may be applied."""
        if self.terms.mode is not AutopilotMode.APPLY:
            return 'policy.autopilot is "propose"'
        if self._held:
            return "an operator chose policies at run time (a reload of another [policy] ends that)"
        if taken := _taken_back(target, self._configured):
            return f"it would change what the configuration sets by hand: {taken}"
        self._forget_barred(at)
        if any(one.choice.pruned() == target.pruned() for one in self._barred):
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

    def _before(self, at: Moment, seen: Seen) -> Promises | None:
        """What the policies of now kept lately; None if that cannot be said."""
        if seen.active != self._active or not self._samples:
            return None
        got = seen.promises.since(self._samples[0][1])
        return got if got.requests >= LEAST_REQUESTS else None

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
        changed_nothing = what in (AutopilotStep.KEPT, AutopilotStep.PROPOSED) or (
            what is AutopilotStep.FAILED and choice is None
        )
        notes = self._others if changed_nothing else self._changes
        self._noted += 1
        notes.append((self._noted, note))
        return note


def _wins(found: Recommendation) -> bool:
    """By more than the error of that; with fewer parameters, it need not be behind."""
    if found.chosen is None or found.gain is None or found.error is None:
        return False
    if found.chosen.is_simpler_than(found.current):
        return found.gain >= 0
    return found.gain > found.error


def _worse(
    change: _Changing, got: Promises, seconds: float, standard_errors: float = STANDARD_ERRORS
) -> str:
    """Why what came after a change is less than what was before; empty if it is not by more than
    the advice's error, and than some standard errors of such a share of so many requests."""
    before, after = change.kept.value, got.value
    margin = _margin(change, got, standard_errors)
    assert before is not None, "it has requests"
    assert after is not None, "it has requests"
    fewer = min(change.kept.requests, got.requests)
    if after >= before - margin:
        return ""
    return (
        f"{after:.1%} of tokens and requests were in time in {seconds:.0f} s, and {before:.1%}"
        f" before, which is worse by more than {margin:.1%}, the larger one of the advice's error"
        f" and what {fewer} requests differ by"
    )


def _margin(change: _Changing, got: Promises, standard_errors: float = STANDARD_ERRORS) -> float:
    """By which what clients got before a change and after it may differ without a meaning."""
    before, after, error = change.kept.value, got.value, change.found.error
    assert before is not None, "it has requests"
    assert after is not None, "it has requests"
    assert error is not None, "only what wins by more than the error is applied"
    of_both, fewer = change.kept.requests + got.requests, min(change.kept.requests, got.requests)
    share = (before * change.kept.requests + after * got.requests) / of_both
    return max(error, standard_errors * math.sqrt(share * (1 - share) / fewer))


def _evidence(change: _Changing) -> dict[str, float | None]:
    """For what is said of it, but what was kept after it."""
    found = change.found
    return {"gain": found.gain, "error": found.error, "before": change.kept.value}


def _from_memory(found: Remembered, active: PolicyChoice) -> Recommendation:
    """As if a replay had said it."""
    gain, error = found.gain.value, found.error.value
    reason = (
        f"At this hour of the week it won in {found.wins} weeks, and was {100 * gain:.1f} points"
        f" ahead with an error of {100 * error:.1f} points: applied before a replay."
    )
    return Recommendation(
        current=active,
        chosen=found.choice,
        name="+".join(found.choice.use),
        gain=gain,
        error=error,
        reason=reason,
        observed=None,
        requests=0,
        seconds=0.0,
        cpu_seconds=0.0,
    )


def _with_tables(choice: PolicyChoice, configured: PolicyChoice) -> PolicyChoice:
    """The same, with the parameters of the configuration for policies that it does not have: so
    they are there when these are tried again."""
    tables: dict[str, Mapping[str, object]] = {**configured.parameters, **choice.parameters}
    return msgspec.structs.replace(choice, parameters=tables)


def _taken_back(target: PolicyChoice, configured: PolicyChoice) -> str:
    """A key of the configuration that it has another value for, or a decision that the
    configuration leaves to `use`; empty if there is none."""
    for hook in sorted({*configured.decisions, *target.decisions}):
        if target.decisions.get(hook) != configured.decisions.get(hook):
            return f"policy.{hook}"
    for policy, table in configured.parameters.items():
        mine = target.parameters.get(policy, {})
        for key, value in table.items():
            if key not in mine or mine[key] != value:
                return f"policy.{policy}.{key}"
    return ""
