"""Whether another policy is recommended: only what wins by more than the error of that difference.

How far the lab's replays are from what really happened (its *level error*) does not decide: what it
does wrong, it does wrong for both policies. But nothing wins more than clients really missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.lab.advice.candidates import Candidate
from appliance.lab.advice.paired_error import difference_error
from appliance.lab.advice.window import Score
from appliance.vocabulary import Word


class Finalist(Word, frozen=True, kw_only=True):
    """A candidate that was replayed over the whole window, at most as often as the current
    policy."""

    candidate: Candidate
    scores: tuple[Score, ...]
    """Replay number k has the noise of the current policy's replay number k."""


class Verdict(Word, frozen=True, kw_only=True):
    """What to do: have `candidate` decide, or keep what there is if that is None."""

    candidate: Candidate | None
    gain: float
    """By how much the recommended candidate, or else the best other one, is ahead of the current
    policy in its worst replay: in the mean of the shares of tokens and of requests in time, but at
    most what clients really missed. NaN if there is no other."""
    error: float
    """Of that difference, a share, too."""
    reason: str


@dataclass(frozen=True)
class _Compared:
    """A finalist and the current policy, on the same requests."""

    candidate: Candidate
    gain: float
    error: float
    loses: bool
    """More than the error in one of both shares, on average: what is won in tokens is not to be
    paid in requests."""
    mean: float
    """Of its replays."""
    left: float
    """To win: what clients missed."""

    @property
    def wins(self) -> bool:
        """By more than the error. With fewer parameters than the current choice, it need not be
        behind; but where all is in time anyway, that says nothing of parameters."""
        simpler = self.candidate.simpler and self.left > self.error and self.gain >= 0
        return (simpler or self.gain > self.error) and not self.loses


def level_error(replays: Iterable[Score], really: Score) -> float:
    """The largest difference between a replay and what happened to the same requests, in tokens or
    in requests in time; NaN if nothing can be compared."""
    differences = [
        abs(one - other)
        for replay in replays
        for one, other in ((replay.tokens, really.tokens), (replay.requests, really.requests))
    ]
    return max([one for one in differences if not math.isnan(one)], default=math.nan)


def verdict(
    now: Candidate,
    current: Sequence[Score],
    finalists: Sequence[Finalist],
    really: Score,
    requests: int,
) -> Verdict:
    """`current` are the replays of the policy that decides `now`, of so many requests, and `really`
    is what came of these."""
    name = now.name
    compared = [_compared(current, one, really, requests) for one in finalists]
    winners = [one for one in compared if one.wins]
    if winners:
        best = _one_step(now, _simplest(winners), winners)
        reason = f"Have {best.candidate.name} decide{_why(name, best)}"
        return Verdict(candidate=best.candidate, gain=best.gain, error=best.error, reason=reason)
    other = max(compared, key=lambda one: one.gain, default=None)
    return Verdict(
        candidate=None,
        gain=math.nan if other is None else other.gain,
        error=math.nan if other is None else other.error,
        reason=f"Keep what you have: {_why_keep(name, other, really)}",
    )


def points(share: float) -> str:
    """A difference of shares, for people."""
    return f"{100 * share:.1f} points"


def _compared(
    current: Sequence[Score], finalist: Finalist, really: Score, requests: int
) -> _Compared:
    scores = finalist.scores
    current = current[: len(scores)]
    error = difference_error(current, scores, requests)
    ahead = min(mine.value - theirs.value for theirs, mine in zip(current, scores, strict=True))
    return _Compared(
        candidate=finalist.candidate,
        gain=min(ahead, 1 - really.value),
        error=error,
        loses=_loses(current, scores, error),
        mean=math.fsum(score.value for score in scores) / len(scores),
        left=1 - really.value,
    )


def _loses(current: Sequence[Score], scores: Sequence[Score], error: float) -> bool:
    for share in ("tokens", "requests"):
        changes = [
            getattr(mine, share) - getattr(theirs, share)
            for theirs, mine in zip(current, scores, strict=True)
        ]
        if math.fsum(changes) / len(changes) < -error:
            return True
    return False


def _simplest(winners: Sequence[_Compared]) -> _Compared:
    """Of those that are behind the best by no more than the error, the one with the fewest changed
    parameters; of these the best on average."""
    best = max(winners, key=lambda one: one.gain)
    alike = [one for one in winners if one.gain >= best.gain - best.error]
    return min(alike, key=lambda one: (len(one.candidate.changed), -one.mean))


def _one_step(now: Candidate, best: _Compared, winners: Sequence[_Compared]) -> _Compared:
    """Another policy is recommended without changed parameters if it wins without them, too: they
    can be tried once it decides."""

    def policies(candidate: Candidate) -> tuple[object, ...]:
        return candidate.choice.use, candidate.choice.decisions

    meant = policies(best.candidate)
    if meant == policies(now):
        return best
    alike = [one for one in winners if policies(one.candidate) == meant]
    return min(alike, key=lambda one: (bool(one.candidate.changed), one is not best))


def _why(name: str, best: _Compared) -> str:
    if best.gain <= best.error:
        return (
            ", with fewer parameters set: on the same requests no replay has less in time than with"
            " all of them, in the mean of tokens and requests."
        )
    return (
        f": on the same requests it is at least {points(best.gain)} ahead of {name} in every"
        " replay, in the mean of tokens and requests in time; that may be off by"
        f" {points(best.error)}."
    )


def _why_keep(name: str, other: _Compared | None, really: Score) -> str:
    if other is None:
        return (
            "the CPU time did not suffice to replay another policy over all minutes. Give more"
            " --cpu-seconds, or fewer --minutes."
        )
    known = f"{other.candidate.name} is {points(other.gain)} ahead"
    if math.isnan(other.error):
        return (
            f"{known}, but the requests came all at once, so how far that may be off is not known."
        )
    if 1 - really.value <= other.error:
        return (
            f"{really.value:.1%} of tokens and requests were in time. What is left to win is not"
            f" more than a difference may be off here, {points(other.error)}."
        )
    if other.gain <= 0:
        return (
            "no other policy has more in time in every replay; the best of them is"
            f" {other.candidate.name}."
        )
    if other.gain <= other.error:
        return (
            f"{known} of {name} in its worst replay, but that may be off by {points(other.error)}:"
            " other minutes have other requests."
        )
    return (
        f"{known} of {name}, but it loses more than the error of that ({points(other.error)}) in"
        " tokens or in requests in time."
    )
