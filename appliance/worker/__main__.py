"""A worker that imports vLLM itself: ``python -m appliance.worker SOCKET_FD HOST_FD``.

So start those with a GPU; others are forked (`appliance.worker.zygote`).
"""

from __future__ import annotations

import signal
import socket
import sys

from appliance.platform.children import die_with_parent
from appliance.worker.run import run

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
