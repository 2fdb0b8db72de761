"""Who gives up memory for whom: evictions, swaps, prefetches, and how far KV may grow."""

from __future__ import annotations

from appliance.scheduling.lifecycle import Engine, KvPlace
from appliance.scheduling.machine import MAX_REQUEST_LOSSES
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
from tests.unit.doubles.floor import SLO, FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble


def built(
    names: str, *, slabs: int, weight_slabs: int = 4, policy: str = "serverlessllm", **sizes: int
) -> FloorDouble:
    """One instance with every engine built; `sizes` are weights that differ from the others'."""
    models = {name: ModelDouble(sizes.get(name, weight_slabs), shape()) for name in names}
    floor = FloorDouble(models, policy=policy, slabs=slabs)
    floor.start()
    floor.settle()
    return floor


def serve(floor: FloorDouble, *names: str) -> None:
    """One short request of each of these models, one after the other."""
    for name in names:
        life = floor.ask(f"{name}-{floor.now}", name)
        floor.settle()
        assert life.outcome == FinishReason.LENGTH


def evicted(floor: FloorDouble) -> list[str]:
    return [command.model for command in floor.commands(EvictModel)]


def until_turn_of(floor: FloorDouble, model: str) -> None:
    floor.work_until(0, lambda: any(turn.model == model for turn in floor.commands(RunTurn)))


def test_weights_stay_while_there_is_room() -> None:
    """A model that is in place is not loaded again, and nobody is evicted without need."""
    floor = built("ab", slabs=20)

    serve(floor, "a", "b", "a", "b")

    assert [command.model for command in floor.commands(LoadModel)] == ["a", "b"]
    assert evicted(floor) == []


def test_the_least_recently_used_goes_first() -> None:
    """Of idle models the one that ran longest ago makes room, and no more go than are needed."""
    floor = built("abcd", slabs=15)

    serve(floor, "a", "b", "c", "a", "d")
    assert evicted(floor) == ["b"]
    serve(floor, "c", "b")

    assert evicted(floor) == ["b", "a"]


def test_idle_weights_go_before_those_that_run_again() -> None:
    """Weights of a model with requests stay when those of an idle one are enough."""
    floor = built("abc", slabs=15, policy="aegaeon")
    serve(floor, "c")
    floor.ask("a1", "a", output=40)
    until_turn_of(floor, "a")

    floor.ask("b1", "b", output=40)
    until_turn_of(floor, "b")

    assert evicted(floor) == ["c"]


def test_the_model_that_runs_again_last_goes_first() -> None:
    """Among models with work, the one whose turn is farthest away makes room: under the rounds of
    a fixed order that is the one that has just run."""
    floor = built("abcd", slabs=21, policy="aegaeon")
    for name in "abcd":
        floor.ask(f"{name}1", name, output=60)

    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 8)

    rounds = [command.model for command in floor.commands(RunTurn)]
    assert rounds == list("abcd") * 2
    last_round = [
        [command.model for command in commands if isinstance(command, EvictModel)]
        for _, _, commands in floor.journal
        if any(isinstance(command, RunTurn) for command in commands)
    ][4:]
    assert any(last_round)
    for position, victims in enumerate(last_round):
        assert set(victims) <= {rounds[4 + position - 1]}


def test_weights_go_before_kv() -> None:
    """Weights cost no copy to give up, so KV stays on the device as long as they are enough."""
    floor = built("ab", slabs=20, weight_slabs=8, policy="aegaeon")
    floor.ask("a1", "a", prompt=150, output=60)
    until_turn_of(floor, "a")

    floor.ask("b1", "b", output=30)
    until_turn_of(floor, "b")

    assert "a" in evicted(floor)
    assert floor.commands(MoveKv) == []


def test_kv_goes_when_weights_are_not_enough() -> None:
    """What weights cannot free, KV of the models that are not running does, through the host
    tier, and it comes back without being computed again."""
    floor = built("ab", slabs=20, weight_slabs=8, policy="aegaeon")
    lives = [floor.ask(f"a{index}", "a", prompt=180, output=40) for index in range(2)]
    until_turn_of(floor, "a")

    lives.append(floor.ask("b1", "b", output=30))
    floor.settle()

    directions = {command.direction for command in floor.commands(MoveKv)}
    assert directions == {Direction.OUT, Direction.IN}
    assert all(life.outcome == FinishReason.LENGTH for life in lives)
    assert all(life.prefills == 1 for life in lives)


def test_growth_is_granted_from_free_slabs() -> None:
    """A turn may map the KV its requests are going to need when nobody else needs the slabs."""
    floor = built("a", slabs=40)

    floor.ask("r", "a", prompt=10, output=200)
    until_turn_of(floor, "a")

    assert floor.commands(RunTurn)[0].kv_slabs == shape().slabs(-(-210 // 16))


def test_growth_costs_nobody_anything() -> None:
    """For growth alone no weights are evicted and no KV is swapped out."""
    floor = built("ab", slabs=13)
    serve(floor, "b")

    floor.ask("r", "a", prompt=10, output=200)
    until_turn_of(floor, "a")

    assert floor.commands(RunTurn)[-1].kv_slabs == 4
    assert evicted(floor) == []


def test_a_resident_batch_makes_way_for_one_that_waited_longer() -> None:
    """If the request whose turn it is does not fit beside its model's KV, that KV leaves."""
    floor = built("a", slabs=4 + 8, policy="aegaeon")
    lives = [floor.ask(f"r{index}", "a", prompt=150, output=40) for index in range(3)]

    floor.settle()

    assert all(life.outcome == FinishReason.LENGTH for life in lives)
    assert all(life.prefills == 1 for life in lives)
    ran = [turn.requests for turn in floor.commands(RunTurn)]
    assert {("r0",), ("r1",), ("r2",)} == set(ran)


def test_the_next_model_is_prefetched_into_free_slabs() -> None:
    """While a model has a job, the weights of the next one come in beside it, and its own job
    finds them in place."""
    floor = built("abc", slabs=40, policy="aegaeon")
    floor.ask("a1", "a", output=40)
    until_turn_of(floor, "a")
    floor.ask("b1", "b", output=40)
    floor.ask("c1", "c", output=40)

    floor.settle()

    assert [command.model for command in floor.commands(PrefetchModel)] == ["c"]
    loads = [event for _, event, _ in floor.journal if isinstance(event, ModelLoaded)]
    assert [(load.model, load.prefetched) for load in loads] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]


def test_a_prefetch_takes_the_place_of_idle_weights() -> None:
    """For a prefetch as many idle weights go as it needs, and none of a model with work."""
    floor = built("abcde", slabs=18, policy="aegaeon")
    serve(floor, "b", "c", "d")
    floor.ask("a1", "a", output=40)
    until_turn_of(floor, "a")

    floor.ask("d1", "d", output=10)
    floor.ask("e1", "e", output=10)
    floor.work_until(0, lambda: bool(floor.commands(PrefetchModel)))

    assert floor.commands(PrefetchModel) == [PrefetchModel(instance=0, model="e")]
    assert evicted(floor) == ["b", "c"]


def test_a_prefetch_takes_the_place_of_weights_needed_later() -> None:
    """If nothing else is there, a model that runs after the prefetched one makes room for it."""
    floor = built("ade", slabs=14, policy="aegaeon")
    serve(floor, "d")
    floor.ask("a1", "a", output=40)
    until_turn_of(floor, "a")

    floor.ask("d1", "d", output=10)
    floor.ask("e1", "e", output=10)
    floor.work_until(0, lambda: bool(floor.commands(PrefetchModel)))

    assert floor.commands(PrefetchModel) == [PrefetchModel(instance=0, model="e")]
    assert evicted(floor) == ["a"]
    floor.settle()
    assert floor.world.lives["a1"].outcome == FinishReason.LENGTH


def test_a_prefetch_swaps_no_kv_out() -> None:
    """If only KV could make room for the next model, it is not prefetched."""
    floor = built("abc", slabs=20, weight_slabs=4, policy="aegaeon", c=10)
    floor.ask("a1", "a", prompt=150, output=40)
    until_turn_of(floor, "a")
    floor.ask("b1", "b", prompt=20, output=40)
    floor.ask("c1", "c", prompt=20, output=40)
    floor.work_until(0, lambda: floor.commands(RunPrefill)[-1].model == "b")

    assert floor.commands(PrefetchModel) == []
    floor.settle()
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_one_prefetch_at_a_time() -> None:
    """While weights are on their way in beside a job, no others set out; the double insists."""
    floor = built("abcdef", slabs=40, policy="aegaeon")
    for name in "abcdef":
        floor.ask(f"{name}1", name, output=40)

    floor.settle()

    prefetched = [command.model for command in floor.commands(PrefetchModel)]
    assert len(prefetched) >= 2
    assert all(life.outcome == FinishReason.LENGTH for life in floor.world.lives.values())


def test_who_left_while_an_engine_was_built_was_not_preempted() -> None:
    """A request that is cancelled between two turns does not count as one that had to stop."""
    floor = FloorDouble({name: ModelDouble(4, shape()) for name in "ab"}, policy="aegaeon")
    floor.start()
    floor.ask("a1", "a", output=40)
    until_turn_of(floor, "a")
    floor.ask("b1", "b", output=5)
    floor.work_until(0, lambda: floor.commands(BuildModel)[-1].model == "b")

    floor.cancel("a1")
    floor.settle()

    assert floor.machine.preemptions == {"a": 0, "b": 0}
    assert floor.world.lives["b1"].outcome == FinishReason.LENGTH


def caching(floor: FloorDouble) -> FloorDouble:
    """Its instances keep groups that nobody uses, as prefix cache."""
    for instance in floor.up.values():
        instance.caching = True
    return floor


def test_cold_cache_goes_before_weights() -> None:
    """Prefix cache that nobody uses makes room first; nobody is evicted while it is enough."""
    floor = caching(built("ab", slabs=16))
    serve(floor, "a")
    assert floor.machine.instances[0].ledger.cold == {"a": 2}
    a = floor.ask("a1", "a", prompt=100)
    floor.settle()
    assert a.outcome == FinishReason.LENGTH
    assert floor.machine.instances[0].ledger.cold == {"a": 4}

    floor.ask("b1", "b", prompt=200)
    floor.settle()

    (trim,) = floor.commands(TrimKv)
    assert (trim.model, trim.kv_slabs) == ("a", 0)
    assert evicted(floor) == []


def test_a_prefetch_takes_cold_cache() -> None:
    """Weights that are wanted next come in where only cold cache was: of who ran longest ago, and
    no more than is needed."""
    floor = caching(built("abcd", slabs=16))
    floor.ask("c1", "c", prompt=200)
    floor.settle()
    instance = floor.machine.instances[0]
    instance.ledger.set_kv("d", 2, 2)
    assert instance.ledger.cold == {"c": 8, "d": 2}
    floor.machine.requests["b1"] = RequestState(
        spec=RequestSpec(id="b1", model="b", prompt_tokens=1, max_tokens=1, slo=SLO),
        arrived=0.0,
        progressed=0.0,
    )
    instance.queue(floor.machine.requests["b1"], None)

    trim, prefetch = floor.machine.residency.prefetch(instance, "a", "b")

    assert (trim, prefetch) == (
        TrimKv(instance=0, model="d", kv_slabs=0),
        PrefetchModel(instance=0, model="b"),
    )
    assert instance.ledger.weights.keys() == {"b", "c"}


def test_a_prefetch_nobody_wants_any_more_is_stopped() -> None:
    """Weights on their way in for requests that are gone are evicted when the next job begins."""
    floor = built("abc", slabs=20)
    instance, double = floor.machine.instances[0], floor.up[0]
    instance.ledger.begin_load("c", 4)
    instance.engines["c"].to_stage(Engine.LOADING, "c")
    double.engines["c"].loaded = double.loading["c"] = True

    floor.ask("a1", "a")

    assert evicted(floor) == ["c"]
    floor.settle()
    assert floor.machine.instances[0].ledger.weights.keys() == {"a"}


def test_places_of_who_is_given_up_come_back() -> None:
    """A request that ends with the worker that was bringing its KV in holds nothing."""
    floor = built("ab", slabs=15, policy="aegaeon")
    for name in ("a1", "b1", "a2", "b2"):
        floor.ask(name, name[0], prompt=100, output=100)

    def arriving() -> list[RequestState]:
        found = floor.machine.requests.values()
        return [request for request in found if request.kv is KvPlace.ARRIVING]

    floor.work_until(0, lambda: bool(arriving()))
    for request in floor.machine.requests.values():
        request.losses = MAX_REQUEST_LOSSES - 1  # the worker died under them before

    floor.lose(0)

    assert floor.machine._zombies == {}
    floor.start()
    floor.settle()
    assert floor.machine.host.kv_slabs == 0


def test_places_are_kept_while_they_are_read() -> None:
    """KV of a request that is cancelled on its way in keeps its places until it has arrived."""
    floor = built("ab", slabs=15, policy="aegaeon")
    for name in ("a1", "b1", "a2", "b2"):
        floor.ask(name, name[0], prompt=100, output=100)

    def arriving() -> list[MoveKv]:
        return [c for c in floor.commands(MoveKv) if c.direction is Direction.IN]

    floor.work_until(0, lambda: bool(arriving()))
    name = arriving()[0].moves[0].request
    places = floor.machine.requests[name].host_offsets

    floor.cancel(name)

    assert floor.machine._zombies[name] == (0, places)
    floor.settle()
    assert floor.machine._zombies == {}
    assert floor.machine.host.kv_slabs == 0
