"""The process that front ends and the compiler of guides are forked from: imports vLLM once, then
forks one for each order.

One that died is back within a fraction of a second so, and all of them share the memory of what was
imported. Runs as ``python -m appliance.frontend.zygote FD``; `FD` is the socket of orders.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from appliance.platform import logs
from appliance.platform.children import FRONT_END_OOM_SCORE, go_before_the_daemon
from appliance.platform.sandbox import Sandbox
from appliance.service.front_frames import Fork, Forked, Role

ORDER_BYTES: Final = 1024


Run: TypeAlias = Callable[..., int]
"""Gets the sockets of an order; returns the exit status."""


def serve_orders(orders: socket.socket, runs: Mapping[Role, Run]) -> None:
    """Fork a process that runs what its role says for each order, until the core is gone. Returns
    in the parent alone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal; the core ends us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    decoder = msgspec.msgpack.Decoder(Fork)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 2)
        except ConnectionError:  # the core ended with answers of ours unread
            return
        if not message:
            return
        order = decoder.decode(message)
        check_threads()
        sockets = [socket.socket(fileno=number) for number in descriptors]
        child = os.fork()
        if child == 0:
            orders.close()
            os._exit(_run(order, runs, sockets))
        for one in sockets:
            one.close()
        try:
            handles = [os.pidfd_open(child)]
        except ProcessLookupError:
            handles = []
        try:
            socket.send_fds(orders, [msgspec.msgpack.encode(Forked(order.number))], handles)
        except ConnectionError:  # the core ended before its process was there
            return
        finally:
            for handle in handles:
                os.close(handle)


def check_threads() -> None:
    """Raises `RuntimeError` if there is a thread besides this one: its locks would stay locked in a
    process that is forked."""
    count = len(list(Path("/proc/self/task").iterdir()))
    if count != 1:
        raise RuntimeError(f"importing the front half started {count - 1} threads: cannot fork")


def _run(order: Fork, runs: Mapping[Role, Run], sockets: Sequence[socket.socket]) -> int:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        fields: dict[str, object] = {str(order.role): order.number}
        logs.join("warning", **fields)
        return runs[order.role](*sockets)
    except BaseException:
        logging.getLogger("appliance.frontend").critical("%s", traceback.format_exc())
        return 1


def main(arguments: list[str]) -> None:
    """Import the front half, and fork what is ordered."""
    orders = socket.socket(fileno=int(arguments[0]))
    go_before_the_daemon(FRONT_END_OOM_SCORE)
    logs.join("warning", front_end=0)
    Sandbox().enter()
    from appliance.frontend.environment import import_vllm, prepare_environment

    prepare_environment()
    import_vllm()
    from appliance.frontend import guide_compiler, process

    runs: dict[Role, Run] = {
        Role.FRONT_END: process.main,
        Role.GUIDE_COMPILER: guide_compiler.main,
    }
    serve_orders(orders, runs)


if __name__ == "__main__":
    main(sys.argv[1:])
