"""What a daemon and its workers take besides computing and copying, as a journal tells it.

A job that waits for nothing is over some time later than its own seconds say: the order has to
reach the worker, and what became of it the daemon (`order_seconds`). A turn whose weights had to be
ordered, too, is later by the load, and by what comes before that: slabs are unmapped and mapped
(`mapping_seconds`). A prompt need not wait for all of its weights; what it is later, and not by any
of these, computing and copying cost each other (`interference_seconds`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.vocabulary import (
    Command,
    Direction,
    Event,
    EvictModel,
    InstanceId,
    InstanceLost,
    KvMoved,
    LoadModel,
    ModelLoaded,
    ModelName,
    MoveKv,
    PrefetchModel,
    PrefillDone,
    RequestId,
    RunPrefill,
    RunTurn,
    TurnEnded,
)

UNUSUAL = 10.0
"""So many times the median: something else was going on."""

ENOUGH = 8
"""Observations from which anything is said of them."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What an instance is to compute, which waits for nothing but perhaps for its own weights:
    those were ordered together with it if it is `cold`."""

    ordered: float
    cold: bool


@dataclass(frozen=True, slots=True)
class ColdPrompt:
    """A prompt that was over so many seconds after it was ordered together with its weights."""

    model: ModelName
    request: RequestId
    seconds: float


class Overheads:
    """Hears a journal, entry by entry."""

    def __init__(self) -> None:
        self._learns = True
        self._jobs: dict[InstanceId, _Job | None] = {}
        """None for one that waits for something else."""
        self._loading: set[tuple[InstanceId, ModelName]] = set()
        self._moving: Counter[InstanceId] = Counter()
        """Swaps inwards under way."""
        self._alone: set[tuple[InstanceId, ModelName]] = set()
        """Loads during which nothing else came in so far."""
        self._newest: dict[tuple[InstanceId, ModelName], ModelLoaded] = {}
        """Loads, until their model is evicted."""
        self._loads: list[ModelLoaded] = []
        """To the end of which nothing else came in."""
        self._waited_for: list[ModelLoaded] = []
        """By a turn: nothing was computed meanwhile."""
        self._waits: list[float] = []
        """Seconds between order and report that were not the job's own, of jobs that were not
        cold."""
        self._cold_waits: list[float] = []
        """The same of turns that were, without the load."""
        self._cold_prompts: list[ColdPrompt] = []

    def hear(
        self, now: float, event: Event, commands: Sequence[Command], *, learns: bool = True
    ) -> None:
        """What was over with this event is learned from, or it is not."""
        self._learns = learns
        match event:
            case PrefillDone():
                self._prompt_done(now, event)
            case TurnEnded():
                self._turn_ended(now, event)
            case ModelLoaded():
                self._loaded(event)
            case KvMoved(direction=Direction.IN):
                # Of one that began before the part of the journal that is read, nothing is known.
                self._moving[event.instance] = max(0, self._moving[event.instance] - 1)
            case InstanceLost():
                self._jobs.pop(event.instance, None)
                self._loading = {one for one in self._loading if one[0] != event.instance}
                self._moving[event.instance] = 0
        ordered = {(c.instance, c.model) for c in commands if isinstance(c, LoadModel)}
        for command in commands:
            match command:
                case LoadModel() | PrefetchModel():
                    if not self._copies(command.instance):
                        self._alone.add((command.instance, command.model))
                    else:
                        self._accompany(command.instance)
                    self._loading.add((command.instance, command.model))
                case MoveKv(direction=Direction.IN):
                    self._accompany(command.instance)
                    self._moving[command.instance] += 1
                case EvictModel():
                    self._loading.discard((command.instance, command.model))
                    self._newest.pop((command.instance, command.model), None)
                case RunPrefill() | RunTurn():
                    cold = (command.instance, command.model) in ordered
                    alone = command.instance not in self._jobs
                    alone &= self._copies(command.instance) == cold
                    alone &= isinstance(command, RunPrefill) or not command.prompts
                    self._jobs[command.instance] = _Job(now, cold) if alone else None

    def _copies(self, instance: InstanceId) -> int:
        """Loads and swaps inwards under way."""
        return self._moving[instance] + sum(one[0] == instance for one in self._loading)

    def _accompany(self, instance: InstanceId) -> None:
        """Something else comes in during the loads of the instance."""
        self._alone = {one for one in self._alone if one[0] != instance}

    def _loaded(self, event: ModelLoaded) -> None:
        which = event.instance, event.model
        if which in self._alone and event.seconds > 0 and self._learns:
            self._loads.append(event)
        self._alone.discard(which)
        self._loading.discard(which)
        self._newest[which] = event

    def _prompt_done(self, now: float, event: PrefillDone) -> None:
        job = self._jobs.pop(event.instance, None)
        if job is None or not self._learns:
            return
        seconds = now - job.ordered
        if job.cold:
            self._cold_prompts.append(ColdPrompt(event.model, event.request, seconds))
        else:
            self._waits.append(max(0.0, seconds - event.seconds))

    def _turn_ended(self, now: float, event: TurnEnded) -> None:
        job = self._jobs.pop(event.instance, None)
        if job is None or not self._learns:
            return
        waited = now - job.ordered - event.seconds
        if not job.cold:
            self._waits.append(max(0.0, waited))
            return
        load = self._newest.get((event.instance, event.model))
        if load is not None and load.seconds > 0:
            self._waited_for.append(load)
            self._cold_waits.append(max(0.0, waited - load.queued_seconds - load.seconds))

    def order_seconds(self) -> float:
        """0 if too little was seen."""
        return _mean(self._waits)

    def mapping_seconds(self) -> float:
        """For each load; 0 if too little was seen."""
        return max(0.0, _mean(self._cold_waits) - self.order_seconds())

    def load_bytes_per_second(self) -> float | None:
        """Of loads that had everything for themselves, or at least the link if too few had; None
        if nothing was loaded."""
        loads = self._waited_for if len(self._waited_for) >= ENOUGH else self._loads
        seconds = sum(load.seconds for load in loads)
        return sum(load.moved_bytes for load in loads) / seconds if loads else None

    def interference_seconds(self, expected_seconds: Callable[[ColdPrompt], float | None]) -> float:
        """For each prompt whose weights come meanwhile; 0 if too little was seen.
        `expected_seconds` are those from its begin to its end, None if they are not known."""
        before = self.order_seconds() + self.mapping_seconds()
        late = [
            prompt.seconds - before - expected
            for prompt in self._cold_prompts
            if (expected := expected_seconds(prompt)) is not None
        ]
        return max(0.0, _mean(late))


def _mean(values: Sequence[float]) -> float:
    """Without those for which the machine stood still; 0 of too few."""
    if len(values) < ENOUGH:
        return 0.0
    limit = UNUSUAL * max(0.0, statistics.median(values))
    return statistics.fmean([value for value in values if value <= limit])
