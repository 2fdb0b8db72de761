"""Chiron: batch sizes and instances follow backpressure; batch work waits, and fills what is free.

Local (Alg. 1, §4): each instance finds its batch size from the latency and the throughput it sees.
Global (§5): interactive and mixed instances are over-provisioned by 1/Theta; batch instances are
added when a group of waiting batch requests would miss its deadline (Alg. 2). The formulas are in
`appliance.plugins.chiron_formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from appliance.hookspecs import hookimpl
from appliance.plugins.aegaeon import Count, Positive, quotas
from appliance.plugins.chiron_formulas import (
    RATE_SMOOTHING,
    BatchSize,
    Queued,
    in_pool,
    instances_for_batch,
    instances_needed,
    interactive_pressure,
    pool_size,
    request_groups,
    runs_interactive,
)
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
from appliance.vocabulary import InstanceClass, InstanceId, ModelName, RequestClass, Role

Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]

ALPHA_FLOOR = 0.5
"""Of the quotas of interactive turns (Aegaeon, Eq. 3)."""

SPARE_SMOOTHING = 0.05
"""Weight of the newest look at how many mixed instances are free for batch work."""


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
