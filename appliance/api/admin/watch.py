"""The appliance as a watcher sees it: its state once, then what changes, and what happens.

The state is `GET /api/snapshot` with its rows under their ids, and points in time where that has
ages, so that what does not change is not sent again. A watcher costs the daemon one state, the one
that was sent last: one that reads slowly gets fewer changes, larger ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, TypeAlias

import msgspec
from litestar import Request, get
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.api.admin.events import KEEP_ALIVE, WatchResponse, last_seen, server_sent
from appliance.api.admin.timeline import timeline_routes
from appliance.http.errors import BadRequest
from appliance.service.event_log import NoticeKind
from appliance.service.interface import Snapshot, Span, Watch

EVERY_SECONDS = 0.5
LEAST_SECONDS = 0.05
MOST_SECONDS = 60.0

LONGEST_SILENCE_SECONDS = 5.0
"""Whatever is configured: a watcher takes a daemon that is silent for long to be lost."""
AT_ONCE = frozenset(
    {
        NoticeKind.INSTANCE_UP,
        NoticeKind.INSTANCE_LOST,
        NoticeKind.INSTANCE_QUARANTINED,
        NoticeKind.INSTANCE_RELEASED,
        NoticeKind.POLICIES_CHOSEN,
    }
)
"""After these the state is sent at once, however recent the last one is. They are rare."""

DELTA = "delta"
STATE = "state"


def watch_routes(service: Watch, keep_alive_seconds: float) -> list[HTTPRouteHandler]:
    """Server-sent: ``state``, then ``delta`` as often as `every` seconds say and with the events
    `AT_ONCE`, and all events between, with their numbers. Who comes back with ``Last-Event-ID``
    hears of the events that it missed, after a new ``state``; if they are not kept any more, that
    state says so. What is older than a state, `GET /api/timeline` has."""

    @get("/api/watch", operation_id="watch")
    async def watch(request: Request[Any, Any, Any]) -> ASGIResponse:
        every = _seconds(request.query_params.get("every"))
        silence = min(keep_alive_seconds, LONGEST_SILENCE_SECONDS)
        return WatchResponse(_watched(service, last_seen(request), every, silence))

    return [watch, *timeline_routes(service)]


def _seconds(text: str | None) -> float:
    try:
        every = EVERY_SECONDS if text is None else float(text)
    except ValueError:
        every = -1.0
    if not LEAST_SECONDS <= every <= MOST_SECONDS:
        raise BadRequest(
            f"every is a number of seconds, {LEAST_SECONDS} to {MOST_SECONDS}", "every"
        )
    return every


def state_of(snapshot: Snapshot, before: Document) -> Document:
    """The state to send to a watcher that has `before`. Points in time that were computed
    from ages stay what they were said to be."""
    whole = msgspec.to_builtins(msgspec.structs.replace(snapshot, spans=()))
    status, now = whole["status"], snapshot.unix_seconds
    known = before.get("requests", {})
    state = without_nulls(
        {
            "version": status["version"],
            "started_unix_seconds": before.get(
                "started_unix_seconds", now - status["uptime_seconds"]
            ),
            "readiness": whole["readiness"],
            "kv": status["kv"],
            "host_bytes": status["host_bytes"],
            "disk_bytes": status["disk_bytes"],
            "instances": _keyed(status["instances"], "instance"),
            "models": _keyed(status["models"], "model"),
            "requests": {
                row["id"]: _request(row, now, known.get(row["id"])) for row in whole["requests"]
            },
        }
    )
    return state | {"spans": _spans(snapshot.spans, before.get("spans", {}))}


def _keyed(rows: Iterable[Document], key: str) -> Document:
    return {str(row[key]): row for row in rows}


def _spans(spans: Iterable[Span], known: Document) -> Document:
    """By number. One that is over does not change any more: it is sent as it was, the same object,
    so that of the many that are kept only the new ones cost anything."""
    sent = {}
    for span in spans:
        before = known.get(number := str(span.number))
        over = before is not None and "ended_unix_seconds" in before
        sent[number] = before if over else msgspec.to_builtins(span)
    return sent


def _request(row: Document, now: float, known: Document | None) -> Document:
    age = row.pop("age_seconds")
    arrived = now - age if known is None else known["arrived_unix_seconds"]
    reason = row.pop("reason")
    if reason is not None:  # how much longer, and the sentence that says it, change all the time
        reason = {key: reason[key] for key in ("code", "instance", "behind")}
    return {**row, "arrived_unix_seconds": arrived, "reason": reason}


class _Sent:
    """What a watcher has received: the state, and events up to a number."""

    def __init__(self, service: Watch) -> None:
        self._service = service
        self._state: Document = {}
        self._number = 0

    def whole(self, *, missed: bool) -> bytes:
        """The state as it is, with the events it accounts for."""
        snapshot = self._service.snapshot()
        self._state = state_of(snapshot, {})
        if missed:
            self._number = snapshot.newest_event
        data = {
            "unix_seconds": snapshot.unix_seconds,
            "newest_event": snapshot.newest_event,
            "missed": missed,
            "state": self._state,
        }
        # Only a state that replaces events has their number: a returning client wants the others.
        return server_sent(STATE, msgspec.json.encode(data), self._number if missed else None)

    def changes(self) -> bytes:
        """What changed since; nothing if nothing did, or before there was a state."""
        if not self._state:
            return b""
        snapshot = self._service.snapshot()
        state = state_of(snapshot, self._state)
        patch = difference(self._state, state)
        self._state = state
        if not patch:
            return b""
        data = {"unix_seconds": snapshot.unix_seconds, "patch": patch}
        return server_sent(DELTA, msgspec.json.encode(data))

    def events(self, batch: Iterable[Any]) -> bytes:
        """Those that no state stood for."""
        return b"".join(
            server_sent(notice.kind, msgspec.json.encode(notice), notice.number)
            for notice in batch
            if notice.number > self._number
        )


async def _watched(
    service: Watch, after: int | None, every_seconds: float, silence_seconds: float
) -> AsyncIterator[bytes]:
    sent = _Sent(service)
    loop = asyncio.get_running_loop()
    async with aclosing(service.events(after)) as batches:  # type: ignore[type-var]
        coming = asyncio.ensure_future(anext(batches, []))
        silent_since = now = loop.time()
        due = now + every_seconds
        try:
            if after is not None:
                yield sent.whole(missed=False)
            while True:
                until = min(due, silent_since + silence_seconds)
                done, _ = await asyncio.wait({coming}, timeout=max(0.0, until - loop.time()))
                said = b""
                if done:
                    batch = coming.result()
                    if batch == []:
                        yield sent.changes()
                        return
                    said = sent.whole(missed=True) if batch is None else sent.events(batch)
                    if any(notice.kind in AT_ONCE for notice in batch or ()):
                        due = loop.time()
                    coming = asyncio.ensure_future(anext(batches, []))
                if (now := loop.time()) >= due:
                    said += sent.changes()
                    due = now + every_seconds
                if said:
                    silent_since = now
                    yield said
                elif now >= silent_since + silence_seconds:
                    silent_since = now
                    yield KEEP_ALIVE
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


Document: TypeAlias = dict[str, Any]


def difference(before: Document, after: Document) -> Document:
    """The patch that makes `after` of `before`; empty if they are equal.

    Neither may hold nulls, which in a patch say that a member is gone: see `without_nulls`. Lists
    are replaced as a whole. O(both documents).
    """
    patch: Document = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if value is old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := difference(old, value):
                patch[key] = inner
        elif value != old:
            patch[key] = value
    return patch


def without_nulls(document: Document) -> Document:
    """The same document, less the members that are null, however deep; lists are left as they
    are."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in document.items()
        if value is not None
    }
