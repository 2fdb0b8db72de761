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
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told


def built(stranger: object, names: str = "ab", *, slabs: int = 40) -> ClusterDouble:
    """One instance with every engine built and nothing to do."""
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in names}, slabs=slabs, stranger=stranger
    )
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = 1000
    return cluster


def until_turn(cluster: ClusterDouble) -> None:
    cluster.work_until(0, lambda: cluster.up[0].turn is not None)


def ends(cluster: ClusterDouble) -> list[TurnEnd]:
    return [event.reason for _, event, _ in cluster.journal if isinstance(event, TurnEnded)]


def test_a_refused_request_hears_why() -> None:
    """A policy that refuses a request ends it at once, with its reason; others are served."""
    stranger = Told(
        prefill=lambda request: Refusal(reason="a minute late") if request.model == "b" else None
    )
    cluster = built(stranger)

    refused, served = cluster.ask("b1", "b"), cluster.ask("a1", "a")

    assert cluster.commands(Reject) == [
        Reject(request="b1", code="overloaded", message="a minute late")
    ]
    cluster.settle()
    assert (refused.outcome, served.outcome) == ("overloaded", FinishReason.LENGTH)


def test_who_was_accepted_is_not_refused_later() -> None:
    """A request that has to be prefilled again after a loss is served, whatever the policy says."""
    refusing = False
    stranger = Told(prefill=lambda: Refusal(reason="too late now") if refusing else None)
    cluster = built(stranger)
    life = cluster.ask("a1", "a", output=40)
    until_turn(cluster)

    refusing = True
    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 2)
    assert cluster.commands(Reject) == []


def test_who_waits_for_a_first_instance_may_be_refused() -> None:
    """What came before any instance was up is accepted or refused once one is."""
    stranger = Told(prefill=lambda: Refusal(reason="too late now"))
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, stranger=stranger)
    life = cluster.ask("a1", "a")

    cluster.start(0)

    assert life.outcome == "overloaded"


def test_who_waits_is_not_refused_when_places_change() -> None:
    """A request that waits on an instance that stops serving its model goes to another one."""
    refusing = False
    only = [Placement(models=frozenset("ab")), Placement(models=frozenset("b"))]
    stranger = Told(
        prefill=lambda: Refusal(reason="too late now") if refusing else None,
        place=lambda: only[::-1] if refusing else only,
    )
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"}, instances=2, stranger=stranger
    )
    cluster.start()
    life = cluster.ask("a1", "a")

    refusing = True
    cluster.now += 2
    cluster.tell(Ticked())

    assert cluster.machine.requests["a1"].instance == 1
    cluster.settle()
    assert life.outcome == FinishReason.LENGTH


def test_groups_are_served_in_the_order_of_admit() -> None:
    """The last group goes first if the policy says so; those it leaves out keep their order."""
    stranger = Told(admit=lambda instance: [len(instance.groups) - 1], phase=lambda: Phase.PREFILL)
    cluster = built(stranger, "abcd")
    for name in "abcd":
        cluster.ask(f"{name}1", name)

    cluster.settle()

    order = [command.model for command in cluster.commands(RunPrefill)]
    assert order == ["a", "d", "c", "b"]


def test_models_lose_their_place_in_the_order_of_evict() -> None:
    """When memory is short, the model that the policy names first goes, and no other."""
    stranger = Told(evict=lambda victims: ["c"] if "c" in victims else victims)
    cluster = built(stranger, "abcd", slabs=14)
    for name in "abc":
        cluster.ask(f"{name}1", name)
        cluster.settle()

    cluster.ask("d1", "d")
    cluster.settle()

    assert [command.model for command in cluster.commands(EvictModel)] == ["c"]


# --- preemption ----------------------------------------------------------------------------------


def test_a_turn_is_ended_when_its_time_is_over() -> None:
    """Told that a turn may go on for half a second, the machine asks for that time, and ends the
    turn then: not before, not twice."""
    cluster = built(Told(preempt=lambda: 0.5))
    cluster.ask("a1", "a", output=200)
    until_turn(cluster)
    cluster.tell(Ticked())

    cluster.ask("b1", "b")

    asked = cluster.now
    assert cluster.machine.next_deadline() == pytest.approx(asked + 0.5)
    cluster.tell(Ticked())
    assert cluster.commands(Preempt) == []
    cluster.now = asked + 0.5
    cluster.tell(Ticked())
    cluster.tell(Ticked())
    assert cluster.commands(Preempt) == [Preempt(instance=0, turn=1)]
    cluster.settle()
    assert ends(cluster)[0] is TurnEnd.PREEMPTED


def test_the_shortest_time_counts() -> None:
    """What joins later may bring the end of a turn nearer, and never further."""
    seconds = iter([0.5, 0.2, 0.9])
    cluster = built(Told(preempt=lambda: next(seconds, math.inf)), "abcd")
    cluster.ask("a1", "a", output=200)
    until_turn(cluster)
    cluster.tell(Ticked())

    cluster.ask("b1", "b")
    cluster.ask("c1", "c")
    nearest = cluster.now + 0.2
    cluster.ask("d1", "d")

    assert cluster.machine.next_deadline() == pytest.approx(nearest)


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
    cluster = built(stranger)
    cluster.ask("a1", "a", output=200)
    cluster.ask("b1", "b", output=200)
    until_turn(cluster)
    cluster.work_until(0, lambda: cluster.up[0].steps == 10)

    cluster.ask("a2", "a", output=200)
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 2)

    first, second = cluster.commands(RunTurn)
    assert (first.model, first.quota_seconds) == ("a", 1.0)
    assert (second.model, second.quota_seconds) == ("a", pytest.approx(1.0 - 10 * 0.02))
    assert set(second.requests) == {"a1", "a2"}


def test_a_turn_ended_for_another_model_is_not_resumed() -> None:
    """A turn that is ended for another model has lost the rest of its quota."""
    cluster = built(
        Told(
            preempt=lambda: 0.0,
            round=lambda instance: [
                PlannedTurn(model=batch.model, quota_seconds=1.0)
                for batch in instance.batches
                if batch.runnable
            ],
        )
    )
    cluster.ask("a1", "a", output=200)
    until_turn(cluster)
    cluster.work_until(0, lambda: cluster.up[0].steps == 10)

    cluster.ask("b1", "b", output=200)
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 3)

    assert [(turn.model, turn.quota_seconds) for turn in cluster.commands(RunTurn)] == [
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
    cluster = built(Impatient())
    cluster.ask("a1", "a", output=200)
    until_turn(cluster)
    cluster.work_until(0, lambda: cluster.up[0].steps == 10)

    cluster.ask("b1", "b", output=200)
    cluster.ask("a2", "a", output=200)
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 2)

    first, second = cluster.commands(RunTurn)
    assert (first.model, first.quota_seconds) == ("a", 4.0)
    assert set(second.requests) == {"a1", "a2"}
    assert second.quota_seconds == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("prefilling", [False, True])
def test_who_came_between_the_parts_of_a_turn_limits_the_second(prefilling: bool) -> None:
    """What joins after a turn was ended for one more of its model, before or while that is
    computed, is asked about when the turn goes on."""
    cluster = built(Impatient())
    cluster.ask("a1", "a", output=200)
    until_turn(cluster)
    cluster.work_until(0, lambda: cluster.up[0].steps == 10)
    cluster.ask("a2", "a", output=200)
    if prefilling:
        cluster.work_until(0, lambda: len(cluster.commands(RunPrefill)) == 2)

    cluster.ask("b1", "b", output=200)
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 2)

    assert set(cluster.commands(RunTurn)[-1].requests) == {"a1", "a2"}
    deadline = cluster.machine.dispatcher.next_cut()
    assert deadline == pytest.approx(cluster.now + 0.5, abs=0.1)
    cluster.now = deadline
    cluster.tell(Ticked())
    cluster.work_until(0, lambda: len(ends(cluster)) == 2)
    assert ends(cluster) == [TurnEnd.PREEMPTED] * 2
    cluster.settle()


def test_who_cannot_join_a_turn_that_goes_on_does_not_end_it() -> None:
    """A turn that goes on without one of its model, which has no room yet, is not ended for it
    again and again."""
    impatient = Impatient()
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, host_slabs=12, stranger=impatient)
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = 1000
    cluster.ask("a1", "a", prompt=60, output=60)
    until_turn(cluster)
    cluster.work_until(0, lambda: cluster.up[0].steps == 10)

    cluster.ask("a2", "a", prompt=200, output=20)
    cluster.settle()

    assert ends(cluster).count(TurnEnd.PREEMPTED) == 1
    assert not cluster.machine.requests


def test_a_joining_request_is_asked_about_while_another_waits_for_the_host() -> None:
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
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in "ab"},
        instances=3,
        host_slabs=14,
        max_context=300,
        stranger=stranger,
        slabs=40,
    )
    cluster.start()
    cluster.settle()
    cluster.up[1].steps_per_turn = 1000
    cluster.ask("runs", "a", prompt=21, output=40)
    cluster.work_until(1, lambda: cluster.up[1].turn is not None)
    cluster.ask("joins", "a", prompt=20, output=40)
    cluster.ask("waits", "b", prompt=250, output=10)
    assert list(cluster.machine.request_book.host_queue) == ["waits"]

    asked.clear()
    cluster.work_until(0, lambda: cluster.machine.requests["joins"].instance == 1)

    assert asked == [1]
    cluster.settle()
    assert not cluster.machine.requests


# --- batches -------------------------------------------------------------------------------------


def test_interactive_requests_run_before_batch_work() -> None:
    """Under a limit, interactive requests have the places of a turn, however late they came; the
    view of the turn says how many were left out."""
    seen: list[TurnView | None] = []

    def round_(instance: InstanceView) -> None:
        seen.append(instance.last_turn)

    cluster = built(Told(batch=lambda: BatchLimits(requests=2), round=round_), "a")
    cluster.up[0].steps_per_turn = 2
    for index in range(3):
        cluster.ask(f"batch{index}", "a", output=30, kind=RequestClass.BATCH)
    for index in range(2):
        cluster.ask(f"inter{index}", "a", output=30)
    cluster.work_until(0, lambda: len(cluster.prompts()) == 5)
    before = len(cluster.commands(RunTurn))

    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == before + 3)

    last = cluster.commands(RunTurn)[-1]
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
        number=last.turn - 1,
    )
    cluster.settle()
    assert len(cluster.commands(Finish)) == 5


def test_the_limit_is_no_more_than_the_model_allows() -> None:
    """A policy cannot have more requests decode together than `max_batch`."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())},
        slabs=40,
        max_batch=3,
        stranger=Told(batch=lambda: BatchLimits(requests=100)),
    )
    cluster.start()
    for index in range(5):
        cluster.ask(f"r{index}", "a", output=30)

    cluster.settle()

    assert max(len(command.requests) for command in cluster.commands(RunTurn)) == 3


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
def test_numbers_beyond_all_measure_stop_nothing(stranger: Told) -> None:
    """What overflows when it is reckoned with, or cannot be sent, is a fault of its policy, and
    requests are served."""
    cluster = built(stranger, "a")
    lives = [cluster.ask("a1", "a", output=40)]
    until_turn(cluster)
    lives.append(cluster.ask("a2", "a", output=40))
    cluster.settle()

    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 2
    assert {fault.policy for fault in cluster.stack.faults} == {"stranger"}
    for line in cluster.journal:
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

    cluster = built(Told(round=round_, phase=lambda: Phase.DECODE, preempt=lambda: math.inf), "abc")
    cluster.up[0].steps_per_turn = 5
    cluster.ask("a1", "a", output=20)
    until_turn(cluster)
    cluster.ask("b1", "b")
    cluster.ask("c1", "c")

    cluster.settle()

    assert cluster.commands(PrefetchModel)[0].model == brought_in
    assert asked.count({"a"}) > 1
    assert len(cluster.commands(Finish)) == 3


# --- hot swaps -----------------------------------------------------------------------------------


def test_another_policy_answers_from_now_on() -> None:
    """A turn that is under way goes on when the policy changes; the round that was planned does
    not: the new policy plans its own."""
    cluster = built(Told(), "abc")
    for name in "abc":
        cluster.ask(f"{name}1", name, output=200)
    until_turn(cluster)
    assert cluster.machine.instances[0].work
    running = cluster.commands(RunTurn)[-1].model

    asked: list[Sequence[str]] = []

    def round_(instance: InstanceView) -> list[PlannedTurn]:
        asked.append([batch.model for batch in instance.batches if batch.runnable])
        return [PlannedTurn(model="c", quota_seconds=0.5)]

    cluster.set_policy(["aegaeon"], Told(round=round_))

    assert not cluster.machine.instances[0].work
    assert cluster.up[0].turn is not None
    assert cluster.commands(Preempt) == []
    cluster.up[0].steps_per_turn = 5
    cluster.work_until(0, lambda: len(cluster.commands(RunTurn)) == 2)
    assert cluster.commands(RunTurn)[-1].model == "c" != running
    assert asked[0] == ["a", "b", "c"]


def test_a_new_policy_may_move_everybody() -> None:
    """The places of a new policy hold at once: who waits where its model is not served any more
    waits elsewhere, in the order of arrival, and no request is lost."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, policy="serverlessllm", instances=2)
    cluster.start()
    cluster.settle()
    lives = [cluster.ask(f"r{index}", "ab"[index % 2]) for index in range(12)]

    cluster.set_policy(
        ["serverlessllm"],
        Told(place=lambda: [Placement(models=frozenset("a")), Placement(models=frozenset("b"))]),
    )

    for number, model in enumerate("ab"):
        instance = cluster.machine.instances[number]
        assert {group.model for group in instance.groups} <= {model}
        waiting = [request.arrived for g in instance.groups for request in g.members.values()]
        assert waiting == sorted(waiting)
    cluster.settle()
    assert [life.outcome for life in lives] == [FinishReason.LENGTH] * 12
