"""The pretend NCCL and the devices of ranks: what two ranks may not do is seen."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

FLOAT, SUM = 7, 0
COUNT = 16
REFUSED, UNUSABLE = 4, 5
DEVICE_ERROR = 1


class Id(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 128),)


class Ranks:
    """A communicator of two ranks, and memory that both may use."""

    def __init__(self, folder: Path) -> None:
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.rt = ctypes.CDLL("libcudart.so.13")
        self.audit = folder / "faults"
        self.made = folder / "communicators"
        self.memory = ctypes.c_void_p()
        assert not self.rt.cudaMalloc(ctypes.byref(self.memory), ctypes.c_size_t(4096))
        self.nccl.ncclCommInitRank.argtypes = (
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, Id, ctypes.c_int,
        )  # fmt: skip
        self.id = Id()
        assert not self.nccl.ncclGetUniqueId(ctypes.byref(self.id))
        self.ranks = [ctypes.c_void_p(), ctypes.c_void_p()]
        threads = [threading.Thread(target=self.join, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def join(self, rank: int) -> int:
        """Returns when both have come."""
        made = ctypes.byref(self.ranks[rank])
        return int(self.nccl.ncclCommInitRank(made, 2, self.id, rank))

    def reduce(self, rank: int, count: int = COUNT) -> int:
        size = ctypes.c_size_t(count)
        at = self.memory
        return int(self.nccl.ncclAllReduce(at, at, size, FLOAT, SUM, self.ranks[rank], None))

    def gather(self, rank: int) -> int:
        size, at = ctypes.c_size_t(COUNT), self.memory
        return int(self.nccl.ncclAllGather(at, at, size, FLOAT, self.ranks[rank], None))

    def faults(self) -> list[str]:
        if not self.audit.exists():
            return []
        return [line.split("\t")[1] for line in self.audit.read_text().splitlines()]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    if os.environ.get("PRETEND") != "1":
        pytest.fail("this is for the pretend driver: run `make gpu-dry`")
    monkeypatch.setenv("PRETEND_AUDIT", str(tmp_path / "faults"))
    monkeypatch.setenv("PRETEND_COMMUNICATORS", str(tmp_path / "communicators"))
    return Ranks(tmp_path)


def test_ranks_that_ask_for_the_same(ranks: Ranks) -> None:
    """One may be ahead. Nothing of the communicator is left in shared memory."""
    for rank in (0, 1):
        assert [ranks.reduce(rank), ranks.gather(rank), ranks.reduce(rank, 8)] == [0, 0, 0]
        assert not ranks.nccl.ncclCommDestroy(ranks.ranks[rank])

    assert ranks.faults() == []
    lines = [line.split("\t") for line in ranks.made.read_text().splitlines()]
    assert sorted(line[2:] for line in lines) == [["0", "2"], ["1", "2"]]
    assert not Path(ranks.id.name.decode()).exists()


@pytest.mark.parametrize("other", [Ranks.gather, lambda ranks, rank: ranks.reduce(rank, 8)])
def test_ranks_that_ask_for_different_things(
    ranks: Ranks, other: Callable[[Ranks, int], int]
) -> None:
    assert not ranks.reduce(0)

    assert other(ranks, 1) == UNUSABLE
    assert ranks.faults() == ["collectives_differ"]


def test_a_communicator_ends_once_and_is_not_used_then(ranks: Ranks) -> None:
    assert not ranks.nccl.ncclCommDestroy(ranks.ranks[0])

    assert ranks.reduce(0) == REFUSED
    assert ranks.nccl.ncclCommAbort(ranks.ranks[0]) == REFUSED
    assert ranks.faults() == ["used_after_free", "freed_twice"]


def test_memory_that_is_not_there(ranks: Ranks) -> None:
    """Neither past the end of what was allocated, nor once it is freed."""
    assert ranks.reduce(0, 1025) == DEVICE_ERROR
    assert not ranks.rt.cudaFree(ranks.memory)
    assert ranks.reduce(0) == DEVICE_ERROR

    assert ranks.faults() == ["illegal_address", "illegal_address"]


def test_memory_is_not_registered(ranks: Ranks) -> None:
    size, handle = ctypes.c_size_t(4096), ctypes.c_void_p()
    wanted = (ranks.ranks[0], ranks.memory, size, ctypes.byref(handle))

    assert ranks.nccl.ncclCommRegister(*wanted) == UNUSABLE
    assert ranks.faults() == ["registered_slabs"]


ASK = """
import ctypes
nvml, cu = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL("libcuda.so.1")
there, mine, device, index = ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint()
assert not nvml.nvmlDeviceGetCount_v2(ctypes.byref(there))
assert not cu.cuDeviceGetCount(ctypes.byref(mine))
last = ctypes.c_uint(there.value - 1)
assert not nvml.nvmlDeviceGetHandleByIndex_v2(last, ctypes.byref(device))
name = ctypes.create_string_buffer(64)
assert not nvml.nvmlDeviceGetUUID(device, name, 64)
assert not nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device))
assert not nvml.nvmlDeviceGetIndex(device, ctypes.byref(index))
print(there.value, mine.value, index.value)
"""


@pytest.mark.parametrize(("visible", "mine"), [("7", 1), ("8", 0), ("", 0)])
def test_a_process_has_the_device_that_it_may_see(visible: str, mine: int) -> None:
    """NVML has them all, each with a name of its own."""
    environment = os.environ | {"PRETEND_DEVICES": "8", "CUDA_VISIBLE_DEVICES": visible}
    asked = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )

    assert asked.stdout.split() == ["8", str(mine), "7"]
