"""What policies decide is what happens: refusals, order, limits, preemption, hot swaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import (
    BatchLimits,
    InstanceView,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
    Refusal,
    TurnView,
)
from appliance.vocabulary import (
    EvictModel,
    Finish,
    FinishReason,
    Preempt,
    PrefetchModel,
    Reject,
    RequestClass,
    RunPrefill,
    RunTurn,
    Ticked,
    TurnEnd,
    TurnEnded,
)
from tests.unit.doubles.floor import SLO, FloorDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told


def built(stranger: object, names: str = "ab", *, slabs: int = 40) -> FloorDouble:
    """One instance with every engine built and nothing to do."""
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in names}, slabs=slabs, stranger=stranger
    )
    floor.start()
    floor.settle()
    floor.up[0].steps_per_turn = 1000
    return floor


def until_turn(floor: FloorDouble) -> None:
    floor.work_until(0, lambda: floor.up[0].turn is not None)


def ends(floor: FloorDouble) -> list[TurnEnd]:
    return [event.reason for _, event, _ in floor.journal if isinstance(event, TurnEnded)]


def test_a_refused_request_hears_why() -> None:
    """A policy that refuses a request ends it at once, with its reason; others are served."""
    stranger = Told(
        prefill=lambda request: Refusal(reason="a minute late") if request.model == "b" else None
    )
    floor = built(stranger)

    refused, served = floor.ask("b1", "b"), floor.ask("a1", "a")

    assert floor.commands(Reject) == [
        Reject(request="b1", code="overloaded", message="a minute late")
    ]
    floor.settle()
    assert (refused.outcome, served.outcome) == ("overloaded", FinishReason.LENGTH)


def test_who_was_accepted_is_not_refused_later() -> None:
    """A request that has to be prefilled again after a loss is served, whatever the policy says."""
    refusing = False
    stranger = Told(prefill=lambda: Refusal(reason="too late now") if refusing else None)
    floor = built(stranger)
    life = floor.ask("a1", "a", output=40)
    until_turn(floor)

    refusing = True
    floor.lose(0)
    floor.start(0)
    floor.settle()

    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 2)
    assert floor.commands(Reject) == []


def test_who_waits_for_a_first_instance_may_be_refused() -> None:
    """What came before any instance was up is accepted or refused once one is."""
    stranger = Told(prefill=lambda: Refusal(reason="too late now"))
    floor = FloorDouble({"a": ModelDouble(4, shape())}, stranger=stranger)
    life = floor.ask("a1", "a")

    floor.start(0)

    assert life.outcome == "overloaded"


def test_who_waits_is_not_refused_when_places_change() -> None:
    """A request that waits on an instance that stops serving its model goes to another one."""
    refusing = False
    only = [Placement(models=frozenset("ab")), Placement(models=frozenset("b"))]
    stranger = Told(
        prefill=lambda: Refusal(reason="too late now") if refusing else None,
        place=lambda: only[::-1] if refusing else only,
    )
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in "ab"}, instances=2, stranger=stranger
    )
    floor.start()
    life = floor.ask("a1", "a")

    refusing = True
    floor.now += 2
    floor.tell(Ticked())

    assert floor.machine.requests["a1"].instance == 1
    floor.settle()
    assert life.outcome == FinishReason.LENGTH


def test_groups_are_served_in_the_order_of_admit() -> None:
    """The last group goes first if the policy says so; those it leaves out keep their order."""
    stranger = Told(admit=lambda instance: [len(instance.groups) - 1], phase=lambda: Phase.PREFILL)
    floor = built(stranger, "abcd")
    for name in "abcd":
        floor.ask(f"{name}1", name)

    floor.settle()

    order = [command.model for command in floor.commands(RunPrefill)]
    assert order == ["a", "d", "c", "b"]


def test_models_lose_their_place_in_the_order_of_evict() -> None:
    """When memory is short, the model that the policy names first goes, and no other."""
    stranger = Told(evict=lambda victims: ["c"] if "c" in victims else victims)
    floor = built(stranger, "abcd", slabs=14)
    for name in "abc":
        floor.ask(f"{name}1", name)
        floor.settle()

    floor.ask("d1", "d")
    floor.settle()

    assert [command.model for command in floor.commands(EvictModel)] == ["c"]


# --- preemption ----------------------------------------------------------------------------------


def test_a_turn_is_ended_when_its_time_is_over() -> None:
    """Told that a turn may go on for half a second, the machine asks for that time, and ends the
    turn then: not before, not twice."""
    floor = built(Told(preempt=lambda: 0.5))
    floor.ask("a1", "a", output=200)
    until_turn(floor)
    floor.tell(Ticked())

    floor.ask("b1", "b")

    asked = floor.now
    assert floor.machine.next_deadline() == pytest.approx(asked + 0.5)
    floor.tell(Ticked())
    assert floor.commands(Preempt) == []
    floor.now = asked + 0.5
    floor.tell(Ticked())
    floor.tell(Ticked())
    assert floor.commands(Preempt) == [Preempt(instance=0, turn=1)]
    floor.settle()
    assert ends(floor)[0] is TurnEnd.PREEMPTED


def test_the_shortest_time_counts() -> None:
    """What joins later may bring the end of a turn nearer, and never further."""
    seconds = iter([0.5, 0.2, 0.9])
    floor = built(Told(preempt=lambda: next(seconds, math.inf)), "abcd")
    floor.ask("a1", "a", output=200)
    until_turn(floor)
    floor.tell(Ticked())

    floor.ask("b1", "b")
    floor.ask("c1", "c")
    nearest = floor.now + 0.2
    floor.ask("d1", "d")

    assert floor.machine.next_deadline() == pytest.approx(nearest)


def test_a_turn_ended_for_its_own_model_goes_on_with_its_quota() -> None:
    """A turn that is ended so that a request of its model can join is resumed for the rest of its
    quota before anybody else's turn."""
    stranger = Told(
        preempt=lambda instance: 0.0 if instance.groups[0].model == instance.turn else math.inf,
        round=lambda instance: [
            PlannedTurn(model=batch.model, quota_seconds=1.0)
            for batch in instance.batches
            if batch.runnable
        ],
        phase=lambda instance: Phase.PREFILL,
    )
    floor = built(stranger)
    floor.ask("a1", "a", output=200)
    floor.ask("b1", "b", output=200)
    until_turn(floor)
    floor.work_until(0, lambda: floor.up[0].steps == 10)

    floor.ask("a2", "a", output=200)
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 2)

    first, second = floor.commands(RunTurn)
    assert (first.model, first.quota_seconds) == ("a", 1.0)
    assert (second.model, second.quota_seconds) == ("a", pytest.approx(1.0 - 10 * 0.02))
    assert set(second.requests) == {"a1", "a2"}


def test_a_turn_ended_for_another_model_is_not_resumed() -> None:
    """A turn that is ended for another model has lost the rest of its quota."""
    floor = built(
        Told(
            preempt=lambda: 0.0,
            round=lambda instance: [
                PlannedTurn(model=batch.model, quota_seconds=1.0)
                for batch in instance.batches
                if batch.runnable
            ],
        )
    )
    floor.ask("a1", "a", output=200)
    until_turn(floor)
    floor.work_until(0, lambda: floor.up[0].steps == 10)

    floor.ask("b1", "b", output=200)
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 3)

    assert [(turn.model, turn.quota_seconds) for turn in floor.commands(RunTurn)] == [
        ("a", 1.0),
        ("a", 1.0),
        ("b", 1.0),
    ]


class Impatient:
    """What joins the model that runs is taken in at once; anything else gives it half a second."""

    @hookimpl
    def preempt(self, instance: InstanceView) -> float:
        joins = any(group.model == instance.turn for group in instance.groups)
        return 0.0 if joins else 0.5

    @hookimpl
    def admit(self, instance: InstanceView) -> list[int]:
        order = range(len(instance.groups))
        return sorted(order, key=lambda n: instance.groups[n].model != instance.current_model)

    @hookimpl
    def phase(self, instance: InstanceView) -> Phase:
        joins = instance.groups[0].model == instance.current_model
        return Phase.PREFILL if joins else Phase.DECODE

    @hookimpl
    def round(self, instance: InstanceView) -> list[PlannedTurn]:
        models = [batch.model for batch in instance.batches if batch.runnable]
        return [PlannedTurn(model=models[0], quota_seconds=4.0)]


def test_a_turn_that_goes_on_does_so_no_longer_than_it_may() -> None:
    """A turn that may go on for half a second because of another model, and then is ended for one
    more of its own, goes on for what is left of the half second."""
    floor = built(Impatient())
    floor.ask("a1", "a", output=200)
    until_turn(floor)
    floor.work_until(0, lambda: floor.up[0].steps == 10)

    floor.ask("b1", "b", output=200)
    floor.ask("a2", "a", output=200)
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 2)

    first, second = floor.commands(RunTurn)
    assert (first.model, first.quota_seconds) == ("a", 4.0)
    assert set(second.requests) == {"a1", "a2"}
    assert second.quota_seconds == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("prefilling", [False, True])
def test_who_came_between_the_parts_of_a_turn_limits_the_second(prefilling: bool) -> None:
    """What joins after a turn was ended for one more of its model, before or while that is
    computed, is asked about when the turn goes on."""
    floor = built(Impatient())
    floor.ask("a1", "a", output=200)
    until_turn(floor)
    floor.work_until(0, lambda: floor.up[0].steps == 10)
    floor.ask("a2", "a", output=200)
    if prefilling:
        floor.work_until(0, lambda: len(floor.commands(RunPrefill)) == 2)

    floor.ask("b1", "b", output=200)
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 2)

    assert set(floor.commands(RunTurn)[-1].requests) == {"a1", "a2"}
    deadline = floor.machine.foreman.next_cut()
    assert deadline == pytest.approx(floor.now + 0.5, abs=0.1)
    floor.now = deadline
    floor.tell(Ticked())
    floor.work_until(0, lambda: len(ends(floor)) == 2)
    assert ends(floor) == [TurnEnd.PREEMPTED] * 2
    floor.settle()


def test_who_cannot_join_a_turn_that_goes_on_does_not_end_it() -> None:
    """A turn that goes on without one of its model, which has no room yet, is not ended for it
    again and again."""
    impatient = Impatient()
    floor = FloorDouble({"a": ModelDouble(4, shape())}, host_slabs=12, stranger=impatient)
    floor.start()
    floor.settle()
    floor.up[0].steps_per_turn = 1000
    floor.ask("a1", "a", prompt=60, output=60)
    until_turn(floor)
    floor.work_until(0, lambda: floor.up[0].steps == 10)

    floor.ask("a2", "a", prompt=200, output=20)
    floor.settle()

    assert ends(floor).count(TurnEnd.PREEMPTED) == 1
    assert not floor.machine.requests


def test_who_comes_to_decode_is_asked_about_whoever_waits_for_the_host() -> None:
    """A prefilled request that joins a turn elsewhere has its room: that others wait for theirs
    does not keep the policy from being asked."""
    home = {20: 0, 21: 1, 250: 2}
    asked: list[int] = []
    stranger = Told(
        place=lambda: [Placement()] * 3,
        prefill=lambda request: PrefillChoice(instance=home[request.tokens]),
        decode=lambda: 1,
        preempt=lambda instance: asked.append(instance.id) or math.inf,
    )
    floor = FloorDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        instances=3,
        host_slabs=14,
        max_context=300,
        stranger=stranger,
        slabs=40,
    )
    floor.start()
    floor.settle()
    floor.up[1].steps_per_turn = 1000
    floor.ask("runs", "a", prompt=21, output=40)
    floor.work_until(1, lambda: floor.up[1].turn is not None)
    floor.ask("joins", "a", prompt=20, output=40)
    floor.ask("waits", "b", prompt=250, output=10)
    assert list(floor.machine.foreman.host_queue) == ["waits"]

    asked.clear()
    floor.work_until(0, lambda: floor.machine.requests["joins"].instance == 1)

    assert asked == [1]
    floor.settle()
    assert not floor.machine.requests


# --- batches -------------------------------------------------------------------------------------


def test_interactive_requests_run_before_batch_work() -> None:
    """Under a limit, interactive requests have the places of a turn, however late they came; the
    view of the turn says how many were left out."""
    seen: list[TurnView | None] = []

    def round_(instance: InstanceView) -> None:
        seen.append(instance.last_turn)

    floor = built(Told(batch=lambda: BatchLimits(requests=2), round=round_), "a")
    floor.up[0].steps_per_turn = 2
    for index in range(3):
        floor.ask(f"batch{index}", "a", output=30, kind=RequestClass.BATCH)
    for index in range(2):
        floor.ask(f"inter{index}", "a", output=30)
    floor.work_until(0, lambda: len(floor.commands(RunPrefill)) == 5)
    before = len(floor.commands(RunTurn))

    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == before + 3)

    last = floor.commands(RunTurn)[-1]
    assert set(last.requests) == {"inter0", "inter1"}
    assert seen[-1] == TurnView(
        model="a",
        requests=2,
        limit=2,
        left_out=3,
        steps=2,
        tokens=4,
        seconds=0.04,
        tbt_seconds=SLO.tbt_seconds,
    )
    floor.settle()
    assert len(floor.commands(Finish)) == 5


def test_the_limit_is_no_more_than_the_model_allows() -> None:
    """A policy cannot have more requests decode together than `max_batch`."""
    floor = FloorDouble(
        {"a": ModelDouble(4, shape())},
        slabs=40,
        max_batch=3,
        stranger=Told(batch=lambda: BatchLimits(requests=100)),
    )
    floor.start()
    for index in range(5):
        floor.ask(f"r{index}", "a", output=30)

    floor.settle()

    assert max(len(command.requests) for command in floor.commands(RunTurn)) == 3


@pytest.mark.parametrize(
    "stranger",
    [
        Told(round=lambda: [PlannedTurn(model="a", quota_seconds=1e308)]),
        Told(round=lambda: [PlannedTurn(model="a", quota_seconds=10**400)]),
        Told(preempt=lambda: 10**400),
        Told(batch=lambda: BatchLimits(requests=8, chunk_tokens=1 << 64)),
        Told(prefill=lambda: Refusal(reason="\ud800")),
    ],
)
def test_numbers_beyond_all_measure_stop_nobody(stranger: Told) -> None:
    """What overflows when it is reckoned with, or cannot be sent, is a fault of its policy, and
    requests are served."""
    floor = built(stranger, "a")
    lives = [floor.ask("a1", "a", output=40)]
    until_turn(floor)
    lives.append(floor.ask("a2", "a", output=40))
    floor.settle()

    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 2
    assert {fault.policy for fault in floor.stack.faults} == {"stranger"}
    for line in floor.journal:
        msgspec.json.encode(line)


@pytest.mark.parametrize(("outlook", "brought_in"), [([], "b"), (["c", "b"], "c")])
def test_what_is_expected_next_is_brought_in(outlook: list[str], brought_in: str) -> None:
    """Turns that are not firm say in which order models run, also models whose prompts wait; they
    are planned anew when their time has come."""
    asked: list[set[str]] = []

    def round_(instance: InstanceView) -> list[PlannedTurn]:
        asked.append({batch.model for batch in instance.batches})
        firm = [batch.model for batch in instance.batches if batch.runnable][:1]
        later = [model for model in outlook if model not in firm]
        return [
            PlannedTurn(model=model, quota_seconds=1.0, firm=model in firm)
            for model in [*firm, *later]
        ]

    floor = built(Told(round=round_, phase=lambda: Phase.DECODE, preempt=lambda: math.inf), "abc")
    floor.up[0].steps_per_turn = 5
    floor.ask("a1", "a", output=20)
    until_turn(floor)
    floor.ask("b1", "b")
    floor.ask("c1", "c")

    floor.settle()

    assert floor.commands(PrefetchModel)[0].model == brought_in
    assert asked.count({"a"}) > 1
    assert len(floor.commands(Finish)) == 3


# --- hot swaps -----------------------------------------------------------------------------------


def test_another_policy_answers_from_now_on() -> None:
    """A turn that is under way goes on when the policy changes; the round that was planned does
    not: the new policy plans its own."""
    floor = built(Told(), "abc")
    for name in "abc":
        floor.ask(f"{name}1", name, output=200)
    until_turn(floor)
    assert floor.machine.instances[0].work
    running = floor.commands(RunTurn)[-1].model

    asked: list[Sequence[str]] = []

    def round_(instance: InstanceView) -> list[PlannedTurn]:
        asked.append([batch.model for batch in instance.batches if batch.runnable])
        return [PlannedTurn(model="c", quota_seconds=0.5)]

    floor.set_policy(["aegaeon"], Told(round=round_))

    assert not floor.machine.instances[0].work
    assert floor.up[0].turn is not None
    assert floor.commands(Preempt) == []
    floor.up[0].steps_per_turn = 5
    floor.work_until(0, lambda: len(floor.commands(RunTurn)) == 2)
    assert floor.commands(RunTurn)[-1].model == "c" != running
    assert asked[0] == ["a", "b", "c"]


def test_a_new_policy_may_move_everybody() -> None:
    """The places of a new policy hold at once: who waits where its model is not served any more
    waits elsewhere, in the order of arrival, and nobody is lost."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    floor = FloorDouble(models, policy="serverlessllm", instances=2)
    floor.start()
    floor.settle()
    lives = [floor.ask(f"r{index}", "ab"[index % 2]) for index in range(12)]

    floor.set_policy(
        ["serverlessllm"],
        Told(place=lambda: [Placement(models=frozenset("a")), Placement(models=frozenset("b"))]),
    )

    for number, model in enumerate("ab"):
        instance = floor.machine.instances[number]
        assert {group.model for group in instance.groups} <= {model}
        waiting = [request.arrived for g in instance.groups for request in g.members.values()]
        assert waiting == sorted(waiting)
    floor.settle()
    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 12
