"""What follows when an instance is lost or quarantined, and when it is back.

The death of a worker counts against what it was at: what keeps killing workers is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from appliance.scheduling.cluster import Cluster
from appliance.scheduling.lifecycle import KvPlace
from appliance.scheduling.model_lifecycle import ModelLifecycle
from appliance.scheduling.request_book import RequestBook
from appliance.scheduling.router import Router
from appliance.scheduling.state import (
    BuildJob,
    InstanceState,
    PrefillJob,
    RequestState,
    TurnJob,
)
from appliance.scheduling.weight_cache import HostWeightCache
from appliance.vocabulary import (
    InstanceId,
    InstanceLost,
    InstanceQuarantined,
    InstanceReleased,
    InstanceUp,
    ModelName,
    ModelSpec,
    RequestId,
)

MAX_REQUEST_LOSSES: Final = 5
"""A request that was computed when a worker died, this often without a token in between, ends."""


class Recovery:
    """Takes instances out of the books and back in. The loss of one looks at all requests."""

    def __init__(
        self,
        models: Mapping[ModelName, ModelSpec],
        requests: RequestBook,
        cluster: Cluster,
        router: Router,
        lifecycle: ModelLifecycle,
        weight_cache: HostWeightCache,
    ) -> None:
        self._models = models
        self._requests = requests
        self._cluster = cluster
        self._router = router
        self._lifecycle = lifecycle
        self._weight_cache = weight_cache

    def up(self, event: InstanceUp) -> bool:
        """A worker is ready; its device is empty."""
        instance = self._cluster.instances[event.instance]
        instance.restart(self._models_on(instance), event.slabs)
        self._cluster.engines_gone()
        instance.up = True
        instance.ending = instance.quarantine is not None  # it greeted while it was being ended
        self._router.plan()
        self._router.place_unplaced()
        return True

    def quarantined(self, event: InstanceQuarantined) -> bool:
        """What it has stays in the books until its worker has ended, be it released meanwhile or
        not; then it is as one lost."""
        instance = self._cluster.instances[event.instance]
        instance.ending = instance.up
        self._set_quarantine(event.instance, event.reason)
        return True

    def released(self, event: InstanceReleased) -> bool:
        """It serves again, once its worker is up."""
        self._set_quarantine(event.instance, None)
        return True

    def _set_quarantine(self, number: InstanceId, reason: str | None) -> None:
        instance = self._cluster.instances[number]
        instance.quarantine = reason
        instance.view = None
        self._router.plan()
        self._router.place_unplaced()

    def lost(self, event: InstanceLost) -> bool:
        """The instance's worker is gone, with all that was on its device."""
        instance = self._cluster.instances[event.instance]
        ordered, instance.ending = instance.ending, False
        instance.up = False
        self._weight_cache.lost(instance.id)
        self._lifecycle.lost(instance.id)
        if not ordered:  # else it is not for what it was at
            self._blame(instance)
        # After the blame, which may end requests whose KV is on its way: no report of it will come.
        self._requests.lost(instance.id)
        orphaned = [
            request
            for request in self._requests.live.values()
            if instance.id in (request.instance, request.kv_instance)
        ]
        for request in orphaned:
            self._orphan(request, instance)
        instance.restart(self._models_on(instance), 0)
        self._cluster.engines_gone()
        self._router.plan()
        self._router.place_all(orphaned)
        return True

    def _models_on(self, instance: InstanceState) -> list[ModelName]:
        """Those that it can have engines for."""
        return [name for name, spec in self._models.items() if spec.fits(instance.id)]

    def _orphan(self, request: RequestState, lost: InstanceState) -> None:
        """Take a request off a lost instance. KV that is whole in the host tier survives."""
        if request.kv is KvPlace.ARRIVING:
            request.to_kv(KvPlace.HOST, None)
        elif request.kv_instance == lost.id:
            request.kv, request.kv_instance = KvPlace.NONE, None
            self._requests.uncover(request)
        self._requests.unplace(request)

    def _blame(self, lost: InstanceState) -> None:
        """Count a death against what the worker was at; what keeps killing workers is given up."""
        match lost.job:
            case BuildJob(model=model):
                self._lifecycle.count_build_loss(model, lost.id)
            case PrefillJob(model=model, request=request):
                self._count_request_losses([request])
                self._lifecycle.count_run_loss(model, lost.id)
            case TurnJob(model=model, requests=requests, prompts=prompts):
                self._count_request_losses((*requests, *prompts))
                self._lifecycle.count_run_loss(model, lost.id)

    def _count_request_losses(self, names: Iterable[RequestId]) -> None:
        for request in [self._requests.live[name] for name in names if name in self._requests.live]:
            request.losses += 1
            if request.losses >= MAX_REQUEST_LOSSES:
                message = f"{request.losses} workers in a row died computing it"
                self._requests.reject(request, "request_failed", message)
