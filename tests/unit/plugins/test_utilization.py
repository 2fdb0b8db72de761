"""Llumnix-like: the band that scales, the freest instance, and who moves."""

from __future__ import annotations

import msgspec
import pytest

from appliance.plugins.serverlessllm import ServerlessLlm
from appliance.plugins.utilization import Utilization, utilization
from appliance.scheduling.policy_api import InstanceView, Migration, PrefillChoice
from appliance.vocabulary import Direction, InstanceClass, MoveKv
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.policy_views import (
    GIB,
    batch_view,
    cluster_view,
    decoding_view,
    group_view,
    instance_view,
    model_view,
    request_view,
)

PARKED = InstanceClass.PARKED


def using(number: int, share: float, **changes: object) -> InstanceView:
    """An instance of 100 GiB, a share of which is KV."""
    view = instance_view(number, total_bytes=100 * GIB, kv_bytes=int(share * 100 * GIB))
    return msgspec.structs.replace(view, **changes)


@pytest.mark.parametrize(
    ("shares", "mixed"),
    [
        ([0.8, 0.7], 3),
        ([0.7, 0.7], 2),
        ([0.3, 0.3], 2),
        ([0.5, 0.05], 1),
        ([0.05], 1),
        ([0.9, 0.9, 0.9], 3),
    ],
)
def test_the_average_stays_within_the_band(shares: list[float], mixed: int) -> None:
    """One instance more above it, one less below, of three, and at least one."""
    instances = [using(number, share) for number, share in enumerate(shares)]
    instances += [using(n, 0.0, instance_class=PARKED) for n in range(len(shares), 3)]

    fleet = Utilization().scale(now=0.0, cluster=cluster_view(instances))

    assert (fleet.interactive, fleet.mixed, fleet.batch) == (0, mixed, 0)


def test_it_scales_by_one_and_pauses() -> None:
    """Two changes are so many seconds apart; only a change starts the pause."""
    policy = Utilization(pause_seconds=10.0)
    idle = cluster_view([using(n, 0.0) for n in range(4)])
    steady = cluster_view([using(n, 0.5) for n in range(4)])

    counts = [policy.scale(now=now, cluster=steady).mixed for now in (0.0, 1.0)]
    counts += [policy.scale(now=now, cluster=idle).mixed for now in (2.0, 11.9, 12.0)]

    assert counts == [4, 4, 3, 4, 3]


def test_waiting_prompts_count_as_kv() -> None:
    """What is asked for is in use, measured by what the weights at work there leave."""
    model = model_view("a", weight_bytes=50 * GIB, kv_bytes_per_token=GIB)
    waiting = using(0, 0.1, groups=(group_view("a", tokens=15),))
    idle = using(1, 0.1)

    assert utilization(cluster_view(2, model), [waiting]) == pytest.approx(0.5)
    assert utilization(cluster_view(2, model), [waiting, idle]) == pytest.approx(0.3)


def test_without_room_an_instance_is_full() -> None:
    """Weights that leave nothing, and no instance at all, call for another one."""
    model = model_view("a", weight_bytes=100 * GIB)
    full = using(0, 0.0, batches=(batch_view("a"),))

    assert utilization(cluster_view(1, model), [full]) == 1.0
    assert utilization(cluster_view(1, model), []) == 1.0


def test_instances_that_are_down_are_not_asked() -> None:
    """They are counted, but nothing is averaged over them."""
    cluster = cluster_view([using(0, 0.5), using(1, 0.0, up=False)])

    assert Utilization().scale(now=0.0, cluster=cluster).mixed == 2


def test_the_band_has_two_ends() -> None:
    """An empty band is refused as a parameter."""
    with pytest.raises(msgspec.ValidationError, match="low has to be below high"):
        msgspec.convert({"low": 0.5, "high": 0.5}, Utilization)


def test_a_request_goes_to_the_freest_instance() -> None:
    """Memory without KV, per request there; of equals to where the model is."""
    policy, request = Utilization(), request_view("a")
    crowded = using(0, 0.1, batches=(batch_view("b", 9),))
    fuller = using(1, 0.6, batches=(batch_view("b", 1),))

    assert policy.prefill(request=request, instances=[crowded, fuller]) == PrefillChoice(instance=1)
    idle = [using(0, 0.0), using(1, 0.0, resident=frozenset("a")), using(2, 0.0)]
    assert policy.prefill(request=request, instances=idle) == PrefillChoice(instance=1)


def test_it_decodes_where_it_was_prefilled() -> None:
    """Or on the freest instance, if that one takes nothing any more."""
    offered = [using(1, 0.9), using(2, 0.1)]

    assert Utilization().decode(prefilled_on=1, instances=offered) == 1
    assert Utilization().decode(prefilled_on=0, instances=offered) == 2


def test_the_shortest_goes_from_the_fullest_to_the_freest() -> None:
    """One at a time, and nobody before it got a token here."""
    full = using(0, 0.5, batches=(batch_view("a", 4),))
    requests = [
        decoding_view("long", tokens=500),
        decoding_view("short", tokens=100),
        decoding_view("new", tokens=10, here=0),
    ]
    others = [using(1, 0.4), using(2, 0.1)]

    flows = Utilization().flow(instance=full, requests=requests, others=others)

    assert flows == [Migration(request="short", target=2)]


def test_no_request_moves_for_a_small_gain() -> None:
    """The target has to be that much freer with the request there, so that nobody comes back."""
    here = instance_view(0, kv_bytes=0, batches=(batch_view("a", 3),))
    there = instance_view(1, kv_bytes=0)
    requests = [decoding_view("r")]

    assert Utilization(imbalance=2.0).flow(instance=here, requests=requests, others=[there])
    assert not Utilization(imbalance=2.1).flow(instance=here, requests=requests, others=[there])
    new = [decoding_view("r", here=0)]
    assert not Utilization(imbalance=2.0).flow(instance=here, requests=new, others=[there])


def test_an_instance_that_is_removed_is_emptied() -> None:
    """All of its requests go on where it is freest, each counted; never to another such one."""
    leaving = using(0, 0.5, instance_class=PARKED, batches=(batch_view("a", 3),))
    requests = [decoding_view(name, here=0) for name in "xyz"]
    parked = using(1, 0.0, instance_class=PARKED)
    others = [parked, using(2, 0.0), using(3, 0.4)]

    flows = Utilization().flow(instance=leaving, requests=requests, others=others)

    assert [(flow.request, flow.target) for flow in flows] == [("x", 2), ("y", 3), ("z", 2)]
    assert Utilization().flow(instance=leaving, requests=requests, others=[parked]) == []


def test_a_request_goes_only_where_its_model_can_be() -> None:
    """The freest of those, and only if that one is much freer; from an instance that is removed
    as well."""
    policy = Utilization(imbalance=2.0)
    full, freer, freest = using(0, 0.9), using(1, 0.5), using(2, 0.0)
    bound = decoding_view("bound", tokens=5, instances=frozenset({0, 1}))
    stuck = decoding_view("stuck", tokens=1, instances=frozenset({0}))
    leaving = msgspec.structs.replace(full, instance_class=PARKED)
    others = [freer, freest]

    assert policy.flow(instance=full, requests=[bound, stuck], others=others) == [
        Migration(request="bound", target=1)
    ]
    assert policy.flow(instance=full, requests=[bound], others=[freest]) == []
    assert policy.flow(instance=leaving, requests=[bound, stuck], others=others) == [
        Migration(request="bound", target=1)
    ]


def test_requests_migrate_in_the_machine() -> None:
    """With two instances that have little to do one is removed, and those that decode there go on
    elsewhere with the KV they have."""
    cluster = ClusterDouble(
        {"a": ModelDouble(4, shape())}, stranger=ServerlessLlm(max_group=1), instances=2
    )
    cluster.start()
    cluster.settle()
    for index in range(4):
        cluster.ask(f"r{index}", "a", output=60, limit=60)
    cluster.work_until(1, lambda: bool(cluster.up[1].turn))

    cluster.set_policy([], Utilization(high=1.0))
    cluster.settle()

    assert [view.instance_class for view in cluster.machine.instances.values()] == [
        InstanceClass.MIXED,
        InstanceClass.PARKED,
    ]
    assert all([life.outcome == "length" for life in cluster.world.lives.values()])
    assert all([life.prefills == 1 for life in cluster.world.lives.values()])
    moves = [(command.instance, command.direction) for command in cluster.commands(MoveKv)]
    assert set(moves) == {(1, Direction.OUT), (0, Direction.IN)}
