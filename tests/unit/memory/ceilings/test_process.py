"""The process that measures: what it is given, what it answers, and that it cannot hang us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.errors import CeilingsError
from appliance.memory.ceilings import process
from appliance.memory.ceilings.process import Task, ask, measure, process_environment
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.pretend_nvml import install

MIB = 1 << 20
TASK = Task(nbytes=8 * MIB, slab_bytes=2 * MIB, seconds=0.01)


def test_a_process_measures_this_machine(tmp_path: Path) -> None:
    """Memory, and the disk of a model."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * MIB)
    task = Task(nbytes=8 * MIB, slab_bytes=2 * MIB, seconds=0.01, folders=(str(tmp_path),))

    found = ask(task, os.environ, PATIENCE_SECONDS)

    assert found.memory is not None
    assert found.memory.copied_bytes == 8 * MIB
    assert found.disks[str(tmp_path)].read_bytes == MIB
    assert found.disks[str(tmp_path)].read > 0


def test_a_process_sees_one_gpu_and_no_secrets() -> None:
    """By NVML's number, as a worker does."""
    task = Task(nbytes=1, slab_bytes=1, seconds=1.0, gpu=3)

    found = process_environment(task, {"HF_TOKEN": "secret", "PATH": "/bin"})

    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found["PATH"] == "/bin"
    assert "HF_TOKEN" not in found
    assert "CUDA_VISIBLE_DEVICES" not in process_environment(TASK, {})


def test_what_the_system_refuses_is_the_answer() -> None:
    """Not a process that ends with a traceback."""
    refused = Task(nbytes=1 << 62, slab_bytes=2 * MIB, seconds=0.01)

    assert measure(refused).error
    with pytest.raises(CeilingsError, match=r"EFBIG|ENOMEM|EINVAL|File too large|memory"):
        ask(refused, os.environ, PATIENCE_SECONDS)


def test_a_process_that_never_answers_is_ended() -> None:
    """After the time that it has, and some more."""
    with pytest.raises(CeilingsError, match="no answer in"):
        ask(Task(nbytes=8 * MIB, slab_bytes=2 * MIB, seconds=0.0), os.environ, 0.001)


def test_a_process_that_breaks_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line that it wrote."""
    monkeypatch.setattr(process, "MODULE", "appliance.no_such_module")

    with pytest.raises(CeilingsError, match=r"the process ended with 1: .*no_such_module"):
        ask(TASK, os.environ, PATIENCE_SECONDS)


def test_the_link_is_that_during_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVML tells then; a driver that does not tell leaves it open."""
    from appliance.memory.cuda import ceilings

    nvml = install(monkeypatch, [8 << 30])
    host = measure(TASK).memory

    def pretend(*arguments: object) -> object:
        look = arguments[-1]
        assert callable(look)
        look()
        return host

    monkeypatch.setattr(ceilings, "measure_gpu", pretend)
    task = Task(nbytes=8 * MIB, slab_bytes=2 * MIB, seconds=0.01, gpu=0, node=0)

    assert measure(task).link == (1, 16)
    nvml.lacking.add("link")
    assert measure(task).link is None
    nvml.broken = True
    assert measure(task).link is None
