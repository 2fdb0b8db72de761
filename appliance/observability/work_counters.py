"""Which model each instance runs, and which were brought in ahead: switches and prefetches."""

from __future__ import annotations

from collections import defaultdict

from appliance.observability.metrics import Metrics
from appliance.service.event_log import EventLog, NoticeKind
from appliance.vocabulary import InstanceId, ModelName


class Switches:
    """Counted and told as they are ordered. An order costs O(1), a model that is forgotten
    O(instances)."""

    def __init__(self, metrics: Metrics, feed: EventLog) -> None:
        self._metrics = metrics
        self._feed = feed
        self._running: dict[InstanceId, ModelName] = {}
        self._prefetched: defaultdict[InstanceId, set[ModelName]] = defaultdict(set)

    def running(self, instance: InstanceId) -> ModelName | None:
        """The model that runs, or ran last."""
        return self._running.get(instance)

    def prefetched(self, instance: InstanceId) -> tuple[ModelName, ...]:
        """Models that were brought in ahead and did not run since, by name."""
        return tuple(sorted(self._prefetched.get(instance, ())))

    def prefetches(self, instance: InstanceId, model: ModelName) -> None:
        """The model is brought in ahead."""
        self._prefetched[instance].add(model)
        self._metrics.prefetch("started")

    def runs(self, instance: InstanceId, model: ModelName, reason: str) -> None:
        """The model computes now: a ``prefill`` or a ``turn``, which is the `reason`."""
        if model in self._prefetched[instance]:
            self._prefetched[instance].remove(model)
            self._metrics.prefetch("used")
        if self._running.get(instance) != model:
            self._running[instance] = model
            self._metrics.switch(instance, model, reason)
            self._feed.tell(NoticeKind.MODEL_SWITCHED, instance=instance, model=model)

    def evicts(self, instance: InstanceId, model: ModelName) -> None:
        """The model loses its place."""
        if model in self._prefetched[instance]:
            self._prefetched[instance].remove(model)
            self._metrics.prefetch("wasted")
        self._feed.tell(NoticeKind.MODEL_EVICTED, instance=instance, model=model)

    def lost(self, instance: InstanceId) -> None:
        """Its worker died; what it had is neither used nor wasted."""
        self._running.pop(instance, None)
        self._prefetched.pop(instance, None)

    def forget(self, model: ModelName) -> None:
        """The model is gone everywhere."""
        for prefetched in self._prefetched.values():
            prefetched.discard(model)
        self._running = {
            instance: name for instance, name in self._running.items() if name != model
        }
