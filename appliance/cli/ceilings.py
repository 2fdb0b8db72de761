"""What the doctor measures with `--ceilings`, and what it says of what was measured before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import appliance
from appliance.cli.findings import Finding, fail, ok, warn
from appliance.config.groups import plan_instances
from appliance.config.schema import Config
from appliance.errors import CeilingsError
from appliance.memory.ceilings.process import Result, Task, ask
from appliance.memory.ceilings.stored import (
    Ceilings,
    DiskCeilings,
    GpuCeilings,
    HostCeilings,
    MemoryCeilings,
    ceilings_path,
    check_place,
    machine_identity,
    own_ceilings,
    who_reads,
    write_ceilings,
)
from appliance.platform.gpus import GpuFacts, GpusUnknown, driver_version, read_gpus
from appliance.scheduling.cost_model import FIRST_GUESS_LOAD_BYTES_PER_SECOND
from appliance.units import human

WHAT: Final = "ceilings"
SECONDS: Final = 8.0
"""For the copies of all devices together; processes begin besides, and disks are read."""
LEAST_SECONDS: Final = 1.5
"""For one device, however many there are."""
MIB: Final = 1 << 20
MOST_BYTES, LEAST_BYTES = 512 * MIB, 16 * MIB
"""What is taken of host memory, and of the device's, at most and at least."""
SHARE: Final = 16
"""Of the memory that is available, one part in so many."""
MEASURE: Final = "`appliance doctor --ceilings`"
UNMEASURED: Final = (
    f"the daemon expects weights to load at {FIRST_GUESS_LOAD_BYTES_PER_SECOND / 1e9:g} GB/s until "
    "it has seen some load"
)

Ask = Callable[[Task, Mapping[str, str]], Result]


def show_ceilings(config: Config, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """What is stored of the devices that the configuration uses, with its age."""
    path = ceilings_path(config.devices.ceilings)
    try:
        stored = None if path is None else own_ceilings(path, machine_identity())
        driver, gpus = _gpus(config)
    except (CeilingsError, GpusUnknown) as error:
        yield warn(WHAT, f"what was measured is not used: {UNMEASURED}", str(error))
        return
    if stored is None:
        yield ok(WHAT, f"not measured: {UNMEASURED}; to measure, run {MEASURE}")
        return
    age = Age(now)
    if not config.devices.cuda:
        if stored.host is None:
            yield ok(
                f"{WHAT} of host memory", f"not measured: {UNMEASURED}; to measure, run {MEASURE}"
            )
        else:
            yield _of_host(stored.host, age)
            yield from (_of_disk(disk, age) for disk in stored.disks)
        return
    for facts in gpus:
        found = stored.gpu(facts.uuid, driver)
        if found is None:
            what = f"{WHAT} of gpu {facts.gpu.number}"
            yield warn(what, f"not measured under driver {driver}: {UNMEASURED}", f"run {MEASURE}")
        else:
            yield _of_gpu(facts, found, age)
    yield from (_of_disk(disk, age) for disk in stored.disks)


def measure_ceilings(
    config: Config,
    available_bytes: int,
    own_processes: Collection[int] | None,
    running: bool,
    asking: Ask = ask,
    now: Callable[[], float] = time.time,
) -> Iterator[Finding]:
    """Measure what is free, store it, and say what was found and what was not measured.

    `available_bytes` are those of host memory. A daemon may be `running`, with `own_processes`
    (None if they are not known): then host memory and disks are not measured. No GPU is that any
    process uses. Each device is measured by a process of its own (`asking`).
    """
    path = ceilings_path(config.devices.ceilings)
    if path is None:
        yield fail(WHAT, "there is no place for the file", "set devices.ceilings to a path")
        return
    try:
        check_place(path)
    except CeilingsError as error:
        yield fail(WHAT, "not measured, as it could not be stored", str(error))
        return
    nbytes = min(MOST_BYTES, available_bytes // SHARE) // MIB * MIB
    if nbytes < LEAST_BYTES:
        yield fail(
            WHAT,
            f"{human(available_bytes)} of memory are available, too little to measure with",
            "end what else uses memory",
        )
        return
    try:
        driver, gpus = _gpus(config)
    except GpusUnknown as error:
        yield fail(WHAT, str(error), "see docs/gpu.md")
        return
    rounds = _Measuring(config, nbytes, len(gpus), driver, asking, now)
    for facts in gpus:
        yield rounds.gpu(facts, own_processes)
    yield from rounds.host(running=running, known=own_processes is not None)
    if rounds.empty:
        return
    try:
        yield rounds.store(path)
    except OSError as error:
        yield fail(
            WHAT,
            f"{path} cannot be written: {error.strerror}; what was measured is lost",
            "make room there, or set devices.ceilings to another file",
        )


class _Measuring:
    """One run: what was measured so far."""

    def __init__(
        self,
        config: Config,
        nbytes: int,
        gpus: int,
        driver: str,
        asking: Ask,
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._nbytes = nbytes
        self._seconds = max(LEAST_SECONDS, SECONDS / (gpus + 1))
        self._driver = driver
        self._asking = asking
        self._now = now
        self._age = Age(now)
        self._host: HostCeilings | None = None
        self._disks: list[DiskCeilings] = []
        self._gpus: list[GpuCeilings] = []

    @property
    def empty(self) -> bool:
        return self._host is None and not self._gpus

    def gpu(self, facts: GpuFacts, own_processes: Collection[int] | None) -> Finding:
        """One GPU, unless a process uses it."""
        what = f"{WHAT} of gpu {facts.gpu.number}"
        if facts.users:
            own = set(facts.users) <= set(own_processes or ())
            by = "the daemon" if own else f"processes {', '.join(map(str, facts.users))}"
            return warn(
                what,
                f"not measured: in use by {by}; copies would slow that down, and it them",
                "stop the daemon, and run this again" if own else "end them, and run this again",
            )
        try:
            result = self._ask(gpu=facts.gpu.number, node=facts.node)
        except CeilingsError as error:
            return fail(what, f"not measured: {error}", "see docs/gpu.md")
        assert result.memory is not None, "a process without an error has measured"
        generation, lanes = result.link or (None, None)
        found = GpuCeilings(
            uuid=facts.uuid,
            name=facts.gpu.name,
            driver=self._driver,
            at=self._now(),
            version=appliance.__version__,
            memory=result.memory,
            link_generation=generation,
            link_lanes=lanes,
        )
        self._gpus.append(found)
        return _of_gpu(facts, found, self._age)

    def host(self, *, running: bool, known: bool) -> Iterator[Finding]:
        """The memory of the host, and the disks that have models, unless a daemon uses them, or may
        use them as it is not `known` whether one runs."""
        if running or not known:
            yield warn(
                f"{WHAT} of host memory",
                f"not measured, nor disks: a daemon {'runs' if running else 'may run'}; copies "
                "would slow it down, and its own would make the figures too low",
                "stop it, and run this again",
            )
            return
        folders = tuple(sorted({model.path for model in self._config.models}))
        try:
            result = self._ask(folders=folders)
        except CeilingsError as error:
            yield fail(
                f"{WHAT} of host memory",
                f"not measured: {error}",
                "if the files cannot be read, make them readable",
            )
            return
        assert result.memory is not None, "a process without an error has measured"
        at, version = self._now(), appliance.__version__
        self._host = HostCeilings(at=at, version=version, memory=result.memory)
        yield _of_host(self._host, self._age)
        for folder, rate in result.disks.items():
            disk = DiskCeilings(folder=folder, at=at, version=version, **rate._asdict())
            self._disks.append(disk)
            yield _of_disk(disk, self._age)

    def store(self, path: Path) -> Finding:
        """Put what was measured into the file, with what it has of other devices of this machine.
        Raises `OSError`."""
        machine = machine_identity()
        try:
            before = own_ceilings(path, machine) or Ceilings(machine=machine)
        except CeilingsError:  # of another machine, of another version, or damaged
            before = Ceilings(machine=machine)
        write_ceilings(path, before.updated(self._host, self._disks, self._gpus))
        return ok(WHAT, f"written to {path}; {who_reads(self._config.devices.ceilings)}")

    def _ask(
        self, *, gpu: int | None = None, node: int | None = None, folders: tuple[str, ...] = ()
    ) -> Result:
        task = Task(
            nbytes=self._nbytes,
            slab_bytes=int(self._config.devices.slab_bytes),
            seconds=self._seconds,
            gpu=gpu,
            node=node,
            folders=folders,
        )
        return self._asking(task, os.environ)


class Age:
    """Says how long ago something was."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def __call__(self, at: float) -> str:
        seconds = self._now() - at
        if seconds < -60:
            return "measured in the future, by this machine's clock"
        for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
            if seconds >= 2 * size:
                return f"measured {seconds / size:.0f} {name} ago"
        return "measured now" if seconds < 60 else "measured a minute ago"


def _gpus(config: Config) -> tuple[str, Sequence[GpuFacts]]:
    """The driver, and the GPUs that are used; none without. Raises `GpusUnknown`."""
    if not config.devices.cuda:
        return "", ()
    used = {gpu for plan in plan_instances(config.devices) for gpu in plan.gpus}
    return driver_version(), [facts for facts in read_gpus() if facts.gpu.number in used]


def _of_gpu(facts: GpuFacts, found: GpuCeilings, age: Age) -> Finding:
    what = f"{WHAT} of gpu {facts.gpu.number}"
    text = _of_memory(found.memory, "from the host", "to it", "on the device")
    generation, most = found.link_generation, facts.most_link
    if generation is None or most is None:
        return ok(what, f"{text}; {age(found.at)}")
    text += f"; PCIe generation {generation} with {found.link_lanes} lanes under load"
    if generation < most.generation:
        return warn(
            what,
            f"{text}, of generation {most.generation}: copies are slower than they could be; "
            f"{age(found.at)}",
            "use another slot, or check its settings in the firmware and the riser",
        )
    return ok(what, f"{text}; {age(found.at)}")


def _of_host(found: HostCeilings, age: Age) -> Finding:
    text = _of_memory(found.memory, "from host tier to pool", "back", "within the pool")
    return ok(f"{WHAT} of host memory", f"{text}; {age(found.at)}")


def _of_memory(memory: MemoryCeilings, into: str, out: str, within: str) -> str:
    parts = [
        f"{_rate(memory.into_pool)} {into}, {_rate(memory.out_of_pool)} {out}, "
        f"{_rate(memory.within_pool)} {within}",
        f"{memory.map_slab_seconds * 1e6:.1f} us to map a slab of {human(memory.slab_bytes)}, "
        f"{memory.unmap_slab_seconds * 1e6:.1f} us to unmap it",
        "page-locking is refused" if memory.lock is None else f"page-locking {_rate(memory.lock)}",
    ]
    return "; ".join(parts)


def _of_disk(disk: DiskCeilings, age: Age) -> Finding:
    text = f"{_rate(disk.read)}, by reading {human(disk.read_bytes)}"
    if disk.cached is None:
        text += "; this file system does not tell whether they came from the page cache"
    elif disk.cached > 0:
        text = f"less than {text}, {disk.cached:.0%} of them from the page cache"
    return ok(f"{WHAT} of the disk of {disk.folder}", f"{text}; {age(disk.at)}")


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
