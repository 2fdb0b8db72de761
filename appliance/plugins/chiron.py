"""Chiron: batch sizes and instances follow backpressure; batch work waits, and fills what is free.

Local (Alg. 1, §4): each instance finds its batch size from the latency and the throughput it sees.
Global (§5): interactive and mixed instances are over-provisioned by 1/Theta; batch instances are
added when a group of waiting batch requests would miss its deadline (Alg. 2). Printed slips are
corrected; each correction is named where it is made.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import Count, Positive, quotas
from appliance.scheduling.policy_api import (
    Admitted,
    BatchLimits,
    BatchView,
    ClusterView,
    Costs,
    Fleet,
    GroupView,
    InstanceView,
    ModelView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    RequestView,
    TurnView,
)
from appliance.vocabulary import InstanceClass, InstanceId, ModelName, RequestClass, Role, Word

Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]

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

ALPHA_FLOOR = 0.5
"""Of the quotas of interactive turns (Aegaeon, Eq. 3)."""

SPARE_SMOOTHING = 0.05
"""Weight of the newest look at how many mixed instances are free for batch work."""


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
        cluster.sort(key=lambda n: (queued[n].arrived, n))
    return sorted(clusters, key=lambda c: (min([queued[n].deadline for n in c]), c))


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


# --- the policy ----------------------------------------------------------------------------------


class Chiron(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Parameters as in the paper where it gives them."""

    theta: Share = 1 / 3
    """Theta: share of the interactive and mixed instances that run interactive requests; 1 over
    the factor by which arrivals may jump while a model loads (§5.2)."""
    delta: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """Nothing is added or removed while that share is no further from Theta."""
    scale_in_seconds: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """Instances that are not needed rest after this time."""
    band: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Backpressure this near to 1 changes no batch size."""
    first_batch: Count = 64
    """The batch size that an instance begins with."""
    largest_batch: Count = 4096
    """The largest batch size there is (§6.2)."""
    settle_turns: Count = 3
    """Turns at a size before its throughput is judged."""
    forget_turns: Count = 200
    """Turns after which a size that was too large before is tried again."""
    similarity: Annotated[float, Meta(ge=1)] = 1.5
    """TTFT SLOs of a request group differ by this factor at most."""
    quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    """Probability that a wait is no longer than estimated."""
    output_deviation: Annotated[float, Meta(ge=0)] = 1.0
    """Standard deviation of the lengths of outputs, as a multiple of their mean."""
    max_group: Count = 8
    """Interactive prompts of one model computed back to back."""
    max_batch_group: Count = 64
    """Batch requests of one model that wait together."""
    fill: Share = 0.8
    """An instance takes more interactive requests while so much of its time, or less, is needed to
    meet the SLO targets of those it has (alpha of Aegaeon's Eq. 3)."""
    queue_share: Share = 0.25
    """Share of a TTFT that may be spent waiting for other prompts before another instance is
    tried."""
    q_max_seconds: Positive = 4.0
    """The longest turn."""
    interleave_seconds: Positive = 0.25
    """The longest turn while prompts wait."""

    def __post_init__(self) -> None:
        self._sizes: dict[tuple[InstanceId, ModelName, float], BatchSize] = {}
        """By ITL SLO: a turn with an interactive request has another size, at once, than one
        without, and each is found by itself."""
        self._asked: dict[InstanceId, BatchView] = {}
        """The batch whose size was given to an instance last."""
        self._seen: dict[InstanceId, TurnView | None] = {}
        self._rates: dict[ModelName, float] = {}
        """Tokens per second of an instance whose batch size binds, in turns of batch work only."""
        self._calm_since: float | None = None
        """Since when there are more interactive and mixed instances than needed."""
        self._idle_since: float | None = None
        """Since when there has been no batch work."""
        self._spare: float | None = None
        """Mixed instances that run nothing interactive, smoothed."""

    # --- which instances ---

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        """Every instance serves every model, from prompt to end."""
        return [Placement(role=Role.MIXED)] * len(cluster.instances)

    @hookimpl
    def scale(self, now: float, cluster: ClusterView, costs: Costs) -> Fleet:
        """Interactive and mixed instances by IBP (§5.2), batch instances by BBP (§5.3) of the
        rest. Theta of the pool is interactive; the mixed ones are its over-provisioning."""
        pool = self._pool(now, cluster.instances)
        interactive = math.floor(self.theta * pool + 1e-9) if pool > 1 else 0
        interactive = min(interactive, pool - 1)
        batch = self._batch_instances(now, cluster, costs, len(cluster.instances) - pool)
        return Fleet(interactive=interactive, mixed=pool - interactive, batch=batch)

    def _pool(self, now: float, views: Sequence[InstanceView]) -> int:
        """Interactive and mixed instances: more at once, fewer after a while."""
        pool = sum([in_pool(view) for view in views])
        wanted = pool_size(interactive_pressure(views), pool, self.theta, self.delta)
        wanted = min(len(views), wanted)
        if wanted >= pool:
            self._calm_since = None
            return wanted
        if self._calm_since is None:
            self._calm_since = now
        return wanted if now - self._calm_since >= self.scale_in_seconds else pool

    def _batch_instances(self, now: float, cluster: ClusterView, costs: Costs, cap: int) -> int:
        """Alg. 2. Batch instances stay until there is no batch work."""
        free = [
            view
            for view in cluster.instances
            if view.instance_class is InstanceClass.MIXED and not runs_interactive(view)
        ]
        spare = len(free) if self._spare is None else self._spare
        self._spare = spare = spare + SPARE_SMOOTHING * (len(free) - spare)
        existing = sum([view.instance_class is InstanceClass.BATCH for view in cluster.instances])
        models = {model.name: model for model in cluster.models}
        queued = [
            self._queued(group, models[group.model], costs)
            for view in cluster.instances
            for group in view.groups
            if not group.interactive
        ]
        if not queued and not any([runs_batch(view) for view in cluster.instances]):
            if self._idle_since is None:
                self._idle_since = now
            resting = now - self._idle_since >= self.scale_in_seconds
            return 0 if resting else min(cap, existing)
        self._idle_since = None
        groups = request_groups(queued, self.similarity)
        needed = instances_needed(queued, groups, now, self.quantile)
        more = instances_for_batch(needed, existing + spare, max(0, cap - existing))
        return min(cap, existing + more)

    def _queued(self, group: GroupView, model: ModelView, costs: Costs) -> Queued:
        """A group of prompts as work. Before any output ended, what was asked for counts."""
        prompt_tokens = group.tokens // group.waiting
        tokens = model.output_tokens
        if not tokens and model.arrivals_per_second:
            tokens = max(0.0, model.tokens_per_second / model.arrivals_per_second - prompt_tokens)
        rate = self._rates.get(model.name)
        if rate is None:
            size = self.first_batch
            kv_tokens = size * (prompt_tokens + int(tokens))
            rate = size / costs.step_seconds(model.name, size, kv_tokens)
        seconds = tokens / rate
        return Queued(
            requests=group.waiting,
            ttft_seconds=group.deadline - group.arrived,
            arrived=group.arrived,
            mean_seconds=seconds + costs.prefill_seconds(model.name, prompt_tokens),
            deviation_seconds=self.output_deviation * seconds,
        )

    # --- where ---

    @hookimpl
    def prefill(
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> PrefillChoice:
        """Own class first, else mixed (§3): interactive requests packed, batch requests where room
        is left. Classes never share a group, so neither waits behind the other by accident."""
        view = self._choose(request, instances, costs)
        for index, group in enumerate(view.groups):
            if self._joins(request, group):
                return PrefillChoice(instance=view.id, group=index)
        return PrefillChoice(instance=view.id)

    def _joins(self, request: RequestView, group: GroupView) -> bool:
        """Whether the request may wait with these: of its model and class, batch requests with
        similar SLOs."""
        if group.model != request.model:
            return False
        if request.request_class is RequestClass.INTERACTIVE:
            return group.interactive > 0 and group.admitted < self.max_group
        shorter, longer = sorted([request.slo.ttft_seconds, group.deadline - group.arrived])
        similar = longer <= self.similarity * shorter
        return similar and not group.interactive and group.admitted < self.max_batch_group

    @hookimpl
    def decode(
        self,
        request: RequestView,
        prefilled_on: InstanceId,
        instances: Sequence[InstanceView],
        costs: Costs,
    ) -> InstanceId:
        """Where it was prefilled, unless that instance is for others now."""
        if any([view.id == prefilled_on for view in instances]):
            return prefilled_on
        return self._choose(request, instances, costs).id

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> InstanceView:
        if request.request_class is RequestClass.INTERACTIVE:
            return self._pack(request, instances, costs)
        return self._fill(request, instances)

    def _pack(
        self, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> InstanceView:
        """The first instance that can meet this SLO target too, those that run interactive requests
        already before others; if none can, where least time waits."""
        order = sorted(
            instances,
            key=lambda view: (
                view.instance_class is not InstanceClass.INTERACTIVE,
                not runs_interactive(view),
                not serves(view, request.model),
                view.id,
            ),
        )
        waits = []
        for place, view in enumerate(order):
            wait = interactive_queue_seconds(view, costs)
            short = wait <= self.queue_share * request.slo.ttft_seconds
            if short and self._has_room(request, view, costs):
                return view
            waits.append((wait, view.load, place))
        return order[min(waits)[2]]

    def _has_room(self, request: RequestView, view: InstanceView, costs: Costs) -> bool:
        """Whether the request decodes here in time, and everybody else too."""
        tbt = request.slo.tbt_seconds
        here = sum([b.interactive for b in view.batches if b.model == request.model])
        here += sum([g.interactive for g in view.groups if g.model == request.model])
        if here >= self._size_of(view.id, request.model, tbt):
            return False
        shares = {
            batch.model: costs.step_seconds(batch.model, batch.requests, batch.kv_tokens)
            / batch.slo.tbt_seconds
            for batch in view.batches
            if batch.interactive
        }
        mine = costs.step_seconds(request.model, here + 1, request.tokens) / tbt
        shares[request.model] = max(mine, shares.get(request.model, 0.0))
        switches = sum([costs.switch_seconds(m) for m in shares if m not in view.resident])
        switching = max(shares.values()) * switches / self.q_max_seconds if len(shares) > 1 else 0.0
        return sum(shares.values()) + switching <= self.fill

    def _fill(self, request: RequestView, instances: Sequence[InstanceView]) -> InstanceView:
        """A batch instance, else a mixed one without interactive requests, else any, with room in
        its batch; if none has, where least is to do."""
        tbt = request.slo.tbt_seconds
        roomy = [v for v in instances if v.load < self._size_of(v.id, request.model, tbt)]
        if not roomy:
            return min(instances, key=lambda view: (view.load, view.id))
        return min(
            roomy,
            key=lambda view: (
                view.instance_class is not InstanceClass.BATCH,
                runs_interactive(view),
                not serves(view, request.model),
                view.load,
                view.id,
            ),
        )

    # --- what next on an instance ---

    @hookimpl
    def admit(self, now: float, instance: InstanceView) -> Admitted:
        """Interactive groups first, as they came; then batch work by request group. Inside one, who
        joins what runs goes before others while those have waited less than half their TTFT; after
        that what was begun is finished first, or models would change with every request."""
        groups = instance.groups
        batch = [number for number, group in enumerate(groups) if not group.interactive]
        queued = [
            Queued(
                requests=groups[number].waiting,
                ttft_seconds=groups[number].deadline - groups[number].arrived,
                arrived=groups[number].arrived,
            )
            for number in batch
        ]
        order = [number for number, group in enumerate(groups) if group.interactive]
        for cluster in request_groups(queued, self.similarity):
            parts = [batch[number] for number in cluster]
            joins = [groups[number].model == instance.current_model for number in parts]
            waited = [
                now - queued[number].arrived > queued[number].ttft_seconds / 2
                for number, joining in zip(cluster, joins, strict=True)
                if not joining
            ]
            if any(waited):
                parts.sort(key=lambda number: groups[number].admitted == groups[number].waiting)
            else:
                parts.sort(key=lambda number: groups[number].model != instance.current_model)
            order += parts
        return order

    @hookimpl
    def phase(self, now: float, instance: InstanceView, costs: Costs) -> Phase:
        """Interactive prompts at once, a group's worth at most before those who decode have a turn.
        A batch prompt if its batch has room, and who decodes interactively can wait for it."""
        first = instance.groups[0]
        waiting = [batch for batch in instance.batches if batch.interactive and batch.runnable]
        if first.interactive:
            owed = waiting and instance.prefills_since_turn >= self.max_group
            return Phase.DECODE if owed else Phase.PREFILL
        here = [batch for batch in instance.batches if batch.model == first.model]
        if here and here[0].requests >= self._size_of(
            instance.id, first.model, here[0].slo.tbt_seconds
        ):
            return Phase.DECODE
        if not waiting:
            others = [batch for batch in instance.batches if batch.model != first.model]
            busy = [b.runnable for b in others if b.model == instance.current_model]
            return Phase.DECODE if busy and 2 * busy[0] > first.waiting else Phase.PREFILL
        seconds = costs.prefill_seconds(first.model, first.tokens // first.waiting)
        slack = slack_seconds(now, waiting, first.model, instance, costs)
        return Phase.PREFILL if seconds < slack else Phase.DECODE

    @hookimpl
    def round(self, now: float, instance: InstanceView, costs: Costs) -> Sequence[PlannedTurn]:
        """Models with interactive requests first, with quotas by their SLO targets (Aegaeon's Eq. 2
        and 3); then batch work for the time they can wait. Without them, batch work: the model with
        the oldest request."""
        runnable = [batch for batch in instance.batches if batch.runnable]
        urgent = [batch for batch in runnable if batch.interactive]
        batch_only = sorted(
            (batch for batch in runnable if not batch.interactive),
            key=lambda batch: (batch.arrived, batch.model),
        )
        if not urgent:
            return [PlannedTurn(model=batch_only[0].model, quota_seconds=self.q_max_seconds)]
        turns = self._urgent_turns(instance, urgent, costs)
        if batch_only:
            model = batch_only[0].model
            slack = slack_seconds(now, urgent, model, instance, costs)
            if slack > costs.step_seconds(model, batch_only[0].requests, batch_only[0].kv_tokens):
                turns.append(PlannedTurn(model=model, quota_seconds=min(slack, self.q_max_seconds)))
        return turns

    def _urgent_turns(
        self, instance: InstanceView, batches: Sequence[BatchView], costs: Costs
    ) -> list[PlannedTurn]:
        switches = sum([costs.switch_seconds(batch.model) for batch in batches])
        lengths = quotas(
            [batch.slo.tbt_seconds for batch in batches],
            [costs.step_seconds(b.model, b.requests, b.kv_tokens) for b in batches],
            switches if len(batches) > 1 else 0.0,
            self.q_max_seconds,
            ALPHA_FLOOR,
        )
        others = len(instance.batches) > len(batches) or instance.groups
        longest = self.interleave_seconds if others else self.q_max_seconds
        return [
            PlannedTurn(model=batch.model, quota_seconds=min(length, longest))
            for batch, length in zip(batches, lengths, strict=True)
        ]

    @hookimpl
    def preempt(self, instance: InstanceView) -> float:
        """An interactive request ends a turn of batch work only, at once, and a turn of its own
        model, which it joins; another turn goes on for a moment. Batch requests wait."""
        turn = [batch for batch in instance.batches if batch.model == instance.turn]
        if not any([batch.interactive for batch in turn]):
            return 0.0 if runs_interactive(instance) else math.inf
        prompts = [group.model for group in instance.groups if group.interactive]
        if not prompts:
            return math.inf
        return 0.0 if prompts[0] == instance.turn else self.interleave_seconds

    @hookimpl
    def batch(self, model: ModelName, instance: InstanceView) -> BatchLimits:
        """The size that Alg. 1 has found for the strictest ITL SLO among the requests."""
        self._observe(instance)
        here = [batch for batch in instance.batches if batch.model == model]
        if not here:
            return BatchLimits(requests=self.first_batch)
        key = (instance.id, model, here[0].slo.tbt_seconds)
        if key not in self._sizes:
            self._sizes[key] = BatchSize(
                min(self.first_batch, self.largest_batch), self.largest_batch
            )
        self._asked[instance.id] = here[0]
        return BatchLimits(requests=self._sizes[key].size)

    def _observe(self, instance: InstanceView) -> None:
        """Learn from the last turn, once: a view of it is the same object until another ends."""
        turn, asked = instance.last_turn, self._asked.get(instance.id)
        if turn is None or turn is self._seen.get(instance.id):
            return
        self._seen[instance.id] = turn
        if asked is None or asked.model != turn.model:
            return
        tbt = asked.slo.tbt_seconds
        self._sizes[(instance.id, turn.model, tbt)].observe(
            turn, tbt, self.band, self.settle_turns, self.forget_turns
        )
        if not asked.interactive and turn.requests < asked.runnable and turn.seconds > 0:
            rate = turn.tokens / turn.seconds
            known = self._rates.get(turn.model, rate)
            self._rates[turn.model] = known + RATE_SMOOTHING * (rate - known)

    def _size_of(self, instance: InstanceId, model: ModelName, tbt_seconds: float) -> int:
        known = self._sizes.get((instance, model, tbt_seconds))
        return self.first_batch if known is None else known.size


# --- reading views -------------------------------------------------------------------------------


def in_pool(view: InstanceView) -> bool:
    """Whether an instance is there for interactive requests."""
    return view.instance_class in (InstanceClass.INTERACTIVE, InstanceClass.MIXED)


def runs_interactive(view: InstanceView) -> bool:
    return any([group.interactive for group in view.groups]) or any(
        [batch.interactive for batch in view.batches]
    )


def runs_batch(view: InstanceView) -> bool:
    return any([batch.interactive < batch.requests for batch in view.batches])


def serves(view: InstanceView, model: ModelName) -> bool:
    """Whether a model's weights are there, or needed there anyway."""
    return (
        model in view.resident
        or any([batch.model == model for batch in view.batches])
        or any([group.model == model for group in view.groups])
    )


def interactive_queue_seconds(view: InstanceView, costs: Costs) -> float:
    """Time that the interactive prompts of an instance take, with a switch at each change of
    model; batch prompts wait for them."""
    seconds, model = 0.0, view.current_model
    for group in view.groups:
        if not group.interactive:
            continue
        if group.model != model:
            seconds += switch_in_seconds(group.model, view, costs)
        model = group.model
        mean = group.tokens // group.waiting
        seconds += group.waiting * costs.prefill_seconds(model, mean)
    return seconds


def switch_in_seconds(model: ModelName, view: InstanceView, costs: Costs) -> float:
    return 0.0 if model in view.resident else costs.switch_seconds(model)


def slack_seconds(
    now: float, urgent: Sequence[BatchView], model: ModelName, view: InstanceView, costs: Costs
) -> float:
    """How long `model` may run while interactive batches wait: until the first of their next tokens
    is due, less the switches there and back and a step of each. Bringing the model in may cost the
    others their place."""
    seconds = switch_in_seconds(model, view, costs)
    for batch in urgent:
        seconds += costs.step_seconds(batch.model, batch.requests, batch.kv_tokens)
        if batch.model not in view.resident or model not in view.resident:
            seconds += costs.switch_seconds(batch.model)
    return min([batch.deadline for batch in urgent]) - now - seconds
