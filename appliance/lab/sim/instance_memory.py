"""What a simulated instance holds: weights and KV in the slabs of its pool, and what is on its
way.

As strict as a worker's pool: what cannot be raises `LabError`. A job that asks for slabs that
KV on its way out still holds is refused for now, and has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from appliance.errors import LabError
from appliance.lab.hardware import Box, ModelProfile
from appliance.lab.sim.engine import SimulatedEngine, WeightLoad
from appliance.lab.sim.link import LinkTransfer
from appliance.lab.sim.recorder import Life, Recorder
from appliance.lab.sim.topology import KV_IN, KV_OUT, WEIGHTS, Wiring
from appliance.vocabulary import (
    Direction,
    InstanceId,
    KvMoved,
    ModelLoaded,
    ModelName,
    MoveKv,
    RequestId,
)

Known = Callable[[RequestId], Life | None]

ENOUGH_TO_LOOK = 16
"""Engines among which those that hold nothing any more are looked for."""


class Holdings:
    """`ended` hears of every load and every move that is over."""

    def __init__(
        self,
        number: InstanceId,
        box: Box,
        profiles: Mapping[ModelName, ModelProfile],
        recorder: Recorder,
        wiring: Wiring,
        ended: Callable[[ModelLoaded | KvMoved], None],
    ) -> None:
        self._number = number
        self._box = box
        self._profiles = profiles
        self._recorder = recorder
        self._inwards = wiring.inwards(number)
        self._outwards = wiring.outwards(number)
        self._disk = wiring.disk
        self._files = f"files {number}"
        self._ended = ended
        self.engines: dict[ModelName, SimulatedEngine] = {}
        self._holding: dict[ModelName, SimulatedEngine] = {}
        """Those that may hold slabs: few of a large catalogue."""
        self.moves_out = 0
        """Under way."""

    def build(self, model: ModelName) -> SimulatedEngine:
        """An engine that holds nothing."""
        profile, slab = self._profiles[model], self._box.slab_bytes
        shape = profile.kv_shape(slab, self._box.block_tokens)
        engine = SimulatedEngine(profile, shape, profile.weight_slabs(slab))
        self.engines[model] = engine
        self._holding.pop(model, None)
        return engine

    # --- weights ---------------------------------------------------------------------------------

    def fill(self, model: ModelName, then: Callable[[], None]) -> None:
        """Write the model's master image from the files."""
        nbytes = self.engines[model].profile.weight_bytes
        self._disk.start(self._files, nbytes, lambda _: then())

    def load(self, model: ModelName, *, prefetched: bool) -> bool:
        """Have the weights come; False if there is no room for them yet."""
        engine = self.engines[model]
        if engine.mapped or engine.in_host is None:
            raise LabError(f"{model} is loaded already, or its source is unknown")
        if not self.has_room_for(model):
            return False
        engine.mapped = True
        self._holding[model] = engine
        if engine.in_host:
            link, lane, nbytes = self._inwards, WEIGHTS, engine.profile.shard_bytes
        else:
            link, lane, nbytes = self._disk, self._files, engine.profile.weight_bytes
        transfer = link.start(lane, nbytes, lambda _: self._end_load(model))
        engine.load = WeightLoad(link, lane, transfer, prefetched)
        self._recorder.loads += 1
        self._recorder.prefetches += prefetched
        return True

    def _end_load(self, model: ModelName) -> None:
        engine = self.engines[model]
        load, engine.load = engine.load, None
        assert load is not None, "only a load under way ends"
        self._ended(
            ModelLoaded(
                instance=self._number,
                model=model,
                moved_bytes=engine.profile.weight_bytes,
                seconds=load.transfer.seconds,
                queued_seconds=load.transfer.queued_seconds,
                prefetched=load.prefetched,
            )
        )

    def evict(self, model: ModelName) -> None:
        """The weights go at once, also those under way."""
        engine = self.engines[model]
        if not engine.mapped:
            raise LabError(f"{model} is evicted, but not loaded")
        if engine.load is not None:
            engine.load.link.cancel(engine.load.lane, engine.load.transfer)
            engine.load = None
        engine.mapped = False

    # --- KV --------------------------------------------------------------------------------------

    def move_out(self, command: MoveKv) -> bool:
        """Have KV go to the host tier; True."""
        engine = self.engines[command.model]
        moved = tuple(m.request for m in command.moves if m.request in engine.blocks)
        places = {m.request: len(m.host_offsets) for m in command.moves}
        blocks = 0
        for request in moved:
            held = engine.drop(request)
            if held != places[request]:
                raise LabError(f"{held} blocks of {request} go to {places[request]} places")
            blocks += held
        engine.leaving += blocks
        self._move(command, moved, blocks)
        return True

    def move_in(self, command: MoveKv, known: Known) -> bool:
        """Have KV come back, that of requests which are `known` still; False if there is no room
        for it yet."""
        engine = self.engines[command.model]
        arriving = [(m, life) for m in command.moves if (life := known(m.request)) is not None]
        blocks = sum(len(m.host_offsets) for m, _ in arriving)
        if not self.can_grow(command.model, blocks, command.kv_slabs):
            if self.moves_out:
                return False
            raise LabError(f"{blocks} blocks of {command.model} have no room in its slabs")
        for kv_move, life in arriving:
            if len(kv_move.host_offsets) != engine.shape.blocks(life.kv_tokens):
                raise LabError(f"the KV of {life.id} is not {len(kv_move.host_offsets)} blocks")
            engine.hold(life.id, len(kv_move.host_offsets))
        self._move(command, tuple(life.id for _, life in arriving), blocks)
        return True

    def _move(self, command: MoveKv, moved: tuple[RequestId, ...], blocks: int) -> None:
        engine = self.engines[command.model]
        nbytes = blocks * engine.shape.block_bytes
        outwards = command.direction is Direction.OUT

        def end(transfer: LinkTransfer | None) -> None:
            if transfer is not None and outwards:
                engine.leaving -= blocks
                self.moves_out -= 1
            elif transfer is not None:
                engine.arriving -= 1
            self._ended(
                KvMoved(
                    instance=self._number,
                    model=command.model,
                    direction=command.direction,
                    moved=moved,
                    missing=tuple(m.request for m in command.moves if m.request not in moved),
                    moved_bytes=nbytes,
                    seconds=0.0 if transfer is None else transfer.seconds,
                    queued_seconds=0.0 if transfer is None else transfer.queued_seconds,
                    kv_slabs=engine.slabs(),
                )
            )

        if not moved:
            end(None)
        elif outwards:
            self.moves_out += 1
            self._outwards.start(KV_OUT, nbytes // engine.profile.tp, end)
        else:
            engine.arriving += 1
            self._inwards.start(KV_IN, nbytes // engine.profile.tp, end)

    # --- room ------------------------------------------------------------------------------------

    @property
    def weight_slabs(self) -> int:
        """Of each GPU."""
        return sum([engine.weight_slabs for engine in self._holders() if engine.mapped])

    @property
    def kv_slabs(self) -> int:
        """Of each GPU."""
        return sum([engine.slabs() for engine in self._holders() if engine.used or engine.leaving])

    def kv_use(self) -> dict[int, tuple[int, int]]:
        """By the bytes of a block: bytes of the blocks in use, and of the slabs they lie in, on all
        GPUs together."""
        found: dict[int, tuple[int, int]] = {}
        for engine in self._holders():
            if engine.used or engine.leaving:
                shape = engine.shape.block_bytes
                used, mapped = found.get(shape, (0, 0))
                found[shape] = (
                    used + (engine.used + engine.leaving) * shape,
                    mapped + engine.slabs() * self._box.slab_bytes * engine.profile.tp,
                )
        return found

    def _holders(self) -> Collection[SimulatedEngine]:
        """The engines that hold slabs, and some that held some lately."""
        held = self._holding
        if len(held) > ENOUGH_TO_LOOK:
            for model in [m for m, e in held.items() if not (e.mapped or e.used or e.leaving)]:
                del held[model]
        return held.values()

    def has_room(self, slabs: int, what: str) -> bool:
        """Whether so many slabs are free now; raises `LabError` if they never will be."""
        mapped = self.weight_slabs + self.kv_slabs
        if mapped + slabs <= self._box.slabs:
            return True
        if not self.moves_out:
            raise LabError(f"{what} need {slabs} slabs, {self._box.slabs - mapped} are free")
        return False

    def has_room_for(self, model: ModelName) -> bool:
        """The same for its weights."""
        return self.has_room(self.engines[model].weight_slabs, f"the weights of {model}")

    def can_grow(self, model: ModelName, blocks: int, cap_slabs: int) -> bool:
        """Whether the model's KV may grow by so many blocks now."""
        engine = self._holding[model] = self.engines[model]
        slabs = engine.slabs(blocks)
        if slabs > cap_slabs:
            return False
        return self.has_room(slabs - engine.slabs(), f"the KV of {model}")
