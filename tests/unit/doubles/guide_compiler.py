"""A compiler of guides without vLLM, forked as the real one is: a guide says what it does.

Run with the number of the socket of orders.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from appliance import framing
from appliance.forking.zygote import serve_orders
from appliance.service.front_frames import Role
from appliance.service.guide_frames import (
    CompilerReady,
    FromCompiler,
    GuideCompiled,
    ModelKnown,
    ReadFolders,
    decoder_for_compiler,
)

COMMAND = (sys.executable, str(Path(__file__)))

GOOD = b"good"
BAD = b"bad"
DEADLY = b"deadly"
"""Ends the process."""
ENDLESS = b"endless"
NO_TOKENIZER = b"no tokenizer"
COUNT = b"count"
"""Refused; the reason is how many guides the process has had."""
FOLDERS = b"folders"
"""Refused; the reason are the folders that it may read."""


def once(file: Path) -> bytes:
    """A guide that ends the process if the file is there, and removes it."""
    return b"once " + str(file).encode()


def run(descriptor: int) -> int:
    """Serve until the core is gone."""
    frames = socket.socket(fileno=descriptor)
    had = 0
    folders = ""

    def send(frame: FromCompiler) -> None:
        frames.sendall(framing.encode(frame))

    decoder = decoder_for_compiler()
    while data := frames.recv(1 << 16):
        for order in decoder.feed(data):
            if isinstance(order, ReadFolders):
                folders = " ".join(order.folders)
                send(CompilerReady())
                continue
            had += 1
            guide = order.guide
            if guide == NO_TOKENIZER:
                send(GuideCompiled(order.number, failed="OSError: it is not there"))
                continue
            send(ModelKnown(order.number))
            if guide == DEADLY:
                os.kill(os.getpid(), signal.SIGSEGV)
            if guide == ENDLESS:
                signal.pause()
            if guide.startswith(b"once "):
                file = Path(guide[5:].decode())
                if file.exists():
                    file.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
            refused = {BAD: "it is bad", COUNT: str(had), FOLDERS: folders}.get(guide)
            send(GuideCompiled(order.number, refused))
    return 0


if __name__ == "__main__":
    serve_orders(socket.socket(fileno=int(sys.argv[1])), {Role.GUIDE_COMPILER: run})
