"""An instance that carries out commands as a worker does, with its own exact accounting.

It holds no engine: tokens are counted, not computed. It is stricter than a worker: it fails the
test when a command asks for what cannot be (KV that is not there, slabs that are not free, places
in the host tier that hold somebody else's KV), so it checks the machine's plan from outside.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    Event,
    EvictModel,
    FinishReason,
    KvMoved,
    KvShape,
    LoadModel,
    ModelBuilt,
    ModelLoaded,
    MoveKv,
    Preempt,
    PrefetchModel,
    PrefillDone,
    Release,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TokenCount,
    TokensProduced,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)


@dataclass
class ModelDouble:
    """What building the engine of a model would tell."""

    weight_slabs: int
    kv: KvShape


@dataclass
class Life:
    """The truth about a request: its sizes, and how many tokens it will produce."""

    model: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    produced: int = 0
    outcome: str | None = None
    prefills: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.produced - 1


@dataclass
class World:
    """What instances share: the requests' truth and the contents of the host tier."""

    models: dict[str, ModelDouble]
    lives: dict[str, Life] = field(default_factory=dict)
    host: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """offset -> (request, index of the block, KV tokens of the request when it was written)."""


@dataclass
class EngineDouble:
    model: ModelDouble
    stored: bool = False
    loaded: bool = False
    used: dict[str, int] = field(default_factory=dict)
    """request -> blocks on the device."""
    groups: int = 0

    def slabs(self) -> int:
        return self.groups * self.model.kv.group_slabs

    def grow(self, request: str, blocks: int, cap_slabs: int) -> bool:
        """Take blocks for a request, mapping groups as needed; False if the cap is too low."""
        used = sum(self.used.values()) - self.used.get(request, 0) + blocks
        groups = max(self.groups, -(-used // self.model.kv.group_blocks))
        if groups * self.model.kv.group_slabs > cap_slabs:
            return False
        self.groups, self.used[request] = groups, blocks
        return True

    def trim(self, keep_empty_groups: int = 0) -> int:
        """Unmap empty groups, but for some that fragmentation keeps."""
        blocks = sum(self.used.values())
        least = -(-blocks // self.model.kv.group_blocks)
        if blocks:
            least = min(self.groups, least + keep_empty_groups)
        self.groups = least
        return self.slabs()


class InstanceDouble:
    """Carries commands out one by one; `work` does the next piece and returns what it reports."""

    def __init__(self, number: int, slabs: int, world: World) -> None:
        self.number = number
        self.slabs = slabs
        self.world = world
        self.engines: dict[str, EngineDouble] = {}
        self.queue: deque[Command] = deque()
        self.turn: RunTurn | None = None
        self.steps = 0
        self.preempted: set[int] = set()
        self.prefetching: str | None = None
        self.high_water_slabs = 0
        self.fragmentation = 0
        self.steps_per_turn = 3

    def order(self, command: Command) -> None:
        """Take a command; `Preempt` and `Release` take effect at once."""
        if isinstance(command, Preempt):
            self.preempted.add(command.turn)
        elif isinstance(command, Release):
            engine = self.engines.get(command.model)
            if engine is not None:
                engine.used.pop(command.request, None)
        else:
            self.queue.append(command)

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.turn or self.prefetching)

    def work(self) -> list[Event]:
        """The next step of the turn, else the next command."""
        if self.turn is not None:
            return self._step(self.turn)
        if not self.queue:
            return self._end_prefetch()
        command = self.queue.popleft()
        events = self._carry_out(command)
        mapped = self.mapped()
        assert mapped <= self.slabs, f"{mapped} of {self.slabs} slabs mapped after {command}"
        self.high_water_slabs = max(self.high_water_slabs, mapped)
        return events

    def mapped(self) -> int:
        return sum(
            engine.slabs() + (engine.model.weight_slabs if engine.loaded else 0)
            for engine in self.engines.values()
        )

    def _carry_out(self, command: Command) -> list[Event]:
        match command:
            case BuildModel():
                return self._build(command)
            case StoreWeights():
                self.engines[command.model].stored = True
                return [WeightsStored(instance=self.number, model=command.model)]
            case PrefetchModel():
                assert self.prefetching is None, "one prefetch at a time"
                self.prefetching = command.model
                self._load(command.model)
                return []
            case LoadModel():
                if self.prefetching == command.model:
                    return self._end_prefetch()
                assert not self.engines[command.model].loaded, "loaded already"
                self._load(command.model)
                return [self._loaded(command.model, prefetched=False)]
            case EvictModel():
                assert self.engines[command.model].loaded, "evicted, but not loaded"
                self.engines[command.model].loaded = False
                if self.prefetching == command.model:
                    self.prefetching = None
                return []
            case MoveKv(direction=Direction.OUT):
                return [self._move_out(command)]
            case MoveKv():
                return [self._move_in(command)]
            case RunPrefill():
                return self._prefill(command)
            case RunTurn():
                assert self.engines[command.model].loaded, "a turn without weights"
                self.turn, self.steps = command, 0
                return []
        raise AssertionError(f"not a command for an instance: {command}")

    def _build(self, command: BuildModel) -> list[Event]:
        assert command.model not in self.engines, "built twice"
        model = self.world.models[command.model]
        self.engines[command.model] = EngineDouble(model)
        return [
            ModelBuilt(
                instance=self.number,
                model=command.model,
                weight_slabs=model.weight_slabs,
                host_slabs=model.weight_slabs,
                kv=model.kv,
            )
        ]

    def _load(self, model: str) -> None:
        assert self.engines[model].stored, "loaded before its weights were stored"
        self.engines[model].loaded = True

    def _loaded(self, model: str, *, prefetched: bool) -> Event:
        moved = self.engines[model].model.weight_slabs * 1000
        return ModelLoaded(
            instance=self.number,
            model=model,
            moved_bytes=moved,
            seconds=moved * 1e-6,
            prefetched=prefetched,
        )

    def _end_prefetch(self) -> list[Event]:
        model, self.prefetching = self.prefetching, None
        return [] if model is None else [self._loaded(model, prefetched=True)]

    def _move_out(self, command: MoveKv) -> Event:
        engine = self.engines[command.model]
        moved, missing = [], []
        for kv_move in command.moves:
            blocks = engine.used.pop(kv_move.request, None)
            if blocks is None:
                missing.append(kv_move.request)
                continue
            assert blocks == len(kv_move.host_offsets), "a place for every block"
            tokens = self.world.lives[kv_move.request].kv_tokens
            for index, offset in enumerate(kv_move.host_offsets):
                self.world.host[offset] = (kv_move.request, index, tokens)
            moved.append(kv_move.request)
        return self._moved(command, moved, missing)

    def _move_in(self, command: MoveKv) -> Event:
        engine = self.engines[command.model]
        moved, missing = [], []
        for kv_move in command.moves:
            life = self.world.lives[kv_move.request]
            if life.outcome is not None:
                missing.append(kv_move.request)
                continue
            for index, offset in enumerate(kv_move.host_offsets):
                assert self.world.host[offset] == (kv_move.request, index, life.kv_tokens)
            grown = engine.grow(kv_move.request, len(kv_move.host_offsets), command.kv_slabs)
            assert grown, "the slabs for a move inwards were granted"
            moved.append(kv_move.request)
        return self._moved(command, moved, missing)

    def _moved(self, command: MoveKv, moved: list[str], missing: list[str]) -> Event:
        engine = self.engines[command.model]
        return KvMoved(
            instance=self.number,
            model=command.model,
            direction=command.direction,
            moved=tuple(moved),
            missing=tuple(missing),
            moved_bytes=len(moved) * engine.model.kv.block_bytes,
            seconds=0.001,
            kv_slabs=engine.trim(self.fragmentation),
        )

    def _prefill(self, command: RunPrefill) -> list[Event]:
        engine = self.engines[command.model]
        assert engine.loaded, "a prefill without weights"
        life = self.world.lives[command.request]
        events: list[Event] = []
        if life.outcome is None:
            tokens = life.prompt_tokens + life.produced
            blocks = engine.model.kv.blocks(tokens)
            assert engine.grow(command.request, blocks, command.kv_slabs), "room for the prompt"
            life.prefills += 1
            events.append(self._produce(command.model, [command.request]))
        return [
            *events,
            PrefillDone(
                instance=self.number,
                model=command.model,
                request=command.request,
                kv_slabs=engine.trim(self.fragmentation),
                seconds=0.01,
            ),
        ]

    def _step(self, turn: RunTurn) -> list[Event]:
        engine = self.engines[turn.model]
        alive = [name for name in turn.requests if self.world.lives[name].outcome is None]
        if turn.turn in self.preempted or self.steps == self.steps_per_turn:
            reason = TurnEnd.PREEMPTED if turn.turn in self.preempted else TurnEnd.QUOTA
            return [self._end_turn(turn, reason)]
        if not alive:
            return [self._end_turn(turn, TurnEnd.DRAINED)]
        for name in alive:
            life = self.world.lives[name]
            assert name in engine.used, "a turn for a request whose KV is elsewhere"
            assert engine.used[name] == engine.model.kv.blocks(life.kv_tokens)
        needed = {
            name: engine.model.kv.blocks(self.world.lives[name].kv_tokens + 1) for name in alive
        }
        before = dict(engine.used)
        for name, blocks in needed.items():
            if not engine.grow(name, blocks, turn.kv_slabs):
                assert self.steps, "a turn was granted room for at least one step"
                engine.used = before
                return [self._end_turn(turn, TurnEnd.KV_FULL)]
        self.steps += 1
        return [self._produce(turn.model, alive)]

    def _produce(self, model: str, requests: list[str]) -> Event:
        counts = []
        for name in requests:
            life = self.world.lives[name]
            life.produced += 1
            finished = None
            if life.produced == life.output_tokens:
                stopped = life.output_tokens < life.max_tokens
                finished = FinishReason.STOP if stopped else FinishReason.LENGTH
                self.engines[model].used.pop(name)
            counts.append(TokenCount(request=name, count=1, finished=finished))
        return TokensProduced(instance=self.number, model=model, tokens=tuple(counts))

    def _end_turn(self, turn: RunTurn, reason: TurnEnd) -> Event:
        self.turn = None
        return TurnEnded(
            instance=self.number,
            model=turn.model,
            turn=turn.turn,
            reason=reason,
            steps=self.steps,
            seconds=self.steps * 0.02,
            kv_slabs=self.engines[turn.model].trim(self.fragmentation),
        )
