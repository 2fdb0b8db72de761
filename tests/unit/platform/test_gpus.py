"""GPUs: what NVML tells, and what becomes of `devices` where there are some."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.config.sizing import kv_floor_slabs
from appliance.errors import ConfigError
from appliance.platform.gpus import (
    Gpu,
    GpuFacts,
    GpusUnknown,
    Link,
    driver_cuda_version,
    driver_version,
    list_gpus,
    read_gpus,
)
from tests.unit.doubles.pretend_nvml import install

GIB = 1 << 30

CONFIG = """\
[devices]
kind = "{kind}"
memory = "{memory}"
slab = "2MiB"
host_cache = "64MiB"
runtime = "1GiB"
instances = {instances}
{more}
[[model]]
name = "tiny"
path = "tiny"
max_context = 1024
"""


@pytest.fixture
def read(tmp_path: Path, fake_checkpoint: Callable[..., Path]) -> Callable[..., Config]:
    """A configuration with these devices, as the daemon reads it."""
    fake_checkpoint()

    def read(
        kind: str, memory: str = "90%", instances: int = 1, more: str = "", *, now: bool = False
    ) -> Config:
        file = tmp_path / "appliance.toml"
        file.write_text(
            CONFIG.format(kind=kind, memory=memory, instances=instances, more=more),
            encoding="utf-8",
        )
        return load_config(file, now=now)

    return read


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number, name and memory of each, and the library is closed again."""
    nvml = install(monkeypatch, [8 * GIB, 16 * GIB])

    assert list_gpus() == [
        Gpu(0, "Pretend 0", 8 * GIB, 6 * GIB),
        Gpu(1, "Pretend 1", 16 * GIB, 12 * GIB),
    ]
    assert driver_version() == "580.1"
    assert nvml.open == 0


def test_gpus_are_read_as_they_are_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Link, users, persistence and NUMA node of each; what is not told is None."""
    nvml = install(monkeypatch, [8 * GIB, 16 * GIB])
    nvml.users[1] = [42]
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    (tmp_path / "0000:3c:00.0").mkdir()
    (tmp_path / "0000:3c:00.0" / "numa_node").write_text("-1\n")

    first, second = read_gpus(tmp_path)

    assert first == GpuFacts(
        gpu=Gpu(0, "Pretend 0", 8 * GIB, 6 * GIB),
        bus="00000000:3B:00.0",
        capability=(9, 0),
        link=Link(1, 16),
        most_link=Link(5, 16),
        persistent=True,
        users=(),
        node=1,
        uuid="GPU-0",
    )
    assert (second.users, second.node) == ((42,), None)
    nvml.lacking |= {"link", "persistence", "users"}
    untold = read_gpus(tmp_path / "none")[1]
    assert (untold.link, untold.persistent, untold.users, untold.node) == (None, None, (), None)
    assert driver_cuda_version() == (13, 0)
    assert nvml.open == 0


def test_a_driver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own words, and where to look."""
    install(monkeypatch, [], broken=True)

    with pytest.raises(GpusUnknown, match="Driver Not Loaded; check the driver with `nvidia-smi`"):
        list_gpus()


def test_a_machine_without_the_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bindings are optional, and only asked for where GPUs are wanted."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.raises(GpusUnknown, match='install the extra "gpu"'):
        list_gpus()


@pytest.mark.parametrize("kind", ["cuda", "auto"])
def test_a_share_is_of_the_smallest_gpu_in_use(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Config], kind: str
) -> None:
    """What a share is of is known when the file has been read; runtime memory is taken from it."""
    install(monkeypatch, [16 * GIB, 8 * GIB, 4 * GIB])

    devices = read(kind, "50%", instances=2).devices

    assert devices.kind == "cuda"
    assert devices.memory_bytes == 4 * GIB
    assert devices.runtime_slabs == GIB // (2 << 20)
    assert devices.slabs == 3 * GIB // (2 << 20)


def test_auto_takes_of_a_gpu_what_is_free(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Config]
) -> None:
    """Of the GPU with the least of it, when a daemon starts; else a share of all that it has."""
    install(monkeypatch, [16 * GIB, 8 * GIB])

    idle, now = (read("cuda", "auto", 2, now=now).devices for now in (False, True))

    assert idle.memory_bytes == int(0.9 * 8 * GIB) // (2 << 20) * (2 << 20)
    assert now.memory_bytes == int(0.9 * 6 * GIB) // (2 << 20) * (2 << 20)


def test_auto_is_the_cpu_where_there_are_no_gpus(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Config]
) -> None:
    """Whatever the reason; and the CPU needs no runtime memory of ours."""
    install(monkeypatch, [], broken=True)

    devices = read("auto", "64MiB").devices

    assert (devices.kind, devices.runtime_slabs, devices.slabs) == ("cpu", 0, 32)


def test_all_layers_of_a_block_share_a_slab_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Config], tmp_path: Path
) -> None:
    """One block is one extent there, so the least KV that can be kept is smaller, not larger."""
    install(monkeypatch, [16 * GIB])
    entries = [read_checkpoint("tiny", tmp_path / "tiny", "auto")]

    slabs = kv_floor_slabs(read("cuda"), entries)

    assert 0 < slabs <= kv_floor_slabs(read("cpu", "64MiB"), entries)


@pytest.mark.parametrize(
    ("sizes", "devices", "key", "wrong"),
    [
        ([], {"kind": "cuda"}, "devices.kind", "no NVIDIA GPU"),
        ([8 * GIB], {"kind": "cuda", "instances": 2}, "devices.instances", "2 instances have 1"),
        ([8 * GIB], {"kind": "cuda", "more": "tensor_parallel = 2"},
         "devices.tensor_parallel", "an instance of 2 ranks has 1 GPUs"),
        ([8 * GIB] * 4, {"kind": "cuda", "instances": 2, "more": "tensor_parallel = 4"},
         "devices.instances", "2 instances of 8 ranks in all have 4 GPUs"),
        ([8 * GIB], {"kind": "cuda", "memory": "9GiB"}, "devices.memory", "more than the 8GiB"),
        ([8 * GIB], {"kind": "cuda", "memory": "10%"}, "devices.memory", "after devices.runtime"),
        ([8 * GIB], {"kind": "cpu"}, "devices.memory", "a share is of a GPU's memory"),
    ],
)  # fmt: skip
def test_devices_that_cannot_be_had_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[..., Config],
    sizes: list[int],
    devices: dict[str, str],
    key: str,
    wrong: str,
) -> None:
    """One problem, with its key and the remedy."""
    install(monkeypatch, sizes)

    with pytest.raises(ConfigError) as caught:
        read(**devices)

    (problem,) = caught.value.problems
    assert problem.key == key
    assert wrong in problem.wrong
    assert problem.remedy
