"""The processes that a daemon has started, told apart from outside.

Threads and children end at any time, also between the moment when they are listed and the moment
when they are looked at. What has gone is left out: it says nothing of the others.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FRONT_END_PARENT = b"appliance.frontend.zygote"
"""In the command line of the process that front ends and the compiler of guides are forked from."""
WORKER_PARENT = b"appliance.worker.zygote"
"""In that of the process that workers are forked from."""


def children(pid: int) -> list[int]:
    """The processes that a process has started itself. Raises `OSError` if it has gone."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            found += map(int, (thread / "children").read_text().split())
    return found


def front_end_parent(daemon: int) -> int:
    """The process that front ends are forked from. Raises `ValueError` if there is none."""
    return _parent(daemon, FRONT_END_PARENT)


def worker_parent(daemon: int) -> int:
    """The process that workers on processors are forked from. Raises `ValueError` if there is
    none."""
    return _parent(daemon, WORKER_PARENT)


def _parent(daemon: int, name: bytes) -> int:
    found = []
    for child in children(daemon):
        with suppress(OSError):  # it has gone
            if name in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    (parent,) = found
    return parent


def front_ends(daemon: int) -> list[int]:
    """Raises `ValueError` if they have no parent yet."""
    return [child for child in _forked(daemon) if niceness(child) == 0]


def guide_compilers(daemon: int) -> list[int]:
    """The compiler of guides, if it runs: of what is forked there, it alone is nice. Raises
    `ValueError` if it has no parent yet."""
    return [child for child in _forked(daemon) if niceness(child)]


def _forked(daemon: int) -> list[int]:
    """What was forked from the parent of front ends. Raises `ValueError` if there is none."""
    try:
        return children(front_end_parent(daemon))
    except OSError:
        raise ValueError("what front ends are forked from has just gone") from None


def niceness(pid: int) -> int | None:
    """Of a process; None if it has gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(after_name[16])
