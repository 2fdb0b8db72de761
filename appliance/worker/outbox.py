"""What a worker reports: held back until a step is over, then sent at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance import framing
from appliance.engines.protocol import Produced
from appliance.vocabulary import InstanceId, ModelName
from appliance.worker import frames

MOST_DETAIL_BYTES = framing.MAX_FRAME_BYTES // 2
"""Of a frame's tokens together. One token's alone are fewer, and a frame holds some bytes more."""

Send = Callable[[Sequence[frames.Up]], None]
"""Sends the daemon several reports at once. Called from any thread."""


class Outbox:
    """The reports of a worker's main thread, in order."""

    def __init__(self, instance: InstanceId, send: Send) -> None:
        self._instance = instance
        self._send = send
        self._held: list[frames.Up] = []

    def hold(self, message: frames.Up) -> None:
        """Send the report before anything else is computed."""
        self._held.append(message)

    def tell(self, message: frames.Up) -> None:
        """Send a report now, behind what was held back."""
        self._held.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what was held back."""
        if self._held:
            held, self._held = self._held, []
            self._send(held)

    def tokens(self, model: ModelName, produced: list[Produced]) -> None:
        """In several frames where details would not fit into one."""
        part: list[Produced] = []
        nbytes = 0
        for one in produced:
            size = len(one.detail or b"")
            if nbytes and size and nbytes + size > MOST_DETAIL_BYTES:
                self.hold(frames.Tokens(self._instance, model, part))
                part, nbytes = [], 0
            part.append(one)
            nbytes += size
        self.hold(frames.Tokens(self._instance, model, part))
