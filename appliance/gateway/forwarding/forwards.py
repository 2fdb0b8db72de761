"""Requests for models of other servers, from the front end that has the client to the answer.

The limits and the budget of the key are charged before anything goes out. An answer is sent on
piece by piece, each when the one before is taken; its end is sent when the usage is written down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Final

from appliance.access.auth import Access, Caller
from appliance.access.elsewhere import Admitted, Elsewhere
from appliance.gateway.accounts import Account, Charge
from appliance.gateway.forwarding.answers import BadAnswer, Events, Usage, whole
from appliance.gateway.forwarding.upstream import Answer, ServerFailed, Upstream
from appliance.gateway.held_bodies import HeldBodies
from appliance.http.errors import ApiError, as_api_error, as_refused
from appliance.observability.registry import Registry
from appliance.observability.remote_metrics import RemoteError, RemoteMetrics
from appliance.service.front_frames import Forward, Passed, Refused
from appliance.service.interface import ModelNotFound, RequestTimes, shutting_down
from appliance.service.remote_models import RemoteModel, RemoteModels
from appliance.vocabulary import FinishReason, ModelName, RequestId

MAX_ANSWER_BYTES: Final = 32 << 20
"""Of an answer that is no stream: its usage is counted before the client has any of it."""
MAX_ANSWERS_BYTES: Final = 256 << 20
"""Of all of those together."""
PIECE_BYTES: Final = 64 * 1024
BYTES_OF_TOKEN: Final = 4
_EVENTS: Final = "text/event-stream"
_JSON: Final = "application/json"

log = logging.getLogger("appliance.requests")


class Forwards:
    """All requests that other servers compute, of all front ends."""

    def __init__(
        self, models: RemoteModels, access: Access, metrics: RemoteMetrics | None = None
    ) -> None:
        self.models = models
        self.metrics = RemoteMetrics(Registry()) if metrics is None else metrics
        self.elsewhere = Elsewhere(access)
        self.held_bytes = 0
        """Of answers that are no streams."""
        self._upstreams: dict[ModelName, Upstream] = {}
        self._numbers = count(1)
        self._retiring: set[asyncio.Task[None]] = set()
        self._live: set[Forwarding] = set()
        self.catalogue_changed()

    def catalogue_changed(self) -> None:
        """There may be other models now: these are counted, and no others."""
        names = self.models.own_names()
        self.metrics.know(names)
        for name in names:
            self.count_running(name)

    def begin(
        self,
        frame: Forward,
        caller: Caller,
        account: Account,
        held: HeldBodies,
        send: Callable[[Passed], None],
        on_refused: Callable[[Refused], None],
    ) -> Forwarding:
        """Have a request answered; what comes of it is sent."""
        name = f"remote-{next(self._numbers)}"
        forwarding = Forwarding(self, name, frame, caller, account, held, send, on_refused)
        self._live.add(forwarding)
        forwarding.task.add_done_callback(lambda _: self._live.discard(forwarding))
        return forwarding

    def count_running(self, model: ModelName) -> None:
        """Show how many requests of a model are not over."""
        self.metrics.running(model, self.models.live(model))

    def end_all(self) -> None:
        """The appliance ends, and waits no longer."""
        for forwarding in list(self._live):
            forwarding.give_up(as_api_error(shutting_down()))

    async def aclose(self) -> None:
        """Close all connections that nothing uses."""
        for upstream in self._upstreams.values():
            await upstream.retire()

    def upstream(self, model: RemoteModel) -> Upstream:
        """The connections to its server."""
        known = self._upstreams.get(model.name)
        if known is not None and known.model == model:
            return known
        if known is not None:
            task = asyncio.get_running_loop().create_task(known.retire())
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        found = self._upstreams[model.name] = Upstream(model)
        return found


class Forwarding:
    """One of them."""

    def __init__(
        self,
        forwards: Forwards,
        name: RequestId,
        frame: Forward,
        caller: Caller,
        account: Account,
        held: HeldBodies,
        send: Callable[[Passed], None],
        on_refused: Callable[[Refused], None],
    ) -> None:
        self._forwards = forwards
        self._name = name
        self._frame = frame
        self._caller = caller
        self._account = account
        self._held = held
        self._send = send
        self._on_refused = on_refused
        self._took = asyncio.Event()
        self._admitted: Admitted | None = None
        self._charge: Charge | None = None
        self._usage: Usage | None = None
        self._pieces = 0
        self._asked = False
        """Whether the server has the request, and may compute it."""
        self._begun = False
        """Whether the client is being answered."""
        self._outcome = "cancelled"
        self._error: RemoteError | None = RemoteError.LEFT
        """As it is counted; None once the answer is whole."""
        self._began = time.monotonic()
        self._first_byte_seconds: float | None = None
        self._given_up: ApiError | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())

    def took(self) -> None:
        """The piece that was sent last is taken."""
        self._took.set()

    def stop(self) -> None:
        """Nothing more is wanted: the client left. What came counts at once, as the account of a
        line of a batch is about to be closed."""
        self._write(None)
        self.task.cancel()

    def give_up(self, error: ApiError) -> None:
        """End it, with an error for the client."""
        self._given_up = error
        self.task.cancel()

    async def _run(self) -> None:
        model: RemoteModel | None = None
        try:
            model = self._take_in()
            await self._ask(self._forwards.upstream(model))
        except asyncio.CancelledError:
            self._write(None)
            if self._given_up is not None:
                self._error = RemoteError.HERE
                self._refuse(self._given_up)
        except Exception as error:
            self._error = error.kind if isinstance(error, ServerFailed) else RemoteError.HERE
            self._asked = self._pieces > 0  # a server that gave nothing costs nothing
            self._write(None)
            self._refuse(as_api_error(error))
        finally:
            self._end(model)
            self._log(time.monotonic() - self._began)

    # --- before it is asked ----------------------------------------------------------------------

    def _take_in(self) -> RemoteModel:
        """Raises what refuses it; nothing is charged then."""
        frame, caller = self._frame, self._caller
        if not caller.allows(frame.model):
            raise ModelNotFound(frame.model)
        model = self._forwards.models.begin(frame.model)
        self._forwards.count_running(model.name)
        try:
            self._held.take(self._name, caller.owner, len(frame.body))
            needed = frame.prompt_tokens + frame.choices * frame.max_tokens
            self._charge = self._account.begin_elsewhere(
                model.name, self._name, frame.prompt_tokens, needed
            )
            self._admitted = self._forwards.elsewhere.begin(
                caller,
                prompt_tokens=frame.prompt_tokens,
                max_tokens=frame.max_tokens,
                choices=frame.choices,
                request_class=frame.request_class,
                guided=frame.guided,
            )
        except BaseException:
            self._forwards.models.end(model.name)
            self._forwards.count_running(model.name)
            raise
        return model

    # --- its answer ------------------------------------------------------------------------------

    async def _ask(self, upstream: Upstream) -> None:
        frame = self._frame
        try:
            async with upstream.asked(
                frame.path, frame.body, frame.headers, self._is_asked
            ) as answer:
                if answer.status != 200:
                    await self._pass_refusal(upstream, answer)
                elif answer.headers.get("content-encoding", "identity") != "identity":
                    raise upstream.bad("it is compressed, though that was not asked for")
                elif frame.streams:
                    await self._pass_events(upstream, answer)
                else:
                    await self._pass_whole(upstream, answer)
        except BadAnswer as error:
            raise upstream.bad(str(error)) from error

    def _is_asked(self) -> None:
        self._asked = True

    def _is_answered(self) -> None:
        """A piece of the answer came."""
        if self._first_byte_seconds is None:
            self._first_byte_seconds = time.monotonic() - self._began
            self._forwards.metrics.first_byte(self._frame.model, self._first_byte_seconds)

    async def _pass_refusal(self, upstream: Upstream, answer: Answer) -> None:
        self._asked = False  # it computes nothing
        error, body = await upstream.refusal(answer)
        if error is not None:
            raise error
        self._outcome = str(answer.status)
        self._error = RemoteError.REQUEST
        await self._pass_pieces(answer.status, body)

    async def _pass_whole(self, upstream: Upstream, answer: Answer) -> None:
        if answer.media_type != _JSON:
            raise upstream.bad(f"it is {answer.media_type[:40] or 'nothing'}, and not JSON")
        body = bytearray()
        forwards = self._forwards
        try:
            async for piece in answer.response.aiter_stream():
                self._is_answered()
                body += piece
                forwards.held_bytes += len(piece)
                if len(body) > MAX_ANSWER_BYTES:
                    raise upstream.bad(f"it has more than {MAX_ANSWER_BYTES} bytes")
                if forwards.held_bytes > MAX_ANSWERS_BYTES:
                    message = "answers of other servers take all memory that they may have"
                    headers = {"Retry-After": "1"}
                    raise ApiError(503, message, code="remote_answers_full", headers=headers)
            changed, usage = whole(bytes(body), self._frame.path, self._frame.asked)
            self._usage = usage or self._guessed(len(body))
            await self._counted()
            await self._pass_pieces(200, changed)
        finally:
            forwards.held_bytes -= len(body)

    async def _pass_pieces(self, status: int, body: bytes) -> None:
        for start in range(0, len(body) or 1, PIECE_BYTES):
            piece, last = body[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(body)
            await self._pass(piece, status=status, last=last)

    async def _pass_events(self, upstream: Upstream, answer: Answer) -> None:
        if answer.media_type != _EVENTS:
            raise upstream.bad("a stream was asked for, and it is none")
        frame = self._frame
        events = Events(frame.path, frame.asked, wants_usage=frame.wants_usage)
        await self._pass(b"", streams=True)  # the head, so that the client knows that it is taken
        async for data in _slowly(answer):
            self._is_answered()
            try:
                out = events.feed(data)
            finally:
                self._usage, self._pieces = events.usage, events.pieces
            if out:
                await self._pass(out)
            if events.last:
                break
        if events.failed and not events.last:
            self._outcome = "remote_failed"
            self._error = RemoteError.ANSWER
            self._write(None)
            await self._pass(b"", last=True)
            return
        if not events.last:
            raise upstream.bad("the stream ended before its last event", RemoteError.BROKEN)
        if self._usage is None:
            self._usage = Usage(frame.prompt_tokens, 0, events.pieces)
        await self._counted()
        await self._pass(events.last, last=True)

    async def _pass(
        self, data: bytes, *, status: int = 200, streams: bool = False, last: bool = False
    ) -> None:
        """Send a piece, and wait until it is taken."""
        if self._begun:
            status = 0
        self._begun = True
        self._took.clear()
        self._send(
            Passed(call=self._frame.call, status=status, streams=streams, data=data, last=last)
        )
        if not last:
            await self._took.wait()

    def _refuse(self, error: ApiError) -> None:
        refused = as_refused(error, self._frame.call)
        self._outcome = refused.code
        self._on_refused(refused)
        self._send(Passed(call=self._frame.call, refused=refused))

    def _guessed(self, size_bytes: int) -> Usage:
        """What an answer comes to that does not say so: about four bytes are a token."""
        made = size_bytes // BYTES_OF_TOKEN if self._frame.max_tokens else 0
        return Usage(self._frame.prompt_tokens, 0, made)

    # --- what it comes to ------------------------------------------------------------------------

    async def _counted(self) -> None:
        """The answer is whole: write down what it came to, before the client has its end."""
        counted = asyncio.Event()
        self._outcome, self._error = "whole", None
        self._write(FinishReason.STOP, counted.set)
        await counted.wait()
        self._settle()

    def _write(
        self, finished: FinishReason | None, go_on: Callable[[], None] | None = None
    ) -> None:
        """Once. What was cut counts as far as it came: its prompt, and a token for each piece."""
        charge, self._charge = self._charge, None
        if charge is None:
            return
        usage = self._usage
        if finished is None and self._asked:
            finished = FinishReason.CANCELLED
            usage = usage or Usage(self._frame.prompt_tokens, 0, self._pieces)
        self._usage = usage
        if usage is not None:
            charge.counted(*usage)
        charge.end(finished if usage is not None else None, RequestTimes(), go_on or _nothing)

    def _settle(self) -> None:
        """Give back what it did not need of the limits of its key. Once."""
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            usage = self._usage or Usage()
            admitted.end(usage.input, usage.output)

    def _end(self, model: RemoteModel | None) -> None:
        self._settle()
        self._held.release(self._name)
        usage, forwards = self._usage or Usage(), self._forwards
        if model is not None:
            forwards.models.end(model.name, usage.output)
            forwards.count_running(model.name)
        forwards.metrics.ended(self._frame.model, self._error, usage.input, usage.output)

    def _log(self, seconds: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        frame, key, usage = self._frame, self._caller.key, self._usage or Usage()
        fields: dict[str, object] = {
            "request": self._name,
            "model": frame.model,
            "class": frame.request_class.value,
            **({} if key is None else {"key": key.name}),
            "outcome": self._outcome,
            "remote": True,
            "prompt_tokens": usage.input,
            "completion_tokens": usage.output,
            "seconds": round(seconds, 4),
        }
        log.info("request", extra={"fields": fields})


async def _slowly(answer: Answer) -> AsyncIterator[bytes]:
    """What comes, with turns of the event loop in between: much may be there at once."""
    async for piece in answer.response.aiter_stream():
        yield piece
        await asyncio.sleep(0)


def _nothing() -> None:
    pass
