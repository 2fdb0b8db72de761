"""What operators want of models: to come to a device or leave it, to be kept, to be drained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from appliance.scheduling.lifecycle import Engine
from appliance.vocabulary import (
    BuildModel,
    Direction,
    EvictModel,
    FinishReason,
    LoadModel,
    ModelChanged,
    ModelDismissed,
    ModelFailed,
    ModelWanted,
    MoveKv,
    Preempt,
    PrefetchModel,
    RunTurn,
    Slo,
    StoreWeights,
    TurnEnd,
    TurnEnded,
)
from tests.unit.doubles.floor import SLO, FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def floor_of(names: str, weight_slabs: int = 4, **options: Any) -> FloorDouble:
    return FloorDouble({name: ModelDouble(weight_slabs, shape()) for name in names}, **options)


def ready(names: str, **options: Any) -> FloorDouble:
    """Every engine is built, and there is nothing to do."""
    floor = floor_of(names, **options)
    floor.start()
    floor.settle()
    return floor


def want(floor: FloorDouble, model: str) -> None:
    floor.tell(ModelWanted(model=model))


def dismiss(floor: FloorDouble, model: str) -> None:
    floor.tell(ModelDismissed(model=model))


def change(floor: FloorDouble, model: str, **terms: Any) -> None:
    known = {"slo": SLO, "batch_slo": SLO, "pinned": False, "draining": False}
    floor.tell(ModelChanged(model=model, **{**known, **terms}))


def where(floor: FloorDouble, model: str) -> list[int]:
    """The instances on whose devices the model is."""
    instances = floor.machine.instances.values()
    return [i.id for i in instances if i.engines[model].stage is Engine.LOADED]


def turn_runs(floor: FloorDouble) -> Callable[[], bool]:
    return lambda: floor.up[0].turn is not None


# --- load ----------------------------------------------------------------------------------------


def test_a_wanted_model_comes_before_anybody_asks() -> None:
    """It is brought to one device, and a request finds it there."""
    floor = ready("ab", instances=2, policy="serverlessllm")

    want(floor, "b")
    floor.settle()
    assert where(floor, "b") == [0]
    assert floor.machine.foreman.wishes == {}

    floor.ask("r", "b")
    floor.settle()
    assert len(floor.commands(PrefetchModel)) == 1
    assert floor.commands(LoadModel) == []


def test_what_is_there_is_not_wanted() -> None:
    """A model that is on a device stays there, and nothing is ordered."""
    floor = ready("ab")
    want(floor, "a")
    floor.settle()
    start = len(floor.commands(PrefetchModel))

    want(floor, "a")

    assert floor.machine.foreman.wishes == {}
    assert len(floor.commands(PrefetchModel)) == start


def test_an_engine_that_an_operator_wants_is_built_next() -> None:
    """It goes before the order of the catalogue, and is loaded when it is built."""
    floor = floor_of("abcd")
    floor.start()

    want(floor, "d")
    floor.settle()

    assert [command.model for command in floor.commands(BuildModel)] == ["a", "d", "b", "c"]
    assert where(floor, "d") == [0]


def test_a_wanted_model_comes_beside_what_runs() -> None:
    """A busy instance brings it in beside the next job, without touching who has work."""
    floor = ready("abc", slabs=40, policy="aegaeon")
    floor.ask("a1", "a", output=60)
    floor.work_until(0, turn_runs(floor))

    want(floor, "c")
    floor.work_until(0, lambda: bool(floor.commands(PrefetchModel)))
    assert floor.world.lives["a1"].outcome is None
    floor.settle()

    assert floor.commands(EvictModel) == []
    assert where(floor, "c") == [0]


def test_a_wish_waits_for_room() -> None:
    """While what has work leaves no room the wish stays, and is granted when it ends."""
    floor = ready("ab", slabs=12, weight_slabs=5, max_context=128, policy="aegaeon")
    life = floor.ask("a1", "a", prompt=60, output=60)
    floor.work_until(0, turn_runs(floor))

    want(floor, "b")
    floor.work_until(0, lambda: life.produced > 30)
    assert where(floor, "b") == []
    assert floor.machine.foreman.wishes == {"b": None}

    floor.settle()
    assert life.outcome == FinishReason.LENGTH
    assert where(floor, "b") == [0]


def test_what_was_just_wanted_is_not_the_first_to_make_room() -> None:
    """A model that has not been used for longer is."""
    floor = ready("abc", slabs=12, weight_slabs=5, max_context=128, policy="serverlessllm")
    floor.ask("r", "c", output=3)
    floor.settle()
    floor.now += 100.0

    want(floor, "a")
    floor.settle()
    want(floor, "b")
    floor.settle()

    assert (where(floor, "a"), where(floor, "b"), where(floor, "c")) == ([0], [0], [])


def test_a_load_that_a_job_stopped_is_made_up_for() -> None:
    """A wanted model on its way gives way to a job that needs the slabs, and comes later."""
    floor = ready("ab", slabs=9, max_context=128, policy="serverlessllm")
    want(floor, "b")
    assert floor.machine.instances[0].ledger.loading == {"b"}

    floor.ask("a1", "a", prompt=80, output=20)
    assert [command.model for command in floor.commands(EvictModel)] == ["b"]
    floor.settle()

    assert where(floor, "b") == [0]
    assert floor.machine.foreman.wishes == {}


def test_a_load_that_is_wanted_is_not_stopped_for_nothing() -> None:
    """A job with room beside it lets the wanted model come in."""
    floor = ready("ab", slabs=40)
    want(floor, "b")

    floor.ask("a1", "a", output=20)
    floor.settle()

    assert floor.commands(EvictModel) == []
    assert where(floor, "b") == [0]


def test_a_model_that_cannot_be_served_is_not_waited_for() -> None:
    """Neither one that is known to have failed, nor one that fails on its way."""
    floor = ready("ab")
    want(floor, "b")
    floor.tell(ModelFailed(instance=0, model="b", reason="its files are gone"))
    assert floor.machine.foreman.wishes == {}

    want(floor, "b")

    assert floor.machine.foreman.wishes == {}
    floor.settle()


# --- evict ---------------------------------------------------------------------------------------


def test_an_idle_model_leaves_at_once() -> None:
    """Its weights and what it holds for KV are given back; its master image stays."""
    floor = ready("ab")
    floor.up[0].caching = True
    floor.ask("r", "a", prompt=60)
    floor.settle()
    ledger = floor.machine.instances[0].ledger
    assert ledger.kv

    dismiss(floor, "a")
    floor.settle()

    assert ledger.free_slabs == ledger.total_slabs
    assert floor.machine.masters.get("a") is not None


def test_what_is_nowhere_leaves_nothing() -> None:
    """A model that is on no device is not ordered off one, but not wanted any more."""
    floor = ready("ab", slabs=9, max_context=128)
    floor.ask("a1", "a", prompt=80, output=20)
    want(floor, "b")

    dismiss(floor, "b")
    floor.settle()

    assert floor.machine.foreman.wishes == {}
    assert [command.model for command in floor.commands(EvictModel)] == []


def test_a_model_that_runs_is_preempted_and_goes_on() -> None:
    """Its turn is ended, KV goes to the host, and comes back: nothing is computed again."""
    floor = ready("ab", policy="aegaeon")
    life = floor.ask("r", "a", output=60)
    floor.work_until(0, turn_runs(floor))

    dismiss(floor, "a")
    assert len(floor.commands(Preempt)) == 1
    floor.settle()

    ended = [event for _, event, _ in floor.journal if isinstance(event, TurnEnded)]
    assert ended[0].reason is TurnEnd.PREEMPTED
    assert [command.model for command in floor.commands(EvictModel)] == ["a"]
    assert [move.direction for move in floor.commands(MoveKv)] == [Direction.OUT, Direction.IN]
    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_others_go_first_when_a_model_was_dismissed() -> None:
    """While its KV is on its way out, a model that waited has its turn."""
    floor = ready("ab", policy="serverlessllm")
    floor.ask("a1", "a", output=200)
    floor.work_until(0, turn_runs(floor))
    floor.ask("b1", "b", output=5)

    dismiss(floor, "a")
    floor.settle()

    models = [command.model for command in floor.commands(RunTurn)]
    assert models.index("b") < len(models) - 1
    assert models[-1] == "a"


def test_a_model_leaves_after_the_job_of_another() -> None:
    """What another model computes is not disturbed; the memory comes free behind it."""
    floor = ready("ab", slabs=40, policy="serverlessllm")
    floor.ask("b1", "b")
    floor.settle()
    floor.ask("a1", "a", output=30)
    floor.work_until(0, turn_runs(floor))

    dismiss(floor, "b")
    assert floor.commands(Preempt) == []
    assert where(floor, "b") == [0]
    floor.settle()

    assert where(floor, "b") == []


def test_kv_leaves_without_weights() -> None:
    """Of a model whose weights went before, what is left on the device leaves: its KV."""
    floor = ready("ab", slabs=20, weight_slabs=8, policy="aegaeon")
    life = floor.ask("a1", "a", prompt=150, output=60)
    floor.work_until(0, lambda: any(t.model == "a" for t in floor.commands(RunTurn)))
    floor.ask("b1", "b", output=30)
    ledger = floor.machine.instances[0].ledger
    floor.work_until(0, lambda: "a" not in ledger.weights and "a" in ledger.kv)
    evicted = floor.commands(EvictModel)
    assert floor.commands(MoveKv) == []

    dismiss(floor, "a")
    floor.work_until(0, lambda: bool(floor.commands(MoveKv)))

    assert floor.commands(EvictModel) == evicted
    assert "a" not in ledger.kv
    floor.settle()
    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_a_model_that_comes_in_leaves_when_it_is_there() -> None:
    """A load under way is over before its model is evicted, so its report is not mistaken."""
    floor = ready("ab")
    want(floor, "b")

    dismiss(floor, "b")
    assert floor.commands(EvictModel) == []
    floor.settle()

    assert [command.model for command in floor.commands(EvictModel)] == ["b"]
    assert where(floor, "b") == []


def test_a_model_may_be_wanted_again() -> None:
    """Wanted while it is about to leave, it stays."""
    floor = ready("ab")
    want(floor, "b")
    dismiss(floor, "b")

    want(floor, "b")
    floor.settle()

    assert floor.commands(EvictModel) == []
    assert where(floor, "b") == [0]


def test_a_lost_instance_has_nobody_to_dismiss() -> None:
    """Its device is empty when it comes back; whoever was to leave it may come again."""
    floor = ready("ab")
    want(floor, "b")
    dismiss(floor, "b")

    floor.lose(0)
    floor.start(0)
    floor.settle()

    assert floor.commands(EvictModel) == []
    assert floor.machine.instances[0].dismissed == {}


# --- drain, and terms ----------------------------------------------------------------------------


def test_a_drained_model_takes_no_requests() -> None:
    """Those that are live go on to their ends; others are served; later it takes requests again."""
    floor = ready("ab")
    live = floor.ask("r1", "a", output=20)

    change(floor, "a", draining=True)
    refused, other = floor.ask("r2", "a"), floor.ask("r3", "b")
    floor.settle()
    change(floor, "a")
    again = floor.ask("r4", "a")
    floor.settle()

    assert refused.outcome == "model_draining"
    assert live.outcome == other.outcome == again.outcome == FinishReason.LENGTH


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_holds_from_now_on(pinned: bool) -> None:
    """A pinned image does not give way to another model's; one that was unpinned does."""
    floor = floor_of(
        "abc",
        slabs=9,
        host_slabs=11,
        kv_floor_slabs=3,
        max_context=128,
        pinned=[] if pinned else ["a"],
    )
    floor.start()
    floor.settle()
    change(floor, "a", pinned=pinned)
    filled = len(floor.commands(StoreWeights))

    for name in "bc":
        floor.ask(name, name)
        floor.settle()

    assert (floor.machine.masters.get("a") is not None) == pinned
    assert [c.model for c in floor.commands(StoreWeights)[filled:] if c.fill] == ["c"]


def test_promises_are_shown_to_policies() -> None:
    """What a model promises from now on is in the view of the floor."""
    floor = ready("ab")
    promise = Slo(ttft_seconds=1.0, tbt_seconds=0.01)

    change(floor, "b", slo=promise, pinned=True)

    views = floor.machine.floor.floor_view(floor.now).models
    assert [(view.name, view.slo, view.pinned) for view in views] == [
        ("a", SLO, False),
        ("b", promise, True),
    ]
