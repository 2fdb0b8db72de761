"""The interpreter as the daemon sees it: started before it is needed or when it is, asked, ended.

Text that is not read in time ends the process, whatever else it was reading; the next chat starts
another one. Chats begin one behind the other: one that has not begun in time fails by itself,
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

log = logging.getLogger("appliance.interpreting")


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
            life = await self._alive()
            self._begun += 1
            begin = Begin(self._begun, path, parsers, chat, tuple(prompt), choices)
            answer = await life.begun(begin)
        finally:
            self._beginning -= 1
        if answer.refused is not None:
            raise ChatRefused(answer.refused)
        if answer.fault is not None:
            raise _failed("parser_unusable", answer.fault)
        return Interpretation(life, answer)

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
                if self._life is None or self._life.over:
                    self._life = await _Life.begin(self._start)
                return self._life
        except OSError as error:
            log.exception("the interpreter could not be started")
            raise _failed("interpreter_lost", "the interpreter cannot be started") from error

    async def stop(self) -> None:
        """End the process, if there is one."""
        if self._preparing is not None:
            await self._preparing
        if self._life is not None:
            await self._life.end("the appliance is shutting down")


class Interpretation:
    """One chat. Implements `appliance.api.service.Interpretation`."""

    def __init__(self, life: _Life, begun: Begun) -> None:
        self.guide: Guide | None = begun.guide
        self.special_tokens = begun.special_tokens
        self._number = begun.number
        self._life = life
        self._ended = False

    async def hear(self, choice: int, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        hear = Hear(self._number, choice, text, tuple(tokens), finished)
        answer = await self._life.understood(hear)
        if answer.failed is not None:
            raise _failed("parser_failed", answer.failed)
        return answer.heard

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._life.tell(Forget(self._number))


class _Life:
    """One process, from its start to its end. A chat has one question open at a time."""

    def __init__(self, process: Process, writer: asyncio.StreamWriter) -> None:
        self.over = False
        self._process = process
        self._writer = writer
        self._open: dict[int, asyncio.Future[Up]] = {}
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
        """The answer. Raises `GenerationFailed` if there will be none, or none soon."""
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
        """The answer. Raises `GenerationFailed` if there will be none."""
        try:
            answer = await self._ask(hear, hear.number, HEAR_SECONDS)
        except TimeoutError:
            await self._end_silent(HEAR_SECONDS)
            raise _lost() from None
        assert isinstance(answer, Understood)
        return answer

    async def _ask(self, question: Begin | Hear, number: int, seconds: float) -> Up:
        """Raises `TimeoutError`, and `GenerationFailed` if there will be no answer."""
        if self.over:
            raise _lost()
        answer: asyncio.Future[Up] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        self.tell(question)
        try:
            return await asyncio.wait_for(answer, seconds)
        finally:
            self._open.pop(number, None)

    async def _end_silent(self, seconds: float) -> None:
        await self.end(f"no answer within {seconds:g} seconds")

    async def end(self, reason: str) -> None:
        """Kill the process; who waits for it is told."""
        if not self.over:
            log.warning("the interpreter ends: %s", reason)
        self._close()
        await self._process.wait()

    def _close(self) -> None:
        self.over = True
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_lost())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = decoder_of_answers()
        try:
            while data := await reader.read(READ_BYTES):
                for message in decoder.feed(data):
                    self._answers += 1
                    answer = self._open.get(message.number)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        except (ConnectionError, msgspec.DecodeError, ValueError):
            log.exception("the interpreter cannot be understood")
        finally:
            self._close()
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
