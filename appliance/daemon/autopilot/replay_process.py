"""A process of lowest priority that replays the journal's end, and what it answered."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from typing import Final

import msgspec

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
"""To take what it had said when it ended."""
TAIL_CHARACTERS: Final = 400
"""Of what it said besides, in an error."""


class ReplayFailed(Exception):
    """There is no recommendation; its text says why."""


async def replay(
    terms: AutopilotTerms,
    cpu_seconds: float,
    hard_cpu_seconds: float,
    also: tuple[PolicyChoice, ...] = (),
) -> Recommendation:
    """What the process says that replays the journal of these terms; it tries `also` first. A
    cancellation kills it. Raises `ReplayFailed`."""
    figures = map(str, (terms.window_seconds, cpu_seconds, hard_cpu_seconds))
    words = (terms.journal, *figures, msgspec.json.encode(also).decode())
    try:
        process = await asyncio.create_subprocess_exec(
            *module_command(MODULE, *words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=without_secrets(os.environ),
            start_new_session=True,  # a Ctrl-C for the daemon is not for it
            limit=MOST_BYTES,
        )
    except OSError as error:
        raise ReplayFailed(f"the process of the replay cannot be started: {error}") from error
    tail = bytearray()
    listening = asyncio.create_task(_listen(process, tail))
    try:
        text = await _pipe(process.stdout).readline()
        status = await process.wait()
    except ValueError as error:
        raise ReplayFailed(f"the replay's answer is longer than {MOST_BYTES} bytes") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            await asyncio.shield(process.wait())
        # A process that it left behind may hold the pipe: what was said until then will do.
        await asyncio.wait([listening], timeout=LAST_WORDS_SECONDS)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return _read(text, status, bytes(tail))


async def _listen(process: Process, tail: bytearray) -> None:
    """Take what it says besides, and keep the end of it."""
    while read := await _pipe(process.stderr).read(READ_BYTES):
        tail += read
        del tail[: -4 * TAIL_CHARACTERS]
        await asyncio.sleep(READ_PAUSE_SECONDS)


def _pipe(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    assert stream is not None, "it is a pipe"
    return stream


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
        raise ReplayFailed(answer.error)
    return answer.found


def _printable(tail: bytes) -> str:
    """Its end, in one line."""
    words = tail.decode("utf-8", "replace").split()
    line = "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return line[-TAIL_CHARACTERS:]
