"""The process that others are forked from: imports vLLM once, then forks one for each order.

One that died is back within a fraction of a second so, and all of them share the memory of what was
imported. Where a library starts a thread when it is imported (pyarrow's allocator does), nothing
can be forked afterwards: the process then starts itself anew, and each that is forked from it
imports vLLM for itself.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from appliance.forking.orders import MOST_DESCRIPTORS, ORDER_BYTES, Fork, Forked
from appliance.platform import logs
from appliance.platform.descriptors import receive_descriptors

BARE: Final = "bare"
"""The argument with which nothing is imported before it is forked."""

ENDING_SECONDS: Final = 5.0
"""How long a thread may take to end, with processors that others use."""

Run: TypeAlias = Callable[..., int]
"""Gets the descriptors of an order; returns the exit status."""

log = logging.getLogger(__name__)


def import_once(
    import_all: Callable[[], None], orders: socket.socket, command: Sequence[str], children: str
) -> None:
    """Import what `children` need. If that starts threads, this process becomes `command`, which
    gets the number of the socket of orders, and `BARE`."""
    gc.disable()  # to look through what is imported takes a fifth of the time
    import_all()
    if others := lasting_threads():
        log.warning(
            "importing vLLM and what it uses started threads (%s): every one of the %s imports it "
            "for itself, which takes seconds and memory; an environment without other packages "
            "spares that",
            ", ".join(others),
            children,
        )
        os.set_inheritable(orders.fileno(), True)
        os.execv(command[0], [*command, str(orders.fileno()), BARE])
    # Collections of garbage need not look at what was imported, and forks share its memory.
    gc.collect()
    gc.freeze()
    gc.enable()


def serve_orders(orders: socket.socket, runs: Mapping[str, Run]) -> None:
    """Fork a process that runs what its role says for each order, until the daemon is gone.
    Returns in the parent alone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal; the daemon ends us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    decoder = msgspec.msgpack.Decoder(Fork)
    while True:
        try:
            message, descriptors = receive_descriptors(orders, ORDER_BYTES, MOST_DESCRIPTORS)
        except ConnectionError:  # the daemon ended with answers of ours unread
            return
        if not message:
            return
        order = decoder.decode(message)
        check_threads()
        answer = _fork(order.number)
        if answer.pid == 0:
            orders.close()
            os._exit(_run(order, runs, descriptors))
        for one in descriptors:
            os.close(one)
        handles = _handles(answer.pid)
        try:
            socket.send_fds(orders, [msgspec.msgpack.encode(answer)], handles)
        except ConnectionError:  # the daemon ended before its process was there
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


def lasting_threads() -> list[str]:
    """The same, of those that do not end within a while. Python takes a thread for ended before the
    system does, and imports do some of their work in threads (OpenTelemetry's does)."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (others := other_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return others


def _fork(number: int) -> Forked:
    """The answer to an order: the child, or 0 in it; -1 if there are too many processes, or too
    little memory."""
    try:
        return Forked(number, os.fork())
    except OSError as error:
        log.error("no process could be forked: %s", error)
        return Forked(number, -1, str(error))


def _handles(child: int) -> list[int]:
    """A pidfd, if the child is still there."""
    if child < 0:
        return []
    try:
        return [os.pidfd_open(child)]
    except ProcessLookupError:
        return []


def _run(order: Fork, runs: Mapping[str, Run], descriptors: Sequence[int]) -> int:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if order.scratch:
            os.environ["TMPDIR"] = order.scratch
            tempfile.tempdir = None  # what it was found to be before
        fields: dict[str, object] = {order.role: order.number}
        logs.join("warning", **fields)
        return runs[order.role](*descriptors)
    except SystemExit as ending:
        if ending.code:
            log.critical("%s", ending.code)
        return int(bool(ending.code))
    except BaseException:
        log.critical("%s", traceback.format_exc())
        return 1
