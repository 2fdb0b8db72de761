"""What the machine remembers: requests, prefill groups, engines, instances. Mutable, its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from appliance.memory.ledger import DeviceLedger
from appliance.scheduling.lifecycle import (
    ENGINES,
    KV_PLACES,
    STAGES,
    EngineStage,
    KvPlace,
    Stage,
    move,
)
from appliance.scheduling.policy_api import (
    BatchView,
    Costs,
    DecodingView,
    GroupView,
    InstanceView,
    LocalClock,
    Placement,
    PlannedTurn,
    Policy,
    TurnView,
)
from appliance.vocabulary import (
    Command,
    InstanceClass,
    InstanceId,
    KvShape,
    ModelName,
    RequestClass,
    RequestId,
    RequestSpec,
)


@dataclass(slots=True)
class SchedulingContext:
    """What the parts of the machine share: the time of the event, the policy, the commands."""

    policy: Policy
    costs: Costs
    lacks_prompt: Callable[[ModelName], bool]
    """Whether the next prompt of a model is computed alone, whatever the policy says."""
    now: float = 0.0
    clock: LocalClock = field(default_factory=LocalClock)
    """What the policy was last given."""
    out: list[Command] = field(default_factory=list)
    """The commands that follow from the event, in order."""


@dataclass(slots=True)
class RequestState:
    """A request that has not ended."""

    spec: RequestSpec
    arrived: float
    """When it came."""
    progressed: float
    """When it last came nearer to its end: arrival, a token."""
    accepted: bool = False
    """Whether an instance took it on: it is not refused any more."""
    stage: Stage = Stage.UNPLACED
    kv: KvPlace = KvPlace.NONE
    instance: InstanceId | None = None
    """Where it is queued, prefilled or decoded."""
    kv_instance: InstanceId | None = None
    """Whose device holds, sends or receives its KV."""
    host_offsets: tuple[int, ...] = ()
    """Its places in the host tier: room for the KV it has, and mostly for some tokens more."""
    spilled_tokens: int = 0
    """How many tokens it had when its KV last went to disk; 0 if it never did."""
    generated: int = 0
    batch: DecodeBatch | None = None
    """The batch it decodes in, if it does."""
    ran: float = 0.0
    """When its last turn began."""
    placed: int = 0
    """How many tokens it had when it came to decode where it does."""
    first_token: float = 0.0
    newest_token: float = 0.0
    losses: int = 0
    """Workers that died computing it since it last got a token."""
    backpressured: bool = False
    """Whether its client takes nothing of what was made."""
    paused_at: float = 0.0
    """When it was paused for that last."""
    excused: float = 0.0
    """Seconds that it was: its tokens are due so much later."""
    view: DecodingView | None = None
    """What is shown of it while it decodes, while that is true."""
    runnable: bool = False
    """Whether a turn could take it now."""
    id: RequestId = field(init=False)
    model: ModelName = field(init=False)
    interactive: bool = field(init=False)
    tokens: int = field(init=False)
    """Prompt and output so far."""
    next_due: float = field(init=False)
    """When its next token is due: as scheduled, or, if that is earlier and it is in no turn, when
    its longest gap is over."""
    scheduled: float = field(init=False)
    """When its next token is due without gaps: token k at arrival + TTFT + k TBT, and what is
    excused."""

    def __post_init__(self) -> None:
        spec = self.spec
        self.id, self.model = spec.id, spec.model
        self.interactive = spec.request_class is RequestClass.INTERACTIVE
        self._count()

    def _count(self) -> None:
        """Every view and every choice of a batch reads these, so they are kept ready."""
        slo = self.spec.slo
        self.tokens = self.spec.prompt_tokens + self.generated
        began = self.arrived + self.excused
        self.next_due = self.scheduled = slo.scheduled(began, self.generated)
        # In a turn its next token is on its way, and reports may come for several steps at once.
        if slo.gap_seconds and self.stage is not Stage.RUNNING:
            gap_over = slo.gap_over(self.generated, self.newest_token)
            self.next_due = min(self.scheduled, gap_over)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is computed once it is prefilled: all but the newest."""
        return self.tokens - 1

    @property
    def remaining_tokens(self) -> int:
        return self.spec.max_tokens - self.generated

    @property
    def movable(self) -> bool:
        """Whether it could go on decoding on another instance."""
        return self.stage is Stage.READY and self.kv is KvPlace.DEVICE

    def to_stage(self, target: Stage) -> None:
        self.stage = move(STAGES, self.stage, target, self.id)
        if self.spec.slo.gap_seconds:
            self._count()
        self._moved()

    def to_kv(self, target: KvPlace, instance: InstanceId | None) -> None:
        self.kv = move(KV_PLACES, self.kv, target, self.id)
        self.kv_instance = instance
        self._moved()

    def _moved(self) -> None:
        self.runnable = self.stage is Stage.READY and self.kv in (KvPlace.DEVICE, KvPlace.HOST)
        self._changed()

    def produced(self, tokens: int, now: float) -> None:
        """It came nearer to its end."""
        if not self.generated:
            self.first_token = now
        self.generated += tokens
        self.losses = 0
        self.progressed = self.newest_token = now
        self.view = None
        self._count()
        self._changed()

    def excuse(self, now: float) -> None:
        """It is paused no longer. As if what it has had come so much later, so that neither what is
        due nor the pace of its tokens knows of the pause."""
        pause = now - self.paused_at
        self.excused += pause
        self.first_token += pause
        self.newest_token += pause
        self._count()

    def _changed(self) -> None:
        """What was shown of it is no longer true."""
        if self.batch is not None:
            self.batch.changed()


@dataclass(slots=True)
class Group:
    """Requests of one model prefilled back to back (Aegaeon Alg. 1)."""

    model: ModelName
    members: dict[RequestId, RequestState] = field(default_factory=dict)
    admitted: int = 0
    view: GroupView | None = None
    """What is shown of it, while that is true."""

    def join(self, request: RequestState) -> None:
        self.members[request.id] = request
        self.admitted += 1
        self.view = None

    @property
    def first(self) -> RequestState:
        return next(iter(self.members.values()))


@dataclass(slots=True)
class DecodeBatch:
    """Requests of one model that decode on an instance."""

    home: InstanceState
    members: dict[RequestId, RequestState] = field(default_factory=dict)
    view: BatchView | None = None
    """What is shown of it, while that is true."""
    last_view: BatchView | None = None
    """What was shown last, while its members are the same."""

    def changed(self) -> None:
        self.view = self.home.view = None


@dataclass(slots=True)
class EngineState:
    """One model on one instance."""

    stage: EngineStage = EngineStage.ABSENT
    weight_slabs: int = 0
    host_slabs: int = 0
    attached: int = 0
    """Version of the master image that the instance loads it from; 0 for the files."""
    kv: KvShape | None = None
    residents: dict[RequestId, RequestState] = field(default_factory=dict)
    """Requests whose KV is on this device, wholly or on its way."""
    used: float = 0.0

    def to_stage(self, target: EngineStage, model: str) -> None:
        self.stage = move(ENGINES, self.stage, target, model)

    @property
    def built(self) -> bool:
        return self.stage in (EngineStage.COLD, EngineStage.LOADING, EngineStage.LOADED)

    @property
    def on_device(self) -> bool:
        return self.stage in (EngineStage.LOADING, EngineStage.LOADED)

    @property
    def shape(self) -> KvShape:
        assert self.kv is not None, "the shape is known once the engine is built"
        return self.kv


@dataclass(slots=True)
class BuildJob:
    """An engine is being built."""

    model: ModelName
    prompt_tokens: ClassVar[int] = 0
    prompt_count: ClassVar[int] = 0


@dataclass(slots=True)
class PrefillJob:
    """A prompt is being computed. `warm`: its weights were in place, so how long it takes says
    how long prompts take."""

    model: ModelName
    prompt_count: ClassVar[int] = 1
    request: RequestId
    prompt_tokens: int
    warm: bool
    switches: bool
    """Whether another model ran before."""
    swap_seconds: float = 0.0
    """For how long KV moved for it."""


@dataclass(slots=True)
class TurnJob:
    """A turn runs; `ordered` is when it was ordered."""

    model: ModelName
    turn: int
    requests: tuple[RequestId, ...]
    prompts: tuple[RequestId, ...]
    """Requests whose prompts are computed in the steps."""
    prompt_tokens: int
    ordered: float
    switches: bool
    """Whether another model ran before."""
    cold: bool
    """Whether its weights were not in place, or not on their way."""
    limit: int
    left_out: int
    """Requests that the batch limit kept out."""
    kv_tokens: int
    """Tokens of KV its requests had when it was ordered."""
    quota_seconds: float
    swap_seconds: float = 0.0
    """For how long KV moved for it."""
    tokens: int = 0
    """Made so far."""
    cut_at: float = math.inf
    """When it is to be ended."""
    last_at: float = math.inf
    """When it is to be ended for others than its model, and does not go on."""
    preempting: bool = False
    lacks_room: bool = False
    """Whether a request of its model was left out because its KV had no room."""
    resume_seconds: float = 0.0
    """The quota, if the turn is ended only to take in more of its model: the rest is run then."""

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)


@dataclass(slots=True)
class InstanceState:
    """One instance. At most one job is out at a time; what prepares it goes before it."""

    id: InstanceId
    engines: dict[ModelName, EngineState]
    unbuilt: dict[ModelName, None] = field(default_factory=dict)
    """Models without an engine, in the order of the catalogue."""
    placement: Placement = field(default_factory=Placement)
    instance_class: InstanceClass = InstanceClass.MIXED
    parked_seconds: float = 0.0
    """How long it rested, until that was counted last."""
    parked_since: float | None = None
    """When it was, if the instance rested then."""
    up: bool = False
    """Whether it has a worker."""
    quarantine: str | None = None
    """Why it is out of service, if it is."""
    ending: bool = False
    """Whether its worker is being ended, for a quarantine that may be over meanwhile."""
    ledger: DeviceLedger = field(default_factory=lambda: DeviceLedger(0))
    groups: list[Group] = field(default_factory=list)
    batches: dict[ModelName, DecodeBatch] = field(default_factory=dict)
    work: deque[PlannedTurn] = field(default_factory=deque)
    resumes: bool = False
    """Whether the next turn of `work` is the rest of the last one."""
    job: BuildJob | PrefillJob | TurnJob | None = None
    current_model: ModelName | None = None
    suspended: tuple[RequestId, ...] = ()
    """The requests that the last turn left unfinished."""
    prefills_since_turn: int = 0
    turns: int = 0
    stays_until: float = -math.inf
    """Until then the current model goes on, as KV was moved for it."""
    progressed: float = -math.inf
    """When a request last got a token here."""
    last_turn: TurnView | None = None
    evict_requested: dict[ModelName, None] = field(default_factory=dict)
    """Models that leave the device as soon as it computes nothing."""
    kv_short: bool = False
    """Whether a prompt waits until other requests of its model leave room for its KV."""
    membership_version: int = 0
    """How often a request came or went."""
    view: InstanceView | None = None
    """What is shown of it, while that is true."""

    def restart(self, models: Iterable[ModelName], slabs: int) -> None:
        """Nothing is on the device, nothing is built; the queues are kept."""
        self.engines = {model: EngineState() for model in models}
        self.unbuilt = dict.fromkeys(self.engines)
        self.ledger = DeviceLedger(slabs)
        self.work.clear()
        self.resumes = False
        self.job = None
        self.current_model = None
        self.stays_until = -math.inf
        self.suspended = ()
        self.evict_requested.clear()
        self.prefills_since_turn = 0
        self.last_turn = None
        self.view = None

    def add(self, model: ModelName) -> None:
        """A model more, the last one, that can be built."""
        self.engines[model] = EngineState()
        self.unbuilt[model] = None

    def forget(self, model: ModelName) -> None:
        """A model that holds nothing here, and of which nothing is under way."""
        self.engines.pop(model, None)
        self.unbuilt.pop(model, None)
        self.evict_requested.pop(model, None)
        if self.current_model == model:
            self.current_model = None
        if self.last_turn is not None and self.last_turn.model == model:
            self.last_turn = None
        self.view = None

    def holds(self, model: ModelName) -> bool:
        """Whether anything of the model is on the device, or under way."""
        busy = self.job is not None and self.job.model == model
        return busy or model in self.ledger.weights or model in self.ledger.kv

    @property
    def serves(self) -> bool:
        """Whether work may be given to it."""
        return self.up and not self.ending and self.quarantine is None

    @property
    def idle(self) -> bool:
        """Whether it serves and has nothing to do."""
        return self.serves and self.job is None and not self.groups and not self.batches

    @property
    def rests(self) -> bool:
        """Whether it is parked and has nothing to do."""
        return self.instance_class is InstanceClass.PARKED and self.idle

    @property
    def has_runnable(self) -> bool:
        """Whether a turn could take any request. O(requests that decode here)."""
        for batch in self.batches.values():
            for request in batch.members.values():
                if request.runnable:
                    return True
        return False

    def runnable(self, model: ModelName) -> list[RequestState]:
        """The requests of the model that a turn could take. O(its requests that decode here)."""
        batch = self.batches.get(model)
        if batch is None:
            return []
        return [request for request in batch.members.values() if request.runnable]

    def may_serve(self, model: ModelName) -> bool:
        return self.placement.models is None or model in self.placement.models

    def queue(self, request: RequestState, group: int | None) -> None:
        """Take a request to prefill: into a group, or a new last one."""
        if group is None:
            self.groups.append(Group(request.model))
        self.groups[-1 if group is None else group].join(request)
        self.membership_version += 1
        self.view = None

    def queue_first(self, request: RequestState) -> None:
        """Take a request to prefill before all others."""
        self.groups.insert(0, Group(request.model))
        self.groups[0].join(request)
        self.membership_version += 1
        self.view = None

    def leave(self, request: RequestState) -> None:
        """Take a request out of the queue or the batch it is in. O(groups) if it is queued."""
        self.membership_version += 1
        self.view = None
        batch = request.batch
        if batch is not None:
            del batch.members[request.id]
            batch.view = batch.last_view = request.batch = None
            if not batch.members:
                del self.batches[request.model]
            return
        for group in self.groups:
            if request.id in group.members:
                del group.members[request.id]
                group.view = None
                if not group.members:
                    self.groups.remove(group)
                return

    def join_batch(self, request: RequestState) -> None:
        self.membership_version += 1
        batch = self.batches.get(request.model)
        if batch is None:
            batch = self.batches[request.model] = DecodeBatch(self)
        batch.members[request.id] = request
        batch.last_view = None
        request.batch = batch
        request.placed = request.generated
        request.view = None
        batch.changed()

    def upcoming(self) -> list[ModelName]:
        """Models in the order they will run next, as far as is known; each once."""
        front = [group.model for group in self.groups]
        if any([not turn.firm for turn in self.work]):
            working = {*front, *self.batches}
            planned = [turn.model for turn in self.work if turn.model in working]
            return list(dict.fromkeys([*planned, *front, *self.batches]))
        planned = [turn.model for turn in self.work if turn.model in self.batches]
        return list(dict.fromkeys([*front[:1], *planned, *self.batches, *front[1:]]))
