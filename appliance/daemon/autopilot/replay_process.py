"""A process of lowest priority that replays the journal's end, and what it answered."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from appliance.platform.children import module_command, without_secrets
from appliance.service.autopilot import AutopilotTerms, Recommendation, ReplayAnswer
from appliance.service.policy_report import PolicyChoice

MODULE: Final = "appliance.lab.advice"
MOST_BYTES: Final = 1 << 20
"""Of its answer."""
READ_BYTES: Final = 1 << 16
READ_PAUSE_SECONDS: Final = 0.02
"""After each read of what it says besides: 3 MB a second are taken, so that policies which print
cost the daemon's event loop next to nothing. The process waits meanwhile."""
LAST_WORDS_SECONDS: Final = 2.0
"""For it to end after its answer, and to take what it had said when it ended."""
MOST_CHARACTERS: Final = 1000
"""Of a reason or an error in its answer."""
TAIL_CHARACTERS: Final = 400
"""Of what it said besides, in an error."""


class ReplayFailed(Exception):
    """There is no recommendation; its text says why."""


async def replay(
    terms: AutopilotTerms,
    cpu_seconds: float,
    hard_cpu_seconds: float,
    also: tuple[PolicyChoice, ...] = (),
    command: tuple[str, ...] | None = None,
) -> Recommendation:
    """What the process says that replays the journal of these terms; it tries `also` first. A
    cancellation kills it, and what it leaves behind in its session is killed, too. `command` is
    another program for the same words. Raises `ReplayFailed`."""
    figures = map(str, (terms.window_seconds, cpu_seconds, hard_cpu_seconds))
    words = (terms.journal, *figures, msgspec.json.encode(also).decode())
    program = module_command(MODULE) if command is None else command
    async with AsyncExitStack() as ends:
        try:
            with ExitStack() as given:
                answers, stdout = await _pipe(ends, given)
                errors, stderr = await _pipe(ends, given)
                process = await asyncio.create_subprocess_exec(
                    *program,
                    *words,
                    stdin=DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=without_secrets(os.environ),
                    start_new_session=True,  # a Ctrl-C for the daemon is not for it
                )
        except OSError as error:
            raise ReplayFailed(f"the process of the replay cannot be started: {error}") from error
        tail = bytearray()
        text = await _answer(process, answers, errors, tail)
        status = process.returncode
        assert status is not None, "it was waited for"
        return _read(text, status, bytes(tail))


async def _pipe(ends: AsyncExitStack, given: ExitStack) -> tuple[asyncio.StreamReader, int]:
    """Where to read until `ends` are closed, and the descriptor of a child, for as long as `given`
    is open. They are not the child's: asyncio takes one for alive while any process has such a
    pipe."""
    read, write = os.pipe()
    given.callback(os.close, write)
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader(MOST_BYTES, loop)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
    )
    ends.callback(transport.close)
    return stream, write


async def _answer(
    process: Process, answers: asyncio.StreamReader, errors: asyncio.StreamReader, tail: bytearray
) -> bytes:
    """Its line, or less if it ends before; what it said besides is in `tail`. It does not run any
    more then, and neither does what it started."""
    line = asyncio.create_task(answers.readline())
    ended = asyncio.create_task(process.wait())
    listening = asyncio.create_task(_listen(errors, tail))
    try:
        await asyncio.wait((line, ended), return_when=asyncio.FIRST_COMPLETED)
        # It ends by itself after its answer, and then its status says more.
        await asyncio.wait((ended,), timeout=LAST_WORDS_SECONDS)
    finally:
        _kill_group(process)
        await asyncio.wait((ended,))
        # One that left the session may hold the pipes: what was said until then will do.
        await asyncio.wait((line, listening), timeout=LAST_WORDS_SECONDS)
        for task in (line, listening):
            task.cancel()
        await asyncio.gather(line, listening, return_exceptions=True)
    if line.cancelled():
        return b""
    try:
        return line.result()
    except ValueError as error:
        raise ReplayFailed(f"the replay's answer is longer than {MOST_BYTES} bytes") from error


def _kill_group(process: Process) -> None:
    """Also what it started, if that did not leave its group. The number of a group is given to no
    other process while the group has a member; if it has none, there may be such a process now."""
    if process.returncode is not None and Path(f"/proc/{process.pid}").exists():
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _listen(errors: asyncio.StreamReader, tail: bytearray) -> None:
    """Take what it says besides, and keep the end of it."""
    while read := await errors.read(READ_BYTES):
        tail += read
        del tail[: -4 * TAIL_CHARACTERS]
        await asyncio.sleep(READ_PAUSE_SECONDS)


def _read(text: bytes, status: int, tail: bytes) -> Recommendation:
    try:
        answer = msgspec.json.decode(text, type=ReplayAnswer)
    except msgspec.MsgspecError as error:
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        said = f"the replay's process ended {ended}, without an answer"
        if last := _printable(tail):
            said += f"; it said: {last}"
        raise ReplayFailed(said) from error
    if answer.found is None:
        raise ReplayFailed(_short(answer.error))
    found = answer.found
    return replace(found, name=_short(found.name), reason=_short(found.reason))


def _short(text: str) -> str:
    """A policy's own words are in it, of any length, and notes and events keep it."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _printable(tail: bytes) -> str:
    """Its end, in one line."""
    words = tail.decode("utf-8", "replace").split()
    line = "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return line[-TAIL_CHARACTERS:]
