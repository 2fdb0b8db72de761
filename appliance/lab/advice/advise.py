"""Reads a journal, replays its last minutes under the candidates, and says what to set.

The lab learns the box from twice as many minutes, or more until a load was seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from appliance.errors import ApplianceError, LabError
from appliance.lab.advice.candidates import Candidate, Unsuited, candidates
from appliance.lab.advice.cpu_time import OutOfCpuTime
from appliance.lab.advice.halving import BASELINE, OUT_OF_BUDGET, Halving, Rung, Trial
from appliance.lab.advice.roles import conflict
from appliance.lab.advice.verdict import Finalist, Verdict, level_error, verdict
from appliance.lab.advice.window import (
    LEAST_REQUESTS,
    WARMUP_SECONDS,
    Failed,
    Score,
    Window,
    current_choice,
    observed,
    replayed,
    window_of,
)
from appliance.lab.experiments.run import Setting
from appliance.lab.replay.journal_part import last_part
from appliance.lab.replay.journal_workload import JournalRecording, contender_of, recording
from appliance.policies.loader import installed, load_stack
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Word

T = TypeVar("T")

SHORT_SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Of the window, for replays before those of all of it."""
LEAST_IN_SHORT = LEAST_REQUESTS // 2
"""Requests that a short replay measures at least."""
LEARNED_FROM = 2
"""Times the minutes that are replayed are read: from these the lab learns how fast the box is."""
NOISY_REPLAYS = 3
"""Of the whole window, of the current policy and the best other one, where times vary."""
STOPPED = "its replay took more CPU time than was left"


class Meter(Protocol):
    """What replays cost."""

    def seconds(self) -> float:
        """CPU time so far."""

    def limited(self, seconds: float) -> AbstractContextManager[None]:
        """Raises `OutOfCpuTime` in what takes longer."""


class Row(Word, frozen=True, kw_only=True):
    """A candidate in the table. Without a score it was not replayed to an end."""

    candidate: Candidate
    share: float
    """Of the window, in its longest replay."""
    replays: int
    score: Score | None
    """The mean of these replays."""
    difference: float
    """To the current policy in as long replays, in the mean of both shares; NaN if there is no
    score."""
    dropped: str
    """Why it was given up; empty if it was not."""


class Advice(Word, frozen=True, kw_only=True):
    """All that was found."""

    journal: str
    seconds: float
    """Of the window."""
    requests: int
    current: PolicyChoice
    observed: Score
    rows: tuple[Row, ...]
    """The current policy first, then the best."""
    unsuited: tuple[Unsuited, ...]
    level_error: float
    """How far replays under the current policy are from what was recorded, at most."""
    verdict: Verdict
    cpu_seconds: float
    cpu_budget_seconds: float


def advise(
    path: Path,
    minutes: float,
    cpu_seconds: float,
    meter: Meter,
    done: Callable[[], None] = lambda: None,
    *,
    configured: PolicyChoice | None = None,
    also: Sequence[PolicyChoice] = (),
) -> Advice:
    """The advice for the box whose journal this is; `done` is called after each replay. With
    `configured` policies the journal has to end under these. `also` are tried before others.

    Raises `LabError` naming the option at fault and the remedy, and `PolicyError` if the policies
    of the journal are not installed.
    """
    began = meter.seconds()

    def left() -> float:
        return cpu_seconds - (meter.seconds() - began)

    found, window = _within(meter, left(), lambda: _read(path, minutes, configured), "to read it")
    tried, unsuited = _within(
        meter,
        left(),
        lambda: candidates(
            current_choice(found), installed(), partial(_conflict, found.setting), also
        ),
        "and its policies to be made",
    )
    search = _Search(found, window, tried, left(), meter)
    search.run(done)
    return search.advice(
        path=path,
        unsuited=unsuited,
        cpu_seconds=meter.seconds() - began,
        budget_seconds=cpu_seconds,
    )


def _within(meter: Meter, seconds: float, work: Callable[[], T], purpose: str) -> T:
    try:
        with meter.limited(seconds):
            return work()
    except OutOfCpuTime:
        raise LabError(
            f"--cpu-seconds: the journal takes more CPU time than that {purpose}: give more,"
            " or fewer --minutes"
        ) from None


def _read(
    path: Path, minutes: float, configured: PolicyChoice | None
) -> tuple[JournalRecording, Window]:
    """What is in the part of the journal that is read, and what is replayed."""
    field = "--from" if configured is None else "journal.path"
    found = _read_part(path, minutes, field)
    now = current_choice(found)
    if configured is not None and configured != now:
        raise LabError(
            f"policy: {path} was recorded with another policy ({'+'.join(now.use)}) than the"
            " configuration has now. Reload the configuration and let the box serve, or give"
            f" --from {path} for advice on the policy of the journal"
        )
    load_stack(now).close()  # what is not installed cannot be compared with
    return found, window_of(found, minutes, field)


def _read_part(path: Path, minutes: float, field: str) -> JournalRecording:
    """As much of the journal's end as the lab needs: four times as much each time, until it has a
    load of weights."""
    seconds = LEARNED_FROM * 60 * minutes + WARMUP_SECONDS
    try:
        while True:
            part = last_part(path, seconds)
            found = recording(path, part=part)
            if found.link_known or part.begin == last_part(path, math.inf).begin:
                return found
            seconds *= 4
    except (OSError, msgspec.DecodeError, LabError) as error:
        raise LabError(
            f"{field}: {error}. Give a journal that a daemon of this version wrote, with requests"
            " in its last minutes (--minutes)"
        ) from None


def _not_replayed(reason: str) -> str:
    """Why nothing can be compared with the current policy, and what to do."""
    if reason in (STOPPED, OUT_OF_BUDGET):
        return (
            f"--cpu-seconds: the current policy could not be replayed over all minutes ({reason})."
            " Give more, or fewer --minutes"
        )
    return (
        f"policy: the current policy cannot be replayed, so nothing can be compared with it:"
        f" {reason}. `appliance policy test` says more"
    )


def _conflict(setting: Setting, choice: PolicyChoice) -> str:
    return conflict(choice, setting.models, setting.profiles, setting.box)


class _Search:
    """The candidates of a journal, and what their replays were worth."""

    def __init__(
        self,
        found: JournalRecording,
        window: Window,
        tried: Sequence[Candidate],
        budget_seconds: float,
        meter: Meter,
    ) -> None:
        self._found = found
        self._window = window
        self._tried = tried
        self._meter = meter
        shares = [
            share
            for share in SHORT_SHARES
            if window.last(share).requests(found.setting) >= LEAST_IN_SHORT
        ]
        replays = NOISY_REPLAYS if found.setting.deviation.noise else 1
        if not shares and replays > 1:
            shares = [1.0]
        self._rungs = [
            *(Rung(share, warmup=window.warmup(share)) for share in shares),
            Rung(1.0, replays, window.warmup(1.0)),
        ]
        self._halving = Halving(len(tried), self._rungs, budget_seconds)
        self._scores: defaultdict[tuple[int, int], list[Score]] = defaultdict(list)
        """By candidate and rung."""

    def run(self, done: Callable[[], None]) -> None:
        """Until the search is over. Raises `LabError` if the current policy cannot be replayed."""
        while (trial := self._halving.next()) is not None:
            before = self._meter.seconds()
            played = self._play(trial)
            cost = self._meter.seconds() - before
            if isinstance(played, Score):
                self._scores[trial.candidate, trial.rung].append(played)
                self._halving.scored(trial, played.value, cost)
            elif played == STOPPED:
                self._halving.stopped(trial, played, cost)
            else:
                self._halving.failed(trial, played, cost)
            done()
        if (dropped := self._halving.dropped.get(BASELINE)) is not None:
            raise LabError(_not_replayed(dropped.reason))

    def _play(self, trial: Trial) -> Score | str:
        """Its score, or why there is none."""
        share = self._rungs[trial.rung].share
        choice = self._tried[trial.candidate].choice
        # Short replays, and each of the long ones, have noise of their own.
        seed = 1 + trial.rung + trial.replay
        try:
            with self._meter.limited(self._halving.allowance_seconds(trial)):
                if reason := _conflict(self._found.setting, choice):
                    return reason
                window = self._window.last(share)
                found = replayed(self._found, window, contender_of(choice), seed)
        except OutOfCpuTime:
            return STOPPED
        except ApplianceError as error:
            return str(error)
        if isinstance(found, Failed):
            return f"it could not answer {found.questions} questions of a replay ({found.first})"
        return found

    def advice(
        self,
        *,
        path: Path,
        unsuited: Sequence[Unsuited],
        cpu_seconds: float,
        budget_seconds: float,
    ) -> Advice:
        """What came of it."""
        last = len(self._rungs) - 1
        now, really = self._scores[BASELINE, last], observed(self._found, self._window)
        requests = self._window.requests(self._found.setting)
        finalists = [
            Finalist(candidate=self._tried[number], scores=tuple(self._scores[number, last]))
            for number in self._halving.finalists()
            if number != BASELINE
        ]
        return Advice(
            journal=str(path),
            seconds=self._window.seconds,
            requests=requests,
            current=self._tried[BASELINE].choice,
            observed=msgspec.structs.replace(really, parts=()),
            rows=tuple(self._rows()),
            unsuited=tuple(unsuited),
            level_error=level_error(now, really),
            verdict=verdict(self._tried[BASELINE], now, finalists, really, requests),
            cpu_seconds=cpu_seconds,
            cpu_budget_seconds=budget_seconds,
        )

    def _rows(self) -> list[Row]:
        rows = [self._row(number) for number in range(len(self._tried))]
        current, *others = rows
        return [current, *sorted(others, key=lambda row: (-row.share, -_known(row.difference)))]

    def _row(self, number: int) -> Row:
        reached = self._halving.reached(number)
        dropped = self._halving.dropped.get(number)
        scores = [] if reached is None else self._scores[number, reached]
        score = mean_score(scores) if scores else None
        difference = math.nan
        if score is not None and reached is not None:
            same = self._scores[BASELINE, reached][: len(scores)]
            difference = score.value - mean_score(same).value
        return Row(
            candidate=self._tried[number],
            share=0.0 if reached is None else self._rungs[reached].share,
            replays=len(scores),
            score=score,
            difference=difference,
            dropped="" if dropped is None else dropped.reason,
        )


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def mean_score(scores: Sequence[Score]) -> Score:
    """Of some replays."""

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    return Score(
        tokens=mean([one.tokens for one in scores]),
        requests=mean([one.requests for one in scores]),
        ttft_p50_seconds=mean([one.ttft_p50_seconds for one in scores]),
        ttft_p99_seconds=mean([one.ttft_p99_seconds for one in scores]),
        switches=round(mean([one.switches for one in scores])),
        refused=round(mean([one.refused for one in scores])),
    )
