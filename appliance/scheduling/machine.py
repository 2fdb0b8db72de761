"""The scheduling machine: events in, commands out. Sans-IO; one writer; no clock, no randomness.

    RequestArrived -> prefill group -> RunPrefill -> decode batch -> RunTurn ... -> Finish

The machine keeps the books of requests, instances and engines, and says where requests go; the
dispatcher says what a free instance does next. Every request progresses because a request is
prefilled only when its KV has room on the host, and because the rounds of policies are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import singledispatchmethod

import msgspec

from appliance.memory.ledger import HostLedger
from appliance.scheduling.cluster import Cluster
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.demand import Demands
from appliance.scheduling.dispatcher import Dispatcher
from appliance.scheduling.lifecycle import Engine, KvPlace, Stage
from appliance.scheduling.policy_api import (
    PlannedTurn,
    Policy,
    PrefillChoice,
    Refusal,
    TurnView,
)
from appliance.scheduling.residency import Residency, store
from appliance.scheduling.state import (
    BuildJob,
    InstanceState,
    PrefillJob,
    RequestState,
    SchedulingContext,
    TurnJob,
)
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import (
    Command,
    Direction,
    DropModel,
    Event,
    Finish,
    FinishReason,
    InstanceId,
    InstanceLost,
    InstanceQuarantined,
    InstanceReleased,
    InstanceUp,
    KvMoved,
    KvShape,
    ModelAdded,
    ModelBuilt,
    ModelChanged,
    ModelDismissed,
    ModelDropped,
    ModelFailed,
    ModelLoaded,
    ModelName,
    ModelRemoved,
    ModelSpec,
    ModelWanted,
    PrefillDeferred,
    PrefillDone,
    ReaderStalled,
    ReaderWentOn,
    Reject,
    Release,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestId,
    RequestSpec,
    Role,
    Ticked,
    TokensProduced,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)

MAX_BUILD_LOSSES = 5
"""A model whose building cost a worker its life this often in a row is not built again."""

PLAN_SECONDS = 1.0
"""Places and classes are thought over as often as this, while there is work."""

MAX_REQUEST_LOSSES = 5
"""A request that was computed when a worker died, this often without a token in between, ends."""


MAX_MODEL_LOSSES = 10
"""A model is given up when so many workers in a row died computing its requests, and none of these
got a token in between."""


class Machine:
    """Decides who runs next, where, and what is in memory for it.

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
    ) -> None:
        """`costs` are what is known before anything was observed."""
        self.models: dict[ModelName, ModelSpec] = {model.name: model for model in models}
        self.host = host
        self.weight_cache = HostWeightCache(self.models, host)
        self.costs = costs or CostModel(self.models.values())
        self.requests: dict[RequestId, RequestState] = {}
        self.failed: dict[ModelName, str] = {}
        """Models that cannot be served, and why."""
        self.demands = Demands(self.models)
        self.cluster = Cluster(self.models, instances, self.demands, host.slab_bytes)
        self.residency = Residency(self.cluster.instances, self.weight_cache, self._rank_victims)
        self._context = SchedulingContext(policy, self.costs.estimates())
        self.dispatcher = Dispatcher(
            self._context,
            self.models,
            self.requests,
            self.cluster,
            self.residency,
            host,
            self.failed,
            self._reject,
        )
        self._layouts: dict[ModelName, str] = {}
        """How the weights lie in their master images."""
        self._build_losses: dict[ModelName, int] = {}
        self._run_losses: dict[ModelName, int] = {}
        self._leaving: dict[ModelName, set[InstanceId] | None] = {}
        """Models that were removed and are not forgotten yet: whose word for that is missing. None
        while something is held for them."""
        self._zombies: dict[RequestId, tuple[InstanceId, tuple[int, ...]]] = {}
        """Ended requests whose places in the host tier an instance is still writing or reading."""
        self._held: dict[RequestId, RequestState] = {}
        """Requests whose clients take nothing, and that wait for that."""
        self._again = False
        """Whether free instances have to be asked (again) for what they can do."""
        self._plan_at = -math.inf
        """When places and classes are thought over next."""

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
        self._again = False
        if now >= self._plan_at:
            self._plan()
        self._again |= _take_in(type(event))(self, event)
        return self._work()

    def set_policy(self, policy: Policy, now: float) -> list[Command]:
        """Have another policy answer from now on; what is under way goes on. The commands that
        follow at once."""
        self._context.policy = policy
        self._context.now, self._context.out = now, []
        for instance in self.instances.values():
            instance.work.clear()
            instance.resumes = False
        self._again = True
        self._plan()
        return self._work()

    def _work(self) -> list[Command]:
        """Give free instances something to do; everything that follows from the event."""
        if self.weight_cache.doomed:
            self.weight_cache.bury(self.residency.being_read())
        while True:
            while self._again:
                self._again = False
                for instance in self.instances.values():
                    self._again |= self.dispatcher.advance(instance)
            if not self._leaving or not self._see_off():
                return self._context.out
            self._plan()

    def next_deadline(self) -> float | None:
        """When time alone changes something, and `Ticked` has to be told; None if it does not."""
        deadline = self.dispatcher.next_cut()
        if self.requests:
            deadline = min(deadline, self._plan_at)
        return None if deadline == math.inf else deadline

    @property
    def preemptions(self) -> Mapping[ModelName, int]:
        """Requests that had to stop in mid-generation for another model or a prompt."""
        return self.dispatcher.preemptions

    @property
    def leaving(self) -> Collection[ModelName]:
        """Models that were removed, while something is left of them."""
        return self._leaving.keys()

    def check_integrity(self) -> None:
        """Raises `LedgerError` unless the books of every tier balance."""
        self.host.check_integrity()
        for instance in self.instances.values():
            instance.ledger.check_integrity()

    def oldest_progress(self) -> float | None:
        """When the request that has waited longest last progressed; None without requests. Batch
        work waits rightly while its instance does other work: that counts as progress of it. Who
        waits for its client does not count."""
        waiting = (request for request in self.requests.values() if not request.stalled)
        return min((self._progressed(request) for request in waiting), default=None)

    def _progressed(self, request: RequestState) -> float:
        if request.interactive or request.instance is None:
            return request.progressed
        return max(request.progressed, self.instances[request.instance].progressed)

    # --- requests --------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: Event) -> bool:
        """Takes the event in; whether that can give a free instance something to do."""
        raise TypeError(f"not an event of the machine: {event!r}")

    @_on.register
    def _on_request_arrived(self, event: RequestArrived) -> bool:
        spec = event.request
        refusal = self._refuse(spec)
        if refusal is not None:
            self._context.out.append(refusal)
            return False
        request = RequestState(spec=spec, arrived=self._context.now, progressed=self._context.now)
        self.requests[spec.id] = request
        self.demands.arrived(spec, self._context.now)
        self._place(request)
        return True

    def _refuse(self, spec: RequestSpec) -> Reject | None:
        """Why the request can never be served, if it cannot."""
        model = self.models.get(spec.model)
        if model is None:
            return rejection(spec.id, "model_not_found", f"no model {spec.model!r}")
        if spec.model in self._leaving:
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

    @_on.register
    def _on_request_cancelled(self, event: RequestCancelled) -> bool:
        request = self.requests.get(event.request)
        if request is not None:
            self._abandon(request, Finish(request=request.id, reason=FinishReason.CANCELLED))
        return True

    @_on.register
    def _on_reader_stalled(self, event: ReaderStalled) -> bool:
        request = self.requests.get(event.request)
        if request is None or request.stalled:
            return False
        request.stalled = True
        if self._may_be_held(request) and request.instance is not None:
            if request.stage is Stage.RUNNING:
                self.dispatcher.pause(self.instances[request.instance])
            if request.stage is Stage.READY:
                self._hold(request)
                return True
        return False

    @_on.register
    def _on_reader_went_on(self, event: ReaderWentOn) -> bool:
        request = self.requests.get(event.request)
        if request is None or not request.stalled:
            return False
        request.stalled = False
        request.progressed = self._context.now
        if request.id not in self._held:
            return False
        self._let_go_on(request)
        return True

    def _may_be_held(self, request: RequestState) -> bool:
        """Whether it only keeps others waiting. It keeps its room in the host tier until it ends:
        while others wait for some, it had better end."""
        return request.stalled and not self.dispatcher.host_queue

    def _hold(self, request: RequestState) -> None:
        """The request gives up its place, and its room on the device."""
        assert request.instance is not None, "it is ready somewhere"
        if request.batch is not None:
            self.instances[request.instance].leave(request)
        request.to_stage(Stage.HELD)
        request.held = self._context.now
        self._held[request.id] = request
        if request.kv is KvPlace.DEVICE:
            assert request.kv_instance is not None, "its KV is on a device"
            holder = self.instances[request.kv_instance]
            self._context.out.append(self.residency.swap_out(holder, request.model, [request]))

    def _let_go_on(self, request: RequestState) -> None:
        """A request that is held decodes where it did before."""
        assert request.instance is not None, "it is held somewhere"
        del self._held[request.id]
        request.excuse(self._context.now)
        request.to_stage(Stage.READY)
        self._join(request, self.instances[request.instance])

    @_on.register
    def _on_request_failed(self, event: RequestFailed) -> bool:
        request = self.requests.get(event.request)
        if request is not None:
            self._reject(request, "request_failed", event.reason)
        return True

    def _place(self, request: RequestState) -> None:
        """Give the request to an instance: to decode if it has its KV, else to prefill (again).
        It stays unplaced while no instance is up, and is refused when none will be."""
        if self.cluster.all_quarantined():
            told = "every instance is quarantined; an operator may release one"
            self._reject(request, "no_instance", told)
            return
        if request.kv is not KvPlace.NONE:
            self._place_decode(request)
            return
        candidates = self.cluster.candidates(request.spec, Role.PREFILL)
        if not candidates:
            return
        context = self._context
        choice = context.policy.prefill(
            context.now,
            self.cluster.request_view(request),
            self.cluster.views(candidates),
            context.costs,
        )
        if isinstance(choice, Refusal):
            if not request.accepted:
                self._reject(request, "overloaded", choice.reason)
                return
            # It was taken on, and may have sent tokens: it goes somewhere, late or not.
            choice = PrefillChoice(instance=candidates[0].id)
        request.accepted = True
        instance = self.instances[choice.instance]
        instance.queue(request, choice.group)
        request.instance = instance.id
        request.to_stage(Stage.QUEUED)
        self.dispatcher.joined(instance, request)

    def _place_decode(self, request: RequestState) -> None:
        candidates = self.cluster.candidates(request.spec, Role.DECODE)
        if not candidates:
            return
        context = self._context
        chosen = context.policy.decode(
            context.now,
            self.cluster.request_view(request),
            candidates[0].id if request.instance is None else request.instance,
            self.cluster.views(candidates),
            context.costs,
        )
        request.to_stage(Stage.READY)
        if self._may_be_held(request):
            request.instance = chosen
            self._hold(request)
        else:
            self._join(request, self.instances[chosen])

    def _join(self, request: RequestState, instance: InstanceState) -> None:
        """The request decodes there from now on."""
        request.instance = instance.id
        instance.join_batch(request)
        self.dispatcher.joined(instance, request)

    def _flow(self, instance: InstanceState) -> None:
        """Move what the policy wants to decode elsewhere."""
        context = self._context
        others = [
            other
            for other in self.instances.values()
            if other is not instance and other.serves and other.placement.role is not Role.PREFILL
        ]
        requests = self.cluster.decoding_views(instance) if others else []
        if not requests:
            return
        flows = context.policy.flow(
            context.now,
            self.cluster.view(instance),
            requests,
            self.cluster.views(others),
            context.costs,
        )
        for migration in flows:
            request = self.requests[migration.request]
            instance.leave(request)
            self._join(request, self.instances[migration.target])
            self._context.out.append(self.residency.swap_out(instance, request.model, [request]))

    def _plan(self) -> None:
        """Think over what each instance is for; who waits where it need not goes elsewhere."""
        context = self._context
        self._plan_at = context.now + PLAN_SECONDS
        if short := self.host.short_slabs:
            self.weight_cache.make_kv_room(self.residency.being_read())
            self._again |= self.host.short_slabs < short
        # If no KV takes the room, requests wait for weights that are being read or written.
        self._again |= bool(self.dispatcher.host_queue) and not self.host.kv_slabs
        if self._held and self.dispatcher.host_queue:
            for request in list(self._held.values()):
                self._let_go_on(request)
            self._again = True
        view = self.cluster.cluster_view(context.now)
        placements = context.policy.place(context.now, view, context.costs)
        changed = self.cluster.place(
            placements, context.policy.scale(context.now, view, context.costs)
        )
        stray = self._astray(changed)
        for request in stray:
            assert request.instance is not None, "who waits in a queue is placed"
            self.instances[request.instance].leave(request)
            request.instance = None
            request.to_stage(Stage.UNPLACED)
        self._place_all(stray)
        self._again |= changed or bool(stray)

    def _astray(self, changed: bool) -> list[RequestState]:
        """Requests that wait where they are not served any more; and batch requests, whose place
        is not final, when what instances are for `changed` or one that takes them idles."""
        idle = [instance for instance in self.instances.values() if instance.idle]
        if not changed and not idle:
            return []
        where: dict[tuple[ModelName, bool], list[InstanceState]] = {}
        stray = []
        for instance in self.instances.values():
            for request in [r for group in instance.groups for r in group.members.values()]:
                key = (request.model, request.interactive)
                if key not in where:
                    where[key] = self.cluster.candidates(request.spec, Role.PREFILL)
                open_ = where[key]
                dealt = not request.interactive and (changed or any([i in open_ for i in idle]))
                if dealt or instance not in open_:
                    stray.append(request)
        return stray

    def _rank_victims(
        self, instance: InstanceState, victims: list[ModelName]
    ) -> Sequence[ModelName]:
        context = self._context
        instance.view = None
        return context.policy.evict(
            context.now, self.cluster.view(instance), victims, context.costs
        )

    def _reject(self, request: RequestState, code: str, message: str) -> None:
        """The request cannot be served: its client hears why, its workers forget it."""
        self._abandon(request, rejection(request.id, code, message))

    def _end(self, request: RequestState, outcome: Finish | Reject) -> None:
        """The request is over: nothing of it stays in the books. It has exactly one outcome."""
        request.to_stage(Stage.DONE)
        del self.requests[request.id]
        self.demands.ended(request.model, request.generated)
        self.dispatcher.host_queue.pop(request.id, None)
        self._held.pop(request.id, None)
        if request.instance is not None:
            self.instances[request.instance].leave(request)
        if request.kv_instance is not None:
            residents = self.instances[request.kv_instance].engines[request.model].residents
            residents.pop(request.id, None)
        if request.kv in (KvPlace.LEAVING, KvPlace.ARRIVING) and request.kv_instance is not None:
            self._zombies[request.id] = (request.kv_instance, request.host_offsets)
        else:
            self.host.give_blocks(request.host_offsets)
        self._context.out.append(outcome)

    def _abandon(self, request: RequestState, outcome: Finish | Reject) -> None:
        """End a request that did not end by itself, and have its workers forget it."""
        self._end(request, outcome)
        holders = {n for n in (request.instance, request.kv_instance) if n is not None}
        for instance in sorted(holders):
            self._context.out.append(
                Release(instance=instance, model=request.model, request=request.id)
            )

    # --- instances and engines -------------------------------------------------------------------

    @_on.register
    def _on_instance_up(self, event: InstanceUp) -> bool:
        instance = self.instances[event.instance]
        instance.restart(self.models, event.slabs)
        instance.up = True
        instance.ending = instance.quarantine is not None  # it greeted while it was being ended
        self._plan()
        self._place_unplaced()
        return True

    @_on.register
    def _on_instance_quarantined(self, event: InstanceQuarantined) -> bool:
        """What it has stays in the books until its worker has ended, be it released meanwhile or
        not; then it is as one lost."""
        instance = self.instances[event.instance]
        instance.ending = instance.up
        self._set_quarantine(event.instance, event.reason)
        return True

    @_on.register
    def _on_instance_released(self, event: InstanceReleased) -> bool:
        self._set_quarantine(event.instance, None)
        return True

    def _set_quarantine(self, number: InstanceId, reason: str | None) -> None:
        instance = self.instances[number]
        instance.quarantine = reason
        instance.view = None
        self._plan()
        self._place_unplaced()

    def _place_unplaced(self) -> None:
        self._place_all([r for r in self.requests.values() if r.stage is Stage.UNPLACED])

    @_on.register
    def _on_instance_lost(self, event: InstanceLost) -> bool:
        instance = self.instances[event.instance]
        ordered, instance.ending = instance.ending, False
        instance.up = False
        self.weight_cache.lost(instance.id)
        for awaited in self._leaving.values():
            (awaited or set()).discard(instance.id)
        if not ordered:  # else it is not for what it was at
            self._blame(instance)
        # After the blame, which may end requests whose KV is on its way: no report of it will come.
        for zombie in [z for z, (holder, _) in self._zombies.items() if holder == instance.id]:
            self.host.give_blocks(self._zombies.pop(zombie)[1])
        stranded = [
            request
            for request in self.requests.values()
            if instance.id in (request.instance, request.kv_instance)
        ]
        for request in stranded:
            self._strand(request, instance)
        instance.restart(self.models, 0)
        self._plan()
        self._place_all(stranded)
        return True

    def _strand(self, request: RequestState, lost: InstanceState) -> None:
        """Take a request off a lost instance. KV that is whole in the host tier survives."""
        if request.kv is KvPlace.ARRIVING:
            request.to_kv(KvPlace.HOST, None)
        elif request.kv_instance == lost.id:
            request.kv, request.kv_instance = KvPlace.NONE, None
            self.dispatcher.give_up_host(request)
        assert request.instance is not None, "who has KV on a device, or waits for one, is placed"
        self.instances[request.instance].leave(request)
        if self._held.pop(request.id, None) is not None:
            request.excuse(self._context.now)
        request.instance = None
        request.to_stage(Stage.UNPLACED)

    def _place_all(self, requests: Iterable[RequestState]) -> None:
        for request in sorted(requests, key=lambda request: (request.arrived, request.id)):
            self._place(request)

    def _blame(self, lost: InstanceState) -> None:
        """Count a death against what the worker was at; what keeps killing workers is given up."""
        match lost.job:
            case BuildJob(model=model):
                self._count_build_loss(model, lost.id)
            case PrefillJob(model=model, request=request):
                self._count_request_losses([request])
                self._count_run_loss(model, lost.id)
            case TurnJob(model=model, requests=requests, prompts=prompts):
                self._count_request_losses((*requests, *prompts))
                self._count_run_loss(model, lost.id)

    def _count_request_losses(self, names: Iterable[RequestId]) -> None:
        for request in [self.requests[name] for name in names if name in self.requests]:
            request.losses += 1
            if request.losses >= MAX_REQUEST_LOSSES:
                message = f"{request.losses} workers in a row died computing it"
                self._reject(request, "request_failed", message)

    def _count_run_loss(self, model: ModelName, instance: InstanceId) -> None:
        losses = self._run_losses[model] = self._run_losses.get(model, 0) + 1
        if losses >= MAX_MODEL_LOSSES:
            self._fail(model, f"{losses} workers in a row died computing its requests", instance)

    def _count_build_loss(self, model: ModelName, instance: InstanceId) -> None:
        losses = self._build_losses[model] = self._build_losses.get(model, 0) + 1
        if losses >= MAX_BUILD_LOSSES:
            message = f"its worker died {losses} times while the engine was built"
            self._fail(model, message, instance)

    def _fail(self, model: ModelName, reason: str, instance: InstanceId) -> None:
        """The model cannot be served, says an instance; its requests hear it."""
        self.failed[model] = reason
        self.dispatcher.wishes.pop(model, None)
        self.weight_cache.give_up(model, instance)
        for request in [r for r in self.requests.values() if r.model == model]:
            self._reject(request, "model_failed", reason)

    @_on.register
    def _on_model_built(self, event: ModelBuilt) -> bool:
        instance = self.instances[event.instance]
        engine = instance.engines[event.model]
        engine.weight_slabs, engine.kv = event.weight_slabs, event.kv
        engine.host_slabs = event.host_slabs
        self._build_losses.pop(event.model, None)
        reason = self.failed.get(event.model) or self._why_never(
            event.model, instance, event.kv, event.layout
        )
        if reason is not None:
            self._close_build(instance, event.model, Engine.FAILED)
            self._fail(event.model, reason, instance.id)
            return True
        self._context.out.append(self._first_store(instance, event.model, event.host_slabs))
        return False

    def _first_store(self, instance: InstanceState, model: ModelName, slabs: int) -> Command:
        """A new engine adopts the master image, or fills it if it is the first and there is room.
        No engine waits for an image that another instance fills: it reads files until then."""
        master = self.weight_cache.get(model)
        if master is None:
            master = self.weight_cache.take(model, slabs, instance.id, self._context.now)
        if master is None or master.filler not in (None, instance.id):
            return store(instance, model, (), 0)
        fill = master.filler == instance.id
        return store(instance, model, master.offsets, master.version, fill=fill)

    def _why_never(
        self, model: ModelName, instance: InstanceState, kv: KvShape, layout: str
    ) -> str | None:
        """Why the model could never serve a request of full length here, if it could not."""
        if self._layouts.setdefault(model, layout) != layout:
            return "its weights lie otherwise than on another instance: were its files replaced?"
        longest = kv.blocks(self.models[model].max_context_tokens)
        needed = instance.engines[model].weight_slabs + kv.slabs(longest)
        if needed <= instance.ledger.total_slabs:
            return None
        return (
            f"its weights and the KV of one request at max_context need {needed} slabs, the pool"
            f" has {instance.ledger.total_slabs}: raise devices.memory or lower max_context"
        )

    @_on.register
    def _on_model_failed(self, event: ModelFailed) -> bool:
        """Its engine cannot be built, or its weights cannot be read (any more)."""
        instance = self.instances[event.instance]
        if isinstance(instance.job, BuildJob) and instance.job.model == event.model:
            self._close_build(instance, event.model, Engine.FAILED)
        elif instance.engines[event.model].stage is Engine.LOADING:
            instance.engines[event.model].to_stage(Engine.FAILED, event.model)
            instance.ledger.evict(event.model)
            instance.view = None
        self._fail(event.model, event.reason, instance.id)
        return True

    @_on.register
    def _on_weights_stored(self, event: WeightsStored) -> bool:
        instance = self.instances[event.instance]
        engine = instance.engines[event.model]
        self.weight_cache.filled(event.model, engine.attached)
        if engine.stage is not Engine.BUILDING:
            return False
        self._close_build(instance, event.model, Engine.STORED)
        return True

    def _close_build(self, instance: InstanceState, model: ModelName, stage: Engine) -> None:
        instance.engines[model].to_stage(stage, model)
        instance.job = None

    @_on.register
    def _on_model_loaded(self, event: ModelLoaded) -> bool:
        instance = self.instances[event.instance]
        engine = instance.engines[event.model]
        self.costs.observe_load(event.moved_bytes, event.seconds)
        if engine.stage is Engine.LOADING:
            engine.to_stage(Engine.LOADED, event.model)
            instance.ledger.loaded(event.model)
            self.dispatcher.wishes.pop(event.model, None)
        return bool(instance.dismissed or self.dispatcher.wishes)

    # --- what operators want ---------------------------------------------------------------------

    @_on.register
    def _on_model_changed(self, event: ModelChanged) -> bool:
        self.models[event.model] = msgspec.structs.replace(
            self.models[event.model],
            slo=event.slo,
            batch_slo=event.batch_slo,
            pinned=event.pinned,
            draining=event.draining,
        )
        self.weight_cache.pin(event.model, event.pinned)
        return False

    @_on.register
    def _on_model_wanted(self, event: ModelWanted) -> bool:
        if event.model in self.failed:
            return False
        there = [i for i in self.instances.values() if event.model in i.ledger.weights]
        loaded = [i for i in there if event.model not in i.ledger.loading]
        for instance in there:
            instance.dismissed.pop(event.model, None)
        if not loaded:
            self.dispatcher.wishes[event.model] = None
        return True

    @_on.register
    def _on_model_dismissed(self, event: ModelDismissed) -> bool:
        self._dismiss(event.model)
        return True

    def _dismiss(self, model: ModelName) -> None:
        """Have the model leave all devices."""
        self.dispatcher.wishes.pop(model, None)
        for instance in self.instances.values():
            if model in instance.ledger.weights or model in instance.ledger.kv:
                self.dispatcher.dismiss(instance, model)

    # --- models that come and go -----------------------------------------------------------------

    @_on.register
    def _on_model_added(self, event: ModelAdded) -> bool:
        spec = event.model
        self.models[spec.name] = spec
        self.demands.add(spec.name)
        self.costs.add(spec)
        self.dispatcher.preemptions[spec.name] = 0
        self.weight_cache.add(spec, event.kv_floor_slabs, self.residency.being_read())
        for instance in self.instances.values():
            instance.add(spec.name)
        self._plan()
        return True

    @_on.register
    def _on_model_removed(self, event: ModelRemoved) -> bool:
        """It leaves as a failed one does, and is forgotten once no report about it can come."""
        model = event.model
        self._leaving[model] = None
        self.failed[model] = f"{model} was removed"
        self.weight_cache.give_up(model, None)
        for request in [r for r in self.requests.values() if r.model == model]:
            self._reject(request, "model_removed", self.failed[model])
        self._dismiss(model)
        return True

    @_on.register
    def _on_model_dropped(self, event: ModelDropped) -> bool:
        awaited = self._leaving[event.model]
        assert awaited is not None, "it was ordered"
        awaited.discard(event.instance)
        return False

    def _see_off(self) -> bool:
        """Have instances drop models that hold nothing any more, and forget those that all have
        dropped; whether there is one."""
        for model, awaited in self._leaving.items():
            held = any([instance.holds(model) for instance in self.instances.values()])
            if awaited is None and not held and self.weight_cache.get(model) is None:
                live = [instance.id for instance in self.instances.values() if instance.up]
                self._leaving[model] = set(live)
                self._context.out += [DropModel(instance=number, model=model) for number in live]
        gone = [model for model, awaited in self._leaving.items() if awaited == set()]
        for model in gone:
            self._forget(model)
        return bool(gone)

    def _forget(self, model: ModelName) -> None:
        del self._leaving[model]
        del self.models[model]
        del self.failed[model]
        del self.dispatcher.preemptions[model]
        self._layouts.pop(model, None)
        self._build_losses.pop(model, None)
        self._run_losses.pop(model, None)
        self.weight_cache.pin(model, False)
        self.demands.forget(model)
        self.costs.forget(model)
        for instance in self.instances.values():
            instance.forget(model)

    # --- work ------------------------------------------------------------------------------------

    @_on.register
    def _on_tokens_produced(self, event: TokensProduced) -> bool:
        ended = False
        instance = self.instances[event.instance]
        instance.progressed = self._context.now
        if self._run_losses:
            self._run_losses.pop(event.model, None)
        produced = 0
        for entry in event.tokens:
            request = self.requests.get(entry.request)
            if request is None:
                continue
            request.produced(entry.count, self._context.now)
            produced += entry.count
            if entry.finished is not None:
                self._end(request, Finish(request=request.id, reason=entry.finished))
                ended = True
        if isinstance(instance.job, TurnJob):
            instance.job.tokens += produced
        return ended

    @_on.register
    def _on_prefill_done(self, event: PrefillDone) -> bool:
        instance = self.instances[event.instance]
        warm = isinstance(instance.job, PrefillJob) and instance.job.warm
        self._close_prefill(instance, event)
        request = self.requests.get(event.request)
        if request is not None:
            if warm:
                self.costs.observe_prefill(event.model, request.kv_tokens, event.seconds)
            request.to_kv(KvPlace.DEVICE, instance.id)
            self._place_decode(request)
            if request.instance != instance.id and request.kv is KvPlace.DEVICE:
                leaving = self.residency.swap_out(instance, request.model, [request])
                self._context.out.append(leaving)
        return True

    @_on.register
    def _on_prefill_deferred(self, event: PrefillDeferred) -> bool:
        instance = self.instances[event.instance]
        self._close_prefill(instance, event)
        request = self.requests.get(event.request)
        if request is not None:
            instance.engines[event.model].residents.pop(request.id, None)
            request.kv_instance = None
            self.dispatcher.give_up_host(request)
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

    @_on.register
    def _on_turn_ended(self, event: TurnEnded) -> bool:
        instance = self.instances[event.instance]
        job = instance.job
        assert isinstance(job, TurnJob)
        self._close_job(instance, event)
        alive = [self.requests[name] for name in job.requests if name in self.requests]
        self._learn(instance, job, event, alive)
        for request in alive:
            request.to_stage(Stage.READY)
            if self._may_be_held(request):
                self._hold(request)
        instance.suspended = tuple([r.id for r in alive if r.id not in self._held])
        left = min(job.resume_seconds - event.seconds, job.last_at - self._context.now)
        goes_on = event.model in instance.batches  # unless all of it is held
        if event.reason is TurnEnd.PREEMPTED and left > 0 and goes_on:
            instance.work.appendleft(PlannedTurn(model=event.model, quota_seconds=left))
            instance.resumes = True
        self._flow(instance)
        return True

    def _learn(
        self,
        instance: InstanceState,
        job: TurnJob,
        event: TurnEnded,
        alive: Sequence[RequestState],
    ) -> None:
        """What the turn says about the next ones."""
        requests = len(job.requests)
        if not job.prompts:
            grown = job.kv_tokens + requests * event.steps // 2
            self.costs.observe_turn(event.model, event.steps, event.seconds, requests, grown)
        if job.switches and job.cold:
            overhead = self._context.now - job.ordered - event.seconds
            self.costs.observe_switch(event.model, max(0.0, overhead))
        if not requests:
            return
        promised = [request.spec.slo.tbt_seconds for request in alive]
        instance.last_turn = TurnView(
            model=event.model,
            requests=requests,
            limit=job.limit,
            left_out=job.left_out,
            steps=event.steps,
            tokens=job.tokens,
            seconds=event.seconds,
            tbt_seconds=min(promised, default=self.models[event.model].slo.tbt_seconds),
        )

    def _close_job(
        self, instance: InstanceState, event: PrefillDone | PrefillDeferred | TurnEnded
    ) -> None:
        """The instance is free, and the model's KV is what the worker says it is."""
        instance.job = None
        instance.view = None
        instance.ledger.set_kv(event.model, event.kv_slabs, event.cold_slabs)

    @_on.register
    def _on_ticked(self, event: Ticked) -> bool:
        for instance in self.instances.values():
            self.dispatcher.cut(instance)
        return False

    @_on.register
    def _on_kv_moved(self, event: KvMoved) -> bool:
        instance = self.instances[event.instance]
        job_model = None if instance.job is None else instance.job.model
        # More than is known of: less was ordered since, and will be.
        if event.model != job_model and event.kv_slabs <= instance.ledger.kv.get(event.model, 0):
            instance.ledger.set_kv(event.model, event.kv_slabs, event.cold_slabs)
        instance.view = None
        for name in (*event.moved, *event.missing):
            request = self.requests.get(name)
            if request is not None:
                self._settle_move(request, instance, event.direction)
            elif name in self._zombies:
                self.host.give_blocks(self._zombies.pop(name)[1])
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


_take_in: Callable[[type], Callable[[Machine, Event], bool]] = (
    # Looked up here: to bind a `singledispatchmethod` costs as much as many an event.
    vars(Machine)["_on"].dispatcher.dispatch
)


def rejection(request: RequestId, code: str, message: str) -> Reject:
    return Reject(request=request, code=code, message=message)
