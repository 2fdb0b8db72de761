"""What becomes of a request that cannot be served, is cancelled, or fails."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest

from appliance.errors import IllegalTransition
from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.vocabulary import (
    Event,
    Finish,
    FinishReason,
    Preempt,
    PrefillDeferred,
    PrefillDone,
    Reject,
    Release,
    RequestFailed,
    RunPrefill,
    RunTurn,
    TokenCount,
    TokensProduced,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def small(count: int = 2, weight_slabs: int = 4) -> dict[str, ModelDouble]:
    return {name: ModelDouble(weight_slabs, shape()) for name in "abcdef"[:count]}


def ready_cluster(**options: Any) -> ClusterDouble:
    """One instance with every engine built and nothing to do."""
    cluster = ClusterDouble(small(), **options)
    cluster.start()
    cluster.settle()
    return cluster


def at(cluster: ClusterDouble, name: str, stage: Stage, kv: KvPlace) -> Callable[[], bool]:
    def there() -> bool:
        request = cluster.machine.requests[name]
        return request.stage is stage and request.kv is kv

    return there


def test_an_unknown_model_is_refused() -> None:
    """A request for a model that is not in the catalogue is rejected at once."""
    cluster = ready_cluster()

    life = cluster.ask("r", "nobody")

    assert life.outcome == "model_not_found"
    assert cluster.settle() == 0


@pytest.mark.parametrize(("limit", "outcome"), [(236, "stop"), (237, "context_length_exceeded")])
def test_the_context_is_a_limit(limit: int, outcome: str) -> None:
    """Prompt and new tokens may fill the model's context to the last token, and not one more."""
    cluster = ready_cluster()

    life = cluster.ask("r", "a", prompt=20, output=5, limit=limit)
    cluster.settle()

    assert life.outcome == outcome


def test_tokens_and_outcomes_of_strangers_are_ignored() -> None:
    """Reports about requests that ended before change nothing and order nothing."""
    cluster = ready_cluster()
    token = TokenCount(request="ghost", count=1)

    assert cluster.tell(TokensProduced(instance=0, model="a", tokens=(token,))) == []
    assert cluster.tell(RequestFailed(instance=0, model="a", request="ghost", reason="?")) == []
    cluster.cancel("ghost")

    assert cluster.journal[-1][2] == []


def test_an_unknown_event_is_an_error() -> None:
    """The machine takes no event it has no rule for."""

    class Eclipse(Event, frozen=True):
        pass

    with pytest.raises(TypeError, match="Eclipse"):
        ready_cluster().machine.handle(Eclipse(), 1.0)


def test_an_event_that_contradicts_the_books_is_an_error() -> None:
    """A prompt reported as computed twice is an illegal transition, not a second life."""
    cluster = ready_cluster()
    cluster.ask("r", "a", output=50)
    cluster.work_until(0, lambda: bool(cluster.commands(RunTurn)))
    again = next(event for _, event, _ in cluster.journal if isinstance(event, PrefillDone))

    with pytest.raises(IllegalTransition):
        cluster.machine.handle(again, cluster.now)

    assert cluster.machine.requests["r"].stage is Stage.RUNNING


def test_a_request_is_cancelled_before_any_instance_is_up() -> None:
    """A request that no instance could take yet ends like any other."""
    cluster = ClusterDouble(small())

    life = cluster.ask("r", "a")
    cluster.cancel("r")

    assert life.outcome == FinishReason.CANCELLED
    assert cluster.commands(Release) == []


@pytest.mark.parametrize(
    ("stage", "kv"),
    [
        (Stage.QUEUED, KvPlace.NONE),
        (Stage.PREFILLING, KvPlace.NONE),
        (Stage.READY, KvPlace.DEVICE),
        (Stage.RUNNING, KvPlace.DEVICE),
        (Stage.RUNNING, KvPlace.ARRIVING),
        (Stage.READY, KvPlace.LEAVING),
        (Stage.READY, KvPlace.HOST),
    ],
)
def test_cancelled_in_any_stage(stage: Stage, kv: KvPlace) -> None:
    """A cancelled request ends at once wherever it is, its workers forget it, no memory stays
    taken, and all other requests end."""
    models = {name: ModelDouble(8, shape()) for name in "ab"}
    cluster = ClusterDouble(models)
    cluster.start()
    cluster.settle()
    others = [cluster.ask("first", "a", output=1)]
    victim = cluster.ask("victim", "a", prompt=180, output=40)
    others += [
        cluster.ask("a2", "a", prompt=180, output=40),
        cluster.ask("b1", "b", prompt=100, output=40),
        cluster.ask("b2", "b", prompt=40, output=40),
    ]
    cluster.work_until(0, at(cluster, "victim", stage, kv))

    cluster.cancel("victim")

    commands = cluster.journal[-1][2]
    assert commands[:2] == [
        Finish(request="victim", reason=FinishReason.CANCELLED),
        Release(instance=0, model="a", request="victim"),
    ]
    cluster.settle()
    assert victim.outcome == FinishReason.CANCELLED
    assert all(life.outcome == FinishReason.LENGTH for life in others)
    assert cluster.machine.requests == {}
    assert cluster.machine.host.kv_slabs == 0


def two_partitions() -> ClusterDouble:
    """One instance that prefills and one that decodes."""
    cluster = ClusterDouble(small(), instances=2)
    cluster.start()
    cluster.settle()
    return cluster


def test_places_being_written_come_free_when_the_move_has_ended() -> None:
    """A request cancelled while its KV leaves keeps its places in the host tier till the move is
    over: its worker is writing there."""
    cluster = two_partitions()
    cluster.ask("r", "a")
    cluster.work_until(0, at(cluster, "r", Stage.READY, KvPlace.LEAVING))

    cluster.cancel("r")

    assert cluster.machine.host.kv_slabs > 0
    cluster.settle()
    assert cluster.machine.host.kv_slabs == 0


def test_places_being_written_come_free_when_the_instance_is_lost() -> None:
    """If the worker that was writing dies instead, no instance writes there any more."""
    cluster = two_partitions()
    cluster.ask("r", "a")
    cluster.work_until(0, at(cluster, "r", Stage.READY, KvPlace.LEAVING))
    cluster.cancel("r")

    cluster.lose(1)
    assert cluster.machine.host.kv_slabs > 0
    cluster.lose(0)

    assert cluster.machine.host.kv_slabs == 0


def test_a_worker_refuses_a_request() -> None:
    """A request that the engine does not take is rejected with the engine's reason."""
    cluster = ready_cluster()
    life = cluster.ask("r", "a")

    commands = cluster.tell(
        RequestFailed(instance=0, model="a", request="r", reason="top_k is too large")
    )

    assert commands[0] == Reject(request="r", code="request_failed", message="top_k is too large")
    cluster.settle()
    assert life.outcome == "request_failed"
    assert cluster.machine.host.kv_slabs == 0


def defer_prefill(cluster: ClusterDouble) -> None:
    """The worker finds no room for the prompt that it was about to compute."""
    order = cluster.up[0].queue.pop()
    assert isinstance(order, RunPrefill)
    cluster.tell(PrefillDeferred(instance=0, model=order.model, request=order.request, kv_slabs=0))


def test_a_deferred_prompt_is_first_in_line() -> None:
    """A prompt that did not fit is tried again before those behind it."""
    cluster = ready_cluster()
    cluster.ask("r1", "a")
    cluster.ask("r2", "a")
    cluster.work_until(0, lambda: len(cluster.up[0].queue) == 1)

    defer_prefill(cluster)
    cluster.settle()

    assert [command.request for command in cluster.commands(RunPrefill)] == ["r1", "r1", "r2"]
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_a_deferred_prompt_of_a_cancelled_request_is_forgotten() -> None:
    """No instance computes a prompt again for a client that left."""
    cluster = ready_cluster()
    cluster.ask("r1", "a")
    cluster.work_until(0, lambda: len(cluster.up[0].queue) == 1)
    cluster.cancel("r1")

    defer_prefill(cluster)
    cluster.settle()

    assert len(cluster.commands(RunPrefill)) == 1
    assert cluster.machine.host.kv_slabs == 0


def test_one_token_is_a_whole_answer() -> None:
    """A request that ends with its first token never gets a turn."""
    cluster = ready_cluster()

    life = cluster.ask("r", "a", output=1)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert cluster.commands(RunTurn) == []


def test_requests_wait_for_the_host_tier_in_order() -> None:
    """Who needs much of a full host tier is not overtaken by those who need little."""
    cluster = ClusterDouble(small(1), policy="serverlessllm", instances=2, host_slabs=4 + 8)
    cluster.start()
    cluster.settle()
    cluster.ask("first", "a", prompt=200, output=40)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)
    cluster.ask("big", "a", prompt=200, output=40)
    cluster.ask("little", "a")
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 2)
    assert cluster.prompts() == ["first"]

    cluster.settle()

    assert cluster.prompts() == ["first", "big", "little"]
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_too_long_for_the_host_tier() -> None:
    """A request whose KV the tier never holds runs when no other has KV there, without places."""
    cluster = ClusterDouble(small(), host_slabs=8 + 2)
    cluster.start()
    cluster.settle()
    long = [cluster.ask(f"long{index}", "a", prompt=90, output=7) for index in range(3)]
    fits = cluster.ask("fits", "a", prompt=90, output=6)

    cluster.settle()

    assert [life.outcome for life in long] == [FinishReason.LENGTH] * 3
    assert fits.outcome == FinishReason.LENGTH


def test_very_many_requests_too_long_for_the_host_tier() -> None:
    """However many of them wait for an engine, each is served when it is there: also more than
    Python allows calls within calls."""
    cluster = ClusterDouble(small(1), host_slabs=4 + 2)
    cluster.start()
    lives = [cluster.ask(f"r{index}", "a", prompt=90, output=2) for index in range(350)]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        cluster.settle()
    finally:
        sys.setrecursionlimit(limit)

    assert {life.outcome for life in lives} == {FinishReason.LENGTH}


def test_arrivals_preempt_once() -> None:
    """A turn that is to end is not told so again."""
    cluster = ready_cluster()
    cluster.ask("r1", "a", output=50)
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)

    cluster.ask("r2", "a")
    cluster.ask("r3", "a")

    assert len(cluster.commands(Preempt)) == 1
