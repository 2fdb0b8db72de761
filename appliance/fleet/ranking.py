"""Which box of a fleet a request goes to: pure functions of what boxes last said of their load.

    resident > coming > in host cache > on disk; a crowded box comes after all that are not

Where other models are to come to a box's devices, models take turns there, and one that is resident
counts as coming. Of the boxes where a model is resident, or coming, the one with the most requests
of it is first; of those where it is in the host cache or on disk, the one that has requests of the
fewest other models. So models gather on boxes that hold all they are asked for, instead of taking
turns on each.

A box that is asked for more models than are on its devices takes turns until requests of its models
go elsewhere. So they do where a box has the model in its host cache, and a resident model that has
no requests: the model comes there once, for the price of one turn.

Boxes that are alike in that get requests by their load, then by the age of their queue, and ties go
by model, or by prefix or session. A router knows what it has sent to a box since the box was asked
last, and counts that (`BoxState.sent`): otherwise all requests between two polls would go to the
same box.

Ties are broken by rendezvous hashing, so that routers that know the same choose the same without a
word between them, and a box that comes or goes moves only its own share.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, TypeAlias

from appliance.vocabulary import ModelName, Word

CROWDED_FACTOR, CROWDED_SLACK = 1.5, 4
"""A box is crowded with more requests than so many times the mean of the boxes and so many more;
then others come first. The age of its queue does not say that: a request whose model is read from
disk waits longest, on a box that has little to do."""
LATELY_SECONDS = 30.0
"""A model that had requests so lately will have more: its place is not free."""
TIE_FACTOR, TIE_SLACK = 1.25, 2
"""Boxes tie whose requests are at most so many times those of the least busy one, and so many
more."""


class BoxLoad(Word, frozen=True, kw_only=True):
    """What a box says of itself."""

    catalogue: frozenset[ModelName]
    """Models that it serves."""
    resident: frozenset[ModelName] = frozenset()
    """Models whose weights are on a device."""
    coming: frozenset[ModelName] = frozenset()
    """Models that are loaded now, that an operator wants there, or that requests wait for."""
    host: frozenset[ModelName] = frozenset()
    """Models with a whole image in the host cache."""
    waiting: int = 0
    """Requests that are not computed now."""
    running: int = 0
    """Those that are."""
    queue_age_seconds: float = 0.0
    """How long the oldest request has waited of which nothing was computed yet."""
    pool_free_bytes: int = 0
    requests_by_model: Mapping[ModelName, int] = {}
    """Those that have not ended, by all names of models that have any."""
    asked_models: int = 0
    """How many models have any."""
    resident_models: int = 0
    """How many models are resident; each counts once, whatever names it has."""
    coming_models: int = 0
    """How many are coming."""
    attainment: float | None = None
    """Share of late requests that met their SLO targets; None if there were none."""
    draining: bool = False
    version: str = ""


class BoxState(Word, frozen=True, kw_only=True):
    """A box as its router knows it."""

    name: str
    load: BoxLoad
    """As of the last poll."""
    dead: bool = False
    """Whether it does not answer."""
    sent: int = 0
    """Requests that the router sent to it since the last poll."""
    sent_models: Mapping[ModelName, int] = {}
    """The same by model: they are coming there now."""
    lately: frozenset[ModelName] = frozenset()
    """Models of which the router sent it requests in the last `LATELY_SECONDS`."""

    def takes(self, model: ModelName) -> bool:
        """Whether a request of the model may go there."""
        return not self.dead and not self.load.draining and model in self.load.catalogue

    @property
    def requests(self) -> int:
        """Those that it had, and those that it was sent since."""
        return self.load.waiting + self.load.running + self.sent

    def requests_of(self, model: ModelName) -> int:
        """The same, of one model."""
        return self.load.requests_by_model.get(model, 0) + self.sent_models.get(model, 0)

    def others_asked_for(self, model: ModelName, also: frozenset[ModelName] = frozenset()) -> int:
        """Models other than this one that have requests there, or are in `also`."""
        known = self.load.requests_by_model
        more = {one for one, number in self.sent_models.items() if number} | also
        return self.load.asked_models - (model in known) + len(more - known.keys() - {model})

    def holds_all_and(self, model: ModelName) -> bool:
        """Whether the devices hold as many models as other ones have requests, and this one. Models
        count as equal."""
        return self.others_asked_for(model) < max(1, self.load.resident_models)

    def has_room_for(self, model: ModelName) -> bool:
        """The same, where models count, too, that had requests lately: they will have more."""
        return self.others_asked_for(model, self.lately) < max(1, self.load.resident_models)

    def others_coming(self, model: ModelName) -> bool:
        """Whether models other than this one are to come to its devices."""
        if self.load.coming_models > (model in self.load.coming):
            return True
        return any(one != model and one not in self.load.resident for one in self.sent_models)


class Nearness(IntEnum):
    """How near a model is to a device of a box; less is nearer."""

    RESIDENT = 0
    COMING = 1
    HOST = 2
    DISK = 3


class FleetRequest(Word, frozen=True, kw_only=True):
    """A request that has to go somewhere. `session` names its session, or the prefix of its prompt;
    empty if neither is known."""

    model: ModelName
    session: str = ""


Choose: TypeAlias = Callable[[FleetRequest, Sequence[BoxState], float], BoxState | None]
"""The box for a request, or None if none may take it. O(boxes). The float, in [0, 1), is the chance
that a choice may depend on."""


def nearness(box: BoxState, model: ModelName) -> Nearness:
    """Of a model on a box, as far as its router knows."""
    load = box.load
    if model in load.resident:
        return Nearness.RESIDENT
    if model in load.coming or model in box.sent_models:
        return Nearness.COMING
    return Nearness.HOST if model in load.host else Nearness.DISK


def choose_random(
    request: FleetRequest, boxes: Sequence[BoxState], chance: float
) -> BoxState | None:
    """Any box."""
    able = _able(request, boxes)
    return able[int(chance * len(able))] if able else None


def choose_least_busy(
    request: FleetRequest, boxes: Sequence[BoxState], chance: float
) -> BoxState | None:
    """Any of the boxes with the fewest requests."""
    able = _able(request, boxes)
    fewest = min([box.requests for box in able], default=0)
    return choose_random(request, [box for box in able if box.requests == fewest], chance)


def choose_residency(
    request: FleetRequest, boxes: Sequence[BoxState], chance: float
) -> BoxState | None:
    """The box where the model is nearest, and of those the one with the fewest requests, then the
    youngest queue; ties go by model, so that a model that is nowhere comes to one box."""
    nearest = _nearest(request.model, _able(request, boxes))
    return _least_loaded(request.model, nearest) if nearest else None


def choose_residency_prefix(
    request: FleetRequest, boxes: Sequence[BoxState], chance: float
) -> BoxState | None:
    """The same, but of boxes with the same number of requests of the model a session stays on its
    own, while that one is about as busy as the others: its prefix may be cached there."""
    nearest = _nearest(request.model, _able(request, boxes))
    if not nearest:
        return None
    if not request.session or any(nearness(b, request.model) >= Nearness.HOST for b in nearest):
        return _least_loaded(request.model, nearest)
    most = TIE_FACTOR * min([box.requests for box in nearest]) + TIE_SLACK
    tied = [box for box in nearest if box.requests <= most]
    return min(tied, key=lambda box: _weight(request.session, box))


ROUTERS: Final[Mapping[str, Choose]] = {
    "random": choose_random,
    "least_busy": choose_least_busy,
    "residency": choose_residency,
    "residency_prefix": choose_residency_prefix,
}
"""By the names that scenarios give them."""


def _able(request: FleetRequest, boxes: Sequence[BoxState]) -> list[BoxState]:
    return [box for box in boxes if box.takes(request.model)]


def _rank(box: BoxState, model: ModelName) -> tuple[Nearness, bool, int]:
    """Less is better. O(models that have requests there)."""
    near = nearness(box, model)
    if near >= Nearness.HOST:
        moves_there = near is Nearness.HOST and box.has_room_for(model)
        return (Nearness.COMING if moves_there else near), moves_there, box.others_asked_for(model)
    if near is Nearness.COMING or box.others_coming(model):
        near = Nearness.COMING if box.holds_all_and(model) else Nearness.HOST
    return near, False, -box.requests_of(model)


def _nearest(model: ModelName, able: Sequence[BoxState]) -> list[BoxState]:
    """The boxes that are not crowded, and of those the best ones; none if none is able."""
    if not able:
        return []
    most = CROWDED_FACTOR * math.fsum([box.requests for box in able]) / len(able) + CROWDED_SLACK
    free = [box for box in able if box.requests <= most]
    ranked = [(_rank(box, model), box) for box in free]
    best = min([rank for rank, _ in ranked])
    return [box for rank, box in ranked if rank == best]


def _least_loaded(model: ModelName, boxes: Sequence[BoxState]) -> BoxState:
    return min(
        boxes, key=lambda box: (box.requests, box.load.queue_age_seconds, _weight(model, box))
    )


def _weight(key: str, box: BoxState) -> bytes:
    """Its place among the boxes for this key: the least weight is first. A checksum would not do:
    the differences between its values for two boxes are the same for all keys."""
    return hashlib.blake2b(f"{key}\0{box.name}".encode(), digest_size=8).digest()
