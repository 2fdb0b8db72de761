"""A run: the machine and simulated instances on one virtual clock, until nothing is left to happen.

    arrival -> machine.handle -> commands -> instances -> what they report -> machine.handle ...

The machine is the daemon's own, with whatever policies it was given; it is shown what the daemon
shows it, never a request's true output length. The same machine, requests and box make the same
run, to the last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from appliance.lab.agenda import Agenda, Rank
from appliance.lab.hardware import Box, ModelProfile
from appliance.lab.instance import SimulatedInstance
from appliance.lab.recorder import Life, Recorder
from appliance.lab.workload import Arrival
from appliance.scheduling.machine import Machine
from appliance.vocabulary import (
    Event,
    Finish,
    InstanceId,
    ModelName,
    Reject,
    RequestArrived,
    RequestId,
    RequestSpec,
)


@dataclass(frozen=True, slots=True)
class Run:
    """What happened, until `until` seconds of the virtual clock."""

    recorder: Recorder
    until: float
    instances: int
    events: int
    """Events that the machine handled."""
    preemptions: int
    """Requests that stopped in mid-generation for another model or a prompt."""


def simulate(
    machine: Machine,
    box: Box,
    profiles: Mapping[ModelName, ModelProfile],
    arrivals: Iterable[Arrival],
    until: float,
) -> Run:
    """Run the machine on the box from 0 to `until` seconds.

    `profiles` has every model of the machine, on this kind of instance; `arrivals` come in the
    order of time. Raises `LabError` when a command asks an instance for what cannot be, and what
    `Machine.handle` raises.
    """
    return _Simulation(machine, box, profiles, arrivals).run(until)


class _Simulation:
    def __init__(
        self,
        machine: Machine,
        box: Box,
        profiles: Mapping[ModelName, ModelProfile],
        arrivals: Iterable[Arrival],
    ) -> None:
        self._machine = machine
        self._box = box
        self._agenda = Agenda()
        self._recorder = Recorder()
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._lives: dict[RequestId, Life] = {}
        self._facts: deque[Event] = deque()
        self._events = 0
        self._instances: dict[InstanceId, SimulatedInstance] = {
            number: SimulatedInstance(
                number,
                box,
                profiles,
                self._lives,
                self._agenda,
                self._recorder,
                self._facts.append,
            )
            for number in machine.instances
        }

    def run(self, until: float) -> Run:
        for instance in self._instances.values():
            instance.start()
        self._tell()
        self._await_arrival()
        while self._agenda.step(until):
            self._tell()
        return Run(
            recorder=self._recorder,
            until=until,
            instances=len(self._instances),
            events=self._events,
            preemptions=sum(self._machine.preemptions.values()),
        )

    def _tell(self) -> None:
        """Have the machine hear of everything that happened now, and its commands begun."""
        handle, now = self._machine.handle, self._agenda.now
        while self._facts:
            commands = handle(self._facts.popleft(), now)
            self._events += 1
            ordered: dict[InstanceId, None] = {}
            for command in commands:
                if isinstance(command, Finish | Reject):
                    self._end(command)
                else:
                    self._instances[command.instance].order(command)  # type: ignore[attr-defined]
                    ordered[command.instance] = None  # type: ignore[attr-defined]
            for number in ordered:
                self._instances[number].work()

    def _await_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._agenda.at(arrival.seconds, Rank.ARRIVAL, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        """The machine hears of a request that may have as many tokens as its context has room."""
        model = self._machine.models[arrival.model]
        room = max(1, model.max_context_tokens - arrival.prompt_tokens)
        limit = room if arrival.max_tokens is None else min(room, arrival.max_tokens)
        number = len(self._recorder.lives)
        life = Life(
            number=number,
            id=f"r{number}",
            model=arrival.model,
            request_class=arrival.request_class,
            slo=arrival.slo or model.slo,
            arrived=self._agenda.now,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=min(arrival.output_tokens, limit),
            max_tokens=limit,
        )
        self._recorder.lives.append(life)
        self._lives[life.id] = life
        spec = RequestSpec(
            id=life.id,
            model=life.model,
            prompt_tokens=life.prompt_tokens,
            max_tokens=life.max_tokens,
            slo=life.slo,
            request_class=life.request_class,
        )
        self._facts.append(RequestArrived(request=spec))
        self._await_arrival()

    def _end(self, command: Finish | Reject) -> None:
        life = self._lives.pop(command.request)
        life.outcome = command.reason if isinstance(command, Finish) else command.code
        life.ended = self._agenda.now
