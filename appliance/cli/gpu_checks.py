"""What the doctor checks of GPUs: their driver, the packages for it, and each GPU that is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Final, NamedTuple

from appliance.cli.findings import Finding, fail, ok, warn
from appliance.memory.cuda.abilities import Abilities, read_abilities
from appliance.platform.gpus import (
    GpuFacts,
    GpusUnknown,
    driver_cuda_version,
    driver_version,
    read_gpus,
)
from appliance.platform.installation import remedy_for
from appliance.platform.numa import Nodes, read_nodes, refusal
from appliance.units import human

EXTRAS: Final[Mapping[int, str]] = {13: "gpu", 12: "gpu-cuda12"}
"""The extra of this package for each generation of CUDA, newest first."""

LEAST_CAPABILITY: Final = (8, 0)
"""The oldest that our kernels are compiled for."""

LEAST_BINDINGS: Final = (12, 9, 1)
"""cuda-bindings: older ones hold the interpreter's lock during calls of the driver."""

Version = tuple[int, ...]


class CudaPackages(NamedTuple):
    """Versions of what talks to CUDA, as installed; None: it is not."""

    bindings: str | None
    """cuda-bindings."""
    cupy: tuple[tuple[str, str], ...]
    """The distributions of CuPy, each with its version. They are for one generation of CUDA each,
    and have the same files: there is to be one."""
    torch: tuple[str, int] | None = None
    """Its version, and the generation of CUDA that it was built for, if for any."""

    @classmethod
    def installed(cls) -> CudaPackages:
        """From the metadata of packages; none of them is imported."""
        names = [f"cupy-cuda{generation}x" for generation in EXTRAS]
        found = [(name, version) for name in names if (version := _version(name))]
        return cls(_version("cuda-bindings"), tuple(found), _torch())


def fitting_extra(cuda: Version) -> str | None:
    """The extra for a driver of this version of CUDA; None if it is too old for all of them.

    A driver runs what was built for its own generation of CUDA, and for earlier ones.
    """
    return next((extra for generation, extra in EXTRAS.items() if cuda[0] >= generation), None)


def check_gpus(
    numbers: Sequence[int],
    own_processes: frozenset[int] | None,
    cpus: Collection[int],
    abilities: Callable[[str], Abilities] = read_abilities,
) -> Iterator[Finding]:
    """All checks of GPUs, for a daemon that has these of them.

    `own_processes` are those of the daemon that runs; None if one runs and they are not known.
    `cpus` are the processors for workers.
    """
    try:
        driver, cuda, gpus = driver_version(), driver_cuda_version(), read_gpus()
    except GpusUnknown as error:
        yield fail("gpu driver", str(error), "see docs/gpu.md")
        return
    yield check_cuda(driver, cuda, CudaPackages.installed())
    used = [facts for facts in gpus if facts.gpu.number in numbers]
    for facts in used:
        yield check_gpu(facts, abilities)
        yield check_link(facts)
        yield check_persistence(facts)
        yield check_users(facts, own_processes)
    if used:
        yield check_nodes(used, read_nodes(), cpus)


def check_cuda(driver: str, cuda: Version, packages: CudaPackages) -> Finding:
    """Whether driver and packages are of generations that go together."""
    what, found = "gpu driver", f"{driver}, CUDA {'.'.join(map(str, cuda))}"
    extra = fitting_extra(cuda)
    if extra is None:
        oldest = min(EXTRAS)
        return fail(what, f"{found}, older than CUDA {oldest}", "install driver 525 or newer")
    remedy = remedy_for(extra)
    if not packages.cupy:
        return fail(what, f"{found}; CuPy is not installed", remedy)
    names = [name for name, _ in packages.cupy]
    if len(names) > 1:
        both = f"{found}; {' and '.join(names)} are installed, which have the same files"
        return fail(what, both, f"uninstall {' and '.join(names)}, then {remedy}")
    ((name, version),) = packages.cupy
    if packages.bindings is None:
        return fail(what, f"{found}; cuda-bindings is not installed", remedy)
    found += f"; {name} {version}, cuda-bindings {packages.bindings}"
    bindings = _numbers(packages.bindings)
    generations = {name: int(name[len("cupy-cuda") : -1]), "cuda-bindings": bindings[0]}
    if packages.torch is not None:
        found += f", torch {packages.torch[0]} for CUDA {packages.torch[1]}"
        generations["torch"] = packages.torch[1]
    newer = [package for package, generation in generations.items() if generation > cuda[0]]
    if newer:
        if "torch" in newer:
            remedy = f"install vLLM and torch built for CUDA {cuda[0]}, then {remedy}"
        if name in newer:  # the extra brings another distribution, which does not replace it
            remedy = f"uninstall {name}, then {remedy}"
        return fail(what, f"{found}: the driver is older than {' and '.join(newer)}", remedy)
    if bindings < LEAST_BINDINGS:
        return warn(
            what,
            f"{found}: these bindings stop all of a worker's threads during calls of the driver",
            f"install cuda-bindings {'.'.join(map(str, LEAST_BINDINGS))} or newer",
        )
    return ok(what, found)


def check_gpu(facts: GpuFacts, abilities: Callable[[str], Abilities]) -> Finding:
    """Whether the GPU can hold a pool, and run the kernels."""
    capability = ".".join(map(str, facts.capability))
    found = f"{facts.gpu.name}, {human(facts.gpu.memory_bytes)}, compute capability {capability}"
    what = f"gpu {facts.gpu.number}"
    if facts.capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return fail(what, found, f"use GPUs of compute capability {least} or newer")
    try:
        able = abilities(facts.bus)
    except OSError as error:
        return fail(what, f"{found}; {error}", "check the driver with `nvidia-smi`")
    missing = [
        text
        for text, there in (
            ("virtual memory management", able.maps_memory),
            ("events between processes", able.shares_events),
        )
        if not there
    ]
    if missing:
        remedy = "update the driver; to a virtual machine, pass the whole GPU through"
        return fail(what, f"{found}, without {' and '.join(missing)}", remedy)
    return ok(what, found)


def check_link(facts: GpuFacts) -> Finding:
    """Whether the PCIe link is as wide as it can be, as a switch of models takes a copy over it."""
    what, link, most = f"pcie of gpu {facts.gpu.number}", facts.link, facts.most_link
    if link is None or most is None:
        return ok(what, "not reported by the driver")
    found = f"generation {link.generation}, {link.lanes} lanes"
    if link.lanes < most.lanes:
        return warn(
            what,
            f"{found} of {most.lanes}: copies take {most.lanes / link.lanes:g} times as long",
            "use another slot, or check its settings in the firmware and the riser",
        )
    if link.generation < most.generation:
        found += f" (up to generation {most.generation}; lower while the GPU is idle)"
    return ok(what, found)


def check_persistence(facts: GpuFacts) -> Finding:
    """Whether the driver keeps the GPU initialised while nothing uses it."""
    what = f"persistence of gpu {facts.gpu.number}"
    if facts.persistent is None:
        return ok(what, "not reported by the driver")
    if facts.persistent:
        return ok(what, "on")
    remedy = "enable nvidia-persistenced.service, or `nvidia-smi -pm 1`"
    return warn(what, "off: a worker takes seconds longer to start", remedy)


def check_users(facts: GpuFacts, own_processes: frozenset[int] | None) -> Finding:
    """Whether other programs use the GPU: the pool takes the memory that it was configured for."""
    what = f"processes on gpu {facts.gpu.number}"
    if not facts.users:
        return ok(what, "none")
    if own_processes is None:
        return ok(what, f"{len(facts.users)}; which of them are the daemon's is not known")
    others = sorted(set(facts.users) - own_processes)
    if not others:
        return ok(what, "none but the daemon's")
    listed = ", ".join(map(str, others))
    remedy = (
        "end them, or make devices.memory smaller by what they use; in a container these may be "
        "the daemon's workers, as the driver may number processes as the host does"
    )
    return warn(what, f"{len(others)} not known as the daemon's: {listed}", remedy)


def check_nodes(
    used: Sequence[GpuFacts],
    nodes: Nodes,
    cpus: Collection[int],
    refused: Callable[[int], str] = refusal,
) -> Finding:
    """Whether workers can run, and take memory, on the NUMA nodes of their GPUs, or on any if they
    have none. `cpus` are the processors for workers, of those that this user may use; `refused`
    says why memory of a node cannot be asked for."""
    what = "numa"
    if len(nodes) < 2:
        return ok(what, "one node")
    places = sorted(
        {facts.node for facts in used if facts.node is not None and facts.node in nodes}
    )
    listed = f"node{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
    found = f"GPUs on {listed} of {len(nodes)}" if places else f"{len(nodes)} nodes"
    if why := refused(min(places or nodes)):
        return warn(
            what,
            f"{found}, and memory of a node cannot be asked for ({why}): copies from memory of "
            "other nodes are slower",
            "allow mbind(2) and set_mempolicy(2), in a container with the capability SYS_NICE, or "
            "set NUMAPolicy=interleave and NUMAMask=all in the service's unit",
        )
    for place in places:
        usable = len(nodes[place].intersection(cpus))
        workers = sum([facts.node == place for facts in used])
        if usable < workers:
            return warn(
                what,
                f"{found}, and workers may use {usable or 'no'} processor{'s' * (usable > 1)} of "
                f"node {place}, which has {workers} of the GPUs: they run on any node",
                "allow as many processors of every node as it has GPUs, and one more for each of "
                "api.processes: AllowedCPUs=, CPUAffinity=, or the container's cpuset",
            )
    return ok(what, f"{found}: workers and their memory are near, the host cache is on all of them")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> tuple[str, int] | None:
    """Read off its version (`2.13.0+cu129`), or else off the libraries that it requires
    (`nvidia-nccl-cu13`)."""
    version = _version("torch")
    if version is None:
        return None
    if local := re.fullmatch(r"cu(\d+)\d", version.partition("+")[2]):
        return version, int(local[1])
    required = (
        re.match(r"nvidia-[a-z0-9-]+-cu(\d+)\b", line) for line in metadata.requires("torch") or ()
    )
    generation = next((int(found[1]) for found in required if found), None)
    return None if generation is None else (version, generation)


def _numbers(version: str) -> Version:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
