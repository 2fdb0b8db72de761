"""What a free instance does next: a prompt, a turn of decoding, or an engine to build.

An instance has at most one *job* out. What prepares it (evictions, swaps, loads) is ordered right
before it, and a worker works in order, so when a job's end is reported everything ordered before it
is done and the instance's ledger is exact again. Only a prefetch runs during a job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from appliance.scheduling.cluster import Cluster
from appliance.scheduling.device_room import DeviceRoom
from appliance.scheduling.host_room import HostRoom
from appliance.scheduling.lifecycle import EngineStage, KvPlace, Stage
from appliance.scheduling.policy_api import BatchLimits, Phase, PlannedTurn
from appliance.scheduling.prefetcher import Prefetcher
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.residency import Residency
from appliance.scheduling.state import (
    InstanceState,
    PrefillJob,
    RequestState,
    SchedulingContext,
    TurnJob,
)
from appliance.vocabulary import (
    Command,
    KvShape,
    ModelName,
    ModelSpec,
    Preempt,
    RunPrefill,
    RunTurn,
)

SWAP_AMORTIZATION: Final = 4
"""A model for which KV was moved computes this many times as long as the moves took before another
one runs, if it has work: so KV moves for a fifth of the time at most, whatever a policy says."""
EMBEDDED_TOKENS: Final = 2048
"""Of prompts that are embedded together, at most: about what an engine computes in a step."""


class Dispatcher:
    """Gives instances their jobs, and ends turns whose time is over."""

    def __init__(
        self,
        context: SchedulingContext,
        models: Mapping[ModelName, ModelSpec],
        requests: RequestBook,
        cluster: Cluster,
        residency: Residency,
        host_room: HostRoom,
        device_room: DeviceRoom,
        failed: Collection[ModelName],
    ) -> None:
        """Models in `failed` are not built."""
        self.prefetcher = Prefetcher(context, cluster, residency, failed)
        self.preemptions: dict[ModelName, int] = dict.fromkeys(models, 0)
        """Requests that had to stop in mid-generation for another model or a prompt."""
        self._context = context
        self._models = models
        self._requests = requests
        self._cluster = cluster
        self._residency = residency
        self._host_room = host_room
        self._device_room = device_room

    def advance(self, instance: InstanceState) -> None:
        """Give a free instance its next job."""
        if not instance.serves or instance.job is not None:
            return
        ordered = len(self._context.out)
        self.prefetcher.evict_as_requested(instance)
        if not self._go_on(instance) and not self._start_next(instance):
            if instance.idle:
                self.prefetcher.preload(instance, None)
            self.prefetcher.build_next(instance)
        if len(self._context.out) > ordered:
            instance.view = None

    def join(self, instance: InstanceState, request: RequestState) -> None:
        """The request decodes on the instance from now on."""
        request.instance = instance.id
        instance.join_batch(request)
        self.joined(instance, request)

    def joined(self, instance: InstanceState, request: RequestState) -> None:
        """The request joined the instance: if a turn runs, ask how long it may go on. One that is
        ended for more of its own model goes on with it for the rest of its quota."""
        turn = instance.job
        if not isinstance(turn, TurnJob) or turn.preempting or not turn.requests:
            return
        if self._host_room.waits(request) or not self._device_room.admits(instance, request):
            return
        context = self._context
        more = context.policy.preempt(context.now, self._cluster.view(instance), context.costs)
        if more <= 0 and request.model == turn.model:
            turn.cut_at = context.now
            if not turn.prompts:  # else it was for the prompt, and of no round
                turn.resume_seconds = turn.quota_seconds
        else:
            turn.last_at = min(turn.last_at, max(context.now + more, instance.stays_until))
            turn.cut_at = min(turn.cut_at, turn.last_at)
        self.cut(instance)

    def room_came(self, instance: InstanceState) -> None:
        """Requests ended on the instance during a turn. If the turn left requests out for lack of
        room, it is ended for them as soon as one has room again, and goes on with it. Else the
        first prompt that waits for room joins, if it has some. O(requests of the model there)."""
        turn = instance.job
        if not isinstance(turn, TurnJob) or turn.preempting or not turn.requests:
            return
        if turn.lacks_room:
            if self._device_room.has_room_again(instance, turn.model):
                turn.cut_at = self._context.now
                turn.resume_seconds = turn.quota_seconds
                self.cut(instance)
        elif instance.kv_short:
            instance.kv_short, instance.view = False, None
            first = self._first_in_line(instance)
            if first is not None:
                self.joined(instance, first)

    def pause(self, instance: InstanceState) -> None:
        """End the turn, and have the rest of its quota run with the requests left then. A turn with
        a prompt goes on: it is over with the prompt."""
        turn = instance.job
        assert isinstance(turn, TurnJob), "a request decodes"
        if turn.preempting or turn.prompts:
            return
        turn.cut_at = self._context.now
        turn.resume_seconds = turn.quota_seconds
        self.cut(instance)

    def dismiss(self, instance: InstanceState, model: ModelName) -> None:
        """Have the model leave the device when its job is over; a turn of its own is ended."""
        instance.evict_requested[model] = None
        turn = instance.job
        if isinstance(turn, TurnJob) and turn.model == model:
            turn.cut_at = self._context.now
            self.cut(instance)

    def cut(self, instance: InstanceState) -> None:
        """End the turn if its time is over."""
        turn = instance.job
        if isinstance(turn, TurnJob) and not turn.preempting and turn.cut_at <= self._context.now:
            turn.preempting = True
            self._context.out.append(Preempt(instance=instance.id, turn=turn.turn))

    def next_cut(self) -> float:
        """When the next turn is to be ended; infinity if none is."""
        jobs = (instance.job for instance in self._cluster.instances.values())
        turns = (job for job in jobs if isinstance(job, TurnJob) and not job.preempting)
        return min((turn.cut_at for turn in turns), default=math.inf)

    # --- what comes next -------------------------------------------------------------------------

    def _go_on(self, instance: InstanceState) -> bool:
        """Have the model go on for which KV was moved, until that was worth it: prompts of it, then
        turns. False if its time is over, or it has nothing to do."""
        model, left = instance.current_model, instance.stays_until - self._context.now
        if left <= 0 or model is None:
            return False
        request = self._device_room.first_admitted(instance, model)
        if request is not None and self._start_prompt(instance, request):
            return True
        if not instance.runnable(model):
            return False
        if instance.resumes:
            return self._start_turn(instance)
        turn = PlannedTurn(model=model, quota_seconds=left)
        self._run_turn(instance, turn, self._limits(instance, model), ())
        return True

    def _start_next(self, instance: InstanceState) -> bool:
        """A prompt or a turn, as the policy says; False if nothing can run."""
        if not instance.groups:
            return self._start_turn(instance)
        self._order_groups(instance)
        if not instance.has_runnable:
            return self._start_prefill(instance)
        if self._phase(instance) is Phase.PREFILL:
            return self._start_prefill(instance) or self._start_turn(instance)
        return self._start_turn(instance)

    def _phase(self, instance: InstanceState) -> Phase:
        context = self._context
        return context.policy.phase(context.now, self._cluster.view(instance), context.costs)

    def _order_groups(self, instance: InstanceState) -> None:
        """Put the groups in the order in which they are served."""
        if len(instance.groups) < 2:
            return
        context = self._context
        as_they_are = range(len(instance.groups))
        order = context.policy.admit(context.now, self._cluster.view(instance), context.costs)
        numbers = list(dict.fromkeys([*order, *as_they_are]))
        if numbers != list(as_they_are):
            instance.groups = [instance.groups[number] for number in numbers]
            instance.view = None

    def _limits(self, instance: InstanceState, model: ModelName) -> BatchLimits:
        context = self._context
        return context.policy.batch(context.now, model, self._cluster.view(instance), context.costs)

    # --- prompts ---------------------------------------------------------------------------------

    def _start_prefill(self, instance: InstanceState) -> bool:
        """Prefill the request that is first in line; False if it has to wait."""
        request = self._first_in_line(instance)
        return request is not None and self._start_prompt(instance, request)

    def _start_prompt(self, instance: InstanceState, request: RequestState) -> bool:
        """Prefill the request; False if it has to wait for room in the host tier."""
        model = request.model
        if not instance.engines[model].built:
            self.prefetcher.build(instance, model)
            return True
        # What is only embedded has no KV afterwards, so none that could have to move.
        embedded = request.spec.max_tokens == 0
        if not embedded and not self._host_room.reserve(request, instance.engines[model].shape):
            return False
        limits = self._limits(instance, model)
        alone = self._context.lacks_prompt(model)
        chunk = 0 if alone or not instance.runnable(model) else limits.chunk_tokens
        others = [] if alone else self._with_others(instance, request, limits, chunk)
        prompts = [request, *others]
        if chunk:
            turn = PlannedTurn(model=model, quota_seconds=self._context.costs.step_seconds(model))
            self._run_turn(instance, turn, limits, prompts)
        else:
            self._run_whole(instance, prompts)
        return True

    def _with_others(
        self, instance: InstanceState, first: RequestState, limits: BatchLimits, chunk: int
    ) -> list[RequestState]:
        """The prompts behind one in its group that are computed in the same step, a chunk if that
        is not 0. One whose weights are not here yet is computed alone, as it begins before all of
        them are."""
        embedded = first.spec.max_tokens == 0
        if not embedded and instance.engines[first.model].stage is not EngineStage.LOADED:
            return []
        tokens = EMBEDDED_TOKENS if embedded else limits.prompt_tokens
        places = min(self._models[first.model].max_batch, limits.requests)
        if chunk:  # one place of the engine's batch is left to those that decode
            tokens, places = min(tokens, chunk), places - 1
        shape = instance.engines[first.model].shape
        others: list[RequestState] = []
        for request in self._device_room.step_with(instance, first, tokens, places - 1):
            if not embedded and not self._host_room.reserve_also(request, shape):
                break
            others.append(request)
        return others

    def _run_prefill(self, instance: InstanceState, request: RequestState) -> None:
        """The prompt alone, whole."""
        model, engine = request.model, instance.engines[request.model]
        blocks = engine.shape.prompt_blocks(request.tokens, request.spec.images)
        short = blocks - self._residency.room_blocks(instance, model)
        if short > 0:
            leaving = self._residency.swap_out_youngest(instance, model, short)
            self._context.out.append(leaving)
        warm = engine.stage is EngineStage.LOADED
        switches = model != instance.current_model
        job = PrefillJob(
            model, request.id, prompt_tokens=request.tokens, warm=warm, switches=switches
        )
        wish = engine.shape.snapshot_blocks
        grant = self._residency.grant(instance, model, blocks, wish, self._context.now)
        self._take_prompt(instance, request)
        self._begin(instance, job, grant.commands)
        self._context.out.append(
            RunPrefill(
                instance=instance.id, model=model, request=request.id, kv_slabs=grant.kv_slabs
            )
        )

    def _run_whole(self, instance: InstanceState, prompts: Sequence[RequestState]) -> None:
        """Prompts in the same steps, whole: a turn of nothing else. One alone is no turn, so that
        its time tells what prompts cost."""
        if len(prompts) == 1:
            self._run_prefill(instance, prompts[0])
            return
        context, model = self._context, prompts[0].model
        engine = instance.engines[model]
        tokens = sum([prompt.tokens for prompt in prompts])
        blocks = _blocks_of(prompts, engine.shape)
        cold = not engine.on_device
        wish = engine.shape.snapshot_blocks * len(prompts)
        grant = self._residency.grant(instance, model, blocks, wish, context.now)
        instance.turns += 1
        for prompt in prompts:
            self._take_prompt(instance, prompt)
        names = tuple([prompt.id for prompt in prompts])
        job = TurnJob(
            model=model,
            turn=instance.turns,
            requests=(),
            prompts=names,
            prompt_tokens=tokens,
            ordered=context.now,
            switches=model != instance.current_model,
            cold=cold,
            limit=0,
            left_out=0,
            kv_tokens=0,
            quota_seconds=0.0,
        )
        self._begin(instance, job, grant.commands)
        context.out.append(
            RunTurn(
                instance=instance.id,
                model=model,
                turn=instance.turns,
                requests=(),
                quota_seconds=0.0,
                kv_slabs=grant.kv_slabs,
                prompts=names,
                chunk_tokens=tokens,
            )
        )

    def _take_prompt(self, instance: InstanceState, request: RequestState) -> None:
        """The request leaves the queue: it is computed now."""
        instance.leave(request)
        request.to_stage(Stage.PREFILLING)
        request.kv_instance = instance.id
        instance.engines[request.model].residents[request.id] = request
        instance.prefills_since_turn += 1

    def _first_in_line(self, instance: InstanceState) -> RequestState | None:
        """The first request of the first group whose KV has room; None if none has.

        The next request for room in the host tier goes before all others here, or those that got
        in front of it since would block each other. Only an interactive request goes before batch
        work that waits so: it is next for room then.
        """
        first = self._device_room.first_admitted(instance)
        longest = self._host_room.next()
        if longest is None or longest.instance != instance.id:
            return first
        if first is not None and first.interactive and not longest.interactive:
            return first
        return longest if self._device_room.admits(instance, longest) else first

    # --- turns -----------------------------------------------------------------------------------

    def _start_turn(self, instance: InstanceState) -> bool:
        """Run the next turn of the round, or of a new round; False if nothing can run."""
        if not instance.has_runnable:
            return False
        resumed, instance.resumes = instance.resumes, False
        planned = self._next_turn(instance)
        if not instance.engines[planned.model].built:
            self.prefetcher.build(instance, planned.model)
            return True
        limits = self._limits(instance, planned.model)
        self._run_turn(instance, planned, limits, ())
        if resumed:
            self._limit_resumed(instance)
        return True

    def _limit_resumed(self, instance: InstanceState) -> None:
        """Ask how long a resumed turn may go on: requests for other models that came since its
        end was decided were not considered. (Those for its own model that can join have joined.)"""
        turn, context = instance.job, self._context
        if isinstance(turn, TurnJob) and (instance.groups or len(instance.batches) > 1):
            more = context.policy.preempt(context.now, self._cluster.view(instance), context.costs)
            if more > 0:
                turn.last_at = turn.cut_at = context.now + more

    def _run_turn(
        self,
        instance: InstanceState,
        planned: PlannedTurn,
        limits: BatchLimits,
        prompts: Sequence[RequestState],
    ) -> None:
        """A turn of the model, with prompts in it if some are given; these alone if no KV of a
        request fits next to theirs."""
        context, model = self._context, planned.model
        engine = instance.engines[model]
        # Prompts take places of the engine's batch, and last for a step per chunk.
        limit = min(self._models[model].max_batch - len(prompts), limits.requests)
        blocks = _blocks_of(prompts, engine.shape)
        selection = self._device_room.select(instance, model, limit, blocks)
        batch = selection.batch
        if prompts and not batch:
            self._run_whole(instance, prompts)
            return
        if selection.leaving:
            leaving = self._residency.swap_out(instance, model, selection.leaving)
            context.out.append(leaving)
        kv_tokens = sum([request.tokens for request in batch])
        step = context.costs.step_seconds(model, len(batch), kv_tokens)
        horizon = int(planned.quota_seconds / step)
        prompt_tokens = sum([prompt.tokens for prompt in prompts])
        if prompts:
            horizon = max(horizon, -(-prompt_tokens // limits.chunk_tokens))
        growth = _growth(batch, engine.shape, horizon)
        growth += engine.shape.snapshot_blocks * (len(batch) + len(prompts))
        cold = not engine.on_device
        grant = self._residency.grant(instance, model, selection.blocks, growth, context.now)
        instance.turns += 1
        instance.prefills_since_turn = 0
        names = tuple([request.id for request in batch])
        for prompt in prompts:
            self._take_prompt(instance, prompt)
        job = TurnJob(
            model=model,
            turn=instance.turns,
            requests=names,
            prompts=tuple([prompt.id for prompt in prompts]),
            prompt_tokens=prompt_tokens,
            ordered=context.now,
            switches=model != instance.current_model,
            cold=cold,
            limit=limit,
            left_out=selection.left_out,
            kv_tokens=kv_tokens,
            quota_seconds=planned.quota_seconds,
            lacks_room=selection.lacks_room,
        )
        self._begin(instance, job, grant.commands)
        self._order_turn(instance, job, batch, grant.kv_slabs, limits.chunk_tokens)

    def _order_turn(
        self,
        instance: InstanceState,
        job: TurnJob,
        batch: Sequence[RequestState],
        kv_slabs: int,
        chunk_tokens: int,
    ) -> None:
        """The commands of a turn: KV that is on the host comes in, then the steps."""
        context = self._context
        shape = instance.engines[job.model].shape
        arriving = [request for request in batch if request.kv is KvPlace.HOST]
        if arriving:
            context.out.append(self._residency.swap_in(instance, job.model, arriving, kv_slabs))
        for request in batch:
            self._host_room.extend(request, shape)
            request.to_stage(Stage.RUNNING)
            request.ran = context.now
        context.out.append(
            RunTurn(
                instance=instance.id,
                model=job.model,
                turn=job.turn,
                requests=job.requests,
                quota_seconds=job.quota_seconds,
                kv_slabs=kv_slabs,
                prompts=job.prompts,
                chunk_tokens=chunk_tokens if job.prompts else 0,
            )
        )

    def _next_turn(self, instance: InstanceState) -> PlannedTurn:
        """The next turn with something to run; a round is planned when the last one is over."""
        context = self._context
        while True:
            while instance.work and instance.work[0].firm:
                turn = instance.work.popleft()
                if instance.runnable(turn.model):
                    return turn
            view = self._cluster.view(instance)
            instance.work.clear()
            instance.work.extend(context.policy.round(context.now, view, context.costs))

    # --- both ------------------------------------------------------------------------------------

    def _begin(
        self,
        instance: InstanceState,
        job: PrefillJob | TurnJob,
        preparation: Sequence[Command],
    ) -> None:
        """A job is out: order what prepares it, and a prefetch to run during it."""
        if job.switches if isinstance(job, TurnJob) and job.requests else True:
            for name in instance.suspended:
                if name in self._requests.live:
                    self.preemptions[self._requests.live[name].model] += 1
        instance.suspended = ()
        if job.switches:
            instance.stays_until = -math.inf  # said anew when the job is over
        instance.current_model = job.model
        instance.job = job
        instance.view = None
        self._context.out += preparation
        self.prefetcher.prefetch(instance, job.model)


def _growth(batch: Sequence[RequestState], shape: KvShape, steps: int) -> int:
    """Blocks that a batch takes more after so many steps, if no request ends before its bound."""
    return sum(
        shape.blocks(request.tokens + min(request.remaining_tokens, steps))
        - shape.blocks(request.tokens)
        for request in batch
    )


def _blocks_of(prompts: Sequence[RequestState], shape: KvShape) -> int:
    """Blocks of prompts while they are computed."""
    return sum([shape.prompt_blocks(prompt.tokens, prompt.spec.images) for prompt in prompts])
