"""A worker's process: reads what it is, makes its engines, and works until the daemon is gone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Sequence
from typing import NoReturn

from appliance import framing
from appliance.memory.host_tier import HostTier
from appliance.platform import logs
from appliance.platform.children import (
    WORKER_OOM_SCORE,
    forbid_core_dumps,
    go_before_the_daemon,
    name_process,
)
from appliance.platform.sandbox import Sandbox
from appliance.worker import frames
from appliance.worker.engines import engines
from appliance.worker.mailbox import Mailbox
from appliance.worker.tensor_parallel import lead, replicated
from appliance.worker.worker import Worker

READ_BYTES = 1 << 16

log = logging.getLogger("appliance.worker")


def _read(
    connection: socket.socket, decoder: framing.Decoder[frames.Down], mailbox: Mailbox
) -> None:
    """Frames to the mailbox until the daemon is gone, or is not understood; the process ends then:
    a worker that cannot hear is of no use."""
    try:
        while data := connection.recv(READ_BYTES):
            for message in decoder.feed(data):
                mailbox.put(message)
    except ConnectionError:
        pass  # the daemon is gone in a hurry
    except Exception:  # whatever it is, the process must end: the daemon starts another
        log.exception("the daemon sent what cannot be read")
        os._exit(1)
    os._exit(0)


def first_frames(
    connection: socket.socket, decoder: framing.Decoder[frames.Down]
) -> tuple[frames.Configure, list[frames.Down]]:
    """What the worker is, and what came with that."""
    messages: list[frames.Down] = []
    while not messages:
        data = connection.recv(READ_BYTES)
        if not data:
            raise SystemExit(0)
        messages = decoder.feed(data)
    configuration, *more = messages
    if not isinstance(configuration, frames.Configure):
        raise SystemExit(f"expected a Configure frame first, got {messages!r}")
    if configuration.version != frames.PROTOCOL_VERSION:
        raise SystemExit(f"daemon speaks version {configuration.version} of the wire protocol")
    return configuration, more


def run(connection: socket.socket, host_fd: int) -> NoReturn:
    """Run a worker over its socket, with the host tier of this descriptor."""
    go_before_the_daemon(WORKER_OOM_SCORE)
    forbid_core_dumps()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    decoder = frames.decoder_of_commands()
    configuration, more = first_frames(connection, decoder)
    logs.join("warning", instance=configuration.instance)
    name_process(f"appliance-w{configuration.instance}")
    if configuration.device == "cpu":
        # Its followers are in it, too. Not with a GPU: CUDA's driver may start a program that
        # makes its devices, with more privileges than ours.
        Sandbox().enter()
    # At every engine vLLM warns of what is chosen here on purpose; its errors are news.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    host = HostTier.attach(host_fd, configuration.host_bytes)
    mailbox = Mailbox()
    for message in more:
        mailbox.put(message)
    seat, followers = lead(configuration, host.fd, connection)
    build, arena, swapper = engines(configuration, host, seat)
    swapper.on_end = mailbox.wake
    if followers is not None:
        build = replicated(build, followers, swapper)
    sending = threading.Lock()

    def send(messages: Sequence[frames.Up]) -> None:
        with sending:
            connection.sendall(b"".join(map(framing.encode, messages)))

    reader = threading.Thread(target=_read, args=(connection, decoder, mailbox), daemon=True)
    send([frames.Hello(configuration.instance, os.getpid(), configuration.slabs)])
    reader.start()
    # Engines share process-wide state that cannot be torn down piece by piece; the system does it.
    # The same goes for a worker that failed: the daemon starts another.
    try:
        worker = Worker(configuration, arena, swapper, mailbox, build, send)
        worker.background.start()
        worker.run()
    except Exception:  # whatever it is, its books are void
        log.exception("worker failed")
        os._exit(1)
    os._exit(0)
