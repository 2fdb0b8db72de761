"""The process that front ends and the compiler of guides are forked from.

Runs as ``python -m appliance.frontend.zygote FD [bare]``; `FD` is the socket of orders.
"""

from __future__ import annotations

import socket
import sys

from appliance.forking.zygote import BARE, import_once, serve_orders
from appliance.platform import logs
from appliance.platform.children import (
    FRONT_END_OOM_SCORE,
    go_before_the_daemon,
    module_command,
)
from appliance.platform.sandbox import Sandbox
from appliance.service.front_frames import Role


def main(arguments: list[str]) -> None:
    """Import the front half, and fork what is ordered."""
    orders = socket.socket(fileno=int(arguments[0]))
    go_before_the_daemon(FRONT_END_OOM_SCORE)
    logs.join("warning", front_end=0)
    Sandbox().enter()
    from appliance.frontend.environment import prepare_environment

    prepare_environment()
    if arguments[1:] != [BARE]:
        command = module_command("appliance.frontend.zygote")
        import_once(_import_all, orders, command, "front ends")
    serve_orders(orders, {Role.FRONT_END: _front_end, Role.GUIDE_COMPILER: _guide_compiler})


def _import_all() -> None:
    """What is forked needs; takes seconds for the first time."""
    from appliance.frontend.environment import import_vllm

    import_vllm()
    from appliance.frontend import guide_compiler, process  # noqa: F401


def _front_end(frames: int, handover: int) -> int:
    from appliance.frontend import process

    return process.main(socket.socket(fileno=frames), socket.socket(fileno=handover))


def _guide_compiler(frames: int) -> int:
    _import_all()
    from appliance.frontend import guide_compiler

    return guide_compiler.main(socket.socket(fileno=frames))


if __name__ == "__main__":
    main(sys.argv[1:])
