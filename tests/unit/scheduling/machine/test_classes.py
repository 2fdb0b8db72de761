"""Interactive and batch requests: who waits for whom, where batch work goes, what is stuck."""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import Fleet, FloorView, InstanceView, Placement, PrefillChoice
from appliance.vocabulary import RequestClass, RunPrefill, RunTurn, Ticked
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble

BATCH = RequestClass.BATCH


class Fleets:
    """Classes as told; requests go to the first or the last (`pick`) instance that may."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.pick = -1

    @hookimpl
    def place(self, floor: FloorView) -> Sequence[Placement]:
        return [Placement()] * len(floor.instances)

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
    floor = FloorDouble(one_model(), instances=3, stranger=policy)
    floor.start()
    for index in range(4):
        floor.ask(f"b{index}", "a", kind=BATCH)
    floor.ask("i", "a")
    waiting = {name: floor.machine.requests[name].instance for name in ("b1", "b3", "i")}

    policy.fleet = Fleet(interactive=1, mixed=1, batch=1)
    floor.now += 2.0
    floor.tell(Ticked())

    assert waiting == {"b1": 0, "b3": 0, "i": 1}
    moved = {name: floor.machine.requests[name].instance for name in ("b1", "b3", "i")}
    assert moved == {"b1": 2, "b3": 2, "i": 1}
    floor.settle()
    assert {life.outcome for life in floor.world.lives.values()} == {"length"}


def test_an_idle_instance_gets_batch_work_that_waits_elsewhere() -> None:
    """Where batch work was put when it came does not keep it waiting while somebody idles."""
    policy = Fleets(Fleet(interactive=0, mixed=2, batch=0))
    floor = FloorDouble(one_model(), instances=2, stranger=policy)
    floor.start()
    while floor.work(0) or floor.work(1):
        pass
    floor.ask("i0", "a")
    for index in range(3):
        floor.ask(f"b{index}", "a", kind=BATCH)
    floor.ask("i1", "a")
    assert {request.instance for request in floor.machine.requests.values()} == {1}

    policy.pick = 0
    floor.now += 2.0
    floor.tell(Ticked())

    homes = {name: request.instance for name, request in floor.machine.requests.items()}
    assert homes == {"i0": 1, "i1": 1, "b0": 0, "b1": 0, "b2": 0}


def test_batch_work_is_not_stuck_while_its_instance_works() -> None:
    """Batch requests wait rightly behind others; a stuck instance, or a stuck interactive request,
    shows all the same."""
    floor = FloorDouble(one_model(), slabs=24)
    floor.start()
    floor.ask("b", "a", kind=BATCH)
    arrived = floor.machine.requests["b"].arrived
    assert floor.machine.oldest_progress() == arrived

    floor.ask("i", "a", output=20)
    floor.now += 500.0
    floor.work_until(0, lambda: floor.world.lives["i"].produced > 0)

    progress = floor.machine.oldest_progress()
    assert (progress or 0.0) > arrived + 500.0
    stuck = floor.now
    floor.ask("j", "a")
    floor.now += 100.0
    assert (floor.machine.oldest_progress() or math.inf) <= stuck + 1.0


def test_an_interactive_request_gets_host_room_before_batch_requests() -> None:
    """Batch requests that wait for room in the host tier do not keep an interactive one waiting."""
    floor = FloorDouble(one_model(), slabs=30, host_slabs=12)
    floor.start()
    for index in range(8):
        floor.ask(f"b{index}", "a", output=60, kind=BATCH)
    floor.work_until(0, lambda: bool(floor.machine.foreman.host_queue))
    waiting = [name for name in floor.world.lives if not floor.world.lives[name].prefills]

    floor.ask("i", "a")
    floor.settle()

    prefilled = [command.request for command in floor.commands(RunPrefill)]
    assert len(waiting) > 1
    assert all([prefilled.index("i") < prefilled.index(name) for name in waiting])
    assert all([life.outcome == "length" for life in floor.world.lives.values()])


def test_an_interactive_request_interrupts_while_batch_requests_wait_for_the_host() -> None:
    """That batch work waits for the host tier does not keep a turn from being ended."""
    floor = FloorDouble(one_model(), slabs=30, host_slabs=12)
    floor.start()
    for index in range(8):
        floor.ask(f"b{index}", "a", output=60, kind=BATCH)
    floor.work_until(0, lambda: bool(floor.machine.foreman.host_queue) and bool(floor.up[0].turn))
    turns = len(floor.commands(RunTurn))

    floor.ask("i", "a")

    assert len(floor.commands(RunTurn)) == turns
    assert floor.up[0].preempted


def test_batch_requests_that_wait_for_the_host_end_no_turn() -> None:
    """Who could not begin anyway does not have a turn ended."""
    floor = FloorDouble(one_model(), slabs=30, host_slabs=12)
    floor.start()
    for index in range(8):
        floor.ask(f"b{index}", "a", output=60, kind=BATCH)
    floor.work_until(0, lambda: bool(floor.machine.foreman.host_queue) and bool(floor.up[0].turn))

    floor.ask("late", "a", output=60, kind=BATCH)

    assert not floor.up[0].preempted
