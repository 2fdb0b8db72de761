"""What systemd does for a socket-activated service: sockets from descriptor 3 on, and variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_LAUNCHER = """
import fcntl, os, sys
passed = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in sys.argv[1].split(",")]
for place, number in enumerate(passed, start=3):
    os.dup2(number, place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(passed)))
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_activated(
    command: Sequence[str],
    sockets: Sequence[socket.socket],
    *,
    environment: Mapping[str, str] | None = None,
    output: int | IO[bytes] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """The command as a child that was passed the sockets, which stay open here."""
    numbers = [listener.fileno() for listener in sockets]
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, ",".join(map(str, numbers)), *command],
        pass_fds=numbers,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )
