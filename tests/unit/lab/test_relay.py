"""Loads that are relayed through idle peers: how long they take, and what they never do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.lab.experiments import scenario
from appliance.lab.experiments.run import Contender, System, play
from appliance.lab.hardware import Box
from appliance.lab.sim.event_queue import Agenda, Rank
from appliance.lab.sim.link import LinkTransfer
from appliance.lab.sim.relay import peers_on_hosts
from appliance.lab.sim.topology import KV_IN, KV_OUT, WEIGHTS, Wiring
from appliance.memory.relay import OWN_PIECES, PIECE_BYTES, STAGING_BUFFERS
from tests.unit.lab.bench import box

SCENARIO = Path(__file__).parents[3] / "benchmarks/scenarios/first_look.toml"
PIECES = 400
TAIL_PIECES = OWN_PIECES
"""By so many a load may end later than all paths together could: the last are in line."""


def relaying(instances: int, nvlink: float = 9.0, **changed: object) -> Box:
    """A link takes a piece a second, NVLink so many."""
    small = box(instances)
    gpu = replace(
        small.gpu,
        pcie_bytes_per_second=2.0 * PIECE_BYTES,
        nvlink_bytes_per_second=2 * nvlink * PIECE_BYTES,
    )
    return replace(small, gpu=gpu, relay=True, **changed)


class Asked(msgspec.Struct, frozen=True):
    """A transfer that begins at some time: a load, KV that comes back, or KV that goes."""

    at: float
    instance: int
    lane: str = WEIGHTS
    nbytes: int = PIECES * PIECE_BYTES


def ends(hardware: Box, *asked: Asked) -> list[float]:
    """When each is over, from when it was asked for."""
    agenda = Agenda()
    wiring = Wiring(agenda, hardware)
    inwards = [wiring.inwards(one) for one in range(hardware.instances)]
    outwards = [wiring.outwards(one) for one in range(hardware.instances)]
    over: dict[int, LinkTransfer] = {}

    def begin(number: int) -> None:
        one = asked[number]
        link = (outwards if one.lane == KV_OUT else inwards)[one.instance]
        link.start(one.lane, one.nbytes, partial(over.__setitem__, number))

    for number, one in enumerate(asked):
        agenda.at(one.at, Rank.JOB, partial(begin, number))
    while agenda.step(1e9):
        pass
    assert sorted(over) == list(range(len(asked)))
    for number, transfer in over.items():
        assert transfer.queued == asked[number].at
        assert transfer.queued_seconds >= 0
    return [(over[number].ended or 0.0) - one.at for number, one in enumerate(asked)]


def alone(hardware: Box, *asked: Asked) -> list[float]:
    """The same without a relay."""
    return ends(replace(hardware, relay=False), *asked)


def test_each_idle_peer_adds_a_link() -> None:
    """Up to what NVLink takes; those that load, too, add nothing, and wait at most for the pieces
    that they had in their buffers."""
    load = Asked(0.0, 0)
    assert alone(relaying(8), load) == [PIECES]
    for instances in (2, 4, 8):
        [seconds] = ends(relaying(instances), load)
        assert seconds == pytest.approx(PIECES / instances, abs=TAIL_PIECES)
    [seconds] = ends(relaying(8, nvlink=3.0), load)
    assert seconds == pytest.approx(PIECES / 4, abs=TAIL_PIECES)
    all_load = [Asked(0.0, one) for one in range(8)]
    assert max(ends(relaying(8), *all_load)) <= PIECES + STAGING_BUFFERS


def test_peers_under_a_root_in_use_add_nothing() -> None:
    """Two GPUs to a root, with the rate of one: of eight GPUs four roots copy."""
    load = Asked(0.0, 0)
    [seconds] = ends(relaying(8, gpus_per_root=2), load)
    assert seconds == pytest.approx(PIECES / 4, abs=TAIL_PIECES)
    wide = relaying(8, gpus_per_root=2, root_pcie_bytes_per_second=4.0 * PIECE_BYTES)
    assert ends(wide, load)[0] == pytest.approx(PIECES / 8, abs=TAIL_PIECES)


def test_the_hosts_memory_bounds_the_relay() -> None:
    """Five links' worth of it are five paths; KV that another GPU sends out takes one of them."""
    hardware = relaying(8, host_bytes_per_second=5.0 * PIECE_BYTES)
    assert ends(hardware, Asked(0.0, 0))[0] == pytest.approx(PIECES / 5, abs=TAIL_PIECES)
    leaving = Asked(0.0, 1, KV_OUT)
    seconds, out = ends(hardware, Asked(0.0, 0), leaving)
    assert seconds == pytest.approx(PIECES / 4, abs=TAIL_PIECES)
    assert out <= PIECES + STAGING_BUFFERS


def test_peers_are_those_of_the_same_host() -> None:
    """Eight GPUs to a host; an instance over two hosts has no peers, nor one alone on its host."""
    assert peers_on_hosts(9, 1, 8)[7] == [0, 1, 2, 3, 4, 5, 6]
    assert 8 not in peers_on_hosts(9, 1, 8)
    assert peers_on_hosts(4, 4, 8) == {0: [1], 1: [0], 2: [3], 3: [2]}
    assert peers_on_hosts(4, 3, 8) == {0: [1], 1: [0]}
    assert peers_on_hosts(2, 8, 8) == {}
    [seconds] = ends(relaying(9), Asked(0.0, 8))
    assert seconds == PIECES


def test_instances_of_several_gpus_relay_through_instances() -> None:
    """Each of their GPUs through one of the peer's, at the rate of one."""
    [seconds] = ends(relaying(4, tp=2), Asked(0.0, 0))
    assert seconds == pytest.approx(PIECES / 4, abs=TAIL_PIECES)


def test_a_peer_gives_way_when_it_loads_itself() -> None:
    """Its own copy shares its link with the pieces in its buffers only, then has all of it."""
    first, second = Asked(0.0, 0), Asked(20.5, 1, KV_IN, 100 * PIECE_BYTES)
    seconds, own = ends(relaying(2), first, second)
    assert 100 < own <= 100 + STAGING_BUFFERS
    # Two links for 20 s, one for 100 s, then two again.
    assert seconds == pytest.approx(20.5 + 100 + (PIECES - 141) / 2, abs=3)


def test_a_cancelled_load_frees_the_links() -> None:
    """Its end is not reported; the next load waits for no more than pieces under way."""
    agenda = Agenda()
    link = Wiring(agenda, relaying(2)).inwards(0)
    over: list[LinkTransfer] = []
    first = link.start(WEIGHTS, PIECES * PIECE_BYTES, over.append)
    agenda.at(5.0, Rank.JOB, lambda: link.cancel(WEIGHTS, first))
    agenda.at(5.0, Rank.ORDER, lambda: link.start(WEIGHTS, 50 * PIECE_BYTES, over.append))
    while agenda.step(1e9):
        pass
    [second] = over
    assert second.nbytes == 50 * PIECE_BYTES
    assert second.ended == pytest.approx(5 + 25, abs=OWN_PIECES + TAIL_PIECES)


def test_models_of_a_whole_run_come_sooner() -> None:
    """The machine and its policy switch as before, and wait less for it; a system that switches at
    its own costs has no relay."""
    own = System(efficiency=0.625)
    waits = {}
    for relay in ("false", "true"):
        changes = {"hardware.relay": relay, "duration": "40s"}
        setting = scenario.read(SCENARIO, changes).setting(1, SCENARIO.parent)
        for system in (System(), own):
            policy = Contender("serverlessllm", ("serverlessllm",), system=system)
            switches = play(setting, policy).run.recorder.switches
            waits[relay, system] = mean(one.waited for one in switches)
    assert waits["true", System()] < waits["false", System()]
    assert waits["true", own] == waits["false", own]


loads = st.builds(
    Asked,
    at=st.floats(0, 60),
    instance=st.just(0),
    lane=st.sampled_from([WEIGHTS, WEIGHTS, KV_IN]),
    nbytes=st.integers(1, 60 * PIECE_BYTES),
)
hardware = st.builds(
    relaying,
    instances=st.integers(2, 8),
    nvlink=st.sampled_from([0.2, 0.9, 1.0, 1.5, 3.0, 20.0]),
    gpus_per_root=st.sampled_from([1, 2, 4]),
    root_pcie_bytes_per_second=st.sampled_from([None, 3.0 * PIECE_BYTES, 8.0 * PIECE_BYTES]),
    host_bytes_per_second=st.sampled_from([0.5 * PIECE_BYTES, 2.5 * PIECE_BYTES, float("inf")]),
)


@settings(max_examples=150, deadline=None)
@given(hardware, st.lists(loads, min_size=1, max_size=5))
def test_with_idle_peers_no_copy_is_slower(hardware: Box, asked: list[Asked]) -> None:
    """None of an instance that loads and copies KV as it likes, on any tree, over any NVLink."""
    for with_relay, without in zip(ends(hardware, *asked), alone(hardware, *asked), strict=True):
        assert with_relay <= without + 1e-6


@settings(max_examples=100, deadline=None)
@given(hardware, st.lists(loads, min_size=1, max_size=6), st.data())
def test_no_link_is_faster_than_it_is(
    hardware: Box, asked: list[Asked], data: st.DataObject
) -> None:
    """A load takes the time of all the links that it may use, and of the memory behind them; all
    loads together that of all links."""
    instances = st.integers(0, hardware.instances - 1)
    spread = [replace(one, instance=data.draw(instances)) for one in asked]
    seconds = ends(hardware, *spread)
    rate, memory = PIECE_BYTES, hardware.host_bytes_per_second
    nvlink = hardware.gpu.peer_bytes_per_second
    most = min(hardware.instances * rate, rate + nvlink, memory)
    for one, took in zip(spread, seconds, strict=True):
        assert took >= one.nbytes / most * (1 - 1e-6)
    roots = -(-hardware.instances // hardware.gpus_per_root) * hardware.root_bytes_per_second
    last = max(one.at + took for one, took in zip(spread, seconds, strict=True))
    total = sum(one.nbytes for one in spread)
    assert last - min(one.at for one in spread) >= total / min(roots, memory) * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(loads, min_size=1, max_size=6))
def test_one_gpu_has_the_schedule_that_it_has_without(asked: list[Asked]) -> None:
    """To the last bit."""
    assert ends(relaying(1), *asked) == alone(relaying(1), *asked)
