"""The edge to CUDA's driver: errors with names, a context in every thread, a box without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from appliance.memory.cuda.driver import CudaContext, CudaError, call
from tests.patience import PATIENCE_SECONDS
from tests.stand_in.driver import CudaCode, StandIn
from tests.unit.doubles.device_backends import driver

__all__ = ["driver"]


def test_an_error_begins_with_its_name(driver: StandIn) -> None:
    """The text says which error, from which call, of what, and the driver's own words."""
    context = CudaContext(0)
    context.use()
    driver.fail("cuStreamSynchronize", 1, CudaCode.ILLEGAL_ADDRESS)
    with pytest.raises(CudaError) as caught:
        call("cuStreamSynchronize", 0, of="a copy of 8 bytes")
    driver.reset()
    context.close()

    assert str(caught.value) == (
        "CUDA_ERROR_ILLEGAL_ADDRESS from cuStreamSynchronize of a copy of 8 bytes: "
        "an illegal memory access was encountered"
    )
    assert isinstance(caught.value, OSError)
    assert (caught.value.name, caught.value.code) == ("CUDA_ERROR_ILLEGAL_ADDRESS", 700)


def test_no_such_device(driver: StandIn) -> None:
    """A device that is not there is refused by its number."""
    with pytest.raises(CudaError, match=r"^CUDA_ERROR_INVALID_DEVICE from cuDeviceGet of device 3"):
        CudaContext(3)


def test_every_thread_uses_the_context_itself(driver: StandIn) -> None:
    """A context that one thread uses is not yet the one of another."""
    context = CudaContext(0)
    errors: list[CudaError] = []

    def without() -> None:
        try:
            call("cuStreamSynchronize", 0)
        except CudaError as error:
            errors.append(error)

    def inside() -> None:
        context.use()
        call("cuStreamSynchronize", 0)

    context.use()
    for work in (without, inside):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    context.close()
    context.close()

    assert [error.name for error in errors] == ["CUDA_ERROR_INVALID_CONTEXT"]


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    """Without libcuda the error says what is missing, and importing needs none of it."""
    (tmp_path / "libcuda.so.1").write_text("in the place of one that may be installed")
    program = (
        "import sys\n"
        "import appliance.memory.cuda.vmm as vmm\n"
        "print('cuda' in sys.modules)\n"
        "try:\n    vmm.CudaVmm(0, 1, 1 << 21)\n"
        "except OSError as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
    )

    imported, told = ended.stdout.splitlines()
    assert imported == "False"
    assert told.startswith("the CUDA driver cannot be used: ")
    assert 'install NVIDIA\'s driver (libcuda.so.1), and install the extra "gpu"' in told
