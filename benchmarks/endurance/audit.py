"""The appliance's own books compared with what clients saw: its log, journal, metrics, ledgers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.endurance.clients import Outcome

_ANSWER = re.compile(r"(?:\d+_)?([a-z]+[-_][0-9a-f]+).*")
ENDED = ("stop", "length")


@dataclass(frozen=True)
class Books:
    """What the appliance wrote into its log."""

    lines: list[dict[str, Any]]
    """One for each request that was taken in and is over."""
    trouble: list[str]
    """Errors."""


def read_books(log: Path, known: set[str]) -> Books:
    """Of all requests but those that are `known` already."""
    lines, trouble = [], []
    for text in log.read_text(errors="replace").splitlines():
        try:
            record = json.loads(text)
        except json.JSONDecodeError:
            trouble += [text] if "Traceback" in text or "Error" in text else []
            continue
        if record.get("logger") == "appliance.requests":
            lines += [record] if record["request"] not in known else []
        elif record.get("level") in ("error", "critical") or "exception" in record:
            trouble.append(text)
    return Books(lines, trouble)


def arrived(journal: Path, known: set[str]) -> list[str]:
    """Ids of the other requests in the journal."""
    names = []
    with journal.open("rb") as stream:
        for line in stream:
            if b"RequestArrived" in line:
                names.append(json.loads(line)["event"]["request"]["id"])
    return [name for name in names if name not in known]


def stalls(journal: Path) -> int:
    """How often the daemon was told that a client takes nothing."""
    with journal.open("rb") as stream:
        return sum(b"ClientBackpressured" in line for line in stream)


def compare(books: Books, arrived: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """What of the log does not fit the journal, or what clients saw."""
    names = [line["request"] for line in books.lines]
    found = [*books.trouble]
    found += [f"{name} ended {n} times" for name, n in Counter(names).items() if n > 1]
    found += [f"{name} arrived {n} times" for name, n in Counter(arrived).items() if n > 1]
    found += [f"{name} arrived and never ended" for name in {*arrived} - {*names}]
    found += [f"{name} ended and never arrived" for name in {*names} - {*arrived}]
    found += [
        f"{line['request']} ended as {line['outcome']} ({line['status']}): {line.get('reason')}"
        for line in books.lines
        if line["outcome"] not in (*ENDED, "cancelled")
    ]
    found += _counts(books.lines, outcomes)
    by_answer = _ends(books)
    for outcome in outcomes:
        if outcome.end != "whole" or outcome.id is None:
            continue
        ends = by_answer.get(outcome.id, [])
        if len(ends) != outcome.most or not {*ends} <= {*ENDED}:
            found.append(f"{outcome.id} was whole, {outcome.most} choices; the log says {ends}")
    return found


def cancelled_by(books: Books, outcomes: Sequence[Outcome], cancelled: Sequence[str]) -> list[str]:
    """What does not fit the requests that an operator cancelled."""
    found = []
    answers = {_base(name) for name in cancelled}
    told = [outcome for outcome in outcomes if outcome.end == "cancelled"]
    found += [f"{o.id} was cancelled by nobody" for o in told if o.id and o.id not in answers]
    if len(told) > len(answers):
        found.append(f"{len(told)} answers were cancelled, an operator did so to {len(answers)}")
    ends = {line["request"]: line["outcome"] for line in books.lines}
    found += [
        f"{name} was cancelled, but ended as {ends.get(name)}"
        for name in cancelled
        if ends.get(name) != "cancelled"
    ]
    return found


def _base(name: str) -> str:
    """The id of the answer that a sequence belongs to: without the number of its choice before it,
    or what tells sequences of an answer apart behind it."""
    known = _ANSWER.fullmatch(name)
    return known[1] if known else name


def _kinds(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """By what tells them apart in the log: the beginning of the id, and the class."""
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        request_class = "batch" if outcome.kind == "batch" else "interactive"
        kinds.setdefault((outcome.prefix, request_class), []).append(outcome)
    return kinds


def _counts(lines: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> list[str]:
    """As many sequences as clients asked for, no more and no fewer."""
    found = []
    kinds = _kinds(outcomes)
    counted: Counter[tuple[str, str]] = Counter()
    for line in lines:
        prefix = next((p for p, _ in kinds if _base(line["request"]).startswith(p)), "")
        counted[prefix, line["class"]] += 1
    for kind in {*kinds, *counted}:
        mine = kinds.get(kind, [])
        least, most = sum(o.least for o in mine), sum(o.most for o in mine)
        if not least <= counted[kind] <= most:
            found.append(f"{kind}: {counted[kind]} in the log, {least} to {most} asked for")
    return found


def _ends(books: Books) -> dict[str, list[str]]:
    """How the choices of each answer ended, by its id."""
    ends: dict[str, list[str]] = {}
    for line in books.lines:
        ends.setdefault(_base(line["request"]), []).append(line["outcome"])
    return ends


def at_rest(snapshot: dict[str, Any], metrics: dict[tuple[str, str], float]) -> list[str]:
    """What is still held or counted wrong when nobody asks for anything any more."""
    found = [f"{request['id']} is still live" for request in snapshot["requests"]]
    found += [f"instance {i['instance']} is {i['state']}" for i in snapshot["status"]["instances"]
              if i["state"] != "up"]  # fmt: skip
    for tier, kv in snapshot["status"]["kv"].items():
        for shape, use in kv["shapes"].items():
            if use["used_bytes"]:
                found.append(f"{use['used_bytes']} bytes of KV ({shape}) in use on the {tier}")
    faults = sum(v for (name, _), v in metrics.items() if name == "appliance_policy_errors_total")
    if faults:
        found.append(f"policies failed {faults:.0f} times")
    return found
