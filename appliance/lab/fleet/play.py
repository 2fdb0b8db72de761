"""A trial of a fleet: one virtual clock, a router, and boxes that each schedule themselves.

    arrival -> router: what boxes said at the last poll, what it sent since -> a box's own machine

Between two polls nothing of a box reaches the router, so each box is played on its own from poll to
poll, and given the requests that the router sends it in between at their times. The result is that
of one clock for all events.

Simplified: polls and requests take no time on the network, and all boxes are polled at the same
time; the router sends a request that a box refuses nowhere else.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec.structs import replace

from appliance.errors import LabError
from appliance.fleet.ranking import LATELY_SECONDS, BoxLoad, BoxState, Choose, FleetRequest
from appliance.lab.experiments.run import Contender, Setting, Trial, machine_for
from appliance.lab.sim.recorder import Recorder
from appliance.lab.sim.simulator import BoxSimulation, SimulationRun
from appliance.lab.workload import Arrival
from appliance.policies.stack import PolicyStack
from appliance.scheduling.reports.box_load import machine_load
from appliance.vocabulary import ModelName, RequestId, Word

_REPORTED: Final = frozenset(BoxLoad.__struct_fields__)
"""What a router knows of a box's load."""


class FleetSetting(Word, frozen=True, kw_only=True):
    """So many equal boxes. Each model is in the catalogue of `copies` of them, or of its `homes`,
    and its requests belong to one of so many `sessions`."""

    boxes: int
    poll_seconds: float
    copies: int
    sessions: int
    seed: int
    homes: Mapping[ModelName, frozenset[str]] | None = None
    """Names of boxes by model, if models are not placed in turn."""

    def in_turn(self, box: int, model: int) -> bool:
        """The n-th model is on the box that is n-th in turn, and on those after it."""
        return (box - model) % self.boxes < self.copies

    def with_homes(self, homes: Mapping[ModelName, frozenset[str]]) -> FleetSetting:
        return replace(self, homes=homes)

    def catalogue(self, box: int, models: Sequence[ModelName]) -> frozenset[ModelName]:
        """Of one of the boxes."""
        if self.homes is None:
            return frozenset([m for n, m in enumerate(models) if self.in_turn(box, n)])
        name = box_name(box)
        return frozenset([model for model, homes in self.homes.items() if name in homes])


def box_name(number: int) -> str:
    """What the router calls a box."""
    return f"box-{number}"


@dataclass(frozen=True)
class FleetTrial:
    """What came of it: all boxes together, and how the requests were spread."""

    together: Trial
    boxes: Sequence[SimulationRun]
    same_box_share: float
    """Of the requests of a session but its first, those that went where the one before it went;
    NaN if there were none."""
    busiest_box_ratio: float
    """Requests sent to the box that got most, over the mean."""


def play_fleet(
    setting: Setting, contender: Contender, fleet: FleetSetting, choose: Choose
) -> FleetTrial:
    """Have the router spread the requests of the setting over boxes like the setting's, each under
    the policy. Raises what `play` raises, and `LabError` for a request that no box may take."""
    setting = dataclasses.replace(setting, box=contender.system.box(setting.box))
    boxes = [_Box(setting, contender, fleet, number) for number in range(fleet.boxes)]
    router = _Router(boxes, fleet, choose)
    coming = iter(setting.arrivals)
    arrival = next(coming, None)
    polls = 0
    now = 0.0
    while now < setting.seconds:
        router.poll(now)
        polls += 1
        now = min(setting.seconds, polls * fleet.poll_seconds)
        while arrival is not None and arrival.seconds < now:
            router.send(arrival)
            arrival = next(coming, None)
        for box in boxes:
            box.simulation.advance(now)
    runs = [box.ended(setting.seconds) for box in boxes]
    faults = [fault for box in boxes for fault in box.stack.take_faults()]
    peak = sum([box.simulation.machine.host.peak_kv_slabs for box in boxes])
    return FleetTrial(
        together=Trial(together(runs), faults, peak * setting.box.slab_bytes),
        boxes=runs,
        same_box_share=router.same_box_share(),
        busiest_box_ratio=router.busiest_box_ratio(),
    )


class _Box:
    """One of them, ready for its first request."""

    def __init__(
        self, setting: Setting, contender: Contender, fleet: FleetSetting, number: int
    ) -> None:
        self.name = box_name(number)
        self.catalogue = fleet.catalogue(number, [model.name for model in setting.models])
        own = dataclasses.replace(
            setting,
            models=[model for model in setting.models if model.name in self.catalogue],
            arrivals=(),
            deviation=replace(setting.deviation, seed=setting.deviation.seed * 1009 + number),
        )
        lengths: dict[RequestId, int] = {}
        self.stack: PolicyStack = contender.stack(lengths)
        self.simulation = BoxSimulation(
            machine_for(own, self.stack),
            own.box,
            own.profiles,
            (),
            own.deviation,
            lengths,
            own.start,
        )
        self.simulation.begin()

    def state(self, now: float) -> BoxState:
        """As it answers a poll."""
        found = machine_load(self.simulation.machine, now)
        known = {name: one for name, one in found._asdict().items() if name in _REPORTED}
        load = BoxLoad(catalogue=self.catalogue, **known)
        return BoxState(name=self.name, load=load)

    def ended(self, now: float) -> SimulationRun:
        """Raises `LedgerError` if its books do not balance."""
        self.simulation.machine.check_integrity()
        return self.simulation.ended(now)


@dataclass
class _Router:
    """Knows the boxes by their polls, and what it sent."""

    boxes: Sequence[_Box]
    fleet: FleetSetting
    choose: Choose
    states: list[BoxState] = field(default_factory=list)
    asked: dict[str, dict[ModelName, float]] = field(default_factory=dict)
    """By box: when a request of each model was sent there last."""
    sent: Counter[int] = field(default_factory=Counter)
    """Requests by box."""
    last: dict[str, int] = field(default_factory=dict)
    """The box that each session was sent to last."""
    followed: int = 0
    """Requests that had one before them in their session,"""
    stayed: int = 0
    """and those of them that went to the same box."""

    def __post_init__(self) -> None:
        self._chances = random.Random(f"{self.fleet.seed} chances")
        self._sessions = random.Random(f"{self.fleet.seed} sessions")
        self._numbers = {box.name: number for number, box in enumerate(self.boxes)}

    def poll(self, now: float) -> None:
        self.states = [
            replace(box.state(now), lately=self._lately(box.name, now)) for box in self.boxes
        ]

    def _lately(self, box: str, now: float) -> frozenset[ModelName]:
        times = self.asked.get(box, {})
        return frozenset([model for model, at in times.items() if at >= now - LATELY_SECONDS])

    def send(self, arrival: Arrival) -> None:
        session = f"{arrival.model}/{self._sessions.randrange(self.fleet.sessions)}"
        request = FleetRequest(model=arrival.model, session=session)
        state = self.choose(request, self.states, self._chances.random())
        if state is None:
            raise LabError(f"no box may take a request of {arrival.model}")
        number = self._numbers[state.name]
        models = {**state.sent_models, arrival.model: state.sent_models.get(arrival.model, 0) + 1}
        lately = state.lately | {arrival.model}
        self.states[number] = replace(state, sent=state.sent + 1, sent_models=models, lately=lately)
        self.asked.setdefault(state.name, {})[arrival.model] = arrival.seconds
        self.boxes[number].simulation.offer(arrival)
        self.sent[number] += 1
        before = self.last.get(session)
        self.followed += before is not None
        self.stayed += before == number
        self.last[session] = number

    def same_box_share(self) -> float:
        return self.stayed / self.followed if self.followed else float("nan")

    def busiest_box_ratio(self) -> float:
        total = self.sent.total()
        return max(self.sent.values()) * len(self.boxes) / total if total else float("nan")


def together(runs: Sequence[SimulationRun]) -> SimulationRun:
    """The runs of several boxes as that of one with all their instances. Spans and samples, which
    plots are made of, are left out."""
    merged, instances = Recorder(), 0
    for run in runs:
        own, before = run.recorder, len(merged.lives)
        merged.requests.extend(
            array("q", (np.frombuffer(own.requests, dtype=np.int64) + before).tobytes())
        )
        for life in own.lives:
            merged.lives.append(dataclasses.replace(life, number=life.number + before))
        merged.starts.extend(own.starts)
        merged.firsts.extend(own.firsts)
        merged.growths.extend(own.growths)
        merged.counts.extend(own.counts)
        merged.switches.extend(own.switches)
        merged.loads += own.loads
        merged.prefetches += own.prefetches
        merged.busy |= {number + instances: busy for number, busy in own.busy.items()}
        merged.reach.add(own.reach)
        instances += run.instances
    return dataclasses.replace(
        runs[0],
        recorder=merged,
        instances=instances,
        events=sum([run.events for run in runs]),
        preemptions=sum([run.preemptions for run in runs]),
    )
