"""Interactive and batch requests: who waits for whom, where batch work goes, what is stuck."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from appliance.hookspecs import hookimpl
from appliance.scheduling.cluster import parked_seconds
from appliance.scheduling.policy_api import (
    ClusterView,
    Fleet,
    InstanceView,
    Placement,
    PrefillChoice,
)
from appliance.vocabulary import RequestClass, RunTurn, Ticked
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

BATCH = RequestClass.BATCH


class Fleets:
    """Classes as told; requests go to the first or the last (`pick`) instance that may."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.pick = -1

    @hookimpl
    def place(self, cluster: ClusterView) -> Sequence[Placement]:
        return [Placement()] * len(cluster.instances)

    @hookimpl
    def scale(self) -> Fleet:
        return self.fleet

    @hookimpl
    def prefill(self, instances: Sequence[InstanceView]) -> PrefillChoice:
        return PrefillChoice(instance=instances[self.pick].id)


def one_model() -> dict[str, ModelDouble]:
    return {"a": ModelDouble(4, shape())}


def test_waiting_batch_work_goes_to_a_new_batch_instance() -> None:
    """What waits on a mixed instance is dealt anew when an instance is there for batch work."""
    policy = Fleets(Fleet(interactive=1, mixed=1, batch=0))
    cluster = ClusterDouble(one_model(), instances=3, stranger=policy)
    cluster.start()
    for index in range(4):
        cluster.ask(f"b{index}", "a", kind=BATCH)
    cluster.ask("i", "a")
    waiting = {name: cluster.machine.requests[name].instance for name in ("b1", "b3", "i")}

    policy.fleet = Fleet(interactive=1, mixed=1, batch=1)
    cluster.now += 2.0
    cluster.tell(Ticked())

    assert waiting == {"b1": 0, "b3": 0, "i": 1}
    moved = {name: cluster.machine.requests[name].instance for name in ("b1", "b3", "i")}
    assert moved == {"b1": 2, "b3": 2, "i": 1}
    cluster.settle()
    assert {life.outcome for life in cluster.world.lives.values()} == {"length"}


def test_an_idle_instance_gets_batch_work_that_waits_elsewhere() -> None:
    """Where batch work was put when it came does not keep it waiting while an instance idles."""
    policy = Fleets(Fleet(interactive=0, mixed=2, batch=0))
    cluster = ClusterDouble(one_model(), instances=2, stranger=policy)
    cluster.start()
    while cluster.work(0) or cluster.work(1):
        pass
    cluster.ask("i0", "a")
    for index in range(3):
        cluster.ask(f"b{index}", "a", kind=BATCH)
    cluster.ask("i1", "a")
    assert {request.instance for request in cluster.machine.requests.values()} == {1}

    policy.pick = 0
    cluster.now += 2.0
    cluster.tell(Ticked())

    homes = {name: request.instance for name, request in cluster.machine.requests.items()}
    assert homes == {"i0": 1, "i1": 1, "b0": 0, "b1": 0, "b2": 0}


def test_batch_work_is_not_stuck_while_its_instance_works() -> None:
    """Batch requests wait rightly behind others; a stuck instance, or a stuck interactive request,
    shows all the same."""
    cluster = ClusterDouble(one_model(), slabs=24)
    cluster.start()
    cluster.ask("b", "a", kind=BATCH)
    arrived = cluster.machine.requests["b"].arrived
    assert cluster.machine.oldest_progress() == arrived

    cluster.ask("i", "a", output=20)
    cluster.now += 500.0
    cluster.work_until(0, lambda: cluster.world.lives["i"].produced > 0)

    progress = cluster.machine.oldest_progress()
    assert (progress or 0.0) > arrived + 500.0
    stuck = cluster.now
    cluster.ask("j", "a")
    cluster.now += 100.0
    assert (cluster.machine.oldest_progress() or math.inf) <= stuck + 1.0


def test_an_interactive_request_gets_host_room_before_batch_requests() -> None:
    """Batch requests that wait for room in the host tier do not keep an interactive one waiting."""
    cluster = ClusterDouble(one_model(), slabs=30, host_slabs=12)
    cluster.start()
    for index in range(8):
        cluster.ask(f"b{index}", "a", output=60, kind=BATCH)
    cluster.work_until(0, lambda: bool(cluster.machine.request_book.host_queue))
    waiting = [name for name in cluster.world.lives if not cluster.world.lives[name].prefills]

    cluster.ask("i", "a")
    cluster.settle()

    prefilled = cluster.prompts()
    assert len(waiting) > 1
    assert all([prefilled.index("i") < prefilled.index(name) for name in waiting])
    assert all([life.outcome == "length" for life in cluster.world.lives.values()])


def test_an_interactive_request_interrupts_while_batch_requests_wait_for_the_host() -> None:
    """That batch work waits for the host tier does not keep a turn from being ended."""
    cluster = ClusterDouble(one_model(), slabs=30, host_slabs=12)
    cluster.start()
    for index in range(8):
        cluster.ask(f"b{index}", "a", output=60, kind=BATCH)
    cluster.work_until(
        0, lambda: bool(cluster.machine.request_book.host_queue) and bool(cluster.up[0].turn)
    )
    turns = len(cluster.commands(RunTurn))

    cluster.ask("i", "a")

    assert len(cluster.commands(RunTurn)) == turns
    assert cluster.up[0].preempted


def test_batch_requests_that_wait_for_the_host_end_no_turn() -> None:
    """Who could not begin anyway does not have a turn ended."""
    cluster = ClusterDouble(one_model(), slabs=30, host_slabs=12)
    cluster.start()
    for index in range(8):
        cluster.ask(f"b{index}", "a", output=60, kind=BATCH)
    cluster.work_until(
        0, lambda: bool(cluster.machine.request_book.host_queue) and bool(cluster.up[0].turn)
    )

    cluster.ask("late", "a", output=60, kind=BATCH)

    assert not cluster.up[0].preempted


def test_the_time_in_which_an_instance_rests_is_counted() -> None:
    """From when it is parked and has nothing to do, until it may take requests again or is lost;
    also while nothing is asked, and not what it still finishes."""
    policy = Fleets(Fleet(interactive=0, mixed=2, batch=0))
    cluster = ClusterDouble(one_model(), instances=2, stranger=policy)
    cluster.start()
    cluster.settle()
    rests = cluster.machine.instances[1]

    def plan(after: float) -> float:
        cluster.now += after
        cluster.tell(Ticked())
        return parked_seconds(rests, cluster.now)

    cluster.ask("last", "a", output=5)
    assert not rests.idle
    policy.fleet = Fleet(interactive=0, mixed=1, batch=0)
    assert plan(2.0) == plan(2.0) == 0.0  # it finishes what it has
    cluster.settle()
    assert plan(2.0) == 0.0
    assert plan(2.0) == pytest.approx(2.0, abs=0.01)
    cluster.now += 3.0
    assert parked_seconds(rests, cluster.now) == pytest.approx(5.0, abs=0.01)
    policy.fleet = Fleet(interactive=0, mixed=2, batch=0)
    woken = plan(1.0)
    assert woken == pytest.approx(6.0, abs=0.01)
    assert plan(2.0) == woken
    policy.fleet = Fleet(interactive=0, mixed=1, batch=0)
    plan(2.0)
    cluster.lose(1)
    lost = parked_seconds(rests, cluster.now)
    assert lost == pytest.approx(woken, abs=0.01)
    assert plan(2.0) == lost
