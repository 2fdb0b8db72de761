"""A front end in a process of its own: ``python -m appliance.frontend``.

Only tests start front ends so, with a stand-in for the core. The core has them forked
(`appliance.frontend.zygote`).
"""

from __future__ import annotations

import argparse
import logging
import os
import socket

from appliance.frontend.process import main
from appliance.platform import logs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="appliance.frontend", description=__doc__)
    parser.add_argument("--frames-fd", type=int, required=True, help="a stream socket to the core")
    parser.add_argument("--handover-fd", type=int, required=True, help="where connections come")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    logs.join("warning", front_end=0)
    status = main(
        socket.socket(fileno=arguments.frames_fd), socket.socket(fileno=arguments.handover_fd)
    )
    logging.shutdown()
    os._exit(status)  # to take apart what vLLM imported takes seconds, and is of no use
