"""What becomes of a request that cannot be served, is cancelled, or fails."""

from __future__ import annotations

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
from tests.unit.doubles.floor import FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def small(count: int = 2, weight_slabs: int = 4) -> dict[str, ModelDouble]:
    return {name: ModelDouble(weight_slabs, shape()) for name in "abcdef"[:count]}


def ready_floor(**options: Any) -> FloorDouble:
    """One instance with every engine built and nothing to do."""
    floor = FloorDouble(small(), **options)
    floor.start()
    floor.settle()
    return floor


def at(floor: FloorDouble, name: str, stage: Stage, kv: KvPlace) -> Callable[[], bool]:
    def there() -> bool:
        request = floor.machine.requests[name]
        return request.stage is stage and request.kv is kv

    return there


def test_an_unknown_model_is_refused() -> None:
    """A request for a model that is not in the catalogue is rejected at once."""
    floor = ready_floor()

    life = floor.ask("r", "nobody")

    assert life.outcome == "model_not_found"
    assert floor.settle() == 0


@pytest.mark.parametrize(("limit", "outcome"), [(236, "stop"), (237, "context_length_exceeded")])
def test_the_context_is_a_limit(limit: int, outcome: str) -> None:
    """Prompt and new tokens may fill the model's context to the last token, and not one more."""
    floor = ready_floor()

    life = floor.ask("r", "a", prompt=20, output=5, limit=limit)
    floor.settle()

    assert life.outcome == outcome


def test_tokens_and_outcomes_of_strangers_are_ignored() -> None:
    """Reports about requests that ended before change nothing and order nothing."""
    floor = ready_floor()
    token = TokenCount(request="ghost", count=1)

    assert floor.tell(TokensProduced(instance=0, model="a", tokens=(token,))) == []
    assert floor.tell(RequestFailed(instance=0, model="a", request="ghost", reason="?")) == []
    floor.cancel("ghost")

    assert floor.journal[-1][2] == []


def test_an_unknown_event_is_an_error() -> None:
    """The machine takes no event it has no rule for."""

    class Eclipse(Event, frozen=True):
        pass

    with pytest.raises(TypeError, match="Eclipse"):
        ready_floor().machine.handle(Eclipse(), 1.0)


def test_an_event_that_contradicts_the_books_is_an_error() -> None:
    """A prompt reported as computed twice is an illegal transition, not a second life."""
    floor = ready_floor()
    floor.ask("r", "a", output=50)
    floor.work_until(0, lambda: bool(floor.commands(RunTurn)))
    again = next(event for _, event, _ in floor.journal if isinstance(event, PrefillDone))

    with pytest.raises(IllegalTransition):
        floor.machine.handle(again, floor.now)

    assert floor.machine.requests["r"].stage is Stage.RUNNING


def test_a_request_is_cancelled_before_any_instance_is_up() -> None:
    """A request nobody could take yet ends like any other."""
    floor = FloorDouble(small())

    life = floor.ask("r", "a")
    floor.cancel("r")

    assert life.outcome == FinishReason.CANCELLED
    assert floor.commands(Release) == []


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
    taken, and everybody else comes to an end."""
    models = {name: ModelDouble(8, shape()) for name in "ab"}
    floor = FloorDouble(models)
    floor.start()
    floor.settle()
    others = [floor.ask("first", "a", output=1)]
    victim = floor.ask("victim", "a", prompt=180, output=40)
    others += [
        floor.ask("a2", "a", prompt=180, output=40),
        floor.ask("b1", "b", prompt=100, output=40),
        floor.ask("b2", "b", prompt=100, output=40),
    ]
    floor.work_until(0, at(floor, "victim", stage, kv))

    floor.cancel("victim")

    commands = floor.journal[-1][2]
    assert commands[:2] == [
        Finish(request="victim", reason=FinishReason.CANCELLED),
        Release(instance=0, model="a", request="victim"),
    ]
    floor.settle()
    assert victim.outcome == FinishReason.CANCELLED
    assert all(life.outcome == FinishReason.LENGTH for life in others)
    assert floor.machine.requests == {}
    assert floor.machine.host.kv_slabs == 0


def two_partitions() -> FloorDouble:
    """One instance that prefills and one that decodes."""
    floor = FloorDouble(small(), instances=2)
    floor.start()
    floor.settle()
    return floor


def test_places_being_written_come_free_when_the_move_has_ended() -> None:
    """A request cancelled while its KV leaves keeps its places in the host tier till the move is
    over: its worker is writing there."""
    floor = two_partitions()
    floor.ask("r", "a")
    floor.work_until(0, at(floor, "r", Stage.READY, KvPlace.LEAVING))

    floor.cancel("r")

    assert floor.machine.host.kv_slabs > 0
    floor.settle()
    assert floor.machine.host.kv_slabs == 0


def test_places_being_written_come_free_when_the_instance_is_lost() -> None:
    """If the worker that was writing dies instead, nobody writes there any more."""
    floor = two_partitions()
    floor.ask("r", "a")
    floor.work_until(0, at(floor, "r", Stage.READY, KvPlace.LEAVING))
    floor.cancel("r")

    floor.lose(1)
    assert floor.machine.host.kv_slabs > 0
    floor.lose(0)

    assert floor.machine.host.kv_slabs == 0


def test_a_worker_refuses_a_request() -> None:
    """A request that the engine does not take is rejected with the engine's reason."""
    floor = ready_floor()
    life = floor.ask("r", "a")

    commands = floor.tell(
        RequestFailed(instance=0, model="a", request="r", reason="top_k is too large")
    )

    assert commands[0] == Reject(request="r", code="request_failed", message="top_k is too large")
    floor.settle()
    assert life.outcome == "request_failed"
    assert floor.machine.host.kv_slabs == 0


def defer_prefill(floor: FloorDouble) -> None:
    """The worker finds no room for the prompt that it was about to compute."""
    order = floor.up[0].queue.pop()
    assert isinstance(order, RunPrefill)
    floor.tell(PrefillDeferred(instance=0, model=order.model, request=order.request, kv_slabs=0))


def test_a_deferred_prompt_is_first_in_line() -> None:
    """A prompt that did not fit is tried again before those behind it."""
    floor = ready_floor()
    floor.ask("r1", "a")
    floor.ask("r2", "a")
    floor.work_until(0, lambda: len(floor.up[0].queue) == 1)

    defer_prefill(floor)
    floor.settle()

    assert [command.request for command in floor.commands(RunPrefill)] == ["r1", "r1", "r2"]
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_a_deferred_prompt_of_a_cancelled_request_is_forgotten() -> None:
    """Nobody computes a prompt again for a client that left."""
    floor = ready_floor()
    floor.ask("r1", "a")
    floor.work_until(0, lambda: len(floor.up[0].queue) == 1)
    floor.cancel("r1")

    defer_prefill(floor)
    floor.settle()

    assert len(floor.commands(RunPrefill)) == 1
    assert floor.machine.host.kv_slabs == 0


def test_one_token_is_a_whole_answer() -> None:
    """A request that ends with its first token never gets a turn."""
    floor = ready_floor()

    life = floor.ask("r", "a", output=1)
    floor.settle()

    assert life.outcome == FinishReason.LENGTH
    assert floor.commands(RunTurn) == []


def test_requests_wait_for_the_host_tier_in_order() -> None:
    """Who needs much of a full host tier is not overtaken by those who need little."""
    floor = FloorDouble(small(1), policy="serverlessllm", instances=2, host_slabs=4 + 8)
    floor.start()
    floor.settle()
    floor.ask("first", "a", prompt=200, output=40)
    floor.work_until(0, lambda: floor.up[0].turn is not None)
    floor.ask("big", "a", prompt=200, output=40)
    floor.ask("little", "a")
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 2)
    assert [command.request for command in floor.commands(RunPrefill)] == ["first"]

    floor.settle()

    assert [command.request for command in floor.commands(RunPrefill)] == ["first", "big", "little"]
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_too_long_for_the_host_tier() -> None:
    """A request whose KV could never be swapped out is rejected; those behind it are served."""
    floor = FloorDouble(small(), host_slabs=8 + 2)
    floor.start()
    floor.settle()
    long = [floor.ask(f"long{index}", "a", prompt=90, output=7) for index in range(3)]
    fits = floor.ask("fits", "a", prompt=90, output=6)

    floor.settle()

    assert [life.outcome for life in long] == ["kv_too_large"] * 3
    assert fits.outcome == FinishReason.LENGTH


def test_very_many_requests_too_long_for_the_host_tier() -> None:
    """However many of them wait for an engine, each is rejected when it is there."""
    floor = FloorDouble(small(1), host_slabs=4 + 2)
    floor.start()
    lives = [floor.ask(f"r{index}", "a", prompt=90, output=7) for index in range(1200)]

    floor.settle()

    assert {life.outcome for life in lives} == {"kv_too_large"}


def test_arrivals_preempt_once() -> None:
    """A turn that is to end is not told so again."""
    floor = ready_floor()
    floor.ask("r1", "a", output=50)
    floor.work_until(0, lambda: floor.up[0].turn is not None)

    floor.ask("r2", "a")
    floor.ask("r3", "a")

    assert len(floor.commands(Preempt)) == 1
