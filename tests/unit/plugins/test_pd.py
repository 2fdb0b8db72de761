"""Prefill and decoding aggregated and disaggregated: the two baselines of TaiChi."""

from __future__ import annotations

import pytest

from appliance.plugins.pd_aggregated import PdAggregated
from appliance.plugins.pd_disaggregated import PdDisaggregated
from appliance.scheduling.policy_api import Phase, Placement, PlannedTurn, PrefillChoice
from appliance.vocabulary import Direction, MoveKv, Role, RunPrefill, RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    batch_view,
    cluster_view,
    group_view,
    instance_view,
    request_view,
)


def test_aggregated_instances_do_both() -> None:
    """There are no partitions, and a request decodes where it was prefilled."""
    policy = PdAggregated()

    assert policy.place(cluster=cluster_view(2)) == [Placement(role=Role.MIXED)] * 2
    assert policy.decode(prefilled_on=1, instances=[instance_view(0), instance_view(1)]) == 1


def test_aggregated_goes_to_the_least_loaded() -> None:
    """By requests, waiting or decoding; of equals by the tokens that wait."""
    instances = [
        instance_view(0, groups=(group_view("a", tokens=10),), batches=(batch_view("a", 2),)),
        instance_view(1, groups=(group_view("b", 2, tokens=900),)),
        instance_view(2, groups=(group_view("b", 2, tokens=800),)),
    ]

    choice = PdAggregated().prefill(request=request_view("a"), instances=instances)

    assert choice == PrefillChoice(instance=2)


@pytest.mark.parametrize(("groups", "joined"), [("", None), ("ba", 1), ("ab", None)])
def test_prompts_are_served_as_they_came(groups: str, joined: int | None) -> None:
    """A request joins the last group if that is of its model, and passes nobody."""
    view = instance_view(groups=tuple([group_view(model) for model in groups]))

    for policy in (PdAggregated(), PdDisaggregated()):
        choice = policy.prefill(request=request_view("a"), instances=[view])
        assert choice == PrefillChoice(instance=0, group=joined)


def test_prompts_are_computed_in_chunks() -> None:
    """As many tokens beside a step as is set, CP1024 if nothing is."""
    assert PdAggregated().batch().chunk_tokens == 1024
    assert PdAggregated(chunk_tokens=256).batch().chunk_tokens == 256


@pytest.mark.parametrize(
    ("front", "batches", "phases"),
    [("a", "a", "ppppp"), ("b", "ab", "ppdpp"), ("c", "ab", "ppdpp"), ("a", "b", "ppdpp")],
)
def test_prompts_starve_no_other_model(front: str, batches: str, phases: str) -> None:
    """Prompts go first, but after so many in a row another model that decodes has a turn."""
    policy = PdAggregated(max_prefills=2)
    view = instance_view(
        groups=(group_view(front),), batches=tuple([batch_view(model) for model in batches])
    )
    resting = instance_view(groups=(group_view("a"),), batches=(batch_view("b", runnable=0),))

    answers = [policy.phase(instance=view) for _ in phases]

    assert [phase.value[0] for phase in answers] == list(phases)
    assert all([policy.phase(instance=resting) is Phase.PREFILL for _ in phases])


def test_prompts_in_a_row_are_counted_by_instance() -> None:
    """Another instance's prompts are nobody's turn here."""
    policy = PdAggregated(max_prefills=1)
    views = [
        instance_view(number, groups=(group_view("a"),), batches=(batch_view("b"),))
        for number in range(2)
    ]

    answers = [policy.phase(instance=view) for view in [*views, *views]]

    assert answers == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE]


def test_a_prompt_is_computed_with_its_model() -> None:
    """In the machine: a request that comes while its model decodes is prefilled in a mixed turn."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, stranger=PdAggregated(chunk_tokens=64))
    cluster.start()
    cluster.settle()
    cluster.ask("first", "a", output=30)
    cluster.work_until(0, lambda: bool(cluster.commands(RunTurn)))
    cluster.ask("second", "a", output=30)

    cluster.settle()

    assert [command.request for command in cluster.commands(RunPrefill)] == ["first"]
    mixed = [command for command in cluster.commands(RunTurn) if command.prompts]
    assert [(c.requests, c.prompts, c.chunk_tokens) for c in mixed] == [
        (("first",), ("second",), 64)
    ]


@pytest.mark.parametrize(("share", "prefill"), [(0.5, 2), (0.25, 1), (0.9, 3)])
def test_disaggregated_instances_do_one_thing(share: float, prefill: int) -> None:
    """Two of four prefill, unless another ratio is set."""
    placements = PdDisaggregated(prefill_share=share).place(cluster=cluster_view(4))

    roles = [Role.PREFILL] * prefill + [Role.DECODE] * (4 - prefill)
    assert [placement.role for placement in placements] == roles


def test_disaggregated_turns_of_a_lone_model_are_short() -> None:
    """Who has come from an instance that prefills does not wait for the end of a long turn; how
    several models share an instance is left to others."""
    policy = PdDisaggregated()
    lone = instance_view(batches=(batch_view("a", 3), batch_view("b", 1, runnable=0)))
    shared = instance_view(batches=(batch_view("a"), batch_view("b")))

    assert policy.round(instance=lone) == [PlannedTurn(model="a", quota_seconds=0.1)]
    assert policy.round(instance=shared) is None


def test_disaggregated_prefills_where_the_fewest_tokens_wait() -> None:
    """Not where the fewest requests do."""
    instances = [
        instance_view(0, groups=(group_view("b", 1, tokens=900),)),
        instance_view(1, groups=(group_view("b", 4, tokens=800),)),
    ]

    choice = PdDisaggregated().prefill(request=request_view("a"), instances=instances)

    assert choice == PrefillChoice(instance=1)


def test_disaggregated_decodes_where_the_least_kv_is() -> None:
    """Whatever models decode there, and though it is not there yet; then where memory is free."""
    instances = [
        instance_view(0, kv_bytes=1, batches=(batch_view("a", kv_tokens=300),)),
        instance_view(1, kv_bytes=3, batches=(batch_view("b", kv_tokens=200),)),
        instance_view(2, kv_bytes=2, batches=tuple([batch_view(m, kv_tokens=100) for m in "bc"])),
    ]

    assert PdDisaggregated().decode(instances=instances) == 2


def test_kv_goes_from_one_to_the_other() -> None:
    """In the machine: nothing decodes where it was prefilled."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())}, stranger=PdDisaggregated(), instances=2)
    cluster.start()
    cluster.settle()
    for index in range(4):
        cluster.ask(f"r{index}", "a", output=10)

    cluster.settle()

    prefills = [turn for turn in cluster.commands(RunTurn) if turn.prompts]
    assert {c.instance for c in [*cluster.commands(RunPrefill), *prefills]} == {0}
    assert {turn.instance for turn in cluster.turns()} == {1}
    moves = [(c.instance, c.direction) for c in cluster.commands(MoveKv)]
    assert set(moves) == {(0, Direction.OUT), (1, Direction.IN)}
