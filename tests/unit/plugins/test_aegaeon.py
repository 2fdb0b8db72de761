"""Aegaeon's equations and algorithms, against the numbers of the paper and by their claims."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from appliance.plugins.aegaeon import Aegaeon, queued_seconds, quotas
from appliance.policies.loader import PolicyStack
from appliance.scheduling.cost_model import CostModel
from appliance.scheduling.policy_api import (
    BatchLimits,
    Fleet,
    Phase,
    Placement,
    PlannedTurn,
    PrefillChoice,
)
from appliance.vocabulary import ModelSpec, Role, RunTurn, Slo
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

Q_MAX = 4.0
FLOOR = 0.5
COSTS = FixedCosts()


def test_the_worked_example() -> None:
    """Three equal batches with three seconds of switches run three seconds each (alpha = 1)."""
    assert quotas([0.1] * 3, [0.025] * 3, 3.0, 3.0, FLOOR) == pytest.approx([3.0] * 3)


def test_the_round_of_the_worked_example() -> None:
    """A round of it takes 12 s, in which every model makes 120 tokens, as many as are read."""
    lengths = quotas([0.1] * 3, [0.025] * 3, 3.0, 3.0, FLOOR)

    whole = 3.0 + sum(lengths)
    assert whole == pytest.approx(12.0)
    assert lengths[0] / 0.025 == pytest.approx(120)


def test_unequal_steps() -> None:
    """A slower model gets a longer turn, the slowest one Q_MAX; all attain the same 0.58."""
    steps = [0.02, 0.03, 0.05, 0.04]

    lengths = quotas([0.1] * 4, steps, 2.6, Q_MAX, FLOOR)

    assert lengths == pytest.approx([1.6, 2.4, 4.0, 3.2])
    whole = 2.6 + sum(lengths)
    assert whole == pytest.approx(13.8)
    attained = [q / t * 0.1 / whole for q, t in zip(lengths, steps, strict=True)]
    assert attained == pytest.approx([1 / 1.725] * 4)


def test_the_floor_of_alpha() -> None:
    """A model far ahead of its deadlines is cut short: alpha is no smaller than its floor, so that
    no request is served more than twice as fast as it is read."""
    lengths = quotas([0.1], [0.02], 0.8, Q_MAX, FLOOR)

    assert lengths == pytest.approx([0.53333333])
    whole = 0.8 + lengths[0]
    assert whole == pytest.approx(1.33333333)
    assert lengths[0] / 0.02 * 0.1 / whole == pytest.approx(2.0)


@pytest.mark.parametrize(("gigabytes", "seconds"), [(32, 1.3), (64, 0.65)])
def test_the_time_of_a_switch(gigabytes: int, seconds: float) -> None:
    """Eq. 4 as it has to read, T = size / (bandwidth * 0.625): a 13B model is never faster than
    the bus (0.8125 s at 32 GB/s), as it would be by the formula that was printed."""
    model = ModelSpec(
        name="13b",
        weight_bytes=26_000_000_000,
        max_context_tokens=4096,
        max_batch=64,
        slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1),
    )
    costs = CostModel([model], load_bytes_per_second=gigabytes * 1e9 * 0.625)

    assert costs.switch_seconds("13b") == pytest.approx(seconds)


@pytest.mark.parametrize("switch", [0.0, -1.0])
def test_without_a_switch_everybody_gets_q_max(switch: float) -> None:
    """If switching costs nothing the equations say 0; a turn is then as long as it may be."""
    assert quotas([0.1, 0.1], [0.02, 0.05], switch, Q_MAX, FLOOR) == [Q_MAX, Q_MAX]


BATCHES = st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(0.001, 1.0)), min_size=1, max_size=8)


@given(batches=BATCHES, switch=st.floats(0.01, 100.0))
def test_every_model_keeps_the_same_share_of_its_deadlines(
    batches: list[tuple[float, float]], switch: float
) -> None:
    """Tokens of a turn take n_i times its length to read: over a round that is the same share for
    every model, 1 / alpha, and the longest turn is Q_MAX as long as the cluster is not active."""
    deadlines, steps = zip(*batches, strict=True)
    ratios = [d / t for d, t in batches]
    share = sum(1 / n for n in ratios)
    raw = switch / (min(ratios) * Q_MAX) + share
    assume(switch / (min(ratios) * Q_MAX) > 1e-6 * share)

    lengths = quotas(deadlines, steps, switch, Q_MAX, FLOOR)

    whole = switch + sum(lengths)
    attained = [length * n / whole for length, n in zip(lengths, ratios, strict=True)]
    assert attained == pytest.approx([1 / max(raw, FLOOR)] * len(batches), rel=1e-4)
    if raw > FLOOR:
        assert max(lengths) == pytest.approx(Q_MAX, rel=1e-4)


@given(batches=BATCHES, switch=st.floats(1e-30, 100.0))
def test_no_quota_is_longer_than_q_max(batches: list[tuple[float, float]], switch: float) -> None:
    """However small the cost of switching, every turn has a length, and none is beyond Q_MAX."""
    deadlines, steps = zip(*batches, strict=True)

    lengths = quotas(deadlines, steps, switch, Q_MAX, FLOOR)

    assert all(0 < length <= Q_MAX * (1 + 1e-9) for length in lengths)


@pytest.mark.parametrize(
    ("instances", "prefill", "decode"), [(2, 1, 1), (3, 1, 2), (4, 2, 2), (8, 3, 5), (16, 6, 10)]
)
def test_the_partitions(instances: int, prefill: int, decode: int) -> None:
    """Six of sixteen instances prefill, and never none or all."""
    placements = Aegaeon().place(cluster=cluster_view(instances))

    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    assert placements == [Placement(role=role) for role in roles]


def test_a_lone_instance_is_mixed() -> None:
    """One instance has no partitions."""
    assert Aegaeon().place(cluster=cluster_view(1)) == [Placement(role=Role.MIXED)]


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_no_partition_is_empty(share: float) -> None:
    """Whatever share is asked for, somebody prefills and somebody decodes."""
    placements = Aegaeon(prefill_share=share).place(cluster=cluster_view(4))

    assert {placement.role for placement in placements} == {Role.PREFILL, Role.DECODE}


def test_a_prompt_joins_the_first_open_group_of_its_model() -> None:
    """Alg. 1 scans instances in order, and the groups of each in order."""
    instances = [
        instance_view(0, groups=(group_view("b"),)),
        instance_view(1, groups=(group_view("b"), group_view("a"), group_view("a"))),
        instance_view(2, groups=(group_view("a"),)),
    ]

    choice = Aegaeon().prefill(request=request_view("a"), instances=instances, costs=COSTS)

    assert choice == PrefillChoice(instance=1, group=1)


def test_a_group_admits_eight_in_all() -> None:
    """A request that was computed still counts: the ninth of a group opens another one."""
    policy, request = Aegaeon(), request_view("a")
    seven = [instance_view(groups=(group_view("a", 1, admitted=7),))]
    eight = [instance_view(groups=(group_view("a", 1, admitted=8),))]

    assert policy.prefill(request=request, instances=seven, costs=COSTS).group == 0
    assert policy.prefill(request=request, instances=eight, costs=COSTS).group is None


def test_the_size_of_a_group_is_cumulative_in_the_machine() -> None:
    """A group that admitted eight is full, though the first of them are being computed already."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, instances=2)
    cluster.start()
    cluster.settle()
    for index in range(9):
        cluster.ask(f"r{index}", "a", prompt=200, output=2)
    prefilling = cluster.machine.instances[0]
    cluster.work_until(0, lambda: len(prefilling.groups[0].members) < 8)
    assert [(g.admitted, len(g.members)) for g in prefilling.groups] == [(8, 6)]

    cluster.ask("another", "a", output=2)

    assert [list(g.members) for g in prefilling.groups][1:] == [["another"]]
    cluster.settle()
    assert all([life.outcome == "length" for life in cluster.world.lives.values()])


def test_a_new_group_goes_where_least_time_waits() -> None:
    """Not the number of waiting prompts counts, but how long they take."""
    instances = [
        instance_view(0, groups=(group_view("b", 1, tokens=9000),)),
        instance_view(1, groups=(group_view("c", 4, tokens=1000), group_view("d", 4, tokens=2000))),
        instance_view(2, groups=(group_view("b", 1, tokens=6000),)),
    ]

    choice = Aegaeon().prefill(request=request_view("a"), instances=instances, costs=COSTS)

    assert choice == PrefillChoice(instance=1)


def test_a_switch_is_waited_for_at_each_change_of_model() -> None:
    """The time of a queue is that of its prompts, and a switch for each model that has to come in:
    not for the one that is there, nor between two groups of one model."""
    groups = (
        group_view("a", 2, tokens=2000),
        group_view("b", tokens=1000),
        group_view("b", tokens=500),
        group_view("c", tokens=1000),
        group_view("a", tokens=1000),
    )
    view = instance_view(groups=groups, current="a", resident=["a", "c"])
    costs = FixedCosts(per_token=0.001, switches={"b": 3.0, "a": 50.0, "c": 100.0})

    assert queued_seconds(view, costs) == pytest.approx(2.0 + 3.0 + 1.0 + 0.5 + 1.0 + 1.0)


def test_a_request_decodes_in_the_first_batch_of_its_model() -> None:
    """Alg. 2 prefers an instance that has a batch of the model to one with fewer batches."""
    instances = [
        instance_view(0),
        instance_view(1, batches=(batch_view("b"), batch_view("a"))),
        instance_view(2, batches=(batch_view("a"),)),
    ]

    assert Aegaeon().decode(request=request_view("a"), instances=instances) == 1


def test_a_batch_without_room_for_kv_takes_no_request() -> None:
    """A batch is full when its KV and that of the request, with room to grow, do not fit beside the
    weights: the request goes to the next one, else where the fewest batches are."""
    request = request_view("a", tokens=1000, weight_bytes=15 * GIB, kv_bytes_per_token=1 << 20)
    room = (80 - 15) * 1024 - 1000 - 11 * 64  # tokens of 1 MiB, after those of the request
    full = instance_view(0, batches=(batch_view("a", 10, kv_tokens=room + 1),))
    open_ = instance_view(1, batches=(batch_view("b"), batch_view("a", 10, kv_tokens=room)))
    other = instance_view(2, batches=(batch_view("b"), batch_view("c")))
    policy = Aegaeon()

    assert policy.decode(request=request, instances=[full, other, open_]) == 1
    assert policy.decode(request=request, instances=[full, other]) == 2
    assert policy.decode(request=request, instances=[full]) == 0


def test_a_new_batch_goes_where_the_fewest_are() -> None:
    """A model that decodes nowhere goes to the instance with the fewest models."""
    instances = [
        instance_view(0, batches=(batch_view("b", 1), batch_view("c", 1))),
        instance_view(1, batches=(batch_view("b", 50),)),
    ]

    assert Aegaeon().decode(request=request_view("a"), instances=instances) == 1


def test_groups_are_served_as_they_came() -> None:
    """In order, but for those that are batch work only."""
    groups = (group_view("a", interactive=0), group_view("b"), group_view("c", 2, interactive=1))

    assert Aegaeon().admit(instance=instance_view(groups=groups)) == [1, 2, 0]


@pytest.mark.parametrize(("prefills", "phase"), [(0, Phase.PREFILL), (8, Phase.DECODE)])
def test_the_phase_of_a_mixed_instance(prefills: int, phase: Phase) -> None:
    """Between turns prompts go first, a group's worth of them."""
    view = instance_view(groups=(group_view("b"),), batches=(batch_view("a"),), prefills=prefills)

    assert Aegaeon().phase(instance=view) is phase


@pytest.mark.parametrize(
    ("front", "seconds"), [("a", 0.0), ("b", float("inf")), ("", float("inf"))]
)
def test_a_turn_is_ended_for_prompts_of_its_model(front: str, seconds: float) -> None:
    """They join without a switch; those of others wait for the turn's end."""
    groups = (group_view(front),) if front else ()
    view = instance_view(groups=groups, batches=(batch_view("a"),), turn="a")

    assert Aegaeon().preempt(instance=view) == seconds


def test_a_round_has_a_turn_for_every_model_that_can_run() -> None:
    """The batch whose KV is on its way is left out, and its switch is not paid for."""
    batches = (batch_view("a"), batch_view("b"), batch_view("c", 2, runnable=0), batch_view("d"))
    costs = FixedCosts(switches={"c": 99.0})

    planned = Aegaeon(q_max_seconds=3.0).round(instance=instance_view(batches=batches), costs=costs)

    assert [turn.model for turn in planned] == ["a", "b", "d"]
    assert [turn.quota_seconds for turn in planned] == pytest.approx([3.0] * 3)


def test_a_round_has_the_quotas_of_its_models() -> None:
    """Steps, switches and promises of the batches go into the equations."""
    batches = tuple([batch_view(model) for model in "abcd"])
    costs = FixedCosts(
        steps=dict(zip("abcd", [0.02, 0.03, 0.05, 0.04], strict=True)), switch=2.6 / 4
    )

    planned = Aegaeon().round(instance=instance_view(batches=batches), costs=costs)

    assert [turn.quota_seconds for turn in planned] == pytest.approx([1.6, 2.4, 4.0, 3.2])


def test_a_lone_model_runs_on() -> None:
    """A round of one model has no switch, so its turn is as long as it may be."""
    view = instance_view(batches=(batch_view("a"),))

    planned = Aegaeon().round(instance=view, costs=COSTS)

    assert planned == [PlannedTurn(model="a", quota_seconds=Q_MAX)]


def test_turns_are_short_while_prompts_wait_here() -> None:
    """On a mixed instance: a single step of the model that the next prompt is for, which goes on
    after it, and a quarter of a second of any other."""
    view = instance_view(groups=(group_view("a"),), batches=(batch_view("a"), batch_view("b")))

    planned = Aegaeon().round(instance=view, costs=FixedCosts(step=0.025))

    assert [turn.quota_seconds for turn in planned] == pytest.approx([0.025, 0.25])


def test_turns_are_whole_while_a_prompt_waits_for_room() -> None:
    """The machine ends them when there is room; until then a turn for each step makes no request
    sooner."""
    waits = instance_view(groups=(group_view("a"),), batches=(batch_view("a"),), kv_short=True)
    joins = instance_view(groups=(group_view("a"),), batches=(batch_view("a"),))

    lengths = [
        Aegaeon().round(instance=view, costs=FixedCosts(step=0.025))[0].quota_seconds
        for view in (waits, joins)
    ]

    assert lengths == [4.0, 0.025]


def test_equal_models_are_adjacent_in_a_round() -> None:
    """Requests 1A 2B 3A 4C 5B, as they came to an instance that decodes, run as A (1, 3), B (2, 5),
    C (4): the order of the paper's list after it was regrouped."""
    cluster = ClusterDouble(
        {name: ModelDouble(2, shape()) for name in "ABC"}, instances=2, slabs=40
    )
    cluster.start()
    cluster.settle()
    for name, model in zip("12345", "ABACB", strict=True):
        cluster.ask(name, model, output=20)
        request = cluster.machine.requests[name]
        cluster.work_until(0, lambda request=request: request.runnable or request.instance == 1)
    while cluster.work(0):
        pass
    begun = len(cluster.commands(RunTurn))

    cluster.work_until(1, lambda: len(cluster.commands(RunTurn)) >= begun + 3)

    round_ = cluster.commands(RunTurn)[begun : begun + 3]
    assert [sorted(turn.requests) for turn in round_] == [["1", "3"], ["2", "5"], ["4"]]
    cluster.settle()


def test_the_very_next_model_is_prefetched() -> None:
    """What comes first among those that come next, or nothing."""
    assert Aegaeon().prefetch(upcoming=["b", "c"]) == ["b"]
    assert Aegaeon().prefetch(upcoming=[]) == []


def test_it_answers_every_question() -> None:
    """It is the built-in behind every stack, so there is nothing it leaves to another policy."""
    stack = PolicyStack({"built-in": Aegaeon()})
    cluster = cluster_view(2, model_view("a"))
    view = instance_view(groups=(group_view("a"), group_view("b")), batches=(batch_view("a"),))

    assert len(stack.place(0.0, cluster, COSTS)) == 2
    assert stack.scale(0.0, cluster, COSTS) == Fleet(interactive=0, mixed=2, batch=0)
    assert stack.prefill(0.0, request_view("a"), [view], COSTS) == PrefillChoice(
        instance=0, group=0
    )
    assert stack.decode(0.0, request_view("a"), 0, [view], COSTS) == 0
    assert list(stack.admit(0.0, view, COSTS)) == [0, 1]
    assert stack.phase(0.0, view, COSTS) is Phase.PREFILL
    assert [turn.model for turn in stack.round(0.0, view, COSTS)] == ["a"]
    assert stack.preempt(0.0, view, COSTS) == float("inf")
    limits = stack.batch(0.0, "a", view, COSTS)
    assert limits == BatchLimits(requests=limits.requests, chunk_tokens=0)
    assert limits.requests >= 4096
    assert list(stack.flow(0.0, view, [decoding_view("r")], [instance_view(1)], COSTS)) == []
    assert list(stack.evict(0.0, view, ["b", "a"], COSTS)) == ["b", "a"]
    assert stack.prefetch(0.0, view, ["b", "c"], COSTS) == "b"
    assert not stack.faults
