"""Every kernel compiles for the GPUs we name, with the compiler that is used at run time."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from appliance.kernels import loader

ARCHITECTURES = ["sm_80", "sm_86", "sm_90"]
KERNELS = {
    loader.BLOCKS: ["gather_blocks", "scatter_blocks"],
    loader.FINGERPRINT: ["fingerprint"],
}


def compiled(text: str, architecture: str) -> tuple[bool, str, bytes]:
    """Whether it compiles, what the compiler says, and the machine code."""
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [f"-arch={architecture}".encode(), *(option.encode() for option in loader.OPTIONS)]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    binary = bytearray()
    if code == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        binary = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(program)
    return not int(code), log.rstrip(b"\0").decode(), bytes(binary)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str, architecture: str) -> None:
    """Without a warning, to a binary that holds the kernels by the names they are called by."""
    good, log, binary = compiled(loader.source(name), architecture)

    assert (good, log.strip()) == (True, "")
    assert binary[:4] == b"\x7fELF"
    for kernel in KERNELS[name]:
        assert f".text.{kernel}\0".encode() in binary


def test_what_does_not_compile_is_seen() -> None:
    """A mistake in a kernel fails here, not on a GPU."""
    good, log, _ = compiled(loader.source(loader.BLOCKS) + "\nint x = y;", "sm_90")

    assert not good
    assert '"y" is undefined' in log


def test_no_kernel_is_forgotten() -> None:
    """Every kernel file of the package is compiled above."""
    files = {path.name for path in Path(loader.__file__).parent.glob("*.cu")}

    assert files == set(KERNELS)
