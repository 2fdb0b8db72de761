"""The scheduling machine: events in, commands out. Sans-IO; one writer; no clock, no randomness.

    RequestArrived -> prefill group -> RunPrefill -> decode batch -> RunTurn ... -> Finish

The machine composes what keeps the books: of requests (`request_book`, `router`,
`backpressure`), of models (`model_lifecycle`) and of instances (`recovery`); the dispatcher says
what a free instance does next. Every request progresses because one whose KV was given up gets
room before prompts do, each prompt makes a token, and the rounds of policies are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.scheduling.backpressure import Backpressure
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.demand import Demands
from appliance.scheduling.device_room import DeviceRoom
from appliance.scheduling.dispatcher import SWAP_AMORTIZATION, Dispatcher
from appliance.scheduling.host_room import HostRoom, KvSpill
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.model_lifecycle import ModelLifecycle
from appliance.scheduling.policy_api import (
    LocalClock,
    PlannedTurn,
    Policy,
    TurnView,
)
from appliance.scheduling.recovery import Recovery
from appliance.scheduling.request_book import RequestBook, rejection
from appliance.scheduling.residency import Residency
from appliance.scheduling.router import Router
from appliance.scheduling.state import (
    InstanceState,
    PrefillJob,
    RequestState,
    SchedulingContext,
    TurnJob,
)
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import (
    ClientBackpressured,
    ClientResumed,
    ClockSet,
    Command,
    Direction,
    Event,
    Finish,
    FinishReason,
    ImageHeld,
    InstanceId,
    InstanceLost,
    InstanceQuarantined,
    InstanceReleased,
    InstanceUp,
    KvMoved,
    KvRestored,
    KvSpilled,
    ModelAdded,
    ModelBuilt,
    ModelChanged,
    ModelDropped,
    ModelEvictRequested,
    ModelFailed,
    ModelLoaded,
    ModelLoadRequested,
    ModelName,
    ModelRemoved,
    ModelSpec,
    PrefillDeferred,
    PrefillDone,
    Reject,
    Release,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestId,
    RequestSpec,
    Ticked,
    TokensProduced,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)


class Machine:
    """Decides what runs next, where, and what is in memory for it.

    `handle` takes an event and the time it happened and returns the commands that follow, in
    order. An event costs O(requests it names + instances); if it frees an instance, O(requests of
    the models that run there + models in memory there) more for the next job; if it leads to a
    question, what changed since the last one on the instances offered. Once a second the places
    cost O(instances + models). Only the loss of an instance, of a model, and the change of places
    look at all requests.
    """

    def __init__(
        self,
        models: Iterable[ModelSpec],
        instances: int,
        host: HostLedger,
        policy: Policy,
        costs: CostModel | None = None,
        disk: DiskLedger | None = None,
    ) -> None:
        """`costs` are what is known before anything was observed. Without a `disk` no KV goes
        there."""
        self.models: dict[ModelName, ModelSpec] = {model.name: model for model in models}
        self.failed: dict[ModelName, str] = {}
        """Models that cannot be served, and why."""
        self.host = host
        self.disk = DiskLedger(0) if disk is None else disk
        self.weight_cache = HostWeightCache(self.models, host)
        self.costs = costs or CostModel(self.models.values())
        self.demands = Demands(self.models)
        self.cluster = Cluster(self.models, instances, self.demands, host.slab_bytes)
        self._context = SchedulingContext(policy, self.costs.estimates(), self.costs.lacks_prompt)
        self.request_book = RequestBook(
            self._context, self.models, self.cluster, self.demands, host, self.disk
        )
        self.requests: Mapping[RequestId, RequestState] = self.request_book.live
        self.residency = Residency(
            self._context, self.cluster, self.request_book, self.weight_cache
        )
        self.host_room = HostRoom(host, self.request_book, self.residency)
        self._kv_spill = KvSpill(self._context, host, self.disk, self.request_book, self.cluster)
        self._compose()
        self._again = False
        """Whether free instances have to be asked (again) for what they can do."""
        self._handlers = self._table()

    def _compose(self) -> None:
        """Make what decides with these books, each from those before it."""
        context, book, cluster = self._context, self.request_book, self.cluster
        residency, weight_cache, host_room = self.residency, self.weight_cache, self.host_room
        self.device_room = DeviceRoom(context, self.models, residency)
        self.dispatcher = Dispatcher(
            context,
            self.models,
            book,
            cluster,
            residency,
            host_room,
            self.device_room,
            self.failed,
        )
        self._backpressure = Backpressure(context, book, cluster, residency, self.dispatcher)
        self._router = Router(
            context,
            book,
            cluster,
            residency,
            self.device_room,
            self.dispatcher,
            self._backpressure,
            self._kv_spill,
            self.host,
            weight_cache,
        )
        self._lifecycle = ModelLifecycle(
            context,
            self.models,
            self.failed,
            book,
            cluster,
            residency,
            self.dispatcher,
            weight_cache,
            self.costs,
            self.demands,
        )
        self._recovery = Recovery(
            self.models,
            book,
            cluster,
            self._router,
            self._lifecycle,
            weight_cache,
        )

    def _table(self) -> Mapping[type[Event], Callable[[Any], bool]]:
        """What handles each event: takes it in, and says whether that can give a free instance
        something to do."""
        return {
            RequestArrived: self._on_request_arrived,
            RequestCancelled: self._on_request_cancelled,
            RequestFailed: self._on_request_failed,
            ClientBackpressured: self._backpressure.stalled,
            ClientResumed: self._backpressure.went_on,
            TokensProduced: self._on_tokens_produced,
            PrefillDone: self._on_prefill_done,
            PrefillDeferred: self._on_prefill_deferred,
            TurnEnded: self._on_turn_ended,
            KvMoved: self._on_kv_moved,
            KvSpilled: self._kv_spill.spilled,
            KvRestored: self._kv_spill.restored,
            Ticked: self._on_ticked,
            ClockSet: self._router.set_clock,
            InstanceUp: self._recovery.up,
            InstanceLost: self._recovery.lost,
            InstanceQuarantined: self._recovery.quarantined,
            InstanceReleased: self._recovery.released,
            ModelBuilt: self._lifecycle.built,
            ModelFailed: self._lifecycle.build_or_load_failed,
            WeightsStored: self._lifecycle.stored,
            ModelLoaded: self._lifecycle.loaded,
            ModelChanged: self._lifecycle.changed,
            ImageHeld: self._lifecycle.held,
            ModelLoadRequested: self._lifecycle.wanted,
            ModelEvictRequested: self._lifecycle.evict_requested,
            ModelAdded: self._on_model_added,
            ModelRemoved: self._lifecycle.removed,
            ModelDropped: self._lifecycle.dropped,
        }

    # --- the seam --------------------------------------------------------------------------------

    @property
    def instances(self) -> Mapping[InstanceId, InstanceState]:
        return self.cluster.instances

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands that follow from a fact at time `now` (seconds of any steady clock).

        Raises `IllegalTransition` or `LedgerError` when the event contradicts what the machine
        knows: its books are no longer true then, and it must not go on.
        """
        context = self._context
        context.now, context.out = now, []
        self._again = now >= self._router.plan_at and self._router.plan()
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"not an event of the machine: {event!r}")
        self._again |= handler(event)
        return self._work()

    def set_policy(self, policy: Policy, now: float) -> list[Command]:
        """Have another policy answer from now on; what is under way goes on. The commands that
        follow at once."""
        policy.take_over(self._context.policy)
        self._context.policy = policy
        self._context.now, self._context.out = now, []
        policy.set_clock(self._context.clock)
        for instance in self.instances.values():
            instance.work.clear()
            instance.resumes = False
        self._again = True
        self._router.plan()
        self._router.place_held(all_of_them=True)
        return self._work()

    def _work(self) -> list[Command]:
        """Give free instances something to do; everything that follows from the event."""
        if self.weight_cache.evict_pending:
            self.weight_cache.reap(self.residency.being_read())
        self._again |= self._router.place_held()
        while True:
            while self._kv_spill.restore_next():
                pass
            if self._again:
                for instance in self.instances.values():
                    self.dispatcher.advance(instance)
            if self._router.place_displaced():
                self._again = True
                continue
            lifecycle = self._lifecycle
            if not lifecycle.removing or not lifecycle.finish_removals():
                return self._context.out
            self._again = self._router.plan()

    def next_deadline(self) -> float | None:
        """When time alone changes something, and a `Ticked` is due; None if it does not."""
        deadline = min(self.dispatcher.next_cut(), self.request_book.holds.next_due())
        if self.requests:
            deadline = min(deadline, self._router.plan_at)
        return None if deadline == math.inf else deadline

    @property
    def clock(self) -> LocalClock:
        """The clock on the wall, for times of the machine's clock."""
        return self._context.clock

    @property
    def preemptions(self) -> Mapping[ModelName, int]:
        """Requests that had to stop in mid-generation for another model or a prompt."""
        return self.dispatcher.preemptions

    @property
    def recomputed_tokens(self) -> Mapping[ModelName, int]:
        """Tokens whose KV was given up for lack of room, and is computed again."""
        return self.request_book.recomputed_tokens

    @property
    def removing(self) -> Collection[ModelName]:
        """Models that were removed, while something is left of them."""
        return self._lifecycle.removing.keys()

    def check_integrity(self) -> None:
        """Raises `LedgerError` unless the books of every tier balance."""
        self.host.check_integrity()
        self.disk.check_integrity()
        for instance in self.instances.values():
            instance.ledger.check_integrity()

    def oldest_progress(self) -> float | None:
        """When the request that has waited longest last progressed; None without requests. Batch
        work waits rightly while its instance does other work: that counts as progress of it. A
        request that waits for its client, or that the policy holds, does not count."""
        held = self.request_book.holds.of
        waiting = (r for r in self.requests.values() if not r.backpressured and r.id not in held)
        return min((self._progressed(request) for request in waiting), default=None)

    def _progressed(self, request: RequestState) -> float:
        if request.interactive or request.instance is None:
            return request.progressed
        return max(request.progressed, self.instances[request.instance].progressed)

    # --- requests and work -----------------------------------------------------------------------

    def _on_request_arrived(self, event: RequestArrived) -> bool:
        spec = event.request
        refusal = self._refuse(spec)
        if refusal is not None:
            self._context.out.append(refusal)
            return False
        request = RequestState(spec=spec, arrived=self._context.now, progressed=self._context.now)
        self.request_book.live[spec.id] = request
        self.demands.arrived(spec, self._context.now)
        self._router.place(request)
        return True

    def _refuse(self, spec: RequestSpec) -> Reject | None:
        """Why the request can never be served, if it cannot."""
        model = self.models.get(spec.model)
        if model is None:
            return rejection(spec.id, "model_not_found", f"no model {spec.model!r}")
        if spec.model in self._lifecycle.removing:
            return rejection(spec.id, "model_not_found", f"{spec.model} was removed")
        if spec.prompt_tokens + spec.max_tokens > model.max_context_tokens:
            message = (
                f"{spec.prompt_tokens} prompt tokens and {spec.max_tokens} new ones"
                f" exceed the context of {model.max_context_tokens} tokens"
            )
            return rejection(spec.id, "context_length_exceeded", message)
        if spec.model in self.failed:
            return rejection(spec.id, "model_failed", self.failed[spec.model])
        if model.draining:
            message = f"{spec.model} is being drained: it takes no new requests now"
            return rejection(spec.id, "model_draining", message)
        return None

    def _on_request_cancelled(self, event: RequestCancelled) -> bool:
        request = self.requests.get(event.request)
        if request is not None:
            self.request_book.abandon(
                request, Finish(request=request.id, reason=FinishReason.CANCELLED)
            )
            self._made_room(request)
        return True

    def _on_request_failed(self, event: RequestFailed) -> bool:
        request = self.requests.get(event.request)
        if request is not None:
            self.request_book.reject(request, "request_failed", event.reason)
            self._made_room(request)
        return True

    def _made_room(self, ended: RequestState) -> None:
        if ended.instance is not None:
            self.dispatcher.room_came(self.instances[ended.instance])

    def _on_tokens_produced(self, event: TokensProduced) -> bool:
        ended = False
        instance = self.instances[event.instance]
        instance.progressed = self._context.now
        self._lifecycle.progressed(event.model)
        produced = 0
        for entry in event.tokens:
            request = self.requests.get(entry.request)
            if request is None:
                continue
            request.produced(entry.count, self._context.now)
            produced += entry.count
            if entry.finished is not None:
                self.request_book.end(request, Finish(request=request.id, reason=entry.finished))
                ended = True
        if isinstance(instance.job, TurnJob):
            instance.job.tokens += produced
        if ended:
            self.dispatcher.room_came(instance)
        return ended

    def _on_prefill_done(self, event: PrefillDone) -> bool:
        instance = self.instances[event.instance]
        warm = isinstance(instance.job, PrefillJob) and instance.job.warm
        self._close_prefill(instance, event)
        request = self.requests.get(event.request)
        if request is not None:
            if warm:
                self.costs.observe_prefill(event.model, request.kv_tokens, event.seconds)
            request.to_kv(KvPlace.DEVICE, instance.id)
            self._router.place_decode(request)
            if request.instance != instance.id and request.kv is KvPlace.DEVICE:
                leaving = self.residency.swap_out(instance, request.model, [request])
                self._context.out.append(leaving)
        return True

    def _on_prefill_deferred(self, event: PrefillDeferred) -> bool:
        instance = self.instances[event.instance]
        self._close_prefill(instance, event)
        request = self.requests.get(event.request)
        if request is not None:
            instance.engines[event.model].residents.pop(request.id, None)
            request.kv_instance = None
            self.request_book.uncover(request)
            instance.queue_first(request)
            request.to_stage(Stage.QUEUED)
            # It may be computed elsewhere, and come back with output that is not known here.
            self._context.out.append(
                Release(instance=instance.id, model=request.model, request=request.id)
            )
        return True

    def _close_prefill(self, instance: InstanceState, event: PrefillDone | PrefillDeferred) -> None:
        """The instance is free, unless the prompt was part of a turn, which says itself what it
        has mapped when it is over."""
        if not isinstance(instance.job, TurnJob):
            self._close_job(instance, event)

    def _on_turn_ended(self, event: TurnEnded) -> bool:
        instance = self.instances[event.instance]
        job = instance.job
        assert isinstance(job, TurnJob)
        self._close_job(instance, event)
        alive = [self.requests[name] for name in job.requests if name in self.requests]
        self._learn(instance, job, event, alive)
        for request in alive:
            request.to_stage(Stage.READY)
            if self._backpressure.may_hold(request):
                self._backpressure.hold(request)
        instance.suspended = tuple([r.id for r in alive if r.id not in self.request_book.paused])
        left = min(job.resume_seconds - event.seconds, job.last_at - self._context.now)
        goes_on = event.model in instance.batches  # unless all of it is paused
        if event.reason is TurnEnd.PREEMPTED and left > 0 and goes_on:
            instance.work.appendleft(PlannedTurn(model=event.model, quota_seconds=left))
            instance.resumes = True
        self._router.flow(instance)
        return True

    def _learn(
        self,
        instance: InstanceState,
        job: TurnJob,
        event: TurnEnded,
        alive: Sequence[RequestState],
    ) -> None:
        """What the turn says about the next ones."""
        requests, steps = len(job.requests), event.steps
        # With drafts a step gives several tokens of a request. What is planned by step times are
        # tokens, so it counts as so many steps. A prompt that is done gives one, too.
        tokens = max(0, job.tokens - len(job.prompts))
        if not job.prompts:
            steps = max(steps, tokens // max(1, requests))
        grown = job.kv_tokens + requests * steps // 2
        turn = (event.model, steps, event.seconds, requests, grown, tokens)
        if job.prompts:
            self.costs.observe_mixed_turn(*turn, len(job.prompts), job.prompt_tokens)
        else:
            self.costs.observe_turn(*turn)
        if job.switches and job.cold:
            overhead = self._context.now - job.ordered - event.seconds
            self.costs.observe_switch(event.model, max(0.0, overhead))
        if not requests:
            return
        targets = [request.spec.slo.tbt_seconds for request in alive]
        tbt_seconds = min(targets, default=self.models[event.model].slo.tbt_seconds)
        instance.last_turn = _turn_view(job, event, steps, tbt_seconds)

    def _close_job(
        self, instance: InstanceState, event: PrefillDone | PrefillDeferred | TurnEnded
    ) -> None:
        """The instance is free, and the model's KV is what the worker says it is. A model for which
        KV was moved is to compute `SWAP_AMORTIZATION` times as long as the moves took."""
        job, now = instance.job, self._context.now
        if isinstance(job, PrefillJob | TurnJob) and job.switches:
            computed = 0.0 if isinstance(event, PrefillDeferred) else event.seconds
            instance.stays_until = now + SWAP_AMORTIZATION * job.swap_seconds - computed
        instance.job = None
        instance.view = None
        instance.ledger.set_kv(event.model, event.kv_slabs, event.cold_slabs)

    def _on_ticked(self, event: Ticked) -> bool:
        for instance in self.instances.values():
            self.dispatcher.cut(instance)
        return False

    def _on_kv_moved(self, event: KvMoved) -> bool:
        instance = self.instances[event.instance]
        job_model = None if instance.job is None else instance.job.model
        # More than is known of: less was ordered since, and will be.
        if event.model != job_model and event.kv_slabs <= instance.ledger.kv.get(event.model, 0):
            instance.ledger.set_kv(event.model, event.kv_slabs, event.cold_slabs)
        instance.view = None
        if isinstance(instance.job, PrefillJob | TurnJob):
            instance.job.swap_seconds += event.seconds
        self.costs.observe_move(event.moved_bytes, event.seconds)
        for name in (*event.moved, *event.missing):
            request = self.requests.get(name)
            if request is not None:
                self._settle_move(request, instance, event.direction)
            else:
                self.request_book.moved(name)
        self._kv_spill.make_room()
        return True

    def _settle_move(
        self, request: RequestState, instance: InstanceState, direction: Direction
    ) -> None:
        if direction is Direction.IN:
            request.to_kv(KvPlace.DEVICE, instance.id)
            return
        request.to_kv(KvPlace.HOST, None)
        instance.engines[request.model].residents.pop(request.id, None)
        if request.instance != instance.id:
            self._context.out.append(
                Release(instance=instance.id, model=request.model, request=request.id)
            )

    def _on_model_added(self, event: ModelAdded) -> bool:
        self._lifecycle.added(event)
        self._router.plan()
        return True


def _turn_view(job: TurnJob, event: TurnEnded, steps: int, tbt_seconds: float) -> TurnView:
    return TurnView(
        model=event.model,
        requests=len(job.requests),
        limit=job.limit,
        left_out=job.left_out,
        steps=steps,
        tokens=job.tokens,
        seconds=event.seconds,
        tbt_seconds=tbt_seconds,
        number=job.turn,
    )
