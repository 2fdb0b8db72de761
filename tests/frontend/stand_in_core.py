"""A stand-in for the core: hands connections to a front end, decides as it is told to, and makes up
tokens that depend on nothing but the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import IO, Any, TypeVar

import msgspec

from appliance import framing
from appliance.access.auth import KEYLESS, Access
from appliance.forking.server import Child, kill, wait_ended
from appliance.gateway.accounts import Accounts
from appliance.gateway.forwarding.forwards import Forwarding, Forwards
from appliance.gateway.held_bodies import HeldBodies
from appliance.platform.descriptors import receive_descriptors
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
    FrontModel,
    Handover,
    Hello,
    KeepResponse,
    Leave,
    Output,
    Outputs,
    Ping,
    Pong,
    Ran,
    Reading,
    Ready,
    Refused,
    Run,
    Settled,
    Stopped,
    StopRun,
    StreamBegun,
    Submit,
    TookPiece,
    Welcome,
)
from appliance.service.remote_models import RemoteModels
from appliance.vocabulary import FinishReason, ModelName, RequestId
from tests.frontend.forks import FrontForks
from tests.patience import PATIENCE_SECONDS

FORKS = FrontForks()
F = TypeVar("F")
FIRST_TOKEN = 10
"""Below it are special tokens."""
TOKENS = 1500
"""So many different ones are made up."""
TIMING = "decode;dur=1.0"
"""Where the time of every request went."""
THE_CORES = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\ncore"
"""The answer to what is not for front ends."""


def made_up(prompt: Iterable[int], count: int) -> list[int]:
    """`count` tokens that follow `prompt`."""
    seed = hashlib.sha256(" ".join(map(str, prompt)).encode()).digest()
    return [
        FIRST_TOKEN + (seed[i % 32] * 31 + seed[(i // 32) % 32] + i * 7) % TOKENS
        for i in range(count)
    ]


class Live:
    """A request that gets tokens."""

    def __init__(self, submit: Submit, tokens: list[int], reason: FinishReason) -> None:
        self.submit = submit
        self.tokens = tokens
        self.reason = reason
        self.sent = 0
        self.hold_at: int | None = None
        """No more tokens than so many, until it is changed."""


class StandInCore:
    """The core's end of one front end.

    What it decides is told by attributes: `entering` answers calls, `refusing` may refuse requests,
    `saying` makes tokens. All frames of the front end are kept in `frames`.
    """

    def __init__(
        self,
        models: Iterable[FrontModel],
        *,
        keep_alive_seconds: float = 5.0,
        max_body_bytes: int = 8 * 1024 * 1024,
        step_seconds: float = 0.0,
        version: int = front_frames.VERSION,
        origins: tuple[str, ...] = (),
        strict: bool = False,
        root_path: str = "",
    ) -> None:
        self.welcome = Welcome(
            version=version,
            keep_alive_seconds=keep_alive_seconds,
            max_body_bytes=max_body_bytes,
            max_bodies_bytes=2 * max_body_bytes,
            strict=strict,
            origins=origins,
            root_path=root_path,
            models=tuple(models),
        )
        self.step_seconds = step_seconds
        self.script()
        self.settles = True
        """Whether what a stop string ended is counted at once; else the test does it."""
        self.admitting = asyncio.Event()
        """Requests are decided about while it is set."""
        self.admitting.set()
        self.returned: list[Handover] = []
        """Connections that the front end gave back; each request on them is answered "core"."""
        self.endings: dict[int, bytes] = {}
        """What ends the stream of a call, if the front end dies."""
        self.responses: dict[str, KeepResponse] = {}
        """What the front end stored, as it was last."""
        self.forwards = Forwards(RemoteModels(), Access())
        """Asks other servers, as the real core does."""
        self._forwarding: dict[int, Forwarding] = {}
        self.frames: list[Any] = []
        self.keep_frames = True
        self.live: dict[RequestId, Live] = {}
        self.calls: set[int] = set()
        """Those that were entered and not left."""
        self.port = 0
        self.connections = 0
        """Handed over so far."""
        self.process: asyncio.subprocess.Process | None = None
        """A front end that was started by itself."""
        self.forked: Child | None = None
        """One that was forked."""
        self._news = asyncio.Condition()
        self._work = asyncio.Event()
        self._decoder = front_frames.decoder_for_core()
        self._tasks: list[asyncio.Task[Any]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._handover: socket.socket | None = None
        self._listener: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self) -> None:
        """Decide as at the beginning: all is allowed, and answered to the last token."""
        self.entering: Callable[[Enter], Entered | Refused] = lambda enter: Entered(call=enter.call)
        self.refusing: Callable[[Submit], Refused | None] = lambda submit: None
        self.saying: Callable[[Submit], list[int]] = lambda submit: made_up(
            submit.prompt, submit.max_tokens
        )
        self.ending: Callable[[Submit], FinishReason] = lambda submit: FinishReason.LENGTH
        self.fetching: Callable[[FetchImage], FetchedImage | None] = lambda asked: FetchedImage(
            call=asked.call, refused=f"nothing is fetched from {asked.url}"
        )
        """Files of images that are named by URL; None: there is no answer yet."""
        self.details: Callable[[Submit, list[int]], list[bytes]] | None = None
        """Encoded outputs for new tokens of a request, instead of plain ones."""
        self.hold_at: Callable[[Submit], int | None] = lambda submit: None
        """A request waits when it has so many tokens."""
        self.at_once: Callable[[], int] = lambda: 1
        """How many tokens a request gets next."""

    # --- what tests do ---------------------------------------------------------------------------

    async def begin(
        self, environment: dict[str, str] | None = None, *, errors: IO[bytes] | None = None
    ) -> None:
        """Start the front end by itself, and listen: it has an environment of its own and an exit
        status. What it writes to standard error goes into `errors`."""
        async with self._listening() as descriptors:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "appliance.frontend"),
                *("--frames-fd", str(descriptors[0]), "--handover-fd", str(descriptors[1])),
                pass_fds=descriptors,
                env=os.environ | (environment or {}),
                stderr=errors,
            )

    async def begin_forked(self) -> None:
        """Have the front end forked, as a daemon does, and listen."""
        async with self._listening() as descriptors:
            self.forked = await FORKS.fork(descriptors)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[tuple[int, int]]:
        """The front end's ends of its sockets, with which it is started; then this end is used."""
        frames, theirs = socket.socketpair()
        self._handover, their_handover = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, their_handover:
            yield theirs.fileno(), their_handover.fileno()
        self._handover.setblocking(False)
        asyncio.get_running_loop().add_reader(self._handover, self._take_back)
        reader, self._writer = await asyncio.open_connection(sock=frames)
        self._tasks.append(asyncio.create_task(self._read(reader)))
        self._tasks.append(asyncio.create_task(self._compute()))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._tasks.append(asyncio.create_task(self._accept()))

    @property
    def pid(self) -> int:
        """Of the front end."""
        process = self.forked or self.process
        assert process is not None
        return process.pid

    async def ready(self) -> None:
        """Wait until the front end serves."""
        await self.seen(Ready)

    async def seen(
        self, kind: type[F], which: Callable[[F], bool] = lambda frame: True, *, count: int = 1
    ) -> F:
        """The `count`-th frame of a kind, as soon as it came."""

        def found() -> list[F]:
            return [f for f in self.frames if isinstance(f, kind) and which(f)]

        async with asyncio.timeout(PATIENCE_SECONDS), self._news:
            await self._news.wait_for(lambda: len(found()) >= count)
        return found()[count - 1]

    async def quiet(self) -> None:
        """Wait until every call is left: no frame of an earlier answer comes after that."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._news:
            await self._news.wait_for(lambda: not self.calls)

    def said(self, kind: type[F]) -> list[F]:
        """All frames of a kind so far."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def settle(self, stopped: Stopped) -> None:
        """What a stop string ended is counted."""
        self.send(Settled(stopped.call, stopped.request))

    def send(self, *frames: front_frames.Down) -> None:
        assert self._writer is not None
        self._writer.write(b"".join(map(framing.encode, frames)))

    def give_up(self, request: RequestId, *, status: int = 503, message: str = "given up") -> None:
        """Refuse a request that was admitted."""
        live = self.live.pop(request)
        self.send(
            Refused(
                call=live.submit.call,
                request=request,
                status=status,
                code="given_up",
                message=message,
            )
        )

    def go_on(self) -> None:
        """All requests get their tokens to the end."""
        self.hold_at = lambda submit: None
        for live in self.live.values():
            live.hold_at = None
        self._work.set()

    def change(self, models: Iterable[FrontModel]) -> None:
        self.send(Catalogue(tuple(models)))

    async def run(
        self, path: str, body: dict[str, Any], models: tuple[ModelName, ...] | None = None
    ) -> Ran:
        """Have a line of a batch answered."""
        call = 1 << 40 | len(self.frames)
        self.send(Run(call=call, path=path, body=msgspec.json.encode(body), models=models))
        return await self.seen(Ran, lambda ran: ran.call == call)

    async def end(self) -> int:
        """Close the link; returns the exit status of a front end that was started by itself."""
        assert self._writer is not None
        assert self.process is not None
        self._writer.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self.process is not None:
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
            await self.process.wait()
        if self.forked is not None:
            kill(self.forked.handle)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._handover is not None:
            asyncio.get_running_loop().remove_reader(self._handover)
        for sock in (self._listener, self._handover):
            if sock is not None:
                sock.close()
        if self.forked is not None:
            await ended(self.forked.handle)

    # --- the core --------------------------------------------------------------------------------

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        assert self._handover is not None
        encode = msgspec.msgpack.Encoder().encode
        while True:
            connection, client = await loop.sock_accept(self._listener)
            self.connections += 1
            handover = Handover(
                connection=self.connections, client=client, server=connection.getsockname()
            )
            socket.send_fds(self._handover, [encode(handover)], [connection.fileno()])
            connection.close()

    def _take_back(self) -> None:
        assert self._handover is not None
        try:
            data, descriptors = receive_descriptors(self._handover, 1 << 18, 1)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._handover)
            return
        message = msgspec.msgpack.decode(data, type=Handover | StreamBegun)
        with socket.socket(fileno=descriptors[0]) as connection:
            if isinstance(message, StreamBegun):
                self.endings[message.call] = message.ending
                return
            self.returned.append(message)
            connection.send(
                b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\ncore"
            )

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            for frame in self._decoder.feed(data):
                if self.keep_frames or not isinstance(frame, (Submit, Enter, Leave)):
                    self.frames.append(frame)
                self._take(frame)
            async with self._news:
                self._news.notify_all()

    def _take(self, frame: front_frames.Up) -> None:
        match frame:
            case Hello():
                self.send(self.welcome)
            case Enter():
                answer = self.entering(frame)
                if isinstance(answer, Entered):
                    self.calls.add(frame.call)
                self.send(answer)
            case Submit():
                self._tasks.append(asyncio.create_task(self._decide(frame)))
            case Abort():
                for request in frame.requests:
                    self.live.pop(request, None)
            case Stopped():
                self.live.pop(frame.request, None)
                if self.settles:
                    self.settle(frame)
            case KeepResponse():
                self.responses[frame.response] = frame
            case FindResponse():
                kept = self.responses.get(frame.response)
                if kept is None:
                    self.send(FoundResponse(frame.call))
                else:
                    self.send(FoundResponse(frame.call, kept.answer, kept.messages))
            case FetchImage():
                if (fetched := self.fetching(frame)) is not None:
                    self.send(fetched)
            case Forward():
                account = Accounts(Access()).open(KEYLESS)
                self._forwarding[frame.call] = self.forwards.begin(
                    frame, KEYLESS, account, HeldBodies(), self.send, lambda refused: None
                )
            case TookPiece():
                self._forwarding[frame.call].took()
            case Leave():
                self.calls.discard(frame.call)
                if (forwarding := self._forwarding.pop(frame.call, None)) is not None:
                    forwarding.stop()
                for request, live in list(self.live.items()):
                    if live.submit.call == frame.call:
                        del self.live[request]

    async def _decide(self, submit: Submit) -> None:
        await self.admitting.wait()
        if (refused := self.refusing(submit)) is not None:
            self.send(refused)
            return
        live = Live(submit, self.saying(submit), self.ending(submit))
        live.hold_at = self.hold_at(submit)
        self.live[submit.request] = live
        self.send(Admitted(submit.request))
        self._work.set()

    async def _compute(self) -> None:
        """The next tokens of every live request, all in one frame."""
        assert self._writer is not None
        while True:
            outputs = [out for live in list(self.live.values()) if (out := self._next(live))]
            if outputs:
                self.send(Outputs(outputs))
                await self._writer.drain()
                await asyncio.sleep(self.step_seconds)
            else:
                self._work.clear()
                await self._work.wait()

    def _next(self, live: Live) -> Output | None:
        if live.hold_at is not None and live.sent >= live.hold_at:
            return None
        tokens = live.tokens[live.sent : live.sent + self.at_once()]
        live.sent += len(tokens)
        finished = live.reason if live.sent >= len(live.tokens) else None
        if finished is not None:
            del self.live[live.submit.request]
        details = [] if self.details is None else self.details(live.submit, tokens)
        return Output(
            request=live.submit.request,
            tokens=[] if details else tokens,
            finished=finished,
            details=details,
            timing=None if finished is None else TIMING,
        )


async def ended(process: int) -> None:
    """Return when the process of a pidfd has ended, and close that."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await wait_ended(process)
    finally:
        os.close(process)


@asynccontextmanager
async def front_end(
    models: Iterable[FrontModel], *, alone: bool = False, **options: Any
) -> AsyncIterator[StandInCore]:
    """A front end that serves, behind a stand-in core. It is forked; or `alone`, started by itself,
    with an exit status."""
    core = StandInCore(models, **options)
    try:
        await (core.begin() if alone else core.begin_forked())
        await core.ready()
        yield core
    finally:
        await core.close()


__all__ = ["Drain", "Leave", "Ping", "Pong", "Reading", "StandInCore", "StopRun", "front_end"]
