"""Why requests wait, as the machine's own books tell it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.scheduling.lifecycle import Engine, KvPlace, Stage
from appliance.scheduling.state import BuildJob, PrefillJob
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import RunTurn, WaitCode, WaitReason
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def floor_of(names: str = "ab", **options: Any) -> FloorDouble:
    return FloorDouble({name: ModelDouble(4, shape()) for name in names}, **options)


def ready(names: str = "ab", **options: Any) -> FloorDouble:
    """Every engine is built, and there is nothing to do."""
    floor = floor_of(names, **options)
    floor.start()
    floor.settle()
    return floor


def reason(floor: FloorDouble, name: str) -> WaitReason | None:
    return wait_reason(floor.machine, floor.machine.requests[name], floor.now)


def code(floor: FloorDouble, name: str) -> WaitCode | None:
    found = reason(floor, name)
    return None if found is None else found.code


def turn_runs(floor: FloorDouble) -> Callable[[], bool]:
    return lambda: floor.up[0].turn is not None


def test_nobody_is_up() -> None:
    """Before the first worker is up a request waits for one."""
    floor = floor_of()
    floor.ask("r", "a")

    assert code(floor, "r") is WaitCode.NO_INSTANCE


def test_an_engine_is_built() -> None:
    """Its own, or one that was begun before; what is said names it."""
    floor = floor_of("ab")
    floor.start()
    floor.ask("own", "a")
    floor.ask("other", "b")
    assert isinstance(floor.machine.instances[0].job, BuildJob)

    own, other = reason(floor, "own"), reason(floor, "other")

    assert own is not None
    assert other is not None
    assert own.code is other.code is WaitCode.BUILDING_ENGINE
    assert (own.behind, other.behind) == ("a", "a")
    assert "builds its model's engine" in own.message
    assert "the engine of b is built then" in other.message


def test_weights_are_on_their_way() -> None:
    """While its prompt waits for weights it says so, and whether they come from disk."""
    floor = ready("abc", host_slabs=11, kv_floor_slabs=3, slabs=9, max_context=128)

    floor.ask("stored", "a")
    assert code(floor, "stored") is WaitCode.LOADING_WEIGHTS
    floor.settle()

    floor.ask("on disk", "c")
    assert code(floor, "on disk") is WaitCode.FILLING_HOST_CACHE
    floor.settle()


def test_what_is_computed_waits_for_nothing() -> None:
    """Neither a prompt whose weights are in place, nor a request in its turn."""
    floor = ready()
    floor.ask("r1", "a", output=20)
    floor.work_until(0, turn_runs(floor))
    assert code(floor, "r1") is None
    floor.settle()

    floor.ask("r2", "a")
    assert isinstance(floor.machine.instances[0].job, PrefillJob)
    assert code(floor, "r2") is None


def test_another_model_has_its_turn() -> None:
    """The model is named, and how long its turn is planned to last still."""
    floor = ready(policy="aegaeon")
    floor.ask("r1", "a", output=100)
    floor.work_until(0, turn_runs(floor))
    floor.ask("r2", "b")

    found = reason(floor, "r2")

    assert found is not None
    assert (found.code, found.behind, found.instance) == (WaitCode.OTHER_MODEL, "a", 0)
    assert found.seconds is not None
    assert f"a decodes on instance 0, planned for {found.seconds:.1f} s more" in found.message


def test_another_model_s_prompt_is_computed() -> None:
    """How long a prompt takes is not planned."""
    floor = ready()
    floor.ask("r1", "a")
    floor.ask("r2", "b")

    found = reason(floor, "r2")

    assert found is not None
    assert (found.code, found.seconds) == (WaitCode.OTHER_MODEL, None)
    assert found.message == "a computes a prompt on instance 0"


def test_others_of_its_model_are_computed() -> None:
    """A second prompt of the same model waits for the first one."""
    floor = ready()
    floor.ask("r1", "a")
    floor.ask("r2", "a")

    found = reason(floor, "r2")

    assert found is not None
    assert (found.code, found.behind) == (WaitCode.SAME_MODEL, "a")


def test_an_engine_that_is_not_there_yet_is_mentioned() -> None:
    """Who waits for another model's turn learns that its own engine comes after."""
    floor = floor_of("ab")
    floor.start()
    floor.ask("r1", "a")
    floor.work_until(0, lambda: isinstance(floor.machine.instances[0].job, PrefillJob))
    floor.ask("r2", "b")
    assert floor.machine.instances[0].engines["b"].stage is Engine.ABSENT

    found = reason(floor, "r2")

    assert found is not None
    assert found.message.endswith("; the engine of b is built then")


def test_host_room_comes_free_as_others_end() -> None:
    """Who is first in line waits for the host tier, others behind it for whoever that is; those
    that wait for room, too, are counted."""
    floor = ready("ab", slabs=60, host_slabs=14, kv_floor_slabs=6, instances=2, policy="aegaeon")
    for number in range(8):
        floor.ask(f"r{number}", "ab"[number % 2], prompt=100, output=20)
    seen, told = set(), set()
    while any([floor.work(0), floor.work(1)]):
        for name in floor.machine.requests:
            found = reason(floor, name)
            if name in floor.machine.foreman.host_queue:
                assert found is not None
                assert found.code is WaitCode.HOST_ROOM
                told.add("more wait for it" in found.message)
                assert ("more wait for it" in found.message) == (
                    len(floor.machine.foreman.host_queue) > 1
                )
            seen.add(None if found is None else found.code)

    assert {WaitCode.HOST_ROOM, WaitCode.QUEUE} <= seen
    assert False in told


def test_kv_moves_are_told() -> None:
    """A request whose KV leaves says so."""
    floor = ready("ab", slabs=20, policy="aegaeon")
    for name in ("a1", "a2", "b1", "b2"):
        floor.ask(name, name[0], prompt=180, output=60)
    seen = set()
    for _ in range(10_000):
        for name, request in floor.machine.requests.items():
            found = code(floor, name)
            if request.kv is KvPlace.LEAVING and request.stage is Stage.READY:
                assert found is WaitCode.SWAPPING_OUT
            seen.add(found)
        if not floor.work(0):
            break

    assert {WaitCode.SWAPPING_OUT, WaitCode.OTHER_MODEL} <= seen
    assert floor.commands(RunTurn)


def test_a_batch_makes_way_for_one_that_waited_longer() -> None:
    """While KV of its own model leaves and nothing is computed, a request waits for KV room; while
    its own comes back, for that."""
    floor = ready("a", slabs=4 + 8, policy="aegaeon")
    for index in range(3):
        floor.ask(f"r{index}", "a", prompt=150, output=40)
    seen = set()
    while floor.work(0):
        seen |= {code(floor, name) for name in floor.machine.requests}

    assert {WaitCode.KV_ROOM, WaitCode.SWAPPING_IN} <= seen
