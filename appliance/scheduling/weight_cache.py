"""Master images of weights in the host tier: which models have one, which give way when it is full.

    none -> being filled by one instance -> whole, and shared by all

A model without a whole image is served all the same: instances load it from its files. When an
image is wanted and there is no room, whole images that are not being read go, the least recently
used first, never a pinned one, nor one that is held: workers write to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from appliance.memory.ledger import HostLedger
from appliance.vocabulary import InstanceId, ModelName, ModelSpec


@dataclass(slots=True)
class Master:
    """The image of one model; `version` tells it from earlier ones, at other places."""

    offsets: tuple[int, ...]
    version: int
    filler: InstanceId | None
    """The instance that writes it; None once it is whole."""
    used: float


class HostWeightCache:
    """The images that there are. Every operation is O(models) at most."""

    def __init__(self, models: Mapping[ModelName, ModelSpec], host: HostLedger) -> None:
        self._pinned = {model.name for model in models.values() if model.pinned}
        self._host = host
        self._weight_cache: dict[ModelName, Master] = {}
        self._versions = 0
        self._evict_pending: set[ModelName] = set()
        self._held: set[ModelName] = set()
        # Room for those that fit, before KV takes it: pinned ones first.
        room = host.total_slabs - host.kv_floor_slabs
        for model in sorted(models.values(), key=lambda model: not model.pinned):
            slabs = -(-model.weight_bytes // host.slab_bytes)
            if slabs <= room:
                host.hold_back(model.name, slabs)
                room -= slabs

    @property
    def evict_pending(self) -> Collection[ModelName]:
        """Not needed any more, but still being written or read."""
        return self._evict_pending

    @property
    def whole(self) -> frozenset[ModelName]:
        """Models whose image is whole. O(images)."""
        return frozenset([m for m, master in self._weight_cache.items() if master.filler is None])

    def get(self, model: ModelName) -> Master | None:
        """The model's image, whole or not."""
        return self._weight_cache.get(model)

    def take(
        self,
        model: ModelName,
        slabs: int,
        filler: InstanceId,
        now: float,
        spared: Collection[ModelName] | None = None,
    ) -> Master | None:
        """An image for `filler` to write, or None if there is no room.

        Room is made by letting images go, except of `spared` models; with None, none goes.
        """
        if spared is not None:
            self._make_room(model, slabs, spared)
        offsets = self._host.take_weights(model, slabs)
        if offsets is None:
            return None
        self._versions += 1
        master = self._weight_cache[model] = Master(offsets, self._versions, filler, now)
        return master

    def add(self, model: ModelSpec, kv_floor_slabs: int, spared: Collection[ModelName]) -> None:
        """Hold room back for a new model, if there is some. If its KV takes more than that of any
        other, room for that comes first: see `make_kv_room`."""
        self.pin(model.name, model.pinned)
        self._host.kv_floor_slabs = max(self._host.kv_floor_slabs, kv_floor_slabs)
        self.make_kv_room(spared)
        slabs = -(-model.weight_bytes // self._host.slab_bytes)
        if slabs <= self._host.room_for_weights(model.name):
            self._host.hold_back(model.name, slabs)

    def make_kv_room(self, spared: Collection[ModelName]) -> None:
        """Give up room held back for images, then images, except of `spared` models, until KV has
        its least room; as far as that is possible now."""
        held_back = self._host.held_back
        for model in sorted(held_back, key=lambda model: (model in self._pinned, model)):
            if not self._host.short_slabs:
                return
            self._host.hold_back(model, 0)
        for model in self._victims(spared):
            if not self._host.short_slabs:
                return
            self._drop(model)

    def clear_kv_room(self, spared: Collection[ModelName]) -> bool:
        """Let images go, except of `spared` models, that lie in KV's least room, the end of the
        tier: a block longer than a slab needs several in a row. Whether one will go later."""
        first = self._host.kv_floor_offset
        lying = {
            model
            for model in self._weight_cache.keys() - self._pinned
            if max(self._weight_cache[model].offsets, default=-1) >= first
        }
        going = [model for model in self._victims(spared) if model in lying]
        for model in going:
            self._drop(model)
        return len(lying) > len(going)

    def pin(self, model: ModelName, pinned: bool) -> None:
        """Whether the model's image never gives way, once there is one."""
        if pinned:
            self._pinned.add(model)
        else:
            self._pinned.discard(model)

    def hold(self, model: ModelName, held: bool) -> None:
        """Whether the model's image, if it has one, stays whatever happens."""
        if held:
            self._held.add(model)
        else:
            self._held.discard(model)

    def discard(self, model: ModelName) -> None:
        """Let a whole image go that no instance loads from; it is made anew when it is wanted."""
        master = self._weight_cache.get(model)
        if master is not None and master.filler is None:
            self._drop(model)

    def touch(self, model: ModelName, now: float) -> None:
        """The model runs now."""
        if model in self._weight_cache:
            self._weight_cache[model].used = now

    def filled(self, model: ModelName, version: int, slabs: int | None = None) -> None:
        """The image of this version is whole; an older one is gone, and does not matter. Encoded,
        it takes the first `slabs` of its slabs, and gives the others back."""
        master = self._weight_cache.get(model)
        if master is None or master.version != version:
            return
        if slabs is not None and slabs < len(master.offsets):
            self._host.shrink_weights(model, slabs)
            master.offsets = master.offsets[:slabs]
        master.filler = None

    def give_up(self, model: ModelName, instance: InstanceId | None) -> None:
        """The model cannot be served, as an instance reports, or was removed: neither image nor
        room for one is kept. The image goes with `reap`, as it may be in use."""
        self._host.hold_back(model, 0)
        master = self._weight_cache.get(model)
        if master is None:
            return
        if master.filler == instance:
            master.filler = None
        self._evict_pending.add(model)

    def reap(self, read: Collection[ModelName]) -> None:
        """Free the images whose eviction is pending, but for those that are read or written."""
        for model in self._evict_pending - self._held - set(read):
            if self._weight_cache[model].filler is None:
                self._drop(model)

    def lost(self, instance: InstanceId) -> None:
        """What the instance was writing will never be whole."""
        for model in [m for m, master in self._weight_cache.items() if master.filler == instance]:
            self._drop(model)

    def _make_room(self, model: ModelName, slabs: int, spared: Collection[ModelName]) -> None:
        """Let images go until `slabs` fit; none if even all of them would not be enough."""
        victims = list(self._victims(spared))
        room = self._host.room_for_weights(model)
        if room + sum(len(self._weight_cache[victim].offsets) for victim in victims) < slabs:
            return
        for victim in victims:
            if self._host.room_for_weights(model) >= slabs:
                break
            self._drop(victim)

    def _victims(self, spared: Collection[ModelName]) -> Iterable[ModelName]:
        """Images that may go, the least recently used first."""
        free = self._weight_cache.keys() - self._pinned - self._held - set(spared)
        return sorted(
            (model for model in free if self._weight_cache[model].filler is None),
            key=lambda model: (self._weight_cache[model].used, model),
        )

    def _drop(self, model: ModelName) -> None:
        del self._weight_cache[model]
        self._evict_pending.discard(model)
        self._host.give_weights(model)
