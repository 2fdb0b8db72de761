"""Lists of models of several boxes as one: what any of them has, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from appliance.fleet.calls import Answer

LISTS: Final[Mapping[str, tuple[str, str]]] = {
    "/v1/models": ("data", "id"),
    "/api/tags": ("models", "name"),
    "/api/ps": ("models", "name"),
}
"""Paths of lists: the field that holds the list, and the one that names a model in it."""


def merged(path: str, answers: Sequence[Answer]) -> Answer:
    """Their lists as one, in the order of names: of a model that several have, the first box's
    entry. If none answered well, the first answer that there was, or one with status 0."""
    field, name = LISTS[path]
    whole: dict[str, Any] | None = None
    entries: dict[str, Any] = {}
    first: Answer | None = None
    for answer in sorted(answers, key=lambda answer: answer.box):
        listed = _decoded(answer)
        if listed is None or not isinstance(listed.get(field), list):
            continue
        if whole is None or first is None:
            whole, first = listed, answer
        for entry in listed[field]:
            if isinstance(entry, dict):
                entries.setdefault(str(entry.get(name, "")), entry)
    if whole is None or first is None:
        refused = [answer for answer in answers if answer.status]
        return refused[0] if refused else Answer(box="", status=0)
    names = sorted(entries)
    if "first_id" in whole:  # of Anthropic's
        whole |= {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    body = msgspec.json.encode(whole | {field: [entries[key] for key in names]})
    headers = tuple(row for row in first.headers if row[0] != b"content-length")
    return msgspec.structs.replace(first, headers=headers, body=body)


def loads(answers: Sequence[Answer]) -> bytes:
    """What boxes say of their load, as JSON: a row for each, by name; load is null where a box
    refused or gave none."""
    rows = [
        {"box": answer.box, "status": answer.status, "load": _decoded(answer)}
        for answer in sorted(answers, key=lambda answer: answer.box)
    ]
    return msgspec.json.encode({"boxes": rows})


def _decoded(answer: Answer) -> dict[str, Any] | None:
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
