"""The interpreter as the daemon sees it: started before it is needed or when it is, asked, ended.

Text that is not read in time ends the process, and fails its chat. Whatever else the process was
reading is read again by the next one, from the beginning of the answer: what was told of it once is
not told twice. Chats begin one behind the other: one that has not begun in time fails by itself,
unless the process has answered nobody meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from appliance import wire
from appliance.api.service import ChatRefused, GenerationFailed
from appliance.dialogue import (
    Begin,
    Begun,
    Down,
    Forget,
    Hear,
    Parsers,
    Understood,
    Up,
    decoder_of_answers,
)
from appliance.engines.protocol import Guide
from appliance.toolcalls import Heard

READ_BYTES: Final = 1 << 16
BEGIN_SECONDS: Final = 300.0
"""How long a chat may take to begin, those before it included: the process is started, vLLM
imported, a tokenizer read."""
BEGINNING: Final = 256
"""Chats that may be beginning at a time."""
RETRY_AFTER_SECONDS: Final = 5.0
HEAR_SECONDS: Final = 30.0
"""How long a parser may take for a piece of text, those before it included."""

MOVES: Final = 3
"""How many processes a chat may lose."""
MISHAPS: Final = 2
"""How many of them may break just when they are about this chat: the second time it is its fault,
and no other chat has lost too many by then."""

log = logging.getLogger("appliance.interpreting")


class _Gone(Exception):
    """The process is: another one may answer. `about` is whether it broke when it was about what
    was asked."""

    def __init__(self, *, about: bool = False) -> None:
        super().__init__()
        self.about = about


class _Losses:
    """The processes that one chat has lost."""

    def __init__(self) -> None:
        self._moves = self._mishaps = 0

    def count(self, gone: _Gone) -> None:
        """One more. Raises `GenerationFailed` if it is one too many."""
        self._moves += 1
        self._mishaps += gone.about
        if self._moves > MOVES or self._mishaps == MISHAPS:
            raise _lost()


class Process(Protocol):
    """What `Start` gives besides a socket."""

    def kill(self) -> None: ...

    async def wait(self) -> object: ...


Start = Callable[[socket.socket], Awaitable[Process]]
"""Start a process with this end of a socket pair."""


class Interpreter:
    """The interpreter's chats. Used on one event loop."""

    def __init__(self, start: Start | None = None) -> None:
        self._start = start or _start
        self._begun = 0
        self._beginning = 0
        self._starting = asyncio.Lock()
        self._life: _Life | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._stopped = False

    async def begin(
        self, path: str, parsers: Parsers, chat: bytes, prompt: Sequence[int], choices: int
    ) -> Interpretation:
        """Have a chat's answers read. `chat` is the request as vLLM takes it, JSON.

        Raises `ChatRefused`, and `GenerationFailed` if nobody can read them, or not soon.
        """
        if self._beginning >= BEGINNING:
            raise _busy()
        self._beginning += 1
        try:
            self._begun += 1
            begin = Begin(self._begun, path, parsers, chat, tuple(prompt), choices)
            life, answer = await self.begun(begin)
        finally:
            self._beginning -= 1
        if answer.refused is not None:
            raise ChatRefused(answer.refused)
        if answer.fault is not None:
            raise _failed("parser_unusable", answer.fault)
        return Interpretation(self, begin, life, answer)

    async def begun(self, begin: Begin) -> tuple[_Life, Begun]:
        """The chat in the process that there is. Raises `GenerationFailed`."""
        losses = _Losses()
        while True:
            life = await self._alive()
            try:
                return life, await life.begun(begin)
            except _Gone as gone:
                losses.count(gone)

    def prepare(self) -> None:
        """Have the process started, so that the first chat need not wait for it."""
        self._preparing = asyncio.create_task(self._prepare())

    async def _prepare(self) -> None:
        with contextlib.suppress(GenerationFailed):  # it is logged, and the first chat tries again
            await self._alive()

    async def _alive(self) -> _Life:
        """The process. Raises `GenerationFailed` if there can be none."""
        try:
            async with self._starting:
                if self._stopped:
                    raise _lost()
                if self._life is None or self._life.over:
                    self._life = await _Life.begin(self._start)
                return self._life
        except OSError as error:
            log.exception("the interpreter could not be started")
            raise _failed("interpreter_lost", "the interpreter cannot be started") from error

    async def stop(self) -> None:
        """End the process, if there is one; there will be no other."""
        self._stopped = True
        if self._preparing is not None:
            await self._preparing
        if self._life is not None:
            await self._life.end("the appliance is shutting down", last=True)


class Interpretation:
    """One chat. Implements `appliance.api.service.Interpretation`."""

    def __init__(self, interpreter: Interpreter, begin: Begin, life: _Life, begun: Begun) -> None:
        self.guide: Guide | None = begun.guide
        self.special_tokens = begun.special_tokens
        self._interpreter = interpreter
        self._begin = begin
        self._life = life
        self._read: list[Hear] = []
        """The answers so far: a parser's state cannot be had, but be made again."""
        self._losses = _Losses()
        self._ended = False

    async def hear(self, choice: int, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        hear = Hear(self._begin.number, choice, text, tuple(tokens), finished)
        answer = None
        while answer is None:
            try:
                answer = await self._life.understood(hear)
            except _Gone as gone:
                await self._move(gone)
        if answer.failed is not None:
            raise _failed("parser_failed", answer.failed)
        self._read.append(hear)
        return answer.heard

    async def _move(self, lost: _Gone | None) -> None:
        """Have the next process read what was read so far. Raises `GenerationFailed`."""
        while lost is not None:
            self._losses.count(lost)
            self._life, begun = await self._interpreter.begun(self._begin)
            if begun.refused is not None or begun.fault is not None:
                raise _lost()
            try:
                for hear in self._read:
                    await self._life.understood(hear)
                lost = None
            except _Gone as gone:
                lost = gone

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._life.tell(Forget(self._begin.number))


class _Life:
    """One process, from its start to its end. A chat has one question open at a time."""

    def __init__(self, process: Process, writer: asyncio.StreamWriter) -> None:
        self.over = False
        self._process = process
        self._writer = writer
        self._open: dict[int, tuple[Begin | Hear, asyncio.Future[Up]]] = {}
        """By chat, the one that was asked first at first."""
        self._answers = 0
        """Given so far, to whomever."""
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, start: Start) -> _Life:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                process = await start(theirs)
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        life = cls(process, writer)
        life._reading = asyncio.create_task(life._read(reader))
        return life

    def tell(self, message: Down) -> None:
        if not self.over:
            self._writer.write(wire.encode(message))

    async def begun(self, begin: Begin) -> Begun:
        """The answer. Raises `GenerationFailed` if there will be none, or not soon, and `_Gone`."""
        before = self._answers
        try:
            answer = await self._ask(begin, begin.number, BEGIN_SECONDS)
        except asyncio.CancelledError:  # the client left
            self.tell(Forget(begin.number))
            raise
        except TimeoutError:
            if self._answers == before:
                await self._end_silent(BEGIN_SECONDS)
                raise _lost() from None
            self.tell(Forget(begin.number))
            raise _busy() from None
        assert isinstance(answer, Begun)
        return answer

    async def understood(self, hear: Hear) -> Understood:
        """The answer. Raises `GenerationFailed` if there will be none, and `_Gone`."""
        try:
            answer = await self._ask(hear, hear.number, HEAR_SECONDS)
        except TimeoutError:
            if self.over:  # somebody who had asked before was just as long without an answer
                raise _Gone from None
            await self._end_silent(HEAR_SECONDS)
            raise _lost() from None
        assert isinstance(answer, Understood)
        return answer

    async def _ask(self, question: Begin | Hear, number: int, seconds: float) -> Up:
        """Raises `TimeoutError`, and `GenerationFailed` or `_Gone` if there will be no answer."""
        if self.over:
            raise _Gone
        answer: asyncio.Future[Up] = asyncio.get_running_loop().create_future()
        self._open[number] = (question, answer)
        self.tell(question)
        try:
            return await asyncio.wait_for(answer, seconds)
        finally:
            self._open.pop(number, None)

    async def _end_silent(self, seconds: float) -> None:
        await self.end(f"no answer within {seconds:g} seconds")

    async def end(self, reason: str, *, last: bool = False) -> None:
        """Kill the process. Who waits for it may move, unless it was the `last` one."""
        if not self.over:
            log.warning("the interpreter ends: %s", reason)
        self._close(lambda number: _lost() if last else _Gone())
        await self._process.wait()

    def _close(self, why: Callable[[int], Exception]) -> None:
        self.over = True
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        for number, (_, answer) in self._open.items():
            if not answer.done():
                answer.set_exception(why(number))

    def _was_about(self) -> int | None:
        """The chat that the process was about, as far as that can be told: it reads texts in the
        order in which they were asked, beside one chat that begins."""
        heard = [number for number, (one, _) in self._open.items() if isinstance(one, Hear)]
        return next(iter([*heard, *self._open]), None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = decoder_of_answers()
        try:
            while data := await reader.read(READ_BYTES):
                for message in decoder.feed(data):
                    self._answers += 1
                    _, answer = self._open.get(message.number, (None, None))
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        except (ConnectionError, msgspec.DecodeError, ValueError):
            log.exception("the interpreter cannot be understood")
        finally:
            about = self._was_about()
            self._close(lambda number: _Gone(about=number == about))
        await self._process.wait()


class _InScratch:
    """A process with a temporary directory of its own, which goes when the process has ended: what
    it imports (torch) leaves folders there."""

    def __init__(
        self, process: asyncio.subprocess.Process, scratch: tempfile.TemporaryDirectory[str]
    ) -> None:
        self._process = process
        self._scratch = scratch

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()
        self._scratch.cleanup()


async def _start(theirs: socket.socket) -> Process:
    scratch = tempfile.TemporaryDirectory(
        prefix="appliance-interpreter-", ignore_cleanup_errors=True
    )
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "appliance.interpreter",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": scratch.name},
        )
    except BaseException:
        scratch.cleanup()
        raise
    return _InScratch(process, scratch)


def _busy() -> GenerationFailed:
    reason = "too many chats wait for the process that reads what models write"
    return GenerationFailed("overloaded", reason, 503, RETRY_AFTER_SECONDS)


def _lost() -> GenerationFailed:
    return _failed("interpreter_lost", "the process that reads what models write was lost")


def _failed(code: str, message: str) -> GenerationFailed:
    return GenerationFailed(code, message)
