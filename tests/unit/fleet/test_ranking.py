"""Which box a request goes to: what every router keeps to, and what residency adds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from appliance.fleet.ranking import (
    CROWDED_SLACK,
    ROUTERS,
    BoxLoad,
    BoxState,
    Choose,
    FleetRequest,
    Nearness,
    choose_least_busy,
    choose_random,
    choose_residency,
    choose_residency_prefix,
    nearness,
)

MODELS = ("a", "b", "c")
some_models = st.frozensets(st.sampled_from(MODELS))
chances = st.floats(0, 1, exclude_max=True)
routers = st.sampled_from(list(ROUTERS.values()))
requests = st.builds(
    FleetRequest, model=st.sampled_from(MODELS), session=st.sampled_from(["", "s", "t"])
)
loads = st.builds(
    BoxLoad,
    catalogue=some_models,
    resident=some_models,
    coming=some_models,
    resident_models=st.integers(0, 3),
    coming_models=st.integers(0, 3),
    host=some_models,
    waiting=st.integers(0, 40),
    running=st.integers(0, 40),
    requests_by_model=st.dictionaries(st.sampled_from(MODELS), st.integers(1, 40)),
    queue_age_seconds=st.floats(0, 60),
    draining=st.booleans(),
)
states = st.builds(
    BoxState,
    name=st.text("xyz", min_size=1, max_size=3),
    load=loads,
    dead=st.booleans(),
    sent=st.integers(0, 9),
    sent_models=st.dictionaries(st.sampled_from(MODELS), st.integers(1, 3)),
)
fleets = st.lists(states, max_size=8, unique_by=lambda box: box.name)


def box(
    name: str,
    *,
    waiting: int = 0,
    sent: int = 0,
    age: float = 0.0,
    asked: Mapping[str, int] = {},
    **has: str,
) -> BoxState:
    """A box that has model `a` in its catalogue, and others or the same where it is said."""
    sets = {where: frozenset(models) for where, models in has.items()}
    load = BoxLoad(
        **({"catalogue": frozenset("a")} | sets),  # type: ignore[arg-type]
        waiting=waiting,
        queue_age_seconds=age,
        requests_by_model=asked,
        asked_models=len(asked),
        resident_models=len(sets.get("resident", "")),
        coming_models=len(sets.get("coming", "")),
    )
    return BoxState(name=name, load=load, sent=sent)


@given(request=requests, boxes=fleets, chance=chances, choose=routers)
def test_a_request_goes_where_it_is_taken(
    request: FleetRequest, boxes: list[BoxState], chance: float, choose: Choose
) -> None:
    """Never to a box that is dead, draining or without the model; nowhere only if all are."""
    chosen = choose(request, boxes, chance)

    able = [one for one in boxes if one.takes(request.model)]
    assert chosen in able if able else chosen is None
    for one in able:
        assert not one.dead
        assert not one.load.draining
        assert request.model in one.load.catalogue


@given(request=requests, boxes=fleets, chance=chances)
def test_a_nearer_box_comes_first(
    request: FleetRequest, boxes: list[BoxState], chance: float
) -> None:
    """Of boxes that have the same number of requests, all of the model, residency takes none where
    the model is farther than on another, if resident and coming are one."""
    asked = {"requests_by_model": {request.model: 3}, "asked_models": 1}
    level = [
        BoxState(name=one.name, load=replace(one.load, waiting=3, running=0, **asked))
        for one in boxes
    ]
    able = [one for one in level if one.takes(request.model)]
    assume(able)
    for choose in (choose_residency, choose_residency_prefix):
        chosen = choose(request, level, chance)
        assert chosen is not None
        near = {one.name: max(Nearness.COMING, nearness(one, request.model)) for one in able}
        assert near[chosen.name] == min(near.values())


def test_a_box_that_is_to_hold_no_other_model_comes_first() -> None:
    """The model is resident on both, but on the first it takes turns with one that waits for a
    device there, which is known from a poll, or from what was sent since."""
    request = FleetRequest(model="a")
    alone = box("y", waiting=1, resident="a")
    waits = box("x", resident="a", coming="b")
    sent = BoxState(name="x", load=box("x", resident="a").load, sent=1, sent_models={"b": 1})

    assert choose_residency(request, [waits, alone], 0.0) == alone
    assert choose_residency(request, [sent, alone], 0.0) == alone


def test_a_model_gathers_where_its_requests_are() -> None:
    """On both boxes models take turns; the one with more requests of the model gets more of them,
    wherever it was resident when they were asked."""
    request = FleetRequest(model="a")
    few = box("x", resident="a", coming="b", asked={"a": 2, "b": 1})
    many = box("y", resident="b", coming="a", asked={"a": 3, "b": 4}, waiting=2)

    assert choose_residency(request, [few, many], 0.0) == many


def test_a_model_leaves_a_box_that_is_asked_for_more_than_it_holds() -> None:
    """The first box holds two models and is asked for three. So requests of one go where the model
    is in the host cache and a resident model has no requests, though that box has none of its own
    yet; but not where all that is resident is asked for, nor where the model is on disk."""
    request = FleetRequest(model="a")
    three = {"a": 4, "b": 4, "c": 4}
    overfull = box("x", resident="ab", coming="c", host="abc", asked=three, waiting=12)
    room = box("y", resident="de", host="ade", asked={"d": 12}, waiting=12)
    none = box("y", resident="de", host="ade", asked={"d": 6, "e": 6}, waiting=12)
    disk = box("y", resident="de", host="de", asked={"d": 12}, waiting=12)

    assert choose_residency(request, [overfull, room], 0.0) == room
    kept = replace(room, lately=frozenset("de"))  # both will have more
    assert choose_residency(request, [overfull, kept], 0.0) == overfull
    one = box("y", resident="de", host="ade", asked={"d": 6}, waiting=12)
    kept = replace(one, lately=frozenset("e"))  # besides the one that has some now
    assert choose_residency(request, [overfull, one], 0.0) == one
    assert choose_residency(request, [overfull, kept], 0.0) == overfull
    assert choose_residency(request, [overfull, none], 0.0) == overfull
    assert choose_residency(request, [overfull, disk], 0.0) == overfull


def test_models_stay_that_a_box_holds() -> None:
    """Another model is still coming to the first box, which then holds both: requests stay there,
    though a resident model of the second has no requests."""
    request = FleetRequest(model="a")
    full = box("x", resident="bd", coming="a", host="abd", asked={"a": 1, "b": 1}, waiting=2)
    room = box("y", resident="de", host="ade", asked={"d": 2}, waiting=2)

    assert choose_residency(request, [full, room], 0.0) == full


def test_a_model_that_is_nowhere_comes_to_the_box_with_the_fewest_others() -> None:
    """Not to the one with the fewest requests: there it would take turns with two models."""
    request = FleetRequest(model="a")
    two = box("x", host="a", asked={"b": 1, "c": 1}, waiting=2)
    one = box("y", host="a", asked={"b": 5}, waiting=5)

    assert choose_residency(request, [two, one], 0.0) == one


@given(request=requests, boxes=fleets, chance=chances, data=st.data())
def test_the_order_of_the_boxes_does_not_matter(
    request: FleetRequest, boxes: list[BoxState], chance: float, data: st.DataObject
) -> None:
    """Two routers that know the same choose the same by residency, however they list the boxes."""
    shuffled = data.draw(st.permutations(boxes))
    for choose in (choose_residency, choose_residency_prefix):
        assert choose(request, boxes, chance) == choose(request, shuffled, 0.0)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (box("x", resident="a", coming="a", host="a"), Nearness.RESIDENT),
        (box("x", coming="a", host="a"), Nearness.COMING),
        (box("x", host="a"), Nearness.HOST),
        (box("x"), Nearness.DISK),
        (BoxState(name="x", load=box("x").load, sent=1, sent_models={"a": 1}), Nearness.COMING),
    ],
)
def test_how_near_a_model_is(at: BoxState, expected: Nearness) -> None:
    """A model that the router just sent a request of is coming, whatever the last poll said."""
    assert nearness(at, "a") is expected


def test_a_crowded_box_comes_after_the_others() -> None:
    """The box with the model has far more requests than the mean: another one gets it."""
    crowded = box("x", waiting=5 * CROWDED_SLACK, resident="a")
    free = box("y")

    assert choose_residency(FleetRequest(model="a"), [crowded, free], 0.0) == free


def test_what_was_sent_since_the_poll_counts() -> None:
    """Of two boxes that said the same, the one that was sent less since gets the request; of those
    that were sent the same, the one whose queue is younger."""
    request = FleetRequest(model="a")
    sent, not_sent = box("x", resident="a", sent=1), box("y", resident="a")
    old, young = box("x", resident="a", age=2.0), box("y", resident="a", age=1.0)

    assert choose_residency(request, [sent, not_sent], 0.0) == not_sent
    assert choose_least_busy(request, [sent, not_sent], 0.0) == not_sent
    assert choose_residency(request, [old, young], 0.0) == young


def test_sessions_stay_and_are_spread() -> None:
    """Each session goes to one of the boxes that have the model, also when that one is a little
    busier; together they use all of them."""
    boxes = [box(name, resident="a") for name in "uvwxyz"]
    chosen = {}
    for number in range(60):
        request = FleetRequest(model="a", session=f"s{number}")
        first = choose_residency_prefix(request, boxes, 0.0)
        assert first is not None
        busier = [BoxState(name=b.name, load=b.load, sent=int(b == first)) for b in boxes]
        again = choose_residency_prefix(request, busier, 0.9)
        assert again is not None
        assert again.name == first.name
        chosen[request.session] = first.name
    assert set(chosen.values()) == set("uvwxyz")


def test_a_session_leaves_a_box_that_is_much_busier() -> None:
    """A prefix is not worth a long queue."""
    boxes = [box(name, resident="a") for name in "xy"]
    request = FleetRequest(model="a", session="s")
    first = choose_residency_prefix(request, boxes, 0.0)
    assert first is not None
    busy = [box(b.name, resident="a", waiting=9 if b == first else 0) for b in boxes]

    second = choose_residency_prefix(request, busy, 0.0)

    assert second is not None
    assert second.name != first.name


def test_random_uses_its_chance() -> None:
    """Every box has an equal part of the chances."""
    boxes = [box(name) for name in "wxyz"]
    request = FleetRequest(model="a")

    chosen = [choose_random(request, boxes, chance) for chance in (0.0, 0.25, 0.5, 0.999)]

    assert chosen == boxes
