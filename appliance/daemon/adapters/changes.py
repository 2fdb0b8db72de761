"""Adapters are put to the places that a model has for them, and places are cleared again.

A place is written on every device that has the model's weights, and in its master image. Workers
write, each as often as it is asked to; what they write is the same bytes. All workers that can have
the model are asked, at least twice:

    1. from its answer on, no worker fills an image as the model was before
    2. so what is written now stays; again, while an instance came to load from the image meanwhile

The machine holds the image until every order was answered, or its worker died: one that does not
answer in time writes later, to slabs that have to be the image's still. If no instance loads from
it, nothing could write to it: it goes, and is filled anew. No request may ask for an adapter before
all that, or before the requests of the one that had its place are over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec

from appliance.checkpoints.adapters import AdapterPlace, adapter_version, full_name
from appliance.daemon.models import ModelAdministration
from appliance.daemon.worker_calls import WorkerCalls
from appliance.scheduling.machine import Machine
from appliance.service.interface import AdapterNotPlaced, ModelExists, ModelNotFound
from appliance.vocabulary import Event, ImageHeld, InstanceId, ModelName
from appliance.worker import frames
from appliance.worker.process import WorkerProcess

ANSWER_SECONDS: Final = 30.0
"""How long a worker may take, its job under way included."""
MOST_ROUNDS: Final = 8

log = logging.getLogger("appliance.daemon")


class AdapterChanges:
    """Used on the daemon's event loop. Changes wait for each other. One costs each worker the
    reading of an adapter, and the machine nothing."""

    def __init__(
        self,
        catalogue: ModelAdministration,
        machine: Machine,
        workers: Mapping[InstanceId, WorkerProcess],
        send: Callable[[InstanceId, frames.Down], None],
        handle: Callable[[Event], None],
    ) -> None:
        """`send` gives a worker a frame, `handle` the machine an event."""
        self.held: set[ModelName] = set()
        """Models whose images are written to: what is compared with them may differ."""
        self._catalogue = catalogue
        self._machine = machine
        self._workers = workers
        self._pass_on = send
        self._handle = handle
        self._calls = WorkerCalls[frames.AdaptersPut](self._send)
        self._orders: dict[tuple[InstanceId, int], ModelName] = {}
        """Those that were neither answered nor lost, however long ago they were sent."""
        self._writing: set[ModelName] = set()
        self._changing = asyncio.Lock()
        self._clearing: set[asyncio.Task[None]] = set()
        """Held here, as the loop does not."""
        catalogue.on_adapter_idle = self._clear_soon

    async def put(
        self,
        model: ModelName,
        name: str,
        path: str,
        *,
        replace: bool = False,
        save: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve the model with one adapter more; with `replace`, with another one of a name that it
        has. `save` is called before clients may ask for it. Raises `ModelNotFound`, `ModelExists`,
        `AdapterNotPlaced`, `CheckpointError`, what `save` raises: nothing is changed then."""
        await self.cleared()
        async with self._changing:
            self._catalogue.find(model)
            version = await asyncio.to_thread(adapter_version, Path(path))
            served = self._catalogue.find(model)
            room, full = served.worker.adapter_room, full_name(model, name)
            known = {one.name: one for one in served.worker.adapters}
            if full in self._catalogue.served:  # a model that leaves
                raise ModelExists(full, removing=full in self._catalogue.removing)
            old = known.get(name)
            if old is not None:
                self._check_replaceable(full, hidden=name in served.hidden, replace=replace)
            free = sorted(set(range(room.slots if room else 0)) - {o.slot for o in known.values()})
            if old is None and not free:
                raise AdapterNotPlaced(
                    f"{model} has no free place for {full}: {len(known)} of max_loras = "
                    f"{room.slots if room else 0} are taken; remove an adapter, or raise max_loras "
                    "and restart"
                )
            slot = old.slot if old is not None else free[0]
            place = AdapterPlace(name, path, slot, version)
            others = tuple(one for one in served.worker.adapters if one != old)
            self._catalogue.change_adapters(model, (*others, place), hide=name)
            try:
                await self._write(model, place.slot)
                if save is not None:
                    await save()
            except BaseException:
                await self._take_back(model, place, old)
                raise
            self._catalogue.change_adapters(model, (*others, place), show=name)

    def remove(self, model: ModelName, name: str) -> int:
        """Take no more requests for an adapter, and clear its place when the last one has ended;
        how many are under way. One that leaves already may be removed again. Raises
        `ModelNotFound`."""
        served = self._catalogue.find(model)
        full = full_name(model, name)
        if not any(one.name == name for one in served.worker.adapters):
            raise ModelNotFound(full)
        self._catalogue.change_adapters(model, served.worker.adapters, hide=name)
        live = self._catalogue.live_of_adapter(full)
        if not live:
            self._clear_soon(model, name)
        return live

    def answered(self, message: frames.AdaptersPut) -> None:
        """A worker has written, or could not."""
        self._calls.answered(message.instance, message.number, message)
        model = self._orders.pop((message.instance, message.number), None)
        if model is not None:
            self._let_go(model)

    def lost(self, instance: InstanceId) -> None:
        """The worker died; it will not answer. The next one begins with what was changed."""
        self._calls.lost(instance)
        for order in [order for order in self._orders if order[0] == instance]:
            # The machine hears of its death first.
            asyncio.get_running_loop().call_soon(self._let_go, self._orders.pop(order))

    async def cleared(self) -> None:
        """Return when the places of all adapters that have left are free."""
        while self._clearing:
            await asyncio.wait(self._clearing)

    async def stop(self) -> None:
        """Clear no more places."""
        for task in self._clearing:
            task.cancel()
        await asyncio.gather(*self._clearing, return_exceptions=True)

    def _check_replaceable(self, full: ModelName, *, hidden: bool, replace: bool) -> None:
        """Raises `ModelExists`, `AdapterNotPlaced`. One that is hidden without live requests could
        not be put back: anything may take its place."""
        live = self._catalogue.live_of_adapter(full)
        if (hidden and live) or not (hidden or replace):
            raise ModelExists(full, removing=hidden)
        if live:
            raise AdapterNotPlaced(
                f"{live} requests of {full} are under way: replace it when they have ended, or "
                "give the new one another name"
            )

    def _clear_soon(self, model: ModelName, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._clear(model, name))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _clear(self, model: ModelName, name: str) -> None:
        """An adapter has left, if it is still there and was not taken back."""
        async with self._changing:
            served = self._catalogue.served.get(model)
            if served is None or model in self._catalogue.removing or name not in served.hidden:
                return
            place = next(one for one in served.worker.adapters if one.name == name)
            others = tuple(one for one in served.worker.adapters if one != place)
            self._catalogue.change_adapters(model, others, show=name)
            try:
                await self._write(model, place.slot)
            except (ModelNotFound, AdapterNotPlaced) as error:
                # The place is free all the same: what is written next to it is all that counts.
                log.warning("what is left of %s is not cleared: %s", full_name(model, name), error)

    async def _take_back(
        self, model: ModelName, place: AdapterPlace, old: AdapterPlace | None
    ) -> None:
        """What was begun failed: serve the model as before."""
        served = self._catalogue.served.get(model)
        if served is None or model in self._catalogue.removing:
            return
        others = tuple(one for one in served.worker.adapters if one != place)
        before = others if old is None else (*others, old)
        if old is None:
            self._catalogue.change_adapters(model, before, show=place.name)
        else:
            self._catalogue.change_adapters(model, before)
        try:
            await self._write(model, place.slot)
        except (ModelNotFound, AdapterNotPlaced) as error:
            log.error("%s is not as it was before: %s", model, error)
            return
        if old is not None:
            self._catalogue.change_adapters(model, before, show=place.name)

    async def _write(self, model: ModelName, slot: int) -> None:
        """Have a place written anew wherever the model's weights are. Raises `ModelNotFound`,
        `AdapterNotPlaced`: what is in the place is undefined then."""
        worker_model = self._catalogue.find(model).worker
        for worker in self._workers.values():
            worker.add(worker_model)
        self._writing.add(model)
        if model not in self.held:
            self.held.add(model)
            self._handle(ImageHeld(model=model, held=True))
        stale = False
        try:
            for number in range(MOST_ROUNDS):
                attached = self._attached(model)
                await self._tell(worker_model, slot)
                if number and self._attached(model) == attached:
                    break
            else:
                raise AdapterNotPlaced(f"instances come and go too fast to change {model}")
            master = self._machine.weight_cache.get(model)
            stale = master is not None and master.filler is None and not any(attached.values())
        finally:
            self._writing.discard(model)
            self._let_go(model, stale=stale)

    def _let_go(self, model: ModelName, *, stale: bool = False) -> None:
        """Hold the image no more, unless a worker may write to it still."""
        if model in self._writing or model in self._orders.values() or model not in self.held:
            return
        self.held.discard(model)
        self._handle(ImageHeld(model=model, held=False, stale=stale))

    async def _tell(self, model: frames.WorkerModel, slot: int) -> None:
        def message(number: int) -> frames.PutAdapters:
            return frames.PutAdapters(number, model.name, model.adapters, (slot,))

        asked = self._up(model.name)
        answers = await self._calls.call(asked, message, ANSWER_SECONDS)
        for instance in asked:
            if instance not in answers:
                raise AdapterNotPlaced(
                    f"instance {instance} did not answer within {ANSWER_SECONDS:g} s; try again"
                )
            answer = answers[instance]
            if answer is not None and answer.refused is not None:
                raise AdapterNotPlaced(answer.refused)

    def _send(self, instance: InstanceId, message: frames.Down) -> None:
        assert isinstance(message, frames.PutAdapters)
        self._orders[instance, message.number] = message.model
        image = self._attached(message.model).get(instance, False)
        self._pass_on(instance, msgspec.structs.replace(message, image=image))

    def _up(self, model: ModelName) -> Collection[InstanceId]:
        """The instances that are up, of those that can have the model."""
        served = self._catalogue.served.get(model)
        return [
            instance.id
            for instance in self._machine.instances.values()
            if instance.up and (served is None or served.spec.fits(instance.id))
        ]

    def _attached(self, model: ModelName) -> dict[InstanceId, bool]:
        """Of each instance that is up and can have the model, whether it loads the model from the
        image that there is."""
        master = self._machine.weight_cache.get(model)
        found = {}
        for number in self._up(model):
            engine = self._machine.instances[number].engines.get(model)
            found[number] = (
                master is not None
                and master.filler is None
                and engine is not None
                and engine.attached == master.version
            )
        return found
