"""Our own policy sheds load: who is hopeless, what is said, and who is never refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.plugins.appliance import Appliance
from appliance.plugins.shedding import FRESH_SECONDS, Shed
from appliance.policies.loader import PolicyStack
from appliance.scheduling.policy_api import (
    InstanceView,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import FinishReason, InstanceClass, RequestClass, Slo
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

COSTS = FixedCosts(step=0.01, per_token=0.0001, switch=1.0)
NOW = 100.0
TTFT = 10.0


def asked(model: str = "new", **fields: Any) -> RequestView:
    """A request that comes now, with ten seconds for its first token."""
    return request_view(model, **{"arrived": NOW, "ttft": TTFT, "tokens": 100} | fields)


def busy(number: int, seconds: float, *, due: float = NOW + 5, **view: Any) -> InstanceView:
    """An instance with prompts of another model that take so long and are due before the asked
    request."""
    waiting = group_view("old", tokens=round(seconds / 0.0001), ttft=TTFT, deadline=due)
    return instance_view(number, groups=(waiting,), resident=["old"], **view)


def choose(
    policy: Appliance,
    *views: InstanceView,
    request: RequestView | None = None,
    now: float = NOW,
    costs: FixedCosts = COSTS,
) -> PrefillChoice | Refusal:
    answer = policy.prefill(now=now, request=request or asked(), instances=views, costs=costs)
    assert isinstance(answer, PrefillChoice | Refusal)
    return answer


def is_refused(
    *views: InstanceView, request: RequestView | None = None, costs: FixedCosts = COSTS
) -> bool:
    policy = Appliance(shed=Shed.HOPELESS)
    return isinstance(choose(policy, *views, request=request, costs=costs), Refusal)


def decoding(count: int, *, tbt: float = 0.1, due: float = NOW + 1, kv_tokens: int = 100) -> Any:
    """An instance where so many other models decode."""
    names = [f"m{index}" for index in range(count)]
    batches = [batch_view(name, tbt=tbt, deadline=due, kv_tokens=kv_tokens) for name in names]
    return instance_view(batches=tuple(batches), resident=[*names, "new"])


def test_a_request_that_is_late_everywhere_is_refused() -> None:
    """The first instance has prompts for thirteen seconds; the second for one less, half a second
    of steps that are due, and a switch."""
    answer = choose(Appliance(shed=Shed.HOPELESS), busy(0, 13.0), busy(1, 12.0))

    assert answer == Refusal(
        reason="new is overloaded: the first token would come after about 13.5 s, the target is"
        " 10 s; try again later"
    )


def test_by_default_nothing_is_refused() -> None:
    assert choose(Appliance(), busy(0, 13.0)) == PrefillChoice(instance=0)


def test_the_parameter_is_a_word_of_the_configuration() -> None:
    assert msgspec.convert({"shed": "hopeless"}, Appliance).shed is Shed.HOPELESS
    with pytest.raises(msgspec.ValidationError, match="shed"):
        msgspec.convert({"shed": "some"}, Appliance)


def test_a_tenth_of_the_target_is_tolerated() -> None:
    """With half a second of steps, it waits 10.9 and 11.1 seconds for others."""
    assert not is_refused(busy(0, 10.4))
    assert is_refused(busy(0, 10.6))


def test_a_request_goes_where_it_is_in_time() -> None:
    """All would be done first on the other instance, by five seconds; but what it does is due
    before the request, and what is done here is not."""
    policy = Appliance(shed=Shed.HOPELESS)
    later = busy(0, 17.0, due=NOW + 20)
    sooner = busy(1, 12.0)

    assert choose(Appliance(), later, sooner) == PrefillChoice(instance=1)
    assert choose(policy, later, sooner) == PrefillChoice(instance=0)


def test_batch_work_is_never_refused() -> None:
    assert not is_refused(busy(0, 13.0), request=asked(kind=RequestClass.BATCH))


def test_a_request_that_was_taken_on_is_never_refused() -> None:
    """It may have produced tokens."""
    request = msgspec.structs.replace(asked(), accepted=True)

    assert not is_refused(busy(0, 13.0), request=request)


def test_the_time_that_a_request_has_waited_already_counts() -> None:
    assert not is_refused(busy(0, 5.0))
    assert is_refused(busy(0, 5.0, due=NOW), request=asked(arrived=NOW - 6))


def test_a_request_for_the_model_that_runs_joins_at_once() -> None:
    """Prompts of other models wait for it; those of its own do not."""
    assert is_refused(busy(0, 13.0), request=asked("new"))
    assert not is_refused(busy(0, 13.0, current="new"), request=asked("new"))
    assert is_refused(busy(0, 13.0, current="old"), request=asked("old"))


def test_a_request_has_its_turn_when_others_of_its_model_have_theirs() -> None:
    """They are due before what takes so long."""
    mine = group_view("new", tokens=100, ttft=TTFT, deadline=NOW + 1)
    long = group_view("old", tokens=130_000, ttft=TTFT, deadline=NOW + 5)

    assert not is_refused(instance_view(groups=(mine, long), resident=["old"]))


def test_steps_are_due_at_the_pace_of_their_target() -> None:
    """Nine models decode, whose next tokens are due in a second. With steps of 10 ms for tokens of
    100 ms, they need nine tenths of the nine seconds from then on; with 20 ms, twice that."""
    slow = FixedCosts(step=0.02, per_token=0.0001, switch=1.0)

    assert not is_refused(decoding(9))
    assert is_refused(decoding(9), costs=slow)


def test_the_pace_is_that_of_the_target() -> None:
    """Of both, if theirs and its own are twice as long; and steps read KV."""
    slow = FixedCosts(step=0.02, per_token=0.0001, switch=1.0)
    reading = FixedCosts(step=0.01, per_token=0.0001, switch=1.0, per_kv_token=0.00001)

    request = asked(tbt=0.2)
    assert not is_refused(decoding(9, tbt=0.2), request=request, costs=slow)
    assert is_refused(decoding(9, tbt=0.1), costs=slow)
    assert not is_refused(decoding(9), costs=reading)
    assert is_refused(decoding(9, kv_tokens=1000), costs=reading)


def test_requests_that_wait_will_decode() -> None:
    """Twenty models with short prompts that are due in a second: their steps then take a tenth of
    the time each."""
    names = [f"m{index}" for index in range(20)]
    groups = tuple(group_view(name, tokens=1, ttft=TTFT, deadline=NOW + 1) for name in names)
    view = instance_view(groups=groups, resident=names)

    assert is_refused(view)
    assert not is_refused(view, costs=FixedCosts(step=0.001, per_token=0.0001))


class SharedSteps(FixedCosts):
    """A step takes as long for each request that shares it."""

    def step_seconds(self, model: str, requests: int = 1, kv_tokens: int = 0) -> float:
        return requests * super().step_seconds(model, requests, kv_tokens)


def test_what_waits_shares_the_steps_of_what_decodes() -> None:
    """Four models: with two requests that wait, a step takes three times as long as with none."""
    names = [f"m{index}" for index in range(4)]
    batches = tuple(batch_view(name, deadline=NOW) for name in names)
    groups = tuple(group_view(name, 2, tokens=2, ttft=TTFT, deadline=NOW + 9) for name in names)
    costs = SharedSteps(step=0.01, per_token=0.0001)
    view = instance_view(batches=batches, resident=names)

    assert not is_refused(view, costs=costs)
    assert is_refused(msgspec.structs.replace(view, groups=groups), costs=costs)


def test_steps_count_from_now_on() -> None:
    """Nine models whose tokens are late by 0.9 s need 1.08 of the time; of ten seconds, not of
    10.9."""
    assert not is_refused(decoding(9, due=NOW - 0.9), costs=FixedCosts(step=0.012))


def test_batch_work_that_waits_makes_no_steps_due() -> None:
    """Its prompts are due now; the answers of twelve models only in nine seconds."""
    names = [f"m{index}" for index in range(12)]
    groups = [group_view(name, tokens=1, ttft=TTFT, deadline=NOW + 9) for name in names]
    groups += [group_view(name, tokens=1, ttft=TTFT, deadline=NOW, interactive=0) for name in names]

    assert not is_refused(instance_view(groups=tuple(groups), resident=names))


@pytest.mark.parametrize("tbt", [1e-3, 1e-9])
@pytest.mark.parametrize("due", [NOW + 0.1, NOW - 9])
def test_a_target_that_none_can_keep_has_no_others_refused(tbt: float, due: float) -> None:
    """However many models one client asks for with it: they count at the pace of the others."""
    assert not is_refused(decoding(3, tbt=tbt, due=due))
    strict = asked(ttft=TTFT, tbt=tbt)
    assert not is_refused(decoding(1, tbt=tbt, due=due), request=strict)


# --- what a request costs itself -----------------------------------------------------------------


def test_an_instance_without_work_never_refuses() -> None:
    """A switch, or a prompt, that takes longer than the target; or a request that waited until an
    instance came up."""
    slow = FixedCosts(step=0.01, per_token=0.0001, switch=12.0)

    assert not is_refused(instance_view(0), instance_view(1), costs=slow)
    assert not is_refused(instance_view(resident=["new"]), request=asked(tokens=120_000))
    assert not is_refused(instance_view(), request=asked(arrived=NOW - 12))


def test_nor_while_another_instance_is_idle() -> None:
    """The first token comes first where the weights are, after 11.5 s; that is late, but nothing
    keeps the request waiting elsewhere."""
    slow = FixedCosts(step=0.01, per_token=0.0001, switch=12.0)
    waiting = group_view("old", tokens=113_000, ttft=TTFT, deadline=NOW + 9)
    view = instance_view(0, groups=(waiting,), resident=["old", "new"])

    assert is_refused(view, costs=slow)
    assert not is_refused(view, instance_view(1), costs=slow)


def test_requests_that_come_back_late_do_not_count_each_other_as_load() -> None:
    """All instances were away for longer than their target: with one of them placed, the others
    have their target from now."""
    first = group_view("new", tokens=100, ttft=TTFT, deadline=NOW - 2)

    assert not is_refused(instance_view(groups=(first,)), request=asked(arrived=NOW - 12))
    many = group_view("new", waiting=12, tokens=120_000, ttft=TTFT, deadline=NOW - 2)
    assert is_refused(instance_view(groups=(many,)), request=asked(arrived=NOW - 12))


def test_what_would_be_a_little_late_goes_where_it_is_in_time() -> None:
    """The tolerance is for refusals: here it would come after 10.5 s, there at once."""
    later = busy(0, 17.0, due=NOW + 20)
    policy = Appliance(shed=Shed.HOPELESS)

    assert choose(policy, later, busy(1, 9.0)) == PrefillChoice(instance=0)


# --- what waits before it ------------------------------------------------------------------------


def waiting_batch(model: str, seconds: float) -> Any:
    tokens = round(seconds / 0.0001)
    return group_view(
        model, waiting=100, tokens=tokens, ttft=3600.0, deadline=NOW + 3600, interactive=0
    )


def test_batch_prompts_have_no_interactive_requests_refused() -> None:
    """Of the same model, nor of another one of which an interactive request is due before."""
    soon = group_view("old", tokens=10, ttft=TTFT, deadline=NOW + 5)

    own = instance_view(groups=(waiting_batch("new", 15.0),), resident=["new"])
    assert not is_refused(own)
    other = instance_view(groups=(soon, waiting_batch("old", 15.0)), resident=["new", "old"])
    assert not is_refused(other)


def test_interactive_prompts_of_its_model_count() -> None:
    group = group_view("new", waiting=10, tokens=120_000, ttft=TTFT, deadline=NOW + 5)

    assert is_refused(instance_view(groups=(group,), resident=["new"]))


def test_a_longest_gap_asks_for_no_more_steps() -> None:
    """Twelve models whose next tokens are due in nine seconds as scheduled, and in none for their
    gap."""
    batches = tuple(
        msgspec.structs.replace(
            batch_view(f"m{n}", deadline=NOW + 0.1, tbt=0.1),
            scheduled=(NOW + 9,),
            slo=Slo(ttft_seconds=TTFT, tbt_seconds=0.1, gap_seconds=1.0),
        )
        for n in range(12)
    )

    assert not is_refused(instance_view(batches=batches, resident=[f"m{n}" for n in range(12)]))


def test_a_prompt_that_is_computed_counts_until_it_is_done() -> None:
    """It takes twelve seconds, and nothing else is there."""
    policy = Appliance(shed=Shed.HOPELESS)
    view = instance_view(computing=120_000, current="old", resident=["old"])

    assert isinstance(choose(policy, view), Refusal)
    assert isinstance(choose(policy, view, now=NOW + 0.5), Refusal)
    later = asked(arrived=NOW + 2)
    assert not isinstance(choose(policy, view, request=later, now=NOW + 2), Refusal)


def test_while_an_instance_rests_none_is_refused() -> None:
    """It opens within a second."""
    open_, resting = busy(0, 13.0), instance_view(1, kind=InstanceClass.PARKED)
    policy = Appliance(shed=Shed.HOPELESS)

    policy.place(now=NOW, cluster=cluster_view([open_, resting], model_view("new")), costs=COSTS)
    assert not isinstance(choose(policy, open_), Refusal)
    both = [open_, instance_view(1)]
    policy.place(now=NOW, cluster=cluster_view(both, model_view("new")), costs=COSTS)
    assert isinstance(choose(policy, open_), Refusal)


def test_an_instance_that_is_told_to_rest_counts_from_then_on() -> None:
    policy = Appliance(shed=Shed.HOPELESS, park=True, park_seconds=1.0)
    idle = cluster_view(3, model_view("new", arrivals=0.0))
    for now in (NOW - 5, NOW):
        policy.place(now=now, cluster=idle, costs=COSTS)
        policy.scale(now=now, cluster=idle, costs=COSTS)

    assert not isinstance(choose(policy, busy(0, 13.0)), Refusal)


def test_what_is_embedded_is_never_refused() -> None:
    request = msgspec.structs.replace(asked(), max_tokens=0)

    assert not is_refused(busy(0, 13.0), request=request)


def test_each_model_that_is_away_takes_as_long_as_its_weights() -> None:
    """Their prompts are short."""
    groups = tuple(group_view(f"m{n}", tokens=1, ttft=TTFT, deadline=NOW + 5) for n in range(12))

    assert is_refused(instance_view(groups=groups))
    assert not is_refused(instance_view(groups=groups, resident=[f"m{n}" for n in range(12)]))


def test_what_an_instance_has_to_do_is_kept_for_a_while() -> None:
    """The instance has worked meanwhile; and it is looked at anew when requests came or went, or
    after a second."""
    policy = Appliance(shed=Shed.HOPELESS)
    request = asked(ttft=9.0)
    slow, fast = busy(0, 10.0, membership_version=1), busy(0, 1.0, membership_version=1)

    assert isinstance(choose(policy, slow, request=request), Refusal)
    assert isinstance(choose(policy, fast, request=request), Refusal)
    soon = asked(arrived=NOW + 0.9, ttft=9.5)
    assert not isinstance(choose(policy, fast, request=soon, now=NOW + 0.9), Refusal)
    assert isinstance(choose(policy, busy(0, 11.0, membership_version=2)), Refusal)
    later = NOW + FRESH_SECONDS + 0.1
    assert not isinstance(choose(policy, busy(0, 1.0, membership_version=2), now=later), Refusal)


def test_requests_that_are_taken_on_end_whatever_happens() -> None:
    """In the real machine, with far more than can be in time: who is refused has no token, and who
    is not has all of them, though an instance is lost on the way."""
    policy = Appliance(shed=Shed.HOPELESS)
    models = {f"m{index}": ModelDouble(12, shape(4, 1, 600)) for index in range(5)}
    cluster = ClusterDouble(models, stranger=policy, instances=2, slabs=24, host_slabs=300)
    cluster.start()
    cluster.settle()
    for index in range(80):
        cluster.ask(f"r{index}", f"m{index % 5}", prompt=40, output=30)
        if index == 60:
            cluster.work(0)
            cluster.lose(1)
            cluster.start(1)
    cluster.settle()

    outcomes = [life.outcome for life in cluster.world.lives.values()]
    assert set(outcomes) <= {FinishReason.STOP, FinishReason.LENGTH, "overloaded"}
    assert not cluster.machine.requests
    for life in cluster.world.lives.values():
        assert life.produced == (0 if life.outcome == "overloaded" else life.output_tokens)
    watchful = cluster.machine._context.policy.stack  # type: ignore[attr-defined]
    assert isinstance(watchful, PolicyStack)
    assert not watchful.faults
