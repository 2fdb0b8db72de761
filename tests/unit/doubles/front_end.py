"""Front ends without vLLM, in processes of their own, forked as real ones are.

They are handed connections, and compute nothing: they answer every request with what they know of
it, as JSON, and a stream of a chat with one piece of text. A second request of a connection that is
the core's is given back. `front_double` is the other half: in the test's process, it computes.

Run with the number of the socket of orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import msgspec

from appliance import framing
from appliance.forking.zygote import serve_orders
from appliance.gateway.request_lines import path_of
from appliance.platform.descriptors import receive_descriptors
from appliance.service import front_frames
from appliance.service.front_frames import (
    Drain,
    Handover,
    Hello,
    Ping,
    Pong,
    Ready,
    Role,
    StreamBegun,
    Welcome,
)
from appliance.service.front_paths import is_front_path

COMMAND = (sys.executable, str(Path(__file__)))
ENDLESS = "/v1/completions/render"
"""The answer to a request for it begins, says who answers in ``x-pid``, and does not end. The core
gets its descriptor, under call 1, before it begins."""
ENDING = b"!"

EVENTS = b'data: {"choices": [{"index": 0, "delta": {"content": "!"}}]}\n\ndata: [DONE]\n\n'
"""The answer to a chat that is to be streamed."""

WELCOME = Welcome(
    keep_alive_seconds=5,
    max_body_bytes=1 << 20,
    max_bodies_bytes=1 << 27,
    strict=False,
    origins=(),
    models=(),
)


class Double:
    """One front end."""

    def __init__(self, frames: socket.socket, handover: socket.socket) -> None:
        self.frames = frames
        self.handover = handover
        self.draining = False
        self.open: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.over = asyncio.Event()

    def send(self, frame: front_frames.Up) -> None:
        self.frames.sendall(framing.encode(frame))

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.handover.setblocking(False)
        self.send(Hello(front_frames.VERSION, os.getpid()))
        listening = loop.create_task(self.listen())
        await self.over.wait()
        await self.idle.wait()
        listening.cancel()

    async def listen(self) -> None:
        reader, _ = await asyncio.open_connection(sock=self.frames.dup())
        decoder = front_frames.decoder_for_front()
        while data := await reader.read(1 << 16):
            for frame in decoder.feed(data):
                if isinstance(frame, Welcome):
                    asyncio.get_running_loop().add_reader(self.handover, self.take)
                    self.send(Ready())
                elif isinstance(frame, Ping):
                    count = len(self.open)
                    self.send(Pong(number=frame.number, connections=count, calls=count))
                elif isinstance(frame, Drain):
                    self.over.set()
        self.open.clear()
        self.idle.set()
        self.over.set()

    def take(self) -> None:
        try:
            message, descriptors = receive_descriptors(self.handover, 1 << 16, 1)
        except BlockingIOError:
            return
        if not message:
            asyncio.get_running_loop().remove_reader(self.handover)
        for number in descriptors:
            handover = msgspec.msgpack.decode(message, type=Handover)
            task = asyncio.get_running_loop().create_task(
                self.answer(socket.socket(fileno=number), handover)
            )
            self.open.add(task)
            self.idle.clear()
            task.add_done_callback(self.answered)

    def answered(self, task: asyncio.Task[None]) -> None:
        self.open.discard(task)
        if not self.open:
            self.idle.set()

    async def answer(self, connection: socket.socket, handover: Handover) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        known = {
            "pid": os.getpid(),
            "client": handover.client,
            "scheme": handover.scheme,
            "connection": handover.connection,
        }
        # What cannot be read is closed, as is what its client left.
        with connection, contextlib.suppress(ValueError, OSError):
            received = b""
            while True:
                while b"\r\n\r\n" not in received:
                    data = await loop.sock_recv(connection, 1 << 16)
                    if not data:
                        return
                    received += data
                path = path_of(received) or ""
                if not is_front_path(path):
                    given = msgspec.structs.replace(handover, received=received)
                    message = msgspec.msgpack.encode(given)
                    socket.send_fds(self.handover, [message], [connection.fileno()])
                    return
                head, _, body = received.partition(b"\r\n\r\n")
                if path == ENDLESS:
                    begun = msgspec.msgpack.encode(StreamBegun(1, ENDING))
                    socket.send_fds(self.handover, [begun], [connection.fileno()])
                    line = f"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nx-pid: {os.getpid()}\r\n\r\n"
                    await loop.sock_sendall(connection, line.encode())
                    await asyncio.Event().wait()
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                while len(body) < length:
                    data = await loop.sock_recv(connection, 1 << 16)
                    if not data:
                        return
                    body += data
                if path == "/v1/chat/completions" and b'"stream":true' in body.replace(b" ", b""):
                    answer = EVENTS
                else:
                    answer = msgspec.json.encode(
                        {**known, "path": path, "body": body.decode(errors="replace")}
                    )
                line = f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n"
                await loop.sock_sendall(connection, line.encode() + answer)
                if b"connection: close" in head.lower():
                    return
                received = b""


def run(frames: int, handover: int) -> int:
    """Serve until the core is gone."""

    async def serve() -> None:
        await Double(socket.socket(fileno=frames), socket.socket(fileno=handover)).serve()

    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    serve_orders(socket.socket(fileno=int(sys.argv[1])), {Role.FRONT_END: run})
