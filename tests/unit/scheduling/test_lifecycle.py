"""The transition tables: what is not in them raises and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from appliance.errors import IllegalTransition
from appliance.scheduling.lifecycle import (
    ENGINES,
    KV_PLACES,
    STAGES,
    EngineStage,
    KvPlace,
    Stage,
    move,
)
from appliance.scheduling.state import EngineState, RequestState
from appliance.vocabulary import RequestSpec, Slo

TABLES: list[tuple[Mapping[Any, frozenset[Any]], type[StrEnum]]] = [
    (STAGES, Stage),
    (KV_PLACES, KvPlace),
    (ENGINES, EngineStage),
]
STEPS = [
    (table, current, target)
    for table, states in TABLES
    for current, target in product(states, repeat=2)
]


@pytest.mark.parametrize(("table", "current", "target"), STEPS)
def test_every_step_is_legal_or_an_error(
    table: Mapping[StrEnum, frozenset[StrEnum]], current: StrEnum, target: StrEnum
) -> None:
    """A step in the table gives its target; any other raises and names who, whence and whither."""
    if target in table[current]:
        assert move(table, current, target, "x") is target
    else:
        with pytest.raises(IllegalTransition, match=f"x: .* {current} -> {target}"):
            move(table, current, target, "x")


def request_state() -> RequestState:
    slo = Slo(ttft_seconds=1.0, tbt_seconds=0.1)
    spec = RequestSpec(id="r", model="a", prompt_tokens=10, max_tokens=5, slo=slo)
    return RequestState(spec=spec, arrived=0.0, progressed=0.0)


def test_an_illegal_stage_changes_nothing() -> None:
    """A request that may not go on stays where it is."""
    request = request_state()

    with pytest.raises(IllegalTransition, match="r: Stage unplaced -> running"):
        request.to_stage(Stage.RUNNING)

    assert request.stage is Stage.UNPLACED


def test_an_illegal_move_of_kv_changes_nothing() -> None:
    """KV that is nowhere cannot be in the host tier; nor is its holder changed."""
    request = request_state()

    with pytest.raises(IllegalTransition):
        request.to_kv(KvPlace.HOST, 3)

    assert (request.kv, request.kv_instance) == (KvPlace.NONE, None)


def test_an_engine_that_failed_stays_failed() -> None:
    """No step leads out of a failed build."""
    engine = EngineState(stage=EngineStage.FAILED)

    with pytest.raises(IllegalTransition):
        engine.to_stage(EngineStage.BUILDING, "a")

    assert engine.stage is EngineStage.FAILED
