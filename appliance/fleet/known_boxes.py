"""What a router knows of boxes: what each said last, and what was sent to it since.

Sans-IO: it turns that into the words of `appliance.fleet.ranking`, whose rule ranks the boxes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from appliance.fleet.calls import Hint
from appliance.fleet.ranking import LATELY_SECONDS, BoxLoad, BoxState, Choose, FleetRequest
from appliance.vocabulary import ModelName, Word

UNSEEN_SECONDS: Final = 2.0
"""What was sent to a box is not in what it says of itself for about so long: a poll each second,
and the way of its answer through the cluster."""
_LATEST: Final = ":latest"
"""Ollama's clients add it to names."""
NO_LOAD: Final = BoxLoad(catalogue=frozenset())


class Report(Word, frozen=True, kw_only=True):
    """What the proxy of a box says of it."""

    box: str
    load: bytes = b""
    """The last body of ``GET /api/load``; empty if there was none yet."""
    dead: bool = False
    """Whether the daemon did not answer the last time."""

    def as_stats(self) -> dict[str, Any]:
        """As a router of Ray gets it."""
        return msgspec.structs.asdict(self)


class _Sent(NamedTuple):
    at: float
    model: ModelName


def read_load(body: bytes) -> BoxLoad:
    """A box's own words; those of a box without models, if it has said nothing that is known."""
    try:
        return msgspec.json.decode(body, type=BoxLoad)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NO_LOAD


class KnownBoxes:
    """One router's. Boxes have keys of its choice; `now` is a clock in seconds, `chance` gives
    numbers in [0, 1)."""

    def __init__(
        self, choose: Choose, now: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        self._choose = choose
        self._now = now
        self._chance = chance
        self._loads: dict[str, tuple[bytes, BoxLoad]] = {}
        self._unseen: dict[str, OrderedDict[str, _Sent]] = {}
        """By box and request: those that have not ended, in the order in which they were sent, but
        not much older than `UNSEEN_SECONDS`."""
        self._asked: dict[str, dict[ModelName, float]] = {}
        """By box: when each model was asked for last."""

    def ranked(self, hint: Hint, reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Keys of the boxes for a request, the best first. Boxes that refused it come only if
        nothing else is left, and a box without the model only if no box is known to have it.
        O(requests of the last `UNSEEN_SECONDS` + models of the last `LATELY_SECONDS`), and
        O(boxes²), as the rule is asked once for each box that has the model."""
        boxes = {key: self._state(key, report) for key, report in reports.items()}
        model = _served_name(hint.model, (box.load for box in boxes.values()))
        left = {key: box for key, box in boxes.items() if box.name not in hint.excluded}
        holders = {key: box for key, box in left.items() if model in box.load.catalogue}
        keys = self._in_order(FleetRequest(model=model, session=hint.session), holders)
        if keys:
            return keys
        if hint.excluded and len(left) < len(boxes):
            return [key for key in boxes if key not in left]  # which says that nothing is left
        return sorted(boxes, key=lambda key: (boxes[key].dead, boxes[key].load.draining))

    def _in_order(self, request: FleetRequest, holders: Mapping[str, BoxState]) -> list[str]:
        """Boxes that take it, as the rule chooses among those that are left; then the others."""
        names = {box.name: key for key, box in holders.items()}
        able, order = [box for box in holders.values() if box.takes(request.model)], []
        while able:
            best = self._choose(request, able, self._chance())
            if best is None:
                break
            able.remove(best)
            order.append(names[best.name])
        others = [key for key in holders if key not in order]
        return order + sorted(others, key=lambda key: holders[key].dead)

    def sent(self, key: str, request: str, model: ModelName) -> None:
        """A request goes to a box."""
        now, model = self._now(), _served_name(model, (load for _, load in self._loads.values()))
        unseen = self._unseen.setdefault(key, OrderedDict())
        unseen[request] = _Sent(now, model)
        unseen.move_to_end(request)
        _, load = self._loads.get(key, (b"", NO_LOAD))
        if model in load.catalogue:  # clients ask for whatever they like, and for no model at all
            self._asked.setdefault(key, {})[model] = now

    def ended(self, key: str, request: str) -> None:
        """It has its answer, or there will be none."""
        if (unseen := self._unseen.get(key)) is not None:
            unseen.pop(request, None)

    def keep(self, keys: Sequence[str]) -> None:
        """Forget boxes that have gone."""
        for known in (self._loads, self._unseen, self._asked):
            for key in [key for key in known if key not in keys]:
                del known[key]

    def _state(self, key: str, report: Mapping[str, Any]) -> BoxState:
        body = report.get("load") or b""
        if (cached := self._loads.get(key)) is None or cached[0] is not body:
            cached = self._loads[key] = (body, read_load(body))
        now = self._now()
        since = now - UNSEEN_SECONDS
        asked = self._asked.setdefault(key, {})
        for model in [model for model, at in asked.items() if at < now - LATELY_SECONDS]:
            del asked[model]
        unseen = self._unseen.setdefault(key, OrderedDict())
        while unseen and next(iter(unseen.values())).at < since:
            unseen.popitem(last=False)
        counts = Counter([one.model for one in unseen.values()])
        models = {model: counts[model] for model, at in asked.items() if at >= since}
        return BoxState(
            name=report.get("box", key),
            load=cached[1],
            dead=bool(report.get("dead", not body)),
            sent=len(unseen),
            sent_models=models,
            lately=frozenset(asked),
        )


def _served_name(model: ModelName, loads: Iterable[BoxLoad]) -> ModelName:
    """The name in catalogues of what a client calls `model`."""
    short = model.removesuffix(_LATEST)
    if short != model and not any(model in load.catalogue for load in loads):
        return short
    return model
