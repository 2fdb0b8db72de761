"""Responses that are stored for their keys, until newer ones need the room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from appliance.service.front_frames import UNFINISHED

MAX_RESPONSES: Final = 4096
MAX_BYTES: Final = 64 * 1024 * 1024
EACH_BYTES: Final = 1024
"""Charged for a response in addition to what is kept of it."""


class StoredResponse:
    """A response, and what a next request needs to go on from it."""

    def __init__(self, owner: str, id: str) -> None:
        self.owner = owner
        self.id = id
        self.answer = b""
        """JSON, as the client is sent it."""
        self.messages = b""
        """JSON: the conversation that it answers."""
        self.cancel: Callable[[], None] | None = None
        """Ends its making in the background; None: it is made."""
        self.size_bytes = EACH_BYTES
        self._events: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return msgspec.json.decode(self.answer, type=_Status).status not in UNFINISHED

    @property
    def has_events(self) -> bool:
        """Whether it is streamed from the background."""
        return bool(self._events)

    def keep(self, answer: bytes, messages: bytes) -> None:
        """It is this from now on."""
        self.size_bytes += len(answer) + len(messages) - len(self.answer) - len(self.messages)
        self.answer, self.messages = answer, messages

    def add(self, event: bytes) -> None:
        self.size_bytes += len(event)
        self._events.append(event)
        self._wake()

    def end(self, status: str) -> None:
        """No more comes of it. If it is not finished, it has `status` now."""
        self.cancel = None
        if not self.is_finished:
            fields = msgspec.json.decode(self.answer, type=dict[str, msgspec.Raw])
            self.keep(msgspec.json.encode({**fields, "status": status}), self.messages)
        self._wake()

    async def events(self, start: int, keep_alive_seconds: float) -> AsyncIterator[bytes | None]:
        """The events from number `start` on, until no more come; None after each time without
        one."""
        while True:
            changed = self._changed
            while start < len(self._events):
                yield self._events[start]
                start += 1
            if self.cancel is None:
                return
            try:
                await asyncio.wait_for(changed.wait(), keep_alive_seconds)
            except TimeoutError:
                yield None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Status(msgspec.Struct):
    status: str


class StoredResponses:
    """All of them, by owner and id. When they take too much, the oldest response of the owner that
    has most goes, and when there are too many, of the one that has most of them: a client with less
    than others loses nothing to them. To remove one takes O(owners), all else O(1)."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._owners: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._owned_bytes: dict[str, int] = {}
        self._bytes = 0
        self._count = 0

    def find(self, owner: str, id: str) -> StoredResponse | None:
        """None: the owner has no such response."""
        mine = self._owners.get(owner)
        return None if mine is None else mine.get(id)

    def keep(self, owner: str, id: str, answer: bytes, messages: bytes) -> StoredResponse:
        """Store a response, in place of the one of this name. Raises `msgspec.DecodeError` for an
        `answer` that is no response."""
        msgspec.json.decode(answer, type=_Status)
        mine = self._owners.setdefault(owner, OrderedDict())
        response = mine.get(id)
        if response is None:
            response = mine[id] = StoredResponse(owner, id)
            self._count += 1
            self._charge(owner, response.size_bytes)
        before = response.size_bytes
        response.keep(answer, messages)
        self._charge(owner, response.size_bytes - before)
        self._make_room()
        return response

    def add(self, response: StoredResponse, event: bytes) -> None:
        """Add an event to a response, unless it was removed."""
        if self.find(response.owner, response.id) is response:
            response.add(event)
            self._charge(response.owner, len(event))
            self._make_room()

    def end(self, response: StoredResponse, status: str) -> None:
        """No more comes of a response; `status` is that of one which is not finished."""
        before = response.size_bytes
        response.end(status)
        if self.find(response.owner, response.id) is response:
            self._charge(response.owner, response.size_bytes - before)

    def remove(self, response: StoredResponse) -> None:
        """Store it no longer."""
        mine = self._owners[response.owner]
        del mine[response.id]
        self._count -= 1
        self._charge(response.owner, -response.size_bytes)
        if not mine:
            del self._owners[response.owner], self._owned_bytes[response.owner]

    def _charge(self, owner: str, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._owned_bytes[owner] = self._owned_bytes.get(owner, 0) + size_bytes

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes:
            self._remove_oldest(max(self._owners, key=self._owned_bytes.__getitem__))
        while self._count > self._max_responses:
            self._remove_oldest(max(self._owners, key=lambda owner: len(self._owners[owner])))

    def _remove_oldest(self, owner: str) -> None:
        self.remove(next(iter(self._owners[owner].values())))
