"""Compiling guides in a process that they may end, before a worker sees them.

A guide comes from a client, and native code compiles it: some guides overflow its stack, others
take minutes. The process (`appliance.frontend.guide_compiler`) gets one at a time, so that it is
known which one ended it; guides of different owners take turns. A guide that was compiled is not
sent again, and one that was not survived is refused for an hour. A key with several such guides
gets none compiled for a while: each costs others time, and the next one is easily made.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from appliance import framing
from appliance.engines.protocol import GuideRefused
from appliance.forking.orders import Fork
from appliance.forking.server import Child, ForkServer, kill
from appliance.http.errors import ApiError
from appliance.service.front_frames import FrontModel, Role
from appliance.service.guide_frames import (
    CompileGuide,
    CompilerReady,
    FromCompiler,
    GuideCompiled,
    ModelKnown,
    ReadFolders,
    decoder_for_core,
)

MAX_WAITING: Final = 32
"""Guides of one owner that wait; another one is refused."""
KNOWN: Final = 4096
"""Guides of which it is remembered that they can be compiled, the latest ones."""
HARMFUL: Final = 4096
"""Guides of which it is remembered that they ended the compiler, the latest ones."""
HARMFUL_SECONDS: Final = 3600.0
"""For how long."""
MOST_HARMFUL: Final = 4
SUSPENDED_SECONDS: Final = 600.0
"""After so many harmful guides of a key in this time, guides of it are refused; not without keys,
where all clients would be."""
DEATHS: Final = 2
"""In a row, after which a guide is refused: the first one may have had another cause."""
READ_BYTES: Final = 1 << 16

Key: TypeAlias = tuple[str, int, bytes]
"""A guide of a model: the model's path and time of creation, and a digest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long the compiler may take."""

    start_seconds: float = 120.0
    """To start; vLLM may still have to be imported."""
    model_seconds: float = 60.0
    """To load a model's tokenizer."""
    guide_seconds: float = 10.0
    """To compile a guide."""


@dataclass
class _Trial:
    """A guide that is compiled, or waits for that."""

    key: Key
    owner: str
    model: FrontModel
    guide: bytes
    outcome: asyncio.Future[None] = field(default_factory=asyncio.Future)


class _Ended(Exception):
    """The process died while it had a guide."""


class _TooSlow(Exception):
    """The guide was not compiled in time."""


class _Unanswered(Exception):
    """The process could not be asked, for a reason that says nothing of the guide."""


class GuideTrials:
    """Asks the compiler. Used on one event loop; what is known already costs O(1)."""

    def __init__(
        self,
        forks: ForkServer,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        models: Callable[[], Iterable[FrontModel]] = tuple,
    ) -> None:
        """`models` are those that are served now; the compiler may read their files."""
        self._forks = forks
        self._models = models
        self._patience = Patience() if patience is None else patience
        self._clock = clock
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._harmful: OrderedDict[Key, tuple[float, str]] = OrderedDict()
        """Until when each is refused, and why."""
        self._harms: dict[str, deque[float]] = {}
        """When guides of an owner did harm lately."""
        self._open: dict[Key, _Trial] = {}
        self._waiting: OrderedDict[str, deque[_Trial]] = OrderedDict()
        """By owner; the first one is next."""
        self._news = asyncio.Event()
        self._process: _Process | None = None
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take guides from now on. The process is started for the first one."""
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def aclose(self) -> None:
        """End the process; guides that wait are not compiled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._end_process()
        for trial in list(self._open.values()):
            self._settle(trial, _unanswered("the appliance shuts down"))

    async def check(self, owner: str, model: FrontModel, guide: bytes) -> None:
        """Return when the guide was compiled for the model, now or before.

        Raises `GuideRefused` if it cannot be, and `ApiError` if `owner` has too many waiting, or
        had too many that did harm, or the compiler could not say.
        """
        self._refuse_suspended(owner)
        key = _key(model, guide)
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._refuse_harmful(key)
        trial = self._open.get(key)
        if trial is None:
            waiting = self._waiting.setdefault(owner, deque())
            if len(waiting) >= MAX_WAITING:
                raise ApiError(
                    429,
                    f"{MAX_WAITING} guides of this key wait to be compiled; send fewer at once",
                    code="too_many_guides",
                    headers={"Retry-After": "1"},
                )
            trial = self._open[key] = _Trial(key, owner, model, guide)
            waiting.append(trial)
            self._news.set()
        await asyncio.shield(trial.outcome)

    def refuse(self, owner: str, model: FrontModel, guide: bytes, reason: str) -> None:
        """The guide could be compiled, but did harm afterwards: refuse it from now on."""
        key = _key(model, guide)
        self._known.pop(key, None)
        self._remember_harm(owner, key, model, reason)

    def _refuse_suspended(self, owner: str) -> None:
        """Raises `ApiError` for an owner of too many guides that did harm."""
        harms = self._harms.get(owner)
        if harms is None:
            return
        now = self._clock()
        while harms and harms[0] <= now - SUSPENDED_SECONDS:
            harms.popleft()
        if not harms:
            del self._harms[owner]
        elif len(harms) >= MOST_HARMFUL:
            wait = math.ceil(harms[0] + SUSPENDED_SECONDS - now)
            raise ApiError(
                429,
                f"{len(harms)} guides of this API key took too long lately, or ended what compiles "
                f"them: it may use guides again in {wait} s",
                code="guides_suspended",
                headers={"Retry-After": str(wait)},
            )

    def _refuse_harmful(self, key: Key) -> None:
        if key in self._harmful:
            until, reason = self._harmful[key]
            if self._clock() < until:
                raise GuideRefused(reason)
            del self._harmful[key]

    # --- one guide after the other ---------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            trial = await self._next()
            try:
                self._settle(trial, await self._outcome(trial))
            except Exception as error:  # a defect must not end the work
                log.exception("a guide could not be tried")
                self._settle(trial, _unanswered(str(error)))

    async def _next(self) -> _Trial:
        """The next owner's oldest."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        owner, waiting = self._waiting.popitem(last=False)
        trial = waiting.popleft()
        if waiting:
            self._waiting[owner] = waiting
        return trial

    async def _outcome(self, trial: _Trial) -> Exception | None:
        """Why the guide cannot be compiled; None if it was."""
        for _ in range(DEATHS):
            try:
                process = await self._running(trial.model)
                answer = await process.compile(next(self._numbers), trial, self._patience)
            except _Ended:
                self._end_process()
            except _TooSlow:
                self._end_process()
                reason = f"takes longer than {self._patience.guide_seconds:g} s to compile"
                return self._harm(trial, reason)
            except _Unanswered as error:
                self._end_process()
                return _unanswered(str(error))
            else:
                return self._judge(trial, answer)
        return self._harm(trial, "is too large or nested too deeply")

    def _judge(self, trial: _Trial, answer: GuideCompiled) -> Exception | None:
        if answer.failed is not None:
            log.error("guides of %s cannot be compiled: %s", trial.model.name, answer.failed)
            return _unanswered("the model's tokenizer cannot be loaded")
        if answer.refused is not None:
            return GuideRefused(answer.refused)
        self._known[trial.key] = None
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return None

    def _harm(self, trial: _Trial, what: str) -> GuideRefused:
        reason = f"the guide {what}: use a simpler one"
        return self._remember_harm(trial.owner, trial.key, trial.model, reason)

    def _remember_harm(self, owner: str, key: Key, model: FrontModel, reason: str) -> GuideRefused:
        log.warning("a guide for %s is refused from now on: %s", model.name, reason)
        if owner and key not in self._harmful:
            self._harms.setdefault(owner, deque(maxlen=MOST_HARMFUL)).append(self._clock())
        self._harmful[key] = (self._clock() + HARMFUL_SECONDS, reason)
        if len(self._harmful) > HARMFUL:
            self._harmful.popitem(last=False)
        return GuideRefused(reason)

    def _settle(self, trial: _Trial, error: Exception | None) -> None:
        self._open.pop(trial.key, None)
        if trial.outcome.done():
            return
        if error is None:
            trial.outcome.set_result(None)
        else:
            trial.outcome.set_exception(error)
            trial.outcome.exception()  # those who asked may have left

    # --- the process -----------------------------------------------------------------------------

    async def _running(self, model: FrontModel) -> _Process:
        """The process, ready, which may read the model's files. Raises `_Unanswered`."""
        if self._process is None or self._process.ended or not self._process.reads(model):
            self._end_process()
            models = [model, *self._models()]
            try:
                async with asyncio.timeout(self._patience.start_seconds):
                    await self._forks.until_there()
                    self._process = await _Process.start(self._forks, models)
                    await self._process.until_ready()
            except (TimeoutError, _Ended):
                raise _Unanswered("its compiler could not be started") from None
        return self._process

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One life of the compiler."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended = False
        self._reader = reader
        self._writer = writer
        self._decoder = decoder_for_core()
        self._frames: deque[FromCompiler] = deque()
        self._handle: int | None = None
        """Its pidfd."""
        self._readable: frozenset[tuple[str, int]] = frozenset()
        """Models by path and time of creation: another one may come to lie at a path."""

    @classmethod
    async def start(cls, forks: ForkServer, models: Iterable[FrontModel]) -> _Process:
        """Have one forked that may read these models' files."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = cls(*await asyncio.open_unix_connection(sock=ours))
        order = Fork(forks.next_number(), Role.GUIDE_COMPILER)
        with theirs:
            forks.fork(order, [theirs.fileno()], process._forked)
        process._readable = frozenset((model.path, model.created) for model in models)
        folders = tuple(sorted({path for path, _ in process._readable}))
        process._writer.write(framing.encode(ReadFolders(folders)))
        return process

    def reads(self, model: FrontModel) -> bool:
        """Whether it may read the model's files."""
        return (model.path, model.created) in self._readable

    def _forked(self, child: Child) -> None:
        self._handle = child.handle
        if self.ended:
            self._kill()

    def end(self) -> None:
        self.ended = True
        self._writer.close()
        self._kill()

    def _kill(self) -> None:
        if self._handle is not None:
            kill(self._handle)
            os.close(self._handle)
            self._handle = None

    async def until_ready(self) -> None:
        await self._frame(CompilerReady)

    async def compile(self, number: int, trial: _Trial, patience: Patience) -> GuideCompiled:
        """Raises `_Ended`, `_TooSlow`, and `_Unanswered` if the model takes too long."""
        self._writer.write(framing.encode(CompileGuide(number, trial.model, trial.guide)))
        try:
            async with asyncio.timeout(patience.model_seconds):
                answer = await self._frame(ModelKnown, GuideCompiled)
        except TimeoutError:
            raise _Unanswered("the model's tokenizer was not loaded in time") from None
        if isinstance(answer, ModelKnown):
            try:
                async with asyncio.timeout(patience.guide_seconds):
                    answer = await self._frame(GuideCompiled)
            except TimeoutError:
                raise _TooSlow from None
        assert isinstance(answer, GuideCompiled)
        return answer

    async def _frame(self, *kinds: type[FromCompiler]) -> FromCompiler:
        """The next frame of one of these kinds. Raises `_Ended` at the end of the stream."""
        while True:
            while self._frames:
                frame = self._frames.popleft()
                if isinstance(frame, kinds):
                    return frame
            try:
                data = await self._reader.read(READ_BYTES)
                self._frames.extend(self._decoder.feed(data))
            except (ConnectionError, msgspec.DecodeError, ValueError):
                data = b""
            if not data:
                self.ended = True
                raise _Ended


def _key(model: FrontModel, guide: bytes) -> Key:
    return model.path, model.created, hashlib.sha256(guide).digest()


def _unanswered(reason: str) -> ApiError:
    return ApiError(
        503,
        f"the guide could not be compiled now: {reason}; try again later",
        code="guide_unanswered",
        headers={"Retry-After": "1"},
    )
