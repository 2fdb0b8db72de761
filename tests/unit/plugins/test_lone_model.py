"""A model that has the box to itself, through the policy's hooks: who prefills, who decodes."""

from __future__ import annotations

import pytest
from msgspec import structs

from appliance.plugins.appliance import APART_TURN_SECONDS, Appliance
from appliance.plugins.lone_model import SETTLING_SECONDS
from appliance.plugins.shedding import Shed
from appliance.scheduling.policy_api import (
    InstanceView,
    ModelView,
    PrefillChoice,
    Refusal,
    RequestView,
)
from appliance.vocabulary import InstanceClass, Slo
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


class SummaryCosts(FixedCosts):
    """Prompts of 6,500 tokens take 0.8 s; a step 23 ms, and 0.8 ms more for each request."""

    def step_seconds(self, model: str, requests: int = 1, kv_tokens: int = 0) -> float:
        return 0.0234 + 1.1e-7 * kv_tokens + 6e-5 * requests


COSTS = SummaryCosts(per_token=0.00012)
PROMPT, TTFT, TBT = 6500, 6.0, 0.05
KV_TOKEN_BYTES = 192 << 10
SECONDS = 20


def lone(number: int, requests: int = 0, *, waiting: int = 0, free: int = 40 * GIB) -> InstanceView:
    """One of four instances, where so many decode and so many prompts wait."""
    tokens = requests * (PROMPT + 150)
    batch = batch_view("a", requests, kv_tokens=tokens, tbt=TBT, deadline=200.0)
    group = group_view("a", waiting, tokens=waiting * PROMPT, ttft=TTFT, deadline=200.0)
    return instance_view(
        number,
        batches=(batch,) if requests else (),
        groups=(group,) if waiting else (),
        resident=["a"],
        current="a",
        free_bytes=free,
        kv_bytes=tokens * KV_TOKEN_BYTES,
    )


def summary(arrived: float = float(SECONDS)) -> RequestView:
    return request_view("a", name="new", tokens=PROMPT, arrived=arrived, ttft=TTFT, tbt=TBT)


def model(rate: float = 1.2, name: str = "a", requests: int = 20) -> ModelView:
    return model_view(
        name,
        ttft=TTFT,
        tbt=TBT,
        arrivals=rate,
        output=300.0,
        requests=requests,
        kv_bytes_per_token=KV_TOKEN_BYTES,
    )


def told(policy: Appliance, views: list[InstanceView], *others: ModelView) -> None:
    """Seconds of the same."""
    asked = model(0.3 * len(views))
    for second in range(SECONDS):
        policy.place(now=float(second), cluster=cluster_view(views, asked, *others), costs=COSTS)
        policy.prefill(
            now=float(second), request=summary(float(second)), instances=views, costs=COSTS
        )


FOUR = [lone(number, 4) for number in range(4)]


def apart(views: list[InstanceView] | None = None) -> Appliance:
    policy = Appliance(separate=True)
    told(policy, views or FOUR)
    return policy


def sides(policy: Appliance, instances: int = 4) -> tuple[set[int], set[int]]:
    """Of idle instances, those where prompts go, and those where they decode then."""
    numbers, prefill = range(instances), set()
    for _ in numbers:
        shown = [lone(number, waiting=3 if number in prefill else 0) for number in numbers]
        choice = policy.prefill(now=float(SECONDS), request=summary(), instances=shown, costs=COSTS)
        prefill.add(choice.instance)
    views = [lone(number) for number in numbers]
    decode = {
        policy.decode(request=summary(), prefilled_on=number, instances=views, costs=COSTS)
        for number in numbers
    }
    return prefill, decode


def test_a_lone_model_with_long_prompts_has_instances_that_only_prefill() -> None:
    prefill, decode = sides(apart())

    assert prefill
    assert decode
    assert not prefill & decode


def test_a_request_that_is_placed_again_is_no_new_one() -> None:
    policy = apart()
    before = sides(policy)
    again = structs.replace(summary(arrived=0.0), tokens=1)
    for _ in range(1000):
        policy.prefill(now=float(SECONDS), request=again, instances=FOUR, costs=COSTS)
    for second in range(SECONDS, 2 * SECONDS):
        policy.place(now=float(second), cluster=cluster_view(FOUR, model()), costs=COSTS)

    assert sides(policy) == before


def test_a_model_that_shares_its_instances_has_none() -> None:
    """Nor one whose work is in part batch work, or that is in place on some only."""
    policy = Appliance(separate=True)
    told(policy, FOUR, model(name="b"))
    assert sides(policy)[1] == {0, 1, 2, 3}

    batch = group_view("a", 2, interactive=1, deadline=200.0, ttft=TTFT)
    for other in (
        instance_view(3, groups=(batch,), resident=["a"]),
        instance_view(3, batches=(batch_view("a", 2, interactive=1),), resident=["a"]),
        instance_view(3),
    ):
        assert sides(apart([*FOUR[:3], other]))[1] == {0, 1, 2, 3}


def test_instances_that_do_not_serve_it_do_not_count() -> None:
    others = [
        instance_view(2, up=False),
        instance_view(3, models=frozenset("b")),
        instance_view(4, kind=InstanceClass.BATCH, resident=["a"]),
    ]

    assert sides(apart([*FOUR[:2], *others]))[1] == {0, 1, 2, 3}


def test_with_the_work_of_another_model_all_mix_again() -> None:
    policy = apart()
    cluster = cluster_view(FOUR, model(), model(name="b", requests=1))
    policy.place(now=float(SECONDS), cluster=cluster, costs=COSTS)

    assert sides(policy)[1] == {0, 1, 2, 3}


def test_without_work_nothing_is_apart() -> None:
    policy = apart()
    cluster = cluster_view(FOUR, model(rate=0.0, requests=0))
    policy.place(now=float(SECONDS), cluster=cluster, costs=COSTS)

    assert sides(policy)[1] == {0, 1, 2, 3}


def test_an_instance_that_goes_takes_the_sides_with_it() -> None:
    policy = apart()
    policy.place(now=float(SECONDS), cluster=cluster_view(FOUR[:1], model()), costs=COSTS)

    assert sides(policy)[1] == {0, 1, 2, 3}


def test_a_prompt_that_would_be_late_goes_where_others_decode_with_time_left() -> None:
    policy = apart()
    prefill, decode = sides(policy)
    views = [lone(number, waiting=20 if number in prefill else 0) for number in range(4)]

    def chosen(shown: list[InstanceView]) -> int:
        choice = policy.prefill(now=float(SECONDS), request=summary(), instances=shown, costs=COSTS)
        return choice.instance

    assert chosen(views) in decode
    full = [lone(v.id, free=GIB) if v.id in decode else v for v in views]
    assert chosen(full) in prefill
    slow = [lone(v.id, 40) if v.id in decode else v for v in views]
    assert chosen(slow) in prefill
    assert chosen([v for v in views if v.id in decode]) in decode


def test_a_request_decodes_where_least_is_read_and_there_is_room() -> None:
    policy = apart()
    prefill, decode = sides(policy)
    first = min(prefill)

    def chosen(**of: InstanceView) -> int:
        views = [of.get(f"i{number}", lone(number)) for number in range(4)]
        return policy.decode(request=summary(), prefilled_on=first, instances=views, costs=COSTS)

    here = min(decode)
    assert policy.decode(request=summary(), prefilled_on=here, instances=FOUR, costs=COSTS) == here
    assert chosen() in decode
    full = {f"i{number}": lone(number, free=GIB // 8) for number in decode}
    assert chosen(**full) == first
    slow = {f"i{number}": lone(number, 40) for number in decode}
    assert chosen(**slow) == first


def test_an_instance_that_decodes_gets_no_more_requests_than_a_step_has() -> None:
    policy = Appliance(separate=True)
    asked = structs.replace(model(), max_batch=12)
    for second in range(SECONDS):
        now = float(second)
        policy.place(now=now, cluster=cluster_view(FOUR, asked), costs=COSTS)
        policy.prefill(now=now, request=summary(now), instances=FOUR, costs=COSTS)
    prefill, decode = sides(policy)
    assert prefill
    first = min(prefill)

    def chosen(requests: int) -> int:
        views = [lone(n, requests if n in decode else 0) for n in range(4)]
        return policy.decode(request=summary(), prefilled_on=first, instances=views, costs=COSTS)

    assert chosen(11) in decode
    assert chosen(12) == first
    views = [lone(number, 10 if number in decode else 0) for number in range(4)]
    moves = policy.flow(
        instance=views[first],
        requests=[decoding_view(f"r{n}", tokens=PROMPT, tbt=TBT) for n in range(60)],
        others=[view for view in views if view.id != first],
        costs=COSTS,
    )
    assert len(moves) == 2 * len(decode)


def test_an_instance_that_decodes_gets_no_more_sequences_than_it_may_have() -> None:
    """Prompts that are computed there become some."""
    policy = Appliance()
    asked = structs.replace(model(), max_batch=64, max_sequences=12)
    for second in range(SECONDS):
        now = float(second)
        policy.place(now=now, cluster=cluster_view(FOUR, asked), costs=COSTS)
        policy.prefill(now=now, request=summary(now), instances=FOUR, costs=COSTS)
    prefill, decode = sides(policy)
    first = min(prefill)

    def chosen(requests: int, computing: int = 0) -> int:
        views = [lone(n, requests if n in decode else 0) for n in range(4)]
        views = [structs.replace(view, computing_requests=computing) for view in views]
        return policy.decode(request=summary(), prefilled_on=first, instances=views, costs=COSTS)

    assert chosen(11) in decode
    assert chosen(12) == first
    assert chosen(9, computing=2) in decode
    assert chosen(10, computing=2) == first
    views = [lone(number, 10 if number in decode else 0) for number in range(4)]
    moves = policy.flow(
        instance=views[first],
        requests=[decoding_view(f"r{n}", tokens=PROMPT, tbt=TBT) for n in range(60)],
        others=[view for view in views if view.id != first],
        costs=COSTS,
    )
    assert len(moves) == 2 * len(decode)


def test_what_decodes_where_prompts_are_computed_goes_on_elsewhere() -> None:
    policy = apart()
    prefill, decode = sides(policy)
    requests = [decoding_view(f"r{n}", tokens=PROMPT, tbt=TBT) for n in range(60)]
    views = [lone(number) for number in range(4)]
    first = min(prefill)
    others = [view for view in views if view.id != first]

    moves = policy.flow(instance=views[first], requests=requests, others=others, costs=COSTS)

    assert {move.target for move in moves} == decode
    assert 0 < len(moves) < len(requests), "some are left where the others have no room"
    here = views[min(decode)]
    assert not policy.flow(instance=here, requests=requests, others=others, costs=COSTS)


def test_where_nothing_is_apart_the_next_policy_says_what_goes_elsewhere() -> None:
    requests = [decoding_view("r", tokens=PROMPT, tbt=TBT)]
    for policy, number in ((Appliance(separate=True), 0), (apart(), min(sides(apart())[1]))):
        others = [view for view in FOUR if view.id != number]
        answer = policy.flow(instance=FOUR[number], requests=requests, others=others, costs=COSTS)
        assert answer is None


def test_turns_are_short_so_that_requests_whose_kv_came_join() -> None:
    policy, mixed = apart(), Appliance(separate=False)
    view = instance_view(
        3,
        batches=(batch_view("a", deadline=200.0),),
        groups=(),
        turn="a",
        turn_began=0.0,
        current="a",
        resident=["a"],
    )

    def quota(of: Appliance) -> float:
        return of.round(now=0.0, instance=view, costs=COSTS)[0].quota_seconds

    assert quota(policy) == APART_TURN_SECONDS < quota(mixed)
    left = policy.preempt(now=0.04, instance=view, costs=COSTS)
    assert left == pytest.approx(APART_TURN_SECONDS - 0.04)
    assert mixed.preempt(now=0.04, instance=view, costs=COSTS) > left


def test_turns_stay_short_until_kv_that_was_on_its_way_has_come() -> None:
    policy = apart()
    view = instance_view(
        3, batches=(batch_view("a", deadline=200.0),), turn="a", current="a", resident=["a"]
    )

    def quota(now: float) -> float:
        return policy.round(now=now, instance=view, costs=COSTS)[0].quota_seconds

    last = float(SECONDS - 1)
    others = cluster_view(FOUR, model(), model(name="b", requests=1))
    policy.place(now=last + 1, cluster=others, costs=COSTS)
    assert sides(policy)[1] == {0, 1, 2, 3}

    assert quota(last + SETTLING_SECONDS - 0.1) == APART_TURN_SECONDS
    assert quota(last + SETTLING_SECONDS) > APART_TURN_SECONDS


def test_a_long_turn_that_began_before_ends_for_kv_that_comes_and_does_not_go_on() -> None:
    """With 0 it would go on for the rest of its quota once the request has joined."""
    view = instance_view(
        3,
        batches=(batch_view("a", deadline=200.0),),
        turn="a",
        turn_began=0.0,
        current="a",
        resident=["a"],
    )

    assert 0 < apart().preempt(now=float(SECONDS), instance=view, costs=COSTS) < 0.01


def test_one_strict_stream_does_not_decide_the_chunks_of_all() -> None:
    """While instances are apart. It does where they mix."""
    batch = batch_view("a", 4, kv_tokens=4 * PROMPT, tbt=0.02, deadline=100.0)
    view = instance_view(
        0,
        batches=(batch,),
        groups=(group_view("a", tokens=PROMPT, deadline=100.0),),
        current="a",
        resident=["a"],
    )

    def chunk(of: Appliance, shown: InstanceView) -> int:
        return of.batch(now=float(SECONDS), model="a", instance=shown, costs=COSTS).chunk_tokens

    usual = structs.replace(
        view, batches=(structs.replace(batch, slo=Slo(ttft_seconds=TTFT, tbt_seconds=TBT)),)
    )
    assert chunk(apart(), view) == chunk(apart(), usual) > 0
    assert chunk(Appliance(), view) == 0


def test_a_prompt_in_a_hurry_makes_no_steps_late_where_instances_are_apart() -> None:
    view = instance_view(
        0,
        batches=(batch_view("a", 4, kv_tokens=4 * PROMPT, tbt=TBT, deadline=100.0),),
        groups=(group_view("a", tokens=PROMPT, deadline=SECONDS + 0.9),),
        current="a",
        resident=["a"],
    )

    def chunk(of: Appliance) -> int:
        return of.batch(now=float(SECONDS), model="a", instance=view, costs=COSTS).chunk_tokens

    assert chunk(Appliance()) == 0
    assert 0 < COSTS.prefill_seconds("a", chunk(apart())) < TBT


@pytest.mark.parametrize(("late", "step"), [("prompts", 1), ("steps", -1), ("both", 0)])
def test_the_number_of_those_that_prefill_follows_what_is_late(late: str, step: int) -> None:
    views = [lone(number, 4) for number in range(30)]
    policy = apart(views)
    prefill, _ = sides(policy, 30)
    waits = instance_view(
        0, groups=(group_view("a", deadline=0.0, ttft=TTFT),), resident=["a"], kv_bytes=0
    )
    if late in ("prompts", "both"):
        views = [
            structs.replace(waits, id=view.id) if view.id in prefill else view for view in views
        ]
    if late in ("steps", "both"):
        views = [view if view.id in prefill else lone(view.id, 60) for view in views]

    for second in range(SECONDS, SECONDS + 3):
        policy.place(now=float(second), cluster=cluster_view(views, model(8.0)), costs=COSTS)

    assert len(sides(policy, 30)[0]) == len(prefill) + step


def test_where_all_steps_are_too_long_prompts_go_where_fewest_wait() -> None:
    views = [lone(number, 4) for number in range(16)]
    policy = apart(views)
    prefill, _ = sides(policy, 16)
    assert len(prefill) > 1
    shown = {view.id: view.id in prefill for view in views}
    waiting = dict.fromkeys(prefill, 0)
    for _ in range(10 * len(prefill)):
        full = [lone(n, 60, waiting=waiting.get(n, 0)) for n in shown]
        choice = policy.prefill(now=float(SECONDS), request=summary(), instances=full, costs=COSTS)
        waiting[choice.instance] += 1

    assert set(waiting.values()) == {10}


def test_a_model_that_was_busy_among_others_is_asked_no_more_when_it_is_alone() -> None:
    policy = Appliance(separate=True)
    quiet = model(rate=0.4)
    for second in range(3 * SECONDS):
        others = [model(name="b")] if second < SECONDS else []
        now = float(second)
        policy.place(now=now, cluster=cluster_view(FOUR, quiet, *others), costs=COSTS)
        policy.prefill(now=now, request=summary(now), instances=FOUR, costs=COSTS)
        assert sides(policy)[1] == {0, 1, 2, 3}


def test_a_model_that_only_embeds_has_no_instances_that_decode() -> None:
    """Nor one whose requests come to be such: that is known after some hundred."""
    policy, was_apart = Appliance(separate=True), apart()
    for second in range(SECONDS, 2 * SECONDS):
        now = float(second)
        for one in (policy, was_apart):
            one.place(now=now, cluster=cluster_view(FOUR, model()), costs=COSTS)
            for part in range(40):
                embedded = structs.replace(summary(now + part / 40), max_tokens=0)
                one.prefill(now=now, request=embedded, instances=FOUR, costs=COSTS)

    assert sides(policy)[1] == {0, 1, 2, 3}
    assert sides(was_apart)[1] == {0, 1, 2, 3}


def test_a_prompt_with_a_target_of_its_own_is_late_by_that() -> None:
    """A second is enough for a prompt that has one second, however long others may take: no
    more instances compute prompts than without it. A tenth of it is not."""
    assert _prefilling(1.0) == _prefilling(None)
    assert _prefilling(0.1) == 1 + _prefilling(None)


def _prefilling(left_seconds: float | None) -> int:
    """How many instances compute prompts after a while in which a prompt waits on each, with so
    much of its second left."""
    views = [lone(number, 4) for number in range(16)]
    policy = apart(views)
    prefill, _ = sides(policy, 16)
    hurried = group_view("a", ttft=1.0)
    for second in range(SECONDS, SECONDS + 15):
        shown = views
        if left_seconds is not None:
            waits = structs.replace(hurried, deadline=second + left_seconds)
            shown = [
                structs.replace(view, groups=(waits,)) if view.id in prefill else view
                for view in views
            ]
        policy.place(now=float(second), cluster=cluster_view(shown, model(4.0)), costs=COSTS)
    return len(sides(policy, 16)[0])


@pytest.mark.parametrize("tbt", [0.02, 5.0])
def test_a_request_with_a_target_of_its_own_makes_no_steps_of_others_late(tbt: float) -> None:
    """A strict one does not stay among prompts, a loose one does not join full steps."""
    policy = apart()
    prefill, decode = sides(policy)
    own = structs.replace(summary(), slo=Slo(ttft_seconds=TTFT, tbt_seconds=tbt))

    def chosen(requests: int) -> int:
        views = [lone(n, requests if n in decode else 0) for n in range(4)]
        return policy.decode(request=own, prefilled_on=min(prefill), instances=views, costs=COSTS)

    assert chosen(4) in decode
    assert chosen(40) == min(prefill)


def test_nothing_is_apart_if_that_is_asked_for() -> None:
    policy, as_it_ships = Appliance(separate=False), Appliance()
    for one in (policy, as_it_ships):
        told(one, FOUR)

    assert sides(policy)[1] == {0, 1, 2, 3}
    assert sides(as_it_ships) == sides(apart())


def test_weights_of_idle_models_leave_room_for_kv() -> None:
    """As much as what is free: the same number prefills, and what decodes goes there."""
    full = [structs.replace(view, free_bytes=0, idle_bytes=view.free_bytes) for view in FOUR]
    policy = apart(full)
    prefill, decode = sides(policy)
    assert (prefill, decode) == sides(apart())

    idle = [structs.replace(lone(n, free=0), idle_bytes=40 * GIB) for n in range(4)]
    first = min(prefill)
    assert (
        policy.decode(request=summary(), prefilled_on=first, instances=idle, costs=COSTS) in decode
    )
    late = [
        structs.replace(view, groups=lone(0, waiting=20).groups) if view.id in prefill else view
        for view in idle
    ]
    choice = policy.prefill(now=float(SECONDS), request=summary(), instances=late, costs=COSTS)
    assert choice.instance in decode

    pinned = [structs.replace(view, idle_bytes=0) for view in full]
    assert sides(apart(pinned))[1] == {0, 1, 2, 3}


@pytest.mark.parametrize(("gigabytes", "any_apart"), [(300, True), (10, True), (1, False)])
def test_a_link_that_is_too_slow_for_kv_keeps_all_mixed(gigabytes: int, any_apart: bool) -> None:
    policy = Appliance()
    costs = SummaryCosts(per_token=0.00012, link_bytes_per_second=1e9 * gigabytes)
    for second in range(SECONDS):
        now = float(second)
        policy.place(now=now, cluster=cluster_view(FOUR, model()), costs=costs)
        policy.prefill(now=now, request=summary(now), instances=FOUR, costs=costs)

    assert (sides(policy)[1] != {0, 1, 2, 3}) == any_apart


def test_where_steps_wait_for_kv_an_instance_decodes_fewer_requests() -> None:
    def most(gigabytes: int) -> int:
        policy = Appliance()
        costs = SummaryCosts(per_token=0.00012, link_bytes_per_second=1e9 * gigabytes)
        for second in range(SECONDS):
            now = float(second)
            policy.place(now=now, cluster=cluster_view(FOUR, model()), costs=costs)
            policy.prefill(now=now, request=summary(now), instances=FOUR, costs=costs)
        prefill, decode = sides(policy)

        def takes(requests: int) -> bool:
            views = [lone(n, requests if n in decode else 0) for n in range(4)]
            target = policy.decode(
                request=summary(), prefilled_on=min(prefill), instances=views, costs=costs
            )
            return target in decode

        return next(requests for requests in range(60) if not takes(requests))

    assert 0 < most(10) < most(300)


def test_as_long_as_costs_do_not_know_what_a_request_adds_nothing_is_apart() -> None:
    """Decoding would look free."""
    policy = Appliance()
    flat = FixedCosts(step=0.0234, per_token=0.00012)
    for second in range(SECONDS):
        now = float(second)
        policy.place(now=now, cluster=cluster_view(FOUR, model()), costs=flat)
        policy.prefill(now=now, request=summary(now), instances=FOUR, costs=flat)

    assert sides(policy)[1] == {0, 1, 2, 3}


@pytest.mark.parametrize("separated", [True, False])
def test_without_any_instance_that_is_up_nothing_fails(separated: bool) -> None:
    policy = apart() if separated else Appliance()
    down = [structs.replace(view, up=False) for view in FOUR]
    for second in range(SECONDS, SECONDS + 3):
        cluster = cluster_view(down, model())
        assert len(policy.place(now=float(second), cluster=cluster, costs=COSTS)) == len(down)

    assert sides(policy)[1] == {0, 1, 2, 3}


def test_an_instance_that_comes_back_without_the_model_gets_prompts_at_the_next_plan() -> None:
    policy = apart()
    prefill, _ = sides(policy)
    lost = min(prefill)
    empty = structs.replace(instance_view(lost), current_model=None)
    for down in (structs.replace(empty, up=False), empty):
        views = [down if view.id == lost else lone(view.id, 4, waiting=3) for view in FOUR]
        policy.place(now=float(SECONDS), cluster=cluster_view(views, model()), costs=COSTS)

    choice = policy.prefill(now=float(SECONDS), request=summary(), instances=views, costs=COSTS)
    assert choice.instance == lost


def test_none_is_refused_while_instances_are_apart() -> None:
    """Nor where only those that decode are offered, as the others are short of room for KV."""
    policy = Appliance(separate=True, shed=Shed.HOPELESS)
    told(policy, FOUR)
    decode = sides(policy)[1]
    busy = [lone(number, 4, waiting=60) for number in decode]
    answer = policy.prefill(now=float(SECONDS), request=summary(), instances=busy, costs=COSTS)
    assert isinstance(answer, PrefillChoice)
    assert answer.instance in decode

    mixed = Appliance(separate=False, shed=Shed.HOPELESS)
    told(mixed, FOUR)
    answer = mixed.prefill(now=float(SECONDS), request=summary(), instances=busy, costs=COSTS)
    assert isinstance(answer, Refusal)
