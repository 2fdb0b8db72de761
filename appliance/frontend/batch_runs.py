"""Lines of batches: answered as if they had come over HTTP, in calls that the core has entered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from litestar.types import Send

from appliance.frontend.answers import error_of
from appliance.frontend.calls import Call, current
from appliance.frontend.core import Core
from appliance.http.body_budget import BodyBudget
from appliance.http.error_formats import shape_of
from appliance.service.front_frames import Ran, Refused, Run, StopRun
from appliance.vocabulary import RequestClass

log = logging.getLogger(__name__)

Application: TypeAlias = Callable[[Call, Any, Send, bytes, asyncio.Event], Awaitable[None]]
"""Answers a call whose body is read; raises an exception with `refused` to refuse it."""

_STREAMED: Final = "stream: a line of a batch has one answer; leave the field out"


class BatchRuns:
    """Those that are under way."""

    def __init__(self, core: Core, application: Application, bodies: BodyBudget) -> None:
        """`bodies` count the files that lines have fetched."""
        self._core = core
        self._bodies = bodies
        self._application = application
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._given_up: dict[int, asyncio.Event] = {}
        self.on_over: Callable[[], None] = lambda: None
        """Called whenever a run ended."""

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, frame: Run | StopRun) -> None:
        """Begin a run, or give one up."""
        if isinstance(frame, Run):
            given_up = self._given_up[frame.call] = asyncio.Event()
            task = asyncio.create_task(self._run(frame, given_up))
            self._tasks[frame.call] = task
            task.add_done_callback(lambda _: self._ended(frame.call))
        elif (event := self._given_up.get(frame.call)) is not None:
            event.set()

    def _ended(self, call: int) -> None:
        del self._tasks[call], self._given_up[call]
        self.on_over()

    async def _run(self, run: Run, given_up: asyncio.Event) -> None:
        call = Call(run.call, run.models)
        call.request_class = RequestClass.BATCH
        token = current.set(call)
        try:
            scope = _scope_of(run)
            with self._bodies.hold(run.key, scope) as held:
                held.whole = True
                call.keep = held.keep
                ran = await self._answer(call, run, scope, given_up)
            if not given_up.is_set():
                self._core.send(ran)
        finally:
            self._core.leave(call)
            current.reset(token)

    async def _answer(self, call: Call, run: Run, scope: Any, given_up: asyncio.Event) -> Ran:
        if _streams(run.body):
            return _refusal(
                run,
                Refused(
                    call=run.call, status=400, code="no_stream", message=_STREAMED, param="stream"
                ),
            )
        answer = _Collected()
        try:
            await self._application(call, scope, answer.send, run.body, given_up)
            if call.background:
                await asyncio.wait(call.background)
        except Exception as error:
            refused = getattr(error, "refused", None)
            if not isinstance(refused, Refused):
                log.error("a line of a batch failed unexpectedly", exc_info=error)
                refused = Refused(
                    call=run.call, status=500, code="internal_error", message="internal error"
                )
            return _refusal(run, refused)
        if call.refusal is not None:
            return _refusal(run, call.refusal)
        return Ran(
            call=run.call,
            status=answer.status,
            body=b"".join(answer.body),
            headers=(*answer.headers, *call.headers),
        )


class _Collected:
    """An answer, as it comes out of an ASGI application."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: tuple[tuple[str, str], ...] = ()
        self.body: list[bytes] = []

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = tuple(
                (name.decode("latin-1").lower(), value.decode("latin-1"))
                for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self.body.append(message.get("body", b""))


def _scope_of(run: Run) -> Any:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": run.path,
        "raw_path": run.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(run.body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }


def _streams(body: bytes) -> bool:
    """Whether the line asks for a stream; one that is no JSON object is refused by vLLM."""
    try:
        line = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and bool(line.get("stream"))


def _refusal(run: Run, refused: Refused) -> Ran:
    error = error_of(refused)
    headers = (("content-type", "application/json"), *refused.headers)
    return Ran(
        call=run.call, status=error.status, body=shape_of(run.path)(error, ""), headers=headers
    )
