"""Prompts of a group that are computed in the same step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.scheduling.policy_api import BatchLimits, Phase
from appliance.vocabulary import FinishReason, RequestClass, RunPrefill, RunTurn
from tests.unit.doubles.cluster import ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble
from tests.unit.plugins.told import Told

SLABS = 4 + 24


def built(
    limits: Callable[[], BatchLimits] | None = None,
    names: str = "a",
    *,
    host_slabs: int = 200,
    max_batch: int = 64,
) -> ClusterDouble:
    """One instance whose engines are built, and warm once a request has run."""
    limits = limits or (lambda: BatchLimits(requests=64))
    cluster = ClusterDouble(
        {name: ModelDouble(4, shape()) for name in names},
        slabs=SLABS,
        host_slabs=host_slabs,
        max_batch=max_batch,
        stranger=Told(batch=limits, phase=lambda: Phase.PREFILL),
    )
    cluster.start()
    cluster.settle()
    cluster.ask("warm", "a", output=2)
    cluster.settle()
    return cluster


def jobs(cluster: ClusterDouble) -> list[tuple[str, ...]]:
    """The prompts of each job with some, but for the first request's."""
    found: list[tuple[str, ...]] = []
    for _, _, commands in cluster.journal:
        for command in commands:
            if isinstance(command, RunPrefill):
                found.append((command.request,))
            elif isinstance(command, RunTurn) and command.prompts:
                found.append(command.prompts)
    return found[1:]


def busy(cluster: ClusterDouble) -> None:
    """Have the instance compute a prompt, so that those that come wait."""
    cluster.ask("first", "a", prompt=30, output=9)
    assert cluster.machine.instances[0].job is not None


def ask(cluster: ClusterDouble, count: int, **options: int) -> None:
    for index in range(count):
        cluster.ask(f"r{index}", "a", **{"prompt": 20, "output": 9, **options})
    cluster.settle()
    assert {life.outcome for life in cluster.world.lives.values()} == {FinishReason.LENGTH}


def test_prompts_of_a_group_share_a_step() -> None:
    cluster = built()
    busy(cluster)
    ask(cluster, 4)

    assert jobs(cluster)[1] == ("r0", "r1", "r2", "r3")


def test_a_policy_has_them_computed_one_by_one() -> None:
    cluster = built(lambda: BatchLimits(requests=64, prompt_tokens=0))
    busy(cluster)
    ask(cluster, 4)

    assert {len(job) for job in jobs(cluster)} == {1}


def test_as_many_tokens_as_the_policy_says() -> None:
    cluster = built(lambda: BatchLimits(requests=64, prompt_tokens=50))
    busy(cluster)
    ask(cluster, 4)

    assert jobs(cluster)[1:3] == [("r0", "r1"), ("r2", "r3")]


def test_in_a_turn_they_share_a_chunk() -> None:
    """As many as fit one, and the batch of the engine keeps a place for those that decode."""
    cluster = built(lambda: BatchLimits(requests=64, chunk_tokens=45))
    busy(cluster)
    cluster.work_until(0, lambda: bool(cluster.turns()) and cluster.up[0].turn is not None)
    ask(cluster, 4)

    mixed = [turn.prompts for turn in cluster.turns() if turn.prompts]
    assert mixed[:2] == [("r0", "r1"), ("r2", "r3")]


@pytest.mark.parametrize("chunk", [0, 2048])
def test_no_more_than_the_batch_of_the_engine(chunk: int) -> None:
    cluster = built(lambda: BatchLimits(requests=64, chunk_tokens=chunk), max_batch=3)
    busy(cluster)
    ask(cluster, 5)

    assert max(map(len, jobs(cluster))) == (3 if chunk == 0 else 2)
    for turn in cluster.commands(RunTurn):
        assert len(turn.requests) + len(turn.prompts) <= 3


def test_no_more_than_the_device_has_room_for() -> None:
    """Each as much longer as a prompt that comes alone has to have room for."""
    cluster = built()
    busy(cluster)
    ask(cluster, 5, prompt=200, output=40)

    assert max(map(len, jobs(cluster))) == 3


def test_no_more_than_the_host_tier_has_room_for() -> None:
    cluster = built(host_slabs=4 + 4)
    busy(cluster)
    ask(cluster, 6)

    assert 1 < max(map(len, jobs(cluster))) <= 4
    assert not any(cluster.machine.recomputed_tokens.values())


def test_others_that_wait_for_the_host_tier_go_first() -> None:
    """A small request does not take the room that a large one waits for."""
    cluster = built(host_slabs=4 + 8)
    busy(cluster)
    cluster.ask("small", "a", prompt=20, output=9)
    cluster.ask("large", "a", prompt=230, output=20)
    cluster.ask("late", "a", prompt=20, output=9)
    cluster.settle()

    order = cluster.prompts()
    assert order.index("large") < order.index("late")


def test_batch_work_is_computed_apart() -> None:
    cluster = built()
    busy(cluster)
    inter, batch = RequestClass.INTERACTIVE, RequestClass.BATCH
    for index, kind in enumerate([inter, inter, batch, batch]):
        cluster.ask(f"r{index}", "a", prompt=20, output=9, kind=kind)
    cluster.settle()

    assert jobs(cluster)[1:3] == [("r0", "r1"), ("r2", "r3")]


def test_a_prompt_without_its_weights_is_alone() -> None:
    """It begins before all of them are there; the others follow together."""
    cluster = built(names="ab")
    busy(cluster)
    for index in range(3):
        cluster.ask(f"b{index}", "b", prompt=20, output=9)
    cluster.settle()

    of_b = [job for job in jobs(cluster) if job[0].startswith("b")]
    assert of_b == [("b0",), ("b1", "b2")]
