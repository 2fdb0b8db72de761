"""Chiron's formulas: batch sizes by backpressure (Alg. 1), instances for batch work (Alg. 2).

Pure functions and one state machine, without views of the machine where a number will do. Printed
slips are corrected; each correction is named where it is made.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

from appliance.scheduling.policy_api import (
    InstanceView,
    TurnView,
)
from appliance.vocabulary import InstanceClass, Word

LINEAR = 0.5
"""Throughput-based backpressure where doubling the batch doubles the throughput: the least."""

COMPARABLE = 1.2
"""Sizes closer than this factor have throughputs that noise alone can order."""

REMEMBERED_SIZES = 8
"""Sizes on the way to the present one."""

COARSE = 1.4
"""Between sizes as far apart as this lies one that may be better than both."""

REMEMBERED_TURNS = 16
"""Turns over which what a size yields is averaged."""

RATE_SMOOTHING = 0.25
"""Weight of the newest throughput of batch work."""


# --- local: the batch size of an instance --------------------------------------------------------


class Yield(Word, frozen=True):
    """What a batch size yields: seconds between tokens, and tokens per second of all requests."""

    size: int
    itl_seconds: float
    tokens_per_second: float


def throughput_pressure(smaller: Yield, larger: Yield) -> float:
    """TBP (§4.1): throughput before over throughput after a growth, as if the size had doubled.

    Corrected: the plain ratio nears 1 whenever the step is small, so growth would stop itself;
    taken per doubling it is 0.5 where throughput is proportional to size and 1 at the inflection,
    whatever the step. Never below 0.5.
    """
    doublings = math.log2(larger.size / smaller.size)
    ratio = smaller.tokens_per_second / larger.tokens_per_second
    return max(LINEAR, float(ratio ** (1 / doublings)))


def next_batch_size(
    size: int, latency_pressure: float, throughput_pressure: float, band: float, largest: int
) -> int:
    """Alg. 1: grow by a/BP + (1 - a), a = 0.5, while BP = max(LBP, TBP) < 1; halve where BP > 1.

    Corrected: nothing within `band` of 1, where noise would halve every other update, and 1 to
    `largest`. To be asked only where the size binds: else neither pressure says anything of it.
    """
    pressure = max(latency_pressure, throughput_pressure)
    if pressure > 1 + band:
        return max(1, size // 2)
    if pressure >= 1 - band:
        return size
    if pressure * 2 * largest <= size:  # also without any pressure
        return largest
    return min(largest, math.ceil(0.5 * size / pressure + 0.5 * size))


@dataclass(slots=True)
class BatchSize:
    """The batch size of one model on one instance under one ITL SLO, found online.

    What a size yields is averaged over its turns. Throughput is compared only between different
    sizes: after a growth with the size before (TBP), after a halving with the size that was halved,
    which was beyond the inflection if half of it yields more. A size that yielded less than a
    smaller one is a ceiling: growth goes half the way to it, until it is forgotten.
    """

    size: int
    largest: int
    mean: Yield | None = None
    """Of `turns` turns at this size."""
    turns: int = 0
    tried: list[Yield] = field(default_factory=list)
    """What the sizes yielded from which it grew here, ascending."""
    larger: Yield | None = None
    """What a larger size yielded, before the size was halved."""
    ceiling: int | None = None

    def observe(
        self, turn: TurnView, itl_slo_seconds: float, band: float, settle: int, forget: int
    ) -> None:
        """A turn ended. Latency is acted upon at once, throughput after `settle` turns; a ceiling
        is forgotten after `forget`."""
        if not turn.steps or not turn.tokens or turn.seconds <= 0:
            return
        if turn.limit < self.size:
            self._move(turn.limit)  # the model allows no more
            self.largest = turn.limit
        itl = turn.seconds / turn.steps
        if turn.requests < turn.limit and not turn.left_out:
            if itl > (1 + band) * itl_slo_seconds:
                self._move(max(1, turn.requests))  # so many are too many: now the size binds
            return
        mean = self._average(itl, turn.tokens / turn.seconds)
        latency = mean.itl_seconds / itl_slo_seconds
        if latency > 1 + band:
            self._halve(mean, band)
        elif self.turns >= settle:
            self._judge(mean, latency, band)
        if self.turns >= forget:
            self.ceiling = None
            self.tried.clear()

    def _average(self, itl_seconds: float, tokens_per_second: float) -> Yield:
        self.turns += 1
        mean = self.mean or Yield(
            size=self.size, itl_seconds=itl_seconds, tokens_per_second=tokens_per_second
        )
        weight = 1 / min(self.turns, REMEMBERED_TURNS)
        self.mean = Yield(
            size=self.size,
            itl_seconds=mean.itl_seconds + weight * (itl_seconds - mean.itl_seconds),
            tokens_per_second=mean.tokens_per_second
            + weight * (tokens_per_second - mean.tokens_per_second),
        )
        return self.mean

    def _judge(self, mean: Yield, latency: float, band: float) -> None:
        """Latency is in order: does throughput say that the size is too large?"""
        larger, smaller = self.larger, self._smaller()
        if larger is not None:
            self.larger = None
            if mean.tokens_per_second > (1 + band) * larger.tokens_per_second:
                self.ceiling = larger.size
                self._halve(mean, band)
                return
        pressure = LINEAR if smaller is None else throughput_pressure(smaller, mean)
        lost = smaller is not None and smaller.tokens_per_second > (
            (1 + band) * mean.tokens_per_second
        )
        if smaller is not None and lost:
            self.ceiling = self.size
            self._halve(smaller, band)
            return
        if smaller is not None and pressure >= 1 - band and self.size >= COARSE * smaller.size:
            # No gain: the best is not beyond, and what is between yields no less than either.
            self.ceiling = self.size
            self._move((smaller.size + self.size) // 2, self.tried)
            return
        self._grow(mean, next_batch_size(self.size, latency, pressure, band, self.largest), band)

    def _halve(self, yielded: Yield, band: float) -> None:
        """`yielded` is what the halved size, or one a bit smaller, did."""
        half = next_batch_size(self.size, math.inf, math.inf, band, self.largest)
        if half < self.size:
            self._move(half)
            self.larger = yielded if yielded.size >= COMPARABLE * half else None

    def _grow(self, mean: Yield, size: int, band: float) -> None:
        """To `size`, or half the way to the ceiling; steps too small to see are not made."""
        if self.ceiling is not None:
            size = min(size, (self.size + self.ceiling) // 2)
        if size <= self.size or size < min(self.largest, (1 + band) * self.size):
            return
        self._move(size, [*self.tried, mean])

    def _smaller(self) -> Yield | None:
        """The nearest size below that is clearly smaller, if one was tried on the way here."""
        far = [tried for tried in self.tried if tried.size * COMPARABLE <= self.size]
        return far[-1] if far else None

    def _move(self, size: int, tried: Sequence[Yield] = ()) -> None:
        self.size = size
        self.mean = self.larger = None
        self.tried = list(tried)[-REMEMBERED_SIZES:]
        self.turns = 0


# --- global: how many instances ------------------------------------------------------------------


def in_pool(view: InstanceView) -> bool:
    """Whether an instance is there for interactive requests."""
    return view.instance_class in (InstanceClass.INTERACTIVE, InstanceClass.MIXED)


def runs_interactive(view: InstanceView) -> bool:
    return any([group.interactive for group in view.groups]) or any(
        [batch.interactive for batch in view.batches]
    )


def interactive_pressure(cluster: Iterable[InstanceView]) -> float:
    """IBP (§5.1): the share of the interactive and mixed instances that run interactive requests.
    It is a measure of demand only if requests are packed, not spread."""
    pool = [view for view in cluster if in_pool(view)]
    return sum([runs_interactive(view) for view in pool]) / max(1, len(pool))


def pool_size(pressure: float, pool: int, theta: float, delta: float) -> int:
    """How many interactive and mixed instances there are to be when IBP of the `pool` is
    `pressure`: as many as there are while that is in [Theta - delta, Theta + delta], else so many
    that it is Theta (§5.2)."""
    if theta - delta <= pressure <= theta + delta:
        return pool
    return max(1, math.ceil(pressure * pool / theta - 1e-9))


class Queued(Word, frozen=True):
    """Batch requests that wait: each takes an instance `mean_seconds`, give or take
    `deviation_seconds`. The first of them came at `arrived`."""

    requests: int
    ttft_seconds: float
    arrived: float
    mean_seconds: float = 0.0
    deviation_seconds: float = 0.0

    @property
    def deadline(self) -> float:
        return self.arrived + self.ttft_seconds


def request_groups(queued: Sequence[Queued], similarity: float) -> list[list[int]]:
    """Request groups (§5.3): numbers of what waits, clustered by TTFT SLO, first come first served
    inside; the group with the earliest deadline first.

    In one dimension clusters are intervals: one begins where a TTFT is more than `similarity` times
    the least of the one before. O(n log n), and the same for every order of equals.
    """
    clusters: list[list[int]] = []
    for number in sorted(range(len(queued)), key=lambda n: queued[n].ttft_seconds):
        least = queued[clusters[-1][0]].ttft_seconds if clusters else -math.inf
        if queued[number].ttft_seconds <= similarity * least:
            clusters[-1].append(number)
        else:
            clusters.append([number])
    for cluster in clusters:
        cluster.sort(key=lambda n: (queued[n].arrived, queued[n].ttft_seconds, n))
    return sorted(clusters, key=lambda cluster: _urgency([queued[n] for n in cluster]))


def _urgency(group: Sequence[Queued]) -> tuple[float, float]:
    """By values alone, as no two groups have a TTFT in common."""
    return min([one.deadline for one in group]), group[0].ttft_seconds


def waiting_seconds(mean: float, variance: float, throughput: float, quantile: float) -> float:
    """Eq. 1 as a distribution: the work ahead is Normal(mean, variance), with (q-1) mu and
    (q-1) sigma^2 for the q-th in the queue; what it takes at `throughput` at most, with
    probability `quantile`. Work is tokens, or seconds of one instance."""
    if throughput <= 0:
        return math.inf
    return (mean + deviations(quantile) * math.sqrt(variance)) / throughput


@lru_cache(maxsize=16)
def deviations(quantile: float) -> float:
    """How many standard deviations above its mean a quantile of a normal distribution is."""
    return NormalDist().inv_cdf(quantile)


def instances_needed(
    queued: Sequence[Queued], groups: Sequence[Sequence[int]], now: float, quantile: float
) -> list[float]:
    """For each group, by how many instances its queue has to be worked off so that no part of it
    comes too late: before the last of a part comes what is ahead of it, and the first is due first.

    Corrected: the time that is left counts, not the whole SLO (a group that waited already is
    nearer to its deadline). Infinite where the deadline has passed.
    """
    mean = variance = 0.0
    found: list[float] = []
    for group in groups:
        most = 0.0
        for part in [queued[number] for number in group]:
            spread = part.deviation_seconds**2
            work = waiting_seconds(
                mean + (part.requests - 1) * part.mean_seconds,
                variance + (part.requests - 1) * spread,
                1.0,
                quantile,
            )
            left = part.deadline - now
            most = max(most, work / left if left > 0 else math.inf)
            mean += part.requests * part.mean_seconds
            variance += part.requests * spread
        found.append(most)
    return found


def batch_pressure(needed: Sequence[float], instances: float) -> int:
    """BBP (Eq. 2): groups that come too late if `instances` work for them."""
    return sum([need > instances for need in needed])


def instances_for_batch(needed: Sequence[float], working: float, cap: int) -> int:
    """Alg. 2: the fewest instances that, added to those `working`, make BBP zero; `cap` if none do.

    Corrected: those that work already count, and there is an end. BBP falls with every instance, so
    the loop over n is a bisection.
    """
    return bisect_left(range(cap), True, key=lambda n: not batch_pressure(needed, working + n))
