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
from appliance.vocabulary import FinishReason, RequestClass
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    FixedCosts,
    batch_view,
    group_view,
    instance_view,
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
    policy: Appliance, *views: InstanceView, request: RequestView | None = None, now: float = NOW
) -> PrefillChoice | Refusal:
    answer = policy.prefill(now=now, request=request or asked(), instances=views, costs=COSTS)
    assert isinstance(answer, PrefillChoice | Refusal)
    return answer


def is_refused(*views: InstanceView, request: RequestView | None = None) -> bool:
    return isinstance(choose(Appliance(shed=Shed.HOPELESS), *views, request=request), Refusal)


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
    """With steps and a switch, it comes after 10.9 and 11.1 seconds."""
    assert not is_refused(busy(0, 9.4))
    assert is_refused(busy(0, 9.6))


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
    names = [f"m{index}" for index in range(9)]
    batches = tuple(batch_view(name, deadline=NOW + 1) for name in names)
    view = instance_view(batches=batches, resident=names)
    policy = Appliance(shed=Shed.HOPELESS)
    slow = FixedCosts(step=0.02, per_token=0.0001, switch=1.0)

    assert not is_refused(view)
    refused = policy.prefill(now=NOW, request=asked(), instances=[view], costs=slow)
    assert isinstance(refused, Refusal)


def test_each_model_that_is_away_takes_as_long_as_its_weights() -> None:
    """Their prompts are short."""
    groups = tuple(group_view(f"m{n}", tokens=1, ttft=TTFT, deadline=NOW + 5) for n in range(11))

    assert is_refused(instance_view(groups=groups))
    assert not is_refused(instance_view(groups=groups, resident=[f"m{n}" for n in range(11)]))


def test_what_an_instance_has_to_do_is_kept_for_a_while() -> None:
    """The instance has worked meanwhile; and it is looked at anew when requests came or went, or
    after a second."""
    policy = Appliance(shed=Shed.HOPELESS)
    request = asked(ttft=9.9)
    slow, fast = busy(0, 10.0, membership_version=1), busy(0, 1.0, membership_version=1)

    assert isinstance(choose(policy, slow, request=request), Refusal)
    assert isinstance(choose(policy, fast, request=request), Refusal)
    soon = asked(arrived=NOW + 0.9, ttft=9.9)
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
