"""Which boxes a router may send requests to, as a file for llm-d's endpoint picker.

Sans-IO: polls are made elsewhere; this says what their answers mean and what the file holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import AddressValueError, IPv4Address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from appliance.errors import FleetError

ENGINE: Final = {"llm-d.ai/engine-type": "appliance"}
"""The label by which the picker finds the names of our metrics."""
MISSES: Final = 2
"""So many polls in a row that a box leaves unanswered take it out, unless it was never in."""
_PORT: Final = 11500
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


class Box(NamedTuple):
    """A box by its name in the file, and where it is."""

    name: str
    address: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


class Polled(NamedTuple):
    """What a box answered: the statuses of ``/readyz`` and ``/api/load``, and their bodies."""

    ready_status: int
    load_status: int
    load: bytes
    ready: bytes = b""


class _Draining(msgspec.Struct):
    """As much of ``GET /api/load`` as is needed."""

    draining: bool


def read_box(text: str) -> Box:
    """A box of ``NAME=http://ADDRESS:PORT``. Raises `FleetError`, which says what is wrong."""
    name, _, url = text.partition("=")
    if not _NAME.fullmatch(name):
        raise FleetError(
            f"--box {text!r}: give NAME=URL, with a name of small letters, digits, '-' and '.'"
        )
    try:
        parts = urlsplit(url)
        port = parts.port or _PORT
    except ValueError as error:
        raise FleetError(f"--box {text!r}: {error}") from error
    if parts.scheme != "http" or parts.path.strip("/") or parts.query:
        raise FleetError(f"--box {text!r}: the URL is http://ADDRESS:PORT; the picker has no HTTPS")
    try:
        address = str(IPv4Address(parts.hostname or ""))
    except AddressValueError as error:
        raise FleetError(
            f"--box {text!r}: {parts.hostname or ''!r} is no IPv4 address; the picker looks up no "
            "names"
        ) from error
    return Box(name, address, port)


def read_boxes(texts: Sequence[str]) -> tuple[Box, ...]:
    """All of them. Raises `FleetError`, also for a name or a place that two of them have."""
    boxes = tuple(map(read_box, texts))
    for what, values in (
        ("name", [box.name for box in boxes]),
        ("URL", [box.url for box in boxes]),
    ):
        for value in values:
            if values.count(value) > 1:
                raise FleetError(f"--box: two boxes have the {what} {value}")
    return boxes


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
