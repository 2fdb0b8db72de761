"""An answer on its way to the client: its head waits for the core's decision, and a stream without
news gets a comment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from litestar.types import Message, Scope, Send

from appliance.frontend.calls import Call
from appliance.http.error_formats import shape_of
from appliance.http.errors import ApiError
from appliance.http.request_ids import request_id
from appliance.service.front_frames import Refused

COMMENT: Final = b": keep-alive\n\n"
LAST_EVENTS: Final = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")
"""How the last events of streams begin: clients read no further."""
STALLED_SECONDS: Final = 0.05
"""A client that takes nothing for so long does not read."""

AS_IT_COMES: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers of what nothing on the way is to keep or hold back."""

Headers: TypeAlias = list[tuple[bytes, bytes]]


class AnswerGuard:
    """What `send` is for the application inside.

    The head and the first bytes of a stream are held until the core has decided about the call, or
    until a comment is due. When the core refuses before anything was sent, its refusal is the
    answer, whatever the application says.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        call: Call,
        *,
        headers: Headers,
        keep_alive_seconds: float,
        is_blocked: Callable[[], bool],
        on_reading: Callable[[bool], None],
        on_stream: Callable[[bytes], None],
    ) -> None:
        """`headers` go into every answer of the call. `is_blocked` says whether what is sent next
        waits until the client has taken what was sent before. `on_reading` is called if the client
        stops to take what is sent, and when it takes it again; `on_stream`, when a stream has
        begun: with the event that ends it if this process dies."""
        self._scope = scope
        self._send = send
        self._call = call
        self._headers = headers
        self._keep_alive_seconds = keep_alive_seconds
        self._is_blocked = is_blocked
        self._on_reading = on_reading
        self._on_stream = on_stream
        self._head: Any = None
        self._has_events = False
        self._held: list[Any] = []
        self._begun = False
        self._over = False
        self._replaced = False
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Take a message of the application's answer."""
        if self._call.unsettled:
            await self._call.until_settled()
        if self._is_flowing() and message.get("more_body", False):  # nearly all: tokens of streams
            self._last = self._loop.time()
            await self._send(message)
            return
        async with self._turn:
            await self._take(message)

    def _is_flowing(self) -> bool:
        """Whether a piece of a stream goes straight to the client."""
        return (
            self._begun
            and not self._over
            and not self._turn.locked()
            and not self._is_blocked()
            and (self._call.timing is None or not self._has_events)
        )

    async def _take(self, message: Message) -> None:
        if self._replaced or self._over:
            return
        if message["type"] == "http.response.start":
            self._head = message
            kind = _media_type(message["headers"])
            self._has_events = kind == _EVENTS
            if kind in _STREAMS:
                self._call.streams = True
                self._watch = asyncio.create_task(self._keep_alive())
            return
        if message["type"] != "http.response.body" or self._head is None:
            await self._forward(message)
            return
        if self._has_events:
            message = self._timed(message)
        if self._begun:
            await self._forward(message)
            if not message.get("more_body", False):
                self.close()
            return
        self._held.append(message)
        streams = self._watch is not None and message.get("more_body", False)
        if not streams or (self._call.decided.is_set() and _has_bytes(self._held)):
            await self._begin()

    async def refuse(self, refused: Refused) -> None:
        """Answer with a refusal, unless an answer was begun."""
        if self._begun or self._replaced:
            return
        self._replaced = True
        body = self._worded(refused)
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.lower().encode(), value.encode()) for name, value in refused.headers),
        ]
        self._head = {"type": "http.response.start", "status": refused.status, "headers": headers}
        await self._send(self._finished_head())
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def give_up(self) -> None:
        """End a stream with an event that says why the core gave it up."""
        refused = self._call.refusal
        async with self._turn:
            if refused is None or self._over or self._replaced:
                return
            if not self._begun:
                await self.refuse(refused)
                return
            event = self._last_event(refused)
            await self._forward({"type": "http.response.body", "body": event, "more_body": False})
            self.close()

    def _last_event(self, refused: Refused) -> bytes:
        """A refusal as the end of a stream, in the dialect of the path."""
        error, path = self._worded(refused), self._scope["path"]
        if _media_type(self._head["headers"]) != _EVENTS:
            return error + b"\n"
        if path.startswith(("/v1/messages", "/v1/responses")):
            return b"event: error\ndata: %s\n\n" % error
        return b"data: %s\n\ndata: [DONE]\n\n" % error

    def _worded(self, refused: Refused) -> bytes:
        """A refusal in the dialect of the path."""
        return shape_of(self._scope["path"])(error_of(refused), request_id(self._scope))

    def close(self) -> None:
        """Nothing follows."""
        self._over = True
        if self._watch is not None:
            self._watch.cancel()

    async def _begin(self) -> None:
        """Send what was held, or the refusal that came meanwhile."""
        if self._begun or self._replaced:
            return
        if self._call.refusal is not None:
            await self.refuse(self._call.refusal)
            return
        self._begun = True
        held, self._held = self._held, []
        await self._forward(self._finished_head())
        if self._watch is not None:
            self._on_stream(self._last_event(_LOST))
        for message in held:
            await self._forward(message)
        if held and not held[-1].get("more_body", False):
            self.close()

    def _finished_head(self) -> Any:
        """The head, with the headers of every answer, which win."""
        ours = [*self._headers]
        ours += [(name.lower().encode(), value.encode()) for name, value in self._call.headers]
        if _media_type(self._head["headers"]) in _STREAMS:
            ours += AS_IT_COMES
        elif self._call.timing is not None:
            ours.append((b"server-timing", self._call.timing.encode()))
        names = {name for name, _ in ours}
        theirs = [pair for pair in self._head["headers"] if pair[0].lower() not in names]
        return {**self._head, "headers": [*theirs, *ours]}

    def _timed(self, message: Any) -> Any:
        """With a comment before the last event that says what the time of the answer went to: its
        head is gone by then."""
        body = message.get("body", b"")
        timing = self._call.timing
        if timing is None or (message.get("more_body") and not body.startswith(LAST_EVENTS)):
            return message
        self._has_events = False  # once
        return {**message, "body": b": server-timing: %s\n\n%s" % (timing.encode(), body)}

    async def _forward(self, message: Any) -> None:
        """Send on, and tell when the client does not take it."""
        self._last = self._loop.time()
        if not self._is_blocked():
            await self._send(message)
            return
        stalled = False

        def stall() -> None:
            nonlocal stalled
            stalled = True
            self._on_reading(False)

        timer = self._loop.call_later(STALLED_SECONDS, stall)
        try:
            await self._send(message)
        finally:
            timer.cancel()
            if stalled:
                self._on_reading(True)

    async def _keep_alive(self) -> None:
        """Begin a stream when the core has decided and there is something to send, or when a
        comment is due; send a comment whenever nothing was sent for long enough."""
        self._last = self._loop.time()
        try:
            async with asyncio.timeout(self._keep_alive_seconds):
                await self._call.decided.wait()
            async with self._turn:
                if _has_bytes(self._held):
                    await self._begin()
        except TimeoutError:
            pass
        comments = _media_type(self._head["headers"]) == _EVENTS
        while not self._replaced:
            left = self._keep_alive_seconds - (self._loop.time() - self._last)
            if left > 0:
                await asyncio.sleep(left)
                continue
            async with self._turn:  # a client that does not read gets no comments
                await self._begin()
                if comments and not self._replaced:
                    await self._forward(
                        {"type": "http.response.body", "body": COMMENT, "more_body": True}
                    )
            self._last = self._loop.time()


def error_of(refused: Refused) -> ApiError:
    """A refusal as the error that dialects give their shapes."""
    return ApiError(
        refused.status,
        refused.message,
        param=refused.param,
        code=refused.code,
        headers=dict(refused.headers),
    )


_EVENTS: Final = b"text/event-stream"
_STREAMS: Final = frozenset({_EVENTS, b"application/x-ndjson"})
_LOST: Final = Refused(
    call=0,
    status=500,
    code="front_end_lost",
    message="the process that made the answer died; ask again",
)


def _media_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.partition(b";")[0].strip().lower()
    return b""


def _has_bytes(messages: list[Any]) -> bool:
    return any(message.get("body") for message in messages)
