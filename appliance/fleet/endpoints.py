"""Which boxes a router may send requests to, as a file for llm-d's endpoint picker.

Sans-IO: polls are made elsewhere; this says what their answers mean and what the file holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from appliance.errors import FleetError
from appliance.fleet.box_addresses import Box

ENGINE: Final = {"llm-d.ai/engine-type": "appliance"}
"""The label by which the picker finds the names of our metrics."""
MISSES: Final = 2
"""So many polls in a row that a box leaves unanswered take it out, unless it was never in."""


class Polled(NamedTuple):
    """What a box answered: the statuses of ``/readyz`` and ``/api/load``, and their bodies."""

    ready_status: int
    load_status: int
    load: bytes
    ready: bytes = b""


class _Draining(msgspec.Struct):
    """As much of ``GET /api/load`` as is needed."""

    draining: bool


def why_not(polled: Polled | None) -> str | None:
    """Why a box is to get no requests; None if it may. Without an answer it is None, too: that is
    counted. Raises `FleetError` if the key does not open ``/api/load``."""
    if polled is None:
        return None
    if polled.load_status in (401, 403):
        raise FleetError(
            f"/api/load is {polled.load_status}: set $APPLIANCE_API_KEY to a key with the scope "
            "observe"
        )
    if polled.ready_status != 200:
        return "not ready"
    if polled.load_status != 200:
        return f"/api/load is {polled.load_status}"
    try:
        draining = msgspec.json.decode(polled.load, type=_Draining).draining
    except msgspec.DecodeError:
        return "its answer is not the appliance's"
    return "draining" if draining else None


class Endpoints:
    """Which boxes are in the file, poll by poll."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = tuple(boxes)
        self._misses = dict.fromkeys((box.name for box in boxes), 0)
        self.out: dict[str, str] = {box.name: "not asked yet" for box in boxes}
        """Boxes that are not in the file, and why."""

    def polled(self, answers: Mapping[str, Polled | None]) -> list[str]:
        """Take the answers of a round, None of boxes that gave none. Answers a line for each box
        that came or left. Raises `FleetError`."""
        lines = []
        for box in self._boxes:
            reason = self._reason(box.name, answers[box.name])
            before = self.out.get(box.name)
            if reason == before:
                continue
            if reason is None:
                del self.out[box.name]
                lines.append(f"{box.name} takes requests")
            else:
                self.out[box.name] = reason
                lines.append(f"{box.name} gets no requests: {reason}")
        return lines

    def _reason(self, name: str, polled: Polled | None) -> str | None:
        try:
            reason = why_not(polled)
        except FleetError as error:
            raise FleetError(f"{name}: {error}") from error
        if polled is not None:
            self._misses[name] = 0
            return reason
        self._misses[name] += 1
        if name not in self.out and self._misses[name] < MISSES:
            return None  # one lost packet empties no box
        return "no answer"

    def document(self) -> bytes:
        """The file, as JSON, which is YAML: the boxes that take requests."""
        rows = [
            {"name": box.name, "address": box.address, "port": str(box.port), "labels": ENGINE}
            for box in self._boxes
            if box.name not in self.out
        ]
        return msgspec.json.format(msgspec.json.encode({"endpoints": rows})) + b"\n"
