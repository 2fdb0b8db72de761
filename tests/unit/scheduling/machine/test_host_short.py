"""KV that does not fit the host tier: it is given up, and computed again when there is room."""

from __future__ import annotations

from appliance.scheduling.host_room import AHEAD_TOKENS
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    Direction,
    FinishReason,
    MoveKv,
    Release,
    RequestClass,
    RunTurn,
    WaitCode,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import Life, ModelDouble

WEIGHT_SLABS = 4
BLOCKS_PER_SLAB = 3


def two_models(kv_slabs: int, *, policy: str = "aegaeon") -> ClusterDouble:
    """Two models that take turns on one instance, which holds KV for 256 tokens of either, and so
    many slabs of the host tier for KV, each of three blocks of 16 tokens."""
    models = {name: ModelDouble(WEIGHT_SLABS, shape()) for name in "ab"}
    cluster = ClusterDouble(
        models, policy=policy, slabs=WEIGHT_SLABS + 8, host_slabs=2 * WEIGHT_SLABS + kv_slabs
    )
    cluster.start()
    cluster.settle()
    return cluster


def run_until_displaced(cluster: ClusterDouble) -> str:
    """The first request whose KV was given up."""
    displaced = cluster.machine.request_book.displaced
    cluster.work_until(0, lambda: bool(displaced))
    (name,) = displaced
    return name


def compete(cluster: ClusterDouble) -> list[Life]:
    """Two requests that both start, and outgrow the host tier as they grow."""
    return [cluster.ask(name, name[0], prompt=20, output=150, limit=200) for name in ("a1", "b1")]


def test_room_is_taken_for_the_kv_there_is_not_for_the_bound() -> None:
    """Requests that may become long, and do not, all start at once."""
    cluster = two_models(7)
    lives = [cluster.ask(f"a{index}", "a", prompt=10, output=9, limit=240) for index in range(4)]
    cluster.work_until(0, lambda: len(cluster.prompts()) == 4)
    held = [request.host_offsets for request in cluster.machine.requests.values()]
    cluster.settle()

    assert [len(places) for places in held] == [-(-(10 + AHEAD_TOKENS) // 16)] * 4
    assert {life.outcome for life in lives} == {FinishReason.STOP}


def test_places_follow_the_kv_as_it_grows() -> None:
    cluster = two_models(30)
    cluster.ask("a1", "a", prompt=10, output=150)
    cluster.ask("b1", "b", prompt=10, output=150)
    cluster.settle()

    longest = max(
        len(move.host_offsets)
        for command in cluster.commands(MoveKv)
        if command.direction is Direction.OUT
        for move in command.moves
    )
    assert longest > -(-(10 + AHEAD_TOKENS) // 16)
    assert not any(cluster.machine.recomputed_tokens.values())
    assert [life.prefills for life in cluster.world.lives.values()] == [1, 1]


def test_kv_without_a_place_is_given_up_and_computed_again() -> None:
    """Both requests end with all their tokens; what was computed again is counted."""
    cluster = two_models(4)
    lives = compete(cluster)
    name = run_until_displaced(cluster)
    request = cluster.machine.requests[name]
    tokens = request.tokens

    assert (request.stage, request.kv, request.host_offsets) == (Stage.UNPLACED, KvPlace.NONE, ())
    assert [command.request for command in cluster.commands(Release)] == [name]
    reason = wait_reason(cluster.machine, request, cluster.now)
    assert reason is not None
    assert reason.code is WaitCode.HOST_ROOM
    assert "given up" in reason.message
    cluster.settle()

    assert [life.outcome for life in lives] == [FinishReason.STOP] * 2
    assert [life.produced for life in lives] == [150, 150]
    counted = cluster.machine.recomputed_tokens
    assert counted[request.model] >= tokens - 1
    assert cluster.world.lives[name].prefills >= 2
    assert cluster.machine.host.kv_slabs == 0


def test_prompts_wait_for_a_request_whose_kv_was_given_up() -> None:
    """None starts before it has a place again."""
    cluster = two_models(4)
    compete(cluster)
    name = run_until_displaced(cluster)
    other = "b" if name == "a1" else "a"
    cluster.ask("later", other, prompt=20, output=10)
    cluster.work_until(0, lambda: not cluster.machine.request_book.displaced)
    started = cluster.prompts()
    cluster.settle()

    assert "later" not in started
    assert cluster.machine.requests == {}


def test_batch_work_whose_kv_was_given_up_waits_for_interactive_prompts() -> None:
    cluster = two_models(4)
    kind = RequestClass.BATCH
    for name in ("a1", "b1"):
        cluster.ask(name, name[0], prompt=20, output=150, limit=200, kind=kind)
    name = run_until_displaced(cluster)
    cluster.ask("chat", "b" if name == "a1" else "a", prompt=10, output=3, limit=3)
    cluster.settle()

    started = cluster.prompts()
    assert started.index("chat") < len(started) - 1 - started[::-1].index(name)
    assert cluster.machine.requests == {}


def test_a_request_longer_than_the_tier_is_served() -> None:
    """Its KV is given up at every switch: each time it makes a token or more."""
    cluster = two_models(3)
    lives = [
        cluster.ask("a1", "a", prompt=180, output=8),
        cluster.ask("b1", "b", prompt=20, output=30),
    ]
    cluster.settle()

    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 2
    assert lives[0].prefills <= 8


def test_a_request_is_cancelled_while_it_waits_for_room() -> None:
    cluster = two_models(4)
    compete(cluster)
    name = run_until_displaced(cluster)
    cluster.cancel(name)
    cluster.settle()

    assert cluster.world.lives[name].outcome == "cancelled"
    assert not cluster.machine.request_book.displaced
    assert not cluster.machine.requests


def test_an_instance_is_lost_while_a_request_waits_for_room() -> None:
    cluster = two_models(4)
    lives = compete(cluster)
    run_until_displaced(cluster)
    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert [life.produced for life in lives] == [150, 150]
    assert not cluster.machine.request_book.displaced


def test_a_slow_client_s_kv_may_be_given_up() -> None:
    """It is held no more, as it has nothing left to go on from."""
    cluster = two_models(4)
    lives = compete(cluster)
    cluster.work_until(0, lambda: lives[0].produced > 100 or lives[1].produced > 100)
    for name in list(cluster.machine.requests):
        cluster.stall(name)
    for _ in range(400):
        cluster.work(0)
    for name in list(cluster.machine.requests):
        cluster.read_on(name)
    cluster.settle()

    assert [life.produced for life in lives] == [150, 150]


def test_turns_have_places_for_what_they_make() -> None:
    """A request that decodes has places for its KV before each turn, as far as there is room."""
    cluster = two_models(30)
    cluster.ask("a1", "a", prompt=10, output=150)
    turns = 0
    while cluster.machine.requests:
        cluster.work(0)
        if len(cluster.commands(RunTurn)) > turns and "a1" in cluster.machine.requests:
            turns = len(cluster.commands(RunTurn))
            request = cluster.machine.requests["a1"]
            assert len(request.host_offsets) * 16 >= request.tokens
    assert turns > 10
