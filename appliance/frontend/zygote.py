"""The process that front ends and the compiler of guides are forked from: imports vLLM once, then
forks one for each order.

One that died is back within a fraction of a second so, and all of them share the memory of what was
imported. Where a library starts a thread when it is imported (pyarrow's allocator does), nothing
can be forked afterwards: the process then starts itself anew, and each that is forked from it
imports vLLM for itself.

Runs as ``python -m appliance.frontend.zygote FD [bare]``; `FD` is the socket of orders.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from appliance.platform import logs
from appliance.platform.children import (
    FRONT_END_OOM_SCORE,
    go_before_the_daemon,
    module_command,
)
from appliance.platform.sandbox import Sandbox
from appliance.service.front_frames import Fork, Forked, Role

ORDER_BYTES: Final = 1024
BARE: Final = "bare"
"""The argument with which nothing is imported before it is forked."""


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
    if others := other_threads():
        raise RuntimeError(f"cannot fork, as there are other threads: {', '.join(others)}")


def other_threads() -> list[str]:
    """The names of this process's threads but the calling one, as the system knows them."""
    mine = str(threading.get_native_id())
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if task.name != mine:
                names.append((task / "comm").read_text().strip())
    return names


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
    from appliance.frontend.environment import prepare_environment

    prepare_environment()
    if arguments[1:] != [BARE]:
        _import_all()
        if others := other_threads():
            logging.getLogger("appliance.frontend").warning(
                "importing vLLM and what it uses started threads (%s): every front end imports it "
                "for itself, which takes seconds and memory; an environment without other "
                "packages spares that",
                ", ".join(others),
            )
            os.set_inheritable(orders.fileno(), True)
            command = module_command("appliance.frontend.zygote", arguments[0], BARE)
            os.execv(command[0], command)
    serve_orders(orders, {Role.FRONT_END: _front_end, Role.GUIDE_COMPILER: _guide_compiler})


def _import_all() -> None:
    """What is forked needs; takes seconds for the first time."""
    from appliance.frontend.environment import import_vllm

    import_vllm()
    from appliance.frontend import guide_compiler, process  # noqa: F401


def _front_end(frames: socket.socket, handover: socket.socket) -> int:
    from appliance.frontend import process

    return process.main(frames, handover)


def _guide_compiler(frames: socket.socket) -> int:
    _import_all()
    from appliance.frontend import guide_compiler

    return guide_compiler.main(frames)


if __name__ == "__main__":
    main(sys.argv[1:])
