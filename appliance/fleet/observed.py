"""What boxes say of themselves, as what a plan of their models needs: sans-IO.

Demand is a forecast by the boxes' ledgers of usage: device time by model and day.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from enum import StrEnum
from typing import Any, Final

import msgspec

from appliance.fleet.placement import BoxRoom, ModelNeed, Step, plan
from appliance.vocabulary import ModelName, Word

HALF_LIFE_DAYS: Final = 2.0
"""A day counts half as much as one so many days later."""
USAGE_DAYS: Final = 7
"""As many days before today are asked for."""
DAY_SECONDS: Final = 86400.0
PIN_SHARE: Final = 0.8
"""Of a host cache, what pins may take: KV and other models need some."""


class Hold(StrEnum):
    """What it means that a box holds a model."""

    CATALOGUE = "catalogue"
    """It serves it."""
    PINS = "pins"
    """Its weights stay in the host cache."""


class ObservedModel(Word, frozen=True, kw_only=True):
    """A model on one box."""

    name: ModelName
    weight_bytes: int
    pinned: bool
    table: Mapping[str, Any]
    """A body of ``POST /api/models`` with which another box would serve it."""


class ObservedBox(Word, frozen=True, kw_only=True):
    """A box, from its answers."""

    name: str
    url: str
    draining: bool
    devices: int
    host_bytes: int
    pool_bytes: int
    models: tuple[ObservedModel, ...]
    demands: Mapping[ModelName, float]
    """Instances that are expected to be busy with each model, by its ledger."""


class PlanFile(Word, frozen=True, kw_only=True):
    """What `fleet plan` writes and `fleet apply` reads: JSON."""

    hold: Hold
    urls: Mapping[str, str]
    """Of boxes by their names."""
    tables: Mapping[ModelName, Mapping[str, Any]] = {}
    """Of models that boxes are to get."""
    steps: tuple[Step, ...]


class _Amount(msgspec.Struct):
    """As much of a row of ``GET /api/usage?by=model,day`` as is needed."""

    model: str
    day: str
    gpu_seconds: float


class _Usage(msgspec.Struct):
    rows: list[_Amount]


class _Slo(msgspec.Struct):
    ttft_seconds: float
    tbt_seconds: float
    gap_seconds: float = 0.0

    def table(self) -> dict[str, str]:
        found = {"ttft": f"{self.ttft_seconds:g}s", "tbt": f"{self.tbt_seconds:g}s"}
        return found | ({"gap": f"{self.gap_seconds:g}s"} if self.gap_seconds else {})


class _Terms(msgspec.Struct):
    slo: _Slo
    batch_slo: _Slo
    max_queue: int
    pinned: bool
    aliases: list[str] = []


class _Facts(msgspec.Struct):
    weight_bytes: int
    max_context_tokens: int
    path: str
    images: int = 0
    sounds: int = 0


class _Model(msgspec.Struct):
    model: str
    facts: _Facts | None = None
    terms: _Terms | None = None


class _Instance(msgspec.Struct):
    state: str
    pool_bytes: dict[str, int] = {}
    ranks: int = 1


class _Status(msgspec.Struct):
    """As much of ``GET /api/status``."""

    instances: list[_Instance]
    models: list[_Model]
    host_bytes: dict[str, int] = {}


class _Load(msgspec.Struct):
    draining: bool


def read_box(
    name: str, url: str, status: bytes, load: bytes, usage: bytes, today: date, seconds: float
) -> ObservedBox:
    """A box by its answers to ``/api/status``, ``/api/load`` and ``/api/usage?by=model,day``, when
    so many seconds of the day (UTC) are over. Raises `msgspec.DecodeError` for what is no answer of
    the appliance."""
    found = msgspec.json.decode(status, type=_Status)
    up = [instance for instance in found.instances if instance.state == "up"]
    return ObservedBox(
        name=name,
        url=url,
        draining=msgspec.json.decode(load, type=_Load).draining or not up,
        devices=max(1, len(up)),
        host_bytes=sum(found.host_bytes.values()),
        pool_bytes=sum([sum(one.pool_bytes.values()) * one.ranks for one in up]),
        models=tuple(_model(one) for one in found.models if one.facts and one.terms),
        demands=_forecasts(msgspec.json.decode(usage, type=_Usage).rows, today, seconds),
    )


def _model(found: _Model) -> ObservedModel:
    facts, terms = found.facts, found.terms
    assert facts is not None and terms is not None  # noqa: PT018 - models without are left out
    table: dict[str, Any] = {
        "name": found.model,
        "path": facts.path,
        "max_context": facts.max_context_tokens,
        "slo": terms.slo.table(),
        "batch_slo": terms.batch_slo.table(),
        "max_queue": terms.max_queue,
    }
    more = {"aliases": terms.aliases, "images": facts.images, "sounds": facts.sounds}
    return ObservedModel(
        name=found.model,
        weight_bytes=facts.weight_bytes,
        pinned=terms.pinned,
        table=table | {key: value for key, value in more.items() if value},
    )


def _forecasts(rows: Sequence[_Amount], today: date, seconds: float) -> dict[ModelName, float]:
    days: dict[ModelName, dict[int, float]] = defaultdict(dict)
    for row in rows:
        age = (today - date.fromisoformat(row.day)).days
        days[row.model][age] = row.gpu_seconds
    first = max([age for ages in days.values() for age in ages], default=0)
    return {model: forecast(ages, first, seconds) for model, ages in days.items()}


def forecast(seconds_by_age: Mapping[int, float], first: int, today_seconds: float) -> float:
    """How many instances a model is expected to keep busy: the mean of the days since the `first`
    (so many days ago), of which later ones count more; of today, the part that is over."""
    used = known = 0.0
    for age in range(first + 1):
        weight = 0.5 ** (age / HALF_LIFE_DAYS)
        used += weight * seconds_by_age.get(age, 0.0)
        known += weight * (DAY_SECONDS if age else today_seconds)
    return used / max(1.0, known)


def make_plan(boxes: Sequence[ObservedBox], hold: Hold, most: int | None) -> PlanFile:
    """Which box should hold which model. A box that drains gets none, and what it holds alone, one
    of the others gets, too. With pins, models are pinned only where they are served."""
    open_ = [box for box in boxes if not box.draining]
    rooms = [_room(box, hold) for box in open_]
    by_name = {model.name: model for box in boxes for model in box.models}
    demands: dict[ModelName, float] = defaultdict(float)
    for box in boxes:
        for name, demand in box.demands.items():
            demands[name] += demand
    served = {
        name: frozenset([b.name for b in open_ if any(m.name == name for m in b.models)])
        for name in by_name
    }
    pinned = {
        name: frozenset(
            [b.name for b in open_ if any(m.name == name and m.pinned for m in b.models)]
        )
        for name in by_name
    }
    pins = hold is Hold.PINS
    needs = [
        ModelNeed(
            name=name,
            weight_bytes=model.weight_bytes,
            demand=demands[name],
            boxes=served[name] if pins else None,
        )
        for name, model in sorted(by_name.items())
        if demands[name] > 0 or pinned[name] or not pins
    ]
    steps = plan(rooms, needs, pinned if pins else served, most=most, must_fit=pins)
    gained = {step.model for step in steps if step.target is not None}
    return PlanFile(
        hold=hold,
        urls={box.name: box.url for box in boxes},
        tables={} if pins else {name: by_name[name].table for name in sorted(gained)},
        steps=tuple(steps),
    )


def _room(box: ObservedBox, hold: Hold) -> BoxRoom:
    size = max(box.host_bytes, box.pool_bytes)
    if hold is Hold.PINS:
        size = int(PIN_SHARE * box.host_bytes)
    return BoxRoom(name=box.name, devices=box.devices, memory_bytes=size)
