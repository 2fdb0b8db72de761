"""Every policy that ships, in the real machine: all requests end, and a replay decides the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.plugins.aegaeon import Aegaeon
from appliance.plugins.appliance import Appliance
from appliance.plugins.muxserve import MuxServe
from appliance.plugins.pd_aggregated import PdAggregated
from appliance.plugins.pd_disaggregated import PdDisaggregated
from appliance.plugins.qlm import Qlm
from appliance.plugins.serverlessllm import ServerlessLlm
from appliance.plugins.serverlessllm_sjf import ServerlessLlmSjf
from appliance.plugins.static import Static
from appliance.plugins.utilization import Utilization
from appliance.policies.loader import PolicyStack
from appliance.vocabulary import RequestClass
from tests.unit.doubles.cluster import ClusterDouble, Watchful, shape
from tests.unit.doubles.instance import ModelDouble

REQUESTS = 40


def output_of(index: int) -> int:
    return 1 + index * 7 % 50


def shortest_job_first() -> ServerlessLlmSjf:
    policy = ServerlessLlmSjf()
    policy.learn_oracle({f"r{index}": output_of(index) for index in range(REQUESTS)})
    return policy


SHIPPED: dict[str, Callable[[], object]] = {
    "aegaeon": Aegaeon,
    "appliance, parking": lambda: Appliance(park=True, park_load=1.0, park_seconds=0.1),
    "muxserve": MuxServe,
    "pd_aggregated": lambda: PdAggregated(chunk_tokens=16),
    "pd_disaggregated": PdDisaggregated,
    "qlm": Qlm,
    "serverlessllm": ServerlessLlm,
    "serverlessllm_sjf": shortest_job_first,
    "static": Static,
    "utilization": lambda: Utilization(pause_seconds=0.0),
}
"""Makers of the policies, by name."""


def cluster_with(policy: object, instances: int) -> ClusterDouble:
    """Five models of different sizes and shapes; two of them fit an instance with room for KV."""
    models = {
        f"m{index}": ModelDouble(
            4 + index % 3, shape(3 + index % 3, 1 + index % 2, 300 + 450 * (index % 3))
        )
        for index in range(5)
    }
    return ClusterDouble(models, stranger=policy, instances=instances, slabs=24, host_slabs=300)


def stack_of(cluster: ClusterDouble) -> PolicyStack:
    watchful = cluster.machine._context.policy
    assert isinstance(watchful, Watchful)
    return watchful.stack


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("name", SHIPPED)
def test_all_requests_end(name: str, instances: int) -> None:
    """Under load, with a worker that dies and comes back, of both classes; no answer of the policy
    is refused, and the same events lead to the same commands."""
    cluster = cluster_with(SHIPPED[name](), instances)
    cluster.start()
    cluster.settle()
    for index in range(REQUESTS):
        cluster.ask(
            f"r{index}",
            f"m{index * index // 3 % 5}",
            prompt=1 + index * 11 % 90,
            output=output_of(index),
            limit=60,
            kind=RequestClass.BATCH if index % 7 == 3 else RequestClass.INTERACTIVE,
        )
        cluster.now += 0.2
        cluster.work(index % instances)
        if index == REQUESTS // 2:
            cluster.lose(instances - 1)
            cluster.start(instances - 1)
    cluster.settle()

    assert not cluster.machine.requests
    lives = cluster.world.lives.values()
    refused = {life.model for life in lives if life.outcome == "overloaded"}
    assert not refused or (name, instances) == ("muxserve", 1), "everything fits three instances"
    for life in lives:
        assert life.outcome == ("overloaded" if life.model in refused else "stop")
        assert life.produced == (0 if life.model in refused else life.output_tokens)
    assert not stack_of(cluster).faults
    again = cluster_with(SHIPPED[name](), instances).machine
    replayed = [again.handle(event, now) for now, event, _ in cluster.journal]
    assert replayed == [commands for _, _, commands in cluster.journal]
