"""Prompts beside a turn: what the machine grants for them, and what a worker is told before."""

from __future__ import annotations

import pytest

from appliance.hookspecs import hookimpl
from appliance.scheduling.policy_api import BatchLimits, Phase
from appliance.vocabulary import RunTurn
from appliance.worker.frames import AddSequence
from tests.unit.doubles.cluster import ClusterDouble, policy_stack, shape
from tests.unit.doubles.daemon import Box, setup_of, small
from tests.unit.doubles.instance import ModelDouble

CHUNK = 4


class Mixing:
    """Prompts go first, in chunks beside whoever decodes."""

    @hookimpl
    def phase(self) -> Phase:
        return Phase.PREFILL

    @hookimpl
    def batch(self) -> BatchLimits:
        return BatchLimits(requests=100, chunk_tokens=CHUNK)


def built(*, max_batch: int = 64, slabs: int = 40) -> ClusterDouble:
    """One instance with the engine of its only model built, and nothing to do."""
    models = {"a": ModelDouble(4, shape())}
    cluster = ClusterDouble(models, max_batch=max_batch, slabs=slabs, stranger=Mixing())
    cluster.start()
    cluster.settle()
    return cluster


def until_turn(cluster: ClusterDouble, *prompts: str) -> RunTurn:
    """Work until a turn with these prompts runs."""
    running = cluster.up[0]
    cluster.work_until(0, lambda: running.turn is not None and running.turn.prompts == prompts)
    assert running.turn is not None
    return running.turn


def test_a_prompt_takes_a_place_of_the_batch() -> None:
    """Who decodes and whose prompt is computed are together no more than the engine can step."""
    cluster = built(max_batch=3)
    for number in range(8):
        cluster.ask(f"r{number}", "a", output=30)

    cluster.settle()

    sizes = [(len(turn.requests), len(turn.prompts)) for turn in cluster.commands(RunTurn)]
    assert max(sum(size) for size in sizes) == 3
    assert (2, 1) in sizes


def test_a_batch_of_one_has_no_place_for_a_prompt() -> None:
    """An engine that steps one request at a time computes prompts alone, and everybody ends."""
    cluster = built(max_batch=1)
    lives = [cluster.ask(f"r{number}", "a", output=30) for number in range(3)]

    cluster.settle()

    assert not any(turn.prompts for turn in cluster.commands(RunTurn))
    assert all(life.outcome is not None for life in lives)


def test_a_mixed_turn_may_grow_for_as_long_as_its_prompt_takes() -> None:
    """Who decodes gets a token per chunk of the prompt, and slabs for them if there are any."""
    cluster = built(slabs=60)
    cluster.ask("r", "a", prompt=16, output=200)
    until_turn(cluster)
    cluster.ask("p", "a", prompt=200, output=5)

    turn = until_turn(cluster, "p")

    tokens = cluster.world.lives["r"].kv_tokens + 200 // CHUNK
    assert turn.kv_slabs == shape().slabs(shape().blocks(tokens) + shape().blocks(200))


async def test_a_worker_gets_a_prompt_before_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a request that outlived a worker, with the output so far, and that is counted."""
    box = Box(monkeypatch, small("a"), setup_of(small("a")))
    box.daemon.machine.set_policy(policy_stack(["aegaeon"], Mixing()), box.now)
    box.start()
    streams = [box.ask("r", "a", output=40)]
    box.work_until(lambda: box.world.lives["r"].produced == 2)
    streams.append(box.ask("s", "a", output=6))
    box.work_until(lambda: box.world.lives["s"].produced == 3)
    (turn,) = [turn for turn in box.workers[0].heard(RunTurn) if turn.prompts]
    assert (turn.requests, turn.prompts) == (("r",), ("s",))

    box.workers[0].die()
    box.workers[0].greet()
    box.settle()

    ends = [[one.token async for batch in stream for one in batch][-1] for stream in streams]
    assert ends == [40, 6]
    told = [frame.sequence for frame in box.workers[0].heard(AddSequence)]
    assert [(one.request, len(one.output)) for one in told[:2]] == [("r", 0), ("s", 0)]
    assert {one.request: bool(one.output) for one in told[2:]} == {"r": True, "s": True}
    assert box.samples("appliance_requests_recovered_total") == {"model=a": 2}
    box.daemon.host.close()
    assert box.take_failures() == []
