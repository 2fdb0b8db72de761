"""The front half can be forked: it is imported once, and front ends are there at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from appliance.gateway.supervisor import Supervisor
from appliance.service.front_frames import Down, Hello, Up
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.front_end import WELCOME


class SessionDouble:
    """Welcomes front ends."""

    pids: tuple[int, ...] = ()

    def __init__(self, send: Callable[[Down], None], is_operator: Callable[[int], bool]) -> None:
        self._send = send

    def received(self, frame: Up, /) -> None:
        if isinstance(frame, Hello):
            SessionDouble.pids += (frame.pid,)
            self._send(WELCOME)

    def stream_begun(self, call: int, connection: socket.socket, ending: bytes, /) -> None: ...

    def drained(self) -> None: ...

    def lost(self) -> None: ...


async def test_front_ends_are_forked() -> None:
    """After the import no thread is there that a fork would leave behind, and two processes serve.
    They end when they are told to."""
    SessionDouble.pids = ()
    supervisor = Supervisor(2, SessionDouble)
    supervisor.start()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while supervisor.ready < 2:  # noqa: ASYNC110 - processes tell of themselves when they like
            await asyncio.sleep(0.01)
        await supervisor.stop(PATIENCE_SECONDS)

    assert len(set(SessionDouble.pids)) == 2
    assert supervisor.restarts == 0
