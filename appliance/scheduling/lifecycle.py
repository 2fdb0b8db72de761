"""The lives of a request, of its KV, and of an engine, as transition tables.

A transition that is not in its table raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from appliance.errors import IllegalTransition


class Stage(StrEnum):
    """Where a request is on its way."""

    UNPLACED = "unplaced"
    """No instance can take it now, or the policy holds it."""
    QUEUED = "queued"
    """In a prefill group."""
    PREFILLING = "prefilling"
    READY = "ready"
    """In a decode batch, between turns."""
    RUNNING = "running"
    """In the turn that runs."""
    PAUSED = "paused"
    """In no batch, as its client takes nothing."""
    DONE = "done"


class KvPlace(StrEnum):
    """Where a request's KV cache is."""

    NONE = "none"
    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    ARRIVING = "arriving"
    SPILLING = "spilling"
    """Being written from the host tier to disk."""
    DISK = "disk"
    RESTORING = "restoring"
    """Being read from disk into the host tier."""


class EngineStage(StrEnum):
    """What exists of a model on an instance."""

    ABSENT = "absent"
    BUILDING = "building"
    COLD = "cold"
    """Built; weights in the host tier or on disk only."""
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"


STAGES: Mapping[Stage, frozenset[Stage]] = {
    Stage.UNPLACED: frozenset({Stage.QUEUED, Stage.READY, Stage.DONE}),
    Stage.QUEUED: frozenset({Stage.PREFILLING, Stage.UNPLACED, Stage.DONE}),
    Stage.PREFILLING: frozenset({Stage.READY, Stage.QUEUED, Stage.UNPLACED, Stage.DONE}),
    Stage.READY: frozenset({Stage.RUNNING, Stage.PAUSED, Stage.UNPLACED, Stage.DONE}),
    Stage.RUNNING: frozenset({Stage.READY, Stage.UNPLACED, Stage.DONE}),
    Stage.PAUSED: frozenset({Stage.READY, Stage.UNPLACED, Stage.DONE}),
    Stage.DONE: frozenset(),
}

# The loss of an instance takes KV from any place on its device to NONE: a fact, no transition.
KV_PLACES: Mapping[KvPlace, frozenset[KvPlace]] = {
    KvPlace.NONE: frozenset({KvPlace.DEVICE}),
    KvPlace.DEVICE: frozenset({KvPlace.LEAVING, KvPlace.NONE}),
    KvPlace.LEAVING: frozenset({KvPlace.HOST}),
    KvPlace.HOST: frozenset({KvPlace.ARRIVING, KvPlace.SPILLING}),
    KvPlace.ARRIVING: frozenset({KvPlace.DEVICE, KvPlace.HOST}),
    KvPlace.SPILLING: frozenset({KvPlace.DISK, KvPlace.HOST}),
    KvPlace.DISK: frozenset({KvPlace.RESTORING, KvPlace.NONE}),
    KvPlace.RESTORING: frozenset({KvPlace.HOST, KvPlace.NONE}),
}

ENGINES: Mapping[EngineStage, frozenset[EngineStage]] = {
    EngineStage.ABSENT: frozenset({EngineStage.BUILDING}),
    EngineStage.BUILDING: frozenset({EngineStage.COLD, EngineStage.FAILED}),
    EngineStage.COLD: frozenset({EngineStage.LOADING}),
    EngineStage.LOADING: frozenset({EngineStage.LOADED, EngineStage.COLD, EngineStage.FAILED}),
    EngineStage.LOADED: frozenset({EngineStage.COLD}),
    EngineStage.FAILED: frozenset(),
}

S = TypeVar("S", bound=StrEnum)


def move(table: Mapping[S, frozenset[S]], current: S, target: S, subject: str) -> S:
    """`target`, if the table allows it from `current`; raises `IllegalTransition` otherwise."""
    if target not in table[current]:
        raise IllegalTransition(f"{subject}: {type(current).__name__} {current} -> {target}")
    return target
