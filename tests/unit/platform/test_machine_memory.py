"""The memory of a machine and of its control groups, as the kernel writes it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory, read_memory, refuse_more

GROUP = "sys/fs/cgroup/box/appliance"
MACHINE = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:   600 kB\n"}


def system(root: Path, files: dict[str, str]) -> Path:
    """A root with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


def test_without_control_groups(tmp_path: Path) -> None:
    """What the kernel says of the machine; nothing, where it says nothing."""
    assert read_memory(tmp_path) == MachineMemory(None, None)
    found = read_memory(system(tmp_path, MACHINE))

    assert found == MachineMemory(1000 << 10, 600 << 10)
    assert found.owner == "this machine"


def test_page_cache_of_a_group_counts_as_available(tmp_path: Path) -> None:
    """Shared memory does not, though it is in `file`: it is not given up."""
    group = {
        "proc/self/cgroup": "4:memory:/other\n0::/box/appliance\n",
        f"{GROUP}/memory.max": "500000\n",
        f"{GROUP}/memory.current": "450000\n",
        f"{GROUP}/memory.stat": "anon 100000\nfile 300000\nshmem 200000\nactive_file 60000\n"
        "inactive_file 40000\nslab_reclaimable 1000\n",
    }
    found = read_memory(system(tmp_path, {**MACHINE, **group}))

    assert found == MachineMemory(500000, 500000 - 450000 + 101000, limited=True)
    assert found.owner == "this process's control group (memory.max)"


def test_the_least_of_all_groups_and_the_machine(tmp_path: Path) -> None:
    """A parent's limit holds for what is below it; a group without a limit, or with a larger one
    than the machine has, changes nothing; and what is gone beyond a limit is not negative."""
    groups = {
        "proc/self/cgroup": "0::/box/appliance\n",
        f"{GROUP}/memory.max": "max\n",
        "sys/fs/cgroup/box/memory.max": "400000\n",
        "sys/fs/cgroup/box/memory.current": "450000\n",
        "sys/fs/cgroup/memory.max": "2000000\n",
        "sys/fs/cgroup/memory.current": "100\n",
    }
    found = read_memory(system(tmp_path, {**MACHINE, **groups}))
    assert found == MachineMemory(400000, 0, limited=True)

    (tmp_path / "sys/fs/cgroup/box/memory.max").write_text("max\n", encoding="ascii")
    assert read_memory(tmp_path) == MachineMemory(1000 << 10, 600 << 10)


def test_a_process_that_ended_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked anew each time: what a worker held is there for the next one."""
    system(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1 kB\n"})
    monkeypatch.setattr(machine_memory, "read_memory", lambda: read_memory(tmp_path))
    with pytest.raises(OSError, match="2KiB of memory are needed, and 1KiB are available") as no:
        refuse_more(2048)
    assert no.value.errno == errno.ENOMEM

    system(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2 kB\n"})
    refuse_more(2048)
