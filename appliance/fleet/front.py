"""The front of a fleet: reads which model a request is for, sends it to a box, and streams back.

An ASGI application without a framework. It knows no box: `Send` chooses one and `AskAll` asks all.
A request goes to another box only if the first has refused it (429, 503) or could not be reached.
One that a box has read is never sent again: if its answer breaks off, the client gets an error. A
request that ends a daemon would otherwise end all of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeAlias

import msgspec

from appliance.fleet.calls import Answer, Call, Failed, Head, Headers, Hint, Item
from appliance.fleet.catalogues import LISTS, loads, merged
from appliance.fleet.hints import read_hint
from appliance.fleet.whole_parts import EVENT_ENDS, LINE_ENDS, WholeParts
from appliance.http.error_formats import shape_of
from appliance.http.errors import ApiError
from appliance.http.streaming import HungUp, unless_hung_up
from appliance.service.front_paths import FRONT_PATHS

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Reply: TypeAlias = Callable[[Message], Awaitable[None]]
Send: TypeAlias = Callable[[Hint, Call], AsyncGenerator[Item, None]]
"""Sends a call to the best box for the hint."""
AskAll: TypeAlias = Callable[[Call], Awaitable[list[Answer]]]
"""The answers of all boxes."""

MOST_BODY_BYTES: Final = 64 << 20
MOST_BODIES: Final = 8
"""Of all requests together, as many of the longest."""
BOX_HEADER: Final = b"x-appliance-box"
"""Which box has answered."""
LOADS_PATH: Final = "/api/fleet"
REFUSALS: Final = frozenset({429, 503})
NDJSON: Final = b"application/x-ndjson"
EVENT_STREAM: Final = b"text/event-stream"
ENDS: Final = {NDJSON: LINE_ENDS, EVENT_STREAM: EVENT_ENDS}
"""Of the parts of a stream, by its format."""
MOST_HELD_BYTES: Final = 1 << 20
"""Of an answer that is no stream: if it breaks off, the client gets an error in its place."""
MOST_HELD_ANSWERS: Final = 64
"""Answers that are held have together no more bytes than so many of the longest."""
_MOST_REFUSAL_BYTES: Final = 1 << 20
_OF_ANY_BOX: Final = frozenset(
    {"/", "/livez", "/health", "/readyz", "/version", "/api/version", "/openapi.json", "/docs"}
)
_OF_A_MODEL: Final = FRONT_PATHS | {"/api/show"}
_MODEL_PATH: Final = "/v1/models/"


class Front:
    """Answers clients of the fleet."""

    def __init__(
        self,
        send: Send,
        ask_all: AskAll,
        most_body: int = MOST_BODY_BYTES,
        left_out: frozenset[bytes] = frozenset(),
    ) -> None:
        self._send = send
        self._ask_all = ask_all
        self._most_body = most_body
        self._left_out = left_out
        """Headers of answers that the server adds itself."""
        self._held_bytes = 0
        """Of the bodies of all requests that are under way."""
        self._answers = _HeldAnswers()

    async def __call__(self, scope: Message, receive: Receive, reply: Reply) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, reply)
        elif scope["type"] == "http":
            await self._http(scope, receive, reply)
        else:  # websockets, which no dialect has
            await reply({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Message, receive: Receive, reply: Reply) -> None:
        client, body = _Client(scope, reply, self._left_out), bytearray()
        try:
            await self._read(receive, body)
            answer = self._answer(client, bytes(body))
            await unless_hung_up(receive, answer)  # type: ignore[arg-type]
        except ApiError as error:
            if not isinstance(error, HungUp):
                await client.refuse(error)
        finally:
            self._held_bytes -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Read the whole body. Raises `ApiError` if it is too long, or with others is too much."""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HungUp
            more, part = message.get("more_body", False), message.get("body", b"")
            body += part
            self._held_bytes += len(part)
            if len(body) > self._most_body:
                raise ApiError(
                    413,
                    f"the body has more than {self._most_body} bytes, which a fleet does not take; "
                    "send it to a box",
                    code="body_too_large",
                )
            if self._held_bytes > MOST_BODIES * self._most_body:
                raise ApiError(
                    503,
                    "the bodies of all requests together are too much; try again later",
                    code="fleet_full",
                    headers={"Retry-After": "1"},
                )

    async def _answer(self, client: _Client, body: bytes) -> None:
        path = client.path
        call = Call(method=client.method, target=client.target, headers=client.headers, body=body)
        if path in LISTS and call.method in ("GET", "HEAD"):
            await client.whole(merged(path, await self._ask_all(call)))
        elif path == LOADS_PATH and call.method == "GET":
            asked = msgspec.structs.replace(call, target=b"/api/load")
            await client.whole(_json(loads(await self._ask_all(asked))))
        elif path in _OF_A_MODEL:
            await self._forward(client, read_hint(body, client.header(b"content-type")), call)
        elif path.startswith(_MODEL_PATH):
            await self._forward(client, Hint(model=path.removeprefix(_MODEL_PATH)), call)
        elif path in _OF_ANY_BOX:
            await self._forward(client, Hint(), call)
        else:
            raise ApiError(
                404,
                f"{path} is not an endpoint of a fleet: files, batches, stored answers and "
                "administration are each box's own; ask that box",
                code="not_of_a_fleet",
            )

    async def _forward(self, client: _Client, hint: Hint, call: Call) -> None:
        """Try boxes until one takes the request. Raises `ApiError` if there was none."""
        refusal: Answer | None = None
        reason = "no box"
        while True:
            async with aclosing(self._send(hint, call)) as items:
                match await anext(items, Failed(box="", reason="no answer", taken=True)):
                    case Head() as head if head.status in REFUSALS:
                        refusal = Answer(
                            box=head.box,
                            status=head.status,
                            headers=head.headers,
                            body=await _rest(items),
                        )
                        box = head.box
                    case Head() as head:
                        await client.stream(head, items, self._answers)
                        return
                    case Failed(taken=True) as failed:
                        raise _broken(failed)
                    case Failed() as failed:
                        box, reason = failed.box, failed.reason
                    case _:
                        raise ApiError(502, "a box answered without a head", code="box_failed")
            if not box or box in hint.excluded:
                break
            hint = msgspec.structs.replace(hint, excluded=(*hint.excluded, box))
        if refusal is not None:
            await client.whole(refusal)
            return
        raise ApiError(
            503,
            f"no box of the fleet takes the request now: {reason}; try again later",
            code="no_box",
            headers={"Retry-After": "1"},
        )


class _Client:
    """One request: what it asked, and its answer."""

    def __init__(self, scope: Message, reply: Reply, left_out: frozenset[bytes]) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = tuple((name, value) for name, value in scope["headers"])
        query = scope.get("query_string", b"")
        raw = scope.get("raw_path") or self.path.encode()
        self.target: bytes = raw.partition(b"?")[0] + (b"?" + query if query else b"")
        self._reply = reply
        self._left_out = left_out

    def header(self, name: bytes) -> bytes:
        """Its value; empty without one."""
        return next((value for known, value in self.headers if known.lower() == name), b"")

    async def refuse(self, error: ApiError) -> None:
        """In the words of the path's dialect."""
        request = self.header(b"x-request-id").decode("latin-1")
        headers = tuple(
            (name.lower().encode(), value.encode()) for name, value in error.headers.items()
        )
        answer = _json(shape_of(self.path)(error, request), error.status)
        await self.whole(msgspec.structs.replace(answer, headers=(*answer.headers, *headers)))

    async def whole(self, answer: Answer) -> None:
        """An answer that is complete."""
        if not answer.status:
            raise ApiError(503, "no box of the fleet answers; try again later", code="no_box")
        headers = [row for row in answer.headers if row[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        if answer.box:
            headers.append((BOX_HEADER, answer.box.encode()))
        await self._start(answer.status, headers)
        body = b"" if self.method == "HEAD" else answer.body
        await self._reply({"type": "http.response.body", "body": body})

    async def stream(
        self, head: Head, items: AsyncGenerator[Item, None], answers: _HeldAnswers
    ) -> None:
        """An answer as it comes, in whole lines or events, up to 64 KiB of each. One that breaks
        off ends with an error, if its format has a place for that; else the connection ends before
        its time. JSON has none, and begins when it is whole, or when as much of it is there as may
        be held. Raises `ApiError` if it breaks off before it has begun."""
        headers = [*head.headers, (BOX_HEADER, head.box.encode())]
        kind = _kind(head)
        if kind == b"application/json":
            async with answers.beginning(items) as (body, whole):
                await self._start(head.status, headers)
                await self._bytes(body, more=not whole)
            if whole:
                return
        else:
            await self._start(head.status, headers)
        parts = WholeParts(ENDS[kind]) if kind in ENDS else None
        async for item in items:
            match item:
                case bytes():
                    ready = item if parts is None else parts.ready(item)
                    if ready:
                        await self._bytes(ready)
                case Failed():
                    begun = parts is not None and parts.begun
                    last = self._last_words(kind, _broken(item), begun)
                    if last is None:
                        raise ConnectionAbortedError(item.reason)
                    await self._bytes(last, more=False)
                    return
        await self._bytes(b"" if parts is None else parts.rest(), more=False)

    def _last_words(self, kind: bytes, error: ApiError, begun: bool) -> bytes | None:
        said = shape_of(self.path)(error, self.header(b"x-request-id").decode("latin-1"))
        if kind == NDJSON:
            return (b"\n" if begun else b"") + said + b"\n"
        if kind == EVENT_STREAM:
            if self.path.startswith(("/v1/messages", "/v1/responses")):
                return b"\n\nevent: error\ndata: %s\n\n" % said
            return b"\n\ndata: %s\n\ndata: [DONE]\n\n" % said
        return None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        kept = [row for row in headers if row[0] not in self._left_out]
        await self._reply({"type": "http.response.start", "status": status, "headers": kept})

    async def _bytes(self, body: bytes, *, more: bool = True) -> None:
        await self._reply({"type": "http.response.body", "body": body, "more_body": more})


class _HeldAnswers:
    """Answers that are held until they are whole, and how many bytes they have together."""

    def __init__(self) -> None:
        self._bytes = 0

    @asynccontextmanager
    async def beginning(
        self, items: AsyncGenerator[Item, None]
    ) -> AsyncGenerator[tuple[bytes, bool], None]:
        """The answer, or as much of it as may be held, and whether it is whole; `items` has the
        rest. Raises `ApiError` if it breaks off meanwhile."""
        held, whole = bytearray(), True
        try:
            async for item in items:
                if isinstance(item, Failed):
                    raise _broken(item)
                if isinstance(item, bytes):
                    held += item
                    self._bytes += len(item)
                if len(held) > MOST_HELD_BYTES or self._bytes > MOST_HELD_ANSWERS * MOST_HELD_BYTES:
                    whole = False
                    break
            yield bytes(held), whole
        finally:
            self._bytes -= len(held)


def _kind(head: Head) -> bytes:
    return dict(head.headers).get(b"content-type", b"").partition(b";")[0].strip()


def _broken(failed: Failed) -> ApiError:
    """What a client gets for an answer that is not whole."""
    where = f"box {failed.box}" if failed.box else "a box"
    return ApiError(
        502, f"{where} had begun the request and gave no whole answer: {failed.reason}; "
        "send it again", code="box_failed",
    )  # fmt: skip


async def _rest(items: AsyncGenerator[Item, None]) -> bytes:
    """The body of a refusal."""
    body = bytearray()
    async for item in items:
        if isinstance(item, bytes) and len(body) < _MOST_REFUSAL_BYTES:
            body += item
    return bytes(body)


def _json(body: bytes, status: int = 200) -> Answer:
    headers = ((b"content-type", b"application/json"),)
    return Answer(box="", status=status, headers=headers, body=body)


async def _live(receive: Receive, reply: Reply) -> None:
    """A server's start and end."""
    while True:
        message = await receive()
        await reply({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
