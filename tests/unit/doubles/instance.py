"""An instance that carries out commands as a worker does, with its own exact accounting.

It holds no engine: tokens are counted, not computed. It is stricter than a worker: it fails the
test when a command asks for what cannot be (KV that is not there, slabs that are not free, places
in the host tier that hold KV or weights of another model), so it checks the machine's plan from
outside. As with a worker, loads and swaps outwards go on while other commands are carried out, and
are as late as they may be: until a job needs the weights, or the slabs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    DropModel,
    Event,
    EvictModel,
    FinishReason,
    KvMoved,
    KvShape,
    LoadModel,
    ModelBuilt,
    ModelDropped,
    ModelFailed,
    ModelLoaded,
    MoveKv,
    Preempt,
    PrefetchModel,
    PrefillDeferred,
    PrefillDone,
    Release,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TokenCount,
    TokensProduced,
    TrimKv,
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
    images: tuple[int, ...] = ()
    produced: int = 0
    outcome: str | None = None
    prefills: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.produced - 1

    @property
    def pooled(self) -> bool:
        """Whether its prompt is all of it."""
        return self.max_tokens == 0


@dataclass
class World:
    """What instances share: the requests' truth and the contents of the host tier."""

    models: dict[str, ModelDouble]
    lives: dict[str, Life] = field(default_factory=dict)
    host: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """offset -> (request, index of the block, KV tokens of the request when it was written)."""
    images: dict[int, tuple[str, int]] = field(default_factory=dict)
    """slab -> (model, index of the slab in its image)."""
    slab_bytes: int = 1000
    unreadable: set[str] = field(default_factory=set)
    """Models whose files are gone."""
    encoded: dict[str, int] = field(default_factory=dict)
    """model -> slabs that its image takes once it is encoded."""

    def write_kv(self, offset: int, size: int, content: tuple[str, int, int]) -> None:
        self.host[offset] = content
        for slab in range(offset // self.slab_bytes, -(-(offset + size) // self.slab_bytes)):
            self.images.pop(slab, None)

    def write_image(self, model: str, offsets: tuple[int, ...]) -> None:
        for index, offset in enumerate(offsets):
            self.images[offset // self.slab_bytes] = (model, index)
            for place in [p for p in self.host if offset <= p < offset + self.slab_bytes]:
                del self.host[place]

    def check_image(self, model: str, offsets: tuple[int, ...]) -> None:
        found = [self.images.get(offset // self.slab_bytes) for offset in offsets]
        assert found == [(model, index) for index in range(len(offsets))], "a foreign image"


@dataclass
class EngineDouble:
    model: ModelDouble
    image: tuple[int, ...] | None = None
    """Where it loads from; empty for the files, None before it was told."""
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

    def cold(self, fragmentation: int) -> int:
        """Slabs of groups without a block in use; fragmentation spreads those over more groups."""
        blocks = sum(self.used.values())
        warm = -(-blocks // self.model.kv.group_blocks)
        if blocks:
            warm = min(self.groups, warm + fragmentation)
        return (self.groups - warm) * self.model.kv.group_slabs

    def trim(self, fragmentation: int, keep_slabs: int) -> None:
        """Give up cold groups until no more than `keep_slabs` are mapped, or none is left."""
        surplus = min(self.slabs() - keep_slabs, self.cold(fragmentation))
        self.groups -= max(0, -(-surplus // self.model.kv.group_slabs))


@dataclass
class Leaving:
    """A swap outwards that is under way."""

    command: MoveKv
    moved: dict[str, tuple[str, int]]
    """request -> (the name its blocks are kept under meanwhile, its KV tokens)."""
    missing: tuple[str, ...]


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
        self.loading: dict[str, bool] = {}
        """Models whose weights are on their way, and whether that is a prefetch."""
        self.leaving: list[Leaving] = []
        self.caching = False
        """Whether groups without a block in use are kept, as prefix cache."""
        self.high_water_slabs = 0
        self.fragmentation = 0
        self.deferring: set[str] = set()
        """Requests whose prompts will not fit, once, whatever is granted."""
        self.steps_per_turn = 3
        self.tokens_per_step = 1
        """Of each request that has as many left: with drafts there may be several."""
        self.swap_seconds = 0.001

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
        return bool(self.queue or self.turn or self.loading or self.leaving)

    def work(self) -> list[Event]:
        """The next step of the turn, else the next command, else what goes on beside them."""
        if self.turn is not None:
            return self._step(self.turn)
        if self.queue:
            command = self.queue.popleft()
            events = self._carry_out(command)
            while self.mapped() > self.slabs and self.leaving:
                events += self.end_leaving()
            mapped = self.mapped()
            assert mapped <= self.slabs, f"{mapped} of {self.slabs} slabs mapped after {command}"
            self.high_water_slabs = max(self.high_water_slabs, mapped)
            return events
        return self.end_leaving() or [e for model in list(self.loading) for e in self._join(model)]

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
                return self._store(command)
            case PrefetchModel():
                assert len(self.loading) <= 1, "one prefetch at a time, beside what is needed now"
                return self._load(command.model, prefetched=True)
            case LoadModel():
                return self._load(command.model, prefetched=False)
            case EvictModel():
                assert self.engines[command.model].loaded, "evicted, but not loaded"
                self.engines[command.model].loaded = False
                self.loading.pop(command.model, None)
                return []
            case DropModel():
                events = [event for _ in list(self.leaving) for event in self.end_leaving()]
                engine = self.engines.pop(command.model, None)
                assert engine is None or not (engine.loaded or engine.groups), "it holds memory"
                return [*events, ModelDropped(instance=self.number, model=command.model)]
            case TrimKv():
                self._trim(command.model, command.kv_slabs)
                return []
            case MoveKv(direction=Direction.OUT):
                self._move_out(command)
                return []
            case MoveKv():
                return self._move_in(command)
            case RunPrefill():
                return self._join(command.model) + self._prefill(command)
            case RunTurn():
                events = self._join(command.model)
                for prompt in command.prompts:
                    events += self._prefill(
                        RunPrefill(
                            instance=self.number,
                            model=command.model,
                            request=prompt,
                            kv_slabs=command.kv_slabs,
                        )
                    )
                if not self.engines[command.model].loaded:
                    assert command.model in self.world.unreadable, "a turn without weights"
                    return [*events, self._end_turn(command, TurnEnd.DRAINED)]
                self.turn, self.steps = command, 0
                return events
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

    def _store(self, command: StoreWeights) -> list[Event]:
        engine = self.engines[command.model]
        assert not engine.loaded, "told of another image while it is loaded"
        if command.fill:
            if command.model in self.world.unreadable:
                engine.image = ()
                return [self._failed(command.model)]
            self.world.write_image(command.model, command.host_offsets)
        taken = self.world.encoded.get(command.model) if command.fill else None
        # What is there now does not matter: it may be gone again, and is looked at by a load only.
        engine.image = command.host_offsets[:taken]
        return [WeightsStored(instance=self.number, model=command.model, host_slabs=taken)]

    def _failed(self, model: str) -> Event:
        return ModelFailed(instance=self.number, model=model, reason="its files are gone")

    def _load(self, model: str, *, prefetched: bool) -> list[Event]:
        engine = self.engines[model]
        assert not engine.loaded, "loaded already"
        if not engine.image and model in self.world.unreadable:
            return [self._failed(model)]
        assert engine.image is not None, "loaded before it was told from where"
        self.world.check_image(model, engine.image)
        engine.loaded = True
        self.loading[model] = prefetched
        return []

    def _join(self, model: str) -> list[Event]:
        """The weights are all there now, if they were on their way."""
        prefetched = self.loading.pop(model, None)
        if prefetched is None:
            return []
        engine = self.engines[model]
        assert engine.image is not None
        self.world.check_image(model, engine.image)
        moved = engine.model.weight_slabs * 1000
        return [
            ModelLoaded(
                instance=self.number,
                model=model,
                moved_bytes=moved,
                seconds=moved * 1e-6,
                prefetched=prefetched,
            )
        ]

    def _trim(self, model: str, keep_slabs: int) -> None:
        self.engines[model].trim(self.fragmentation, keep_slabs if self.caching else 0)

    def _move_out(self, command: MoveKv) -> None:
        engine = self.engines[command.model]
        moved, missing = {}, []
        for kv_move in command.moves:
            blocks = engine.used.pop(kv_move.request, None)
            if blocks is None:
                missing.append(kv_move.request)
                continue
            assert blocks == len(kv_move.host_offsets), "a place for every block"
            kept_as = f"leaving {kv_move.request}"
            engine.used[kept_as] = blocks
            moved[kv_move.request] = (kept_as, self.world.lives[kv_move.request].kv_tokens)
        self._trim(command.model, command.kv_slabs)
        self.leaving.append(Leaving(command, moved, tuple(missing)))

    def end_leaving(self) -> list[Event]:
        """The oldest swap outwards is over: the bytes are in the host tier, the blocks free."""
        if not self.leaving:
            return []
        leaving = self.leaving.pop(0)
        command, engine = leaving.command, self.engines[leaving.command.model]
        size = engine.model.kv.block_bytes
        for kv_move in command.moves:
            if kv_move.request in leaving.moved:
                kept_as, tokens = leaving.moved[kv_move.request]
                del engine.used[kept_as]
                for index, offset in enumerate(kv_move.host_offsets):
                    self.world.write_kv(offset, size, (kv_move.request, index, tokens))
        self._trim(command.model, command.kv_slabs)
        return [self._moved(command, tuple(leaving.moved), leaving.missing)]

    def _grow(self, model: str, request: str, blocks: int, cap: int, events: list[Event]) -> bool:
        """Take blocks, after waiting for swaps outwards if need be; False if the cap is too low."""
        while not self.engines[model].grow(request, blocks, cap):
            if not self.leaving:
                return False
            events += self.end_leaving()
        return True

    def _move_in(self, command: MoveKv) -> list[Event]:
        events: list[Event] = []
        moved, missing = [], []
        for kv_move in command.moves:
            life = self.world.lives[kv_move.request]
            if life.outcome is not None:
                missing.append(kv_move.request)
                continue
            for index, offset in enumerate(kv_move.host_offsets):
                assert self.world.host[offset] == (kv_move.request, index, life.kv_tokens)
            blocks = len(kv_move.host_offsets)
            grown = self._grow(command.model, kv_move.request, blocks, command.kv_slabs, events)
            assert grown, "the slabs for a move inwards were granted"
            moved.append(kv_move.request)
        self._trim(command.model, command.kv_slabs)
        return [*events, self._moved(command, tuple(moved), tuple(missing))]

    def _moved(self, command: MoveKv, moved: tuple[str, ...], missing: tuple[str, ...]) -> Event:
        engine = self.engines[command.model]
        return KvMoved(
            instance=self.number,
            model=command.model,
            direction=command.direction,
            moved=moved,
            missing=missing,
            moved_bytes=len(moved) * engine.model.kv.block_bytes,
            seconds=self.swap_seconds,
            kv_slabs=engine.slabs(),
            cold_slabs=engine.cold(self.fragmentation),
        )

    def _prefill(self, command: RunPrefill) -> list[Event]:
        engine = self.engines[command.model]
        life = self.world.lives[command.request]
        events: list[Event] = []
        if not engine.loaded or command.request in self.deferring:
            readable = command.model not in self.world.unreadable
            assert engine.loaded or not readable, "a prefill without weights"
            self.deferring.discard(command.request)
            self._trim(command.model, engine.slabs())
            return [
                PrefillDeferred(
                    instance=self.number,
                    model=command.model,
                    request=command.request,
                    kv_slabs=engine.slabs(),
                    cold_slabs=engine.cold(self.fragmentation),
                )
            ]
        if life.outcome is None:
            tokens = life.prompt_tokens + life.produced
            blocks = engine.model.kv.prompt_blocks(tokens, life.images)
            grown = self._grow(command.model, command.request, blocks, command.kv_slabs, events)
            assert grown, "room for the prompt"
            life.prefills += 1
            events.append(self._produce(command.model, [command.request]))
            if command.request in engine.used:
                engine.used[command.request] = engine.model.kv.blocks(tokens)
        self._trim(command.model, engine.slabs())
        return [
            *events,
            PrefillDone(
                instance=self.number,
                model=command.model,
                request=command.request,
                kv_slabs=engine.slabs(),
                cold_slabs=engine.cold(self.fragmentation),
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
        lives = [self.world.lives[name] for name in alive]
        needed = {
            name: engine.model.kv.blocks(
                life.kv_tokens + min(self.tokens_per_step, life.output_tokens - life.produced)
            )
            for name, life in zip(alive, lives, strict=True)
        }
        events: list[Event] = []
        grown_from: dict[str, int] = {}
        for name, blocks in needed.items():
            before = engine.used[name]
            if not self._grow(turn.model, name, blocks, turn.kv_slabs, events):
                assert self.steps, "a turn was granted room for at least one step"
                engine.used |= grown_from
                return [*events, self._end_turn(turn, TurnEnd.KV_FULL)]
            grown_from[name] = before
        self.steps += 1
        return [*events, self._produce(turn.model, alive, self.tokens_per_step)]

    def _produce(self, model: str, requests: list[str], most: int = 1) -> Event:
        counts = []
        for name in requests:
            life = self.world.lives[name]
            count = 0 if life.pooled else min(most, life.output_tokens - life.produced)
            life.produced += count
            finished = None
            if life.produced == life.output_tokens:
                stopped = life.pooled or life.output_tokens < life.max_tokens
                finished = FinishReason.STOP if stopped else FinishReason.LENGTH
                self.engines[model].used.pop(name)
            counts.append(TokenCount(request=name, count=count, finished=finished))
        return TokensProduced(instance=self.number, model=model, tokens=tuple(counts))

    def _end_turn(self, turn: RunTurn, reason: TurnEnd) -> Event:
        steps, self.turn, self.steps = self.steps, None, 0
        engine = self.engines[turn.model]
        self._trim(turn.model, engine.slabs())
        return TurnEnded(
            instance=self.number,
            model=turn.model,
            turn=turn.turn,
            reason=reason,
            steps=steps,
            seconds=steps * 0.02,
            kv_slabs=engine.slabs(),
            cold_slabs=engine.cold(self.fragmentation),
        )
