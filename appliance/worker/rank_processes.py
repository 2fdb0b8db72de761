"""Processes of followers, as their leader starts them: forked, or importing vLLM themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from appliance.forking.zygote import check_threads
from appliance.platform.children import module_command
from appliance.worker.follower import run


class RankProcess(Protocol):
    """A follower's process."""

    def kill(self) -> None:
        """End it by force; without effect if it has ended."""

    def wait(self) -> object:
        """Return when it has ended. To be called once."""


def start_follower(
    connection: socket.socket, host_fd: int, private: Sequence[socket.socket]
) -> RankProcess:
    """A process of a follower over its socket, with the host tier. It is forked if this process
    has imported vLLM, and then has none of the sockets in `private`.

    Raises `OSError` if it cannot be started, `RuntimeError` if this process has threads.
    """
    if "vllm" not in sys.modules:
        return subprocess.Popen(
            module_command("appliance.worker.follower", str(connection.fileno()), str(host_fd)),
            pass_fds=(connection.fileno(), host_fd),
            stdin=subprocess.DEVNULL,
        )
    check_threads()
    child = os.fork()
    if child:
        return _Forked(child)
    try:
        for one in private:
            one.close()
        run(connection, host_fd)
    finally:
        os._exit(1)


class _Forked:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> object:
        return os.waitpid(self._pid, 0)
