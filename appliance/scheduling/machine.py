"""The scheduling machine: events in, commands out. Sans-IO; one writer; no clock, no randomness.

An instance has at most one *job* out: building an engine, prefilling one request, or a turn of
decoding. What prepares a job (evictions, swaps, loads) is ordered right before it, and a worker
works in order, so when a job's end is reported everything ordered before it is done and the
instance's ledger is exact again. Only a prefetch goes on beside a job.

    RequestArrived -> prefill group -> RunPrefill -> decode batch -> RunTurn ... -> Finish

A request is prefilled only after the host tier has room for its KV at full length, so a swap
outwards can never fail, and any single request can always be brought to its end by swapping out
everything else. That, and the finite rounds of the policies, is why every request progresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatchmethod

from appliance.memory.ledger import HostLedger
from appliance.scheduling.costmodel import CostModel
from appliance.scheduling.lifecycle import Engine, KvPlace, Stage
from appliance.scheduling.masters import Masters
from appliance.scheduling.placement import Floor
from appliance.scheduling.questions import Phase, PlannedTurn, Policy
from appliance.scheduling.residency import Residency, store
from appliance.scheduling.state import (
    BuildJob,
    Group,
    InstanceState,
    PrefillJob,
    RequestState,
    TurnJob,
)
from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    Event,
    EvictModel,
    Finish,
    FinishReason,
    InstanceId,
    InstanceLost,
    InstanceUp,
    KvMoved,
    KvShape,
    ModelBuilt,
    ModelFailed,
    ModelLoaded,
    ModelName,
    ModelSpec,
    Preempt,
    PrefillDeferred,
    PrefillDone,
    Reject,
    Release,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestId,
    RequestSpec,
    Role,
    RunPrefill,
    RunTurn,
    TokensProduced,
    TurnEnded,
    WeightsStored,
)

MAX_BUILD_LOSSES = 5
"""A model whose building cost a worker its life this often in a row is not built again."""

MAX_REQUEST_LOSSES = 5
"""A request that was computed when a worker died, this often without a token in between, ends."""


class Machine:
    """Decides who runs next, where, and what is in memory for it.

    `handle` takes an event and the time it happened and returns the commands that follow, in
    order. The cost of an event is O(requests of the models it touches + models), never O(all
    requests), but for the loss of an instance.
    """

    def __init__(
        self,
        models: Iterable[ModelSpec],
        instances: int,
        host: HostLedger,
        policy: Policy,
    ) -> None:
        self.models: Mapping[ModelName, ModelSpec] = {model.name: model for model in models}
        self.host = host
        self.masters = Masters(self.models, host)
        self.policy = policy
        self.costs = CostModel()
        self.requests: dict[RequestId, RequestState] = {}
        self.floor = Floor(self.models, policy.assign_roles(instances), self.requests, self.costs)
        self.residency = Residency(self.floor.instances, self.requests, self.masters)
        self.failed: dict[ModelName, str] = {}
        """Models that cannot be served, and why."""
        self.preemptions: dict[ModelName, int] = dict.fromkeys(self.models, 0)
        """Requests that had to stop in mid-generation for another model or a prompt."""
        self._shapes: dict[ModelName, KvShape] = {}
        self._layouts: dict[ModelName, str] = {}
        """How the weights lie in their master images."""
        self._build_losses: dict[ModelName, int] = {}
        self._host_queue: dict[RequestId, None] = {}
        """Requests that wait for room in the host tier, the longest waiting first."""
        self._zombies: dict[RequestId, tuple[InstanceId, tuple[int, ...]]] = {}
        """Ended requests whose places in the host tier an instance is still writing or reading."""
        self._out: list[Command] = []
        self._now = 0.0
        self._again = False
        """Whether free instances have to be asked (again) for what they can do."""

    # --- the seam --------------------------------------------------------------------------------

    @property
    def instances(self) -> Mapping[InstanceId, InstanceState]:
        return self.floor.instances

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands that follow from a fact at time `now` (seconds of any steady clock).

        Raises `IllegalTransition` or `LedgerError` when the event contradicts what the machine
        knows: its books are no longer true then, and it must not go on.
        """
        self._now = now
        self._out = []
        self._again = self._on(event)
        while self._again:
            self._again = False
            for instance in self.instances.values():
                self._advance(instance)
        return self._out

    def next_deadline(self) -> float | None:
        """When time alone changes something. Nothing here waits for the clock: workers keep the
        quotas of turns."""
        return None

    def check_integrity(self) -> None:
        """Raises `LedgerError` unless the books of every tier balance."""
        self.host.check_integrity()
        for instance in self.instances.values():
            instance.ledger.check_integrity()

    def oldest_progress(self) -> float | None:
        """When the request that has waited longest last progressed; None without requests."""
        return min((request.progressed for request in self.requests.values()), default=None)

    # --- requests --------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: Event) -> bool:
        """Takes the event in; whether that can give a free instance something to do."""
        raise TypeError(f"not an event of the machine: {event!r}")

    @_on.register
    def _(self, event: RequestArrived) -> bool:
        spec = event.request
        refusal = self._refuse(spec)
        if refusal is not None:
            self._out.append(refusal)
            return False
        request = RequestState(spec=spec, arrived=self._now, progressed=self._now)
        self.requests[spec.id] = request
        self._place(request)
        return True

    def _refuse(self, spec: RequestSpec) -> Reject | None:
        """Why the request can never be served, if it cannot."""
        model = self.models.get(spec.model)
        if model is None:
            return _reject(spec.id, "model_not_found", f"no model {spec.model!r}")
        if spec.prompt_tokens + spec.max_tokens > model.max_context_tokens:
            message = (
                f"{spec.prompt_tokens} prompt tokens and {spec.max_tokens} new ones"
                f" exceed the context of {model.max_context_tokens} tokens"
            )
            return _reject(spec.id, "context_length_exceeded", message)
        if spec.model in self.failed:
            return _reject(spec.id, "model_failed", self.failed[spec.model])
        return None

    @_on.register
    def _(self, event: RequestCancelled) -> bool:
        request = self.requests.get(event.request)
        if request is not None:
            self._abandon(request, Finish(request=request.id, reason=FinishReason.CANCELLED))
        return True

    @_on.register
    def _(self, event: RequestFailed) -> bool:
        request = self.requests.get(event.request)
        if request is not None:
            self._abandon(request, _reject(request.id, "request_failed", event.reason))
        return True

    def _place(self, request: RequestState) -> None:
        """Give the request to an instance: to decode if it has its KV, else to prefill (again).
        It stays unplaced while no instance is up."""
        wanted = Role.PREFILL if request.kv is KvPlace.NONE else Role.DECODE
        candidates = self.floor.candidates(wanted)
        if not candidates:
            return
        if wanted is Role.DECODE:
            self._place_decode(request, candidates)
            return
        choice = self.policy.choose_prefill(
            self.floor.request_view(request, self._now),
            [self.floor.instance_view(instance) for instance in candidates],
        )
        instance = self.instances[choice.instance]
        if choice.group is None:
            instance.groups.append(Group(request.model))
        instance.groups[-1 if choice.group is None else choice.group].join(request.id)
        request.instance = instance.id
        request.to_stage(Stage.QUEUED)
        if isinstance(instance.job, TurnJob):
            self._maybe_preempt(instance, instance.job)

    def _place_decode(self, request: RequestState, candidates: list[InstanceState]) -> None:
        chosen = self.policy.choose_decode(
            self.floor.request_view(request, self._now),
            candidates[0].id if request.instance is None else request.instance,
            [self.floor.instance_view(instance) for instance in candidates],
        )
        request.instance = chosen
        request.to_stage(Stage.READY)
        self.instances[chosen].join_batch(request)

    def _maybe_preempt(self, instance: InstanceState, turn: TurnJob) -> None:
        """End the turn for a prompt, if the policy wants that and the prompt could start."""
        if turn.preempting or self._host_queue:
            return
        view = self.floor.instance_view(instance)
        if self.policy.choose_phase(view) is Phase.PREFILL:
            turn.preempting = True
            self._out.append(Preempt(instance=instance.id, turn=turn.turn))

    def _end(self, request: RequestState, outcome: Finish | Reject) -> None:
        """The request is over: nothing of it stays in the books. It has exactly one outcome."""
        request.to_stage(Stage.DONE)
        del self.requests[request.id]
        self._host_queue.pop(request.id, None)
        if request.instance is not None:
            self.instances[request.instance].leave(request)
        if request.kv_instance is not None:
            residents = self.instances[request.kv_instance].engines[request.model].residents
            residents.pop(request.id, None)
        if request.kv in (KvPlace.LEAVING, KvPlace.ARRIVING) and request.kv_instance is not None:
            self._zombies[request.id] = (request.kv_instance, request.host_offsets)
        else:
            self.host.give_blocks(request.host_offsets)
        self._out.append(outcome)

    def _abandon(self, request: RequestState, outcome: Finish | Reject) -> None:
        """End a request that did not end by itself, and have its workers forget it."""
        self._end(request, outcome)
        holders = {n for n in (request.instance, request.kv_instance) if n is not None}
        for instance in sorted(holders):
            self._out.append(Release(instance=instance, model=request.model, request=request.id))

    # --- instances and engines -------------------------------------------------------------------

    @_on.register
    def _(self, event: InstanceUp) -> bool:
        instance = self.instances[event.instance]
        instance.restart(self.models, event.slabs)
        instance.up = True
        unplaced = [r for r in self.requests.values() if r.stage is Stage.UNPLACED]
        self._place_all(unplaced)
        return True

    @_on.register
    def _(self, event: InstanceLost) -> bool:
        instance = self.instances[event.instance]
        instance.up = False
        for zombie in [z for z, (holder, _) in self._zombies.items() if holder == instance.id]:
            self.host.give_blocks(self._zombies.pop(zombie)[1])
        self.masters.lost(instance.id)
        self._blame(instance)
        stranded = [
            request
            for request in self.requests.values()
            if instance.id in (request.instance, request.kv_instance)
        ]
        for request in stranded:
            self._strand(request, instance)
        instance.restart(self.models, 0)
        self._place_all(stranded)
        return True

    def _strand(self, request: RequestState, lost: InstanceState) -> None:
        """Take a request off a lost instance. KV that is whole in the host tier survives."""
        if request.kv is KvPlace.ARRIVING:
            request.to_kv(KvPlace.HOST, None)
        elif request.kv_instance == lost.id:
            request.kv, request.kv_instance = KvPlace.NONE, None
            self._give_up_host(request)
        assert request.instance is not None, "who has KV on a device, or waits for one, is placed"
        self.instances[request.instance].leave(request)
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
            case PrefillJob(request=request):
                self._count_request_losses([request])
            case TurnJob(requests=requests):
                self._count_request_losses(requests)

    def _count_request_losses(self, names: Iterable[RequestId]) -> None:
        for request in [self.requests[name] for name in names if name in self.requests]:
            request.losses += 1
            if request.losses >= MAX_REQUEST_LOSSES:
                message = f"{request.losses} workers in a row died computing it"
                self._abandon(request, _reject(request.id, "request_failed", message))

    def _count_build_loss(self, model: ModelName, instance: InstanceId) -> None:
        losses = self._build_losses[model] = self._build_losses.get(model, 0) + 1
        if losses >= MAX_BUILD_LOSSES:
            message = f"its worker died {losses} times while the engine was built"
            self._fail(model, message, instance)

    def _fail(self, model: ModelName, reason: str, instance: InstanceId) -> None:
        """The model cannot be served, says an instance; its requests hear it."""
        self.failed[model] = reason
        self.masters.give_up(model, instance)
        for request in [r for r in self.requests.values() if r.model == model]:
            self._abandon(request, _reject(request.id, "model_failed", reason))

    @_on.register
    def _(self, event: ModelBuilt) -> bool:
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
        self._out.append(self._first_store(instance, event.model, event.host_slabs))
        return False

    def _first_store(self, instance: InstanceState, model: ModelName, slabs: int) -> Command:
        """A new engine adopts the master image, or fills it if it is the first and there is room.
        Nobody waits for an image that another instance fills: files will do until it is whole."""
        master = self.masters.get(model)
        if master is None:
            master = self.masters.take(model, slabs, instance.id, self._now)
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
    def _(self, event: ModelFailed) -> bool:
        """Its engine cannot be built, or its weights cannot be read (any more)."""
        instance = self.instances[event.instance]
        if isinstance(instance.job, BuildJob) and instance.job.model == event.model:
            self._close_build(instance, event.model, Engine.FAILED)
        elif instance.engines[event.model].stage is Engine.LOADING:
            instance.engines[event.model].to_stage(Engine.FAILED, event.model)
            instance.ledger.evict(event.model)
        self._fail(event.model, event.reason, instance.id)
        return True

    @_on.register
    def _(self, event: WeightsStored) -> bool:
        instance = self.instances[event.instance]
        engine = instance.engines[event.model]
        self.masters.filled(event.model, engine.attached)
        if engine.stage is not Engine.BUILDING:
            return False
        self._close_build(instance, event.model, Engine.STORED)
        return True

    def _close_build(self, instance: InstanceState, model: ModelName, stage: Engine) -> None:
        instance.engines[model].to_stage(stage, model)
        instance.job = None

    @_on.register
    def _(self, event: ModelLoaded) -> bool:
        instance = self.instances[event.instance]
        engine = instance.engines[event.model]
        self.costs.observe_load(event.moved_bytes, event.seconds)
        if engine.stage is Engine.LOADING:
            engine.to_stage(Engine.LOADED, event.model)
            instance.ledger.loaded(event.model)
        return False

    # --- work ------------------------------------------------------------------------------------

    @_on.register
    def _(self, event: TokensProduced) -> bool:
        ended = False
        for entry in event.tokens:
            request = self.requests.get(entry.request)
            if request is None:
                continue
            request.generated += entry.count
            request.losses = 0
            request.progressed = self._now
            if entry.finished is not None:
                self._end(request, Finish(request=request.id, reason=entry.finished))
                ended = True
        return ended

    @_on.register
    def _(self, event: PrefillDone) -> bool:
        instance = self.instances[event.instance]
        warm = isinstance(instance.job, PrefillJob) and instance.job.warm
        self._close_job(instance, event)
        request = self.requests.get(event.request)
        if request is not None:
            if warm:
                self.costs.observe_prefill(event.model, request.kv_tokens, event.seconds)
            request.to_kv(KvPlace.DEVICE, instance.id)
            self._place_decode(request, self.floor.candidates(Role.DECODE))
            if request.instance != instance.id:
                self._out.append(self.residency.swap_out(instance, request.model, [request]))
        return True

    @_on.register
    def _(self, event: PrefillDeferred) -> bool:
        instance = self.instances[event.instance]
        self._close_job(instance, event)
        request = self.requests.get(event.request)
        if request is not None:
            instance.engines[event.model].residents.pop(request.id, None)
            request.kv_instance = None
            self._give_up_host(request)
            again = Group(request.model)
            again.join(request.id)
            instance.groups.insert(0, again)
            request.to_stage(Stage.QUEUED)
        return True

    @_on.register
    def _(self, event: TurnEnded) -> bool:
        instance = self.instances[event.instance]
        job = instance.job
        assert isinstance(job, TurnJob)
        self._close_job(instance, event)
        self.costs.observe_turn(event.model, event.steps, event.seconds)
        if job.switches:
            overhead = self._now - job.ordered - event.seconds
            self.costs.observe_switch(event.model, max(0.0, overhead))
        alive = [self.requests[name] for name in job.requests if name in self.requests]
        for request in alive:
            request.to_stage(Stage.READY)
        instance.suspended = tuple(request.id for request in alive)
        return True

    def _close_job(
        self, instance: InstanceState, event: PrefillDone | PrefillDeferred | TurnEnded
    ) -> None:
        """The instance is free, and the model's KV is what the worker says it is."""
        instance.job = None
        instance.ledger.set_kv(event.model, event.kv_slabs, event.cold_slabs)

    @_on.register
    def _(self, event: KvMoved) -> bool:
        instance = self.instances[event.instance]
        job_model = None if instance.job is None else instance.job.model
        # More than is known of: less was ordered since, and will be.
        if event.model != job_model and event.kv_slabs <= instance.ledger.kv.get(event.model, 0):
            instance.ledger.set_kv(event.model, event.kv_slabs, event.cold_slabs)
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
            self._out.append(Release(instance=instance.id, model=request.model, request=request.id))

    # --- what an instance does next --------------------------------------------------------------

    def _advance(self, instance: InstanceState) -> None:
        """Give a free instance its next job: a prompt, a turn, or an engine to build."""
        if not instance.up or instance.job is not None:
            return
        if not instance.groups:
            started = self._start_turn(instance)
        elif not self._has_runnable(instance):
            started = self._start_prefill(instance)
        elif self.policy.choose_phase(self.floor.instance_view(instance)) is Phase.PREFILL:
            started = self._start_prefill(instance) or self._start_turn(instance)
        else:
            started = self._start_turn(instance)
        if not started:
            self._build_next(instance)

    def _has_runnable(self, instance: InstanceState) -> bool:
        return any(self._runnable(instance, model) for model in instance.batches)

    def _runnable(self, instance: InstanceState, model: ModelName) -> list[RequestState]:
        members = (self.requests[name] for name in instance.batches.get(model, ()))
        return [request for request in members if request.runnable]

    def _build_next(self, instance: InstanceState) -> None:
        """Build the engine expected to be needed first: of a waiting model, else in the order of
        the catalogue."""
        for model in dict.fromkeys([*instance.upcoming(), *self.models]):
            if instance.engines[model].stage is Engine.ABSENT and model not in self.failed:
                self._build(instance, model)
                return

    def _build(self, instance: InstanceState, model: ModelName) -> None:
        instance.engines[model].to_stage(Engine.BUILDING, model)
        instance.job = BuildJob(model)
        self._out.append(BuildModel(instance=instance.id, model=model))

    def _start_prefill(self, instance: InstanceState) -> bool:
        """Prefill the request that is first in line; False if it has to wait."""
        request = self._first_in_line(instance)
        model = request.model
        engine = instance.engines[model]
        if not engine.built:
            self._build(instance, model)
            return True
        if not self._reserve_host(request, engine.shape):
            return False
        blocks = engine.shape.blocks(request.tokens)
        if not self.residency.fits(instance, model, blocks):
            self._out.append(self.residency.clear_kv(instance, model))
        job = PrefillJob(model, request.id, warm=engine.stage is Engine.LOADED)
        grant = self.residency.grant(instance, model, blocks, 0, self._now)
        instance.leave(request)
        request.to_stage(Stage.PREFILLING)
        request.kv_instance = instance.id
        engine.residents[request.id] = None
        instance.prefills_since_turn += 1
        self._begin(instance, job, grant.commands)
        self._out.append(
            RunPrefill(
                instance=instance.id, model=model, request=request.id, kv_slabs=grant.kv_slabs
            )
        )
        return True

    def _first_in_line(self, instance: InstanceState) -> RequestState:
        """The first request of the first group; but who has waited longest for the host tier goes
        before anybody else here, or those who got in front of it since would block each other."""
        longest = next(iter(self._host_queue), None)
        if longest is not None and self.requests[longest].instance == instance.id:
            return self.requests[longest]
        return self.requests[instance.groups[0].members[0]]

    def _reserve_host(self, request: RequestState, shape: KvShape) -> bool:
        """Room in the host tier for the request's KV at full length. Who asked first gets it first.

        False if there is none now. If nobody holds any and there is still too little, there never
        will be enough: the request is rejected.
        """
        self._host_queue.setdefault(request.id)
        if next(iter(self._host_queue)) != request.id:
            return False
        blocks = shape.blocks(request.spec.prompt_tokens + request.spec.max_tokens)
        offsets = self.host.take_blocks(shape.block_bytes, blocks)
        if offsets is None:
            if not self.host.kv_slabs:
                message = f"its KV at full length ({blocks} blocks) exceeds the host cache"
                self._abandon(request, _reject(request.id, "kv_too_large", message))
                self._again = True
            return False
        del self._host_queue[request.id]
        request.host_offsets = offsets
        return True

    def _give_up_host(self, request: RequestState) -> None:
        """A request that has to be prefilled (again) queues for the host tier like any other: only
        requests that can run hold places there, so some always come free."""
        self.host.give_blocks(request.host_offsets)
        request.host_offsets = ()

    def _start_turn(self, instance: InstanceState) -> bool:
        """Run the next turn of the round, or of a new round; False if nothing can run."""
        if not self._has_runnable(instance):
            return False
        planned = self._next_turn(instance)
        model = planned.model
        engine = instance.engines[model]
        if not engine.built:
            self._build(instance, model)
            return True
        batch, blocks = self._select(instance, model)
        if not batch:
            self._out.append(self.residency.clear_kv(instance, model))
            return True
        horizon = int(planned.quota_seconds / self.costs.step_seconds(model))
        wish = sum(
            engine.shape.blocks(request.tokens + min(request.remaining_tokens, horizon))
            - engine.shape.blocks(request.tokens)
            for request in batch
        )
        grant = self.residency.grant(instance, model, blocks, wish, self._now)
        instance.turns += 1
        instance.prefills_since_turn = 0
        names = tuple(request.id for request in batch)
        switches = model != instance.current_model
        job = TurnJob(model, instance.turns, names, self._now, switches)
        self._begin(instance, job, grant.commands)
        arriving = [request for request in batch if request.kv is KvPlace.HOST]
        if arriving:
            self._out.append(self.residency.swap_in(instance, model, arriving, grant.kv_slabs))
        for request in batch:
            request.to_stage(Stage.RUNNING)
            request.ran = self._now
        self._out.append(
            RunTurn(
                instance=instance.id,
                model=model,
                turn=instance.turns,
                requests=names,
                quota_seconds=planned.quota_seconds,
                kv_slabs=grant.kv_slabs,
            )
        )
        return True

    def _next_turn(self, instance: InstanceState) -> PlannedTurn:
        """The next turn with something to run; a round is planned when the last one is over."""
        while True:
            while instance.work:
                turn = instance.work.popleft()
                if self._runnable(instance, turn.model):
                    return turn
            instance.work.extend(self.policy.plan_round(self.floor.instance_view(instance)))

    def _select(self, instance: InstanceState, model: ModelName) -> tuple[list[RequestState], int]:
        """The requests of the next turn and the blocks they need more: those that ran longest ago
        first, as many as fit beside the KV that is already there. None if not even one fits."""
        shape = instance.engines[model].shape
        order = sorted(self._runnable(instance, model), key=lambda r: (r.ran, r.arrived, r.id))
        batch: list[RequestState] = []
        blocks = 0
        for request in order[: self.models[model].max_batch]:
            held = shape.blocks(request.kv_tokens) if request.kv is KvPlace.DEVICE else 0
            more = blocks + shape.blocks(request.tokens) - held
            if not self.residency.fits(instance, model, more):
                break
            batch.append(request)
            blocks = more
        return batch, blocks

    def _begin(
        self,
        instance: InstanceState,
        job: PrefillJob | TurnJob,
        preparation: list[Command],
    ) -> None:
        """A job is out: order what prepares it, and a prefetch to go on beside it."""
        if not isinstance(job, TurnJob) or job.switches:
            for name in instance.suspended:
                if name in self.requests:
                    self.preemptions[self.requests[name].model] += 1
        instance.suspended = ()
        instance.current_model = job.model
        instance.job = job
        self._out += preparation
        self._prefetch(instance, job.model)

    def _prefetch(self, instance: InstanceState, model: ModelName) -> None:
        """Stop a prefetch of what is not wanted any more; order one of what is wanted next."""
        upcoming = instance.upcoming()
        for name in sorted(instance.ledger.loading - {model, *upcoming}):
            self._out.append(self.residency.evict(instance, name))
        # What goes with this job is not brought back beside it: a load of it may be about to be
        # reported, and would be taken for the new one.
        gone = {c.model for c in self._out if isinstance(c, EvictModel)}
        wanted = [
            name
            for name in upcoming
            if name != model and name not in gone and instance.engines[name].stage is Engine.STORED
        ]
        if wanted and not instance.ledger.loading - {model}:
            view = self.floor.instance_view(instance)
            target = self.policy.choose_prefetch(view, wanted)
            if target is not None:
                self._out += self.residency.prefetch(instance, model, target)


def _reject(request: RequestId, code: str, message: str) -> Reject:
    return Reject(request=request, code=code, message=message)
