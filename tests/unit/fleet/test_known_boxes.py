"""What a router knows of boxes between two polls, and in which order it tries them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from appliance.fleet.calls import Hint
from appliance.fleet.known_boxes import NO_LOAD, UNSEEN_SECONDS, KnownBoxes, Report, read_load
from appliance.fleet.ranking import (
    LATELY_SECONDS,
    BoxState,
    FleetRequest,
    choose_random,
    choose_residency,
)

HINT = Hint(model="m")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def report(box: str, dead: bool = False, **load: Any) -> dict[str, Any]:
    body = json.dumps({"catalogue": ["m"]} | load).encode()
    return Report(box=box, load=body, dead=dead).as_stats()


def known(clock: Clock | None = None) -> KnownBoxes:
    return KnownBoxes(choose_residency, clock or Clock(), lambda: 0.0)


def test_boxes_come_in_the_order_of_the_rule() -> None:
    reports = {
        "1": report("disk"),
        "2": report("resident", resident=["m"]),
        "3": report("host", host=["m"]),
        "4": report("coming", coming=["m"]),
    }
    assert known().ranked(HINT, reports) == ["2", "4", "3", "1"]


def test_what_was_sent_counts_until_the_box_says_it_itself() -> None:
    """The model is coming there, so the next request follows; other models go elsewhere."""
    clock = Clock()
    router = known(clock)
    both = {"a": report("a", catalogue=["m", "n"]), "b": report("b", catalogue=["m", "n"])}
    first = router.ranked(HINT, both)[0]
    other = {"a": "b", "b": "a"}[first]
    router.sent(first, "r1", "m")
    assert router.ranked(HINT, both)[0] == first
    assert router.ranked(Hint(model="n"), both)[0] == other

    router.ended(first, "r1")
    clock.seconds = UNSEEN_SECONDS / 2
    assert router.ranked(HINT, both)[0] == first, "the model is there now, though the box is idle"

    clock.seconds = UNSEEN_SECONDS * 2
    resident = both | {other: report(other, resident=["m"])}
    assert router.ranked(HINT, resident)[0] == other


def test_requests_count_until_they_end_or_the_box_says_them_itself() -> None:
    """Whichever is first, in whatever order they end. One that is sent again counts once."""
    seen: list[BoxState] = []

    def rule(request: FleetRequest, boxes: Sequence[BoxState], chance: float) -> BoxState:
        seen.append(boxes[0])
        return boxes[0]

    clock = Clock()
    router = KnownBoxes(rule, clock, lambda: 0.0)
    box = {"1": report("a", catalogue=["m", "n"])}

    def counted() -> tuple[int, dict[str, int]]:
        router.ranked(HINT, box)
        return seen[-1].sent, dict(seen[-1].sent_models)

    assert counted() == (0, {})
    for number, model in enumerate("mnm"):
        clock.seconds = number * UNSEEN_SECONDS / 4
        router.sent("1", f"r{number}", model)
    assert counted() == (3, {"m": 2, "n": 1})
    router.ended("1", "r1")
    assert counted() == (2, {"m": 2, "n": 0})
    router.sent("1", "r0", "m")
    assert counted() == (2, {"m": 2, "n": 0})

    clock.seconds = UNSEEN_SECONDS * 1.3
    assert counted() == (2, {"m": 2})
    router.ended("1", "r2")
    assert counted() == (1, {"m": 1})
    clock.seconds = UNSEEN_SECONDS * 1.6
    assert counted() == (0, {})
    router.ended("1", "r0")
    assert counted() == (0, {})


def test_a_model_that_had_requests_lately_keeps_its_place() -> None:
    """Box a holds one model and is asked for two. Box b holds one that has no requests, so a
    request goes there; not while that model had some in the last seconds."""
    clock = Clock()
    router = known(clock)
    full = report(
        "a",
        resident=["n"],
        coming=["m"],
        requests_by_model={"n": 2, "m": 2},
        asked_models=2,
        resident_models=1,
        coming_models=1,
    )
    both = {
        "a": full,
        "b": report("b", catalogue=["m", "o"], resident=["o"], host=["m"], resident_models=1),
    }
    assert router.ranked(HINT, both)[0] == "b"

    router.sent("b", "r1", "o")
    router.ended("b", "r1")
    assert router.ranked(HINT, both)[0] == "a"
    clock.seconds = UNSEEN_SECONDS * 2
    assert router.ranked(HINT, both)[0] == "a"

    clock.seconds = LATELY_SECONDS * 2
    assert router.ranked(HINT, both)[0] == "b"


def test_names_of_no_model_take_no_place() -> None:
    """Such as those that clients mistype, and the empty one of requests that are for no model."""
    router = known()
    full = report(
        "a", resident=["n"], coming=["m"], requests_by_model={"n": 2, "m": 2}, asked_models=2,
        resident_models=1, coming_models=1,
    )  # fmt: skip
    both = {"a": full, "b": report("b", resident=["o"], host=["m"], resident_models=1)}
    assert router.ranked(HINT, both)[0] == "b"
    for number, name in enumerate(("", "mm", "M")):
        router.sent("b", f"r{number}", name)

    assert router.ranked(HINT, both)[0] == "b"


def test_boxes_that_refused_are_left_out() -> None:
    """If all have, one of them is asked, which says so."""
    reports = {"1": report("a", resident=["m"]), "2": report("b")}
    router = known()
    assert router.ranked(Hint(model="m", excluded=("a",)), reports) == ["2"]
    assert set(router.ranked(Hint(model="m", excluded=("a", "b")), reports)) == {"1", "2"}


def test_boxes_that_drain_or_are_dead_come_last() -> None:
    """They are asked if nothing else has the model: their answer says more than none."""
    reports = {
        "1": report("dead", dead=True, resident=["m"]),
        "2": report("drains", draining=True, resident=["m"]),
        "3": report("fine"),
        "4": report("without", catalogue=["n"]),
    }
    assert known().ranked(HINT, reports) == ["3", "2", "1"]
    del reports["3"]
    assert known().ranked(HINT, reports) == ["2", "1"]


def test_a_model_that_no_box_has_goes_to_a_box_that_lives() -> None:
    reports = {"1": {}, "2": report("drains", draining=True), "3": report("fine")}
    assert known().ranked(Hint(model="unknown"), reports) == ["3", "2", "1"]
    assert known().ranked(HINT, {"1": {}}) == ["1"]
    assert known().ranked(HINT, {}) == []


def test_a_name_may_have_the_tag_of_ollama() -> None:
    reports = {
        "1": report("a", catalogue=["n"]),
        "2": report("b"),
        "3": report("c", catalogue=["x:latest"]),
    }
    assert known().ranked(Hint(model="m:latest"), reports) == ["2"]
    assert known().ranked(Hint(model="x:latest"), reports) == ["3"]


def test_a_name_with_the_tag_is_the_same_model_when_it_was_sent() -> None:
    """It is no other model, which would have to take turns with it."""
    router = known()
    reports = {"1": report("a", resident=["m"]), "2": report("b", resident=["m"])}
    first = router.ranked(HINT, reports)[0]
    router.sent(first, "r1", "m:latest")

    assert router.ranked(Hint(model="m:latest"), reports)[0] == first
    assert router.ranked(HINT, reports)[0] == first


def test_boxes_that_have_gone_are_forgotten() -> None:
    router = known()
    both = {"a": report("a"), "b": report("b")}
    first = router.ranked(HINT, both)[0]
    router.sent(first, "r1", "m")
    router.keep([])
    assert router.ranked(HINT, both)[0] == first  # by the tie alone
    router.ended(first, "r1")


def test_other_rules_are_used_as_well() -> None:
    router = KnownBoxes(choose_random, lambda: 0.0, lambda: 0.99)
    assert router.ranked(HINT, {"1": report("a"), "2": report("b")}) == ["2", "1"]


def test_what_is_no_load_is_a_box_without_models() -> None:
    assert read_load(b"<html>") == NO_LOAD
    assert read_load(b'{"catalogue": 7}') == NO_LOAD
    assert read_load(b'{"catalogue": ["m"], "new": 1}').catalogue == {"m"}
