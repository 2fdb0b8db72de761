"""The processes that a daemon has started, told apart from outside."""

from __future__ import annotations

from pathlib import Path

FRONT_END_PARENT = b"appliance.frontend.zygote"
"""In the command line of the process that front ends and the compiler of guides are forked from."""
WORKER_PARENT = b"appliance.worker.zygote"
"""In that of the process that workers are forked from."""


def children(pid: int) -> list[int]:
    """The processes that a process has started itself. Raises `OSError` if it has gone."""
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def front_end_parent(daemon: int) -> int:
    """The process that front ends are forked from. Raises `ValueError` if there is none."""
    return _parent(daemon, FRONT_END_PARENT)


def worker_parent(daemon: int) -> int:
    """The process that workers on processors are forked from. Raises `ValueError` if there is
    none."""
    return _parent(daemon, WORKER_PARENT)


def _parent(daemon: int, name: bytes) -> int:
    (parent,) = (
        child for child in children(daemon) if name in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return parent


def front_ends(daemon: int) -> list[int]:
    """Raises `ValueError` if they have no parent yet."""
    return [child for child in children(front_end_parent(daemon)) if not niceness(child)]


def guide_compilers(daemon: int) -> list[int]:
    """The compiler of guides, if it runs: of what is forked there, it alone is nice. Raises
    `ValueError` if it has no parent yet."""
    return [child for child in children(front_end_parent(daemon)) if niceness(child)]


def niceness(pid: int) -> int:
    """Of a process. Raises `OSError` if it has gone."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[16])
