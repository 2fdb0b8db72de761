"""Aegaeon's equations and algorithms, against the numbers of the paper and by their claims."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from appliance.plugins.aegaeon import Aegaeon, quotas
from appliance.scheduling.questions import Phase, PlannedTurn, PrefillChoice
from appliance.vocabulary import Role
from tests.unit.policy_views import batch_view, group_view, instance_view, request_view

Q_MAX = 4.0
FLOOR = 0.5


def test_the_worked_example() -> None:
    """Three equal batches with three seconds of switches run three seconds each (alpha = 1)."""
    assert quotas([0.1] * 3, [0.025] * 3, 3.0, 3.0, FLOOR) == pytest.approx([3.0] * 3)


def test_unequal_steps() -> None:
    """A slower model gets a longer turn, the slowest one Q_MAX."""
    steps = [0.02, 0.03, 0.05, 0.04]

    assert quotas([0.1] * 4, steps, 2.6, Q_MAX, FLOOR) == pytest.approx([1.6, 2.4, 4.0, 3.2])


def test_the_floor_of_alpha() -> None:
    """A model far ahead of its deadlines is cut short: alpha is no smaller than its floor."""
    assert quotas([0.1], [0.02], 0.8, Q_MAX, FLOOR) == pytest.approx([0.53333333])


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
    every model, 1 / alpha, and the longest turn is Q_MAX as long as the floor is not active."""
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
    roles = Aegaeon().assign_roles(instances=instances)

    assert roles == [Role.PREFILL] * prefill + [Role.DECODE] * decode


def test_a_lone_instance_is_mixed() -> None:
    """One instance has no partitions."""
    assert Aegaeon().assign_roles(instances=1) == [Role.MIXED]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_partition_is_empty(share: float) -> None:
    """Whatever share is asked for, somebody prefills and somebody decodes."""
    roles = Aegaeon(prefill_share=share).assign_roles(instances=4)

    assert set(roles) == {Role.PREFILL, Role.DECODE}


def test_a_prompt_joins_the_first_open_group_of_its_model() -> None:
    """Alg. 1 scans instances in order, and the groups of each in order."""
    instances = [
        instance_view(0, groups=(group_view("b"),)),
        instance_view(1, groups=(group_view("b"), group_view("a"), group_view("a"))),
        instance_view(2, groups=(group_view("a"),)),
    ]

    choice = Aegaeon().choose_prefill(request=request_view("a"), instances=instances)

    assert choice == PrefillChoice(instance=1, group=1)


def test_a_group_admits_eight_in_all() -> None:
    """A request that was computed still counts: the ninth of a group opens another one."""
    policy = Aegaeon()
    seven = [instance_view(groups=(group_view("a", 1, admitted=7),))]
    eight = [instance_view(groups=(group_view("a", 1, admitted=8),))]

    assert policy.choose_prefill(request=request_view("a"), instances=seven).group == 0
    assert policy.choose_prefill(request=request_view("a"), instances=eight).group is None


def test_a_new_group_goes_where_least_time_waits() -> None:
    """Not the number of waiting prompts counts, but how long they take."""
    instances = [
        instance_view(0, groups=(group_view("b", 1, seconds=9.0),)),
        instance_view(1, groups=(group_view("c", 4, seconds=1.0), group_view("d", 4, seconds=2.0))),
        instance_view(2, groups=(group_view("b", 1, seconds=4.0),)),
    ]

    choice = Aegaeon().choose_prefill(request=request_view("a"), instances=instances)

    assert choice == PrefillChoice(instance=1)


def test_a_request_decodes_where_its_model_does() -> None:
    """Alg. 2 prefers an instance that has a batch of the model to one with fewer batches."""
    instances = [
        instance_view(0),
        instance_view(1, batches=(batch_view("b"), batch_view("a"))),
        instance_view(2, batches=(batch_view("a"), batch_view("b"), batch_view("c"))),
    ]

    chosen = Aegaeon().choose_decode(request=request_view("a"), prefilled_on=0, instances=instances)

    assert chosen == 1


def test_a_new_batch_goes_where_the_fewest_are() -> None:
    """A model that decodes nowhere goes to the instance with the fewest models."""
    instances = [
        instance_view(0, batches=(batch_view("b", 1), batch_view("c", 1))),
        instance_view(1, batches=(batch_view("b", 50),)),
    ]

    chosen = Aegaeon().choose_decode(request=request_view("a"), prefilled_on=0, instances=instances)

    assert chosen == 1


@pytest.mark.parametrize(
    ("front", "turn", "prefills", "phase"),
    [
        ("a", "a", 0, Phase.PREFILL),
        ("b", "a", 0, Phase.DECODE),
        ("b", None, 7, Phase.PREFILL),
        ("b", None, 8, Phase.DECODE),
    ],
)
def test_the_phase_of_a_mixed_instance(
    front: str, turn: str | None, prefills: int, phase: Phase
) -> None:
    """A turn is preempted for its own model's prompts; between turns a group's worth goes first."""
    view = instance_view(
        groups=(group_view(front),), batches=(batch_view("a"),), turn=turn, prefills=prefills
    )

    assert Aegaeon().choose_phase(instance=view) is phase


def test_a_round_has_a_turn_for_every_model_that_can_run() -> None:
    """The batch whose KV is on its way is left out, and its switch is not paid for."""
    view = instance_view(
        batches=(
            batch_view("a"),
            batch_view("b"),
            batch_view("c", 2, runnable=0, switch=99.0),
            batch_view("d"),
        )
    )

    planned = Aegaeon(q_max_seconds=3.0).plan_round(instance=view)

    assert [turn.model for turn in planned] == ["a", "b", "d"]
    assert [turn.quota_seconds for turn in planned] == pytest.approx([3.0] * 3)


def test_a_lone_model_runs_on() -> None:
    """A round of one model has no switch, so its turn is as long as it may be."""
    view = instance_view(batches=(batch_view("a"),))

    assert Aegaeon().plan_round(instance=view) == [PlannedTurn(model="a", quota_seconds=Q_MAX)]


def test_the_very_next_model_is_prefetched() -> None:
    """What comes first among those that come next, or nothing."""
    view = instance_view()

    assert Aegaeon().choose_prefetch(instance=view, upcoming=["b", "c"]) == ["b"]
    assert Aegaeon().choose_prefetch(instance=view, upcoming=[]) == []
