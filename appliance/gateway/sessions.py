"""What the core says to each front end: who may ask, which requests are admitted, what they output.

A `Session` is the core's half of the frames (`appliance.service.front_frames`) to one front end.
`Sessions` are all of them; they also have lines of batches answered by one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from appliance.access.admission import Admission
from appliance.access.auth import Access, Caller, Credentials
from appliance.access.keys import Scope
from appliance.engines.protocol import GuideRefused, Produced
from appliance.gateway.accounts import Account, Accounts, Charge
from appliance.gateway.forwarding.forwards import Forwarding, Forwards
from appliance.gateway.held_bodies import HeldBodies
from appliance.gateway.image_fetches import ImageFetches
from appliance.gateway.remote_images import RemoteImages
from appliance.gateway.responses import StoredResponse, StoredResponses
from appliance.http.errors import as_api_error, as_refused
from appliance.http.image_hosts import ImageHosts
from appliance.http.server_timing import server_timing
from appliance.service.front_frames import (
    MAX_STORED_BYTES,
    MOST_DETAIL_BYTES,
    VERSION,
    Abort,
    Admitted,
    BodyActivity,
    Catalogue,
    Down,
    Enter,
    Entered,
    FetchImage,
    FindResponse,
    Forward,
    FoundResponse,
    FrontModel,
    Hello,
    KeepEvent,
    KeepResponse,
    Leave,
    ModelRefused,
    Output,
    Outputs,
    Pong,
    Ran,
    Reading,
    Ready,
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
from appliance.service.interface import (
    Generation,
    GenerationFailed,
    Inference,
    ModelNotFound,
    RequestTimes,
    SubmitRequest,
    Trace,
)
from appliance.service.remote_models import RemoteModels
from appliance.usage.entries import CUT, WHOLE
from appliance.vocabulary import FinishReason, ModelName, RequestClass, RequestId

MAX_CALLS: Final = 4096
MAX_REQUESTS: Final = 16384
"""Of one front end at once."""
LONGEST_PARENT: Final = 256
"""Characters of a ``traceparent`` that is looked at; those of today have 55."""

log = logging.getLogger("appliance.gateway")


class FrontSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every front end is configured with; the fields are those of `Welcome`."""

    keep_alive_seconds: float
    max_body_bytes: int
    max_bodies_bytes: int = 128 << 20
    strict: bool = False
    origins: tuple[str, ...] = ()
    root_path: str = ""
    most_in_use: int | None = None


class NoFrontEnd(Exception):
    """No front end is ready; trying again later makes sense."""


class FrontEndLost(Exception):
    """The front end died while it answered; another one may be asked."""


class Answered(NamedTuple):
    """The answer to a line of a batch."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    refused: Refused | None = None
    """What the core itself refused of it, if it did."""


class GuideChecker(Protocol):
    """What compiles guides first. `appliance.gateway.guide_trials.GuideTrials` is one."""

    async def check(self, owner: str, model: FrontModel, guide: bytes) -> None:
        """Raises `GuideRefused`, and `ApiError` if nothing can be said of the guide now."""

    def refuse(self, owner: str, model: FrontModel, guide: bytes, reason: str) -> None:
        """The guide did harm: refuse it from now on."""


class Sessions:
    """The conversations with all front ends."""

    def __init__(
        self,
        service: Inference,
        access: Access,
        admission: Admission,
        settings: FrontSettings,
        accounts: Accounts | None = None,
    ) -> None:
        """`accounts` say what each key used; without them nothing does."""
        self.accounts = Accounts(access) if accounts is None else accounts
        self.service = service
        self.access = access
        self.admission = admission
        self.live: set[RequestId] = set()
        """The ids of all requests of front ends that are not over."""
        self.held = HeldBodies()
        self.responses = StoredResponses()
        self.remote_images = RemoteImages(ImageHosts())
        """Fetches what bodies name by URL."""
        self.forwards = Forwards(RemoteModels(), access)
        """Has other servers answer what is asked of their models."""
        self.guides: GuideChecker | None = None
        """Compiles guides before workers do; None: they do at once."""
        self._settings = settings
        self._open: list[Session] = []
        self._numbers = itertools.count(1)

    def open(
        self, send: Callable[[Down], None], is_operator: Callable[[int], bool] = lambda _: False
    ) -> Session:
        """The conversation with a new front end. `send` takes a frame for it, and does not raise
        when it is gone; `is_operator` says of a connection that was handed over to it whether an
        operator is at its other end."""
        session = Session(self, send, is_operator)
        self._open.append(session)
        return session

    def close(self, session: Session) -> None:
        """A front end is gone."""
        if session in self._open:
            self._open.remove(session)

    def welcome(self) -> Welcome:
        settings = self._settings
        return Welcome(
            keep_alive_seconds=settings.keep_alive_seconds,
            max_body_bytes=settings.max_body_bytes,
            max_bodies_bytes=settings.max_bodies_bytes,
            strict=settings.strict,
            origins=settings.origins,
            root_path=settings.root_path,
            most_in_use=settings.most_in_use,
            models=self.service.front_models(),
        )

    def catalogue_changed(self) -> None:
        """Tell all front ends which models there are, and count those of other servers."""
        self.forwards.catalogue_changed()
        catalogue = Catalogue(self.service.front_models())
        for session in self._open:
            session.tell_catalogue(catalogue)

    def bodies(self) -> list[BodyActivity]:
        """The bodies of requests that are still coming in, as front ends said last."""
        return [body for session in self._open for body in session.bodies]

    def front_model(self, name: ModelName) -> FrontModel:
        """Raises `ModelNotFound`."""
        for model in self.service.front_models():
            if model.name == name:
                return model
        raise ModelNotFound(name)

    async def ask(self, caller: Caller, path: str, body: bytes, line: str = "") -> Answered:
        """Have the front end that has least to do answer a line of a batch, as work of the class
        batch. `line` is its id in the ledger. Raises `NoFrontEnd` and `FrontEndLost`."""
        ready = [session for session in self._open if session.ready]
        if not ready:
            raise NoFrontEnd("no front end is ready")
        session = min(ready, key=lambda session: session.calls)
        return await session.run(-next(self._numbers), caller, path, body, line)


class Session:
    """The conversation with one front end."""

    def __init__(
        self,
        sessions: Sessions,
        send: Callable[[Down], None],
        is_operator: Callable[[int], bool],
    ) -> None:
        self.ready = False
        """Whether it serves, and may be given lines of batches."""
        self.frame = 0
        """The number of the next `Outputs`."""
        self._sessions = sessions
        self._service = sessions.service
        self._access = sessions.access
        self._send = send
        self._is_operator = is_operator
        self.bodies: tuple[BodyActivity, ...] = ()
        """Those that are still coming in, as it said last."""
        self._calls: dict[int, _Call] = {}
        self._requests: dict[RequestId, _Request] = {}
        self._outputs: list[Output] = []
        self._detail_bytes = 0
        """Of `_outputs`."""
        self._images = ImageFetches(lambda: sessions.remote_images, send)
        self._greeted = False
        self._drained = False
        self._lost = False

    @property
    def calls(self) -> int:
        """Those that are not answered yet."""
        return len(self._calls)

    def tell_catalogue(self, catalogue: Catalogue) -> None:
        if self._greeted:
            self._send(catalogue)

    # --- frames of the front end -----------------------------------------------------------------

    def received(self, frame: Up) -> None:
        """It says something; what only concerns its process is not answered here."""
        match frame:
            case Submit():
                self._submit(frame)
            case Abort():
                for name in frame.requests:
                    self._abort(name, frame.reason)
            case Stopped():
                self._stopped(frame)
            case Reading():
                for name in frame.requests:
                    if (request := self._requests.get(name)) is not None:
                        request.reader(reads=frame.reads)
            case Enter():
                self._enter(frame)
            case KeepResponse():
                self._keep_response(frame)
            case KeepEvent():
                self._keep_event(frame)
            case FindResponse():
                self._find_response(frame)
            case FetchImage():
                self._fetch_image(frame)
            case TookImage():
                self._images.read()
            case Forward():
                self._forward(frame)
            case TookPiece():
                call = self._calls.get(frame.call)
                if call is not None and call.forwarding is not None:
                    call.forwarding.took()
            case Leave():
                self._leave(frame.call)
            case Ran():
                self._ran(frame)
            case ModelRefused():
                self._service.refuse_model(frame.model, frame.reason)
            case Hello():
                if frame.version != VERSION:
                    log.error("a front end speaks version %d, not %d", frame.version, VERSION)
                self._greeted = True
                self._send(self._sessions.welcome())
            case Ready():
                self.ready = not self._drained
            case Pong():
                self.bodies = frame.bodies

    def drained(self) -> None:
        """It drains: it gets no more lines of batches."""
        self._drained = True
        self.ready = False

    def stream_begun(self, call: int, connection: socket.socket, ending: bytes) -> None:
        """The stream that answers a call has begun: it can be ended without the front end."""
        if (answered := self._calls.get(call)) is None:  # it is over already
            connection.close()
        else:
            answered.stream = _Stream(connection, ending)

    def lost(self) -> None:
        """It died: what it had is aborted, and its streams end with an event that says so."""
        self._lost = True
        self.ready = False
        self._sessions.close(self)
        for number, call in list(self._calls.items()):
            if call.stream is not None:
                call.stream.end()
            self._end_call(number, FrontEndLost("the front end died"))
        self._outputs = []
        self._images.lost()

    # --- calls -----------------------------------------------------------------------------------

    def _enter(self, frame: Enter) -> None:
        asking = Credentials(dict(frame.headers), frame.client, self._is_operator(frame.connection))
        try:
            if len(self._calls) >= MAX_CALLS:
                raise _overloaded(f"a front end has {MAX_CALLS} calls at once")
            caller = self._access.caller(asking, Scope.INFER)
            counted = frame.method == "POST"
            if counted:
                self._access.begin(caller)
        except Exception as error:
            self._send(_refusal(error, frame.call))
            return
        parent = asking.headers.get("traceparent", "")
        trace = Trace(path=frame.path, parent=parent if len(parent) <= LONGEST_PARENT else "")
        account = self._sessions.accounts.open(caller)
        self._calls[frame.call] = _Call(caller, account, counted=counted, trace=trace)
        headers = tuple(self._access.rate_headers(caller)) if counted else ()
        key = None if caller.key is None else caller.key.name
        self._send(Entered(call=frame.call, key=key, models=_models(caller), headers=headers))

    def _leave(self, number: int) -> None:
        self._end_call(number, FrontEndLost("the front end gave the line up"))

    def _end_call(self, number: int, unanswered: Exception) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        for request in list(call.requests):
            self._abort(request, FinishReason.CANCELLED)
        self._images.stop(number)
        if call.forwarding is not None:
            call.forwarding.stop()
        if call.counted:
            self._access.end(call.caller)
        if call.response is not None:
            self._sessions.responses.end(call.response, "failed")
        if call.stream is not None:
            call.stream.connection.close()
        if call.answer is not None:
            whole = call.ran is not None and call.ran.status < 400
            call.account.close_line(WHOLE if whole else CUT, partial(call.give_answer, unanswered))

    # --- stored responses ------------------------------------------------------------------------

    def _keep_response(self, frame: KeepResponse) -> None:
        call = self._calls.get(frame.call)
        if call is None or call.cancelled:
            return
        if len(frame.answer) + len(frame.messages) > MAX_STORED_BYTES:
            return
        try:
            response = self._sessions.responses.keep(
                call.caller.owner, frame.response, frame.answer, frame.messages
            )
        except msgspec.DecodeError as error:
            log.error("a front end stores a response that cannot be read: %s", error)
            return
        if frame.background:
            call.response = response
            response.cancel = lambda: self._cancel(frame.call)

    def _keep_event(self, frame: KeepEvent) -> None:
        call = self._calls.get(frame.call)
        if call is not None and call.response is not None and not call.cancelled:
            self._sessions.responses.add(call.response, frame.event)

    def _find_response(self, frame: FindResponse) -> None:
        call = self._calls.get(frame.call)
        found = None
        if call is not None:
            found = self._sessions.responses.find(call.caller.owner, frame.response)
        if found is None:
            self._send(FoundResponse(frame.call))
        else:
            self._send(FoundResponse(frame.call, found.answer, found.messages))

    # --- models of other servers -----------------------------------------------------------------

    def _forward(self, frame: Forward) -> None:
        call = self._calls.get(frame.call)
        if call is None:
            return

        def keep(refused: Refused) -> None:
            call.refused = call.refused or refused

        if call.forwarding is not None:
            call.forwarding.stop()
        sessions = self._sessions
        if call.answer is not None:
            frame = msgspec.structs.replace(frame, request_class=RequestClass.BATCH)
        call.forwarding = sessions.forwards.begin(
            frame, call.caller, call.account, sessions.held, self._send, keep
        )

    # --- images ----------------------------------------------------------------------------------

    def _fetch_image(self, frame: FetchImage) -> None:
        if (call := self._calls.get(frame.call)) is not None:
            self._images.ask(frame, call.caller.owner)

    def _cancel(self, number: int) -> None:
        """Give up the response that a call makes in the background."""
        call = self._calls[number]
        call.cancelled = True
        assert call.response is not None
        self._sessions.responses.end(call.response, "cancelled")
        for name in list(call.requests):
            request = self._requests[name]
            self.give_up(request, _cancelled())
            self._abort(name, FinishReason.CANCELLED)

    # --- lines of batches ------------------------------------------------------------------------

    async def run(self, number: int, caller: Caller, path: str, body: bytes, line: str) -> Answered:
        """Have a line of a batch answered. Raises `FrontEndLost`."""
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        account = self._sessions.accounts.open(caller, line)
        self._calls[number] = _Call(caller, account, answer=answer)
        key = None if caller.key is None else caller.key.name
        self._send(Run(call=number, path=path, body=body, models=_models(caller), key=key))
        try:
            return await answer
        finally:
            if number in self._calls:  # it is given up
                self._send(StopRun(number))
                answer.cancel()
                self._end_call(number, FrontEndLost("the line was given up"))

    def _ran(self, frame: Ran) -> None:
        call = self._calls.get(frame.call)
        if call is None or call.answer is None:
            return
        call.ran = Answered(frame.status, frame.body, frame.headers, call.refused)
        self._leave(frame.call)

    # --- requests --------------------------------------------------------------------------------

    def _submit(self, frame: Submit) -> None:
        call = self._calls.get(frame.call)
        charge: Charge | None = None
        try:
            if call is None:
                raise GenerationFailed("call_not_found", f"there is no call {frame.call}", 409)
            if call.cancelled:
                raise _cancelled()
            if len(self._requests) >= MAX_REQUESTS:
                raise _overloaded(f"a front end has {MAX_REQUESTS} requests at once")
            if frame.request in self._sessions.live:
                raise GenerationFailed(
                    "request_exists", f"a request {frame.request!r} is computed already", 409
                )
            self._sessions.held.take(frame.request, call.caller.owner, len(frame.body))
            charge = call.account.begin(frame)
            request = _Request(self, frame.request, frame.call, charge)
            asked = _asked(frame, call)
            if frame.guide:
                call.caller.check_guides()
                task = asyncio.get_running_loop().create_task(
                    self._guided(request, call, asked, frame.guide)
                )
                request.guiding = task
            else:
                request.begin(self._sessions.admission.submit(asked, call.caller, request))
        except Exception as error:
            if frame.request not in self._sessions.live:
                self._sessions.held.release(frame.request)
                if charge is not None:
                    charge.drop()
            self._send(self._refused(call, error, frame.call, frame.request))
            return
        self._requests[frame.request] = request
        call.requests.add(frame.request)
        self._sessions.live.add(frame.request)
        if not frame.guide:
            self._send(Admitted(frame.request))

    async def _guided(
        self, request: _Request, call: _Call, asked: SubmitRequest, guide: bytes
    ) -> None:
        """Have the guide of a request compiled before it is taken in: by the compiler of guides,
        which it may end, then by the workers."""
        try:
            model = self._sessions.front_model(asked.model)
            if self._sessions.guides is not None:
                await self._sessions.guides.check(call.caller.owner, model, guide)
            await self._service.check_guide(asked.model, asked.body)
            request.guiding = None
            request.owner, request.guide = call.caller.owner, (model, guide)
            request.begin(self._sessions.admission.submit(asked, call.caller, request))
        except Exception as error:
            request.guiding = None
            self.forget(request)
            self._send(self._refused(call, error, request.call, request.id))
        else:
            self._send(Admitted(request.id))

    def refuse_guide(self, request: _Request) -> GuideRefused:
        """A request ended as its guide took too long to follow: others with it are not begun."""
        reason = "the guide takes too long to follow: use a less ambiguous one"
        assert request.guide is not None
        if self._sessions.guides is not None:
            self._sessions.guides.refuse(request.owner, *request.guide, reason)
        return GuideRefused(reason)

    def _abort(self, name: RequestId, reason: FinishReason) -> None:
        request = self._requests.get(name)
        if request is not None:
            self._release(request)
            request.cancel(reason)

    def _stopped(self, frame: Stopped) -> None:
        """A stop string ended a request, which may be over here with more tokens."""
        call = self._calls.get(frame.call)
        charge = None if call is None else call.account.charges.get(frame.request)
        settled = partial(self._settled, Settled(frame.call, frame.request))
        if charge is None:
            settled()
        else:
            charge.stopped(frame.output_tokens, settled)
            self._abort(frame.request, FinishReason.STOP)

    def _settled(self, frame: Settled) -> None:
        if not self._lost:
            self._send(frame)

    def _release(self, request: _Request) -> None:
        """The front end gets no more frames about a request."""
        self._requests.pop(request.id, None)
        if (call := self._calls.get(request.call)) is not None:
            call.requests.discard(request.id)

    def forget(self, request: _Request) -> None:
        """A request is over."""
        self._release(request)
        self._sessions.live.discard(request.id)
        self._sessions.held.release(request.id)
        if not request.charge.over:  # it was never computed
            request.charge.drop()

    def make_room(self, produced: Produced | None) -> None:
        """Send what waits, if a detail would be too much for a frame together with it."""
        size = 0 if produced is None else len(produced.detail or b"")
        if self._detail_bytes and size and self._detail_bytes + size > MOST_DETAIL_BYTES:
            self._flush()
        self._detail_bytes += size

    def put(self, output: Output) -> None:
        """Send an output, with all others that come before the event loop's next turn."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self._detail_bytes = 0
        self.frame += 1
        if outputs and not self._lost:
            self._send(Outputs(outputs))

    def give_up(self, request: _Request, failure: Exception) -> None:
        """The appliance gave a request up."""
        if self._lost:
            return
        self._flush()  # what came of it before
        call = self._calls.get(request.call)
        self._send(self._refused(call, failure, request.call, request.id))

    def _refused(
        self, call: _Call | None, error: Exception, number: int, request: RequestId
    ) -> Refused:
        refused = _refusal(error, number, request)
        if call is not None and call.refused is None:
            call.refused = refused
        return refused


class _Stream(NamedTuple):
    """An answer that a front end sends on a connection, and what ends it if the front end dies."""

    connection: socket.socket
    ending: bytes

    def end(self) -> None:
        """End it for a front end that is dead. Pieces of a stream are written whole; where one was
        cut, as the client took no more, what follows cannot be read: the client sees that, too."""
        with contextlib.suppress(OSError):  # the client left, or takes nothing
            self.connection.send(self.ending)


class _Call:
    """One HTTP request, or one line of a batch."""

    __slots__ = (
        "account",
        "answer",
        "caller",
        "cancelled",
        "counted",
        "forwarding",
        "ran",
        "refused",
        "requests",
        "response",
        "stream",
        "trace",
    )

    def __init__(
        self,
        caller: Caller,
        account: Account,
        *,
        counted: bool = False,
        trace: Trace | None = None,
        answer: asyncio.Future[Answered] | None = None,
    ) -> None:
        """`counted` calls are among the requests of their key. A line of a batch has an
        `answer`."""
        self.caller = caller
        self.account = account
        self.counted = counted
        self.trace = trace
        self.answer = answer
        self.requests: set[RequestId] = set()
        self.forwarding: Forwarding | None = None
        """What another server answers."""
        self.stream: _Stream | None = None
        """Its answer, once that is a stream and has begun."""
        self.refused: Refused | None = None
        """The first refusal of one of its requests."""
        self.response: StoredResponse | None = None
        """What it makes in the background."""
        self.cancelled = False
        """Whether the client gave that up."""
        self.ran: Answered | None = None
        """The answer of a line, as its front end said it."""

    def give_answer(self, unanswered: Exception) -> None:
        """A line has its answer, and what it came to is counted; or it has none."""
        if self.answer is None or self.answer.done():
            return
        if self.ran is None:
            self.answer.set_exception(unanswered)
        else:
            self.answer.set_result(self.ran)


class _Request:
    """One sequence; the sink of its output. Tokens that wait to be sent are one `Output`."""

    __slots__ = (
        "_frame",
        "_generation",
        "_last",
        "_plain",
        "_session",
        "_waiting",
        "_wanted",
        "call",
        "charge",
        "guide",
        "guiding",
        "id",
        "owner",
    )

    def __init__(self, session: Session, name: RequestId, call: int, charge: Charge) -> None:
        self.id = name
        self.call = call
        self.charge = charge
        self.guiding: asyncio.Task[None] | None = None
        """Has its guide compiled; it is submitted afterwards."""
        self.guide: tuple[FrontModel, bytes] | None = None
        """What its output follows, of which model."""
        self.owner = ""
        """Of the guide."""
        self._session = session
        self._generation: Generation | None = None
        self._wanted = True
        """Whether the front end wants frames about it."""
        self._frame = -1
        """The frame that `_waiting` goes with."""
        self._plain = True
        """Whether tokens are waiting, or details."""
        self._waiting: list[int] | list[bytes] = []
        self._last: Produced | None = None

    def begin(self, generation: Generation) -> None:
        self._generation = generation

    def cancel(self, reason: FinishReason) -> None:
        """No more of it is wanted."""
        self._wanted = False
        if self.guiding is not None:
            self.guiding.cancel()
        if self._generation is None:
            self._session.forget(self)
        else:
            self._generation.cancel(reason)

    def reader(self, *, reads: bool) -> None:
        if self._generation is not None:
            self._generation.reader(reads=reads)

    # --- what the service says -------------------------------------------------------------------

    def produced(self, produced: Produced) -> None:
        self.charge.produced(produced)
        if not self._wanted:
            return
        if produced.finished is not None:
            self._last = produced  # goes with the end
            return
        session, detail = self._session, produced.detail
        session.make_room(produced)
        value = produced.token if detail is None else detail
        if self._frame == session.frame and self._plain is (detail is None):
            self._waiting.append(value)  # type: ignore[arg-type]
            return
        self._frame, self._plain = session.frame, detail is None
        output = _output(self.id, produced)
        self._waiting = output.tokens if detail is None else output.details
        session.put(output)

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None:
        """Its client is sent the end once that is counted."""
        last = None if failure is not None else self._last
        finished = None if last is None else last.finished
        self.charge.end(finished, times, partial(self._end, times, failure))
        self._session.forget(self)

    def _end(self, times: RequestTimes | None, failure: Exception | None) -> None:
        if not self._wanted:
            return
        self._wanted = False
        if self._last is not None and self._last.finished is FinishReason.INVALID_GUIDE:
            failure = self._session.refuse_guide(self)
        if failure is not None:
            self._session.give_up(self, failure)
            return
        self._session.make_room(self._last)
        self._session.put(_output(self.id, self._last, server_timing(times) or None, ends=True))


def _output(
    request: RequestId, produced: Produced | None, timing: str | None = None, *, ends: bool = False
) -> Output:
    """What is sent of an outcome; without one, of a request that was cancelled."""
    finished = FinishReason.CANCELLED if ends else None
    if produced is None:
        return Output(request, [], finished, [], timing)
    if ends:
        finished = produced.finished
    if produced.detail is None:
        return Output(request, [produced.token], finished, [], timing)
    return Output(request, [], finished, [produced.detail], timing)


def _asked(frame: Submit, call: _Call) -> SubmitRequest:
    batch = call.answer is not None
    return SubmitRequest(
        id=frame.request,
        model=frame.model,
        asked=frame.asked,
        prompt=frame.prompt,
        max_tokens=frame.max_tokens,
        body=frame.body,
        request_class=RequestClass.BATCH if batch else frame.request_class,
        trace=call.trace,
        together_tokens=frame.together_tokens,
        images=frame.images,
    )


def _models(caller: Caller) -> tuple[str, ...] | None:
    """Those that its key allows; None: all of them."""
    return None if caller.key is None or not caller.key.models else tuple(caller.key.models)


def _overloaded(message: str) -> GenerationFailed:
    return GenerationFailed("overloaded", message, 503, 1.0)


def _cancelled() -> GenerationFailed:
    return GenerationFailed("cancelled", "the response was cancelled", 409)


def _refusal(error: Exception, call: int, request: RequestId | None = None) -> Refused:
    return as_refused(as_api_error(error), call, request)
