"""Plans of which box holds which model: few steps, each worth it, and none twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.fleet.placement import (
    LESS_GAIN,
    BoxRoom,
    Kind,
    ModelNeed,
    Step,
    after,
    plan,
    pressures,
)

Homes = dict[str, frozenset[str]]


def boxes(count: int, memory: int = 100) -> list[BoxRoom]:
    return [BoxRoom(name=f"b{n}", devices=1, memory_bytes=memory) for n in range(count)]


def room(name: str, devices: int = 1, memory: int = 100) -> BoxRoom:
    return BoxRoom(name=name, devices=devices, memory_bytes=memory)


def need(name: str, demand: float, size: int = 10) -> ModelNeed:
    return ModelNeed(name=name, weight_bytes=size, demand=demand)


def on(**homes: str) -> Homes:
    """Models, and the boxes that hold them: ``on(a="b0 b1")``."""
    return {model: frozenset(names.split()) for model, names in homes.items()}


def shown(steps: list[Step]) -> list[tuple[str, str, str | None, str | None]]:
    return [(step.kind.value, step.model, step.source, step.target) for step in steps]


def test_a_busy_box_gives_a_model_away() -> None:
    """To the box where the pressure is lowest then; the line says why, and what it costs."""
    needs = [need("a", 0.4), need("b", 0.4), need("c", 0.1)]
    (step,) = plan(boxes(2), needs, on(a="b0", b="b0", c="b1"))

    assert (step.kind, step.source, step.target) == (Kind.MOVE, "b0", "b1")
    assert step.model in ("a", "b")
    assert step.moved_bytes == 10
    assert step.reason.startswith("b0 is asked for 80% of its time with 80% of its memory left")


def test_even_boxes_stay_as_they_are() -> None:
    """Also if demands are a tenth more or less than they were."""
    homes = on(a="b0", b="b1", c="b0", d="b1")
    for change in (0.9, 1.0, 1.1):
        needs = [need("a", 0.4 * change), need("b", 0.4), need("c", 0.2), need("d", 0.2)]
        assert plan(boxes(2), needs, homes) == []


def test_a_fleet_with_little_to_do_stays_as_it_is() -> None:
    """However uneven it is: nothing would be gained."""
    needs = [need("a", 0.1), need("b", 0.1)]
    assert plan(boxes(2), needs, on(a="b0", b="b0")) == []


def test_a_model_too_hot_for_one_box_is_copied() -> None:
    """No move would help: wherever it is, that box is as busy."""
    (step,) = plan(boxes(2), [need("a", 1.6)], on(a="b0"))

    assert (step.kind, step.source, step.target) == (Kind.COPY, None, "b1")


def test_what_no_box_holds_comes_first() -> None:
    """The larger demand before the smaller one, each where there is the least to do."""
    needs = [need("a", 0.6), need("new", 0.2), need("hot", 0.5)]
    steps = plan(boxes(2), needs, on(a="b0"))

    assert shown(steps) == [("first", "hot", None, "b1"), ("first", "new", None, "b1")]


def test_a_box_short_of_memory_gives_up_what_others_hold() -> None:
    """The least demand first, nothing that it alone holds, and no more than it has to."""
    needs = [need("a", 0.05, 30), need("b", 0.01, 30), need("c", 0.0, 30)]
    steps = plan(boxes(2), needs, on(a="b0 b1", b="b0 b1", c="b0"))

    assert shown(steps) == [("drop", "b", "b0", None)]
    assert steps[0].reason == "b0 has 10% of its memory left, and b1 holds it, too"
    assert steps[0].moved_bytes == 0


def test_a_box_that_a_move_leaves_short_gives_up_a_copy() -> None:
    """In the same plan, not in the one after it."""
    needs = [need("a", 0.5, 40), need("b", 0.5, 30), need("c", 0.0, 10), need("d", 0.0, 45)]
    homes = on(a="b0", b="b0", c="b0 b1", d="b1")
    steps = plan(boxes(2), needs, homes)

    assert shown(steps) == [("move", "b", "b0", "b1"), ("drop", "c", "b1", None)]
    assert plan(boxes(2), needs, after(homes, steps)) == []


def test_a_model_gets_the_room_that_a_copy_leaves() -> None:
    """In the same plan: it fits nowhere before."""
    needs = [need("a", 0.9, 60), need("b", 0.2, 60), need("c", 0.2, 25)]
    homes = on(a="b0 b1", b="", c="b0")
    steps = plan([room(name, devices=8) for name in ("b0", "b1")], needs, homes, must_fit=True)

    assert shown(steps) == [("drop", "a", "b0", None), ("first", "b", None, "b0")]


def test_no_model_moves_where_it_would_be_given_up_at_once() -> None:
    """The box that it would leave gives it up, as others hold it."""
    needs = [need("a", 0.01, 18), need("b", 0.464, 5), need("c", 0.01, 18)]
    homes = on(a="b1 b2 b3", b="b3", c="b0")
    steps = plan(boxes(4, memory=40), needs, homes)

    gained = {(step.model, step.target) for step in steps if step.target is not None}
    assert steps
    assert gained.isdisjoint({(step.model, step.source) for step in steps})


def test_pins_go_only_where_they_may_and_fit() -> None:
    """A model is not pinned on a box that does not serve it, nor where there is no room."""
    needs = [
        ModelNeed(name="a", weight_bytes=60, demand=0.5, boxes=frozenset({"b0"})),
        ModelNeed(name="b", weight_bytes=60, demand=0.4, boxes=frozenset({"b0", "b1"})),
        ModelNeed(name="c", weight_bytes=60, demand=0.3, boxes=frozenset({"b0", "b1"})),
    ]
    steps = plan(boxes(2), needs, {}, must_fit=True)

    assert shown(steps) == [("first", "a", None, "b0"), ("first", "b", None, "b1")]


def test_only_as_many_steps_as_asked_for() -> None:
    """The first of those that there would be."""
    needs = [need(f"m{n}", 0.2) for n in range(4)]
    every = plan(boxes(2), needs, {})

    assert len(every) == 4
    assert plan(boxes(2), needs, {}, most=2) == every[:2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_plan_that_was_applied_is_empty(data: st.DataObject) -> None:
    """A model that moves meets less pressure, and leaves less; models keep a box; a second plan has
    no steps."""
    count = data.draw(st.integers(1, 4))
    rooms = boxes(count, memory=data.draw(st.sampled_from([40, 100, 1000])))
    needs = [
        need(f"m{n}", data.draw(st.floats(0, 1.5)), data.draw(st.integers(1, 30)))
        for n in range(data.draw(st.integers(1, 8)))
    ]
    names = [room.name for room in rooms]
    homes = {one.name: data.draw(st.frozensets(st.sampled_from(names))) for one in needs}
    must_fit = data.draw(st.booleans())

    steps = plan(rooms, needs, homes, must_fit=must_fit)
    then = homes
    for step in steps:
        before, then = pressures(rooms, needs, then), after(then, [step])
        now = pressures(rooms, needs, then)
        assert then[step.model]
        if step.kind is Kind.MOVE:
            assert step.source is not None
            assert step.target is not None
            assert now[step.target] <= (1 - LESS_GAIN) * before[step.source] + 1e-9
            assert now[step.source] < before[step.source]
    assert must_fit or all(then[one.name] for one in needs)
    assert plan(rooms, needs, then, must_fit=must_fit) == []


def test_a_plan_is_the_same_whatever_the_order() -> None:
    """Of boxes and models: ties go by name."""
    needs = [need(f"m{n}", 0.3) for n in range(5)]
    homes = {one.name: frozenset({"b0"}) for one in needs}
    once = plan(boxes(3), needs, homes)

    assert shown(once) == shown(plan(boxes(3)[::-1], needs[::-1], homes))


def test_a_thousand_models_on_64_boxes_are_planned() -> None:
    """The first four have what is asked for most, and give it to the others."""
    count = 64
    needs = [need(f"m{n:03}", 0.3 if n % 16 == 0 else 0.02, 15) for n in range(1000)]
    homes = {one.name: frozenset({f"b{n % 4}"}) for n, one in enumerate(needs)}
    homes |= {f"m{n:03}": frozenset({f"b{n % count}"}) for n in range(200, 1000)}
    rooms = boxes(count, memory=1000)
    steps = plan(rooms, needs, homes)

    before = pressures(rooms, needs, homes)
    now = pressures(rooms, needs, after(homes, steps))
    assert max(now.values()) < 0.05 * max(before.values())
    assert len(steps) < 200
