"""Whether another policy is recommended: only what wins by more than the lab is wrong by.

The lab's *error* is how far its replays under the current policy are from what really happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from appliance.lab.advice.candidates import Candidate
from appliance.lab.advice.window import Score
from appliance.vocabulary import Word

LEAST_ERROR = 0.01
"""That a replay was like what happened to the last digit does not mean that the next will be."""


LARGE_ERROR = 0.15
"""With this the lab does not know the box."""


class Finalist(Word, frozen=True, kw_only=True):
    """A candidate that was replayed over the whole window, as often as the current policy."""

    candidate: Candidate
    scores: tuple[Score, ...]
    """Replay number k has the noise of the current policy's replay number k."""


class Verdict(Word, frozen=True, kw_only=True):
    """What to do: have `candidate` decide, or keep what there is if that is None."""

    candidate: Candidate | None
    gain: float
    """By how much the recommended candidate, or else the best other one, is ahead of the current
    policy in its worst replay: in the mean of the shares of tokens and of requests in time. NaN if
    there is no other."""
    error: float
    """Of the lab, a share, too."""
    reason: str


def lab_error(pairs: Iterable[tuple[Score, Score]], requests: int) -> float:
    """The largest difference between a replay and what happened to the same requests, in tokens or
    in requests in time, but never less than `LEAST_ERROR` or two of so many `requests`; NaN if
    nothing can be compared."""
    differences = [
        abs(one - other)
        for replay, real in pairs
        for one, other in ((replay.tokens, real.tokens), (replay.requests, real.requests))
    ]
    known = [value for value in differences if not math.isnan(value)]
    return max(*known, LEAST_ERROR, 2 / requests) if known else math.nan


def verdict(
    name: str, current: Sequence[Score], finalists: Sequence[Finalist], error: float
) -> Verdict:
    """`current` are the replays of the policy `name` that decides now."""
    gains = {index: _gain(current, one.scores) for index, one in enumerate(finalists)}
    winners = [
        index
        for index, gain in gains.items()
        if gain > error and not _loses(current, finalists[index].scores, error)
    ]
    if winners:
        chosen = _simplest(finalists, gains, winners, error)
        candidate, gain = finalists[chosen].candidate, gains[chosen]
        reason = (
            f"Have {candidate.name} decide: in every replay it is at least {points(gain)} ahead of"
            f" {name}, in the mean of tokens and requests in time, and under {name} the lab was"
            f" off by {points(error)} at most."
        )
        return Verdict(candidate=candidate, gain=gain, error=error, reason=reason)
    best = max(gains, key=lambda index: (gains[index], -index), default=None)
    gain = math.nan if best is None else gains[best]
    other = None if best is None else finalists[best].candidate.name
    why = _why_keep(name, current, other, gain, error)
    return Verdict(candidate=None, gain=gain, error=error, reason=f"Keep what you have: {why}")


def points(share: float) -> str:
    """A difference of shares, for people."""
    return f"{100 * share:.1f} points"


def _gain(current: Sequence[Score], scores: Sequence[Score]) -> float:
    """In the worst replay."""
    return min(mine.value - theirs.value for theirs, mine in zip(current, scores, strict=True))


def _loses(current: Sequence[Score], scores: Sequence[Score], error: float) -> bool:
    """Whether one of the shares falls, on average, by more than the error: what is won in tokens
    is not to be paid in requests."""
    for share in ("tokens", "requests"):
        changes = [
            getattr(mine, share) - getattr(theirs, share)
            for theirs, mine in zip(current, scores, strict=True)
        ]
        if math.fsum(changes) / len(changes) < -error:
            return True
    return False


def _simplest(
    finalists: Sequence[Finalist], gains: dict[int, float], winners: Sequence[int], error: float
) -> int:
    """Of those that the lab cannot tell from the best, one with the fewest changed parameters; of
    these the best on average."""
    most = max(gains[index] for index in winners)
    alike = [index for index in winners if gains[index] >= most - error]
    return min(
        alike,
        key=lambda index: (
            len(finalists[index].candidate.changed),
            -math.fsum(score.value for score in finalists[index].scores),
            index,
        ),
    )


def _why_keep(
    name: str, current: Sequence[Score], other: str | None, gain: float, error: float
) -> str:
    value = math.fsum(score.value for score in current) / len(current)
    if math.isnan(error):
        return "nothing that was recorded can be compared with the lab, so its error is not known."
    if other is None:
        return (
            "the CPU time did not suffice to replay another policy over all minutes. Give more"
            " --cpu-seconds, or fewer --minutes."
        )
    if error > LARGE_ERROR:
        return (
            f"the lab is off by up to {points(error)} here, so it cannot judge this box. Ask again"
            " for other minutes: times may have changed within these, a worker may have died, or"
            " something else may have had the processors."
        )
    if 1 - value <= error:
        return (
            f"in the lab {name} has {value:.1%} of tokens and requests in time. What is left to win"
            f" is not more than the lab's own error here, {points(error)}."
        )
    if gain <= 0:
        return f"no other policy has more in time in every replay; the best of them is {other}."
    if gain <= error:
        return (
            f"{other} is {points(gain)} ahead in its worst replay, but the lab is off by up to"
            f" {points(error)} here, so that may be the lab's error."
        )
    return (
        f"{other} is {points(gain)} ahead, but it loses more than the lab's error"
        f" ({points(error)}) in tokens or in requests in time."
    )
