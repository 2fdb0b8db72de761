"""Shedding in the lab: what is refused would have been late, and more of the rest is in time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from appliance.hookspecs import hookimpl
from appliance.lab.experiments.metrics import RunMetrics, measure
from appliance.lab.sim.simulator import SimulationRun, simulate
from appliance.lab.workload import Lengths, drawn
from appliance.memory.ledger import HostLedger
from appliance.plugins.aegaeon import Aegaeon
from appliance.plugins.appliance import Appliance
from appliance.plugins.shedding import Shed
from appliance.policies.stack import PolicyStack
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Costs, InstanceView, Refusal, RequestView
from appliance.vocabulary import ModelSpec
from tests.unit.lab import bench as lab_bench
from tests.unit.lab.bench import SLAB, SLO

pytestmark = pytest.mark.thorough

MODELS = ["a", "b", "c", "d", "e", "f", "g", "h"]
SECONDS = 120.0
SEEDS = range(3)


class Judge:
    """Asked first: it remembers whom a policy that sheds would refuse, and leaves the choice to the
    next policy."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self._sheds = Appliance(shed=Shed.HOPELESS)

    @hookimpl
    def prefill(
        self, now: float, request: RequestView, instances: Sequence[InstanceView], costs: Costs
    ) -> None:
        answer = self._sheds.prefill(now=now, request=request, instances=instances, costs=costs)
        if isinstance(answer, Refusal):
            self.refused.add(request.id)


def play(rate: float, seed: int, **policies: object) -> SimulationRun:
    """Two instances, each with room for some of eight models that are asked so often."""
    specs = [
        ModelSpec(name=name, weight_bytes=4 * SLAB, max_context_tokens=400, max_batch=8, slo=SLO)
        for name in MODELS
    ]
    profiles = {name: lab_bench.profile(name) for name in MODELS}
    box = lab_bench.box(2, slabs=24)
    costs = CostModel(
        specs,
        times={name: one.step_times() for name, one in profiles.items()},
        load_bytes_per_second=box.gpu.link_bytes_per_second,
    )
    stack = PolicyStack({**policies, "built-in": Aegaeon()})
    machine = Machine(specs, 2, HostLedger(box.host_bytes, SLAB), stack, costs)
    lengths = Lengths([(20, 30), (150, 5), (8, 120), (60, 60)])
    arrivals = drawn(dict.fromkeys(MODELS, rate), lengths, SECONDS, seed)
    run = simulate(machine, box, profiles, arrivals, SECONDS)
    assert not stack.faults
    return run


def of_all(runs: list[RunMetrics]) -> tuple[float, float]:
    """Requests that kept both promises, per second; and of those that were not refused, the share
    whose first token was in time."""
    taken = sum([run.requests - run.rejected for run in runs])
    in_time = sum([run.ttft_attainment * run.requests for run in runs])
    return sum([run.goodput_per_second for run in runs]), in_time / taken


@pytest.mark.parametrize("rate", [0.4, 0.6])
def test_who_is_refused_would_have_been_late(rate: float) -> None:
    """Three of four at least, where nothing is refused."""
    late = marked = 0
    for seed in SEEDS:
        judge = Judge()
        run = play(rate, seed, judge=judge, appliance=Appliance())
        first = first_tokens(run)
        for life in run.recorder.lives:
            due = life.arrived + life.slo.ttft_seconds
            if life.id in judge.refused and due < run.until:
                marked += 1
                late += first.get(life.number, float("inf")) > due
    assert marked > 20
    assert late >= 0.75 * marked


def first_tokens(run: SimulationRun) -> dict[int, float]:
    """When each request had its first token."""
    recorder = run.recorder
    first: dict[int, float] = {}
    for number, start, step in zip(
        recorder.requests, recorder.starts, recorder.firsts, strict=True
    ):
        first[number] = min(first.get(number, float("inf")), start + step)
    return first


@pytest.mark.parametrize("rate", [0.4, 0.6])
def test_what_is_not_refused_is_in_time_more_often(rate: float) -> None:
    """And as many requests keep both promises."""
    never, sheds = (
        of_all([measure(play(rate, seed, appliance=Appliance(shed=shed))) for seed in SEEDS])
        for shed in (Shed.NEVER, Shed.HOPELESS)
    )
    assert sheds[1] > never[1]
    assert sheds[0] >= 0.98 * never[0]
