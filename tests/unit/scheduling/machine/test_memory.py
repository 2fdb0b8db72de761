"""Who gives up memory for whom: evictions, swaps, prefetches, and how far KV may grow."""

from __future__ import annotations

import pytest

from appliance.scheduling.lifecycle import EngineStage, KvPlace
from appliance.scheduling.recovery import MAX_REQUEST_LOSSES
from appliance.scheduling.state import RequestState
from appliance.vocabulary import (
    BuildModel,
    Direction,
    EvictModel,
    FinishReason,
    LoadModel,
    ModelLoaded,
    MoveKv,
    PrefetchModel,
    RequestSpec,
    RunPrefill,
    RunTurn,
    TrimKv,
)
from tests.unit.doubles.cluster import SLAB, SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def built(
    names: str, *, slabs: int, weight_slabs: int = 4, policy: str = "serverlessllm", **sizes: int
) -> ClusterDouble:
    """One instance with every engine built; `sizes` are weights that differ from the others'."""
    models = {name: ModelDouble(sizes.get(name, weight_slabs), shape()) for name in names}
    cluster = ClusterDouble(models, policy=policy, slabs=slabs)
    cluster.start()
    cluster.settle()
    return cluster


def serve(cluster: ClusterDouble, *names: str) -> None:
    """One short request of each of these models, one after the other."""
    for name in names:
        life = cluster.ask(f"{name}-{cluster.now}", name)
        cluster.settle()
        assert life.outcome == FinishReason.LENGTH


def evicted(cluster: ClusterDouble) -> list[str]:
    return [command.model for command in cluster.commands(EvictModel)]


def until_turn_of(cluster: ClusterDouble, model: str) -> None:
    cluster.work_until(0, lambda: any(turn.model == model for turn in cluster.commands(RunTurn)))


def test_weights_stay_while_there_is_room() -> None:
    """A model that is in place is not loaded again, and no other model is evicted without need."""
    cluster = built("ab", slabs=20)

    serve(cluster, "a", "b", "a", "b")

    assert [command.model for command in cluster.commands(LoadModel)] == ["a", "b"]
    assert evicted(cluster) == []


def test_the_least_recently_used_goes_first() -> None:
    """Of idle models the one that ran longest ago makes room, and no more go than are needed."""
    cluster = built("abcd", slabs=15)

    serve(cluster, "a", "b", "c", "a", "d")
    assert evicted(cluster) == ["b"]
    serve(cluster, "c", "b")

    assert evicted(cluster) == ["b", "a"]


def test_idle_weights_go_before_those_that_run_again() -> None:
    """Weights of a model with requests stay when those of an idle one are enough."""
    cluster = built("abc", slabs=15, policy="aegaeon")
    serve(cluster, "c")
    cluster.ask("a1", "a", output=40)
    until_turn_of(cluster, "a")

    cluster.ask("b1", "b", output=40)
    until_turn_of(cluster, "b")

    assert evicted(cluster) == ["c"]


def test_the_model_that_runs_again_last_goes_first() -> None:
    """Among models with work, the one whose turn is farthest away makes room: under the rounds of
    a fixed order that is the one that has just run."""
    cluster = built("abcd", slabs=21, policy="aegaeon")
    for name in "abcd":
        cluster.ask(f"{name}1", name, output=60)

    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 8)

    rounds = [command.model for command in cluster.commands(RunTurn)]
    assert rounds == list("abcd") * 2
    last_round = [
        [command.model for command in commands if isinstance(command, EvictModel)]
        for _, _, commands in cluster.journal
        if any(isinstance(command, RunTurn) for command in commands)
    ][4:]
    assert any(last_round)
    for position, victims in enumerate(last_round):
        assert set(victims) <= {rounds[4 + position - 1]}


def test_weights_go_before_kv() -> None:
    """Weights cost no copy to give up, so KV stays on the device as long as they are enough."""
    cluster = built("ab", slabs=20, weight_slabs=8, policy="aegaeon")
    cluster.ask("a1", "a", prompt=150, output=60)
    until_turn_of(cluster, "a")

    cluster.ask("b1", "b", output=30)
    until_turn_of(cluster, "b")

    assert "a" in evicted(cluster)
    assert cluster.commands(MoveKv) == []


def test_kv_goes_when_weights_are_not_enough() -> None:
    """What weights cannot free, KV of the models that are not running does, through the host
    tier, and it comes back without being computed again."""
    cluster = built("ab", slabs=20, weight_slabs=8, policy="aegaeon")
    lives = [cluster.ask(f"a{index}", "a", prompt=150, output=40) for index in range(2)]
    until_turn_of(cluster, "a")

    lives.append(cluster.ask("b1", "b", output=30))
    cluster.settle()

    directions = {command.direction for command in cluster.commands(MoveKv)}
    assert directions == {Direction.OUT, Direction.IN}
    assert all(life.outcome == FinishReason.LENGTH for life in lives)
    assert all(life.prefills == 1 for life in lives)


def test_growth_is_granted_from_free_slabs() -> None:
    """A turn may map the KV its requests are going to need when no other model needs the slabs."""
    cluster = built("a", slabs=40)

    cluster.ask("r", "a", prompt=10, output=200)
    until_turn_of(cluster, "a")

    assert cluster.commands(RunTurn)[0].kv_slabs == shape().slabs(-(-210 // 16))


def test_growth_costs_nothing() -> None:
    """For growth alone no weights are evicted and no KV is swapped out."""
    cluster = built("ab", slabs=13)
    serve(cluster, "b")

    cluster.ask("r", "a", prompt=10, output=200)
    until_turn_of(cluster, "a")

    assert cluster.commands(RunTurn)[-1].kv_slabs == 4
    assert evicted(cluster) == []


def test_snapshots_of_states_are_granted_from_free_slabs_only() -> None:
    """The prefix cache may copy the states of a prompt where no other model needs the slabs."""
    kept = shape(state_blocks=2)
    needed = kept.slabs(kept.prompt_blocks(10))
    both = kept.slabs(kept.prompt_blocks(10) + kept.snapshot_blocks)
    assert needed < both
    for slabs, granted in ((40, both), (14, needed)):
        models = {"a": ModelDouble(4, kept), "b": ModelDouble(4, shape())}
        cluster = ClusterDouble(models | {"c": models["b"]}, policy="serverlessllm", slabs=slabs)
        cluster.start()
        cluster.settle()
        serve(cluster, "b", "c")

        cluster.ask("r", "a", prompt=10, output=1)
        cluster.settle()

        assert cluster.commands(RunPrefill)[-1].kv_slabs == granted
        assert evicted(cluster) == []


def test_the_next_model_is_prefetched_into_free_slabs() -> None:
    """While a model has a job, the weights of the next one come in beside it, and its own job
    finds them in place."""
    cluster = built("abc", slabs=40, policy="aegaeon")
    cluster.ask("a1", "a", output=40)
    until_turn_of(cluster, "a")
    cluster.ask("b1", "b", output=40)
    cluster.ask("c1", "c", output=40)

    cluster.settle()

    assert [command.model for command in cluster.commands(PrefetchModel)] == ["c"]
    loads = [event for _, event, _ in cluster.journal if isinstance(event, ModelLoaded)]
    assert [(load.model, load.prefetched) for load in loads] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]


def test_a_prefetch_takes_the_place_of_idle_weights() -> None:
    """For a prefetch as many idle weights go as it needs, and none of a model with work."""
    cluster = built("abcde", slabs=18, policy="aegaeon")
    serve(cluster, "b", "c", "d")
    cluster.ask("a1", "a", output=40)
    until_turn_of(cluster, "a")

    cluster.ask("d1", "d", output=10)
    cluster.ask("e1", "e", output=10)
    cluster.work_until(0, lambda: bool(cluster.commands(PrefetchModel)))

    assert cluster.commands(PrefetchModel) == [PrefetchModel(instance=0, model="e")]
    assert evicted(cluster) == ["b", "c"]


def test_a_prefetch_takes_the_place_of_weights_needed_later() -> None:
    """If nothing else is there, a model that runs after the prefetched one makes room for it."""
    cluster = built("ade", slabs=14, policy="aegaeon")
    serve(cluster, "d")
    cluster.ask("a1", "a", output=40)
    until_turn_of(cluster, "a")

    cluster.ask("d1", "d", output=10)
    cluster.ask("e1", "e", output=10)
    cluster.work_until(0, lambda: bool(cluster.commands(PrefetchModel)))

    assert cluster.commands(PrefetchModel) == [PrefetchModel(instance=0, model="e")]
    assert evicted(cluster) == ["a"]
    cluster.settle()
    assert cluster.world.lives["a1"].outcome == FinishReason.LENGTH


def test_a_prefetch_swaps_no_kv_out() -> None:
    """If only KV could make room for the next model, it is not prefetched."""
    cluster = built("abc", slabs=20, weight_slabs=4, policy="aegaeon", c=10)
    cluster.ask("a1", "a", prompt=150, output=40)
    until_turn_of(cluster, "a")
    cluster.ask("b1", "b", prompt=20, output=40)
    cluster.ask("c1", "c", prompt=20, output=40)
    cluster.work_until(0, lambda: cluster.commands(RunPrefill)[-1].model == "b")

    assert cluster.commands(PrefetchModel) == []
    cluster.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_one_prefetch_at_a_time() -> None:
    """While weights are on their way in beside a job, no others set out; the double insists."""
    cluster = built("abcdef", slabs=40, policy="aegaeon")
    for name in "abcdef":
        cluster.ask(f"{name}1", name, output=40)

    cluster.settle()

    prefetched = [command.model for command in cluster.commands(PrefetchModel)]
    assert len(prefetched) >= 2
    assert all(life.outcome == FinishReason.LENGTH for life in cluster.world.lives.values())


def test_who_left_while_an_engine_was_built_was_not_preempted() -> None:
    """A request that is cancelled between two turns does not count as one that had to stop."""
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in "ab"}, policy="aegaeon")
    cluster.start()
    cluster.ask("a1", "a", output=40)
    until_turn_of(cluster, "a")
    cluster.ask("b1", "b", output=5)
    cluster.work_until(0, lambda: cluster.commands(BuildModel)[-1].model == "b")

    cluster.cancel("a1")
    cluster.settle()

    assert cluster.machine.preemptions == {"a": 0, "b": 0}
    assert cluster.world.lives["b1"].outcome == FinishReason.LENGTH


def caching(cluster: ClusterDouble) -> ClusterDouble:
    """Its instances keep groups that no request uses, as prefix cache."""
    for instance in cluster.up.values():
        instance.caching = True
    return cluster


def test_cold_cache_goes_before_weights() -> None:
    """Unused prefix cache makes room first; no model is evicted while that is enough."""
    cluster = caching(built("ab", slabs=16))
    serve(cluster, "a")
    assert cluster.machine.instances[0].ledger.cold == {"a": 2}
    a = cluster.ask("a1", "a", prompt=100)
    cluster.settle()
    assert a.outcome == FinishReason.LENGTH
    assert cluster.machine.instances[0].ledger.cold == {"a": 4}

    cluster.ask("b1", "b", prompt=200)
    cluster.settle()

    (trim,) = cluster.commands(TrimKv)
    assert (trim.model, trim.kv_slabs) == ("a", 0)
    assert evicted(cluster) == []


def test_a_prefetch_takes_cold_cache() -> None:
    """Weights that are wanted next come in where only cold cache was: of who ran longest ago, and
    no more than is needed."""
    cluster = caching(built("abcd", slabs=16))
    cluster.ask("c1", "c", prompt=200)
    cluster.settle()
    instance = cluster.machine.instances[0]
    instance.ledger.set_kv("d", 2, 2)
    assert instance.ledger.cold == {"c": 8, "d": 2}
    cluster.machine.requests["b1"] = RequestState(
        spec=RequestSpec(id="b1", model="b", prompt_tokens=1, max_tokens=1, slo=SLO),
        arrived=0.0,
        progressed=0.0,
    )
    instance.queue(cluster.machine.requests["b1"], None)

    trim, prefetch = cluster.machine.residency.prefetch(instance, "a", "b")

    assert (trim, prefetch) == (
        TrimKv(instance=0, model="d", kv_slabs=0),
        PrefetchModel(instance=0, model="b"),
    )
    assert instance.ledger.weights.keys() == {"b", "c"}


def test_a_prefetch_that_is_not_needed_any_more_is_stopped() -> None:
    """Weights on their way in for requests that are gone are evicted when the next job begins."""
    cluster = built("abc", slabs=20)
    instance, double = cluster.machine.instances[0], cluster.up[0]
    instance.ledger.begin_load("c", 4)
    instance.engines["c"].to_stage(EngineStage.LOADING, "c")
    double.engines["c"].loaded = double.loading["c"] = True

    cluster.ask("a1", "a")

    assert evicted(cluster) == ["c"]
    cluster.settle()
    assert cluster.machine.instances[0].ledger.weights.keys() == {"a"}


def test_places_of_requests_that_are_given_up_come_back() -> None:
    """A request that ends with the worker that was bringing its KV in holds nothing."""
    cluster = built("ab", slabs=15, policy="aegaeon")
    for name in ("a1", "b1", "a2", "b2"):
        cluster.ask(name, name[0], prompt=100, output=100)

    def arriving() -> list[RequestState]:
        found = cluster.machine.requests.values()
        return [request for request in found if request.kv is KvPlace.ARRIVING]

    cluster.work_until(0, lambda: bool(arriving()))
    for request in cluster.machine.requests.values():
        request.losses = MAX_REQUEST_LOSSES - 1  # the worker died under them before

    cluster.lose(0)

    assert cluster.machine.request_book.pending_frees == {}
    cluster.start()
    cluster.settle()
    assert cluster.machine.host.kv_slabs == 0


def test_places_are_kept_while_they_are_read() -> None:
    """KV of a request that is cancelled on its way in keeps its places until it has arrived."""
    cluster = built("ab", slabs=15, policy="aegaeon")
    for name in ("a1", "b1", "a2", "b2"):
        cluster.ask(name, name[0], prompt=100, output=100)

    def arriving() -> list[MoveKv]:
        return [c for c in cluster.commands(MoveKv) if c.direction is Direction.IN]

    cluster.work_until(0, lambda: bool(arriving()))
    name = arriving()[0].moves[0].request
    places = cluster.machine.requests[name].host_offsets

    cluster.cancel(name)

    assert cluster.machine.request_book.pending_frees[name] == (0, places)
    cluster.settle()
    assert cluster.machine.request_book.pending_frees == {}
    assert cluster.machine.host.kv_slabs == 0


def test_weights_of_models_with_nothing_to_do_are_shown_as_room() -> None:
    """Not those of the model that ran last, nor of one that has work."""
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in "abc"}, slabs=20)
    cluster.start()
    cluster.settle()

    def idle_slabs() -> int:
        return cluster.machine.cluster.view(cluster.machine.instances[0]).idle_bytes // SLAB

    assert idle_slabs() == 0
    for name in "abc":
        cluster.ask(name, name)
        cluster.settle()
    assert idle_slabs() == 8

    cluster.ask("runs", "a", output=50)
    assert idle_slabs() == 8
    cluster.ask("waits", "b")
    assert idle_slabs() == 4


@pytest.mark.parametrize(("group_blocks", "group_slabs"), [(4, 2), (3, 1)])
def test_a_token_takes_its_part_of_slabs(group_blocks: int, group_slabs: int) -> None:
    """What the slabs of a group leave over counts, too. Before an engine is built nothing is
    known."""
    form = shape(group_blocks, group_slabs, block_bytes=320)
    cluster = ClusterDouble({"a": ModelDouble(4, form)})

    def token_bytes() -> float:
        (model,) = cluster.machine.cluster.cluster_view(cluster.now).models
        return model.device_bytes_per_token

    assert token_bytes() == 0.0
    cluster.start()
    cluster.settle()
    assert token_bytes() * form.block_tokens * group_blocks == pytest.approx(group_slabs * SLAB)
