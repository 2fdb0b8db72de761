"""A memory cgroup in which the kernel ends a process for want of memory, where one can be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LIMIT_BYTES = 8 << 20
TAKEN_BYTES = 4 * LIMIT_BYTES
TRIES = 3
TAKE_SECONDS = 30.0

_TAKE = f"""
import os, sys
with open(sys.argv[1], "w") as members:
    members.write(str(os.getpid()))
bytearray({TAKEN_BYTES})
"""


def _places() -> Iterator[tuple[Path, str]]:
    """Folders in which a group may be made, with the name of the file of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        elif not controllers:
            yield ROOT / path.lstrip("/"), "memory.max"


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """A new group with a limit, empty, gone afterwards; None where none can be made."""
    for place, limit in _places():
        group = place / f"chaos-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT_BYTES))
        except OSError:  # it has no such limit: its parent does not pass the controller on
            group.rmdir()
            continue
        try:
            yield group
        finally:
            with suppress(OSError):  # what was not ended goes back with its process
                group.rmdir()
        return
    yield None


def end_for_want_of_memory(group: Path, pid: int) -> bool:
    """Let a process share the group with one that takes more than there is; whether the kernel
    ended it. Takes seconds; raises `OSError` if the process has gone."""
    members = group / "cgroup.procs"
    members.write_text(str(pid))
    for _ in range(TRIES):
        subprocess.run(
            [sys.executable, "-c", _TAKE, str(members)],
            check=False,
            capture_output=True,
            timeout=TAKE_SECONDS,
        )
        if not _runs(pid):
            return True
    (group.parent / "cgroup.procs").write_text(str(pid))
    return False


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
