"""The models that are served: add, change, load, evict, drain and remove them at run time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from appliance.checkpoints.adapters import SEPARATOR, AdapterPlace, full_name
from appliance.daemon.served_model import ServedModel
from appliance.observability.metrics import Metrics
from appliance.scheduling.machine import Machine
from appliance.service.event_log import EventLog, NoticeKind
from appliance.service.front_frames import FrontModel
from appliance.service.interface import (
    GenerationFailed,
    ModelExists,
    ModelNotFound,
    ModelTerms,
)
from appliance.vocabulary import (
    Event,
    ModelAdded,
    ModelChanged,
    ModelEvictRequested,
    ModelLoadRequested,
    ModelName,
    ModelRemoved,
)
from appliance.worker.process import WorkerProcess

log = logging.getLogger("appliance.daemon")


class ModelAdministration:
    """The served models, and those being removed. Used on the daemon's event loop. Each method
    costs O(1) but for `forget_removed`: O(models that are being removed)."""

    def __init__(
        self,
        models: Collection[ServedModel],
        machine: Machine,
        workers: Collection[WorkerProcess],
        feed: EventLog,
        metrics: Metrics,
        handle: Callable[[Event], None],
        forgotten: Callable[[ModelName], None],
    ) -> None:
        """`handle` gives the machine an event; `forgotten` is called when a model is gone."""
        self.served: dict[ModelName, ServedModel] = {m.spec.name: m for m in models}
        self.removing: dict[ModelName, asyncio.Event] = {}
        """Models that were removed, and when they are gone."""
        self.refused: dict[ModelName, str] = {}
        """Models whose front half cannot be built, and why."""
        self.on_change: Callable[[], None] = _ignore
        """Called when `front` has changed."""
        self.check_here: Callable[[ModelName], None] = _check_nothing
        """Raises `GenerationFailed` for a model of another server."""
        self.on_adapter_idle: Callable[[ModelName, str], None] = _ignore_adapter
        """Called when the last request of a hidden adapter is over."""
        self._machine = machine
        self._workers = workers
        self._feed = feed
        self._metrics = metrics
        self._handle = handle
        self._forgotten = forgotten
        self._live: Counter[ModelName] = Counter()
        """Requests of each model, and those of them that asked for an adapter by its full name."""
        self._failed: set[ModelName] = set()
        """Models of which it was reported that they cannot be served."""
        for name in self.served:
            metrics.declare(name)

    def find(self, name: ModelName) -> ServedModel:
        """Raises `ModelNotFound`, also for one that is being removed."""
        served = self.served.get(name)
        if served is None or name in self.removing:
            raise ModelNotFound(name)
        return served

    def base_of(self, name: ModelName) -> ModelName:
        """The model of this name or alias, or the one that has the adapter of this name. Raises
        `ModelNotFound`."""
        if name in self.served and name not in self.removing:
            return name
        for base in self.names():
            if name in self.served[base].adapters or name in self.served[base].aliases:
                return base
        raise ModelNotFound(name)

    def check_free(self, name: ModelName) -> None:
        """Raises `ModelExists` unless a model may be added under this name."""
        if name in self.served:
            raise ModelExists(name, removing=name in self.removing)
        for base, served in self.served.items():
            adapters = [full_name(base, one.name) for one in served.worker.adapters]
            if name in (*adapters, *served.aliases):
                raise ModelExists(name)

    def names(self) -> list[ModelName]:
        """Those that may be asked for, in the order of the catalogue."""
        return [name for name in self.served if name not in self.removing]

    def front(self) -> tuple[FrontModel, ...]:
        """The models that may be asked for, as front ends need them."""
        return tuple(self.served[name].front for name in self.names())

    # --- what operators do -----------------------------------------------------------------------

    def load(self, name: ModelName) -> None:
        """Have its weights brought to a device. Raises `ModelNotFound`, `GenerationFailed`."""
        self.check_here(name)
        self.find(name)
        reason = self._machine.failed.get(name) or self.refused.get(name)
        if reason is not None:
            raise GenerationFailed("model_failed", reason, 409)
        self._feed.tell(NoticeKind.MODEL_LOAD_REQUESTED, model=name)
        self._handle(ModelLoadRequested(model=name))

    def load_wanted(self) -> None:
        """Load the models that are to be loaded at the start."""
        for name in [name for name, served in self.served.items() if served.load]:
            self.load(name)

    def evict(self, name: ModelName) -> None:
        """Have it give back what it holds on devices. Raises `ModelNotFound`, and
        `GenerationFailed` for one that holds nothing here."""
        self.check_here(name)
        self.find(name)
        self._feed.tell(NoticeKind.MODEL_EVICT_REQUESTED, model=name)
        self._handle(ModelEvictRequested(model=name))

    def drain(self, name: ModelName, draining: bool) -> None:
        """Refuse new requests for it, or take them again. Raises as `evict` does."""
        self.check_here(name)
        served = self.find(name)
        spec = msgspec.structs.replace(served.spec, draining=draining)
        self._change(msgspec.structs.replace(served, spec=spec))

    def change(self, name: ModelName, terms: ModelTerms) -> None:
        """Serve the model on other terms from now on. Raises `ModelNotFound`."""
        served = self.find(name)
        spec = msgspec.structs.replace(
            served.spec, slo=terms.slo, batch_slo=terms.batch_slo, pinned=terms.pinned
        )
        aliases = terms.aliases
        self._change(
            msgspec.structs.replace(served, spec=spec, max_queue=terms.max_queue, aliases=aliases)
        )
        if aliases != served.aliases:
            self.on_change()

    def add(self, served: ServedModel, kv_floor_slabs: int) -> None:
        """Serve a model more from now on; the host tier has `kv_floor_slabs` for KV at least.
        Raises `ModelExists`."""
        name = served.spec.name
        self.check_free(name)
        self.served[name] = served
        self._metrics.declare(name)
        for worker in self._workers:
            worker.add(served.worker)
        self._feed.tell(NoticeKind.MODEL_ADDED, model=name)
        self._handle(ModelAdded(model=served.spec, kv_floor_slabs=kv_floor_slabs))
        self.on_change()
        if served.load:
            self.load(name)

    def change_adapters(
        self,
        name: ModelName,
        adapters: tuple[AdapterPlace, ...],
        *,
        hide: str = "",
        show: str = "",
    ) -> None:
        """Have the model know these adapters, and clients not ask for the one to `hide`, or ask
        again for the one to `show`. Others tell workers. Raises `ModelNotFound`."""
        served = self.find(name)
        hidden = (served.hidden | ({hide} if hide else set())) - {show}
        worker = msgspec.structs.replace(served.worker, adapters=adapters)
        changed = msgspec.structs.replace(served, worker=worker, hidden=frozenset(hidden))
        self.served[name] = changed
        if changed.adapters != served.adapters:
            self._feed.tell(
                NoticeKind.ADAPTERS_CHANGED, model=name, adapters=list(changed.adapters)
            )
            self.on_change()

    def remove(self, name: ModelName, *, force: bool) -> asyncio.Event:
        """Take no more requests for the model, and forget it when its last one has ended; with
        `force`, end them. The event is set when it is gone. Raises `ModelNotFound`."""
        if name not in self.removing:
            self.find(name)
            self.removing[name] = asyncio.Event()
            self._feed.tell(NoticeKind.MODEL_REMOVING, model=name)
            self.on_change()
        gone = self.removing[name]
        if force or not self._live[name]:
            self._remove(name)
        return gone

    def refuse(self, name: ModelName, reason: str) -> None:
        """A front end cannot build the model's front half: its requests fail with this reason."""
        if name not in self.served or name in self.refused:
            return
        self.refused[name] = reason
        self._note_failure(name, reason)

    # --- what happens to them --------------------------------------------------------------------

    def live(self, name: ModelName) -> int:
        """Requests of the model that have not ended."""
        return self._live[name]

    def live_of_adapter(self, full: ModelName) -> int:
        """Those of them that asked for an adapter."""
        return self._live[full]

    def began(self, name: ModelName, asked: ModelName) -> None:
        """A request of the model came, for an adapter if it `asked` for one by its full name."""
        self._live[name] += 1
        if asked:
            self._live[asked] += 1

    def ended(self, name: ModelName, asked: ModelName) -> None:
        """A request of the model is over."""
        self._live[name] -= 1
        if asked:
            self._adapter_ended(name, asked)
        if name in self.removing and not self._live[name]:
            self._remove(name)

    def note_failures(self) -> None:
        """Report models that are not served from now on, however the failure was found."""
        found = self._machine.failed
        if found.keys() == self._failed:
            return
        for model in found.keys() - self._failed - set(self._machine.removing):
            self._note_failure(model, found[model])
        self._failed = set(found)

    def forget_removed(self) -> None:
        """Forget those that the machine has forgotten."""
        for name in [name for name in self.removing if name not in self._machine.models]:
            del self.served[name], self._live[name]
            self.refused.pop(name, None)
            for worker in self._workers:
                worker.drop(name)
            self._forgotten(name)
            self._metrics.forget(name)
            self._feed.tell(NoticeKind.MODEL_REMOVED, model=name)
            self.removing.pop(name).set()

    def _adapter_ended(self, name: ModelName, asked: ModelName) -> None:
        self._live[asked] -= 1
        if self._live[asked]:
            return
        del self._live[asked]
        adapter = asked.removeprefix(f"{name}{SEPARATOR}")
        if adapter in self.served[name].hidden:
            self.on_adapter_idle(name, adapter)

    def _remove(self, name: ModelName) -> None:
        if name not in self._machine.removing:
            self._handle(ModelRemoved(model=name))

    def _note_failure(self, name: ModelName, reason: str) -> None:
        log.error("model %s cannot be served: %s", name, reason)
        self._feed.tell(NoticeKind.MODEL_FAILED, model=name, reason=reason)

    def _change(self, served: ServedModel) -> None:
        spec = served.spec
        self.served[spec.name] = served
        self._feed.tell(
            NoticeKind.MODEL_CHANGED,
            model=spec.name,
            draining=spec.draining,
            pinned=spec.pinned,
            slo=spec.slo,
            batch_slo=spec.batch_slo,
            max_queue=served.max_queue,
        )
        self._handle(
            ModelChanged(
                model=spec.name,
                slo=spec.slo,
                batch_slo=spec.batch_slo,
                pinned=spec.pinned,
                draining=spec.draining,
            )
        )


def _check_nothing(name: ModelName) -> None:
    pass


def _ignore() -> None:
    pass


def _ignore_adapter(model: ModelName, adapter: str) -> None:
    pass
