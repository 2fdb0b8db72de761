"""NUMA nodes: what the kernel tells of them, what is dealt by them, and what is asked of it."""

from __future__ import annotations

import errno
import gc
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from appliance.config.groups import plan_instances
from appliance.config.loader import load_config
from appliance.config.schema import DeviceGroup, Devices
from appliance.memory.host_tier import HostTier
from appliance.platform import numa
from appliance.platform.cpus import deal_near
from appliance.platform.gpus import Gpu, GpuFacts, GpusUnknown
from appliance.platform.numa import (
    LEAST_STRIPE_BYTES,
    MOST_STRIPES,
    by_node,
    node_of,
    prefer_node,
    read_nodes,
    refusal,
    stay_near,
    stripes,
)
from appliance.serve import host_nodes, make_daemon, nodes_of_gpus, share_cpus
from appliance.units import Memory
from appliance.worker import engines, frames
from appliance.worker.rank_messages import Seat
from tests.patience import PATIENCE_SECONDS

TWO = {0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})}
"""Two sockets whose cores have two threads each."""
ONE = {0: frozenset({0, 1})}


@pytest.fixture
def pretend(tmp_path: Path) -> Callable[..., dict[int, frozenset[int]]]:
    """Reads the nodes of a machine whose kernel tells this."""

    def read(with_memory: str, lists: dict[int, str], allowed: str = "") -> dict[int, frozenset]:
        (tmp_path / "has_memory").write_text(f"{with_memory}\n")
        for number, cpus in lists.items():
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
        status = tmp_path / "status"
        status.write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n" if allowed else "Name:\tx\n")
        return read_nodes(tmp_path, status)

    return read


@pytest.mark.parametrize(
    ("with_memory", "lists", "allowed", "nodes"),
    [
        ("0", {0: "0-1"}, "0", ONE),
        ("0-1", {0: "0-1,4-5", 1: "2-3,6-7"}, "0-1", TWO),
        ("0-1", {0: "0-1,4-5", 1: "2-3,6-7"}, "", TWO),
        ("0-1", {0: "0-1,4-5", 1: "2-3,6-7"}, "0", {0: TWO[0]}),
        ("0,2", {0: "0-1", 1: "2-3", 2: ""}, "0-63", {0: ONE[0], 2: frozenset()}),
        ("", {}, "", {}),
    ],
)
def test_nodes_are_those_with_memory_for_us(
    with_memory: str,
    lists: dict[int, str],
    allowed: str,
    nodes: dict[int, frozenset[int]],
    pretend: Callable[..., dict[int, frozenset[int]]],
) -> None:
    """Of the machine's nodes those that our control group may use; a node may have no processor."""
    assert pretend(with_memory, lists, allowed) == nodes


def test_a_kernel_without_nodes_tells_of_none(tmp_path: Path) -> None:
    """Processors are dealt out by their numbers then."""
    nodes = read_nodes(tmp_path / "none", tmp_path / "none")

    assert nodes == {}
    assert share_cpus([0, 1, 2, 3, 4], [1, 1], 1, nodes, [{1}, {0}]) == ["0,1", "2,3"]


def test_processors_of_one_node_are_recognised() -> None:
    """On a machine with several nodes only."""
    assert node_of([2, 7], TWO) == 1
    assert node_of([1, 2], TWO) is None
    assert node_of([0, 1], ONE) is None
    assert node_of([], TWO) is None
    assert by_node([7, 0, 2, 5], TWO) == [0, 5, 2, 7]
    assert by_node([3, 1], {}) == [1, 3]


def test_workers_are_near_their_gpus() -> None:
    """Whatever the numbers of processors are; GPUs of one node share it, the daemon keeps its own
    processor, and a GPU whose node has no processor for us gets any."""
    cpus = range(8)

    assert share_cpus(cpus, [1, 1], 1, TWO, [{1}, {0}]) == ["2,3,6", "0,1,4,5"]
    assert share_cpus(cpus, [1, 1, 1], 1, TWO, [{1}, {0}, {1}]) == ["2", "0,1,4,5", "3,6"]
    assert share_cpus(cpus, [1, 1], 1, TWO, [set(), {1}]) == ["0,1,4,5,2,3,6", "2,3,6"]
    assert share_cpus([0, 1, 4, 5], [1], 1, TWO, [{1}]) == ["0,1,4"]
    assert deal_near([1, 1], [0, 1], [(), ()]) == [[0], [1]]


def test_a_node_with_too_few_processors_is_no_place() -> None:
    """A control group of 30 processors on one node and two on the other, one of which the daemon
    keeps: two workers would compute on one processor. One of two ranks counts as two."""
    nodes = {0: frozenset(range(30)), 1: frozenset({30, 31})}
    low, high = (",".join(map(str, part)) for part in (range(15), range(15, 31)))

    assert share_cpus(range(32), [1, 1], 1, nodes, [{1}, {1}]) == [low, high]
    assert share_cpus(range(32), [1, 2], 0, nodes, [{0}, {1}])[1].count(",") == 1
    assert share_cpus(range(32), [2], 1, nodes, [{1}])[0].count(",") == 30
    assert share_cpus(range(32), [1], 1, nodes, [{1}]) == ["30"]
    some, all_but_one = share_cpus(range(32), [1, 2], 1, nodes, [{0}, {1}])
    assert (some.count(","), all_but_one.count(",")) == (29, 30)


def test_ranks_near_one_node_count_there() -> None:
    """Of a node's processors, an instance of two ranks has twice as many as one of one; GPUs of
    one instance on both nodes have processors of both."""
    cpus = range(8)

    assert share_cpus(cpus, [2, 1, 1], 1, TWO, [{1}, {1}, {0}]) == ["2,3", "6", "0,1,4,5"]
    assert share_cpus(cpus, [2], 1, TWO, [{0, 1}]) == ["0,1,4,5,2,3,6"]


def test_a_group_is_near_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the numbers that it names, not by its place in the list; a GPU that the kernel says no
    node of, or no driver at all, leaves its instance anywhere."""
    groups = (
        DeviceGroup(name="free", instances=2),
        DeviceGroup(name="named", gpus=(0,)),
        DeviceGroup(name="pair", tensor_parallel=2, gpus=(3, 4)),
    )
    devices = Devices(memory_bytes=Memory.read("1GiB"), kind="cuda", groups=groups)
    nodes_of = {0: 1, 1: 0, 2: None, 3: 0, 4: 1}
    facts = [
        GpuFacts(Gpu(number, "H800", 1 << 30, 1 << 30), "", (9, 0), None, None, None, (), node)
        for number, node in nodes_of.items()
    ]
    monkeypatch.setattr("appliance.serve.read_gpus", lambda: facts)

    near = nodes_of_gpus(devices, TWO)

    assert near == [{0}, set(), {1}, {0, 1}]
    ranks = [plan.ranks for plan in plan_instances(devices)]
    assert share_cpus(range(9), ranks, 1, TWO, near)[2] == "2,3,6,7"
    assert nodes_of_gpus(devices, ONE) == []

    def unknown() -> list[GpuFacts]:
        raise GpusUnknown("no driver")

    monkeypatch.setattr("appliance.serve.read_gpus", unknown)
    assert nodes_of_gpus(devices, TWO) == []
    assert "workers are not kept near their GPUs: no driver" in caplog.text


def test_workers_on_processors_have_a_node_each() -> None:
    """Two instances on two sockets do not have half of each; on one node nothing changes."""
    assert share_cpus(range(8), [1, 1], 1, TWO) == ["0,1,4", "5,2,3,6"]
    assert share_cpus(range(9), [1, 1], 1, TWO) == ["0,1,4,5", "2,3,6,7"]
    assert share_cpus([0, 1], [1], 1, ONE) == share_cpus([0, 1], [1])


def test_the_host_tier_is_spread_over_the_nodes_of_devices() -> None:
    """Over one if all devices are there, over those of processors if a device's is not known."""
    assert host_nodes(["0,1", "2,3"], TWO, [{0}, {1}]) == (0, 1)
    assert host_nodes(["2", "3"], TWO, [{1}, {1}]) == (1,)
    assert host_nodes(["0", "1"], TWO, [{1}, ()]) == (0,)
    assert host_nodes(["0,1,2"], TWO) == (0, 1)
    assert host_nodes(["0"], ONE) == ()


def test_parts_cover_the_tier_in_turns() -> None:
    """Nothing is left out, no part is small, and the kernel has few to keep."""
    size = 5 * LEAST_STRIPE_BYTES + 4096
    found = list(stripes(size, [0, 2]))
    assert [node for *_, node in found] == [0, 2, 0, 2, 0, 2]
    assert [start for start, *_ in found] == [i * LEAST_STRIPE_BYTES for i in range(6)]
    assert sum(nbytes for _, nbytes, _ in found) == size

    large = list(stripes(4 << 40, [0, 1]))
    assert len(large) <= MOST_STRIPES
    assert sum(nbytes for _, nbytes, _ in large) == 4 << 40
    assert all(start % LEAST_STRIPE_BYTES == 0 for start, *_ in large)
    assert list(stripes(size, [1])) == [(0, size, 1)]


def test_a_tier_is_placed_whole_and_stays_one_mapping() -> None:
    """Each part by one call, at addresses that are given back; the tier can be used."""
    tier = HostTier.create(3 * LEAST_STRIPE_BYTES)
    placed: list[tuple[int, int, int]] = []

    tier.spread([0, 1], lambda *part: placed.append(part))

    first = placed[0][0]
    assert [(start - first, nbytes, node) for start, nbytes, node in placed] == [
        (turn * LEAST_STRIPE_BYTES, LEAST_STRIPE_BYTES, turn % 2) for turn in range(3)
    ]
    assert first != tier.address(0, 1)
    tier.view(0, 1)[0] = 7
    tier.close()


def test_a_tier_that_cannot_be_placed_can_be_used() -> None:
    """As in a container that forbids it; the mapping that was made for it is given back."""
    tier = HostTier.create(LEAST_STRIPE_BYTES)
    gc.collect()  # what earlier tests left mapped
    before = Path("/proc/self/maps").read_text().count("appliance-host")

    def refuse(address: int, nbytes: int, node: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with pytest.raises(PermissionError):
        tier.spread([0, 1], refuse)

    assert Path("/proc/self/maps").read_text().count("appliance-host") == before
    tier.view(0, 1)[0] = 7
    tier.close()


@pytest.mark.parametrize(
    ("machine", "mbind", "set_mempolicy"), [("x86_64", 237, 238), ("aarch64", 235, 237)]
)
def test_the_kernel_is_asked_by_its_numbers(
    machine: str, mbind: int, set_mempolicy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preferred memory, never bound: nothing fails when a node is full."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    calls: list[tuple[object, ...]] = []

    def call(*arguments: int | bytes | None) -> int:
        calls.append(arguments)
        return 0

    numa.place_memory(4096, 8192, 1, call)
    prefer_node(64, call)

    assert calls == [
        (mbind, 4096, 8192, 1, struct.pack("=Q", 2), 65, 0),
        (set_mempolicy, 1, struct.pack("=QQ", 0, 1), 129),
    ]


def test_another_processor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of its calls are not known."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="unknown on riscv64"):
        prefer_node(0, lambda *_: pytest.fail("called"))


def test_with_one_node_no_call_is_made() -> None:
    """Nothing changes on most boxes."""
    before = os.sched_getaffinity(0)
    assert stay_near([0], ONE, lambda *_: pytest.fail("called")) is None
    assert stay_near([0, 2], TWO, lambda *_: pytest.fail("called")) is None
    assert os.sched_getaffinity(0) == before


def test_a_worker_stays_on_its_node(caplog: pytest.LogCaptureFixture) -> None:
    """It prefers its memory; where that is forbidden it works without, and the log says so."""
    own = min(os.sched_getaffinity(0))
    nodes = {0: frozenset({own}), 1: frozenset({999})}
    before = os.sched_getaffinity(0)
    calls: list[tuple[object, ...]] = []

    def forbid(*arguments: int | bytes | None) -> int:
        calls.append(arguments)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    try:
        assert stay_near([own], nodes, forbid) == 0
        assert os.sched_getaffinity(0) == {own}
    finally:
        os.sched_setaffinity(0, before)
    assert [arguments[1:] for arguments in calls] == [(1, struct.pack("=Q", 1), 65)]
    assert "does not prefer memory of NUMA node 0: [Errno 1] Operation not permitted" in caplog.text
    assert refusal(0, forbid) == "Operation not permitted"


@pytest.mark.parametrize(("device", "moved"), [("cpu", []), ("cuda:0", [[0, 1]])])
def test_copies_are_kept_off_processors_that_compute(
    device: str, moved: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's processors, which its workers begin on, are all of the other node: threads of a
    worker on the CPU copy there, as its own processors compute; those for a GPU go near it."""
    kept: list[list[int]] = []
    asked: list[int] = []

    def call(number: int, *arguments: int | bytes | None) -> int:
        asked.append(number)
        raise KeyboardInterrupt  # before anything is imported

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: kept.append(list(cpus)))
    monkeypatch.setattr(numa, "read_nodes", lambda: TWO)
    monkeypatch.setattr(engines, "stay_near", partial(stay_near, call=call))
    configuration = frames.Configure(1, 0, "0,1", 1, 4096, 4096, [], device=device)

    with pytest.raises(KeyboardInterrupt):
        engines.engines(configuration, HostTier.create(4096), Seat(0, 1, "0,1"))

    assert kept == moved
    assert len(asked) == 1


def test_a_daemon_starts_where_nodes_cannot_be_chosen(
    tmp_path: Path,
    fake_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a machine with two nodes, in a container that forbids mbind(2): a warning, and a host
    cache like any other."""
    fake_checkpoint()
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[devices]\nkind = "cpu"\nmemory = "1MiB"\nslab = "64KiB"\nhost_cache = "16MiB"\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 1024\n'
    )
    own = frozenset(os.sched_getaffinity(0))
    monkeypatch.setattr("appliance.serve.read_nodes", lambda: {0: own, 1: frozenset()})

    def forbid(tier: HostTier, nodes: Sequence[int]) -> None:
        assert list(nodes) == [0]
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(HostTier, "spread", forbid)

    daemon = make_daemon(load_config(file))

    assert "the host cache is not spread over NUMA nodes 0: [Errno 1] Operation" in caplog.text
    daemon.host.view(0, 1)[0] = 7
    daemon.host.close()


def test_memory_is_asked_for_where_processors_cannot_be_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the two calls may be forbidden, and the other not."""
    asked: list[int] = []

    def forbid(process: int, cpus: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def call(number: int, *arguments: int | bytes | None) -> int:
        asked.append(number)
        return 0

    monkeypatch.setattr(os, "sched_setaffinity", forbid)

    assert stay_near([0], {0: frozenset({0}), 1: frozenset({1})}, call) == 0
    assert len(asked) == 1
    assert "is not kept on processors of NUMA node 0: [Errno 1] Operation not perm" in caplog.text


REALLY = """
import ctypes
from appliance.memory.host_tier import HostTier
from appliance.platform.numa import prefer_node, read_nodes, refusal
from appliance.platform.seccomp import system_call

node = min(read_nodes(), default=0)
tier = HostTier.create(3 << 23)
other = HostTier.attach(tier.fd, tier.nbytes)
other_view = other.view(0, 1)
if refusal(node):
    for refused in (lambda: tier.spread([node, node]), lambda: prefer_node(node)):
        try:
            refused()
        except OSError:
            continue
        raise AssertionError("the doctor says that it is refused, and it is not")
    other_view[0] = 1
    print("refused")
    raise SystemExit
tier.spread([node, node])

def policy(address, flags):
    mode, mask = ctypes.c_int(-1), (ctypes.c_uint64 * 16)()
    system_call({number}, ctypes.addressof(mode), ctypes.addressof(mask), 1025, address, flags)
    return mode.value, sum(word << 64 * i for i, word in enumerate(mask))

preferred = (1, 1 << node)
for start in range(0, 3 << 23, 1 << 23):
    assert policy(other.address(start, 1), 2) == preferred, policy(other.address(start, 1), 2)
assert policy(0, 0) == (0, 0)
prefer_node(node)
assert policy(0, 0) == preferred
other.view(0, 1)[0] = 1
print("placed")
"""


def test_this_kernel_places_what_it_is_told() -> None:
    """Really, on the first node that there is: the policy is that of the file, so another mapping
    of it, as other processes have, has it, too. A kernel without NUMA, or a container, refuses:
    then all calls do, as the doctor says, and memory can be used."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    done = subprocess.run(
        [sys.executable, "-c", REALLY.replace("{number}", str(number))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.stdout, done.stderr) in (("placed\n", ""), ("refused\n", ""))
