"""The process that workers on processors are forked from, so that one that died is back at once.

Runs as ``python -m appliance.worker.zygote CPUS FD [bare]``: `CPUS` are those of the first worker,
`FD` is the socket of orders. It computes nothing: OpenMP's threads would be missing in what is
forked, which would wait for them for ever. Not for GPUs: CUDA's driver cannot be used in a process
whose parent had begun to use it, and vLLM for CUDA asks it for devices when it is imported.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from typing import Final, NoReturn

from appliance.forking.zygote import BARE, import_once, serve_orders
from appliance.platform import logs
from appliance.platform.children import (
    WORKER_OOM_SCORE,
    die_with_parent,
    die_with_writer,
    go_before_the_daemon,
    module_command,
)
from appliance.platform.sandbox import Sandbox
from appliance.worker.engines import import_engines
from appliance.worker.run import run
from appliance.worker.starts import ROLE

MODULE: Final = "appliance.worker.zygote"


def main(arguments: list[str]) -> None:
    """Import the engines, and fork workers as they are ordered."""
    cpus, orders = arguments[0], socket.socket(fileno=int(arguments[1]))
    die_with_parent(signal.SIGKILL)
    go_before_the_daemon(WORKER_OOM_SCORE)
    logs.join("warning", worker=0)
    Sandbox().enter()
    if arguments[2:] != [BARE]:
        import_once(partial(_import, cpus), orders, module_command(MODULE, cpus), "workers")
    serve_orders(orders, {ROLE: _worker})


def _import(cpus: str) -> None:
    """As a worker on these processors does, whose threads that copy may use all others, too."""
    given = os.sched_getaffinity(0)
    import_engines(cpus)
    os.sched_setaffinity(0, given)


def _worker(connection: int, host_fd: int, daemon: int) -> NoReturn:
    die_with_writer(daemon)
    run(socket.socket(fileno=connection), host_fd)


if __name__ == "__main__":
    main(sys.argv[1:])
