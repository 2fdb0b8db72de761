"""Two processes on one GPU: events handed over, and one that dies in the middle of a copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from appliance.memory.host_tier import HostTier
from tests.gpu.conftest import DEVICE, SLAB

ROOT = Path(__file__).parents[2]
TIER = 64 * SLAB

COMMON = """
import sys, time
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.transfers import Transfer, TransferKind
from appliance.memory.cuda.vmm import CudaVmm
SLAB, TIER = 2 << 20, 128 << 20
tier = HostTier.attach(int(sys.argv[1]), TIER)
vmm = CudaVmm(int(sys.argv[2]), 64, SLAB)
vmm.register(tier.address(0, 1), TIER).wait()
base = vmm.reserve(64 * SLAB)
vmm.map(base, 0, 64)
stream = vmm.stream("other")
def run(kind, copies, nbytes):
    transfer = Transfer(kind, "m", nbytes, time.monotonic())
    stream.run(transfer, copies)
    return transfer
"""

PREFILL = (
    COMMON
    + """
import cupy
spin = cupy.RawKernel(r'''extern "C" __global__ void spin(long long n) {
  long long a, b; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(a));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b)); } while (b - a < n); }''', "spin")
tier.view(SLAB, SLAB)[:] = b"\\x06" * SLAB
run(TransferKind.WEIGHTS, [Copy(base, tier.address(SLAB, SLAB), SLAB)], SLAB).wait()
spin((1,), (1,), (cupy.int64(1),))
cupy.cuda.Device().synchronize()
with cupy.cuda.ExternalStream(stream.handle):
    spin((1,), (1,), (cupy.int64(1_000_000_000),))
out = run(TransferKind.WEIGHTS, [Copy(tier.address(0, SLAB), base, SLAB)], SLAB)
event = stream.export(out)
print(event.handle.hex(), out.done, flush=True)
sys.stdin.readline()
out.wait()
event.close()
stream.close()
vmm.release(base, 64 * SLAB)
vmm.close()
"""
)

COPY_FOR_EVER = (
    COMMON
    + """
def copies():
    while True:
        yield Copy(base, tier.address(0, 32 * SLAB), 32 * SLAB)
transfer = run(TransferKind.WEIGHTS, copies(), 1 << 60)
transfer.wait(1 << 30)
print("copying", flush=True)
transfer.wait()
"""
)


def start(program: str, tier: HostTier) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(tier.fd), str(DEVICE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[tier.fd],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_decode_waits_for_another_process_s_prefill() -> None:
    """A stream comes after a transfer of another process, by its event alone."""
    from appliance.memory.cuda.vmm import CudaVmm
    from appliance.memory.streams import Copy
    from appliance.memory.transfers import Transfer, TransferKind

    tier = HostTier.create(TIER)
    vmm = CudaVmm(DEVICE, 1, SLAB)
    vmm.register(tier.address(0, 1), TIER).wait()
    base = vmm.reserve(SLAB)
    vmm.map(base, 0)
    stream = vmm.stream("decode")
    child = start(PREFILL, tier)
    assert child.stdout is not None
    handle, done = child.stdout.readline().split()
    stream.await_event(bytes.fromhex(handle))
    back = Transfer(TransferKind.KV_IN, "m", SLAB, time.monotonic())
    stream.run(back, [Copy(base, tier.address(0, SLAB), SLAB)])
    back.wait()
    vmm.copy(tier.address(2 * SLAB, SLAB), base, SLAB)

    assert done == "False"  # there was something to wait for
    assert set(tier.view(2 * SLAB, SLAB)) == {6}
    child.communicate("\n", timeout=60)
    assert child.returncode == 0
    stream.close()
    vmm.release(base, SLAB)
    vmm.close()
    tier.close()


def test_a_worker_killed_in_the_middle_of_a_copy() -> None:
    """Its memory on the device is free again, and the host tier is whole and usable."""
    tier = HostTier.create(TIER)
    data = bytes(range(256)) * (TIER // 256)
    tier.view(0, TIER)[:] = data
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info(DEVICE)
    child = start(COPY_FOR_EVER, tier)
    assert child.stdout is not None
    assert child.stdout.readline() == "copying\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while torch.cuda.mem_get_info(DEVICE)[0] < free - (64 << 20) and time.monotonic() < deadline:
        time.sleep(0.1)  # the driver cleans up after a process in its own time

    assert torch.cuda.mem_get_info(DEVICE)[0] >= free - (64 << 20)
    assert bytes(tier.view(0, TIER)) == data
    again = start(PREFILL, tier)
    again.communicate("\n", timeout=120)
    assert again.returncode == 0
    tier.close()
