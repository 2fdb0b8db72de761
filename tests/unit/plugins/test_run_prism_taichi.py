"""Prism and TaiChi decide for whole boxes: every request ends, and a replay does the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.plugins.prism import Prism, Weighting
from appliance.plugins.taichi import Infeasible, Taichi
from appliance.policies.loader import PolicyStack
from appliance.vocabulary import FinishReason, MoveKv, RequestClass, RunTurn, Ticked
from tests.unit.doubles.cluster import ClusterDouble, Watchful, shape
from tests.unit.doubles.instance import ModelDouble

Make = Callable[[], object]

POLICIES: dict[str, Make] = {
    "prism": lambda: Prism(period_seconds=0.1, idle_seconds=0.5, migration_threshold=0.0),
    "prism, by rate": lambda: Prism(weighting=Weighting.RATE, period_seconds=1.0, chunk_tokens=0),
    "taichi": lambda: Taichi(watermark=0.2, p_chunk_tokens=64, d_chunk_tokens=16),
    "taichi, disaggregated": lambda: Taichi(d_chunk_tokens=0, p_chunk_tokens=0),
    "taichi, refusing": lambda: Taichi(infeasible=Infeasible.REFUSE, alpha=0.01),
}


def models() -> dict[str, ModelDouble]:
    """Five of different weights and KV shapes; about two of them fit an instance."""
    return {
        f"m{index}": ModelDouble(
            4 + index % 3, shape(3 + index % 3, 1 + index % 2, 300 + 450 * (index % 3))
        )
        for index in range(5)
    }


def box(
    make: Make, kinds: dict[str, ModelDouble], *, instances: int = 3, slabs: int = 40
) -> ClusterDouble:
    return ClusterDouble(kinds, stranger=make(), instances=instances, slabs=slabs, max_batch=8)


def stack(cluster: ClusterDouble) -> PolicyStack:
    policy = cluster.machine._context.policy
    assert isinstance(policy, Watchful)
    return policy.stack


@pytest.mark.parametrize(
    ("name", "instances"), [*((name, 3) for name in POLICIES), ("prism", 1), ("taichi", 1)]
)
def test_every_request_ends(name: str, instances: int) -> None:
    """With an instance lost and back, idle times, and both classes; no answer is invalid, nobody
    is left over, and the same events lead to the same commands."""
    cluster = box(POLICIES[name], models(), instances=instances, slabs=16)
    cluster.start()
    for index in range(60):
        kind = RequestClass.BATCH if index % 7 == 3 else RequestClass.INTERACTIVE
        model = f"m{(index + index // 20) % (2 + index // 20)}"
        cluster.ask(
            f"r{index}", model, prompt=1 + index * 13 % 90, output=5 + index % 30, kind=kind
        )
        for number in range(3):
            cluster.work((index + number) % 3)
        if index == 20:
            cluster.lose(instances // 2)
        if index == 30:
            cluster.start(instances // 2)
        if index % 20 == 19:
            cluster.now += 1.5
            cluster.tell(Ticked())
    cluster.settle()

    assert not cluster.machine.requests
    lives = cluster.world.lives.values()
    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
    assert stack(cluster).faults == []
    again = box(POLICIES[name], models(), instances=instances, slabs=16).machine
    replayed = [again.handle(event, now) for now, event, _ in cluster.journal]
    assert replayed == [commands for _, _, commands in cluster.journal]


def test_a_model_stays_on_its_gpu() -> None:
    """Under Prism, no KV goes from one instance to another, and each model of two that fit has an
    instance to itself."""
    cluster = box(lambda: Prism(), {name: ModelDouble(8, shape()) for name in "ab"})
    cluster.start()
    cluster.settle()
    for index in range(20):
        cluster.ask(f"r{index}", "ab"[index % 2], output=30)
        cluster.work(index % 3)
    cluster.settle()

    places = {(turn.model, turn.instance) for turn in cluster.commands(RunTurn)}
    assert len(places) == 2
    assert len({instance for _, instance in places}) == 2
    assert not cluster.commands(MoveKv)


def test_requests_flow_both_ways() -> None:
    """Under TaiChi, those that filled a D-heavy instance go on on the P-heavy one, and those that
    get their tokens too slowly come back."""
    alpha = {"strict": 0.005, "loose": 10.0}
    flown: dict[str, set[tuple[int, int]]] = {}
    for name, factor in alpha.items():
        policy = Taichi(watermark=0.05, alpha=factor, d_chunk_tokens=16, prefill_share=0.3)
        cluster = box(lambda policy=policy: policy, {"a": ModelDouble(8, shape())})  # type: ignore[misc]
        cluster.start()
        cluster.settle()
        for index in range(12):
            cluster.ask(f"r{index}", "a", prompt=40, output=60)
        cluster.settle()
        homes: dict[str, int] = {}
        flown[name] = set()
        for turn in cluster.commands(RunTurn):
            for request in turn.requests:
                before = homes.get(request, turn.instance)
                homes[request] = turn.instance
                if before != turn.instance:
                    flown[name].add((before, turn.instance))

    assert any(target == 0 for _, target in flown["loose"])
    assert not any(source == 0 for source, _ in flown["loose"])
    assert any(source == 0 for source, _ in flown["strict"])


def test_prompts_are_computed_in_decoding_steps() -> None:
    """Under TaiChi, in chunks of S_P or S_D tokens."""
    cluster = box(
        lambda: Taichi(p_chunk_tokens=64, d_chunk_tokens=16), {"a": ModelDouble(8, shape())}
    )
    cluster.start()
    cluster.settle()
    for index in range(20):
        cluster.ask(f"r{index}", "a", prompt=60, output=40)
        for number in range(3):
            cluster.work(number)
    cluster.settle()

    mixed = {(t.instance, t.chunk_tokens) for t in cluster.commands(RunTurn) if t.prompts}
    assert mixed
    assert mixed <= {(0, 64), (1, 64), (2, 16)}
