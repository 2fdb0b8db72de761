"""Runs the appliance with a system clock that can be moved from outside while it runs.

    python moved_clock.py FILE serve --config appliance.toml

`FILE` holds the seconds by which the clock is wrong, as a double: `ClockFile` writes it. The
product has no seam for that, and needs none: here `time.time` is another function before anything
of it is imported. The processes that the daemon starts see the clock as it is.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path

_SECONDS = struct.Struct("d")


class ClockFile:
    """By how much the clock of a daemon is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_bytes(_SECONDS.pack(0.0))

    def move(self, seconds: float) -> None:
        """Let it be wrong by so much from now on."""
        with self.path.open("r+b") as stream:
            stream.write(_SECONDS.pack(seconds))


def follow(path: Path) -> None:
    """Let this process's `time.time` be wrong as a file says, from now on."""
    with path.open("rb") as stream:
        shown = mmap.mmap(stream.fileno(), _SECONDS.size, access=mmap.ACCESS_READ)
    right, right_ns = time.time, time.time_ns

    def moved() -> float:
        return right() + float(_SECONDS.unpack_from(shown)[0])

    def moved_ns() -> int:
        return right_ns() + int(_SECONDS.unpack_from(shown)[0] * 1e9)

    time.time, time.time_ns = moved, moved_ns


if __name__ == "__main__":
    follow(Path(sys.argv.pop(1)))
    from appliance.__main__ import main

    main()
