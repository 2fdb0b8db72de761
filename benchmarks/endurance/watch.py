"""What the processes of the appliance take, looked at again and again, and whether it stays."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.endurance.connection import ask_json

MORE = 1.05
"""What the median of the last quarter may be of that of the second one, beside `SLACK`."""
SLACK = {
    "daemon_bytes": 8 << 20,
    "workers_bytes": 64 << 20,
    "tree_bytes": 64 << 20,
    "descriptors": 8,
    "threads": 4,
}
REAPED_SECONDS: Final = 60.0
"""The system's first process reaps what a killed worker had started, in its own time, and a process
that is killed gives its memory back first. On a busy machine each takes seconds."""
ZOMBIE_SECONDS: Final = 10.0
"""A process that ended is reaped by its parent within so long, also on a busy machine."""


@dataclass(frozen=True)
class Sample:
    """One look. Bytes of the daemon and of the others are anonymous ones (Pss), in no file; those
    of the whole tree include what is shared, each once."""

    seconds: float
    daemon_bytes: int
    workers_bytes: int
    tree_bytes: int
    descriptors: int
    threads: int
    processes: int
    zombies: int
    journal_bytes: int
    ready: bool


class Watch:
    """Samples of a daemon and all that it started."""

    def __init__(self, pid: int, url: str, journal: Path) -> None:
        self.url = url
        self.journal = journal
        address = urlsplit(url)
        self.address = (address.hostname or "", address.port or 0)
        self.samples: list[Sample] = []
        self.complaints: list[str] = []
        self.seen: set[int] = set()
        """Every process there was."""
        self.memory: set[int] = set()
        """Inodes of all shared memory there was."""
        self._pid = pid
        self._zombies: dict[int, float] = {}
        """Since when each of them is known to be one."""
        self._began = time.monotonic()

    async def run(self, every_seconds: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            status, _ = await ask_json(*self.address, "GET", "/readyz")
            self.samples.append(self.look(ready=status == 200))

    def look(self, *, ready: bool = True) -> Sample:
        """What there is now."""
        tree = self.note()
        rolled = {pid: _rollup(pid) for pid in tree}
        now = time.monotonic()
        zombies = {pid: self._zombies.get(pid, now) for pid in tree if _state(pid) == "Z"}
        for pid, since in zombies.items():
            if now - since > ZOMBIE_SECONDS:
                self.complaints.append(f"process {pid} is a zombie for {now - since:.0f} s")
        self._zombies = zombies
        return Sample(
            seconds=round(time.monotonic() - self._began, 1),
            daemon_bytes=rolled[self._pid].get("Pss_Anon", 0),
            workers_bytes=sum(of.get("Pss_Anon", 0) for of in rolled.values())
            - rolled[self._pid].get("Pss_Anon", 0),
            tree_bytes=sum(of.get("Pss", 0) for of in rolled.values()),
            descriptors=len(list(Path(f"/proc/{self._pid}/fd").iterdir())),
            threads=len(list(Path(f"/proc/{self._pid}/task").iterdir())),
            processes=len(tree),
            zombies=len(zombies),
            journal_bytes=self.journal.stat().st_size,
            ready=ready,
        )

    def note(self) -> list[int]:
        """Remember who is there and what they hold, for `left_behind`; the processes."""
        tree = descendants(self._pid)
        self.seen |= set(tree)
        self.memory |= {inode for pid in tree for inode in _memory(pid)}
        return tree

    def left_behind(self) -> list[str]:
        """What outlives the daemon by `REAPED_SECONDS`."""
        deadline = time.monotonic() + REAPED_SECONDS
        while (found := self._still_there()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _still_there(self) -> list[str]:
        found = [f"process {pid}" for pid in sorted(self.seen) if Path(f"/proc/{pid}").exists()]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self.memory & _memory(int(entry.name)):
                found.append(f"memory that process {entry.name} holds")
        return found

    def flatness(self) -> dict[str, dict[str, Any]]:
        """Of each quantity the medians of the second and of the last quarter, and the bound."""
        samples = [asdict(sample) for sample in self.samples]
        quarter = max(1, len(samples) // 4)
        found = {}
        for name in SLACK:
            early = statistics.median(s[name] for s in samples[quarter : 2 * quarter] or samples)
            late = statistics.median(s[name] for s in samples[-quarter:])
            bound = most_of(name, early)
            found[name] = {"second": early, "last": late, "bound": bound, "flat": late <= bound}
        return found


def most_of(name: str, early: float) -> float:
    """The most that a quantity may be later, if it was `early` before."""
    return early * MORE + SLACK[name]


def descendants(pid: int) -> list[int]:
    """The process and all that it started, and they."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _memory(pid: int) -> set[int]:
    """Inodes of the appliance's memfds that a process holds."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                if str(entry.readlink()).startswith("/memfd:appliance"):
                    found.add(entry.stat().st_ino)
    except OSError:  # the process has gone
        return set()
    return found


def _rollup(pid: int) -> dict[str, int]:
    """Bytes by name, of `smaps_rollup`; nothing of a process that has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
