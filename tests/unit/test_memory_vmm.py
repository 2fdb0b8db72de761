"""The host's virtual memory and the host tier: real mappings, real errors."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from appliance.memory import mapping
from appliance.memory.hosttier import HostTier
from appliance.memory.vmm_host import HostVmm

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
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
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
