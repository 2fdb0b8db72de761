"""Whole parts of a stream: what a client gets of one that may break off at any byte."""

from __future__ import annotations

from typing import Final

MOST_HELD_BYTES: Final = 1 << 16
"""Of a part that is held until its end is there."""
LINE_ENDS: Final = (b"\n",)
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
"""Of server-sent events, as daemons write them: the format also allows CR alone as a line's end."""


class WholeParts:
    """Passes parts on when they are whole: where a stream breaks off within one, an error can be
    the next part. White space passes at once, as it keeps a silent stream alive; and so does what
    there is of a part that is longer than `MOST_HELD_BYTES`. O(bytes)."""

    def __init__(self, ends: tuple[bytes, ...]) -> None:
        """`ends` are what a part may end with."""
        self.begun = False
        """Whether a piece of a part has passed, which is no white space, and not its end."""
        self._ends = ends
        self._longest_end = max(map(len, ends))
        self._held = bytearray()

    def ready(self, item: bytes) -> bytes:
        """What is to be passed on now that this has come."""
        held, new = self._held, not self._held
        searched = max(0, len(held) - self._longest_end + 1)
        held += item
        cut = 0
        for end in self._ends:
            found = held.rfind(end, searched)
            if found >= 0:
                cut = max(cut, found + len(end))
        ready = bytes(held[:cut])
        del held[:cut]
        if cut:
            self.begun = False
        if (new or cut) and held.isspace():  # what was held before is more than white space
            return ready + self.rest()
        if held and (self.begun or len(held) > MOST_HELD_BYTES):
            self.begun = True
            return ready + self.rest()
        return ready

    def rest(self) -> bytes:
        """What is held, when the stream has ended as it should. It is not held any more."""
        rest = bytes(self._held)
        self._held.clear()
        return rest
