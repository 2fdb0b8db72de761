"""The end of a long journal, with what earlier lines say of the box.

A journal grows to gigabytes. To read its last minutes, their first line is found by bisection, and
what comes before is only searched for the few kinds of events that say what there is: instances,
engines, models, policies and the clock on the wall.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from appliance.journal import Entry
from appliance.service.policy_report import PolicyChosen
from appliance.vocabulary import ClockSet, InstanceUp, ModelAdded, ModelBuilt, Word

LASTING: Final = (InstanceUp, ModelAdded, ModelBuilt, PolicyChosen, ClockSet)
"""What stays true, in lines of any age."""


class JournalPart(NamedTuple):
    """Whole lines of a journal, in bytes from its beginning. A daemon may write more meanwhile."""

    begin: int
    end: int


class _Time(Word, frozen=True):
    """What is read of a line to know how old it is."""

    now: float


def last_part(path: Path, seconds: float) -> JournalPart:
    """The lines of the last seconds: O(log lines) of them are looked at. Raises `OSError`, and
    `msgspec.DecodeError` for a line of another form."""
    with path.open("rb") as file:
        first = len(file.readline())
        if not first:
            return JournalPart(0, 0)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # A last line that was cut off is not there.
            end = max(first, data.rfind(b"\n") + 1)
            if end == first:
                return JournalPart(first, first)
            since = _now(data, data.rfind(b"\n", first, end - 1) + 1 or first, end) - seconds
            begin, after = first, end
            while begin < after:
                middle = (begin + after) // 2
                line = max(first, data.rfind(b"\n", 0, middle) + 1)
                next_line = data.find(b"\n", middle) + 1
                if _now(data, line, next_line) < since:
                    begin = next_line
                else:
                    after = line
            return JournalPart(begin, end)


def entries(path: Path, part: JournalPart) -> Iterator[Entry]:
    """The part's entries, and before them those of older lines that still say something. Raises
    `OSError`, and `msgspec.DecodeError` for a line of another form."""
    decoder = msgspec.json.Decoder(Entry)
    with path.open("rb") as file:
        for line in _lasting(file.fileno(), part.begin):
            entry = decoder.decode(line)
            if isinstance(entry.event, LASTING):  # a model may have such a name
                yield entry
        file.seek(part.begin)
        while file.tell() < part.end:
            yield decoder.decode(file.readline())


def _lasting(descriptor: int, end: int) -> list[bytes]:
    """Lines before `end` that name such an event, in their order. They are searched for as bytes:
    to decode all lines would take far longer."""
    if not end:
        return []
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        found = {}
        for kind in LASTING:
            tag = msgspec.json.encode(kind.__name__)
            place = data.find(tag, data.find(b"\n") + 1, end)  # behind the line of the setup
            while place >= 0:
                begin = data.rfind(b"\n", 0, place) + 1
                after = data.find(b"\n", place) + 1
                found[begin] = data[begin:after]
                place = data.find(tag, after, end)
        return [found[begin] for begin in sorted(found)]


def _now(data: mmap.mmap, begin: int, end: int) -> float:
    return msgspec.json.decode(data[begin:end], type=_Time).now
