"""A process of lowest priority that replays the journal's end, and what it answered."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from typing import Final

import msgspec

from appliance.platform.children import module_command, without_secrets
from appliance.service.autopilot import AutopilotTerms, Recommendation, ReplayAnswer

MODULE: Final = "appliance.lab.advice"
MOST_BYTES: Final = 1 << 20
"""Of its answer."""


class ReplayFailed(Exception):
    """There is no recommendation; its text says why."""


async def replay(
    terms: AutopilotTerms, cpu_seconds: float, hard_cpu_seconds: float
) -> Recommendation:
    """What the process says that replays the journal of these terms. A cancellation kills it.
    Raises `ReplayFailed`."""
    words = (terms.journal, *map(str, (terms.window_seconds, cpu_seconds, hard_cpu_seconds)))
    try:
        process = await asyncio.create_subprocess_exec(
            *module_command(MODULE, *words),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,
            env=without_secrets(os.environ),
            start_new_session=True,  # a Ctrl-C for the daemon is not for it
            limit=MOST_BYTES,
        )
    except OSError as error:
        raise ReplayFailed(f"the process of the replay cannot be started: {error}") from error
    try:
        assert process.stdout is not None, "it is a pipe"
        text = await process.stdout.readline()
        status = await process.wait()
    except ValueError as error:
        raise ReplayFailed(f"the replay's answer is longer than {MOST_BYTES} bytes") from error
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
    return _read(text, status)


def _read(text: bytes, status: int) -> Recommendation:
    try:
        answer = msgspec.json.decode(text, type=ReplayAnswer)
    except msgspec.MsgspecError as error:
        ended = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise ReplayFailed(f"the replay's process ended {ended}, without an answer") from error
    if answer.found is None:
        raise ReplayFailed(answer.error)
    return answer.found
