"""The file of ceilings: what was measured on which machine, and what of it holds here and now.

`appliance doctor --ceilings` writes it. The daemon takes from it how fast weights load until it has
seen some load, and the lab what hardware can do. Figures of another machine, or of a GPU under
another driver, are not used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from appliance.errors import CeilingsError
from appliance.platform.durable import make_folder, replace, sync_replaced

FORMAT: Final = 1
MAX_BYTES: Final = 1 << 20
NAME: Final = "ceilings.json"
AUTO: Final = "auto"
SYSTEM_DIRECTORY: Final = Path("/var/lib/appliance")
REMEDY: Final = "measure with `appliance doctor --ceilings`"
MODE: Final = 0o644
"""Figures are no secret, and an admin may measure who is not the user of the daemon."""

Rate = Annotated[float, Meta(gt=0, lt=1e15)]
"""Bytes a second."""
Duration = Annotated[float, Meta(ge=0, lt=1e6)]
"""Seconds."""
Count = Annotated[int, Meta(gt=0)]
LEAST_RATE: Final = 1e6
"""Bytes a second: memory that loads slower than this was not measured, but written by hand."""


class ChunkRates(msgspec.Struct, frozen=True, kw_only=True):
    """Copies in chunks of one size."""

    chunk_bytes: Count
    into_pool: Rate
    out_of_pool: Rate


class MemoryCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """Copies between the host tier and a device's pool, which for the CPU is host memory, too, and
    what mapping and page-locking cost."""

    copied_bytes: Count
    """By each of the copies that were timed."""
    chunks: Annotated[tuple[ChunkRates, ...], Meta(min_length=1)]
    within_pool: Rate
    """From one place of the pool to another."""
    slab_bytes: Count
    map_slab_seconds: Duration
    unmap_slab_seconds: Duration
    """Of one slab, when many are mapped or unmapped at once."""
    lock: Rate | None = None
    """Of page-locking: by the driver, of pages that are there, or by the system, which makes them.
    None if it was refused."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for what no machine has, which would make switches last for ever."""
        if self.load_rate(self.slab_bytes, overlapped=False) < LEAST_RATE:
            raise ValueError(f"weights would load at less than {LEAST_RATE / 1e6:g} MB/s")

    @property
    def into_pool(self) -> float:
        """Bytes a second, in chunks of the best size."""
        return max(chunk.into_pool for chunk in self.chunks)

    @property
    def out_of_pool(self) -> float:
        return max(chunk.out_of_pool for chunk in self.chunks)

    def load_rate(self, slab_bytes: int, *, overlapped: bool) -> float:
        """Bytes a second of weights that are loaded into slabs of this size: each is mapped and
        copied, and `overlapped` if the device copies while the next ones are mapped. Mapping
        is left out for slabs of another size than was measured."""
        copying = slab_bytes / self.into_pool
        mapping = self.map_slab_seconds if slab_bytes == self.slab_bytes else 0.0
        return slab_bytes / (max(copying, mapping) if overlapped else copying + mapping)


class GpuCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, under one version of its driver."""

    uuid: Annotated[str, Meta(min_length=1)]
    name: str
    driver: str
    at: float
    """When it was measured: seconds since 1970."""
    version: str
    """Of the appliance."""
    memory: MemoryCeilings
    link_generation: int | None = None
    link_lanes: int | None = None
    """The PCIe link during copies."""


class HostCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the host, with the CPU's pool in it."""

    at: float
    version: str
    memory: MemoryCeilings


class DiskCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """A file system that has models."""

    folder: str
    at: float
    version: str
    read: Rate
    read_bytes: Count
    cached: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of what was read that the page cache still had after it was asked to drop it; None if
    the file system does not tell."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Parts were measured at their own times."""

    machine: str
    """Whose figures these are: `machine_identity`."""
    format: int = FORMAT
    host: HostCeilings | None = None
    disks: tuple[DiskCeilings, ...] = ()
    gpus: tuple[GpuCeilings, ...] = ()

    def gpu(self, uuid: str, driver: str) -> GpuCeilings | None:
        """What was measured of a GPU under this driver."""
        return next((g for g in self.gpus if (g.uuid, g.driver) == (uuid, driver)), None)

    def updated(
        self,
        host: HostCeilings | None,
        disks: Iterable[DiskCeilings],
        gpus: Iterable[GpuCeilings],
    ) -> Ceilings:
        """With these parts in place of earlier ones of the same devices."""
        by_folder = {disk.folder: disk for disk in (*self.disks, *disks)}
        by_uuid = {gpu.uuid: gpu for gpu in (*self.gpus, *gpus)}
        return msgspec.structs.replace(
            self,
            host=host or self.host,
            disks=tuple(by_folder.values()),
            gpus=tuple(by_uuid.values()),
        )


def ceilings_path(configured: str) -> Path | None:
    """Where the file is of which `devices.ceilings` is this; None for nowhere. By itself it is in
    the state directory that systemd gave, the one of the packaged service if this user may write
    there, or that of the user."""
    return _place(configured)[0]


def who_reads(configured: str) -> str:
    """Which daemons read the file at `ceilings_path`: for an admin who wrote one."""
    return _place(configured)[1]


def _place(configured: str) -> tuple[Path | None, str]:
    """Where the file is, and who reads it."""
    if configured != AUTO:
        path = Path(configured) if configured else None
        return path, "a daemon with this configuration reads them when it starts"
    if given := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(given, NAME), "a daemon with this state directory reads them when it starts"
    if os.access(SYSTEM_DIRECTORY, os.W_OK):
        return SYSTEM_DIRECTORY / NAME, "the service reads them when it starts"
    who = (
        "a daemon that this user starts reads them when it starts; the packaged service reads "
        f"those in {SYSTEM_DIRECTORY}, which its user or root measures"
    )
    if users := os.environ.get("XDG_STATE_HOME", ""):
        return Path(users, "appliance", NAME), who
    home = os.environ.get("HOME", "")
    return (Path(home, ".local", "state", "appliance", NAME) if home else None), who


def read_ceilings(path: Path) -> Ceilings:
    """What the file says, of whichever machine. Raises `CeilingsError`, also if there is none."""
    try:
        return _decoded(path, _contents(path))
    except FileNotFoundError:
        raise CeilingsError(f"there is no file {path}; {REMEDY}") from None


def own_ceilings(path: Path, machine: str) -> Ceilings | None:
    """The same for the machine that this is; None if there is no file. Raises `CeilingsError` also
    if it is of another machine, or if users may have written it who are not trusted here: it is to
    belong to root, to this user or to the owner of its folder, and to be no link."""
    try:
        found = _decoded(path, _contents(path, trusted=True))
    except FileNotFoundError:
        return None
    if found.machine != machine:
        raise CeilingsError(f"{path} is of another machine; {REMEDY}")
    return found


def check_place(path: Path) -> None:
    """Raises `CeilingsError` if `write_ceilings` cannot put a file there, or if what is there is
    none that `own_ceilings` would trust."""
    folder = next(one for one in path.parents if one == one.parent or os.path.lexists(one))
    if not folder.is_dir():
        raise CeilingsError(f"{folder} is no folder; set devices.ceilings to a file elsewhere")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CeilingsError(
            f"this user may not write in {folder}; measure as one who may, or set devices.ceilings "
            "to a file elsewhere that the daemon can read"
        )
    try:
        _contents(path, trusted=True)
    except FileNotFoundError:
        return


def _contents(path: Path, *, trusted: bool = False) -> bytes:
    """Some of a file, more than one may have at most. Raises `FileNotFoundError`, also where a
    parent is no folder, as with ``HOME=/dev/null``, and `CeilingsError` for what cannot be read or,
    if it is to be `trusted`, is not."""
    try:
        # Without O_NONBLOCK the daemon would wait for a process that writes into a FIFO.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if trusted else 0)
        descriptor = os.open(path, flags)
        try:
            if why := _fault(path, os.fstat(descriptor), trusted=trusted):
                raise CeilingsError(f"{path} {why}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, error.strerror, str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = "is a symbolic link; remove it, or set devices.ceilings to the file that it names"
            raise CeilingsError(f"{path} {why}") from None
        raise CeilingsError(
            f"{path} cannot be read ({error.strerror}); let this user read it, or set "
            "devices.ceilings to another file"
        ) from None


def _fault(path: Path, status: os.stat_result, *, trusted: bool) -> str:
    """What keeps a file from being used, and the remedy; "" if nothing does. Raises `OSError`."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a file; remove it, or set devices.ceilings to another"
    if not trusted:
        return ""
    if status.st_uid not in {0, os.geteuid(), path.parent.stat().st_uid}:
        return (
            f"belongs to user {status.st_uid}, who is neither root, nor this user, nor the owner "
            f"of its folder; remove it, and {REMEDY}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others than its owner; `chmod go-w {path}`"
    return ""


def _decoded(path: Path, data: bytes) -> Ceilings:
    try:
        if len(data) > MAX_BYTES:
            raise msgspec.ValidationError(f"larger than {MAX_BYTES} bytes")
        found = msgspec.json.decode(data, type=Ceilings)
        if found.format != FORMAT:
            raise msgspec.ValidationError(f"of format {found.format}, not {FORMAT}")
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise CeilingsError(f"{path} cannot be used: {error}; {REMEDY}") from None
    return found


def write_ceilings(path: Path, ceilings: Ceilings) -> None:
    """Replace the file, whole or not at all. Raises `OSError`."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    make_folder(path.parent)
    data = msgspec.json.format(msgspec.json.encode(ceilings), indent=2)
    replace(path, [data, b"\n"], lambda descriptor: os.fchmod(descriptor, MODE))
    sync_replaced(path)


def load_rate(
    ceilings: Ceilings, slab_bytes: int, instances: Sequence[Sequence[str]], driver: str
) -> float | None:
    """Bytes a second at which a model's weights load on the slowest of these instances, each the
    UUIDs of its GPUs, or into host memory if there are none; None if a GPU was not measured under
    this `driver`. Each rank loads its share; ranks have the host's memory in common, but on GPUs a
    link each."""
    if not instances:
        host = ceilings.host
        return None if host is None else host.memory.load_rate(slab_bytes, overlapped=False)
    rates = []
    for uuids in instances:
        found = [ceilings.gpu(uuid, driver) for uuid in uuids]
        known = [gpu.memory for gpu in found if gpu is not None]
        if len(known) < len(found):
            return None
        slowest = min(memory.load_rate(slab_bytes, overlapped=True) for memory in known)
        rates.append(len(known) * slowest)
    return min(rates)


def machine_identity(root: Path = Path("/")) -> str:
    """What tells this machine from others: its number, its kind, its processors and its memory."""
    return hashlib.sha256("\n".join(_marks(root)).encode()).hexdigest()[:32]


def _marks(root: Path) -> Iterator[str]:
    for file in ("etc/machine-id", "sys/class/dmi/id/product_name"):
        yield _text(root / file).strip()
    processors = _text(root / "proc/cpuinfo")
    yield from sorted(set(re.findall(r"^(?:model name|CPU part)\s*: (.*)$", processors, re.M)))
    yield f"{len(re.findall(r'^processor', processors, re.M))} processors"
    memory = re.search(r"MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"))
    # Rounded: another kernel keeps some MiB more or less for itself.
    yield f"{round(int(memory[1]) / (1 << 20)) if memory else 0} GiB"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
