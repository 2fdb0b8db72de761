"""The appliance as one key sees it over HTTP: its models, and also the requests that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from appliance.access.admission import Admission
from appliance.access.auth import Access, current
from appliance.access.keys import Key
from appliance.service.interface import (
    Activity,
    InstanceActivity,
    Load,
    ModelActivity,
    ModelCard,
    ModelNotFound,
    Readiness,
    RequestActivity,
    Service,
    Snapshot,
)
from appliance.usage.ledger import Ledger
from appliance.vocabulary import ModelName, RequestId


def gated(
    service: Service, access: Access, admission: Admission, ledger: Ledger | None = None
) -> Service:
    """`service` as the caller of the request that is answered may see it
    (`appliance.access.auth.current`)."""
    return cast(Service, _Gate(service, access, admission, ledger))


class _Gate:
    """Answers itself what depends on the caller; everything else is the service's own."""

    def __init__(
        self, service: Service, access: Access, admission: Admission, ledger: Ledger | None
    ) -> None:
        self._service = service
        self._access = access
        self._admission = admission
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def models(self) -> list[ModelCard]:
        caller = current.get()
        return [card for card in self._service.models() if caller.allows(card.named)]

    def model(self, name: ModelName) -> ModelCard:
        card = self._service.model(name)
        if not current.get().allows(card.named):
            raise ModelNotFound(name)
        return card

    def activity(self) -> Activity:
        """Without what tells of models that the key does not know."""
        key, activity = current.get().key, self._with_queues(self._service.activity())
        if key is None or not key.models:
            return activity
        # A key may have an adapter alone; whether that is loaded shows in its base.
        known = {card.model for card in self._service.models() if key.allows(card.named)}
        return msgspec.structs.replace(
            activity,
            models=tuple(
                model
                for model in activity.models
                if model.model in known or key.allows(model.model)
            ),
            instances=tuple(_shown(instance, key) for instance in activity.instances),
            host_bytes=_known(activity.host_bytes, key),
        )

    def load(self) -> Load:
        """With requests that wait for the turn of their key, and names that the key knows."""
        load, turns = self._service.load(), self._admission.waiting()
        ages = (load.queue_age_seconds, *(request.age_seconds for request in turns))
        queues = self._queues()
        load = msgspec.structs.replace(
            load,
            waiting=load.waiting + len(turns),
            waiting_by_model=dict(Counter(load.waiting_by_model) + queues),
            requests_by_model=dict(Counter(load.requests_by_model) + queues),
            asked_models=load.asked_models + len(queues.keys() - load.requests_by_model.keys()),
            queue_age_seconds=max(ages),
        )
        key = current.get().key
        if key is None or not key.models:
            return load
        fields = ("catalogue", "resident", "coming", "host")
        known = {one: tuple(filter(key.allows, getattr(load, one))) for one in fields}
        version = Load.version_of(known["catalogue"], known["resident"])
        counts = {
            one: {name: n for name, n in getattr(load, one).items() if key.allows(name)}
            for one in ("waiting_by_model", "requests_by_model")
        }
        models = {  # of the key's own names, so that numbers tell of no other models
            "asked_models": min(load.asked_models, len(counts["requests_by_model"])),
            "resident_models": min(load.resident_models, len(known["resident"])),
            "coming_models": min(load.coming_models, len(known["coming"])),
        }
        return msgspec.structs.replace(load, **known, **counts, **models, version=version)

    def model_activity(self, name: ModelName) -> ModelActivity:
        """Also of the base of an adapter that the key knows. Raises `ModelNotFound`."""
        found = self._service.model_activity(name)
        if not current.get().allows(name):
            known = {one for card in self.models() for one in (card.id, card.model)}
            if name not in known:
                raise ModelNotFound(name)
        return _queued(found, self._queues())

    def _with_queues(self, activity: Activity) -> Activity:
        """Requests that wait for the turn of their key are waiting requests of their models."""
        queues = self._queues()
        models = tuple(_queued(model, queues) for model in activity.models)
        return msgspec.structs.replace(activity, models=models) if queues else activity

    def _queues(self) -> Counter[ModelName]:
        """How many requests of each model wait for the turn of their key."""
        return Counter(request.model for request in self._admission.waiting())

    def requests(self) -> list[RequestActivity]:
        """Also those that wait for their turn."""
        return self._with_waiting(self._service.requests())

    def _with_waiting(self, live: Sequence[RequestActivity]) -> list[RequestActivity]:
        both = [*live, *self._admission.waiting()]
        return sorted(both, key=lambda one: one.age_seconds, reverse=True)

    def request(self, request: RequestId) -> RequestActivity:
        return self._admission.waiting_one(request) or self._service.request(request)

    def cancel_request(self, request: RequestId) -> None:
        if not self._admission.turn_away(request):
            self._service.cancel_request(request)

    def snapshot(self) -> Snapshot:
        snapshot = self._service.snapshot()
        requests = tuple(self._with_waiting(snapshot.requests))
        readiness = self._with_ledger(snapshot.readiness)
        status = self._with_queues(snapshot.status)
        return msgspec.structs.replace(
            snapshot, requests=requests, readiness=readiness, status=status
        )

    def readiness(self) -> Readiness:
        """Also whether usage is written down."""
        return self._with_ledger(self._service.readiness())

    def _with_ledger(self, readiness: Readiness) -> Readiness:
        if self._ledger is None or not self._ledger.trouble:
            return readiness
        degraded = (*readiness.degraded, self._ledger.trouble)
        return msgspec.structs.replace(readiness, degraded=degraded)

    def metrics(self) -> bytes:
        metrics = self._access.metrics
        metrics.waiting(Counter(self._admission.keys_waiting()))
        keys = metrics.registry.exposition() if self._access.has_keys else b""
        return self._service.metrics() + keys


def _queued(model: ModelActivity, queues: Counter[ModelName]) -> ModelActivity:
    """With those in its queue."""
    return msgspec.structs.replace(model, waiting=model.waiting + queues[model.model])


def _shown(instance: InstanceActivity, key: Key) -> InstanceActivity:
    """An instance, without the models that the key does not know."""
    runs = instance.model is not None and key.allows(instance.model)
    return msgspec.structs.replace(
        instance,
        model=instance.model if runs else None,
        pool_bytes=_known(instance.pool_bytes, key),
        prefetched=tuple(model for model in instance.prefetched if key.allows(model)),
    )


def _known(sizes: Mapping[str, int], key: Key) -> dict[str, int]:
    """Sizes by owner, without those of models that the key does not know."""
    return {
        owner: size
        for owner, size in sizes.items()
        if not (model := owner.partition(":")[2]) or key.allows(model)
    }
