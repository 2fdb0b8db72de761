"""Prism and TaiChi decide for whole boxes: every request ends, and a replay does the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.plugins.prism import Prism, Weighting
from appliance.plugins.taichi import Infeasible, Taichi
from appliance.policies.loader import PolicyStack
from appliance.vocabulary import FinishReason, MoveKv, RequestClass, RunTurn, Ticked
from tests.unit.doubles.floor import FloorDouble, Watchful, shape
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
) -> FloorDouble:
    return FloorDouble(kinds, stranger=make(), instances=instances, slabs=slabs, max_batch=8)


def stack(floor: FloorDouble) -> PolicyStack:
    policy = floor.machine._desk.policy
    assert isinstance(policy, Watchful)
    return policy.stack


@pytest.mark.parametrize(
    ("name", "instances"), [*((name, 3) for name in POLICIES), ("prism", 1), ("taichi", 1)]
)
def test_every_request_ends(name: str, instances: int) -> None:
    """With an instance lost and back, idle times, and both classes; no answer is invalid, nobody
    is left over, and the same events lead to the same commands."""
    floor = box(POLICIES[name], models(), instances=instances, slabs=16)
    floor.start()
    for index in range(60):
        kind = RequestClass.BATCH if index % 7 == 3 else RequestClass.INTERACTIVE
        model = f"m{(index + index // 20) % (2 + index // 20)}"
        floor.ask(f"r{index}", model, prompt=1 + index * 13 % 90, output=5 + index % 30, kind=kind)
        for number in range(3):
            floor.work((index + number) % 3)
        if index == 20:
            floor.lose(instances // 2)
        if index == 30:
            floor.start(instances // 2)
        if index % 20 == 19:
            floor.now += 1.5
            floor.tell(Ticked())
    floor.settle()

    assert not floor.machine.requests
    lives = floor.world.lives.values()
    assert {life.outcome for life in lives} == {FinishReason.LENGTH}
    assert stack(floor).faults == []
    again = box(POLICIES[name], models(), instances=instances, slabs=16).machine
    replayed = [again.handle(event, now) for now, event, _ in floor.journal]
    assert replayed == [commands for _, _, commands in floor.journal]


def test_a_model_stays_on_its_gpu() -> None:
    """Under Prism, no KV goes from one instance to another, and each model of two that fit has an
    instance to itself."""
    floor = box(lambda: Prism(), {name: ModelDouble(8, shape()) for name in "ab"})
    floor.start()
    floor.settle()
    for index in range(20):
        floor.ask(f"r{index}", "ab"[index % 2], output=30)
        floor.work(index % 3)
    floor.settle()

    places = {(turn.model, turn.instance) for turn in floor.commands(RunTurn)}
    assert len(places) == 2
    assert len({instance for _, instance in places}) == 2
    assert not floor.commands(MoveKv)


def test_requests_flow_both_ways() -> None:
    """Under TaiChi, those that filled a D-heavy instance go on on the P-heavy one, and those that
    get their tokens too slowly come back."""
    alpha = {"strict": 0.005, "loose": 10.0}
    flown: dict[str, set[tuple[int, int]]] = {}
    for name, factor in alpha.items():
        policy = Taichi(watermark=0.05, alpha=factor, d_chunk_tokens=16, prefill_share=0.3)
        floor = box(lambda policy=policy: policy, {"a": ModelDouble(8, shape())})  # type: ignore[misc]
        floor.start()
        floor.settle()
        for index in range(12):
            floor.ask(f"r{index}", "a", prompt=40, output=60)
        floor.settle()
        homes: dict[str, int] = {}
        flown[name] = set()
        for turn in floor.commands(RunTurn):
            for request in turn.requests:
                before = homes.get(request, turn.instance)
                homes[request] = turn.instance
                if before != turn.instance:
                    flown[name].add((before, turn.instance))

    assert any(target == 0 for _, target in flown["loose"])
    assert not any(source == 0 for source, _ in flown["loose"])
    assert any(source == 0 for source, _ in flown["strict"])


def test_prompts_are_computed_beside_decoding() -> None:
    """Under TaiChi, in chunks of S_P or S_D tokens."""
    floor = box(
        lambda: Taichi(p_chunk_tokens=64, d_chunk_tokens=16), {"a": ModelDouble(8, shape())}
    )
    floor.start()
    floor.settle()
    for index in range(20):
        floor.ask(f"r{index}", "a", prompt=60, output=40)
        for number in range(3):
            floor.work(number)
    floor.settle()

    mixed = {(t.instance, t.chunk_tokens) for t in floor.commands(RunTurn) if t.prompts}
    assert mixed
    assert mixed <= {(0, 64), (1, 64), (2, 16)}
