"""Every kernel compiles for the GPUs we name, with the compiler that is used at run time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.kernels import loader

ARCHITECTURES = ["sm_80", "sm_86", "sm_90"]
COMPILER = Path(__file__).parent / "kernel_compiler.py"
KERNELS = {
    loader.BLOCKS: ["gather_blocks", "scatter_blocks"],
    loader.FINGERPRINT: ["fingerprint"],
    loader.EXP7: ["decode_exp7"],
}


def compiled(text: str, architecture: str) -> tuple[bool, str, bytes]:
    """Whether it compiles, what the compiler says, and the machine code."""
    done = subprocess.run(
        [sys.executable, str(COMPILER), architecture, *loader.OPTIONS],
        input=text.encode(),
        capture_output=True,
        check=False,
    )
    return done.returncode == 0, done.stderr.decode(), done.stdout


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
