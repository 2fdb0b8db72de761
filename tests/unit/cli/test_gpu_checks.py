"""What the doctor finds about GPUs, their driver and the packages for it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from appliance.cli import doctor
from appliance.cli.doctor import DaemonProbe, SystemFacts, engine_remedy, examine
from appliance.cli.findings import Finding, Level
from appliance.cli.gpu_checks import (
    EXTRAS,
    LEAST_BINDINGS,
    CudaPackages,
    check_cuda,
    check_gpu,
    check_gpus,
    check_link,
    check_nodes,
    check_persistence,
    check_users,
    fitting_extra,
)
from appliance.config.loader import load_config
from appliance.memory.cuda import driver
from appliance.memory.cuda.abilities import Abilities, read_abilities
from appliance.platform.gpus import Gpu, GpuFacts, Link
from tests.unit.doubles.pretend_nvml import install

GIB = 1 << 30
ABLE = Abilities(maps_memory=True, shares_events=True)
GPU = GpuFacts(
    gpu=Gpu(0, "H800", 80 * GIB, 80 * GIB),
    bus="00000000:3B:00.0",
    capability=(9, 0),
    link=Link(5, 16),
    most_link=Link(5, 16),
    persistent=True,
    users=(),
    node=0,
)
PACKAGES = CudaPackages("13.4.4", (("cupy-cuda13x", "14.2.0"),))
EXTRAS_OF_FILE = tomllib.loads(Path("pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize(
    ("cuda", "extra"),
    [((14, 0), "gpu"), ((13, 0), "gpu"), ((12, 9), "gpu-cuda12"), ((12, 0), "gpu-cuda12"),
     ((11, 8), None)],
)  # fmt: skip
def test_a_driver_has_a_fitting_extra(cuda: tuple[int, int], extra: str | None) -> None:
    """The newest generation that the driver runs; the name is one of our own package."""
    assert fitting_extra(cuda) == extra
    assert extra is None or extra in EXTRAS_OF_FILE


@pytest.mark.parametrize(
    ("cuda", "packages", "level", "words"),
    [
        ((13, 0), PACKAGES, Level.OK, "cupy-cuda13x 14.2.0, cuda-bindings 13.4.4"),
        ((13, 1), CudaPackages("12.9.1", (("cupy-cuda12x", "13.6.0"),)), Level.OK, "CUDA 13.1"),
        ((12, 4), PACKAGES, Level.FAIL, "older than cupy-cuda13x and cuda-bindings"),
        ((12, 4), PACKAGES._replace(bindings="12.9.4"), Level.FAIL, "older than cupy-cuda13x"),
        ((13, 0), PACKAGES._replace(bindings="12.9.0"), Level.WARN, "stop all"),
        ((13, 0), PACKAGES._replace(bindings="12.8"), Level.WARN, "stop all"),
        ((13, 0), PACKAGES._replace(bindings=None), Level.FAIL, "cuda-bindings is not installed"),
        ((13, 0), PACKAGES._replace(cupy=()), Level.FAIL, "CuPy is not installed"),
        ((11, 8), PACKAGES, Level.FAIL, "older than CUDA 12"),
    ],
)
def test_driver_and_packages_go_together(
    cuda: tuple[int, int], packages: CudaPackages, level: Level, words: str
) -> None:
    """A driver runs packages of its generation and of earlier ones."""
    found = check_cuda("580.1", cuda, packages)

    assert found.level is level
    assert words in found.finding
    assert found.finding.startswith(f"580.1, CUDA {cuda[0]}.{cuda[1]}")
    if level is Level.FAIL and cuda[0] > 11:
        assert f'extra "{fitting_extra(cuda)}"' in found.remedy


def test_packages_are_found_by_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either wheel of CuPy counts, the newer one first."""
    versions = {"cuda-bindings": "12.9.4", "cupy-cuda12x": "13.6.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)

    assert CudaPackages.installed() == CudaPackages("12.9.4", (("cupy-cuda12x", "13.6.0"),))
    versions["cupy-cuda13x"] = "14"
    assert CudaPackages.installed().cupy == (("cupy-cuda13x", "14"), ("cupy-cuda12x", "13.6.0"))
    versions.clear()
    assert CudaPackages.installed() == CudaPackages(None, ())


@pytest.mark.parametrize(
    ("version", "requires", "generation"),
    [
        ("2.13.0+cu129", ["nvidia-nccl-cu13==2"], 12),
        ("2.13.0+cu130", [], 13),
        ("2.13.0", ["sympy", "nvidia-cublas==13.1", "nvidia-nccl-cu13==2; x == 'y'"], 13),
        ("2.8.0", ["nvidia-cuda-nvrtc-cu12==12.8"], 12),
        ("2.13.0+cpu", None, None),
        ("2.13.0", ["sympy"], None),
    ],
)
def test_torch_tells_what_it_was_built_for(
    version: str,
    requires: list[str] | None,
    generation: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an import: by its version, or by what it requires."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)

    torch = CudaPackages.installed().torch

    assert torch == (None if generation is None else (version, generation))


def test_what_is_in_the_way_is_uninstalled_first() -> None:
    """An extra brings the distribution of CuPy that fits, beside the other one."""
    newer = check_cuda("550.1", (12, 4), PACKAGES)
    assert (
        newer.remedy
        == 'uninstall cupy-cuda13x, then install the extra "gpu-cuda12" of this package'
    )
    both = check_cuda(
        "580.1", (13, 0), PACKAGES._replace(cupy=(*PACKAGES.cupy, ("cupy-cuda12x", "13.6.0")))
    )
    assert both.level is Level.FAIL
    assert "cupy-cuda13x and cupy-cuda12x are installed" in both.finding
    assert both.remedy.startswith("uninstall cupy-cuda13x and cupy-cuda12x, then install")


def test_torch_is_not_newer_than_the_driver() -> None:
    """It brings libraries of its own generation of CUDA."""
    packages = CudaPackages("12.9.4", (("cupy-cuda12x", "13.6.0"),), ("2.11.0+cu130", 13))

    assert check_cuda("580.1", (13, 0), packages).level is Level.OK
    old = check_cuda("550.1", (12, 4), packages)
    assert old.level is Level.FAIL
    assert "torch 2.11.0+cu130 for CUDA 13: the driver is older than torch" in old.finding
    assert old.remedy.startswith("install vLLM and torch built for CUDA 12, then")


@pytest.mark.parametrize("generation", EXTRAS)
def test_extras_have_packages_of_one_generation(generation: int) -> None:
    """CuPy and the bindings of each extra are for the CUDA that it is named for."""
    asked = {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in map(Requirement, EXTRAS_OF_FILE[EXTRAS[generation]])
    }

    assert f"cupy-cuda{generation}x" in asked
    assert [name for name in asked if name.startswith("cupy")] == [f"cupy-cuda{generation}x"]
    least = ".".join(map(str, LEAST_BINDINGS)) if generation == 12 else f"{generation}.0.0"
    assert asked["cuda-bindings"].contains(least)
    assert not asked["cuda-bindings"].contains(f"{generation - 1}.8")
    assert asked["cuda-bindings"].contains(f"{generation + 1}.0") is (generation == 13)


def test_a_gpu_can_hold_a_pool() -> None:
    """Its name and memory; each of its missing abilities is named."""
    able = check_gpu(GPU, lambda bus: ABLE)
    assert (able.level, able.what) == (Level.OK, "gpu 0")
    assert able.finding == "H800, 80GiB, compute capability 9.0"

    assert check_gpu(GPU._replace(capability=(7, 5)), lambda bus: ABLE).level is Level.FAIL
    unable = check_gpu(GPU, lambda bus: Abilities(maps_memory=False, shares_events=False))
    assert unable.level is Level.FAIL
    assert "without virtual memory management and events between processes" in unable.finding

    def refused(bus: str) -> Abilities:
        raise OSError("no driver")

    assert "no driver" in check_gpu(GPU, refused).finding


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (GPU, Level.OK, "generation 5, 16 lanes"),
        (GPU._replace(link=Link(1, 16)), Level.OK, "up to generation 5"),
        (GPU._replace(link=Link(5, 4)), Level.WARN, "4 lanes of 16: copies take 4 times as long"),
        (GPU._replace(link=None), Level.OK, "not reported"),
    ],
)
def test_a_narrow_link_is_reported(facts: GpuFacts, level: Level, words: str) -> None:
    """A link of fewer lanes is a fault; a lower generation may be the GPU at rest."""
    found = check_link(facts)

    assert found.level is level
    assert words in found.finding


@pytest.mark.parametrize(
    ("users", "own", "level"),
    [
        ((), frozenset(), Level.OK),
        ((7, 8), frozenset({7, 8}), Level.OK),
        ((7, 8), frozenset({7}), Level.WARN),
        ((7,), None, Level.OK),
    ],
)
def test_other_programs_on_a_gpu_are_reported(
    users: tuple[int, ...], own: frozenset[int] | None, level: Level
) -> None:
    """The daemon's own workers are no fault; without knowing them, none is named."""
    found = check_users(GPU._replace(users=users), own)

    assert found.level is level
    assert ("8" in found.finding) == (level is Level.WARN)


NODES = {0: frozenset({0, 2}), 1: frozenset({1, 3})}


@pytest.mark.parametrize(
    ("gpus", "nodes", "cpus", "why", "level", "words"),
    [
        ([GPU], {0: frozenset({0})}, {0}, "", Level.OK, "one node"),
        ([GPU], {}, {0}, "", Level.OK, "one node"),
        ([GPU, GPU], NODES, {0, 1, 2}, "", Level.OK, "GPUs on node 0 of 2: workers"),
        ([GPU, GPU], NODES, {0, 1, 3}, "", Level.WARN, "use 1 processor of node 0, which has 2 of"),
        ([GPU, GPU._replace(node=1)], NODES, {0, 1}, "", Level.OK, "GPUs on nodes 0, 1 of 2"),
        ([GPU._replace(node=None)], NODES, {0}, "", Level.OK, "2 nodes: workers"),
        ([], NODES, {0}, "", Level.OK, "2 nodes: workers"),
        ([GPU._replace(node=1)], NODES, {0, 2}, "", Level.WARN, "no processor of node 1"),
        ([GPU], NODES, {0, 1}, "not permitted", Level.WARN, "cannot be asked for (not permitted)"),
    ],
)
def test_what_keeps_workers_from_their_gpus_is_reported(
    gpus: list[GpuFacts],
    nodes: dict[int, frozenset[int]],
    cpus: set[int],
    why: str,
    level: Level,
    words: str,
) -> None:
    """Processors that are not allowed, or calls that are not; on one node there is nothing."""
    found = check_nodes(gpus, nodes, cpus, lambda node: why)

    assert found.level is level
    assert words in found.finding
    assert ("SYS_NICE" in found.remedy) == bool(why)


def test_persistence() -> None:
    """What makes starts slower is a warning with its remedy."""
    assert check_persistence(GPU).level is Level.OK
    assert check_persistence(GPU._replace(persistent=None)).level is Level.OK
    assert "nvidia-smi -pm 1" in check_persistence(GPU._replace(persistent=False)).remedy


def test_only_the_gpus_of_instances_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones; the others may be anyone's. A driver that fails is one finding."""
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])
    nvml.users[1] = [99]
    nvml.lanes = 8

    found = {one.what: one for one in check_gpus([0], frozenset(), {0}, lambda bus: ABLE)}

    assert list(found) == [
        "gpu driver", "gpu 0", "pcie of gpu 0", "persistence of gpu 0", "processes on gpu 0",
        "numa",
    ]  # fmt: skip
    assert found["pcie of gpu 0"].level is Level.WARN
    assert found["processes on gpu 0"].level is Level.OK
    nvml.broken = True
    (broken,) = check_gpus([0], frozenset(), {0}, lambda bus: ABLE)
    assert (broken.what, broken.level) == ("gpu driver", Level.FAIL)


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [(13000, 'the extra "gpu"'), (12040, 'built for CUDA 12, then install the extra "gpu-cuda12"'),
     (11080, "update the driver, which is older than CUDA 12")],
)  # fmt: skip
def test_the_doctor_examines_gpus(
    cuda: int,
    remedy: str,
    tmp_path: Path,
    fake_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `kind = "cuda"`: the remedy names the extra, and the daemon's workers are known."""
    nvml = install(monkeypatch, [8 * GIB])
    nvml.cuda, nvml.users = cuda, {0: [7]}
    fake_checkpoint()
    file = tmp_path / "appliance.toml"
    file.write_text(
        '[devices]\nkind = "cuda"\nmemory = "90%"\nruntime = "1GiB"\nhost_cache = "64MiB"\n'
        '[[model]]\nname = "tiny"\npath = "tiny"\nmax_context = 1024\n'
    )
    monkeypatch.setattr(
        SystemFacts,
        "read",
        classmethod(lambda cls: SystemFacts(64 * GIB, 32 * GIB, None, "always")),
    )
    probe = DaemonProbe("http://box", True, answers=True, processes=frozenset({7}))
    monkeypatch.setattr(DaemonProbe, "find", classmethod(lambda cls, config: probe))
    monkeypatch.setattr(doctor, "installed", lambda: [doctor.Package("torch", None, None)])

    found: dict[str, Finding] = {one.what: one for one in examine(file)}

    assert remedy in found["torch"].remedy
    assert found["processes on gpu 0"].finding == "none but the daemon's"
    assert engine_remedy(load_config(file)) == found["torch"].remedy


def test_abilities_are_asked_by_the_address_of_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is initialised, and makes no context."""
    asked: list[object] = []
    bindings = ModuleType("cuda.bindings.driver")
    success = SimpleNamespace(name="CUDA_SUCCESS", value=0)

    def attribute(which: str, device: int) -> tuple[object, int]:
        asked.append((which, device))
        return success, int(which == "vmm")

    vars(bindings).update(
        cuInit=lambda flags: (success,),
        cuDeviceGetByPCIBusId=lambda bus: (success, asked.append(bus) or 3),
        cuDeviceGetAttribute=attribute,
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm",
            CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED="events",
        ),
        CUresult=SimpleNamespace(CUDA_SUCCESS=success),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    driver.driver.cache_clear()
    try:
        found = read_abilities(GPU.bus)
    finally:
        driver.driver.cache_clear()

    assert found == Abilities(maps_memory=True, shares_events=False)
    assert asked == [b"00000000:3B:00.0", ("vmm", 3), ("events", 3)]


def test_a_driver_that_is_too_old_for_a_call_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings raise what is no `OSError`."""

    def missing(bus: bytes) -> None:
        raise RuntimeError("function cuDeviceGetByPCIBusId is not found")

    bindings = ModuleType("cuda.bindings.driver")
    success = SimpleNamespace(name="CUDA_SUCCESS", value=0)
    vars(bindings).update(
        cuInit=lambda flags: (success,),
        cuDeviceGetByPCIBusId=missing,
        CUdevice_attribute=SimpleNamespace(),
        CUresult=SimpleNamespace(CUDA_SUCCESS=success),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    driver.driver.cache_clear()
    try:
        found = check_gpu(GPU, read_abilities)
    finally:
        driver.driver.cache_clear()

    assert found.level is Level.FAIL
    assert "the CUDA driver has no cuDeviceGetByPCIBusId" in found.finding
    assert "update NVIDIA's driver" in found.finding
