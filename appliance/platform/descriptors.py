"""Descriptors that come over a socket from another process."""

from __future__ import annotations

import array
import socket
from typing import Final

_ITEM_BYTES: Final = array.array("i").itemsize


def receive_descriptors(
    connection: socket.socket, most_bytes: int, most_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """A message, and the descriptors that came with it; no child process inherits these.

    `socket.recv_fds` of Python 3.11 ignores its flags, so what it receives is inherited by every
    process that uvloop starts: uvloop does not close what is not passed. A child with a client's
    connection keeps it open, and the client waits for an end that never comes.

    Raises `OSError` as `socket.recvmsg` does.
    """
    room = socket.CMSG_LEN(most_descriptors * _ITEM_BYTES)
    flags |= socket.MSG_CMSG_CLOEXEC
    message, ancillary, _, _ = connection.recvmsg(most_bytes, room, flags)
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % _ITEM_BYTES])
    return message, list(found)
