"""Instances out of service: what they had goes on elsewhere, and nothing new goes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from appliance.scheduling.lifecycle import KvPlace, Stage
from appliance.scheduling.model_lifecycle import MAX_BUILD_LOSSES
from appliance.scheduling.recovery import MAX_REQUEST_LOSSES
from appliance.scheduling.wait_reasons import wait_reason
from appliance.vocabulary import (
    BuildModel,
    Command,
    FinishReason,
    PrefetchModel,
    Reject,
    RunPrefill,
    RunTurn,
    WaitCode,
)
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble


def cluster_of(instances: int = 2, policy: str = "serverlessllm", **options: Any) -> ClusterDouble:
    """Every engine is built, and there is nothing to do."""
    models = {name: ModelDouble(4, shape()) for name in "ab"}
    cluster = ClusterDouble(models, policy=policy, instances=instances, **options)
    cluster.start()
    cluster.settle()
    return cluster


def jobs(cluster: ClusterDouble, number: int) -> list[Command]:
    """What the instance was given to compute, to build or to bring in."""
    return [
        command
        for kind in (BuildModel, RunPrefill, RunTurn, PrefetchModel)
        for command in cluster.commands(kind)
        if command.instance == number
    ]


def test_its_requests_go_on_elsewhere() -> None:
    """From the prompt and the tokens so far, without one of them being lost or made twice."""
    cluster = cluster_of()
    life = cluster.ask("r", "a", output=30)
    cluster.work_until(0, lambda: life.produced == 5)

    cluster.quarantine(0)
    cluster.lose(0)
    given = len(jobs(cluster, 0))
    cluster.settle()

    assert (life.outcome, life.produced, life.prefills) == (FinishReason.LENGTH, 30, 2)
    assert len(jobs(cluster, 0)) == given
    assert cluster.commands(RunTurn)[-1].instance == 1


@pytest.mark.parametrize("policy", ["serverlessllm", "aegaeon", "appliance", "prism"])
def test_nothing_new_goes_there(policy: str) -> None:
    """While its worker still ends, and after; policies are shown it as one that is down."""
    cluster = cluster_of(policy=policy)
    cluster.quarantine(0)
    given = len(jobs(cluster, 0))
    lives = [cluster.ask(f"r{index}", "ab"[index % 2]) for index in range(6)]

    cluster.settle()
    cluster.lose(0)
    cluster.settle()

    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
    assert len(jobs(cluster, 0)) == given
    shown = cluster.machine.cluster.cluster_view(cluster.now).instances
    assert [view.up for view in shown] == [False, True]


def test_who_was_prefilled_while_the_worker_ends_decodes_elsewhere() -> None:
    """The prompt is over, its KV is about to be gone, and it is computed again."""
    cluster = cluster_of(policy="serverlessllm")
    life = cluster.ask("r", "a", output=10)
    assert cluster.machine.requests["r"].stage is Stage.PREFILLING
    cluster.quarantine(0)
    cluster.work_until(0, lambda: life.produced == 1)

    cluster.lose(0)
    cluster.settle()

    assert (life.outcome, life.prefills) == (FinishReason.LENGTH, 2)


def test_a_single_request_waits_where_no_instance_is_up_yet() -> None:
    """Its instance is out of service and the other one still starts: it waits, and can say so."""
    cluster = cluster_of()
    cluster.lose(1)
    life = cluster.ask("r", "a", output=10)
    cluster.work_until(0, lambda: life.produced == 1)

    cluster.quarantine(0)
    cluster.work_until(0, lambda: life.produced == 2)
    cluster.lose(0)

    request = cluster.machine.requests["r"]
    reason = wait_reason(cluster.machine, request, cluster.now)
    assert (request.stage, request.kv) == (Stage.UNPLACED, KvPlace.NONE)
    assert reason is not None
    assert reason.code is WaitCode.NO_INSTANCE
    cluster.start(1)
    cluster.settle()
    assert life.outcome == FinishReason.LENGTH


def test_a_released_instance_serves_again() -> None:
    """As soon as it has a worker; nothing of before is taken to be there."""
    cluster = cluster_of(1)
    cluster.quarantine(0)
    cluster.lose(0)

    cluster.release(0)
    life = cluster.ask("r", "a")
    assert life.outcome is None
    cluster.start(0)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH


def test_a_release_may_come_before_the_worker_has_ended() -> None:
    """Nothing is given to that one; what waits goes to the next."""
    cluster = cluster_of()
    cluster.lose(1)
    cluster.quarantine(0)
    life = cluster.ask("r", "a")
    given = len(jobs(cluster, 0))

    cluster.release(0)
    assert cluster.machine.requests["r"].stage is Stage.UNPLACED
    reason = wait_reason(cluster.machine, cluster.machine.requests["r"], cluster.now)
    assert reason is not None
    assert reason.code is WaitCode.NO_INSTANCE
    assert len(jobs(cluster, 0)) == given
    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH


def test_a_worker_that_greets_in_quarantine_is_the_one_that_is_ended() -> None:
    """Its greeting was on the way: a release does not make it one that works."""
    cluster = cluster_of(1)
    cluster.lose(0)
    cluster.quarantine(0)
    cluster.start(0)
    cluster.release(0)
    life = cluster.ask("r", "a")
    assert cluster.machine.requests["r"].stage is Stage.UNPLACED

    cluster.lose(0)
    cluster.start(0)
    cluster.settle()

    assert life.outcome == FinishReason.LENGTH


def test_when_none_is_left_everybody_hears_that() -> None:
    """Those that run, those that wait and those that come. Reasons are for operators."""
    cluster = cluster_of()
    running = cluster.ask("r1", "a", output=50)
    cluster.work_until(0, lambda: running.produced > 3)
    cluster.lose(1)
    waiting = cluster.ask("r2", "b", output=50)

    cluster.quarantine(0, "XID 79")
    cluster.quarantine(1, "an operator said so")
    coming = cluster.ask("r3", "a")
    cluster.lose(0)

    assert [life.outcome for life in (running, waiting, coming)] == ["no_instance"] * 3
    assert {rejection.message for rejection in cluster.commands(Reject)} == {
        "every instance is quarantined; an operator may release one"
    }
    assert not cluster.machine.requests
    assert cluster.machine.host.kv_slabs == 0


def test_who_waits_for_an_instance_that_starts_hears_when_that_is_gone_too() -> None:
    """Without a worker there is no loss to wait for."""
    cluster = cluster_of()
    cluster.lose(0)
    cluster.lose(1)
    life = cluster.ask("r", "a")
    cluster.quarantine(0)
    assert life.outcome is None

    cluster.quarantine(1)

    assert life.outcome == "no_instance"


@pytest.fixture(params=["released after its loss", "released before"])
def end(request: pytest.FixtureRequest) -> Callable[[ClusterDouble, int], None]:
    """Has an operator quarantine an instance and release it: its worker is lost of that."""

    def end_worker(cluster: ClusterDouble, number: int) -> None:
        cluster.quarantine(number)
        if request.param == "released before":
            cluster.release(number)
        cluster.lose(number)
        cluster.release(number)

    return end_worker


def test_a_quarantine_is_not_the_models_fault(end: Callable[[ClusterDouble, int], None]) -> None:
    """However often a worker is ended while it builds an engine, the model is not given up."""
    cluster = ClusterDouble({"a": ModelDouble(4, shape())})
    for _ in range(MAX_BUILD_LOSSES + 1):
        cluster.start(0)
        end(cluster, 0)

    assert len(cluster.commands(BuildModel)) > MAX_BUILD_LOSSES
    assert cluster.machine.failed == {}


def test_a_quarantine_is_not_the_requests_fault(end: Callable[[ClusterDouble, int], None]) -> None:
    """However often the worker that computes it is ended, the request goes on."""
    cluster = cluster_of()
    life = cluster.ask("r", "a", output=20)
    for _ in range(MAX_REQUEST_LOSSES + 1):
        number = cluster.machine.requests["r"].instance
        assert number is not None
        end(cluster, number)
        cluster.start(number)

    cluster.settle()

    assert life.outcome == FinishReason.LENGTH


def test_what_waits_for_its_prompt_need_not_wait_for_the_end_of_the_worker() -> None:
    """Prompts that have not begun move at the next look at the cluster."""
    cluster = cluster_of()
    lives = [cluster.ask(f"r{index}", "a", prompt=100, output=30) for index in range(4)]
    queued = [r for r in cluster.machine.requests.values() if r.stage is Stage.QUEUED]
    assert any(request.instance == 0 for request in queued)

    cluster.quarantine(0)

    left = [r for r in cluster.machine.requests.values() if r.instance == 0]
    assert all(request.stage is not Stage.QUEUED for request in left)
    cluster.lose(0)
    cluster.settle()
    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
