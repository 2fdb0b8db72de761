"""What a worker process looks like before vLLM is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from appliance.engines.vllm import prepare_environment
from tests.patience import PATIENCE_SECONDS


def test_the_package_loads_neither_torch_nor_vllm() -> None:
    """A worker places its threads before either is imported."""
    program = (
        "import os, sys\n"
        "from appliance.engines.vllm import prepare_environment\n"
        "first = min(os.sched_getaffinity(0))\n"
        "prepare_environment(str(first))\n"
        "assert os.sched_getaffinity(0) == {first}\n"
        "assert os.environ['OMP_NUM_THREADS'] == '1'\n"
        "assert os.environ['VLLM_NO_USAGE_STATS'] == os.environ['HF_HUB_OFFLINE'] == '1'\n"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)


def test_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once torch has its threads, placing them would do nothing, silently."""
    monkeypatch.setitem(sys.modules, "torch", object())
    with pytest.raises(RuntimeError, match="torch is imported already"):
        prepare_environment("auto")
