"""The service manager's end of the notify socket."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_END = b"that was all"


class Manager:
    """Hears what a service tells, at once, as the kernel keeps only a few datagrams.

    `address` is for NOTIFY_SOCKET.
    """

    def __init__(self, listener: socket.socket, address: str) -> None:
        self.address = address
        self._listener = listener
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def heard(self) -> list[dict[str, str]]:
        """Everything told since the last time, a dictionary for each datagram."""
        found = []
        while True:
            try:
                message = self._messages.get_nowait().decode()
            except queue.Empty:
                return found
            found.append(dict(line.split("=", 1) for line in message.splitlines()))

    def listen(self) -> None:
        while (message := self._listener.recv(4096)) != _END:
            self._messages.put(message)


@contextmanager
def manager(directory: Path, name: str = "notify") -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        path = str(directory / name)
        listener.bind(path)
        listening = Manager(listener, path)
        thread = threading.Thread(target=listening.listen)
        thread.start()
        try:
            yield listening
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(_END, path)
            thread.join()
