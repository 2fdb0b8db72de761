"""The link to the core: frames in both directions, and whom the core's frames are for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Final, Protocol, cast

import msgspec

from appliance import framing
from appliance.frontend.calls import Call
from appliance.service import front_frames
from appliance.service.front_frames import (
    Abort,
    Admitted,
    Catalogue,
    Drain,
    Enter,
    Entered,
    FetchedImage,
    FetchImage,
    FindResponse,
    Forward,
    FoundResponse,
    Hello,
    Leave,
    Output,
    Outputs,
    Passed,
    Ping,
    Reading,
    Refused,
    Run,
    Settled,
    Stopped,
    StopRun,
    Submit,
    TookImage,
    TookPiece,
    Up,
    Welcome,
)
from appliance.vocabulary import FinishReason, RequestId

log = logging.getLogger(__name__)


_GONE: Final = Refused(
    call=0, status=503, code="shutting_down", message="the appliance is shutting down; try again"
)
"""What a core that is gone can no longer say itself; this process ends."""


class CallRefused(Exception):
    """The core refuses a call, or is gone."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class RequestRefused(Exception):
    """The core refuses a request that was submitted, or is gone."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class Receiver(Protocol):
    """Takes what the core sends for the requests of one model."""

    def deliver(self, outputs: list[Output]) -> None:
        """New tokens, in one frame."""
        ...

    def fail(self, request: RequestId, refused: Refused) -> None:
        """The core gives up a request that it had admitted."""
        ...


class _Request:
    """A submitted request."""

    __slots__ = ("admission", "call", "receiver")

    def __init__(
        self, call: Call, receiver: Receiver, admission: asyncio.Future[None] | None
    ) -> None:
        self.call = call
        self.receiver = receiver
        self.admission = admission


class Core(asyncio.Protocol):
    """The core, as a front end sees it. Frames leave in the order of the calls made here."""

    def __init__(self) -> None:
        self._decoder = front_frames.decoder_for_front()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._numbers = itertools.count(1)
        self._entering: dict[int, asyncio.Future[Entered]] = {}
        self._finding: dict[int, asyncio.Future[FoundResponse]] = {}
        self._fetching: dict[int, asyncio.Future[FetchedImage]] = {}
        self._passing: dict[int, asyncio.Queue[Passed]] = {}
        self._requests: dict[RequestId, _Request] = {}
        self._stopped: dict[RequestId, Call] = {}
        """Those that a stop string ended, and that the core has not counted yet."""
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        """Set when the core's end of the link is closed."""
        self.on_catalogue: Callable[[Catalogue], None] = _ignored
        self.on_run: Callable[[Run | StopRun], None] = _ignored
        self.on_ping: Callable[[Ping], None] = _ignored
        self.on_drain: Callable[[], None] = lambda: None

    async def greet(self) -> Welcome:
        """Introduce this process; returns what it is configured with. Raises `ConnectionError` if
        the core ends the link before it answers."""
        self.send(Hello(version=front_frames.VERSION, pid=os.getpid()))
        return await self._welcome

    def send(self, frame: Up) -> None:
        """Send a frame; lost if the core is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framing.encode(frame))

    # --- calls -----------------------------------------------------------------------------------

    async def enter(
        self,
        method: str,
        path: str,
        client: str | None,
        headers: tuple[tuple[str, str], ...],
        connection: int,
    ) -> Call:
        """Ask whether a call may go on. Raises `CallRefused`."""
        await self._writable.wait()
        if self.gone.is_set():
            raise CallRefused(_GONE)
        number = next(self._numbers)
        answer: asyncio.Future[Entered] = asyncio.get_running_loop().create_future()
        self._entering[number] = answer
        enter = Enter(
            call=number,
            method=method,
            path=path,
            client=client,
            headers=headers,
            connection=connection,
        )
        self.send(enter)
        try:
            entered = await answer
        except asyncio.CancelledError:
            self.send(Leave(number))
            raise
        finally:
            del self._entering[number]
        return Call(number, entered.models, entered.headers, entered.key)

    def leave(self, call: Call) -> None:
        """The call is over; the core aborts what it still has."""
        for request in call.requests:
            self._requests.pop(request, None)
        call.requests.clear()
        self.send(Leave(call.number))

    async def find_response(self, call: Call, response: str) -> FoundResponse:
        """Ask for a stored response, once at a time for a call. Raises `CallRefused` when the core
        is gone."""
        if self.gone.is_set():
            raise CallRefused(_GONE)
        answer: asyncio.Future[FoundResponse] = asyncio.get_running_loop().create_future()
        self._finding[call.number] = answer
        self.send(FindResponse(call.number, response))
        try:
            return await answer
        finally:
            del self._finding[call.number]

    async def fetch_image(self, call: Call, url: str) -> FetchedImage:
        """Have the core fetch an image, once at a time for a call; it gives up when the call is
        over. Raises `CallRefused` when the core is gone."""
        if self.gone.is_set():
            raise CallRefused(_GONE)
        answer: asyncio.Future[FetchedImage] = asyncio.get_running_loop().create_future()
        self._fetching[call.number] = answer
        self.send(FetchImage(call=call.number, url=url))
        try:
            return await answer
        finally:
            del self._fetching[call.number]

    async def forward(self, frame: Forward) -> AsyncGenerator[Passed]:
        """Have another server asked; the pieces of its answer, of which the next one comes when
        this one is done with. The last one says so, or is a refusal."""
        if self.gone.is_set():
            raise CallRefused(_GONE)
        pieces = self._passing[frame.call] = asyncio.Queue()
        await self._writable.wait()
        self.send(frame)
        try:
            while True:
                piece = await pieces.get()
                yield piece
                if piece.last or piece.refused is not None:
                    return
                self.send(TookPiece(frame.call))
        finally:
            del self._passing[frame.call]

    # --- requests --------------------------------------------------------------------------------

    async def submit(self, call: Call, submit: Submit, receiver: Receiver) -> None:
        """Submit a request; returns when it is admitted. Raises `RequestRefused`."""
        await self._writable.wait()
        if self.gone.is_set():
            call.refuse(_GONE)
            raise RequestRefused(_GONE)
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests[submit.request] = _Request(call, receiver, admission)
        call.submit(submit.request)
        self.send(submit)
        try:
            await admission
        except asyncio.CancelledError:
            self.abort([submit.request], FinishReason.CANCELLED)
            raise

    def abort(self, requests: list[RequestId], reason: FinishReason) -> None:
        """No more tokens are wanted of those among `requests` that are not over."""
        live = [request for request in requests if self._forget(request)]
        if live:
            self.send(Abort(live, reason))

    def stop(self, call: Call, request: RequestId, output_tokens: int) -> None:
        """A stop string ended a request, whose client is sent so many tokens of output. Nothing
        more goes to the client until the core has counted it."""
        self._forget(request)
        call.unsettled.add(request)
        if not self.gone.is_set():
            self._stopped[request] = call
            self.send(Stopped(call.number, request, output_tokens))

    def reading(self, call: Call, *, reads: bool) -> None:
        """The call's client stopped to take its answer, or takes it again."""
        if call.requests:
            self.send(Reading(sorted(call.requests), reads))

    def _forget(self, request: RequestId) -> _Request | None:
        known = self._requests.pop(request, None)
        if known is not None:
            known.call.requests.discard(request)
        return known

    # --- the core's frames -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except Exception as error:  # of msgspec, or a frame too long: nothing can be read any more
            log.error("the core's frames cannot be read: %s", error)
            self._close()
            return
        for frame in frames:
            self._take(frame)

    def _take(self, frame: front_frames.Down) -> None:
        match frame:
            case Outputs():
                self._deliver(frame.outputs)
            case Admitted():
                self._admitted(frame.request)
            case Entered():
                answer = self._entering.get(frame.call)
                if answer is not None and not answer.done():
                    answer.set_result(frame)
            case Refused():
                self._refused(frame)
            case Settled():
                self._settled(frame.request)
            case FoundResponse():
                found = self._finding.get(frame.call)
                if found is not None and not found.done():
                    found.set_result(frame)
            case FetchedImage():
                if frame.file:
                    self.send(TookImage())
                fetched = self._fetching.get(frame.call)
                if fetched is not None and not fetched.done():
                    fetched.set_result(frame)
            case Passed():
                if (pieces := self._passing.get(frame.call)) is not None:
                    pieces.put_nowait(frame)
            case Ping():
                self.on_ping(frame)
            case Run() | StopRun():
                self.on_run(frame)
            case Catalogue():
                self.on_catalogue(frame)
            case Drain():
                self.on_drain()
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(frame)

    def _deliver(self, outputs: list[Output]) -> None:
        sorted_out: dict[Receiver, list[Output]] = {}
        for output in outputs:
            known = self._requests.get(output.request)
            if known is None:
                continue
            if output.finished is not None:
                self._forget(output.request)
                known.call.timing = output.timing or known.call.timing
            sorted_out.setdefault(known.receiver, []).append(output)
        for receiver, mine in sorted_out.items():
            receiver.deliver(mine)

    def _admitted(self, request: RequestId) -> None:
        known = self._requests.get(request)
        if known is None:
            return
        if known.admission is not None and not known.admission.done():
            known.admission.set_result(None)
        known.admission = None
        known.call.decided.set()

    def _refused(self, refused: Refused) -> None:
        if refused.request is None:
            answer = self._entering.get(refused.call)
            if answer is not None and not answer.done():
                answer.set_exception(CallRefused(refused))
            return
        known = self._forget(refused.request)
        if known is None:
            return
        known.call.refuse(refused)
        if known.admission is None:
            if known.call.streams and not known.call.background:
                known.call.given_up.set()
            else:
                known.receiver.fail(refused.request, refused)
        elif not known.admission.done():
            known.admission.set_exception(RequestRefused(refused))

    def _settled(self, request: RequestId) -> None:
        call = self._stopped.pop(request, None)
        if call is not None:
            call.settle(request)

    # --- the link --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close()

    def _close(self) -> None:
        if self.gone.is_set():
            return
        self.gone.set()
        self._writable.set()
        if self._transport is not None:
            self._transport.close()
        _fail([self._welcome], ConnectionError("the core is gone"))
        waiting = (self._entering, self._finding, self._fetching)
        _fail([future for of in waiting for future in of.values()], CallRefused(_GONE))
        for call, pieces in self._passing.items():
            pieces.put_nowait(Passed(call=call, refused=_GONE))
        self._stopped.clear()  # not counted: their clients see the connection end
        for request, known in list(self._requests.items()):
            if known.admission is not None:
                self._refused(msgspec.structs.replace(_GONE, request=request))


def _fail(waiting: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)


def _ignored(frame: object) -> None:
    """Until the front end serves, there is nothing to do."""
