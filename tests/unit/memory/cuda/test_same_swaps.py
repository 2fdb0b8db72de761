"""Swaps over host memory and over CUDA's driver (a stand-in), and what `gpu_switch.py` does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.kernels import reference
from appliance.memory import mapping
from tests.devices.swapping import SwapConformance
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.device_backends import bench

__all__ = ["bench"]


def of_memory(address: int, nbytes: int) -> int:
    """The host can read both backends' memory."""
    return reference.fingerprint(torch.frombuffer(mapping.view(address, nbytes), dtype=torch.uint8))


class TestSwaps(SwapConformance):
    @pytest.fixture
    def fingerprint(self) -> Callable[[int, int], int]:
        return of_memory

    @pytest.fixture
    def host_fingerprint(self) -> Callable[[int, int], int]:
        return of_memory


def test_the_benchmark_of_switches_keeps_its_books() -> None:
    """`gpu_switch.py --smoke` goes through all of its parts; what it prints is no measurement."""
    script = Path(__file__).parents[4] / "benchmarks" / "gpu_switch.py"
    ended = subprocess.run(
        [sys.executable, str(script), "--smoke"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    for part in ("ceilings", "small", "large", "KV of 1B", "overlap"):
        assert f"{part}: {{" in ended.stdout
