"""Memory of this machine, or of the control groups of this process: whichever is less.

Control groups are those of version 2 (`memory.max`). Page cache counts as available, as the kernel
gives it up when programs need memory. A process that ended holds nothing any more, so what a worker
had is available to the one that takes its place.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final, NamedTuple

from appliance.units import human

_RECLAIMED: Final = ("active_file", "inactive_file", "slab_reclaimable")
"""Of a control group's memory, what the kernel takes back before it ends a process. Shared memory
is not in these, though the kernel calls it cache elsewhere."""


class MachineMemory(NamedTuple):
    """Bytes; None where the system does not say."""

    total_bytes: int | None
    available_bytes: int | None
    limited: bool = False
    """Whether a control group has less in all than the machine."""

    @property
    def owner(self) -> str:
        """Whose memory the total is, in words."""
        return "this process's control group (memory.max)" if self.limited else "this machine"


def read_memory(root: Path = Path("/")) -> MachineMemory:
    """The memory as it is now, from the files below `root`."""
    memory = read_fields(root / "proc/meminfo")
    total, available = _kib(memory.get("MemTotal")), _kib(memory.get("MemAvailable"))
    limited = False
    for limit, used in _groups(root):
        if total is None or limit < total:
            total, limited = limit, True
        left = max(0, limit - used)
        available = left if available is None else min(available, left)
    return MachineMemory(total, available, limited)


def refuse_more(nbytes: int) -> None:
    """Raises `OSError` if fewer bytes are available now: the kernel would not refuse them, but end
    a process for them, which need not be ours."""
    available = read_memory().available_bytes
    if available is not None and nbytes > available:
        wrong = f"{human(nbytes)} of memory are needed, and {human(available)} are available"
        raise OSError(errno.ENOMEM, wrong)


def read_fields(file: Path, separator: str = ":") -> dict[str, str]:
    """``name: value`` on every line, as files in /proc have it; empty without the file."""
    pairs = (line.partition(separator) for line in read_text(file).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def read_text(file: Path) -> str:
    """A file of /proc or /sys; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _groups(root: Path) -> list[tuple[int, int]]:
    """The limit, and what is used and cannot be reclaimed, of each control group with a limit that
    this process is in."""
    path = read_fields(root / "proc/self/cgroup").get("0", "").strip(":/")
    top = root / "sys/fs/cgroup"
    found = []
    for folder in ((top / path), *(top / path).parents):
        limit = read_text(folder / "memory.max").strip()
        if limit.isdecimal():
            used = read_text(folder / "memory.current").strip()
            kinds = read_fields(folder / "memory.stat", " ")
            reclaimed = sum(int(kinds.get(kind, 0)) for kind in _RECLAIMED)
            found.append((int(limit), int(used or 0) - reclaimed))
        if folder == top:
            break
    return found


def _kib(value: str | None) -> int | None:
    return None if value is None else int(value.removesuffix(" kB")) * 1024
