"""Metrics and events of the work of instances: switches, prefetches, loads, KV swaps, prefills."""

from __future__ import annotations

from collections import defaultdict

from appliance.observability.metrics import Metrics
from appliance.service.event_log import EventLog, NoticeKind
from appliance.vocabulary import (
    Command,
    Event,
    EvictModel,
    InstanceId,
    KvMoved,
    KvRestored,
    KvSpilled,
    ModelLoaded,
    ModelName,
    PrefetchModel,
    PrefillDone,
    RunPrefill,
    RunTurn,
    TurnEnded,
)


class WorkCounters:
    """Counts what the machine orders and what workers report. A command or a report costs O(1), a
    model that is forgotten O(instances)."""

    def __init__(self, metrics: Metrics, feed: EventLog) -> None:
        self._metrics = metrics
        self._feed = feed
        self._running: dict[InstanceId, ModelName] = {}
        self.drafts: dict[ModelName, tuple[int, int]] = {}
        """Tokens that were drafted of each model that has drafts, and those that became output."""
        self._prefetched: defaultdict[InstanceId, set[ModelName]] = defaultdict(set)

    def running(self, instance: InstanceId) -> ModelName | None:
        """The model that runs, or ran last."""
        return self._running.get(instance)

    def prefetched(self, instance: InstanceId) -> tuple[ModelName, ...]:
        """Models that were brought in ahead and did not run since, by name."""
        return tuple(sorted(self._prefetched.get(instance, ())))

    def ordered(self, command: Command, now: float) -> None:
        """A command was given."""
        match command:
            case RunTurn():
                self._runs(command.instance, command.model, "turn")
            case RunPrefill():
                self._runs(command.instance, command.model, "prefill")
            case PrefetchModel():
                self._prefetched[command.instance].add(command.model)
                self._metrics.prefetch("started")
            case EvictModel():
                self._evicts(command.instance, command.model)

    def reported(self, event: Event, now: float) -> None:
        """A worker or the disk reported something."""
        match event:
            case KvMoved():
                self._metrics.kv_swapped(event.direction, event.model, event.moved_bytes)
                if event.moved:
                    self._transfer(f"kv_{event.direction.value}", event)
            case KvSpilled() | KvRestored():
                self._disk(event)
            case ModelLoaded():
                self._transfer("weights", event)
                self._feed.tell(
                    NoticeKind.MODEL_LOADED,
                    instance=event.instance,
                    model=event.model,
                    seconds=event.seconds,
                    prefetched=event.prefetched,
                )
            case PrefillDone():
                self._metrics.prefill(event.model)
            case TurnEnded() if event.drafted:
                self._metrics.drafts(event.model, event.drafted, event.accepted)
                drafted, accepted = self.drafts.get(event.model, (0, 0))
                self.drafts[event.model] = (drafted + event.drafted, accepted + event.accepted)

    def _runs(self, instance: InstanceId, model: ModelName, reason: str) -> None:
        """The model computes now: a ``prefill`` or a ``turn``, which is the `reason`."""
        if model in self._prefetched[instance]:
            self._prefetched[instance].remove(model)
            self._metrics.prefetch("used")
        if self._running.get(instance) != model:
            self._running[instance] = model
            self._metrics.switch(instance, model, reason)
            self._feed.tell(NoticeKind.MODEL_SWITCHED, instance=instance, model=model)

    def _evicts(self, instance: InstanceId, model: ModelName) -> None:
        if model in self._prefetched[instance]:
            self._prefetched[instance].remove(model)
            self._metrics.prefetch("wasted")
        self._feed.tell(NoticeKind.MODEL_EVICTED, instance=instance, model=model)

    def _disk(self, event: KvSpilled | KvRestored) -> None:
        writes = isinstance(event, KvSpilled)
        if event.ok:
            self._transfer("kv_spilled" if writes else "kv_restored", event)
        else:
            self._metrics.kv_disk_error("write" if writes else "read")

    def _transfer(self, kind: str, event: ModelLoaded | KvMoved | KvSpilled | KvRestored) -> None:
        self._metrics.transfer(
            kind, event.model, event.moved_bytes, event.queued_seconds, event.seconds
        )

    def lost(self, instance: InstanceId, now: float) -> None:
        """Its worker died; what it had is neither used nor wasted."""
        self._running.pop(instance, None)
        self._prefetched.pop(instance, None)

    def forget_model(self, model: ModelName) -> None:
        """The model is gone everywhere."""
        self.drafts.pop(model, None)
        for prefetched in self._prefetched.values():
            prefetched.discard(model)
        self._running = {
            instance: name for instance, name in self._running.items() if name != model
        }
