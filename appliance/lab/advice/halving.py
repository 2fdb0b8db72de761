"""Successive halving: all candidates on short replays, the better half of them on longer ones.

Sans-IO: `Halving` says what to replay next, and is given the score and what that cost. It starts
no replay that it expects to go beyond the budget. Candidate 0 is the *baseline*: it takes part in
every rung, first, and is never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from appliance.vocabulary import Word

BASELINE = 0


class Rung(Word, frozen=True):
    """How long the replays are that candidates have to pass: a share of the window (0 to 1), so
    many times each."""

    share: float
    replays: int = 1
    """On the last rung: fewer if the budget does not suffice for the best candidate."""
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
        """Candidates that still have to pass this rung, the one that is at it first."""

    @property
    def spent_seconds(self) -> float:
        """CPU time of all replays so far."""
        return self._spent

    def next(self) -> Trial | None:
        """The next replay to make; None when the search is over."""
        while BASELINE not in self.dropped:
            if self._queue:
                candidate = self._queue[0]
                done = len(self._scores[candidate][self._rung])
                if done == self._rungs[self._rung].replays:
                    del self._queue[0]
                elif done == 0 and self._expected(candidate) > self._left(candidate):
                    self._drop(candidate, OUT_OF_BUDGET)
                else:
                    return Trial(candidate, self._rung, done)
            elif self._rung + 1 < len(self._rungs):
                self._climb()
            else:
                break
        return None

    def allowance_seconds(self, trial: Trial) -> float:
        """CPU time that the replay may take at most; what takes longer should be stopped and
        reported as failed."""
        return max(0.0, self._left(trial.candidate))

    def scored(self, trial: Trial, score: float, cpu_seconds: float) -> None:
        """The replay was made, and is worth `score` (more is better)."""
        self._pay(trial, cpu_seconds)
        self._scores[trial.candidate][trial.rung].append(score)

    def failed(self, trial: Trial, reason: str, cpu_seconds: float) -> None:
        """The replay could not be made: its candidate is given up."""
        self._pay(trial, cpu_seconds)
        self._drop(trial.candidate, reason)

    def reached(self, candidate: int) -> int | None:
        """The last rung that a candidate has passed; None if it has passed none."""
        passed = [
            number
            for number, rung in enumerate(self._rungs)
            if len(self._scores[candidate][number]) == rung.replays
        ]
        return passed[-1] if passed else None

    def finalists(self) -> list[int]:
        """Candidates that have passed the last rung, in their own order."""
        last = len(self._rungs) - 1
        return [number for number in range(len(self._scores)) if self.reached(number) == last]

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
        self._queue.remove(candidate)

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
        self._rung += 1
        self._queue = [BASELINE, *ranked[:kept]]
        if self._rung + 1 == len(self._rungs):
            self._afford(ranked[:1])

    def _afford(self, best: Sequence[int]) -> None:
        """Have the last rung take as many replays as there is budget for, of the baseline and the
        best candidate, but one at least: one replay of both says more than three of none."""
        rung = self._rungs[-1]
        pair = rung.length * sum(self._cost(candidate) for candidate in (BASELINE, *best))
        if pair > 0:
            affordable = int((self._budget - self._spent) / pair)
            replays = max(1, min(rung.replays, affordable))
            self._rungs[-1] = msgspec.structs.replace(rung, replays=replays)


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
