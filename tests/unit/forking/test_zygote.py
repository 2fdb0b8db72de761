"""The process that others are forked from ends quietly when the core is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
SERVING = """
import os, socket, sys
import msgspec
from appliance.forking.orders import Fork
from appliance.forking.zygote import serve_orders
from appliance.service.front_frames import Role

core, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
fork = os.fork


def fork_as_the_core_ends():
    core.close()
    return fork()


os.fork = fork_as_the_core_ends
{before}
serve_orders(orders, {{Role.FRONT_END: lambda *sockets: 0}})
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("core.send(msgspec.msgpack.encode(Fork(1, Role.FRONT_END)))", id="forking"),
        # The next receive fails then, once, instead of saying that this is the end.
        pytest.param("orders.send(b'an answer'); core.close()", id="answers unread"),
        pytest.param("core.close()", id="idle"),
    ],
)
def test_a_core_that_ends_is_no_defect(before: str) -> None:
    """In the first case the answer was sent into a closed socket, and a traceback was written."""
    done = subprocess.run(
        [sys.executable, "-c", SERVING.format(before=before)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ENDING = """
import os, socket
import msgspec
from appliance.forking.orders import Fork
from appliance.forking.zygote import serve_orders

def run():
    raise SystemExit({status!r})

core, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
core.send(msgspec.msgpack.encode(Fork(1, "ends")))
core.shutdown(socket.SHUT_WR)
serve_orders(orders, {{"ends": run}})
try:
    os.wait()
except ChildProcessError:
    pass  # they have all ended
"""


@pytest.mark.parametrize(("status", "said"), [(0, ""), ("another version", "another version")])
def test_what_is_forked_may_end_itself(status: int | str, said: str) -> None:
    """Without a traceback: a worker does so if the daemon ends before it said what it is."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(status=status)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )

    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


IMPORTING = """
import gc, socket
from appliance.forking.zygote import import_once
collecting = []
import_once(lambda: collecting.append(gc.isenabled()), socket.socketpair()[0], [], "workers")
print(collecting, gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_garbage_is_collected_in_what_is_forked() -> None:
    """As before the import, during which it is not: all that is imported stays."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )

    assert done.stdout == "[False] True True\n"
