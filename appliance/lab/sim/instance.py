"""An instance on the virtual clock: carries commands out in order, as a worker does.

    work():   the next command of the queue, unless a job is under way or it has to wait
    meanwhile: loads, and KV on its way out or in (`appliance.lab.sim.instance_memory`)
    waits:    a load, a prompt or a swap inwards for slabs that KV on its way out still holds;
              a turn for its model's weights and KV; a prompt for its model's weights layer by layer

What it tells is exact: blocks, slabs and bytes are counted as a worker's pool counts them. A
command that asks for what cannot be raises `LabError`.

Simplified: building takes no time, nor does the first fill of a master image (the box is ready when
the run begins); there is no prefix cache; slabs that KV takes or gives back are mapped or unmapped
before the next job of its model, in a turn before the next stretch of steps, as many as there are
more or fewer by then; during a turn, KV that grows within its cap does not wait for slabs that
other models' KV on its way out still holds; a transfer that ends during a turn is noticed at once,
not at the next step.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import compress
from operator import not_

from appliance.errors import LabError
from appliance.lab.hardware import Box, ModelProfile
from appliance.lab.noise import EXACT, Deviation, Pace
from appliance.lab.sim.closed_form import elapsed, steps_until
from appliance.lab.sim.engine import SimulatedEngine
from appliance.lab.sim.event_queue import Agenda, Rank
from appliance.lab.sim.instance_memory import Holdings
from appliance.lab.sim.jobs import (
    Activation,
    ChunkedPrompt,
    Mapped,
    SimulatedPrefill,
    SimulatedTurn,
)
from appliance.lab.sim.known_requests import KnownRequests
from appliance.lab.sim.recorder import ComputeSpan, Life, ModelSwitch, Recorder
from appliance.lab.sim.reports import Report, Reports
from appliance.lab.sim.topology import Wiring
from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    Event,
    EvictModel,
    InstanceId,
    InstanceUp,
    KvMoved,
    LoadModel,
    ModelLoaded,
    ModelName,
    MoveKv,
    Preempt,
    PrefetchModel,
    Release,
    RequestId,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TrimKv,
    TurnEnd,
)

MAX_STEPS = sys.maxsize
"""Of a turn without decoding: its prompts end it."""


class SimulatedInstance:
    """`order` takes a command, `work` goes on; `report` hears what happened.

    `lives` are the truths about the requests that have not ended, shared by all instances.
    """

    def __init__(
        self,
        number: InstanceId,
        box: Box,
        profiles: Mapping[ModelName, ModelProfile],
        lives: Mapping[RequestId, Life],
        agenda: Agenda,
        recorder: Recorder,
        wiring: Wiring,
        report: Report,
        deviation: Deviation = EXACT,
    ) -> None:
        self.number = number
        self._box = box
        self._lives = lives
        self._known = KnownRequests(lives)
        self._agenda = agenda
        self._recorder = recorder
        self._report = report
        self._pace = Pace(deviation, number)
        self.holdings = Holdings(number, box, profiles, recorder, wiring, self._notice)
        self._engines = self.holdings.engines
        self._reports = Reports(number, self._engines, report)
        self._queue: deque[Command] = deque()
        self._job: SimulatedPrefill | SimulatedTurn | Activation | Mapped | StoreWeights | None = (
            None
        )
        self._unnoticed: list[Event] = []
        """Transfers that ended while a prompt was computed: a worker notices after it."""
        self._preempted = 0
        self._current: ModelName | None = None
        self._active: ModelName | None = None
        """Whose engine was activated last."""
        self._ready_since = 0.0
        """Since when nothing is computed, or was asked for."""

    def start(self) -> None:
        """The worker connects."""
        self._report(InstanceUp(instance=self.number, slabs=self._box.slabs))

    def order(self, command: Command) -> None:
        """Take a command; `Preempt` and `Release` take effect at the next step."""
        match command:
            case Preempt():
                self._preempted = max(self._preempted, command.turn)
                if isinstance(self._job, SimulatedTurn) and self._is_preempted(self._job):
                    self._preempt(self._job)
            case Release():
                self._release(command)
            case _:
                self._known.take_in(command)
                if self._job is None and not self._queue:
                    self._ready_since = self._agenda.now
                self._queue.append(command)

    def work(self) -> None:
        """Carry out what can be carried out now."""
        while self._job is None and self._queue:
            command = self._queue.popleft()
            if not self._carry_out(command):
                self._queue.appendleft(command)
                return

    def record_steps(self, until: float) -> None:
        """Record the tokens of a turn that is under way when the run ends, at `until`."""
        if isinstance(turn := self._job, SimulatedTurn):
            turn.record(self._recorder, turn.steps_by(until))

    def _release(self, command: Release) -> None:
        self._known.released.add(command.request)
        turn = self._job
        if isinstance(turn, SimulatedTurn) and turn.computes(command.request):
            self._cut(turn)  # it leaves at the next step, with its blocks
        elif command.model in self._engines:
            self._engines[command.model].drop(command.request)

    def _carry_out(self, command: Command) -> bool:
        """Begin with a command; False if it has to wait for a transfer to end."""
        match command:
            case RunTurn() | RunPrefill() if self._lacks_activation(command.model):
                return self._activate(command.model)
            case RunTurn():
                return self._begin_turn(command)
            case RunPrefill():
                return self._begin_prefill(command)
            case MoveKv(direction=Direction.OUT):
                return self.holdings.move_out(command)
            case MoveKv():
                return self.holdings.move_in(command, self._known.find)
            case TrimKv():
                return True  # nothing unused is kept
            case LoadModel() | PrefetchModel():
                return self._load(command)
            case EvictModel():
                return self._evict(command)
            case StoreWeights():
                return self._store(command)
            case BuildModel():
                return self._build(command)
        raise LabError(f"not a command for an instance: {command!r}")

    # --- engines ---------------------------------------------------------------------------------

    def _build(self, command: BuildModel) -> bool:
        self.holdings.build(command.model)
        self._reports.built(command.model, self._box.slab_bytes)
        return True

    def _store(self, command: StoreWeights) -> bool:
        engine = self._engines[command.model]
        if engine.mapped:
            raise LabError(f"{command.model} gets another image while it is loaded")
        first, engine.in_host = engine.in_host is None, bool(command.host_offsets)
        if not command.fill or first:
            self._reports.stored(command.model)
            return True
        self._job = command
        self.holdings.fill(command.model, lambda: self._end_fill(command))
        return True

    def _end_fill(self, command: StoreWeights) -> None:
        self._job = None
        self._reports.stored(command.model)
        self.work()

    def _lacks_activation(self, model: ModelName) -> bool:
        """Whether the system has to start the model's engine, now that its weights are ordered."""
        starts = self._box.activation_seconds > 0 and model != self._active
        return starts and self._engines[model].mapped

    def _activate(self, model: ModelName) -> bool:
        """Wait for activation once the weights are there; the command is tried again after that."""
        if self._engines[model].load is None:
            self._job = Activation(model)
            end = self._agenda.now + self._box.activation_seconds
            self._agenda.at(end, Rank.JOB, lambda: self._end_activation(model))
        return False

    def _end_activation(self, model: ModelName) -> None:
        self._job, self._active = None, model
        self.work()

    def _load(self, command: LoadModel | PrefetchModel) -> bool:
        """Map the slabs and have the weights come."""
        load = partial(
            self.holdings.load, command.model, prefetched=isinstance(command, PrefetchModel)
        )
        seconds = self._box.gpu.mapping_seconds + self._mapping_weights(command.model)
        if not seconds:
            return load()
        if not self.holdings.has_room_for(command.model):
            return False
        self._map(command.model, seconds, load)
        return True

    def _evict(self, command: EvictModel) -> bool:
        self.holdings.evict(command.model)
        if self._active == command.model:
            self._active = None
        if seconds := self._mapping_weights(command.model):
            self._map(command.model, seconds, lambda: None)
        return True

    def _mapping_weights(self, model: ModelName) -> float:
        return self._box.gpu.map_seconds_per_slab * self._engines[model].weight_slabs

    def _map(self, model: ModelName, seconds: float, then: Callable[[], object]) -> None:
        """Do nothing else for so long."""

        def end() -> None:
            self._job = None
            then()
            self.work()

        self._job = Mapped(model)
        self._agenda.at(self._agenda.now + seconds, Rank.JOB, end)

    def _mapping_kv(self, engine: SimulatedEngine) -> float:
        """The time for slabs of KV that were not mapped, or are not any more."""
        return self._box.gpu.map_seconds_per_slab * engine.take_remapped()

    # --- transfers -------------------------------------------------------------------------------

    def _notice(self, event: ModelLoaded | KvMoved) -> None:
        """A transfer is over: what waits for it may go on, but not while a prompt is computed."""
        job = self._job
        if isinstance(job, SimulatedPrefill):
            if isinstance(event, ModelLoaded) and event.model == job.command.model:
                self._complete_weights(job)
            self._unnoticed.append(event)
            return
        self._report(event)
        if isinstance(job, SimulatedTurn) and job.waits_since is not None:
            job.done_seconds += self._agenda.now - job.waits_since
            job.waits_since = None
            self._next_stretch(job)
        self.work()

    def _complete_weights(self, job: SimulatedPrefill) -> None:
        """The weights of the last layer came last: that layer is still to be computed."""
        layers = self._engines[job.command.model].profile.layers
        job.not_before = self._agenda.now + job.seconds / layers
        if job.lacks_weights:
            self._agenda.at(job.not_before, Rank.JOB, lambda: self._end_prefill(job))

    # --- jobs ------------------------------------------------------------------------------------

    def _begin_prefill(self, command: RunPrefill) -> bool:
        engine, life = self._engines[command.model], self._known.find(command.request)
        if life is None:
            self._reports.prompt_done(command.model, command.request, 0.0)
            return True
        if not engine.mapped:
            raise LabError(f"a prompt for {command.model} without its weights")
        tokens = life.prompt_tokens + life.produced
        blocks = engine.shape.prompt_blocks(tokens)
        if not self.holdings.can_grow(command.model, blocks, command.kv_slabs):
            if self.holdings.moves_out:
                return False
            self._reports.prompt_deferred(command.model, life.id)
            return True
        engine.hold(life.id, blocks)
        seconds = engine.profile.prefill_seconds(tokens) * self._pace.prefill()
        seconds += self._mapping_kv(engine)
        if engine.load is not None:
            seconds += self._box.interference_seconds
        job = self._job = SimulatedPrefill(command, life, self._agenda.now, seconds)
        self._agenda.at(job.began + seconds, Rank.JOB, lambda: self._compute_ended(job))
        return True

    def _compute_ended(self, job: SimulatedPrefill) -> None:
        """Every layer could be computed by now, if its weights were there in time."""
        engine = self._engines[job.command.model]
        if engine.load is not None:
            job.lacks_weights = True
        elif self._agenda.now < job.not_before:
            self._agenda.at(job.not_before, Rank.JOB, lambda: self._end_prefill(job))
        else:
            self._end_prefill(job)

    def _end_prefill(self, job: SimulatedPrefill) -> None:
        command, life, now = job.command, job.life, self._agenda.now
        engine = self._engines[command.model]
        self._note_switch(command.model, now - self._ready_since - job.seconds)
        self._recorder.computed(
            ComputeSpan(self.number, command.model, job.began, now, 0, 0, 1), job.seconds
        )
        self._recorder.reach.prompt(engine.profile, life.kv_tokens + 1, job.seconds)
        self._job, self._ready_since = None, now
        if command.request in self._known.released:
            engine.drop(life.id)
        else:
            self._recorder.produced(life, now, 0.0, 0.0, 1)
            self._reports.tokens(command.model, [(life, 1)])
            engine.keep(life.id, life.kv_tokens if life.remaining_tokens else 0)
        # Its own load is reported before it, whatever else ended meanwhile after it.
        noticed, self._unnoticed = self._unnoticed, []
        own = [isinstance(e, ModelLoaded) and e.model == life.model for e in noticed]
        for event in compress(noticed, own):
            self._report(event)
        self._reports.prompt_done(command.model, command.request, now - job.began)
        for event in compress(noticed, map(not_, own)):
            self._report(event)
        self.work()

    def _begin_turn(self, command: RunTurn) -> bool:
        engine = self._engines[command.model]
        if not engine.mapped:
            raise LabError(f"a turn of {command.model} without its weights")
        if engine.load is not None or engine.arriving:
            return False
        now = self._agenda.now
        batch = [life for name in command.requests if (life := self._known.find(name)) is not None]
        for life in batch:
            if engine.blocks.get(life.id) != engine.shape.blocks(life.kv_tokens):
                raise LabError(f"a turn for {life.id}, whose KV is elsewhere")
        waiting = deque(command.prompts)
        while waiting and self._known.find(waiting[0]) is None:
            self._reports.prompt_done(command.model, waiting.popleft(), 0.0)
        if waiting and self.holdings.moves_out and not self._fits_prompt(command, waiting[0]):
            return False
        self._note_switch(command.model, now - self._ready_since)
        turn = SimulatedTurn(command, batch, waiting, now, self._pace.turn(), largest=len(batch))
        self._job = turn
        self._next_stretch(turn)
        return True

    def _fits_prompt(self, command: RunTurn, request: RequestId) -> bool:
        life, shape = self._lives[request], self._engines[command.model].shape
        blocks = shape.prompt_blocks(life.prompt_tokens + life.produced)
        return self.holdings.can_grow(command.model, blocks, command.kv_slabs)

    def _begin_prompts(self, turn: SimulatedTurn) -> None:
        """Have prompts begin while those that have leave room in the next chunk."""
        command, engine = turn.command, self._engines[turn.command.model]
        while turn.waiting and sum([p.left for p in turn.prompts]) < command.chunk_tokens:
            request = turn.waiting.popleft()
            life = self._known.find(request)
            if life is None:
                self._reports.prompt_done(command.model, request, 0.0)
            elif not self._fits_prompt(command, request):
                self._reports.prompt_deferred(command.model, request)
            else:
                tokens = life.prompt_tokens + life.produced
                engine.hold(request, engine.shape.prompt_blocks(tokens))
                self._recorder.reach.prompt(engine.profile, tokens, 0.0)
                turn.prompts.append(ChunkedPrompt(life, tokens, self._agenda.now))

    def _next_stretch(self, turn: SimulatedTurn) -> None:
        """Plan steps until a request finishes, a prompt is done, the quota is over or the slabs are
        full."""
        command = turn.command
        if turn.end is None and not self._is_preempted(turn):
            self._begin_prompts(turn)
        engine = self._engines[command.model]
        room = turn.room(engine) if turn.batch else MAX_STEPS
        if not room and (turn.prompts or turn.end is None):
            if engine.leaving:
                turn.waits_since = self._agenda.now
                return
            if not turn.done_steps:
                raise LabError(f"turn {command.turn} has no room for a step")
            # The prompts hold all the blocks that they need.
            turn.end, turn.batch, room = TurnEnd.KV_FULL, [], MAX_STEPS
        if not turn.prompts and (turn.end is not None or not turn.batch):
            self._end_turn(turn, turn.end or TurnEnd.DRAINED)
            return
        mapping = self._mapping_kv(engine)
        turn.done_seconds += mapping
        turn.time_steps(engine.profile, self._agenda.now + mapping)
        if any(turn.computes(request) for request in self._known.released):
            turn.steps = 1  # it leaves with this one
        elif turn.prompts:
            turn.steps = min(room, max(1, turn.prompts[0].left // command.chunk_tokens))
        elif self._is_preempted(turn):
            turn.steps = 1
        else:
            left = command.quota_seconds - turn.done_seconds
            turn.steps = min(room, steps_until(left, turn.first, turn.growth))
        if self._box.report_seconds < math.inf:
            report = steps_until(self._box.report_seconds, turn.first, turn.growth)
            turn.steps = min(turn.steps, report)
        self._plan_end(turn)

    def _plan_end(self, turn: SimulatedTurn) -> None:
        if turn.entry is not None:
            turn.entry.call_off()
        end = turn.start + elapsed(turn.first, turn.growth, turn.steps)
        end = max(end, self._agenda.now)  # the last bit of a sum may be lost
        turn.entry = self._agenda.at(end, Rank.JOB, lambda: self._end_stretch(turn))

    def _preempt(self, turn: SimulatedTurn) -> None:
        """Have the turn end with this step; prompts that have begun are computed to their end."""
        if not turn.prompts:
            self._cut(turn)
        elif 0 < self._step_of(turn) < turn.steps:
            turn.end = turn.end or TurnEnd.PREEMPTED

    def _cut(self, turn: SimulatedTurn) -> None:
        """Have the stretch end with the step that is being computed."""
        steps = self._step_of(turn)
        if 0 < steps < turn.steps:
            turn.steps = steps
            self._plan_end(turn)

    def _step_of(self, turn: SimulatedTurn) -> int:
        """Which step of the stretch is being computed, from 1; 0 if none is."""
        if turn.waits_since is not None:
            return 0
        return steps_until(self._agenda.now - turn.start, turn.first, turn.growth)

    def _end_stretch(self, turn: SimulatedTurn) -> None:
        engine, command = self._engines[turn.command.model], turn.command
        turn.entry = None
        turn.done_steps += turn.steps
        seconds = elapsed(turn.first, turn.growth, turn.steps)
        turn.done_seconds += seconds
        batch = len(turn.batch)
        kv_tokens = turn.kv_tokens + batch * turn.steps
        self._recorder.reach.steps(engine.profile, batch, kv_tokens, seconds)
        turn.record(self._recorder, turn.steps)
        computed = self._compute_prompts(turn) if turn.prompts else []
        tokens = [(life, turn.steps) for life in turn.batch]
        tokens += [(p.life, 1) for p in computed if p.life.id not in self._known.released]
        if tokens:
            self._reports.tokens(command.model, tokens)
        going_on = []
        for life in turn.batch:
            if life.remaining_tokens and life.id not in self._known.released:
                engine.hold(life.id, engine.shape.blocks(life.kv_tokens))
                going_on.append(life)
            else:
                engine.drop(life.id)
        turn.batch = going_on
        for prompt in computed:
            goes_on = prompt.life.remaining_tokens and prompt.life.id not in self._known.released
            engine.keep(prompt.life.id, prompt.life.kv_tokens if goes_on else 0)
            self._reports.prompt_done(
                command.model, prompt.life.id, self._agenda.now - prompt.began
            )
        if turn.end is None and (turn.batch or turn.prompts or turn.waiting):
            if self._is_preempted(turn):
                turn.end = TurnEnd.PREEMPTED
            elif turn.done_seconds >= command.quota_seconds and not (turn.prompts or turn.waiting):
                turn.end = TurnEnd.QUOTA
        self._next_stretch(turn)

    def _compute_prompts(self, turn: SimulatedTurn) -> list[ChunkedPrompt]:
        """Take the stretch's chunks off the prompts; those that are over, computed or released."""
        ahead = turn.steps - 1
        turn.prompts[0].done += ahead * turn.command.chunk_tokens
        for prompt, tokens in turn.next_chunk():
            prompt.done += tokens
        over = [p for p in turn.prompts if not p.left or p.life.id in self._known.released]
        turn.prompts = [p for p in turn.prompts if p.left and p.life.id not in self._known.released]
        for prompt in over:
            if prompt.life.id not in self._known.released:
                self._recorder.produced(prompt.life, self._agenda.now, 0.0, 0.0, 1)
                turn.done_prompts += 1
        return over

    def _is_preempted(self, turn: SimulatedTurn) -> bool:
        return turn.command.turn <= self._preempted

    def _end_turn(self, turn: SimulatedTurn, reason: TurnEnd) -> None:
        command = turn.command
        self._job, self._ready_since = None, self._agenda.now
        for request in turn.waiting:
            self._reports.prompt_deferred(command.model, request)
        if turn.done_steps:
            self._recorder.computed(turn.span(self.number, self._agenda.now), turn.done_seconds)
        self._reports.turn_ended(turn, reason)
        self.work()

    def _note_switch(self, model: ModelName, waited: float) -> None:
        if model != self._current:
            at = self._agenda.now
            self._recorder.switches.append(ModelSwitch(self.number, model, at, waited))
            self._current = model
