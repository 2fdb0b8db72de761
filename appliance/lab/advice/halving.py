"""Successive halving: all candidates on short replays, the better half of them on longer ones.

Sans-IO: `Halving` says what to replay next, and is given the score and what that cost. It starts
no replay that it expects to go beyond the budget. Candidate 0 is the *baseline*: it takes part in
every rung, first, and is never dropped. On the last rung all that are left are replayed once; then
the baseline and the best other one, the *leader*, are replayed in turn, as often as the budget
suffices for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from appliance.vocabulary import Word

BASELINE = 0


class Rung(Word, frozen=True):
    """How long the replays are that candidates have to pass: a share of the window (0 to 1), so
    many times each."""

    share: float
    replays: int = 1
    """On the last rung those of the baseline and the leader, at most; others have one."""
    warmup: float = 0.0
    """That is replayed before, as a share of the window, too."""

    @property
    def length(self) -> float:
        """Of a replay, in windows; what it costs goes by that."""
        return self.share + self.warmup


class Trial(NamedTuple):
    """A replay to make: number `replay` (from 0) of a candidate on a rung."""

    candidate: int
    rung: int
    replay: int


class Dropped(NamedTuple):
    """Why a candidate was given up, and on which rung."""

    rung: int
    reason: str


EXPECTED_CHALLENGERS = 12
"""For so many at most, later rungs have their part of the budget kept. There are always more to try
(each parameter of each policy), and those beyond come last."""

MARGIN = 1.5
"""Times what the baseline's replay costs, that of another candidate is expected to cost at most."""

OUT_OF_BUDGET = "the CPU time was used up"
LOST = "others did better on a short replay"


class Halving:
    """The search. `next`, then `scored` or `failed`, until `next` is None.

    With n candidates a rung costs O(n log n), besides its replays.
    """

    def __init__(self, candidates: int, rungs: Sequence[Rung], budget_seconds: float) -> None:
        """`candidates` with the baseline; rungs from the shortest replays to the longest. Raises
        `ValueError` if there is no candidate or no rung."""
        if candidates < 1 or not rungs:
            raise ValueError("a search needs a baseline and a rung")
        self._rungs = list(rungs)
        self._budget = budget_seconds
        self._limits = _limits(candidates - 1, rungs, budget_seconds)
        self._spent = 0.0
        self._costs: dict[int, float] = {}
        """CPU seconds of the newest replay of a candidate, over its length in windows."""
        self._scores: list[list[list[float]]] = [[[] for _ in rungs] for _ in range(candidates)]
        self.dropped: dict[int, Dropped] = {}
        """Candidates that were given up."""
        self._rung = 0
        self._queue = list(range(candidates))
        """Candidates that still have to pass this rung, the one that is at it first. On the last
        rung, without the baseline."""
        self._over = False
        """Whether the leader has no more replays on the last rung."""
        if len(rungs) == 1:
            self._queue.remove(BASELINE)

    @property
    def spent_seconds(self) -> float:
        """CPU time of all replays so far."""
        return self._spent

    def next(self) -> Trial | None:
        """The next replay to make; None when the search is over."""
        while BASELINE not in self.dropped:
            if self._is_last:
                return self._next_of_last()
            if not self._queue:
                self._climb()
                continue
            candidate = self._queue[0]
            done = len(self._scores[candidate][self._rung])
            if done == self._rungs[self._rung].replays:
                del self._queue[0]
            elif done == 0 and self._expected(candidate) > self._left(candidate):
                self._skip(candidate)
            else:
                return Trial(candidate, self._rung, done)
        return None

    def _next_of_last(self) -> Trial | None:
        """One of the baseline and of each other, then pairs of the baseline and the leader."""
        scores = [rows[self._rung] for rows in self._scores]
        if not scores[BASELINE]:
            if self._affords(BASELINE):
                return Trial(BASELINE, self._rung, 0)
            self._drop(BASELINE, OUT_OF_BUDGET)
            return None
        while self._queue:
            candidate = self._queue[0]
            if scores[candidate]:
                del self._queue[0]
            elif self._affords(candidate):
                return Trial(candidate, self._rung, 0)
            else:
                self._drop(candidate, OUT_OF_BUDGET)
        others = [number for number in self.finalists() if number != BASELINE]
        if self._over or not others:
            return None
        leader = max(others, key=lambda number: (len(scores[number]), _mean(scores[number])))
        done = len(scores[leader])
        if len(scores[BASELINE]) > done:
            return Trial(leader, self._rung, done) if self._affords(leader) else None
        if done < self._rungs[-1].replays and self._affords(BASELINE, leader):
            return Trial(BASELINE, self._rung, done)
        return None

    def _affords(self, *candidates: int) -> bool:
        """Whether there is budget for a replay of each on the last rung."""
        length = self._rungs[-1].length
        expected = length * math.fsum(self._cost(candidate) for candidate in candidates)
        return expected <= self._budget - self._spent

    def allowance_seconds(self, trial: Trial) -> float:
        """CPU time that the replay may take at most; what takes longer should be stopped and
        reported as stopped."""
        return max(0.0, self._left(trial.candidate))

    def scored(self, trial: Trial, score: float, cpu_seconds: float) -> None:
        """The replay was made, and is worth `score` (more is better)."""
        self._pay(trial, cpu_seconds)
        self._scores[trial.candidate][trial.rung].append(score)

    def failed(self, trial: Trial, reason: str, cpu_seconds: float) -> None:
        """The replay could not be made: its candidate is given up."""
        self._pay(trial, cpu_seconds)
        self._drop(trial.candidate, reason)

    def stopped(self, trial: Trial, reason: str, cpu_seconds: float) -> None:
        """The replay took all that it may: its candidate is given up, except after a whole replay
        on the last rung, after which there are no more."""
        if self._is_last and trial.replay > 0:
            self._pay(trial, cpu_seconds)
            self._over = True
        else:
            self.failed(trial, reason, cpu_seconds)

    def reached(self, candidate: int) -> int | None:
        """The last rung that a candidate has passed; None if it has passed none."""
        dropped = self.dropped.get(candidate)
        passed = [
            number
            for number, rung in enumerate(self._rungs)
            if len(self._scores[candidate][number]) >= self._needed(number, rung)
            and (dropped is None or dropped.rung != number or dropped.reason == LOST)
        ]
        return passed[-1] if passed else None

    def finalists(self) -> list[int]:
        """Candidates that have passed the last rung, in their own order."""
        last = len(self._rungs) - 1
        return [number for number in range(len(self._scores)) if self.reached(number) == last]

    @property
    def _is_last(self) -> bool:
        return self._rung + 1 == len(self._rungs)

    def _needed(self, number: int, rung: Rung) -> int:
        return 1 if number + 1 == len(self._rungs) else rung.replays

    def _pay(self, trial: Trial, cpu_seconds: float) -> None:
        self._spent += cpu_seconds
        self._costs[trial.candidate] = cpu_seconds / self._rungs[trial.rung].length

    def _expected(self, candidate: int) -> float:
        """CPU time of all replays of a candidate on this rung: as its own, else as the baseline's;
        0 of the very first."""
        rung = self._rungs[self._rung]
        return self._cost(candidate) * rung.length * rung.replays

    def _cost(self, candidate: int) -> float:
        """Of a window."""
        return self._costs.get(candidate, self._costs.get(BASELINE, 0.0))

    def _left(self, candidate: int) -> float:
        limit = self._budget
        if candidate != BASELINE:
            limit = min(self._limits[self._rung], limit - self._kept)
        return limit - self._spent

    @property
    def _kept(self) -> float:
        """For the baseline's later replays, and one of another candidate on the last rung."""
        later = self._rungs[self._rung + 1 :]
        if not later:
            return 0.0
        lengths = sum(rung.length for rung in later) + MARGIN * later[-1].length
        return self._cost(BASELINE) * lengths

    def _drop(self, candidate: int, reason: str) -> None:
        self.dropped[candidate] = Dropped(self._rung, reason)
        if candidate in self._queue:  # not the baseline on the last rung
            self._queue.remove(candidate)

    def _skip(self, candidate: int) -> None:
        """There is no budget for the candidate on this rung. If none of the others has passed it,
        what is kept for the last rung is for this one, the best of the rung before."""
        number = self._rung
        if candidate == BASELINE or any(
            len(rows[number]) == self._rungs[number].replays
            for other, rows in enumerate(self._scores)
            if other != BASELINE and other not in self.dropped
        ):
            self._drop(candidate, OUT_OF_BUDGET)
            return
        for other in self._queue[1:]:
            self.dropped[other] = Dropped(number, OUT_OF_BUDGET)
        self._begin_last([candidate])

    def _climb(self) -> None:
        """The better half of those that passed go on, the best first: if the budget does not
        suffice for all, it is they that are replayed."""
        scores = {
            number: _mean(rows[self._rung])
            for number, rows in enumerate(self._scores)
            if number != BASELINE and number not in self.dropped
        }
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        kept = math.ceil(len(ranked) / 2)
        for number in ranked[kept:]:
            self.dropped[number] = Dropped(self._rung, LOST)
        if self._rung + 2 == len(self._rungs) or not ranked:
            self._begin_last(ranked[:kept])
        else:
            self._rung += 1
            self._queue = [BASELINE, *ranked[:kept]]

    def _begin_last(self, challengers: list[int]) -> None:
        self._rung = len(self._rungs) - 1
        self._queue = challengers


def _limits(challengers: int, rungs: Sequence[Rung], budget_seconds: float) -> list[float]:
    """What may be spent until the end of each rung: so that later ones have their part of the
    budget if replays cost by their length, and the last one can be of one replay each."""
    weights = []
    challengers = min(challengers, EXPECTED_CHALLENGERS)
    for rung in rungs:
        weights.append(rung.length * (challengers + 1))
        challengers = math.ceil(challengers / 2)
    return [budget_seconds * part / sum(weights) for part in accumulate(weights)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
