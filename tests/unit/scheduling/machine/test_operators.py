"""What operators want of models: to come to a device or leave it, to be kept, to be drained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from appliance.scheduling.lifecycle import EngineStage
from appliance.vocabulary import (
    BuildModel,
    Direction,
    EvictModel,
    FinishReason,
    LoadModel,
    ModelChanged,
    ModelEvictRequested,
    ModelFailed,
    ModelLoadRequested,
    MoveKv,
    Preempt,
    PrefetchModel,
    RunTurn,
    Slo,
    StoreWeights,
    TurnEnd,
    TurnEnded,
)
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def cluster_of(names: str, weight_slabs: int = 4, **options: Any) -> ClusterDouble:
    return ClusterDouble({name: ModelDouble(weight_slabs, shape()) for name in names}, **options)


def ready(names: str, **options: Any) -> ClusterDouble:
    """Every engine is built, and there is nothing to do."""
    cluster = cluster_of(names, **options)
    cluster.start()
    cluster.settle()
    return cluster


def want(cluster: ClusterDouble, model: str) -> None:
    cluster.tell(ModelLoadRequested(model=model))


def dismiss(cluster: ClusterDouble, model: str) -> None:
    cluster.tell(ModelEvictRequested(model=model))


def change(cluster: ClusterDouble, model: str, **terms: Any) -> None:
    known = {"slo": SLO, "batch_slo": SLO, "pinned": False, "draining": False}
    cluster.tell(ModelChanged(model=model, **{**known, **terms}))


def where(cluster: ClusterDouble, model: str) -> list[int]:
    """The instances on whose devices the model is."""
    instances = cluster.machine.instances.values()
    return [i.id for i in instances if i.engines[model].stage is EngineStage.LOADED]


def turn_runs(cluster: ClusterDouble) -> Callable[[], bool]:
    return lambda: cluster.up[0].turn is not None


# --- load ----------------------------------------------------------------------------------------


def test_a_wanted_model_comes_before_a_request_asks() -> None:
    """It is brought to one device, and a request finds it there."""
    cluster = ready("ab", instances=2, policy="serverlessllm")

    want(cluster, "b")
    cluster.settle()
    assert where(cluster, "b") == [0]
    assert cluster.machine.dispatcher.prefetcher.preloads == {}

    cluster.ask("r", "b")
    cluster.settle()
    assert len(cluster.commands(PrefetchModel)) == 1
    assert cluster.commands(LoadModel) == []


def test_what_is_there_is_not_wanted() -> None:
    """A model that is on a device stays there, and nothing is ordered."""
    cluster = ready("ab")
    want(cluster, "a")
    cluster.settle()
    start = len(cluster.commands(PrefetchModel))

    want(cluster, "a")

    assert cluster.machine.dispatcher.prefetcher.preloads == {}
    assert len(cluster.commands(PrefetchModel)) == start


def test_an_engine_that_an_operator_wants_is_built_next() -> None:
    """It goes before the order of the catalogue, and is loaded when it is built."""
    cluster = cluster_of("abcd")
    cluster.start()

    want(cluster, "d")
    cluster.settle()

    assert [command.model for command in cluster.commands(BuildModel)] == ["a", "d", "b", "c"]
    assert where(cluster, "d") == [0]


def test_a_wanted_model_comes_during_a_turn() -> None:
    """A busy instance brings it in beside the next job, without touching who has work."""
    cluster = ready("abc", slabs=40, policy="aegaeon")
    cluster.ask("a1", "a", output=60)
    cluster.work_until(0, turn_runs(cluster))

    want(cluster, "c")
    cluster.work_until(0, lambda: bool(cluster.commands(PrefetchModel)))
    assert cluster.world.lives["a1"].outcome is None
    cluster.settle()

    assert cluster.commands(EvictModel) == []
    assert where(cluster, "c") == [0]


def test_a_wish_waits_for_room() -> None:
    """While what has work leaves no room the wish stays, and is granted when it ends."""
    cluster = ready("ab", slabs=12, weight_slabs=5, max_context=128, policy="aegaeon")
    life = cluster.ask("a1", "a", prompt=60, output=60)
    cluster.work_until(0, turn_runs(cluster))

    want(cluster, "b")
    cluster.work_until(0, lambda: life.produced > 30)
    assert where(cluster, "b") == []
    assert cluster.machine.dispatcher.prefetcher.preloads == {"b": None}

    cluster.settle()
    assert life.outcome == FinishReason.LENGTH
    assert where(cluster, "b") == [0]


def test_what_was_just_wanted_is_not_the_first_to_make_room() -> None:
    """A model that has not been used for longer is."""
    cluster = ready("abc", slabs=12, weight_slabs=5, max_context=128, policy="serverlessllm")
    cluster.ask("r", "c", output=3)
    cluster.settle()
    cluster.now += 100.0

    want(cluster, "a")
    cluster.settle()
    want(cluster, "b")
    cluster.settle()

    assert (where(cluster, "a"), where(cluster, "b"), where(cluster, "c")) == ([0], [0], [])


def test_a_load_that_a_job_stopped_is_made_up_for() -> None:
    """A wanted model on its way gives way to a job that needs the slabs, and comes later."""
    cluster = ready("ab", slabs=9, max_context=128, policy="serverlessllm")
    want(cluster, "b")
    assert cluster.machine.instances[0].ledger.loading == {"b"}

    cluster.ask("a1", "a", prompt=80, output=20)
    assert [command.model for command in cluster.commands(EvictModel)] == ["b"]
    cluster.settle()

    assert where(cluster, "b") == [0]
    assert cluster.machine.dispatcher.prefetcher.preloads == {}


def test_a_load_that_is_wanted_is_not_stopped_for_nothing() -> None:
    """A job with room beside it lets the wanted model come in."""
    cluster = ready("ab", slabs=40)
    want(cluster, "b")

    cluster.ask("a1", "a", output=20)
    cluster.settle()

    assert cluster.commands(EvictModel) == []
    assert where(cluster, "b") == [0]


def test_a_model_that_cannot_be_served_is_not_waited_for() -> None:
    """Neither one that is known to have failed, nor one that fails on its way."""
    cluster = ready("ab")
    want(cluster, "b")
    cluster.tell(ModelFailed(instance=0, model="b", reason="its files are gone"))
    assert cluster.machine.dispatcher.prefetcher.preloads == {}

    want(cluster, "b")

    assert cluster.machine.dispatcher.prefetcher.preloads == {}
    cluster.settle()


# --- evict ---------------------------------------------------------------------------------------


def test_an_idle_model_leaves_at_once() -> None:
    """Its weights and what it holds for KV are given back; its master image stays."""
    cluster = ready("ab")
    cluster.up[0].caching = True
    cluster.ask("r", "a", prompt=60)
    cluster.settle()
    ledger = cluster.machine.instances[0].ledger
    assert ledger.kv

    dismiss(cluster, "a")
    cluster.settle()

    assert ledger.free_slabs == ledger.total_slabs
    assert cluster.machine.weight_cache.get("a") is not None


def test_what_is_nowhere_leaves_nothing() -> None:
    """A model that is on no device is not ordered off one, but not wanted any more."""
    cluster = ready("ab", slabs=9, max_context=128)
    cluster.ask("a1", "a", prompt=80, output=20)
    want(cluster, "b")

    dismiss(cluster, "b")
    cluster.settle()

    assert cluster.machine.dispatcher.prefetcher.preloads == {}
    assert [command.model for command in cluster.commands(EvictModel)] == []


def test_a_model_that_runs_is_preempted_and_goes_on() -> None:
    """Its turn is ended, KV goes to the host, and comes back: nothing is computed again."""
    cluster = ready("ab", policy="aegaeon")
    life = cluster.ask("r", "a", output=60)
    cluster.work_until(0, turn_runs(cluster))

    dismiss(cluster, "a")
    assert len(cluster.commands(Preempt)) == 1
    cluster.settle()

    ended = [event for _, event, _ in cluster.journal if isinstance(event, TurnEnded)]
    assert ended[0].reason is TurnEnd.PREEMPTED
    assert [command.model for command in cluster.commands(EvictModel)] == ["a"]
    assert [move.direction for move in cluster.commands(MoveKv)] == [Direction.OUT, Direction.IN]
    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_others_go_first_when_a_model_was_dismissed() -> None:
    """While its KV is on its way out, a model that waited has its turn."""
    cluster = ready("ab", policy="serverlessllm")
    cluster.ask("a1", "a", output=200)
    cluster.work_until(0, turn_runs(cluster))
    cluster.ask("b1", "b", output=5)

    dismiss(cluster, "a")
    cluster.settle()

    models = [command.model for command in cluster.commands(RunTurn)]
    assert models.index("b") < len(models) - 1
    assert models[-1] == "a"


def test_a_model_leaves_after_the_job_of_another() -> None:
    """What another model computes is not disturbed; the memory comes free behind it."""
    cluster = ready("ab", slabs=40, policy="serverlessllm")
    cluster.ask("b1", "b")
    cluster.settle()
    cluster.ask("a1", "a", output=30)
    cluster.work_until(0, turn_runs(cluster))

    dismiss(cluster, "b")
    assert cluster.commands(Preempt) == []
    assert where(cluster, "b") == [0]
    cluster.settle()

    assert where(cluster, "b") == []


def test_kv_leaves_without_weights() -> None:
    """Of a model whose weights went before, what is left on the device leaves: its KV."""
    cluster = ready("ab", slabs=20, weight_slabs=8, policy="aegaeon")
    life = cluster.ask("a1", "a", prompt=150, output=60)
    cluster.work_until(0, lambda: any(t.model == "a" for t in cluster.commands(RunTurn)))
    cluster.ask("b1", "b", output=30)
    ledger = cluster.machine.instances[0].ledger
    cluster.work_until(0, lambda: "a" not in ledger.weights and "a" in ledger.kv)
    evicted = cluster.commands(EvictModel)
    assert cluster.commands(MoveKv) == []

    dismiss(cluster, "a")
    cluster.work_until(0, lambda: bool(cluster.commands(MoveKv)))

    assert cluster.commands(EvictModel) == evicted
    assert "a" not in ledger.kv
    cluster.settle()
    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 1)


def test_a_model_that_comes_in_leaves_when_it_is_there() -> None:
    """A load under way is over before its model is evicted, so its report is not mistaken."""
    cluster = ready("ab")
    want(cluster, "b")

    dismiss(cluster, "b")
    assert cluster.commands(EvictModel) == []
    cluster.settle()

    assert [command.model for command in cluster.commands(EvictModel)] == ["b"]
    assert where(cluster, "b") == []


def test_a_model_may_be_wanted_again() -> None:
    """Wanted while it is about to leave, it stays."""
    cluster = ready("ab")
    want(cluster, "b")
    dismiss(cluster, "b")

    want(cluster, "b")
    cluster.settle()

    assert cluster.commands(EvictModel) == []
    assert where(cluster, "b") == [0]


def test_a_lost_instance_has_nothing_to_evict() -> None:
    """Its device is empty when it comes back; a model that was to leave it may come again."""
    cluster = ready("ab")
    want(cluster, "b")
    dismiss(cluster, "b")

    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert cluster.commands(EvictModel) == []
    assert cluster.machine.instances[0].evict_requested == {}


# --- drain, and terms ----------------------------------------------------------------------------


def test_a_drained_model_takes_no_requests() -> None:
    """Those that are live go on to their ends; others are served; later it takes requests again."""
    cluster = ready("ab")
    live = cluster.ask("r1", "a", output=20)

    change(cluster, "a", draining=True)
    refused, other = cluster.ask("r2", "a"), cluster.ask("r3", "b")
    cluster.settle()
    change(cluster, "a")
    again = cluster.ask("r4", "a")
    cluster.settle()

    assert refused.outcome == "model_draining"
    assert live.outcome == other.outcome == again.outcome == FinishReason.LENGTH


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_holds_from_now_on(pinned: bool) -> None:
    """A pinned image does not give way to another model's; one that was unpinned does."""
    cluster = cluster_of(
        "abc",
        slabs=9,
        host_slabs=11,
        kv_floor_slabs=3,
        max_context=128,
        pinned=[] if pinned else ["a"],
    )
    cluster.start()
    cluster.settle()
    change(cluster, "a", pinned=pinned)
    filled = len(cluster.commands(StoreWeights))

    for name in "bc":
        cluster.ask(name, name)
        cluster.settle()

    assert (cluster.machine.weight_cache.get("a") is not None) == pinned
    assert [c.model for c in cluster.commands(StoreWeights)[filled:] if c.fill] == ["c"]


@pytest.mark.parametrize(("most", "shown"), [(None, math.inf), (3, 3)])
def test_the_limit_of_sequences_is_shown_to_policies(most: int | None, shown: float) -> None:
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, max_sequences=most)

    (view,) = cluster.machine.cluster.cluster_view(cluster.now).models

    assert view.max_sequences == shown


def test_promises_are_shown_to_policies() -> None:
    """What a model promises from now on is in the view of the cluster."""
    cluster = ready("ab")
    promise = Slo(ttft_seconds=1.0, tbt_seconds=0.01)

    change(cluster, "b", slo=promise, pinned=True)

    views = cluster.machine.cluster.cluster_view(cluster.now).models
    assert [(view.name, view.slo, view.pinned) for view in views] == [
        ("a", SLO, False),
        ("b", promise, True),
    ]
