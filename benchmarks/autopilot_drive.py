"""Drives the autopilot's own control logic in virtual time, over the lab's simulation of a box.

The simulated machine writes a journal and counts promises as the daemon does; `Control` gets them
at every tick. A replay is the lab's own (`appliance.lab.advice`), in this process. It costs so much
CPU time for each event that its machines handle: so the same day is the same on any machine. Its
answer comes after as long as a process that has a core for itself would take: what is charged for
its start, in which the journal is read, and that CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from appliance.daemon.autopilot.control import (
    START_CPU_SECONDS,
    Action,
    Bar,
    Control,
    EndReplay,
    Moment,
    Seen,
    StartReplay,
    Use,
)
from appliance.daemon.autopilot.promise_count import PromiseCount
from appliance.daemon.requests import REFUSED
from appliance.journal import Journal, Setup
from appliance.lab.advice.__main__ import answer_of
from appliance.lab.advice.advise import Meter, advise
from appliance.lab.advice.cpu_time import OutOfCpuTime
from appliance.lab.experiments.run import Setting
from appliance.lab.sim.simulator import SimulationRun, Visit, simulate
from appliance.memory.ledger import DiskLedger, HostLedger
from appliance.policies.stack import PolicyStack
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Policy
from appliance.service.autopilot import AutopilotNote, AutopilotTerms, Promises, ReplayAnswer
from appliance.service.generation import RequestStream
from appliance.service.interface import SubmitRequest
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from appliance.vocabulary import (
    Command,
    Event,
    Finish,
    Reject,
    RequestArrived,
    RequestId,
    RequestSpec,
    TokensProduced,
)

EVENT_SECONDS = 100e-6
"""CPU time of a replay for each event that its machine handles."""


class Streams:
    """Counts what clients get, with the daemon's own counter (`appliance.daemon.requests`)."""

    def __init__(self, watch_seconds: float) -> None:
        self.changes = 0
        """How often other policies came to decide."""
        self._promises = PromiseCount(lambda: self.changes, lambda: watch_seconds)
        self._live: dict[RequestId, RequestStream] = {}

    def hear(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case RequestArrived(request=spec):
                self._arrived(now, spec)
            case TokensProduced():
                self._produced(now, event)
        for command in commands:
            if isinstance(command, Finish):
                self._promises.completed(self._live.pop(command.request))
            elif isinstance(command, Reject):
                stream = self._live.pop(command.request)
                if command.code == REFUSED or now > stream.due():
                    self._promises.broken(stream)

    def kept(self, now: float) -> Promises:
        """Up to now."""
        for stream in self._live.values():
            if not stream.counted and now > stream.due():
                self._promises.broken(stream)
        return self._promises.total(self._live.values())

    def _arrived(self, now: float, spec: RequestSpec) -> None:
        request = SubmitRequest(
            id=spec.id,
            model=spec.model,
            prompt=(),
            max_tokens=spec.max_tokens,
            body=b"",
            request_class=spec.request_class,
        )
        stream = RequestStream(request, now, _NO_CLIENT, _never, _never, spec.slo)
        self._live[spec.id] = stream
        self._promises.arrived(stream)

    def _produced(self, now: float, event: TokensProduced) -> None:
        for token in event.tokens:
            stream = self._live.get(token.request)
            if stream is None:
                continue
            for _ in range(max(1, token.count)):
                self._promises.produced(stream, 1, late=now > stream.due())
                stream.output.append(0)


class _NoClient:
    """Takes nothing: texts are not simulated."""

    def produced(self, produced: object) -> None:
        pass

    def ended(self, times: object, failure: object) -> None:
        pass


_NO_CLIENT = _NoClient()


def _never(*_: object) -> None:
    raise AssertionError("simulated clients do not cancel, or stop reading")


class DayMachine(Machine):
    """The daemon's machine, with the journal and the counters that the daemon has around it."""

    def __init__(
        self,
        setup: Setup,
        stack: PolicyStack,
        journal: Journal | None,
        watch_seconds: float = AutopilotTerms().watch_seconds,
    ) -> None:
        host = HostLedger(setup.host_bytes, setup.slab_bytes, setup.kv_floor_slabs)
        costs, disk = CostModel(setup.models), DiskLedger(setup.disk_bytes)
        super().__init__(setup.models, setup.instances, host, stack, costs, disk)
        self.streams = Streams(watch_seconds)
        self.choice = setup.policy
        """The policies that decide, or that are about to."""
        self._journal = journal

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self._write_down(now, event, commands)
        return commands

    def set_policy(self, policy: Policy, now: float) -> list[Command]:
        commands = super().set_policy(policy, now)
        self.streams.changes += 1
        self._write_down(now, PolicyChosen(choice=self.choice), commands)
        return commands

    def flush_journal(self) -> None:
        if self._journal is not None:
            self._journal.flush()

    def _write_down(self, now: float, event: Event, commands: list[Command]) -> None:
        self.streams.hear(now, event, commands)
        if self._journal is not None:
            self._journal.record(now, event, commands)


class EventMeter:
    """CPU time of replays, by the events that machines handle meanwhile."""

    def __init__(self, event_seconds: float = EVENT_SECONDS) -> None:
        self._event_seconds = event_seconds
        self._events = 0

    def seconds(self) -> float:
        return self._events * self._event_seconds

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        if seconds <= 0:
            raise OutOfCpuTime
        end, handle = self.seconds() + seconds, Machine.handle

        def counted(machine: Machine, event: Event, now: float) -> list[Command]:
            self._events += 1
            if self.seconds() > end:
                raise OutOfCpuTime
            return handle(machine, event, now)

        with patch.object(Machine, "handle", counted):
            yield


def answer_within(
    journal: Path, window_seconds: float, asked: StartReplay, meter: Meter
) -> ReplayAnswer:
    """What the autopilot's process would answer, with all of its CPU time for replays."""
    minutes, seconds = window_seconds / 60, asked.cpu_seconds
    return answer_of(lambda: advise(journal, minutes, seconds, meter, also=asked.also))


@dataclass(frozen=True)
class Replay:
    """One that runs: its answer is there at a time."""

    at: float
    answer: ReplayAnswer


@dataclass
class Autopilot:
    """Visits the run: does what `Control` wants, as the daemon's runner does."""

    terms: AutopilotTerms
    machine: DayMachine
    setup: Setup
    notes: list[tuple[float, AutopilotNote]] = field(default_factory=list)
    """What it did, and when."""
    replays: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._control = Control(self.terms, self.setup.policy)
        self._stack: PolicyStack = self.setup.stack()
        self._swap: PolicyStack | None = None
        self._replay: Replay | None = None
        self._tick_at = 0.0

    def __call__(self, now: float) -> Visit:
        self._swap = None
        if self._replay is not None and now >= self._replay.at:
            answer, self._replay = self._replay.answer, None
            if answer.found is None:
                self._do(now, self._control.failed(self._at(now), answer.error))
            else:
                self._do(now, self._control.advised(self._at(now), self._seen(now), answer.found))
        if now >= self._tick_at:
            self._tick_at = now + self._control.tick_seconds
            self._do(now, self._control.tick(self._at(now), self._seen(now)))
        again = self._tick_at
        if self._replay is not None:
            again = min(again, self._replay.at)
        return Visit(again, self._swap)

    @staticmethod
    def _at(now: float) -> Moment:
        return Moment(seconds=now, unix_seconds=now)

    def _seen(self, now: float) -> Seen:
        return Seen(
            active=self.machine.choice,
            promises=self.machine.streams.kept(now),
            ailing=", ".join(one.name for one in self._stack.states() if one.disabled),
        )

    def _do(self, now: float, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartReplay():
                    self._begin(now, action)
                case EndReplay():
                    self._replay = None
                case Use():
                    self._use(now, action.choice)
                case Bar():
                    pass  # what is barred has to be remembered only by a daemon that restarts
                case AutopilotNote():
                    self.notes.append((now, action))

    def _begin(self, now: float, asked: StartReplay) -> None:
        self.machine.flush_journal()
        meter = EventMeter()
        journal, window = Path(self.terms.journal), self.terms.window_seconds
        answer = answer_within(journal, window, asked, meter)
        took = START_CPU_SECONDS + meter.seconds()
        self._replay = Replay(now + took, answer)
        self.replays.append({"at": now, "seconds": took, **msgspec.to_builtins(answer)})

    def _use(self, now: float, choice: PolicyChoice) -> None:
        """The machine has the others decide when this visit is over, at the same time."""
        stack = msgspec.structs.replace(self.setup, policy=choice).stack()
        self._swap = self._stack = stack
        self.machine.choice = choice
        self._do(now, self._control.used(self._at(now), self._seen(now)))


@dataclass(frozen=True)
class Day:
    """A day that was played."""

    run: SimulationRun
    notes: Sequence[tuple[float, AutopilotNote]] = ()
    replays: Sequence[dict[str, Any]] = ()


def setup_of(setting: Setting, choice: PolicyChoice) -> Setup:
    """The box, as a daemon's journal begins."""
    return Setup(
        models=tuple(setting.models),
        instances=setting.box.instances,
        host_bytes=setting.box.host_bytes,
        slab_bytes=setting.box.slab_bytes,
        kv_floor_slabs=setting.kv_floor_slabs,
        policy=choice,
    )


def fixed_day(setting: Setting, choice: PolicyChoice) -> Day:
    """With these policies to its end. Raises what `simulate` raises."""
    setup = setup_of(setting, choice)
    machine = DayMachine(setup, setup.stack(), None)
    return Day(_simulated(machine, setting, None))


def autopilot_day(setting: Setting, choice: PolicyChoice, terms: AutopilotTerms) -> Day:
    """With the autopilot, from these policies on; its journal is a new file. Raises what `simulate`
    raises."""
    setup = setup_of(setting, choice)
    with Journal(Path(terms.journal), setup) as journal:
        stack = setup.stack()
        machine = DayMachine(setup, stack, journal, terms.watch_seconds)
        autopilot = Autopilot(terms, machine, setup)
        run = _simulated(machine, setting, autopilot)
    return Day(run, autopilot.notes, autopilot.replays)


def _simulated(machine: DayMachine, setting: Setting, autopilot: Autopilot | None) -> SimulationRun:
    run = simulate(
        machine,
        setting.box,
        setting.profiles,
        setting.arrivals,
        setting.seconds,
        deviation=setting.deviation,
        visitor=autopilot,
    )
    machine.check_integrity()
    return run
