"""What the machine remembers: requests, prefill groups, engines, instances. Mutable, its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.memory.ledger import DeviceLedger
from appliance.scheduling.lifecycle import (
    ENGINES,
    KV_PLACES,
    STAGES,
    Engine,
    KvPlace,
    Stage,
    move,
)
from appliance.scheduling.questions import PlannedTurn
from appliance.vocabulary import InstanceId, KvShape, ModelName, RequestId, RequestSpec


@dataclass(slots=True)
class RequestState:
    """A request that has not ended."""

    spec: RequestSpec
    arrived: float
    progressed: float
    """When it last came nearer to its end: arrival, a token."""
    stage: Stage = Stage.UNPLACED
    kv: KvPlace = KvPlace.NONE
    instance: InstanceId | None = None
    """Where it is queued, prefilled or decoded."""
    kv_instance: InstanceId | None = None
    """Whose device holds, sends or receives its KV."""
    host_offsets: tuple[int, ...] = ()
    """Its reservation in the host tier: room for its KV at full length."""
    generated: int = 0
    ran: float = 0.0
    """When its last turn began."""
    losses: int = 0
    """Workers that died computing it since it last got a token."""

    @property
    def id(self) -> RequestId:
        return self.spec.id

    @property
    def model(self) -> ModelName:
        return self.spec.model

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.spec.prompt_tokens + self.generated

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is computed once it is prefilled: all but the newest."""
        return self.tokens - 1

    @property
    def remaining_tokens(self) -> int:
        return self.spec.max_tokens - self.generated

    @property
    def runnable(self) -> bool:
        """Whether a turn could take it now."""
        return self.stage is Stage.READY and self.kv in (KvPlace.DEVICE, KvPlace.HOST)

    def to_stage(self, target: Stage) -> None:
        self.stage = move(STAGES, self.stage, target, self.id)

    def to_kv(self, target: KvPlace, instance: InstanceId | None) -> None:
        self.kv = move(KV_PLACES, self.kv, target, self.id)
        self.kv_instance = instance


@dataclass(slots=True)
class Group:
    """Requests of one model prefilled back to back (Aegaeon Alg. 1)."""

    model: ModelName
    members: deque[RequestId] = field(default_factory=deque)
    admitted: int = 0

    def join(self, request: RequestId) -> None:
        self.members.append(request)
        self.admitted += 1


@dataclass(slots=True)
class EngineState:
    """One model on one instance."""

    stage: Engine = Engine.ABSENT
    weight_slabs: int = 0
    host_slabs: int = 0
    attached: int = 0
    """Version of the master image that the instance loads it from; 0 for the files."""
    kv: KvShape | None = None
    residents: dict[RequestId, None] = field(default_factory=dict)
    """Requests whose KV is on this device, wholly or on its way."""
    used: float = 0.0

    def to_stage(self, target: Engine, who: str) -> None:
        self.stage = move(ENGINES, self.stage, target, who)

    @property
    def built(self) -> bool:
        return self.stage in (Engine.STORED, Engine.LOADING, Engine.LOADED)

    @property
    def on_device(self) -> bool:
        return self.stage in (Engine.LOADING, Engine.LOADED)

    @property
    def shape(self) -> KvShape:
        assert self.kv is not None, "the shape is known once the engine is built"
        return self.kv


@dataclass(slots=True)
class BuildJob:
    """An engine is being built."""

    model: ModelName


@dataclass(slots=True)
class PrefillJob:
    """A prompt is being computed. `warm`: its weights were in place, so how long it takes says
    how long prompts take."""

    model: ModelName
    request: RequestId
    warm: bool


@dataclass(slots=True)
class TurnJob:
    """A turn runs; `ordered` is when it was ordered."""

    model: ModelName
    turn: int
    requests: tuple[RequestId, ...]
    ordered: float
    switches: bool
    """Whether another model ran before."""
    preempting: bool = False


@dataclass(slots=True)
class InstanceState:
    """One instance. At most one job is out at a time; what prepares it goes before it."""

    id: InstanceId
    engines: dict[ModelName, EngineState]
    up: bool = False
    ledger: DeviceLedger = field(default_factory=lambda: DeviceLedger(0))
    groups: list[Group] = field(default_factory=list)
    batches: dict[ModelName, dict[RequestId, None]] = field(default_factory=dict)
    work: deque[PlannedTurn] = field(default_factory=deque)
    job: BuildJob | PrefillJob | TurnJob | None = None
    current_model: ModelName | None = None
    suspended: tuple[RequestId, ...] = ()
    """The requests that the last turn left unfinished."""
    prefills_since_turn: int = 0
    turns: int = 0

    def restart(self, models: Iterable[ModelName], slabs: int) -> None:
        """Nothing is on the device, nothing is built; the queues are kept."""
        self.engines = {model: EngineState() for model in models}
        self.ledger = DeviceLedger(slabs)
        self.work.clear()
        self.job = None
        self.current_model = None
        self.suspended = ()
        self.prefills_since_turn = 0

    def leave(self, request: RequestState) -> None:
        """Take a request out of the queue and the batch it is in."""
        for group in self.groups:
            if group.model == request.model and request.id in group.members:
                group.members.remove(request.id)
        self.groups = [group for group in self.groups if group.members]
        batch = self.batches.get(request.model, {})
        batch.pop(request.id, None)
        if not batch:
            self.batches.pop(request.model, None)

    def join_batch(self, request: RequestState) -> None:
        self.batches.setdefault(request.model, {})[request.id] = None

    def upcoming(self) -> list[ModelName]:
        """Models in the order they will run next, as far as is known; each once."""
        front = [group.model for group in self.groups]
        planned = [turn.model for turn in self.work if turn.model in self.batches]
        return list(dict.fromkeys([*front[:1], *planned, *self.batches, *front[1:]]))
