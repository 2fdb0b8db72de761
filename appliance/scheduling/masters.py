"""Master images of weights in the host tier: who has one, who gives way when it is full.

    none -> being filled by one instance -> whole, and shared by all

A model without a whole image is served all the same: instances load it from its files. When an
image is wanted and there is no room, whole images that nobody reads go, the least recently used
first, never a pinned one.
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
    """Who writes it; nobody once it is whole."""
    used: float
    doomed: bool = False
    """Nobody wants it, but it is still being written."""


class Masters:
    """The images that there are. Every operation is O(models) at most."""

    def __init__(self, models: Mapping[ModelName, ModelSpec], host: HostLedger) -> None:
        self._pinned = {model.name for model in models.values() if model.pinned}
        self._host = host
        self._masters: dict[ModelName, Master] = {}
        self._versions = 0
        # Room for those that fit, before KV takes it: pinned ones first.
        room = host.total_slabs - host.kv_floor_slabs
        for model in sorted(models.values(), key=lambda model: not model.pinned):
            slabs = -(-model.weight_bytes // host.slab_bytes)
            if slabs <= room:
                host.hold_back(model.name, slabs)
                room -= slabs

    def get(self, model: ModelName) -> Master | None:
        """The model's image, whole or not."""
        return self._masters.get(model)

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
        master = self._masters[model] = Master(offsets, self._versions, filler, now)
        return master

    def touch(self, model: ModelName, now: float) -> None:
        """The model runs now."""
        if model in self._masters:
            self._masters[model].used = now

    def filled(self, model: ModelName, version: int) -> None:
        """The image of this version is whole; an older one is gone, and does not matter."""
        master = self._masters.get(model)
        if master is None or master.version != version:
            return
        master.filler = None
        if master.doomed:
            self._drop(model)

    def give_up(self, model: ModelName, instance: InstanceId) -> None:
        """The model cannot be served, says an instance: neither image nor room for one is kept.
        What another instance is writing goes when that is done."""
        self._host.hold_back(model, 0)
        master = self._masters.get(model)
        if master is None:
            return
        if master.filler in (None, instance):
            self._drop(model)
        else:
            master.doomed = True

    def lost(self, instance: InstanceId) -> None:
        """What the instance was writing will never be whole."""
        for model in [m for m, master in self._masters.items() if master.filler == instance]:
            self._drop(model)

    def _make_room(self, model: ModelName, slabs: int, spared: Collection[ModelName]) -> None:
        """Let images go until `slabs` fit; none if even all of them would not be enough."""
        victims = list(self._victims(spared))
        room = self._host.room_for_weights(model)
        if room + sum(len(self._masters[victim].offsets) for victim in victims) < slabs:
            return
        for victim in victims:
            if self._host.room_for_weights(model) >= slabs:
                break
            self._drop(victim)

    def _victims(self, spared: Collection[ModelName]) -> Iterable[ModelName]:
        """Images that may go, the least recently used first."""
        free = self._masters.keys() - self._pinned - set(spared)
        return sorted(
            (model for model in free if self._masters[model].filler is None),
            key=lambda model: (self._masters[model].used, model),
        )

    def _drop(self, model: ModelName) -> None:
        del self._masters[model]
        self._host.give_weights(model)
