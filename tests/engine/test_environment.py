"""What a worker process looks like before vLLM is imported, and right after."""

from __future__ import annotations

import os
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


def test_what_has_imported_the_engines_can_fork() -> None:
    """No thread of an import stays, so workers need not import vLLM themselves. How long the last
    of them may take to end is no part of this."""
    program = (
        "from appliance.forking import zygote\n"
        "from appliance.worker.engines import import_engines\n"
        f"zygote.ENDING_SECONDS = {PATIENCE_SECONDS}\n"
        "import_engines('auto')\n"
        "assert not (lasting := zygote.lasting_threads()), lasting\n"
    )
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, timeout=2 * PATIENCE_SECONDS, env=variables)
