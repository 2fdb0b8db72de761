"""A run: the machine and simulated instances on one virtual clock, until nothing is left to happen.

    arrival -> machine.handle -> commands -> instances -> what they report -> machine.handle ...

The machine is the daemon's own, with whatever policies it was given; it is shown what the daemon
shows it, never a request's true output length; at a deadline that it named it gets an event.
The same machine, requests and box make the same run, to the last bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from appliance.errors import LabError
from appliance.lab.hardware import Box, ModelProfile
from appliance.lab.noise import EXACT, Deviation
from appliance.lab.sim.event_queue import Agenda, Rank, ScheduledEvent
from appliance.lab.sim.instance import SimulatedInstance
from appliance.lab.sim.link import LinkTransfer
from appliance.lab.sim.recorder import Life, Recorder
from appliance.lab.sim.samples import Sample, look, times
from appliance.lab.sim.topology import KV, Wiring
from appliance.lab.workload import Arrival
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Policy
from appliance.vocabulary import (
    ClockSet,
    Command,
    DropSpilledKv,
    Event,
    Finish,
    InstanceId,
    KvRestored,
    KvSpilled,
    ModelName,
    Reject,
    RequestArrived,
    RequestId,
    RequestSpec,
    RestoreKv,
    SpillKv,
    Ticked,
    Word,
)


class Visit(NamedTuple):
    """What a visitor of a run wants: to come again at a time, and another policy from now on."""

    again: float
    policy: Policy | None = None


Visitor: TypeAlias = Callable[[float], Visit]
"""Comes at the beginning, and when it said; gets the time of the virtual clock."""


class Start(Word, frozen=True):
    """What the clock on the wall shows when the clock of a run is at 0: Unix time, and the seconds
    by which local time is ahead of UTC."""

    unix_seconds: float
    utc_offset_seconds: int = 0

    def after(self, seconds: float) -> Start:
        """What it shows so much later."""
        return Start(
            unix_seconds=self.unix_seconds + seconds, utc_offset_seconds=self.utc_offset_seconds
        )


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """What happened, until `until` seconds of the virtual clock."""

    recorder: Recorder
    until: float
    instances: int
    events: int
    """Events that the machine handled."""
    preemptions: int
    """Requests that stopped in mid-generation for another model or a prompt."""
    samples: Sequence[Sample] = ()
    """Samples of the box; none if none were asked for."""
    tp: int = 1
    """GPUs of each instance."""
    pool_bytes: int = 0
    """Of each GPU, what weights and KV have."""


def simulate(
    machine: Machine,
    box: Box,
    profiles: Mapping[ModelName, ModelProfile],
    arrivals: Iterable[Arrival],
    until: float,
    *,
    deviation: Deviation = EXACT,
    swaps: Iterable[tuple[float, Policy]] = (),
    lengths: MutableMapping[RequestId, int] | None = None,
    visitor: Visitor | None = None,
    start: Start | None = None,
) -> SimulationRun:
    """Run the machine on the box from 0 to `until` seconds.

    `profiles` has every model of the machine, on this kind of instance; `arrivals` come in the
    order of time. Those before 0 are the backlog that the run begins with: the machine hears of
    them with their own times, and the box begins with the orders at 0. At the times of `swaps`
    other policies take over. `lengths` gets the true length of every output when its request
    arrives: for a policy that is an oracle. A `visitor` changes policies by what it sees meanwhile.
    `start` is what the clock on the wall shows at 0.
    Raises `LabError` when a command asks an instance for what cannot be, and what `Machine.handle`
    raises.
    """
    simulation = BoxSimulation(machine, box, profiles, arrivals, deviation, lengths, start)
    if visitor is not None:
        simulation.visit(visitor)
    return simulation.run(until, swaps)


class BoxSimulation:
    """One box: `run` plays it to its end. Where something else says what comes, such as the router
    of a fleet, it is begun, offered requests, advanced and ended, in that order, by the caller."""

    def __init__(
        self,
        machine: Machine,
        box: Box,
        profiles: Mapping[ModelName, ModelProfile],
        arrivals: Iterable[Arrival],
        deviation: Deviation,
        lengths: MutableMapping[RequestId, int] | None,
        start: Start | None,
    ) -> None:
        self.machine = machine
        self._box = box
        self._agenda = Agenda()
        self._recorder = Recorder()
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._lives: dict[RequestId, Life] = {}
        self._lengths = {} if lengths is None else lengths
        self._facts: deque[Event] = deque()
        self._events = 0
        self._order_seconds = box.order_seconds
        self._tick: ScheduledEvent | None = None
        self._start = start
        wiring = Wiring(self._agenda, box, deviation)
        self._disk = wiring.disk
        self._instances: dict[InstanceId, SimulatedInstance] = {
            number: SimulatedInstance(
                number,
                box,
                profiles,
                self._lives,
                self._agenda,
                self._recorder,
                wiring,
                self._facts.append,
                deviation,
            )
            for number in machine.instances
        }

    def run(self, until: float, swaps: Iterable[tuple[float, Policy]] = ()) -> SimulationRun:
        """Play from 0 to `until` seconds. Raises what `simulate` raises."""
        self.begin()
        for seconds, policy in swaps:
            self._agenda.at(seconds, Rank.SWAP, partial(self._swap, policy))
        holdings = {number: one.holdings for number, one in self._instances.items()}
        samples = []
        for at in times(until):
            self.advance(at)
            samples.append(look(at, self.machine, holdings, self._box.slab_bytes))
        return self.ended(until, samples)

    def offer(self, arrival: Arrival) -> None:
        """Have a request come at its time, which is not before the time advanced to."""
        self._agenda.at(arrival.seconds, Rank.ARRIVAL, partial(self._arrive, arrival))

    def advance(self, until: float) -> None:
        """Have everything happen up to this time. Raises what `simulate` raises."""
        step, tell, await_deadline = self._agenda.step, self._tell, self._await_deadline
        while step(until):
            tell()
            await_deadline()

    def ended(self, until: float, samples: Sequence[Sample] = ()) -> SimulationRun:
        """What happened up to the time advanced to."""
        for instance in self._instances.values():
            instance.record_steps(until)
        return SimulationRun(
            recorder=self._recorder,
            until=until,
            instances=len(self._instances),
            events=self._events,
            preemptions=sum(self.machine.preemptions.values()),
            samples=samples,
            tp=self._box.tp,
            pool_bytes=self._box.slabs * self._box.slab_bytes,
        )

    def begin(self) -> None:
        """Have the workers connect, and the machine know the backlog as if it had waited since."""
        for instance in self._instances.values():
            instance.start()
        arrival = next(self._arrivals, None)
        if self._start is not None:
            shown = self._start.after(0.0 if arrival is None else min(0.0, arrival.seconds))
            self._facts.appendleft(
                ClockSet(
                    unix_seconds=shown.unix_seconds, utc_offset_seconds=shown.utc_offset_seconds
                )
            )
        if arrival is not None and arrival.seconds < 0:
            orders = self._heard(arrival.seconds)
            while arrival is not None and arrival.seconds < 0:
                self._arrive(arrival)
                orders += self._heard(arrival.seconds)
                arrival = next(self._arrivals, None)
            self._carry_out(orders)
            self._facts.append(Ticked())  # a deadline of the machine may have passed by now
        self._tell()
        self._await(arrival)

    def _heard(self, at: float) -> list[Command]:
        """The machine hears of everything that happened at a time; its commands."""
        commands: list[Command] = []
        while self._facts:
            self._events += 1
            commands += self.machine.handle(self._facts.popleft(), at)
        return commands

    def visit(self, visitor: Visitor) -> None:
        """Have it come now, and whenever it says."""
        now = self._agenda.now
        self._agenda.at(now, Rank.SWAP, partial(self._visited, visitor))

    def _visited(self, visitor: Visitor) -> None:
        now = self._agenda.now
        again, policy = visitor(now)
        if policy is not None:
            self._swap(policy)
        self._agenda.at(again, Rank.SWAP, partial(self._visited, visitor))

    def _tell(self) -> None:
        """Have the machine hear of everything that happened now, and its commands begun."""
        handle, now = self.machine.handle, self._agenda.now
        while self._facts:
            self._events += 1
            self._carry_out(handle(self._facts.popleft(), now))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        orders = []
        for command in commands:
            if isinstance(command, Finish | Reject):
                self._end(command)
            elif isinstance(command, SpillKv | RestoreKv):
                self._move_on_disk(command)
            elif not isinstance(command, DropSpilledKv):
                orders.append(command)
        if not self._order_seconds:
            self._order(orders)
        elif orders:
            received = self._agenda.now + self._order_seconds
            self._agenda.at(received, Rank.ORDER, partial(self._order, orders))

    def _move_on_disk(self, command: SpillKv | RestoreKv) -> None:
        """The daemon itself writes and reads KV, one after the other."""
        outcome = KvSpilled if isinstance(command, SpillKv) else KvRestored

        def over(transfer: LinkTransfer) -> None:
            self._facts.append(
                outcome(
                    model=command.model,
                    request=command.request,
                    ok=True,
                    moved_bytes=transfer.nbytes,
                    seconds=transfer.seconds,
                    queued_seconds=transfer.queued_seconds,
                )
            )

        nbytes = len(command.host_offsets) * command.block_bytes
        self._disk.start(KV, nbytes, over)

    def _order(self, commands: Sequence[Command]) -> None:
        ordered: dict[InstanceId, None] = {}
        for command in commands:
            self._instances[command.instance].order(command)  # type: ignore[attr-defined]
            ordered[command.instance] = None  # type: ignore[attr-defined]
        for number in ordered:
            self._instances[number].work()

    def _swap(self, policy: Policy) -> None:
        self._carry_out(self.machine.set_policy(policy, self._agenda.now))

    def _await_deadline(self) -> None:
        """Tell the machine when the time is there that it waits for."""
        deadline = self.machine.next_deadline()
        tick = self._tick
        if tick is not None and tick.action is not None:
            if tick.seconds == deadline:
                return
            tick.call_off()
        self._tick = None
        if deadline is not None:
            if deadline <= self._agenda.now:
                raise LabError(f"the machine still waits for {deadline} s, which has passed")
            self._tick = self._agenda.at(deadline, Rank.TICK, self._tell_time)

    def _tell_time(self) -> None:
        self._tick = None
        self._facts.append(Ticked())

    def _await(self, arrival: Arrival | None) -> None:
        """Have it come at its time, and the one after it then."""
        if arrival is not None:
            self._agenda.at(arrival.seconds, Rank.ARRIVAL, partial(self._come, arrival))

    def _come(self, arrival: Arrival) -> None:
        self._arrive(arrival)
        self._await(next(self._arrivals, None))

    def _arrive(self, arrival: Arrival) -> None:
        """The machine hears of a request that may have as many tokens as its context has room."""
        model = self.machine.models[arrival.model]
        room = max(1, model.max_context_tokens - arrival.prompt_tokens)
        limit = room if arrival.max_tokens is None else min(room, arrival.max_tokens)
        number = len(self._recorder.lives)
        life = Life(
            number=number,
            id=f"r{number}",
            model=arrival.model,
            request_class=arrival.request_class,
            slo=arrival.slo or model.slo,
            arrived=arrival.seconds,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=min(arrival.output_tokens, limit),
            max_tokens=limit,
            key=arrival.key,
        )
        self._recorder.lives.append(life)
        self._lives[life.id] = life
        self._lengths[life.id] = life.output_tokens
        spec = RequestSpec(
            id=life.id,
            model=life.model,
            prompt_tokens=life.prompt_tokens,
            max_tokens=life.max_tokens,
            slo=life.slo,
            request_class=life.request_class,
            key=life.key,
        )
        self._facts.append(RequestArrived(request=spec))

    def _end(self, command: Finish | Reject) -> None:
        life = self._lives.pop(command.request)
        life.outcome = command.reason if isinstance(command, Finish) else command.code
        life.ended = self._agenda.now
