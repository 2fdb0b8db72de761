"""What the time of every live request goes to, from commands and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Final

from appliance.service.interface import RequestTimes, Stretch
from appliance.vocabulary import (
    Command,
    Event,
    InstanceId,
    LoadModel,
    ModelLoaded,
    ModelName,
    PrefillDeferred,
    PrefillDone,
    RequestId,
    RunPrefill,
    RunTurn,
    TurnEnded,
)

QUEUE, LOAD, PREFILL, DECODE, PREEMPTED = range(5)
PHASES = ("queue", "load", "prefill", "decode", "preempted")

MOST_STRETCHES: Final = 128
"""Kept of one request."""
PAUSE_SECONDS: Final = 0.001
"""A shorter gap between two turns of its own is not shown as a pause of the request."""


@dataclass(slots=True)
class DeviceShare:
    """The time of an instance, divided evenly among the requests that it computes at once. One
    that comes or leaves costs O(1): `each` is what a request would have that was always there."""

    devices: int = 1
    requests: int = 0
    each: float = 0.0
    until: float = 0.0

    def change(self, requests: int, now: float) -> float:
        """So many more requests from now on, or fewer; what each has had until now."""
        if self.requests:
            self.each += (now - self.until) * self.devices / self.requests
        self.until = now
        self.requests += requests
        return self.each


@dataclass(slots=True)
class _Record:
    """One request: the phase it is in, and what the ones before took. Seconds."""

    model: ModelName
    since: float
    phase: int = QUEUE
    seconds: list[float] = field(default_factory=lambda: [0.0] * 5)
    instances: list[InstanceId] = field(default_factory=list)
    preemptions: int = 0
    reads: bool = True
    """Whether its client takes what is made."""
    stretches: list[Stretch] = field(default_factory=list)
    share: DeviceShare | None = None
    """Of the instance that computes it now."""
    share_began: float = 0.0
    device_seconds: float = 0.0


class RequestPhases:
    """Every moment of a request is in one phase, so that they add up to the time it took.

    A request is in the queue until its prompt is computed, and preempted when it waits for a turn
    again. Of both, and of the prompt's own time, the part in which the instance had nothing but
    the weights to bring in is the load; the last load before the prompt ends counts. An order or
    a report costs O(requests it names); a worker's death looks at all.
    """

    def __init__(
        self,
        *,
        keeps_stretches: bool = False,
        devices: Callable[[InstanceId], int] = lambda _: 1,
    ) -> None:
        """With `keeps_stretches` it also tells when each phase was, of the first of them. An
        instance computes on so many `devices`."""
        self.keeps_stretches = keeps_stretches
        self._records: dict[RequestId, _Record] = {}
        self._loads: dict[tuple[InstanceId, ModelName], tuple[float, float | None]] = {}
        """When the last one was ordered, and when it was over."""
        self._turns: dict[InstanceId, RunTurn] = {}
        """What runs."""
        self._paused: dict[InstanceId, RunTurn] = {}
        """What ran last, until something else does."""
        self._devices = devices
        self._shares: dict[InstanceId, DeviceShare] = {}

    def arrived(self, request: RequestId, model: ModelName, now: float) -> None:
        self._records[request] = _Record(model, now)

    def ended(self, request: RequestId, now: float) -> RequestTimes:
        """The request is over, and forgotten here."""
        record = self._records.pop(request)
        self._enter(record, record.phase, now)
        self._share(record, None, now)
        queue, load, prefill, decode, preempted = record.seconds
        return RequestTimes(
            queue_seconds=queue,
            load_seconds=load,
            prefill_seconds=prefill,
            decode_seconds=decode,
            preempted_seconds=preempted,
            preemptions=record.preemptions,
            instances=tuple(record.instances),
            device_seconds=record.device_seconds,
            stretches=tuple(record.stretches),
        )

    def reader(self, request: RequestId, *, reads: bool) -> None:
        """Its client takes nothing, or takes what is made again. A request that waits for that
        is in the phase "preempted", but does not count as a preemption."""
        self._records[request].reads = reads

    def lost(self, instance: InstanceId, now: float) -> None:
        """A worker died; what it did is to be done again."""
        self._turns.pop(instance, None)
        self._paused.pop(instance, None)
        for key in [key for key in self._loads if key[0] == instance]:
            del self._loads[key]
        for record in self._records.values():
            if record.phase in (PREFILL, DECODE) and record.instances[-1] == instance:
                self._enter(record, QUEUE if record.phase == PREFILL else PREEMPTED, now)

    # --- orders ----------------------------------------------------------------------------------

    @singledispatchmethod
    def ordered(self, command: Command, now: float) -> None:
        """A command was given. Most take no request's time."""

    @ordered.register
    def _ordered_load_model(self, command: LoadModel, now: float) -> None:
        self._loads[command.instance, command.model] = (now, None)

    @ordered.register
    def _ordered_run_prefill(self, command: RunPrefill, now: float) -> None:
        self._interrupt(command.instance)
        self._run(command.request, command.instance, PREFILL, now)

    @ordered.register
    def _ordered_run_turn(self, command: RunTurn, now: float) -> None:
        paused = self._paused.get(command.instance)
        if paused is not None and paused.model != command.model:
            self._interrupt(command.instance)
        self._paused.pop(command.instance, None)
        self._turns[command.instance] = command
        for request in command.requests:
            self._run(request, command.instance, DECODE, now)
        for request in command.prompts:
            self._run(request, command.instance, PREFILL, now)

    def _run(self, request: RequestId, instance: InstanceId, phase: int, now: float) -> None:
        record = self._records.get(request)
        if record is None:
            return
        if not record.instances or record.instances[-1] != instance:
            record.instances.append(instance)
        self._enter(record, phase, now)

    def _interrupt(self, instance: InstanceId) -> None:
        """Something else runs than what did: that was stopped in mid-generation."""
        paused = self._paused.pop(instance, None)
        for request in () if paused is None else paused.requests:
            record = self._records.get(request)
            if record is not None and record.phase == PREEMPTED and record.reads:
                record.preemptions += 1

    # --- reports ---------------------------------------------------------------------------------

    @singledispatchmethod
    def reported(self, event: Event, now: float) -> None:
        """A report of a worker. Most of them change no request's phase."""

    @reported.register
    def _reported_model_loaded(self, event: ModelLoaded, now: float) -> None:
        began, end = self._loads.get((event.instance, event.model), (now, now))
        if end is None:
            self._loads[event.instance, event.model] = (began, now)

    @reported.register
    def _reported_prefill_done(self, event: PrefillDone, now: float) -> None:
        self._leave(event.request, PREEMPTED, now)

    @reported.register
    def _reported_prefill_deferred(self, event: PrefillDeferred, now: float) -> None:
        self._leave(event.request, QUEUE, now)

    @reported.register
    def _reported_turn_ended(self, event: TurnEnded, now: float) -> None:
        turn = self._turns.pop(event.instance, None)
        if turn is None:
            return
        self._paused[event.instance] = turn
        for request in turn.requests:
            self._leave(request, PREEMPTED, now, only=DECODE)
        for request in turn.prompts:
            self._leave(request, QUEUE, now, only=PREFILL)

    def _leave(self, request: RequestId, phase: int, now: float, only: int | None = None) -> None:
        record = self._records.get(request)
        if record is not None and only in (None, record.phase):
            self._enter(record, phase, now)

    def _enter(self, record: _Record, phase: int, now: float) -> None:
        """The phase before is over; the load of weights in it is reported apart."""
        loaded = (now, now)
        if PREFILL in (record.phase, phase) and record.instances:
            loaded = self._overlap(record, now)
        load = loaded[1] - loaded[0]
        record.seconds[LOAD] += load
        record.seconds[record.phase] += now - record.since - load
        if self.keeps_stretches:
            _keep(record, record.phase, record.since, now)
            _keep(record, LOAD, *loaded)
        record.phase, record.since = phase, now
        self._share(record, record.instances[-1] if phase in (PREFILL, DECODE) else None, now)

    def _share(self, record: _Record, instance: InstanceId | None, now: float) -> None:
        """It is computed by this instance from now on, or by none."""
        if record.share is not None:
            record.device_seconds += record.share.change(-1, now) - record.share_began
            record.share = None
        if instance is not None:
            if instance not in self._shares:
                self._shares[instance] = DeviceShare(self._devices(instance))
            record.share = self._shares[instance]
            record.share_began = record.share.change(1, now)

    def _overlap(self, record: _Record, now: float) -> tuple[float, float]:
        """From when to when its instance loaded its model, since its phase began."""
        began, end = self._loads.get((record.instances[-1], record.model), (now, now))
        began, end = max(began, record.since), now if end is None else min(end, now)
        return began, max(began, end)


def _keep(record: _Record, phase: int, began: float, ended: float) -> None:
    """Stretches that touch are one."""
    kept, name = record.stretches, PHASES[phase]
    short = PAUSE_SECONDS if phase == PREEMPTED else 0.0
    if ended - began <= short:
        return
    if kept and kept[-1].phase == name and began - kept[-1].ended <= PAUSE_SECONDS:
        kept[-1] = kept[-1]._replace(ended=ended)
    elif len(kept) < MOST_STRETCHES:
        kept.append(Stretch(name, began, ended))
