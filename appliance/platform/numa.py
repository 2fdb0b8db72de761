"""NUMA nodes: which processors and memory are near each other, and where a process takes memory.

A machine with one node, or a kernel that tells of none, has nothing to choose: nothing here makes
a system call then.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from appliance.platform.cpus import read_cpus
from appliance.platform.seccomp import system_call

SYS_NODES: Final = Path("/sys/devices/system/node")
STATUS: Final = Path("/proc/self/status")

MPOL_PREFERRED: Final = 1
"""Memory of one node; of another one when that has none left, so that nothing fails."""
_CALLS: Final = {"x86_64": (237, 238), "aarch64": (235, 237)}
"""Numbers of mbind(2) and set_mempolicy(2)."""

LEAST_STRIPE_BYTES: Final = 8 << 20
"""A copy to a GPU has pieces of this size in line: its next one comes from another node."""
MOST_STRIPES: Final = 4096
"""The kernel keeps each apart."""

Nodes: TypeAlias = Mapping[int, frozenset[int]]
"""The processors of each node, by the node's number; a node of memory alone has none."""

log = logging.getLogger("appliance.platform.numa")


class Call(Protocol):
    """Makes a system call. Raises `OSError`."""

    def __call__(self, number: int, /, *arguments: int | bytes | None) -> int: ...


def read_nodes(folder: Path = SYS_NODES, status: Path = STATUS) -> dict[int, frozenset[int]]:
    """The nodes that this process may take memory of; none if the kernel tells of none."""
    with_memory = _numbers(folder / "has_memory")
    for line in _text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            with_memory &= _listed(value)
    return {
        number: frozenset(_numbers(folder / f"node{number}" / "cpulist"))
        for number in sorted(with_memory)
    }


def node_of(cpus: Collection[int], nodes: Nodes) -> int | None:
    """The one node that all these processors are of, on a machine with several; None if there is
    no such node."""
    if len(nodes) < 2 or not cpus:
        return None
    return next((number for number, own in nodes.items() if own.issuperset(cpus)), None)


def by_node(cpus: Iterable[int], nodes: Nodes) -> list[int]:
    """Processors in the order of their nodes, so that neighbours in the list are near each other.
    The numbers of one node often do not follow each other: second threads of cores come last."""
    place = {cpu: number for number, own in nodes.items() for cpu in own}
    return sorted(cpus, key=lambda cpu: (place.get(cpu, -1), cpu))


def stripes(nbytes: int, nodes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Start, size and node of parts of `nbytes` bytes that lie on these nodes in turns."""
    if len(nodes) == 1:
        yield 0, nbytes, nodes[0]
        return
    share = -(-nbytes // MOST_STRIPES)
    size = -(-share // LEAST_STRIPE_BYTES) * LEAST_STRIPE_BYTES
    for turn, start in enumerate(range(0, nbytes, size)):
        yield start, min(size, nbytes - start), nodes[turn % len(nodes)]


def place_memory(address: int, nbytes: int, node: int, call: Call = system_call) -> None:
    """Have pages of a mapping, which are not there yet, come from a node. Of a file in memory that
    is mapped shared, this holds for all processes and mappings, as long as the file is there.

    Raises `OSError`: containers often forbid it.
    """
    mask = _mask(node)
    call(_number(0), address, nbytes, MPOL_PREFERRED, mask, _bits(mask), 0)


def prefer_node(node: int, call: Call = system_call) -> None:
    """Have the calling thread, and those that it starts from now on, take memory of a node. Raises
    `OSError`."""
    mask = _mask(node)
    call(_number(1), MPOL_PREFERRED, mask, _bits(mask))


def stay_near(
    cpus: Collection[int],
    nodes: Nodes | None = None,
    call: Call = system_call,
    *,
    computes: bool = False,
) -> int | None:
    """Have a process that is for these processors run, and take memory, on the node that has them,
    if that is one of several; answers that node. Call this before it starts threads.

    Where it may use no other processors of that node, it runs on these; if it `computes` on them,
    it stays where it is: other threads, such as those that copy, would take them from compute.
    What the system refuses is logged: the process works without, from farther memory.
    """
    nodes = read_nodes() if nodes is None else nodes
    node = node_of(cpus, nodes)
    if node is None:
        return None
    try:
        near = os.sched_getaffinity(0) & nodes[node]
        if near or not computes:
            os.sched_setaffinity(0, near or cpus)
    except OSError as error:
        log.warning("this process is not kept on processors of NUMA node %d: %s", node, error)
    try:
        prefer_node(node, call)
    except OSError as error:
        log.warning("this process does not prefer memory of NUMA node %d: %s", node, error)
    return node


def refusal(node: int, call: Call = system_call) -> str:
    """Why memory of a chosen node cannot be asked for; "" if it can. Tries it with one page."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        try:
            place_memory(ctypes.addressof(start), mmap.PAGESIZE, node, call)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            del start
    return ""


def _number(which: int) -> int:
    try:
        return _CALLS[platform.machine()][which]
    except KeyError:
        raise OSError(errno.ENOSYS, f"unknown on {platform.machine()}") from None


def _mask(node: int) -> bytes:
    """A set of nodes, as the kernel takes it: whole words of 64 bits."""
    return (1 << node).to_bytes((node // 64 + 1) * 8, "little")


def _bits(mask: bytes) -> int:
    """The kernel takes one off."""
    return len(mask) * 8 + 1


def _numbers(file: Path) -> set[int]:
    return _listed(_text(file))


def _listed(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``; none if it is empty."""
    return set(read_cpus(text.strip())) if text.strip() else set()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
