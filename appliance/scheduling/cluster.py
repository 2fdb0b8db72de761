"""Where requests may go: the instances, what each is for, and what policies are shown of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from appliance.scheduling.demand import Demands
from appliance.scheduling.lifecycle import KvPlace
from appliance.scheduling.policy_api import (
    BatchView,
    ClusterView,
    DecodingView,
    Fleet,
    GroupView,
    InstanceView,
    ModelView,
    Placement,
    RequestView,
)
from appliance.scheduling.state import DecodeBatch, Group, InstanceState, RequestState, TurnJob
from appliance.vocabulary import (
    InstanceClass,
    InstanceId,
    KvShape,
    ModelName,
    ModelSpec,
    RequestClass,
    RequestSpec,
    Role,
    Slo,
)

TAKES = {
    RequestClass.INTERACTIVE: (InstanceClass.INTERACTIVE, InstanceClass.MIXED),
    RequestClass.BATCH: (InstanceClass.BATCH, InstanceClass.MIXED),
}
"""Which instances take requests of a class."""


class Cluster:
    """The instances, and the views of them. A view is made of what changed since the last one."""

    def __init__(
        self,
        models: Mapping[ModelName, ModelSpec],
        instances: int,
        demands: Demands,
        slab_bytes: int,
    ) -> None:
        self.instances: dict[InstanceId, InstanceState] = {
            number: InstanceState(id=number, engines={}) for number in range(instances)
        }
        self._models = models
        self._demands = demands
        self._slab_bytes = slab_bytes
        self._model_views: dict[ModelName, ModelView] = {}
        """The last view of each model, in the order of the catalogue. Most models of a large one
        were never asked for, so that their views stay true."""
        self._changed: set[ModelName] = set(models)
        """Models whose last view is not true any more, whatever is asked of them."""

    def candidates(self, request: RequestSpec, wanted: Role) -> list[InstanceState]:
        """Live instances that are meant for the request in this role. An SLO goes before a plan:
        if there is none, any that has the model; if there is none either, any that can have it."""
        live = [i for i in self.able(request.model) if i.serves]
        able = [instance for instance in live if instance.may_serve(request.model)]
        takes = TAKES[request.request_class]
        open_ = [instance for instance in able if instance.instance_class in takes]
        fitting = [i for i in open_ if i.placement.role in (wanted, Role.MIXED)]
        return fitting or open_ or able or live

    def able(self, model: ModelName) -> list[InstanceState]:
        """Instances that can have an engine for the model, up or not."""
        spec = self._models[model]
        return [instance for instance in self.instances.values() if spec.fits(instance.id)]

    def all_quarantined(self, model: ModelName) -> bool:
        """Whether no instance is left that could ever serve it, unless one is released."""
        return all([instance.quarantine is not None for instance in self.able(model)])

    def place(self, placements: Sequence[Placement], fleet: Fleet) -> bool:
        """Give every instance what it is for from now on, of the models that it can have; whether
        anything changed."""
        before = [instance.instance_class for instance in self.instances.values()]
        classes = deal(fleet, before)
        partial = [spec for spec in self._models.values() if spec.instances is not None]
        changed = False
        for instance in self.instances.values():
            dealt, kind = placements[instance.id], classes[instance.id]
            lacking = {spec.name for spec in partial if not spec.fits(instance.id)}
            if lacking:
                meant = self._models.keys() if dealt.models is None else dealt.models
                dealt = msgspec.structs.replace(dealt, models=frozenset(meant - lacking))
            known = instance.placement.role, instance.placement.models, instance.instance_class
            instance.placement, instance.instance_class = dealt, kind
            if (dealt.role, dealt.models, kind) != known:  # loading ahead changes no place
                instance.view = None
                changed = True
        return changed

    def count_parked(self, now: float) -> None:
        """Count how long instances have rested: up to now those that rested at the last count. To
        be asked when classes were dealt. O(instances)."""
        for instance in self.instances.values():
            instance.parked_seconds = parked_seconds(instance, now)
            instance.parked_since = now if instance.rests else None

    # --- views -----------------------------------------------------------------------------------

    def view(self, instance: InstanceState) -> InstanceView:
        """O(1) if nothing changed, else O(groups + batches), and O(members) of what changed."""
        if instance.view is None:
            instance.view = self._instance_view(instance)
        return instance.view

    def views(self, instances: Iterable[InstanceState]) -> list[InstanceView]:
        return [self.view(instance) for instance in instances]

    def cluster_view(self, now: float) -> ClusterView:
        """O(instances + models), of which views are made of those that were ever asked for, and of
        those that changed."""
        views = self._model_views
        stale: Collection[ModelName] = self._demands.asked.keys()
        if self._changed:  # among all, as new views go to the end
            stale = [name for name in self._models if name in self._changed or name in stale]
            self._changed.clear()
        for name in stale:
            views[name] = self._model_view(self._models[name], now)
        return ClusterView(
            instances=tuple(self.views(self.instances.values())), models=tuple(views.values())
        )

    def model_changed(self, model: ModelName) -> None:
        """It came, its terms changed, or the geometry of its KV cache is known."""
        self._changed.add(model)

    def model_gone(self, model: ModelName) -> None:
        """It is of the catalogue no more."""
        self._changed.discard(model)
        self._model_views.pop(model, None)

    def engines_gone(self) -> None:
        """An instance lost its engines, and with them what was known of their KV caches."""
        self._changed.update(self._models)

    def request_view(self, request: RequestState) -> RequestView:
        key = request.spec.key
        return RequestView(
            id=request.id,
            model=request.model,
            tokens=request.tokens,
            max_tokens=request.spec.max_tokens,
            weight_bytes=self._models[request.model].weight_bytes,
            kv_bytes_per_token=self._kv_bytes_per_token(request.model),
            slo=request.spec.slo,
            request_class=request.spec.request_class,
            arrived=request.arrived,
            accepted=request.accepted,
            key=key,
            key_requests=self._demands.of_key(key) - request.accepted,
        )

    def decoding_views(
        self, instance: InstanceState, others: Sequence[InstanceState]
    ) -> list[DecodingView]:
        """The requests that could go on on one of the others. O(requests on the instance)."""
        return [
            request.view or self._decoding_view(request)
            for model, batch in instance.batches.items()
            if any([self._models[model].fits(other.id) for other in others])
            for request in batch.members.values()
            if request.movable
        ]

    def _decoding_view(self, request: RequestState) -> DecodingView:
        request.view = DecodingView(
            id=request.id,
            model=request.model,
            tokens=request.tokens,
            output_tokens=request.generated,
            here_tokens=request.generated - request.placed,
            slo=request.spec.slo,
            request_class=request.spec.request_class,
            arrived=request.arrived,
            first_token=request.first_token,
            newest_token=request.newest_token,
            instances=self._models[request.model].instances,
        )
        return request.view

    def _instance_view(self, instance: InstanceState) -> InstanceView:
        job, ledger = instance.job, instance.ledger
        turn = job if isinstance(job, TurnJob) and job.requests else None
        cold = sum(ledger.cold.values())
        working = {instance.current_model, *instance.batches}
        working.update([group.model for group in instance.groups])
        idle = [slabs for model, slabs in ledger.weights.items() if model not in working]
        return InstanceView(
            id=instance.id,
            role=instance.placement.role,
            instance_class=instance.instance_class,
            models=instance.placement.models,
            up=instance.serves,
            current_model=instance.current_model,
            groups=tuple([group.view or self._group_view(group) for group in instance.groups]),
            batches=tuple(
                [
                    batch.view or self._batch_view(model, batch)
                    for model, batch in instance.batches.items()
                ]
            ),
            membership_version=instance.membership_version,
            turn=None if turn is None else turn.model,
            turn_began=0.0 if turn is None else turn.ordered,
            last_turn=instance.last_turn,
            computing_tokens=0 if job is None else job.prompt_tokens,
            prefills_since_turn=instance.prefills_since_turn,
            resident=frozenset(ledger.weights),
            total_bytes=ledger.total_slabs * self._slab_bytes,
            free_bytes=(ledger.free_slabs + cold) * self._slab_bytes,
            kv_bytes=(sum(ledger.kv.values()) - cold) * self._slab_bytes,
            kv_short=instance.kv_short,
            idle_bytes=sum(idle) * self._slab_bytes,
            computing_requests=0 if job is None else job.prompt_count,
        )

    def _group_view(self, group: Group) -> GroupView:
        members = group.members.values()
        slo = strictest([request.spec.slo for request in members])
        scheduled = min([r.scheduled for r in members]) if slo.gap_seconds else None
        group.view = GroupView(
            model=group.model,
            first=group.first.id,
            admitted=group.admitted,
            waiting=len(members),
            tokens=sum([request.tokens for request in members]),
            slo=slo,
            arrived=min([request.arrived for request in members]),
            deadline=min([request.next_due for request in members]),
            interactive=sum([request.interactive for request in members]),
            scheduled=scheduled,
            resumed=sum([request.generated > 0 for request in members]),
        )
        return group.view

    def _batch_view(self, model: ModelName, batch: DecodeBatch) -> BatchView:
        members, last = batch.members.values(), batch.last_view
        deadlines = tuple(sorted([request.next_due for request in members]))
        slo = last.slo if last else strictest([request.spec.slo for request in members])
        scheduled: tuple[float, ...] = ()
        if slo.gap_seconds:
            scheduled = tuple(sorted([request.scheduled for request in members]))
        batch.view = batch.last_view = BatchView(
            model=model,
            requests=len(members),
            runnable=sum([request.runnable for request in members]),
            interactive=last.interactive if last else sum([r.interactive for r in members]),
            kv_tokens=sum([request.tokens for request in members]),
            away_tokens=sum([r.kv_tokens for r in members if r.kv is KvPlace.HOST]),
            slo=slo,
            deadline=deadlines[0],
            deadlines=deadlines,
            scheduled=scheduled,
            arrived=last.arrived if last else min([request.arrived for request in members]),
        )
        return batch.view

    def _model_view(self, model: ModelSpec, now: float) -> ModelView:
        demand, shape = self._demands.of[model.name], self.kv_shape(model.name)
        left = demand.decay(now)
        return ModelView(
            name=model.name,
            weight_bytes=model.weight_bytes,
            kv_bytes_per_token=0 if shape is None else shape.bytes_per_token,
            device_bytes_per_token=self._device_bytes_per_token(shape),
            slo=model.slo,
            pinned=model.pinned,
            parts=1,
            arrivals_per_second=demand.arrivals_per_second * left,
            tokens_per_second=demand.tokens_per_second * left,
            batch_arrivals_per_second=demand.batch_arrivals_per_second * left,
            batch_tokens_per_second=demand.batch_tokens_per_second * left,
            output_tokens=demand.output_tokens,
            requests=demand.requests,
            last_arrival=demand.updated,
            instances=model.instances,
            max_batch=model.max_batch,
            max_sequences=math.inf if model.max_sequences is None else model.max_sequences,
        )

    def _kv_bytes_per_token(self, model: ModelName) -> int:
        shape = self.kv_shape(model)
        return 0 if shape is None else shape.bytes_per_token

    def _device_bytes_per_token(self, shape: KvShape | None) -> float:
        if shape is None:
            return 0.0
        group_bytes = shape.group_blocks * shape.block_bytes
        return shape.bytes_per_token * shape.group_slabs * self._slab_bytes / group_bytes

    def kv_shape(self, model: ModelName) -> KvShape | None:
        """The KV cache geometry of the model, if an instance has its engine. O(instances)."""
        for instance in self.instances.values():
            engine = instance.engines.get(model)
            if engine is not None and engine.kv is not None:
                return engine.kv
        return None


def parked_seconds(instance: InstanceState, now: float) -> float:
    """How long the instance has rested: it was parked and had nothing to do at the last count
    (`Cluster.count_parked`), which is a second ago at most while there are requests."""
    since = instance.parked_since
    return instance.parked_seconds + (0.0 if since is None else now - since)


def strictest(slos: Sequence[Slo]) -> Slo:
    """What meets all of these SLO targets."""
    return Slo(
        ttft_seconds=min([slo.ttft_seconds for slo in slos]),
        tbt_seconds=min([slo.tbt_seconds for slo in slos]),
        gap_seconds=min([slo.gap_seconds for slo in slos if slo.gap_seconds], default=0.0),
    )


def deal(fleet: Fleet, known: Sequence[InstanceClass]) -> list[InstanceClass]:
    """The class of each instance, so that there are as many of each as the fleet says and as few
    as possible change."""
    left = {
        InstanceClass.INTERACTIVE: fleet.interactive,
        InstanceClass.MIXED: fleet.mixed,
        InstanceClass.BATCH: fleet.batch,
    }
    left[InstanceClass.PARKED] = len(known) - sum(left.values())
    dealt: list[InstanceClass | None] = []
    for kind in known:
        keeps = left[kind] > 0
        left[kind] -= keeps
        dealt.append(kind if keeps else None)
    rest = (kind for kind, count in left.items() for _ in range(count))
    return [next(rest) if kind is None else kind for kind in dealt]
