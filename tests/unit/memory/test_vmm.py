"""The host's virtual memory and the host tier: real mappings, real errors."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.memory import host_tier, mapping
from appliance.memory.host_tier import HostTier
from appliance.memory.vmm_host import HostVmm
from appliance.platform import machine_memory
from appliance.platform.machine_memory import MachineMemory
from tests.patience import PATIENCE_SECONDS

PAGE = mmap.PAGESIZE


def test_slab_keeps_its_bytes_under_another_address() -> None:
    """A slab is memory; an address is only where it shows."""
    vmm = HostVmm(2, PAGE)
    base = vmm.reserve(3 * PAGE)
    vmm.map(base, 1)
    mapping.view(base, PAGE)[:5] = b"hello"
    vmm.unmap(base)
    vmm.map(base + 2 * PAGE, 1)

    assert bytes(mapping.view(base + 2 * PAGE, 5)) == b"hello"
    vmm.release(base, 3 * PAGE)
    vmm.close()


def test_unmapped_addresses_fault() -> None:
    """Reserved addresses without a slab end the process that touches them."""
    program = (
        "from appliance.memory import mapping\n"
        "from appliance.memory.vmm_host import HostVmm\n"
        "import mmap\n"
        "vmm = HostVmm(1, mmap.PAGESIZE)\n"
        "base = vmm.reserve(mmap.PAGESIZE)\n"
        "vmm.map(base, 0); mapping.view(base, 1)[0] = 1; vmm.unmap(base)\n"
        "print('unmapped', flush=True); mapping.view(base, 1)[0]\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert ended.stdout == "unmapped\n"
    assert ended.returncode == -11


def test_pool_cannot_grow() -> None:
    """The pool is sealed at the size it was declared with."""
    vmm = HostVmm(2, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(vmm.fd, 3 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(vmm.fd, PAGE)
    vmm.close()
    vmm.close()


@pytest.mark.parametrize(("slabs", "size"), [(0, PAGE), (1, PAGE + 1), (1, 0)])
def test_impossible_sizes(slabs: int, size: int) -> None:
    """Sizes that cannot be mapped are refused with the reason."""
    with pytest.raises(ValueError, match=r"slab"):
        HostVmm(slabs, size)


def test_errors_carry_their_name() -> None:
    """A refused mapping says which errno it was."""
    with pytest.raises(OSError, match="EINVAL from mmap of 0 bytes"):
        mapping.reserve(0)
    vmm = HostVmm(1, PAGE)
    with pytest.raises(ValueError, match="slab 1 is not one of 1"):
        vmm.map(0, 1)
    vmm.close()


def test_host_tier_is_shared_through_its_descriptor() -> None:
    """What one process writes is what another one reads at the same offset."""
    tier = HostTier.create(4 * PAGE)
    other = HostTier.attach(os.dup(tier.fd), 4 * PAGE)
    tier.view(PAGE + 3, 4)[:] = b"abcd"

    assert bytes(other.view(PAGE + 3, 4)) == b"abcd"
    assert other.address(PAGE, 1) - other.address(0, 1) == PAGE
    other.close()
    tier.close()
    tier.close()


def test_host_tier_bounds() -> None:
    """Nothing outside of the tier has an address."""
    tier = HostTier.create(2 * PAGE)
    tier.address(PAGE, PAGE)
    for offset, nbytes in ((-1, 1), (PAGE, PAGE + 1), (2 * PAGE, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            tier.address(offset, nbytes)
    with pytest.raises(ValueError, match=r"not \d+"):
        HostTier.attach(tier.fd, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(tier.fd, PAGE)
    tier.close()
    with pytest.raises(ValueError, match="0 bytes"):
        HostTier.create(0)


HUGE = mapping.HUGE_BYTES


def huge_bytes(address: int) -> int:
    """How many bytes of the mapping at this address lie in huge pages, as the kernel counts."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            mapped = next(rest for rest in lines if rest.startswith("ShmemPmdMapped:"))
            return int(mapped.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_huge_slabs_are_huge_wherever_they_are_mapped() -> None:
    """A pool says it has huge pages if, and only if, a mapped slab is one."""
    vmm = HostVmm(4, HUGE)
    base = vmm.reserve(3 * HUGE)
    assert base % HUGE == 0
    vmm.map(base + HUGE, 2, 2)
    assert huge_bytes(base + HUGE) == (2 * HUGE if vmm.huge else 0)

    mapping.view(base + HUGE, 1)[0] = 1
    vmm.unmap(base + HUGE, 2)
    vmm.map(base, 2)
    assert mapping.view(base, 1)[0] == 1
    vmm.release(base, 3 * HUGE)
    vmm.close()


@pytest.mark.parametrize("size", [PAGE, HUGE + PAGE])
def test_slabs_that_are_not_whole_huge_pages_are_small_ones(size: int) -> None:
    """Without huge pages everything works as well, only slower."""
    vmm = HostVmm(2, size)
    base = vmm.reserve(2 * size)
    vmm.map(base, 0, 2)
    mapping.view(base, 2 * size)[-1] = 9

    assert not vmm.huge
    vmm.unmap(base, 2)
    vmm.map(base, 1)
    assert mapping.view(base, size)[-1] == 9
    vmm.release(base, 2 * size)
    vmm.close()


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused madvise leaves small pages."""
    monkeypatch.setattr(mapping, "_MADV_COLLAPSE", 12345)
    vmm = HostVmm(2, HUGE)
    base = vmm.reserve(HUGE)
    vmm.map(base, 1)
    mapping.view(base, HUGE)[-1] = 9

    assert not vmm.huge
    assert not mapping.make_huge(base + PAGE, HUGE)
    vmm.release(base, HUGE)
    vmm.close()


def test_slabs_in_a_row_are_mapped_and_unmapped_at_once() -> None:
    """A run is one call; it shows the slabs in order, and may be taken away in parts."""
    vmm = HostVmm(4, PAGE)
    base = vmm.reserve(8 * PAGE)
    vmm.map(base, 0, 4)
    for slot in range(4):
        mapping.view(base + slot * PAGE, 1)[0] = slot
    vmm.unmap(base + PAGE, 3)
    vmm.map(base + 5 * PAGE, 2, 2)

    seen = [mapping.view(base + slot * PAGE, 1)[0] for slot in (0, 5, 6)]
    assert seen == [0, 2, 3]
    for slab, count in ((3, 2), (0, 0), (-1, 1)):
        with pytest.raises(ValueError, match="is not one of 4"):
            vmm.map(base, slab, count)
    vmm.release(base, 8 * PAGE)
    vmm.close()


def test_reserved_addresses_are_aligned_and_all_there() -> None:
    """What is cut off to align a range is given back, and the range itself is not."""
    for nbytes in (PAGE, HUGE, 3 * HUGE + PAGE):
        address = mapping.reserve(nbytes, HUGE)
        assert address % HUGE == 0
        mapping.vacate(address, nbytes)
        mapping.release(address, nbytes)


def test_host_tier_is_filled_and_locked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content stays, every byte is in memory afterwards, and progress counts up to all of it."""
    monkeypatch.setattr(host_tier, "LOCK_BYTES", 2 * HUGE)
    tier = HostTier.create(5 * HUGE + PAGE)
    tier.view(3 * HUGE, 3)[:] = b"abc"
    heard: list[int] = []

    assert tier.lock(heard.append) == tier.locked
    assert heard == [2 * HUGE, 4 * HUGE, 5 * HUGE + PAGE]
    assert os.fstat(tier.fd).st_blocks * 512 == tier.nbytes
    assert bytes(tier.view(3 * HUGE, 3)) == b"abc"
    assert (tier.unlocked_because == "") == tier.locked
    with pytest.raises(PermissionError):
        os.ftruncate(tier.fd, PAGE)
    tier.close()
    assert tier.lock() is False
    assert tier.unlocked_because == "it was closed meanwhile"


def test_no_more_is_brought_in_than_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end a process instead. A pool is refused whole; a host tier keeps what came
    in before, and goes on without page locks."""
    left = iter([3 * PAGE, 3 * PAGE, 2 * PAGE, PAGE])
    monkeypatch.setattr(machine_memory, "read_memory", lambda: MachineMemory(9 * PAGE, next(left)))
    monkeypatch.setattr(host_tier, "LOCK_BYTES", 2 * PAGE)
    with pytest.raises(OSError, match="16KiB of memory are needed, and 12KiB are available"):
        HostVmm(4, PAGE)
    tier = HostTier.create(6 * PAGE)
    tier.view(0, 6 * PAGE)

    assert tier.lock() is False
    assert os.fstat(tier.fd).st_blocks * 512 == 4 * PAGE
    assert tier.unlocked_because == (
        "8KiB of memory are needed, and 4KiB are available; end what else uses memory, or make "
        "devices.host_cache smaller"
    )
    tier.close()


def test_a_limit_that_forbids_locking_is_reported_with_its_remedy() -> None:
    """The pages are there all the same."""
    program = (
        "import ctypes, os, resource\n"
        "from appliance.memory.host_tier import HostTier\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)\n"  # gives CAP_IPC_LOCK up
        "tier = HostTier.create(4 << 20)\n"
        "print(tier.lock(), os.fstat(tier.fd).st_blocks * 512, tier.unlocked_because)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )

    assert ended.stdout.startswith(f"False {4 << 20} ")
    assert "EPERM from mlock of 4194304 bytes" in ended.stdout or "ENOMEM" in ended.stdout
    assert "LimitMEMLOCK" in ended.stdout
