"""Requests that change places: migrations between turns, and what new plans do to who waits."""

from __future__ import annotations

import pytest

from appliance.scheduling.lifecycle import KvPlace
from appliance.scheduling.policy_api import (
    DecodingView,
    Fleet,
    InstanceView,
    Migration,
    Placement,
    PrefillChoice,
)
from appliance.vocabulary import (
    Direction,
    FinishReason,
    InstanceClass,
    MoveKv,
    Release,
    RequestClass,
    Role,
    RunPrefill,
    RunTurn,
)
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

EVERYWHERE = Placement()


def cluster_of(instances: int, stranger: Told, names: str = "ab") -> ClusterDouble:
    """Instances with every engine built and nothing to do."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in names},
        instances=instances,
        slabs=40,
        stranger=stranger,
    )
    cluster.start()
    cluster.settle()
    return cluster


# --- flow ----------------------------------------------------------------------------------------


def test_a_request_flows_between_turns() -> None:
    """A request that the policy sends elsewhere decodes on there: its KV goes through the host
    tier, its source forgets it, its prompt is not computed again."""
    flowed: list[str] = []

    def flow(requests: list[DecodingView], others: list[InstanceView]) -> list[Migration]:
        if flowed or len(requests) < 2:
            return []
        flowed.append(requests[0].id)
        return [Migration(request=requests[0].id, target=others[0].id)]

    cluster = cluster_of(
        2,
        Told(
            place=lambda: [EVERYWHERE] * 2,
            prefill=lambda: PrefillChoice(instance=0),
            decode=lambda: 0,
            flow=flow,
        ),
        "a",
    )
    lives = {name: cluster.ask(name, "a", output=40) for name in ("r", "s")}

    cluster.settle()

    (name,) = flowed
    (stays,) = lives.keys() - {name}
    turns = cluster.commands(RunTurn)
    assert {turn.instance for turn in turns if stays in turn.requests} == {0}
    where = [turn.instance for turn in turns if name in turn.requests]
    assert where == sorted(where)
    assert set(where) == {0, 1}
    moves = [(move.instance, move.direction) for move in cluster.commands(MoveKv) if move.moves]
    assert moves == [(0, Direction.OUT), (1, Direction.IN)]
    assert cluster.commands(Release) == [Release(instance=0, model="a", request=name)]
    assert all(life.prefills == 1 for life in lives.values())
    assert all(life.outcome == FinishReason.LENGTH for life in lives.values())


def test_what_flow_is_shown() -> None:
    """A policy sees the requests whose KV is on the device, with their tokens and times, and of the
    other instances those that decode."""
    shown: list[tuple[int, list[DecodingView], list[int]]] = []

    def flow(
        instance: InstanceView, requests: list[DecodingView], others: list[InstanceView]
    ) -> list[Migration]:
        shown.append((instance.id, list(requests), [view.id for view in others]))
        return []

    roles = [Role.PREFILL, Role.DECODE, Role.MIXED, Role.DECODE]
    cluster = cluster_of(
        4,
        Told(place=lambda: [Placement(role=role) for role in roles], decode=lambda: 1, flow=flow),
    )
    cluster.up[1].steps_per_turn = 3
    cluster.ask("r", "a", prompt=20, output=40)
    cluster.work_until(0, lambda: not cluster.up[0].busy)
    cluster.work_until(1, lambda: len(shown) == 2)

    instance, (view,), others = shown[-1]
    assert (instance, others) == (1, [2, 3])
    assert (view.id, view.model, view.slo) == ("r", "a", SLO)
    assert (view.output_tokens, view.here_tokens, view.tokens) == (7, 6, 27)
    assert view.arrived < view.first_token < view.newest_token <= cluster.now
    assert view.tpot_seconds() == pytest.approx((view.newest_token - view.first_token) / 6)


def test_no_request_flows_without_another_decoder() -> None:
    """When no other instance decodes, the question is not asked."""

    def flow() -> list[Migration]:
        raise AssertionError("asked though there is nowhere to go")

    cluster = cluster_of(
        2,
        Told(place=lambda: [Placement(role=Role.PREFILL), Placement(role=Role.DECODE)], flow=flow),
    )
    life = cluster.ask("r", "a", output=40)

    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert cluster.stack.faults == []


def test_one_token_has_no_time_per_token() -> None:
    """The time per output token begins with the second."""
    view = DecodingView(
        id="r",
        model="a",
        tokens=21,
        output_tokens=1,
        here_tokens=1,
        slo=SLO,
        request_class=RequestClass.INTERACTIVE,
        arrived=0.0,
        first_token=1.0,
        newest_token=1.0,
    )

    assert view.tpot_seconds() == 0.0


# --- places --------------------------------------------------------------------------------------


def placed(**hooks: object) -> Told:
    """A policy of `place` and `scale` that prefills and decodes on the first instance offered."""
    return Told(
        prefill=lambda instances: PrefillChoice(instance=instances[0].id),
        decode=lambda instances: instances[0].id,
        **hooks,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("roles", "prefills", "decodes"),
    [
        ([Role.DECODE, Role.PREFILL], 1, 0),
        ([Role.DECODE, Role.MIXED], 1, 0),
        ([Role.DECODE, Role.DECODE], 0, 0),
        ([Role.PREFILL, Role.PREFILL], 0, 0),
    ],
)
def test_roles_say_who_does_what(roles: list[Role], prefills: int, decodes: int) -> None:
    """Prompts are computed where the role is for them, and decoded where it is for that; if there
    is no such instance, on any."""
    cluster = cluster_of(2, placed(place=lambda: [Placement(role=role) for role in roles]))

    life = cluster.ask("r", "a", output=20)
    cluster.settle()

    assert [command.instance for command in cluster.commands(RunPrefill)] == [prefills]
    assert {command.instance for command in cluster.commands(RunTurn)} == {decodes}
    assert life.outcome == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fleet", "interactive", "batch"),
    [
        (Fleet(interactive=0, mixed=1, batch=1), 0, 0),
        (Fleet(interactive=1, mixed=0, batch=1), 0, 1),
        (Fleet(interactive=1, mixed=0, batch=0), 0, 0),
    ],
)
def test_classes_say_who_is_served_where(fleet: Fleet, interactive: int, batch: int) -> None:
    """Batch work goes where it is taken and interactive requests elsewhere; if an instance of the
    class is missing, any instance that has the model does it."""
    cluster = cluster_of(2, placed(place=lambda: [EVERYWHERE] * 2, scale=lambda: fleet))

    lives = [
        cluster.ask("i", "a"),
        cluster.ask("b", "a", kind=RequestClass.BATCH),
    ]
    cluster.settle()

    where = {command.request: command.instance for command in cluster.commands(RunPrefill)}
    assert where == {"i": interactive, "b": batch}
    assert all(life.outcome == FinishReason.LENGTH for life in lives)


def test_classes_change_as_little_as_possible() -> None:
    """When the fleet changes, an instance keeps its class if there is still a place in it."""
    fleet = Fleet(interactive=1, mixed=1, batch=1)
    cluster = cluster_of(4, Told(place=lambda: [EVERYWHERE] * 4, scale=lambda: fleet))

    def classes() -> list[InstanceClass]:
        return [instance.instance_class for instance in cluster.machine.instances.values()]

    before = classes()
    assert sorted(before) == sorted(InstanceClass)
    fleet = Fleet(interactive=2, mixed=1, batch=1)
    cluster.set_policy(["aegaeon"], Told(place=lambda: [EVERYWHERE] * 4, scale=lambda: fleet))

    changed = [(old, new) for old, new in zip(before, classes(), strict=True) if old is not new]
    assert changed == [(InstanceClass.PARKED, InstanceClass.INTERACTIVE)]


def test_models_are_served_where_they_are_placed() -> None:
    """A request goes where its model is placed; if that instance is gone, wherever one is up."""
    places = [Placement(models=frozenset("a")), Placement(models=frozenset("b"))]
    cluster = cluster_of(2, placed(place=lambda: places))
    cluster.ask("a1", "a")
    cluster.ask("b1", "b")
    cluster.settle()
    assert {(c.model, c.instance) for c in cluster.commands(RunPrefill)} == {("a", 0), ("b", 1)}

    cluster.lose(1)
    life = cluster.ask("b2", "b")
    cluster.settle()

    assert cluster.commands(RunPrefill)[-1].instance == 0
    assert life.outcome == FinishReason.LENGTH


def test_only_placed_models_are_built_unasked() -> None:
    """An instance builds the engines of the models it may serve, and no others."""
    places = [Placement(models=frozenset("ac")), Placement(models=frozenset("b"))]
    cluster = cluster_of(2, Told(place=lambda: places), "abc")

    built = [
        {name for name, engine in instance.engines.items() if engine.built}
        for instance in cluster.machine.instances.values()
    ]
    assert built == [{"a", "c"}, {"b"}]


def test_who_decodes_stays_when_places_change() -> None:
    """New places move who waits for its prompt; who decodes goes on where it is, even if the
    engine has to be built there."""
    places = [EVERYWHERE, EVERYWHERE]
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        instances=2,
        slabs=40,
        stranger=placed(place=lambda: places),
    )
    cluster.start()
    cluster.settle()
    life = cluster.ask("r", "a", output=60)
    cluster.work_until(0, lambda: life.produced > 5)

    places = [Placement(models=frozenset("b")), Placement(models=frozenset("a"))]
    cluster.set_policy(["aegaeon"], placed(place=lambda: places))
    cluster.settle()

    assert {command.instance for command in cluster.commands(RunTurn)} == {0}
    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1


def test_a_request_may_go_where_its_engine_is_not_built() -> None:
    """KV that goes to an instance that never had the model waits until the engine is built."""
    places = [Placement(models=frozenset("a")), Placement(models=frozenset("b"))]
    cluster = cluster_of(2, placed(place=lambda: places))
    life = cluster.ask("r", "a", output=60)
    cluster.work_until(0, lambda: life.produced > 5)

    places = [EVERYWHERE, EVERYWHERE]
    cluster.set_policy(
        ["aegaeon"],
        Told(
            place=lambda: places,
            flow=lambda instance, requests: (
                [Migration(request=requests[0].id, target=1)] if instance.id == 0 else []
            ),
        ),
    )
    cluster.settle()

    assert cluster.commands(RunTurn)[-1].instance == 1
    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1


def test_kv_in_the_host_tier_survives_every_instance() -> None:
    """When the last instance is gone, KV in the host tier waits for one to come back."""
    roles = [Placement(role=Role.PREFILL), Placement(role=Role.DECODE)]
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        instances=2,
        stranger=Told(place=lambda: roles),
    )
    cluster.start()
    cluster.work_until(0, lambda: not cluster.up[0].busy)
    life = cluster.ask("r", "b", output=20)
    cluster.work_until(0, lambda: cluster.machine.requests["r"].kv is KvPlace.HOST)

    cluster.lose(0)
    cluster.lose(1)
    assert cluster.machine.requests["r"].instance is None
    cluster.start(0)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH
    assert life.prefills == 1
