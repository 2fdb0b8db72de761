"""What a daemon and its workers take besides computing and copying, as a journal tells it.

A job that waits for nothing is over some time later than its own seconds say: the order has to
reach the worker, and what became of it the daemon (`order_seconds`). A job whose weights had to be
ordered, too, is later still: slabs are mapped before anything else is done (`mapping_seconds`). And
a prompt under whose computing its weights come takes longer than one whose weights are there: how
much longer tells how well the two overlap (`layers`).
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

LAYERS = (1, 2, 4, 8, 16, 32)
"""Of those, the number that explains cold prompts best: with one nothing overlaps."""

UNUSUAL = 10.0
"""So many times the median: something else was going on."""

ENOUGH = 8
"""Observations from which anything is said of them."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What an instance is to compute. `alone` says that it waits for nothing but perhaps for its
    own weights: those were ordered together with it if it is `cold`."""

    ordered: float
    alone: bool
    cold: bool


@dataclass(frozen=True, slots=True)
class ColdPrompt:
    """A prompt that was computed while its weights came, in `load_seconds`."""

    model: ModelName
    request: RequestId
    load_seconds: float
    seconds: float


class Overheads:
    """Hears a journal, entry by entry, as long as it is to learn from it."""

    def __init__(self) -> None:
        self.cold_prompts: list[ColdPrompt] = []
        self._waits: dict[bool, list[float]] = {False: [], True: []}
        """Seconds between order and report that were not the job's own, of warm and cold jobs."""
        self._jobs: dict[InstanceId, _Job] = {}
        self._loading: set[tuple[InstanceId, ModelName]] = set()
        self._moving: Counter[InstanceId] = Counter()
        """Swaps inwards under way."""
        self._alone: set[tuple[InstanceId, ModelName]] = set()
        """Loads beside which nothing else came in so far."""
        self._loads: list[tuple[int, float]] = []
        """Bytes and seconds of those to the end of which nothing did."""
        self._load_seconds: dict[tuple[InstanceId, ModelName], float] = {}
        """Of the newest load."""

    def hear(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case PrefillDone():
                self._prompt_done(now, event)
            case TurnEnded():
                self._over(now, event.instance, event.seconds)
            case ModelLoaded():
                self._loaded(event)
            case KvMoved(direction=Direction.IN):
                self._moving[event.instance] -= 1
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
                    self._load_seconds.pop((command.instance, command.model), None)
                case RunPrefill() | RunTurn():
                    cold = (command.instance, command.model) in ordered
                    alone = command.instance not in self._jobs
                    alone &= self._copies(command.instance) == cold
                    if isinstance(command, RunTurn):  # which begins when all weights are there
                        alone &= not cold and not command.prompts
                    self._jobs[command.instance] = _Job(now, alone, cold)

    def _copies(self, instance: InstanceId) -> int:
        """Loads and swaps inwards under way."""
        return self._moving[instance] + sum(one[0] == instance for one in self._loading)

    def _accompany(self, instance: InstanceId) -> None:
        """Something else comes in beside the loads of the instance."""
        self._alone = {one for one in self._alone if one[0] != instance}

    def _loaded(self, event: ModelLoaded) -> None:
        which = event.instance, event.model
        if which in self._alone and event.seconds > 0:
            self._loads.append((event.moved_bytes, event.seconds))
        self._alone.discard(which)
        self._loading.discard(which)
        self._load_seconds[which] = event.queued_seconds + event.seconds

    def _prompt_done(self, now: float, event: PrefillDone) -> None:
        job = self._over(now, event.instance, event.seconds)
        load_seconds = self._load_seconds.get((event.instance, event.model))
        if job is not None and job.cold and load_seconds is not None:
            self.cold_prompts.append(
                ColdPrompt(event.model, event.request, load_seconds, event.seconds)
            )

    def _over(self, now: float, instance: InstanceId, seconds: float) -> _Job | None:
        """The instance's job, if it was alone."""
        job = self._jobs.pop(instance, None)
        if job is None or not job.alone:
            return None
        self._waits[job.cold].append(max(0.0, now - job.ordered - seconds))
        return job

    def order_seconds(self) -> float:
        """0 if too little was seen."""
        return max(0.0, _mean(self._waits[False]))

    def mapping_seconds(self) -> float:
        """For each load; 0 if too little was seen."""
        return max(0.0, _mean(self._waits[True]) - self.order_seconds())

    def load_bytes_per_second(self) -> float | None:
        """Of loads that had the link for themselves; None if there were none."""
        seconds = sum(seconds for _, seconds in self._loads)
        return sum(nbytes for nbytes, _ in self._loads) / seconds if seconds else None

    def layers(self, compute_seconds: Callable[[ColdPrompt], float], otherwise: int) -> int:
        """As many as explain best when prompts were done that began with their weights, where the
        last layer can be computed when all have come. `compute_seconds` is the time that a prompt
        takes whose weights are there."""
        if len(self.cold_prompts) < ENOUGH:
            return otherwise

        def error(layers: int) -> float:
            return sum(
                abs(prompt.seconds - max(compute, prompt.load_seconds + compute / layers))
                for prompt, compute in computed
            )

        computed = [(prompt, compute_seconds(prompt)) for prompt in self.cold_prompts]
        return min(LAYERS, key=error)


def _mean(values: Sequence[float]) -> float:
    """Without those for which the machine stood still; 0 of too few."""
    if len(values) < ENOUGH:
        return 0.0
    limit = UNUSUAL * statistics.median(values)
    return statistics.fmean([value for value in values if value <= limit])
