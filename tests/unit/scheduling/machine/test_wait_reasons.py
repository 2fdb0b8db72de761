"""Why requests wait, as the machine's own books tell it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.scheduling.lifecycle import EngineStage, KvPlace, Stage
from appliance.scheduling.state import BuildJob, PrefillJob
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import RunTurn, WaitCode, WaitReason
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def cluster_of(names: str = "ab", **options: Any) -> ClusterDouble:
    return ClusterDouble({name: ModelDouble(4, shape()) for name in names}, **options)


def ready(names: str = "ab", **options: Any) -> ClusterDouble:
    """Every engine is built, and there is nothing to do."""
    cluster = cluster_of(names, **options)
    cluster.start()
    cluster.settle()
    return cluster


def reason(cluster: ClusterDouble, name: str) -> WaitReason | None:
    return wait_reason(cluster.machine, cluster.machine.requests[name], cluster.now)


def code(cluster: ClusterDouble, name: str) -> WaitCode | None:
    found = reason(cluster, name)
    return None if found is None else found.code


def turn_runs(cluster: ClusterDouble) -> Callable[[], bool]:
    return lambda: cluster.up[0].turn is not None


def test_no_instance_is_up() -> None:
    """Before the first worker is up a request waits for one."""
    cluster = cluster_of()
    cluster.ask("r", "a")

    assert code(cluster, "r") is WaitCode.NO_INSTANCE


def test_an_engine_is_built() -> None:
    """Its own, or one that was begun before; what is said names it."""
    cluster = cluster_of("ab")
    cluster.start()
    cluster.ask("own", "a")
    cluster.ask("other", "b")
    assert isinstance(cluster.machine.instances[0].job, BuildJob)

    own, other = reason(cluster, "own"), reason(cluster, "other")

    assert own is not None
    assert other is not None
    assert own.code is other.code is WaitCode.BUILDING_ENGINE
    assert (own.behind, other.behind) == ("a", "a")
    assert "builds its model's engine" in own.message
    assert "the engine of b is built then" in other.message


def test_weights_are_on_their_way() -> None:
    """While its prompt waits for weights it says so, and whether they come from disk."""
    cluster = ready("abc", host_slabs=11, kv_floor_slabs=3, slabs=9, max_context=128)

    cluster.ask("stored", "a")
    assert code(cluster, "stored") is WaitCode.LOADING_WEIGHTS
    cluster.settle()

    cluster.ask("on disk", "c")
    assert code(cluster, "on disk") is WaitCode.FILLING_HOST_CACHE
    cluster.settle()


def test_what_is_computed_waits_for_nothing() -> None:
    """Neither a prompt whose weights are in place, nor a request in its turn."""
    cluster = ready()
    cluster.ask("r1", "a", output=20)
    cluster.work_until(0, turn_runs(cluster))
    assert code(cluster, "r1") is None
    cluster.settle()

    cluster.ask("r2", "a")
    assert isinstance(cluster.machine.instances[0].job, PrefillJob)
    assert code(cluster, "r2") is None


def test_another_model_has_its_turn() -> None:
    """The model is named, and how long its turn is planned to last still."""
    cluster = ready(policy="aegaeon")
    cluster.ask("r1", "a", output=100)
    cluster.work_until(0, turn_runs(cluster))
    cluster.ask("r2", "b")

    found = reason(cluster, "r2")

    assert found is not None
    assert (found.code, found.behind, found.instance) == (WaitCode.OTHER_MODEL, "a", 0)
    assert found.seconds is not None
    assert f"a decodes on instance 0, planned for {found.seconds:.1f} s more" in found.message


def test_another_model_s_prompt_is_computed() -> None:
    """How long a prompt takes is not planned."""
    cluster = ready()
    cluster.ask("r1", "a")
    cluster.ask("r2", "b")

    found = reason(cluster, "r2")

    assert found is not None
    assert (found.code, found.seconds) == (WaitCode.OTHER_MODEL, None)
    assert found.message == "a computes a prompt on instance 0"


def test_others_of_its_model_are_computed() -> None:
    """A second prompt of the same model waits for the first one."""
    cluster = ready()
    cluster.ask("r1", "a")
    cluster.ask("r2", "a")

    found = reason(cluster, "r2")

    assert found is not None
    assert (found.code, found.behind) == (WaitCode.SAME_MODEL, "a")


def test_an_engine_that_is_not_there_yet_is_mentioned() -> None:
    """Who waits for another model's turn learns that its own engine comes after."""
    cluster = cluster_of("ab")
    cluster.start()
    cluster.ask("r1", "a")
    cluster.work_until(0, lambda: isinstance(cluster.machine.instances[0].job, PrefillJob))
    cluster.ask("r2", "b")
    assert cluster.machine.instances[0].engines["b"].stage is EngineStage.ABSENT

    found = reason(cluster, "r2")

    assert found is not None
    assert found.message.endswith("; the engine of b is built then")


def test_host_room_comes_free_as_others_end() -> None:
    """The first request in line waits for the host tier, those behind it for that request; those
    that wait for room, too, are counted."""
    cluster = ready("ab", slabs=60, host_slabs=14, kv_floor_slabs=6, instances=2, policy="aegaeon")
    for number in range(8):
        cluster.ask(f"r{number}", "ab"[number % 2], prompt=100, output=20)
    seen, told = set(), set()
    while any([cluster.work(0), cluster.work(1)]):
        for name in cluster.machine.requests:
            found = reason(cluster, name)
            if name in cluster.machine.request_book.host_queue:
                assert found is not None
                assert found.code is WaitCode.HOST_ROOM
                told.add("more wait for it" in found.message)
                assert ("more wait for it" in found.message) == (
                    len(cluster.machine.request_book.host_queue) > 1
                )
            seen.add(None if found is None else found.code)

    assert {WaitCode.HOST_ROOM, WaitCode.QUEUE} <= seen
    assert False in told


def test_kv_moves_are_reported() -> None:
    """A request whose KV leaves says so."""
    cluster = ready("ab", slabs=20, policy="aegaeon")
    for name in ("a1", "a2", "b1", "b2"):
        cluster.ask(name, name[0], prompt=180, output=60)
    seen = set()
    for _ in range(10_000):
        for name, request in cluster.machine.requests.items():
            found = code(cluster, name)
            if request.kv is KvPlace.LEAVING and request.stage is Stage.READY:
                assert found is WaitCode.SWAPPING_OUT
            seen.add(found)
        if not cluster.work(0):
            break

    assert {WaitCode.SWAPPING_OUT, WaitCode.OTHER_MODEL} <= seen
    assert cluster.commands(RunTurn)


def test_a_request_waits_for_kv_of_its_model() -> None:
    """A prompt waits for room on the device; a request whose KV left, until it is back."""
    cluster = ready("a", slabs=4 + 8, policy="aegaeon")
    for index in range(3):
        cluster.ask(f"r{index}", "a", prompt=20, output=150)
    cluster.ask("r3", "a", prompt=100, output=20)
    seen = set()
    while cluster.work(0):
        seen |= {code(cluster, name) for name in cluster.machine.requests}

    assert {WaitCode.KV_ROOM, WaitCode.SWAPPING_OUT, WaitCode.SWAPPING_IN} <= seen
