"""Our own policy: who runs, until when, what is brought in, and where requests go."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from appliance.plugins.appliance import Appliance
from appliance.scheduling.cluster import parked_seconds
from appliance.scheduling.policy_api import (
    BatchView,
    InstanceView,
    ModelView,
    Phase,
    PrefillChoice,
)
from appliance.vocabulary import PrefetchModel, RequestClass, Role, Ticked
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    GIB,
    FixedCosts,
    batch_view,
    cluster_view,
    decoding_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

ALWAYS = 1000.0
"""TTFTs that nobody earns."""


class CountingCosts(FixedCosts):
    """Remembers who was asked about."""

    def __init__(self, **seconds: float) -> None:
        super().__init__(**seconds)
        self.asked: list[str] = []

    def switch_seconds(self, model: str) -> float:
        self.asked.append(model)
        return super().switch_seconds(model)


COSTS = FixedCosts(step=0.01, per_token=0.0001, switch=1.0)
NOW = 100.0


def running(model: str, *, batches: dict[str, float], resident: str = "") -> InstanceView:
    """An instance on which `model` runs, with batches due so many seconds from now. All models but
    the one that runs are elsewhere, unless said otherwise."""
    return instance_view(
        batches=tuple(batch_view(name, deadline=NOW + due) for name, due in batches.items()),
        current=model,
        turn=model,
        turn_began=NOW,
        resident=resident or [model],
    )


def test_every_instance_does_everything() -> None:
    """No instance is set apart for prompts, or for some models."""
    patient = model_view("a", ttft=5.0)

    placements = Appliance().place(now=NOW, cluster=cluster_view(3, patient), costs=COSTS)

    assert [(place.role, place.models) for place in placements] == [(Role.MIXED, None)] * 3


def test_models_whose_switch_is_long_beside_their_ttft_have_homes() -> None:
    """A switch takes a second, a third of three: the others may run everywhere. Where little is
    asked, and memory is free, each has two homes, and its weights are loaded ahead there."""
    tight = [model_view(f"t{n}", ttft=2.8) for n in range(4)]
    cluster = cluster_view(4, *tight, model_view("patient", ttft=3.0))

    placements = Appliance().place(now=NOW, cluster=cluster, costs=COSTS)

    homes = sorted([sorted(place.models or ()) for place in placements])
    pairs = [["patient", "t0", "t1"], ["patient", "t2", "t3"]]
    assert homes == [pairs[0], pairs[0], pairs[1], pairs[1]]
    assert all([set(place.ahead) | {"patient"} == place.models for place in placements])


def test_a_model_with_most_of_the_demand_has_more_homes() -> None:
    hot = model_view("hot", ttft=1.0, arrivals=5.0, tokens=2000.0)
    rare = [model_view(f"r{n}", ttft=1.0, arrivals=0.01, tokens=4.0) for n in range(3)]
    cluster = cluster_view(4, hot, *rare)

    placements = Appliance().place(now=NOW, cluster=cluster, costs=COSTS)

    homes = [sum([name in (p.models or ()) for p in placements]) for name in ("hot", "r0")]
    assert homes == [3, 2]


def test_other_parameters_move_no_model() -> None:
    """An appliance that takes over from another one goes on with its homes, though it would have
    planned others."""
    then = [model_view(f"m{n}", ttft=1.0, arrivals=1.0 + n, tokens=400.0) for n in range(4)]
    now = [model_view(f"m{n}", ttft=1.0, arrivals=4.0 - n, tokens=400.0) for n in range(4)]
    first, second, anew = Appliance(), Appliance(margin=0.4), Appliance(margin=0.4)
    homes = first.place(now=NOW, cluster=cluster_view(2, *then), costs=COSTS)
    second.take_over(first)
    after = cluster_view(2, *now)
    assert second.place(now=NOW, cluster=after, costs=COSTS) == homes
    assert anew.place(now=NOW, cluster=after, costs=COSTS) != homes


def test_what_decodes_away_from_home_goes_there() -> None:
    policy, hot = Appliance(), model_view("hot", ttft=1.0, arrivals=9.0, tokens=4000.0)
    large = [hot, *[model_view(f"m{n}", ttft=1.0, weight_bytes=30 * GIB) for n in range(3)]]
    placements = policy.place(now=NOW, cluster=cluster_view(2, *large), costs=COSTS)
    first, second = [place.models or frozenset() for place in placements]
    requests = [decoding_view(f"of {name}", name) for name in sorted(first | second)]

    moves = policy.flow(
        instance=instance_view(0), requests=requests, others=[instance_view(1)], costs=COSTS
    )

    assert {move.request for move in moves or ()} == {f"of {name}" for name in second - first}
    assert {move.target for move in moves or ()} == {1}


# --- who runs ------------------------------------------------------------------------------------


def test_who_runs_goes_on_until_another_has_to_begin() -> None:
    """The turn ends when the most urgent of the others needs its switch and the margin."""
    view = running("a", batches={"a": 50.0, "b": 30.0, "c": 20.0})

    first, *outlook = Appliance(pace=0.0, slack_target=ALWAYS, margin=1.0).round(
        now=NOW, instance=view, costs=COSTS
    )

    assert (first.model, first.firm) == ("a", True)
    assert first.quota_seconds == pytest.approx(20.0 - 1.0 - 1.0)
    assert [(turn.model, turn.firm) for turn in outlook] == [("c", False), ("b", False)]


def test_a_turn_leaves_room_for_all_that_follow() -> None:
    """Two models that are due together have to switch one after the other."""
    view = running("a", batches={"a": 50.0, "b": 20.0, "c": 20.0})

    first, *_ = Appliance(pace=0.0, slack_target=ALWAYS, margin=1.0).round(
        now=NOW, instance=view, costs=COSTS
    )

    assert first.quota_seconds == pytest.approx(20.0 - 1.0 - 1.0 - 1.0)


def test_who_has_to_begin_now_runs() -> None:
    """The earliest deadline of those that cannot wait, whoever runs."""
    view = running("a", batches={"a": 50.0, "b": 1.5, "c": 1.2})

    first, *_ = Appliance(slack_target=ALWAYS, margin=1.0).round(
        now=NOW, instance=view, costs=COSTS
    )

    assert (first.model, first.quota_seconds) == ("c", 1.0)  # which is how long a switch takes


def test_who_runs_and_is_late_goes_on() -> None:
    """It soon will not be: leaving it would cost a switch there and back."""
    view = running("a", batches={"a": -1.0, "b": -5.0})

    first, *_ = Appliance(slack_target=ALWAYS).round(now=NOW, instance=view, costs=COSTS)

    assert first.model == "a"


def test_who_has_earned_enough_lets_others_go_on() -> None:
    """As much slack as a new request may wait for its first token is enough while others wait; a
    turn ends when that is earned."""
    view = running("a", batches={"a": 0.5, "b": 30.0, "c": 20.0})
    policy = Appliance(pace=0.0, slack_target=5.0)  # of a TTFT of 1 s; a step of 10 ms earns 90 ms

    first, *_ = policy.round(now=NOW, instance=view, costs=COSTS)
    assert (first.model, first.quota_seconds) == ("a", 1.0)  # a switch takes longer than to earn it
    beside = running("a", batches={"a": 0.5, "b": 30.0, "c": 20.0}, resident="abc")
    first, *_ = policy.round(now=NOW, instance=beside, costs=COSTS)
    assert (first.model, first.quota_seconds) == ("a", pytest.approx(4.5 / 9))
    rich = running("a", batches={"a": 6.0, "b": 5.0, "c": 4.0})
    later, *_ = policy.round(now=NOW, instance=rich, costs=COSTS)
    assert later.model == "c"


def test_on_an_instance_that_is_behind_one_target_of_slack_is_enough() -> None:
    """What it earns beyond that, others need who are late."""
    policy = Appliance(pace=0.0, slack_target=2.0)

    def first(**due: float) -> str:
        view = running("a", batches=due, resident="abc")
        return policy.round(now=NOW, instance=view, costs=COSTS)[0].model

    assert first(a=1.5, b=1.2) == "a"
    assert first(a=2.5, b=1.2) == "b"
    assert first(a=1.5, b=1.2, c=-1.1) == "c"


def test_a_model_that_would_be_late_on_its_way_back_goes_on() -> None:
    """There and back are two switches of a second where the device cannot hold both models; `b` has
    to begin now."""

    def first(slack: float, weight_gib: int) -> str:
        models = [model_view(name, weight_bytes=weight_gib << 30) for name in "ab"]
        policy = Appliance(pace=0.0, slack_target=ALWAYS)
        policy.place(now=NOW, cluster=cluster_view(1, *models), costs=COSTS)
        view = running("a", batches={"a": slack, "b": 0.5})
        return policy.round(now=NOW, instance=view, costs=COSTS)[0].model

    assert first(2.1, 41) == "a"
    assert first(2.3, 41) == "b"
    assert first(1.1, 39) == "b"


def test_the_way_back_keeps_no_model_waiting_for_ever() -> None:
    """`a` is asked all the time and never far enough ahead; `b` waits for half a minute."""
    models = [model_view(name, weight_bytes=41 << 30) for name in "ab"]
    policy = Appliance(pace=0.0)
    policy.place(now=NOW, cluster=cluster_view(1, *models), costs=COSTS)

    def first(waited: float) -> str:
        now = NOW + waited
        view = instance_view(
            batches=(batch_view("a", deadline=now + 0.5), batch_view("b", deadline=NOW)),
            current="a",
            resident=["a"],
        )
        return policy.round(now=now, instance=view, costs=COSTS)[0].model

    ran = [first(waited / 2) for waited in range(80)]
    assert set(ran[1:60]) == {"a"}
    assert "b" in ran[60:64]


def test_a_model_goes_on_while_the_kv_of_another_is_away() -> None:
    """It has earned its slack target, but each switch would move KV. The other model runs when its
    own slack is down to a quarter of its target, or when one of its prompts waits."""
    policy = Appliance(
        pace=0.0, slack_target=5.0, margin=0.1
    )  # of a TTFT of 1 s; a step of 10 ms earns 90 ms

    def first(due: float, away: int, *, prompts: bool = False) -> tuple[str, float]:
        view = instance_view(
            batches=(
                batch_view("a", deadline=NOW + 6.0),
                batch_view("b", deadline=NOW + due, away_tokens=away),
            ),
            groups=(group_view("b", deadline=NOW + due),) if prompts else (),
            current="a",
            turn="a",
            turn_began=NOW,
            resident=["a", "b"],
        )
        turn, *_ = policy.round(now=NOW, instance=view, costs=COSTS)
        return turn.model, turn.quota_seconds

    assert first(3.25, away=0)[0] == "b"
    assert first(3.25, away=100) == ("a", pytest.approx(2.0))
    assert first(1.25, away=100)[0] == "b"
    assert first(3.25, away=100, prompts=True)[0] == "b"


def test_a_late_model_keeps_no_request_waiting_for_ever() -> None:
    """Another model that is later by more than `max_lateness_seconds` runs."""
    policy = Appliance(max_lateness_seconds=10.0)

    first = [
        policy.round(now=NOW, instance=running("a", batches=due), costs=COSTS)[0].model
        for due in ({"a": -5.0, "b": -14.0}, {"a": -5.0, "b": -16.0})
    ]

    assert first == ["a", "b"]


def first_of(policy: Appliance, **due: float) -> str:
    view = running("c", batches=due, resident="abc")
    return policy.round(now=NOW, instance=view, costs=COSTS)[0].model


def test_what_is_late_on_an_instance_that_is_behind_waits_for_what_can_be_in_time() -> None:
    """From when a token is late by more than a TTFT target (1 s), until none is late: a token that
    missed its deadline by more than the margin (0.2 s) is due again 30 s later."""
    policy = Appliance(pace=0.0)

    assert first_of(policy, a=-0.9, b=0.1) == "a"
    assert first_of(policy, a=-1.1, b=0.1) == "b"
    assert first_of(policy, a=-0.9, b=0.1) == "b"
    assert first_of(policy, a=-0.1, b=0.1) == "a"
    assert first_of(policy, a=-29.9, b=0.1) == "a"
    assert first_of(policy, a=0.0, b=0.1) == "a"
    assert first_of(policy, a=-0.9, b=0.1) == "a"


def test_a_prompt_that_is_late_puts_an_instance_behind() -> None:
    policy = Appliance(pace=0.0)
    late = instance_view(groups=(group_view("a", deadline=NOW - 1.1),), resident=["a", "b"])
    policy.phase(now=NOW, instance=late, costs=COSTS)

    assert first_of(policy, a=-0.9, b=0.1) == "b"


def test_an_instance_that_is_behind_runs_what_is_late_while_nothing_is_urgent() -> None:
    """Before models that have time, the one that is late for longest first."""
    assert first_of(Appliance(pace=0.0), a=-1.0, b=-2.0, c=0.9) == "b"


def test_one_late_request_does_not_make_its_batch_late() -> None:
    late = structs.replace(batch_view("a", 2, deadline=NOW - 5), deadlines=(NOW - 5, NOW + 0.1))
    other = batch_view("b", deadline=NOW + 0.15)
    view = instance_view(batches=(late, other), resident=["a", "b"])

    assert Appliance().round(now=NOW, instance=view, costs=COSTS)[0].model == "a"


def test_each_late_request_is_due_again_at_its_own_time() -> None:
    """One is 29.95 s late and due in 0.05 s, one 64.9 s and due in 25.1 s."""
    deadlines = (NOW - 64.9, NOW - 29.95)
    late = structs.replace(batch_view("a", 2, deadline=deadlines[0]), deadlines=deadlines)
    view = instance_view(batches=(late, batch_view("b", deadline=NOW + 0.1)), resident=["a", "b"])

    assert Appliance().round(now=NOW, instance=view, costs=COSTS)[0].model == "a"


def test_a_request_that_can_be_in_time_joins_no_late_group() -> None:
    view = instance_view(groups=(group_view("a", deadline=NOW - 0.1),))

    assert chosen(Appliance(), view) == PrefillChoice(instance=view.id)


def test_a_model_with_too_much_to_do_starves_no_request() -> None:
    """While more is asked of one model than the instance can do, a request of another ends."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"}, max_batch=8, stranger=Appliance()
    )
    cluster.start()
    busy = [cluster.ask(f"a{n}", "a", output=30) for n in range(20)]
    for turn in range(2000):
        if turn == 300:
            other = cluster.ask("b1", "b", output=10)
        cluster.now += 0.1
        cluster.work(0)
        if sum(life.outcome is None for life in busy) < 20:
            busy.append(cluster.ask(f"a{len(busy)}", "a", output=30))

    assert other.outcome is not None


def test_without_other_models_a_turn_is_long() -> None:
    """Nobody is waited for."""
    view = running("a", batches={"a": 5.0})

    (turn,) = Appliance(slack_target=ALWAYS, longest_turn_seconds=40.0).round(
        now=NOW, instance=view, costs=COSTS
    )

    assert turn.quota_seconds == 40.0


def test_what_is_in_place_may_begin_later() -> None:
    """A model whose weights are there needs no time for its switch."""
    view = instance_view(
        batches=(batch_view("a", deadline=NOW + 50), batch_view("b", deadline=NOW + 20)),
        current="a",
        resident=["a", "b"],
    )

    first, *_ = Appliance(pace=0.0, slack_target=ALWAYS, margin=1.0).round(
        now=NOW, instance=view, costs=COSTS
    )

    assert first.quota_seconds == pytest.approx(19.0)


def test_a_turn_goes_to_a_model_that_can_run() -> None:
    """A batch whose KV is on its way is nobody's turn, and hurries nobody."""
    view = instance_view(
        batches=(batch_view("a", runnable=0, deadline=NOW), batch_view("b", deadline=NOW + 9)),
    )

    first, *outlook = Appliance(slack_target=ALWAYS).round(now=NOW, instance=view, costs=COSTS)

    assert first.model == "b"
    assert first.quota_seconds == Appliance().longest_turn_seconds
    assert [turn.model for turn in outlook] == ["a"]


def test_a_prompt_that_cannot_begin_costs_no_turn() -> None:
    """When the prompt that is next has to wait for room, those that can decode do."""
    view = instance_view(
        groups=(group_view("a", deadline=NOW),),
        batches=(batch_view("b", deadline=NOW + 9), batch_view("c", deadline=NOW + 8)),
    )

    first, *_ = Appliance(slack_target=ALWAYS).round(now=NOW, instance=view, costs=COSTS)

    assert first.model == "c"


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_of_the_model_that_runs_next_come_first() -> None:
    """Then the most urgent ones; the instance prefills if its next model has prompts."""
    view = instance_view(
        groups=(
            group_view("b", deadline=NOW + 9),
            group_view("c", deadline=NOW + 8),
            group_view("a", deadline=NOW + 10),
        ),
        batches=(batch_view("a", deadline=NOW + 30),),
        current="a",
        resident=["a"],
    )
    policy = Appliance(slack_target=ALWAYS)

    assert policy.admit(now=NOW, instance=view, costs=COSTS) == [2, 1, 0]
    ordered = instance_view(
        groups=(
            group_view("a", deadline=NOW + 10),
            group_view("c", deadline=NOW + 8),
        ),
        batches=view.batches,
        current="a",
        resident=["a"],
    )
    assert policy.phase(now=NOW, instance=ordered, costs=COSTS) is Phase.PREFILL


def test_others_prompts_wait_while_there_is_time() -> None:
    """A prompt of another model that is not due yet does not interrupt."""
    view = instance_view(
        groups=(group_view("b", deadline=NOW + 9),),
        batches=(batch_view("a", deadline=NOW + 30),),
        current="a",
        resident=["a"],
    )

    assert Appliance(slack_target=ALWAYS).phase(now=NOW, instance=view, costs=COSTS) is Phase.DECODE


def test_a_prompt_of_the_running_model_joins_at_once() -> None:
    """It shares every step from then on."""
    view = instance_view(groups=(group_view("a"),), current="a", turn="a", turn_began=NOW)

    assert Appliance().preempt(now=NOW, instance=view, costs=COSTS) == 0.0


def test_a_prompt_of_another_model_cuts_the_turn_when_it_has_to_begin() -> None:
    """Not before, and not within the shortest turn."""
    view = instance_view(
        groups=(group_view("b", tokens=1000, ttft=10.0, deadline=NOW + 10),),
        batches=(batch_view("a", deadline=NOW + 50),),
        current="a",
        turn="a",
        turn_began=NOW,
        resident=["a"],
    )
    policy = Appliance(slack_target=ALWAYS, margin=0.1)

    more = policy.preempt(now=NOW, instance=view, costs=COSTS)

    assert more == pytest.approx(10.0 - 1.0 - 1.0 - 0.1)

    def left(passed: float, deadline: float) -> float:
        late = instance_view(
            groups=(group_view("b", tokens=1000, deadline=NOW + deadline),),
            batches=view.batches,
            current="a",
            turn="a",
            turn_began=NOW,
            resident=["a"],
        )
        return policy.preempt(now=NOW + passed, instance=late, costs=COSTS)

    # No less than the switch to come takes, from when the turn began.
    assert left(0.4, 0.35) == pytest.approx(0.6)
    assert left(2.0, 1.95) == 0.0


def short_prompt(**changes: object) -> InstanceView:
    """A turn of `a`, which is late, during which a prompt of `b` came that takes 0.05 s and is due
    in 0.9 s; a switch takes a second."""
    asked = {"tokens": 500, "ttft": 1.0, "arrived": NOW, "deadline": NOW + 0.9, **changes}
    resident = asked.pop("resident", ["a", "b"])
    return instance_view(
        groups=(group_view("b", **asked),),  # type: ignore[arg-type]
        batches=(batch_view("a", deadline=NOW - 0.5),),
        current="a",
        turn="a",
        turn_began=NOW - 1,
        resident=resident,  # type: ignore[arg-type]
    )


def begins_at_once(view: InstanceView) -> bool:
    """The prompt is what comes next, when the turn has ended."""
    between = structs.replace(view, turn=None)
    return Appliance().phase(now=NOW, instance=between, costs=COSTS) is Phase.PREFILL


def test_a_short_prompt_with_a_tight_target_comes_before_late_tokens() -> None:
    assert Appliance().preempt(now=NOW, instance=short_prompt(), costs=COSTS) == 0.0
    assert begins_at_once(short_prompt())
    # Its margin is 0.2 s.
    assert not begins_at_once(short_prompt(tokens=2001))
    # A switch takes a tenth of ten seconds.
    assert not begins_at_once(short_prompt(ttft=10.0, deadline=NOW + 9.9))
    # It would not be in time whatever runs.
    assert not begins_at_once(short_prompt(resident=["a"]))
    assert not begins_at_once(short_prompt(deadline=NOW + 0.04))
    # It is batch work.
    assert not begins_at_once(short_prompt(interactive=0))


def test_short_prompts_of_a_model_are_short_together() -> None:
    """Two groups of 0.15 s are more than the margin of 0.2 s; one and a late one are not."""
    view = short_prompt()

    def begins(second: float) -> bool:
        groups = tuple([group_view("b", tokens=1500, deadline=NOW + due) for due in (0.9, second)])
        return begins_at_once(structs.replace(view, groups=groups))

    assert not begins(0.8)
    assert begins(-0.1)


def test_of_several_models_with_short_prompts_the_most_urgent_is_first() -> None:
    groups = tuple(
        [
            group_view(name, tokens=100, deadline=NOW + due)
            for name, due in zip("bcd", (3, 2, 4), strict=True)
        ]
    )
    view = structs.replace(short_prompt(resident=["a", "b", "c", "d"]), groups=groups, turn=None)

    assert Appliance().admit(now=NOW, instance=view, costs=COSTS)[0] == 1


def test_a_short_prompt_that_waits_for_room_gives_its_model_no_turn() -> None:
    """Its model has requests that decode and are far ahead; those of another one are late."""
    view = structs.replace(
        short_prompt(),
        turn=None,
        batches=(batch_view("b", deadline=NOW + 60), batch_view("a", deadline=NOW - 0.5)),
    )

    assert Appliance().round(now=NOW, instance=view, costs=COSTS)[0].model == "a"


def test_a_short_prompt_that_could_not_begin_cuts_no_turn() -> None:
    """It was there when the turn began: it waits for room, and turns would last for a step."""
    waits = short_prompt(arrived=NOW - 1.5)

    assert Appliance(slack_target=ALWAYS).preempt(now=NOW, instance=waits, costs=COSTS) > 0.0


def test_a_flood_of_short_prompts_leaves_others_half_of_the_time() -> None:
    """Twenty of 0.05 s come first at once, then one in each 0.1 s."""
    policy, came = Appliance(), []
    for tick in range(400):
        now = NOW + tick * 0.025
        view = structs.replace(
            short_prompt(arrived=now, deadline=now + 0.9),
            turn=None,
            batches=(batch_view("a", deadline=NOW - 0.5),),
        )
        came.append(policy.phase(now=now, instance=view, costs=COSTS) is Phase.PREFILL)

    assert all(came[:20])
    assert sum(came[200:]) == pytest.approx(200 / 4, abs=1)


def test_late_prompts_do_not_come_before_short_ones_of_their_model() -> None:
    view = instance_view(
        groups=(group_view("b", deadline=NOW - 2), group_view("b", tokens=10, deadline=NOW + 0.5)),
        resident=["b"],
    )

    assert Appliance().admit(now=NOW, instance=view, costs=COSTS) == [1, 0]


# --- chunks --------------------------------------------------------------------------------------


def chunk(*, due: float, left: float, tbt: float = 0.1) -> int:
    """Tokens of a prompt of 2000, due in `left` seconds, that are computed beside a batch that is
    due in `due`."""
    view = instance_view(
        groups=(group_view("a", tokens=2000, deadline=NOW + left),),
        batches=(batch_view("a", tbt=tbt, deadline=NOW + due),),
        current="a",
        resident=["a"],
    )
    return Appliance().batch(now=NOW, model="a", instance=view, costs=COSTS).chunk_tokens


def test_a_prompt_with_others_is_computed_in_parts() -> None:
    """A step of 10 ms and a part of the prompt, at 0.1 ms a token, fit what was promised: 90 % of
    it."""
    assert chunk(due=0.05, left=1.0) == 800
    assert chunk(due=0.05, left=1.0, tbt=0.05) == 350


def test_a_prompt_that_is_in_a_hurry_is_computed_whole() -> None:
    """If those who decode can wait for it; and always where a step leaves no time, or nobody
    decodes."""
    assert chunk(due=5.0, left=0.1) == 0
    assert chunk(due=0.05, left=0.1) == 800
    assert chunk(due=0.05, left=1.0, tbt=0.012) == 0
    alone = instance_view(groups=(group_view("a", tokens=2000),), resident=["a"])
    limits = Appliance().batch(now=NOW, model="a", instance=alone, costs=COSTS)
    assert limits.chunk_tokens == 0


class LongPrompts(FixedCosts):
    """Of prompts whose tokens take longer the more there are before them, as attention does."""

    def prefill_seconds(self, model: str, tokens: int) -> float:
        return tokens * self.per_token * (1 + tokens / 4000)


@pytest.mark.parametrize(
    ("models", "tokens"), [(("a",), 334), (("a", "b"), 559)], ids=["alone", "with another"]
)
def test_a_model_with_all_the_work_has_no_slack(models: tuple[str, ...], tokens: int) -> None:
    """Its prompts are not computed whole beside a batch, however urgent. Parts are smaller: a token
    of a prompt of 4000 takes 0.2 ms in the mean, where one of a short prompt takes 0.125; and the
    step takes 23 of 90 ms rather than 20, as KV is read 1.3 times as long beside prompts."""
    costs = LongPrompts(step=0.01, per_token=0.0001, per_kv_token=0.0001)
    policy = Appliance()
    busy = [model_view(name, requests=2) for name in models]
    policy.place(now=NOW, cluster=cluster_view(1, *busy), costs=costs)

    def limits(*, due: float, left: float) -> int:
        view = instance_view(
            groups=(group_view("a", tokens=4000, deadline=NOW + left),),
            batches=(batch_view("a", kv_tokens=100, deadline=NOW + due),),
            current="a",
            resident=["a"],
        )
        return policy.batch(now=NOW, model="a", instance=view, costs=costs).chunk_tokens

    assert limits(due=0.05, left=9.0) == tokens
    assert limits(due=5.0, left=0.1) == (tokens if len(models) == 1 else 0)


def test_prompts_are_computed_together_while_no_other_model_has_work() -> None:
    """Else what comes next is decided after each."""
    own, others = group_view("a", tokens=2000), group_view("b", tokens=10)

    def tokens(view: InstanceView) -> int:
        limits = Appliance().batch(now=NOW, model="a", instance=view, costs=COSTS)
        return limits.prompt_tokens

    assert tokens(instance_view(groups=(own,), resident=["a"])) == 2048
    assert tokens(instance_view(groups=(own, others), resident=["a"])) == 0
    assert tokens(instance_view(groups=(own,), batches=(batch_view("b"),), resident=["a"])) == 0


# --- where requests go ---------------------------------------------------------------------------


def chosen(policy: Appliance, *views: InstanceView) -> PrefillChoice:
    return policy.prefill(now=NOW, request=request_view("a"), instances=views, costs=COSTS)


def test_a_request_joins_its_model() -> None:
    """There it costs its prompt only; in the group that waits, if there is one. So it is where
    there are more models than instances."""
    groups = (group_view("b", deadline=NOW), group_view("a", deadline=NOW))
    busy = instance_view(0, groups=groups, resident=["a", "b"])
    other = instance_view(1, batches=(batch_view("c"), batch_view("d")), resident=["c", "d"])

    assert chosen(Appliance(), other, busy) == PrefillChoice(instance=0, group=1)


def test_a_request_goes_where_no_long_prompt_is_computed() -> None:
    """One that takes more than a second, at 0.1 ms a token."""

    def first(computing: int) -> InstanceView:
        batches = (batch_view("a"),)
        return instance_view(0, batches=batches, current="a", computing=computing, resident=["a"])

    other = instance_view(1, batches=(batch_view("a"),), current="a", resident=["a"])

    assert chosen(Appliance(), first(0), other).instance == 0
    assert chosen(Appliance(), first(9000), other).instance == 0
    assert chosen(Appliance(), first(11000), other).instance == 1


def test_a_request_goes_where_steps_read_less_kv() -> None:
    """Unless models crowd: there requests of a model gather."""
    costs = FixedCosts(step=0.01, per_token=0.0001, switch=1.0, per_kv_token=1e-6)
    much = instance_view(0, batches=(batch_view("a", kv_tokens=30000),), resident=["a"])

    def first(other: BatchView) -> int:
        views = [much, instance_view(1, batches=(other,), resident=["a", "b"])]
        request = request_view("a")
        return Appliance().prefill(now=NOW, request=request, instances=views, costs=costs).instance

    assert first(batch_view("a", kv_tokens=500)) == 1
    assert first(batch_view("a", kv_tokens=30000)) == 0
    assert first(batch_view("b")) == 0


@pytest.mark.parametrize(
    ("kind", "group"), [(RequestClass.INTERACTIVE, 1), (RequestClass.BATCH, 0)]
)
def test_classes_wait_in_groups_of_their_own(kind: RequestClass, group: int) -> None:
    """Who is waited for does not stand in line behind batch work of the same model."""
    groups = (group_view("a", 900, interactive=0), group_view("a", 2))
    view = instance_view(groups=tuple(structs.replace(g, deadline=NOW) for g in groups))
    request = request_view("a", kind=kind)

    choice = Appliance().prefill(now=NOW, request=request, instances=[view], costs=COSTS)

    assert choice == PrefillChoice(instance=view.id, group=group)


def test_the_first_of_a_class_begins_a_group() -> None:
    """Batch work that waits is not joined."""
    view = instance_view(groups=(group_view("a", 900, interactive=0),))

    assert chosen(Appliance(), view) == PrefillChoice(instance=view.id)


def test_a_request_goes_where_nothing_is_done() -> None:
    """While there are fewer models than instances a switch is all it costs."""
    busy = instance_view(0, batches=(batch_view("a"),), resident=["a"])

    assert chosen(Appliance(), busy, instance_view(1)) == PrefillChoice(instance=1)


def test_a_request_leaves_its_model_when_that_is_swamped() -> None:
    """Where much more is to be done first, a switch and steps of its own are cheaper."""
    batches = tuple(batch_view(name) for name in "abcdef")
    busy = instance_view(0, batches=batches, resident=["a"])

    assert chosen(Appliance(), busy, instance_view(1)) == PrefillChoice(instance=1)


def test_among_equals_weights_in_place_decide() -> None:
    """An instance that has the model on its device needs no load."""
    plain, holder = instance_view(0), instance_view(1, resident=["a"])

    assert chosen(Appliance(), plain, holder) == PrefillChoice(instance=1)


def test_what_is_known_of_an_instance_is_kept_until_a_request_comes_or_goes() -> None:
    """Tokens change nothing about where requests go; a new membership_version does."""
    policy = Appliance()
    few = instance_view(0, batches=(batch_view("b"), batch_view("c")), membership_version=1)
    many = instance_view(
        1, batches=tuple(batch_view(name) for name in "bcdefg"), membership_version=1
    )
    assert chosen(policy, few, many).instance == 0

    swapped = (
        instance_view(0, batches=many.batches, membership_version=1),
        instance_view(1, membership_version=1),
    )
    assert chosen(policy, *swapped).instance == 0
    told = (
        instance_view(0, batches=many.batches, membership_version=2),
        instance_view(1, membership_version=2),
    )
    assert chosen(policy, *told).instance == 1


def test_a_request_looks_at_a_few_instances_anew() -> None:
    """Of those where somebody came or went the one that had the last request, so that a burst does
    not go there whole, and the one looked at longest ago; the others by and by."""
    policy = Appliance()
    crowd = tuple(batch_view(name) for name in "bcdefghi")
    light, heavy = crowd[:2], crowd
    views = [instance_view(n, batches=light, membership_version=1) for n in range(4)]
    assert chosen(policy, *views).instance == 0

    grown = [instance_view(n, batches=heavy, membership_version=2) for n in range(4)]
    assert chosen(policy, *grown).instance == 2  # 0 and 1 are known to be crowded now
    grown[3] = instance_view(3, batches=(), membership_version=3)
    assert chosen(policy, *grown).instance == 3


def test_estimates_are_renewed_a_few_at_a_time() -> None:
    """What is expected of a model is looked up anew after half a minute, the oldest first."""
    policy, models = Appliance(), [f"m{n}" for n in range(40)]
    cluster = cluster_view(2, *[model_view(name) for name in models])
    asked = [request_view(name) for name in models]
    for number, request in enumerate(asked):
        view = instance_view(0, membership_version=number)
        policy.prefill(now=NOW, request=request, instances=[view], costs=COSTS)
    dear = CountingCosts(step=0.01, per_token=0.0001, switch=1.0)

    policy.place(now=NOW + 28, cluster=cluster, costs=COSTS)  # looks at switches, for homes

    policy.place(now=NOW + 29, cluster=cluster, costs=dear)
    assert dear.asked == []
    policy.place(now=NOW + 31, cluster=cluster, costs=dear)
    assert dear.asked == models[:3]
    policy.place(now=NOW + 32, cluster=cluster, costs=dear)
    assert dear.asked == models[:6]


def test_a_model_that_is_gone_is_forgotten() -> None:
    """Nothing is known of it that could be looked up anew."""

    class Catalogue(FixedCosts):
        def prefill_seconds(self, model: str, tokens: int) -> float:
            return {"a": 1.0, **later}[model]

    later = {"gone": 1.0}
    policy, costs = Appliance(), Catalogue()
    cluster = cluster_view(1, model_view("a"))
    for model in ("a", "gone"):
        asked = request_view(model)
        policy.prefill(now=NOW, request=asked, instances=cluster.instances, costs=costs)
    later.clear()

    for seconds in (31, 32, 63):
        placed = policy.place(now=NOW + seconds, cluster=cluster, costs=costs)
        assert len(placed) == 1


def test_a_request_decodes_where_its_kv_is() -> None:
    """Unless that instance does not decode any more."""
    views = [instance_view(0), instance_view(1)]

    def decoded(prefilled_on: int) -> int:
        return Appliance().decode(
            request=request_view(), prefilled_on=prefilled_on, instances=views, costs=COSTS
        )

    assert decoded(1) == 1
    assert decoded(7) == 0


# --- on the machine ------------------------------------------------------------------------------


def test_the_next_model_is_brought_in_while_one_runs() -> None:
    """What the outlook names is prefetched, and found in place when its turn comes."""
    models = {name: ModelDouble(4, shape()) for name in "abc"}
    cluster = ClusterDouble(models, stranger=Appliance(), slabs=14)
    cluster.start()
    cluster.settle()
    for name in "abc":
        cluster.ask(f"{name}1", name, output=60)
    cluster.settle()

    assert cluster.commands(PrefetchModel)
    assert {life.outcome for life in cluster.world.lives.values()} == {"length"}


@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_parameters_have_bounds(value: float) -> None:
    """A turn that is no time at all cannot be asked for."""
    import msgspec

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"shortest_turn_seconds": value}, Appliance)


# --- instances that rest -------------------------------------------------------------------------


def test_no_instance_rests_unless_it_is_asked_for() -> None:
    """The policy has no answer, so another one of the stack may have."""
    cluster = cluster_view(4, model_view("a"))

    assert Appliance().scale(now=NOW, cluster=cluster, costs=COSTS) is None


def scaled(policy: Appliance, *models: ModelView) -> int:
    """How many of four are open after a minute in which this was asked."""
    cluster = cluster_view(4, *models)
    for seconds in range(62):
        policy.place(now=NOW + seconds, cluster=cluster, costs=COSTS)
        found = policy.scale(now=NOW + seconds, cluster=cluster, costs=COSTS)
    assert found is not None
    assert (found.interactive, found.batch) == (0, 0)
    return found.mixed


def test_instances_rest_that_little_demand_does_not_need() -> None:
    calm = model_view("a", ttft=10.0, arrivals=0.05, tokens=10.0)
    busy = model_view("a", ttft=10.0, arrivals=80.0, tokens=160_000.0)

    assert scaled(Appliance(park=True), calm) == 1
    assert scaled(Appliance(park=True), busy) == 4


def test_batch_requests_that_come_open_no_instance_by_themselves() -> None:
    """What they need follows from their deadlines, when they wait."""
    batch = structs.replace(
        model_view("a", ttft=10.0, arrivals=80.0, tokens=160_000.0),
        batch_arrivals_per_second=80.0,
        batch_tokens_per_second=160_000.0,
    )

    assert scaled(Appliance(park=True), batch) == 1


def test_no_instance_rests_while_models_have_homes() -> None:
    """Which instances rest is not the policy's to say, and one of them may be the only home. A
    model alone has a home everywhere."""
    tight = [model_view(f"t{n}", arrivals=0.02, tokens=4.0) for n in range(2)]

    assert scaled(Appliance(park=True), *tight) == 4
    assert scaled(Appliance(park=True), tight[0]) == 1


def test_no_instance_rests_while_some_cannot_serve_a_model() -> None:
    partial = model_view("a", ttft=10.0, arrivals=0.02, tokens=4.0, instances=frozenset({3}))

    assert scaled(Appliance(park=True), partial) == 4


def test_instances_rest_on_the_machine_and_all_wake_for_a_burst() -> None:
    """Two minutes of a request now and then, a hundred at once, and calm again: nothing is lost,
    what rests gets nothing, those that come when it is awake do, and the time in which it rested
    is counted."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, instances=3, stranger=Appliance(park=True)
    )
    cluster.start()
    cluster.settle()
    machine = cluster.machine

    def calm(first: int, count: int) -> None:
        for number in range(first, first + count):
            cluster.now += 5.0
            cluster.ask(f"r{number}", "a", output=5)
            cluster.settle()

    def parked() -> list[int]:
        return [i.id for i in machine.instances.values() if i.instance_class == "parked"]

    def rested() -> list[float]:
        return [parked_seconds(one, cluster.now) for one in machine.instances.values()]

    calm(0, 24)
    assert parked() == [1, 2]
    assert rested()[0] == 0.0
    assert rested()[1] == rested()[2] > 60.0
    for number in range(100):
        cluster.ask(f"b{number}", "a", prompt=50, output=20)
    cluster.now += 1.0
    cluster.tell(Ticked())
    assert parked() == []
    for number in range(20):
        cluster.ask(f"c{number}", "a", prompt=50, output=20)
    assert {machine.requests[f"b{number}"].instance for number in range(100)} == {0}
    assert {machine.requests[f"c{number}"].instance for number in range(20)} >= {1, 2}
    woken = rested()
    cluster.settle()
    assert rested() == woken
    cluster.now += 300.0
    calm(24, 24)
    assert parked() == [1, 2]
    assert {life.outcome for life in cluster.world.lives.values()} == {"length"}
