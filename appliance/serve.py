"""From a configuration to a running appliance: the daemon, its HTTP server, its life."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import KeyRing
from appliance.api.app import create_app
from appliance.api.batch.runner import BatchRunner, BatchSettings
from appliance.api.operator_socket import protocol_for
from appliance.config.checks import warnings
from appliance.config.groups import devices_of, instances_of, plan_instances
from appliance.config.layers import ignored_rows
from appliance.config.machine_room import refuse_now
from appliance.config.remotes import remote_models
from appliance.config.schema import Api, Config, Devices
from appliance.config.sizing import adapter_room, kv_floor_slabs, read_model, uncached
from appliance.daemon.daemon import Daemon, Limits, WorkerPlan
from appliance.daemon.lifecycle import GRACE_SECONDS, Lifetime, Server, bound_beside
from appliance.daemon.reload import LiveConfig, tls_pair
from appliance.daemon.served_model import served_model
from appliance.errors import ApplianceError, CeilingsError
from appliance.gateway.acceptor import FrontEnds
from appliance.gateway.accounts import Accounts
from appliance.gateway.forwarding.forwards import Forwards
from appliance.gateway.guide_trials import GuideTrials
from appliance.gateway.remote_images import RemoteImages
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.gateway.supervisor import Supervisor
from appliance.http.connections import Connection
from appliance.http.cors import Cors
from appliance.http.crowd import most_descriptors, raise_descriptor_limit
from appliance.http.image_hosts import ImageHosts
from appliance.journal import Journal, Setup
from appliance.memory.ceilings.stored import (
    REMEDY,
    ceilings_path,
    load_rate,
    machine_identity,
    own_ceilings,
)
from appliance.memory.weight_cache.image_file import image_name, prepare_folder
from appliance.platform import logs, machine_memory
from appliance.platform.admin_socket import AUTO, AdminSocketError, admin_path, open_socket
from appliance.platform.cpus import (
    ALLOW_BINDING,
    deal_near,
    front_end_count,
    kept_cpus,
    read_cpus,
    show_cpus,
    usable_by_workers,
)
from appliance.platform.gpus import GpusUnknown, driver_version, read_gpus, show_gpus
from appliance.platform.installation import remedy_for
from appliance.platform.numa import Nodes, by_node, read_nodes
from appliance.platform.sandbox import missing
from appliance.platform.systemd import Notifier, refuse_foreign, take_sockets
from appliance.platform.tls import LiveTls
from appliance.platform.wall_clock import WallClock, newest_change
from appliance.scheduling.cost_model import FIRST_GUESS_LOAD_BYTES_PER_SECOND
from appliance.service.front_frames import Handover
from appliance.service.remote_models import RemoteModels
from appliance.service.settings import Settings
from appliance.usage.ledger import Ledger

if TYPE_CHECKING:
    from appliance.observability.tracing import Traces

LEAST_OF_FRONT_END = 64
"""Descriptors: what it has without any connection, and some."""

log = logging.getLogger("appliance.serve")


def serve(config: Config, path: Path, notes: Sequence[str] = ()) -> int:
    """Run until a signal ends it, on what was read from `path`; returns the exit status. `notes`
    are logged first, as warnings. Raises what `make_daemon` raises, and `TooLittleMemory`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing to reload yet
    logs.begin(config.log.format, config.log.level)
    for warning in [*notes, *warnings(config), *ignored_rows(path)]:
        log.warning("%s", warning)
    for chosen in config.chosen:
        log.info("%s", chosen)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, path))


async def _serve(config: Config, path: Path) -> int:
    if importlib.util.find_spec("vllm") is None:
        extra = "gpu" if config.devices.cuda else "cpu"
        raise ApplianceError(f"vLLM is not installed: {remedy_for(extra)}")
    refuse_now(config.devices, machine_memory.read_memory())
    raise_descriptor_limit()
    if lacking := missing():
        log.info("this machine has no %s: child processes may do more", ", no ".join(lacking))
    notifier = Notifier.taken_from(os.environ)
    sockets = take_sockets(os.environ)
    if not config.api.keys:
        refuse_foreign(sockets)
    if sockets and config.api.bind != Api().bind:
        sockets += bound_beside(sockets, config.api.bind)
    created = int(newest_change([path]))
    daemon = make_daemon(config, created)
    allowed = sorted(os.sched_getaffinity(0))
    workers = sum([plan.ranks for plan in plan_instances(config.devices)])
    processes = front_end_count(config.api.processes, len(allowed))
    kept = kept_cpus(len(allowed), workers, processes)
    keep_to(allowed[-kept:])  # front ends, too; workers set their own
    pair = tls_pair(config, path)
    tls = None if pair is None else LiveTls(pair)
    settings = LiveConfig(daemon, config, path, tls, created)
    await settings.finish_deletions()
    gateway = make_gateway(daemon, config, processes)
    front_ends = Supervisor(processes, gateway.sessions.open)
    daemon.front_ends_missing = front_ends.not_ready
    ledger = gateway.ledger
    guides = gateway.sessions.guides = GuideTrials(front_ends.forks, models=daemon.catalogue.front)
    server = make_server(daemon, config, settings, tls, gateway, front_ends)
    admin = make_admin_server(server, config, front_ends)
    if admin is not None and not config.api.local_operators:
        gateway.access.keep_operators_at(admin.path)
    front_ends.on_given_back = partial(take_back, server, admin)
    lifetime = Lifetime(
        daemon,
        server,
        notifier,
        sockets,
        drain_seconds=float(config.api.drain_seconds),
        front_ends=front_ends,
    )
    daemon.on_failure = lifetime.fail
    # All of this stays: a collection need not look at it again, for tens of milliseconds in which
    # no request is read and no token sent.
    gc.collect()
    gc.freeze()
    guides.start()
    status = 1
    with reloading(settings, notifier):
        closing = nullcontext() if ledger is None else aclosing(ledger)
        forwards = gateway.sessions.forwards
        async with closing, running(admin), aclosing(guides), aclosing(forwards):
            try:
                status = await lifetime.run()
            finally:
                end_at_signals(status)
    return status


def end_at_signals(status: int) -> None:
    """What is left is to close files, which may wait for a disk: a signal ends this process with
    `status` at once, without a traceback."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
        signal.signal(number, lambda *_: os._exit(status))


def make_daemon(config: Config, created: int = 0) -> Daemon:
    """The daemon that a configuration describes, not started yet; `created` is the Unix time that
    lists say of models of other servers. Raises `PolicyError`, `CheckpointError`, `KvFolderError`
    or `OSError` for what cannot be had."""
    devices = config.devices
    allowed = sorted(os.sched_getaffinity(0))
    entries = [read_model(model, devices) for model in config.models]
    models = [
        served_model(model, entry, instances_of(model, devices))
        for model, entry in zip(config.models, entries, strict=True)
    ]
    instances = plan_instances(devices)
    ranks = [plan.ranks for plan in instances]
    if left_out := uncached(config, entries):
        log.warning(
            "devices.host_cache has no room for the weights of %s and those of the others: "
            "models that are not in it are loaded from disk",
            ", ".join(left_out),
        )
    nodes = read_nodes()
    near = nodes_of_gpus(devices, nodes)
    front_ends = front_end_count(config.api.processes, len(allowed))
    cpus = share_cpus(allowed, ranks, front_ends, nodes, near)
    setup = Setup(
        models=tuple(model.spec for model in models),
        instances=len(instances),
        host_bytes=int(devices.host_cache_bytes // devices.slab_bytes * devices.slab_bytes),
        slab_bytes=int(devices.slab_bytes),
        kv_floor_slabs=kv_floor_slabs(config, entries),
        disk_bytes=devices.kv_spill_bytes,
        load_bytes_per_second=expected_load_rate(config) or FIRST_GUESS_LOAD_BYTES_PER_SECOND,
        policy=config.policy.choice,
    )
    daemon = Daemon(
        setup,
        models,
        WorkerPlan(
            pool_slabs=devices.slabs,
            cpus=cpus,
            ranks=ranks,
            groups=[plan.group for plan in instances],
            devices=[show_gpus(plan.gpus) for plan in instances] if devices.cuda else (),
            runtime_slabs=devices.runtime_slabs,
            images=_prepared_images(config),
            encoded=devices.host_cache_codec != "none",
            host_nodes=host_nodes(cpus, nodes, near),
        ),
        Limits(
            queue=config.api.max_queue,
            progress_seconds=float(config.api.progress_deadline_seconds),
            policy_seconds=float(config.policy.budget_seconds),
        ),
        _journal(config, setup),
        traces=_traces(config),
        kv_folder=Path(devices.kv_spill.directory) if devices.kv_spill_bytes else None,
        remotes=RemoteModels(remote_models(config, created)),
    )
    terms = config.policy.autopilot_terms(config.journal.path)
    daemon.autopilot.configure(terms, config.policy.choice)
    return daemon


def expected_load_rate(config: Config) -> float | None:
    """Bytes a second at which weights load, by ceilings that hold on this machine; None if there
    are none, or weights are decoded, which no ceiling says. What cannot be used is logged."""
    devices = config.devices
    path = ceilings_path(devices.ceilings)
    if path is None or devices.host_cache_codec != "none":
        return None
    try:
        stored = own_ceilings(path, machine_identity())
        if stored is None:
            return None
        instances: list[list[str]] = []
        driver = ""
        if devices.cuda:
            uuids = {facts.gpu.number: facts.uuid for facts in read_gpus()}
            plans = plan_instances(devices)
            instances = [[uuids.get(gpu, "") for gpu in plan.gpus] for plan in plans]
            driver = driver_version()
        rate = load_rate(stored, devices.slab_bytes, instances, driver)
    except (CeilingsError, GpusUnknown) as error:
        log.warning("switches are expected without measured ceilings: %s", error)
        return None
    if rate is None:
        log.warning(
            "switches are expected without measured ceilings: %s has none of these devices under "
            "this driver; %s",
            path,
            REMEDY,
        )
    return rate


def _journal(config: Config, setup: Setup) -> Journal | None:
    """The record of the run, if that is configured."""
    written = config.journal
    if not written.path:
        return None
    return Journal(Path(written.path), setup, max_bytes=written.max_bytes)


def _traces(config: Config) -> Traces | None:
    """Where traces of requests go, if that is configured. Imported here: others need it not."""
    if not config.telemetry.traces:
        return None
    from appliance.observability.tracing import Traces, otlp

    return Traces(
        otlp(config.telemetry.endpoint),
        sample_ratio=config.telemetry.sample_ratio,
        service_name=config.telemetry.service_name,
    )


class Gateway(NamedTuple):
    """Who may ask, which requests begin, the calls of front ends, the time, and what was used."""

    access: Access
    admission: Admission
    sessions: Sessions
    clock: WallClock
    ledger: Ledger | None = None


def make_gateway(daemon: Daemon, config: Config, processes: int = 1) -> Gateway:
    """The gateway in front of a daemon; it tells `processes` front ends of the daemon's models.
    Raises `ApplianceError` if the ledger of usage cannot be opened."""
    api = config.api
    keys = None
    if api.keys:
        share = api.limits_share.fraction
        keys = KeyRing(Path(api.keys), read_only=api.keys_read_only, share=share)
    clock = WallClock(not_before=newest_change([Path(api.keys)]) if api.keys else 0.0)
    access = Access(
        keys,
        local=True,
        origins=api.origins,
        open_metrics=api.open_metrics,
        wall_clock=clock.latest,
    )
    admission = Admission(
        daemon,
        access,
        max_waiting=api.max_waiting,
        max_wait_seconds=api.max_wait_seconds,
        share_prefix_cache=api.share_prefix_cache,
        key_share=api.key_share,
    )
    settings = FrontSettings(
        keep_alive_seconds=float(api.keep_alive_seconds),
        max_body_bytes=int(api.max_body_bytes),
        max_bodies_bytes=_most_of_bodies(config),
        strict=api.strict,
        origins=api.origins,
        root_path=api.root_path,
        most_in_use=_most_of_front_end(config, processes),
    )
    ledger = _ledger(config, clock)
    sessions = Sessions(daemon, access, admission, settings, Accounts(access, ledger))
    sessions.remote_images = RemoteImages(ImageHosts(api.image_hosts, api.image_networks))
    sessions.forwards = Forwards(daemon.remotes, access, daemon.metrics_of_run.remotes)
    daemon.remotes.on_waited_enough = sessions.forwards.end_all
    daemon.catalogue.on_change = daemon.remotes.on_change = sessions.catalogue_changed
    return Gateway(access, admission, sessions, clock, ledger)


def _ledger(config: Config, clock: WallClock) -> Ledger | None:
    """What keys used, if that is to be written down. Raises `ApplianceError`."""
    wanted = config.usage
    if not wanted.directory:
        return None
    folder, months = Path(wanted.directory), wanted.keep_months
    ledger = Ledger(folder, keep_months=months, max_rows=wanted.max_rows, now=clock.now)
    ledger.open()
    return ledger


def _most_of_front_end(config: Config, processes: int) -> int | None:
    """Descriptors of a front end at most; None: as many as it may have. Under TLS the core has two
    for each connection of a front end: all front ends together may have half of the core's."""
    if not config.api.tls_certificate:
        return None
    return max(LEAST_OF_FRONT_END, most_descriptors() // (4 * processes))


def _most_of_bodies(config: Config) -> int:
    """Of one process. A client may have three quarters: one body of each size is always read."""
    return int(max(config.api.max_bodies_bytes, 2 * config.api.max_body_bytes))


def make_server(
    daemon: Daemon,
    config: Config,
    settings: Settings | None = None,
    tls: LiveTls | None = None,
    gateway: Gateway | None = None,
    front_ends: FrontEnds | None = None,
) -> Server:
    """The HTTP server in front of a daemon; `should_exit` ends it. It has to be given `tls` if the
    configuration has a certificate. Without `front_ends` it answers what is the core's alone."""
    assert (tls is not None) == bool(config.api.tls_certificate)
    gateway = make_gateway(daemon, config) if gateway is None else gateway
    app = create_app(
        daemon,
        settings=settings,
        keep_alive_seconds=config.api.keep_alive_seconds,
        max_body_bytes=config.api.max_body_bytes,
        access=gateway.access,
        admission=gateway.admission,
        batches=_batches(daemon, config, gateway),
        responses=gateway.sessions.responses,
        max_bodies_bytes=_most_of_bodies(config),
        bodies=gateway.sessions.bodies,
        ledger=gateway.ledger,
    )
    return Server(
        uvicorn.Config(
            Cors(app, config.api.origins),
            http=Connection,
            host=config.api.bind.host,
            port=config.api.bind.port,
            log_level=logging.WARNING,
            access_log=False,
            root_path=config.api.root_path,
            timeout_graceful_shutdown=GRACE_SECONDS,
            lifespan="on",
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
        ),
        front_ends,
    )


def _batches(daemon: Daemon, config: Config, gateway: Gateway) -> BatchRunner | None:
    """The daemon's batches, if there are to be any."""
    wanted = config.batches
    if not wanted.directory:
        return None
    settings = BatchSettings(
        folder=Path(wanted.directory),
        at_once=wanted.concurrency,
        max_file_bytes=wanted.max_file_bytes,
        max_requests=wanted.max_requests,
        max_line_bytes=config.api.max_body_bytes,
        max_stored_bytes=wanted.max_stored_bytes,
        max_owner_bytes=wanted.max_owner_bytes,
        keep_seconds=wanted.keep_days * 24 * 3600.0,
    )
    return BatchRunner(
        daemon,
        gateway.access,
        gateway.sessions,
        settings=settings,
        metrics=daemon.metrics_of_run.batches,
        wall_clock=gateway.clock.latest,
        expiry_clock=gateway.clock.now,
    )


class AdminServer(NamedTuple):
    """The same appliance on the operators' socket."""

    server: Server
    listener: socket.socket
    path: Path


def make_admin_server(
    server: Server, config: Config, front_ends: FrontEnds | None = None
) -> AdminServer | None:
    """The application of `server` on the admin socket, which listens from now on; None if it is to
    have none, or if no path is configured and another daemon uses the default one.

    Raises `AdminSocketError`.
    """
    configured = config.api.admin_socket
    path = admin_path(configured)
    if path is None:
        if config.api.keys:
            log.info(
                "no admin socket: commands need a key with the scope admin in $APPLIANCE_API_KEY;"
                " api.admin_socket names a socket, which needs none"
            )
        return None
    group = config.api.admin_group
    try:
        listener = open_socket(path, group)
    except AdminSocketError as error:
        if configured != AUTO:
            raise
        log.warning("no admin socket: %s", error)
        return None
    settings = uvicorn.Config(
        server.config.app,
        http=protocol_for(group),
        log_level=logging.WARNING,
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="off",
    )
    log.info("the admin socket is %s", path)
    return AdminServer(Server(settings, front_ends), listener, path)


def take_back(
    server: Server, admin: AdminServer | None, connection: socket.socket, handover: Handover
) -> None:
    """A front end gave a connection back: the server answers that had accepted it."""
    operators = admin is not None and connection.getsockname() == str(admin.path)
    taker = admin.server if admin is not None and operators else server
    taker.acceptor.take_back(connection, handover)


@contextmanager
def reloading(settings: LiveConfig, notifier: Notifier) -> Iterator[None]:
    """Read the configuration again at every SIGHUP meanwhile."""
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        with notifier.reloading():
            try:
                await settings.reload()
            except ApplianceError as error:
                log.error("the configuration was not reloaded: %s", error)

    def begin() -> None:
        task = loop.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@asynccontextmanager
async def running(admin: AdminServer | None) -> AsyncIterator[None]:
    """Serve the admin socket meanwhile; it is gone afterwards."""
    if admin is None:
        yield
        return
    serving = asyncio.create_task(admin.server.serve([admin.listener]))
    try:
        yield
    finally:
        admin.path.unlink(missing_ok=True)
        admin.server.should_exit = True
        await serving


def keep_to(cpus: Sequence[int]) -> None:
    """Have this process run on these processors. Raises `ApplianceError` where the system forbids
    that: workers could not be bound to theirs, and engines would end with an error of vLLM's."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise ApplianceError(
            f"processes cannot choose their processors ({error.strerror}); {ALLOW_BINDING}"
        ) from None


def share_cpus(
    allowed: Sequence[int],
    ranks: Sequence[int],
    processes: int = 1,
    nodes: Nodes = MappingProxyType({}),
    gpu_nodes: Sequence[Collection[int]] = (),
) -> list[str]:
    """The processors of each instance, in vLLM's notation.

    They are dealt out evenly; the daemon and its front ends (`processes`) have those that are kept
    for them. Instance i has `ranks[i]` worker processes. With fewer processors than these they are
    shared. On a machine with several NUMA `nodes` an instance has processors of the nodes of its
    GPUs, `gpu_nodes[i]`, and where these are not known, or have fewer processors than workers, as
    few nodes as can be.
    """
    usable = usable_by_workers(allowed, sum(ranks), processes)
    places = gpu_nodes or [()] * len(ranks)
    near = [frozenset[int]().union(*[nodes.get(one, ()) for one in place]) for place in places]
    return [show_cpus(share) for share in deal_near(ranks, by_node(usable, nodes), near)]


def nodes_of_gpus(devices: Devices, nodes: Nodes) -> list[frozenset[int]]:
    """The NUMA nodes of each instance's GPUs, on a machine with several nodes; none of an instance
    if that of one of its GPUs is not known. Empty without GPUs."""
    if not devices.cuda or len(nodes) < 2:
        return []
    try:
        known = {facts.gpu.number: facts.node for facts in read_gpus()}
    except GpusUnknown as error:
        log.warning("workers are not kept near their GPUs: %s", error)
        return []
    places = []
    for plan in plan_instances(devices):
        found = [known.get(gpu) for gpu in plan.gpus]
        places.append(frozenset([node for node in found if node is not None and None not in found]))
    return places


def host_nodes(
    cpus: Collection[str], nodes: Nodes, gpu_nodes: Sequence[Collection[int]] = ()
) -> tuple[int, ...]:
    """The NUMA nodes that the host tier is spread over, none on a machine with one: those of all
    GPUs, or of the workers' processors if an instance's are not known."""
    if len(nodes) < 2:
        return ()
    near = nodes.keys() & frozenset[int]().union(*gpu_nodes)
    if near and all(gpu_nodes):
        return tuple(sorted(near))
    used = {cpu for share in cpus for cpu in read_cpus(share)}
    return tuple([number for number, own in nodes.items() if used & own])


def _prepared_images(config: Config) -> str:
    """The folder for images, without those that no model is to have; "" if there is to be none, or
    cannot be one."""
    devices = config.devices
    if not devices.images:
        return ""
    wanted = {
        image_name(
            model.path,
            model.dtype,
            rank,
            ranks,
            [one.path for one in model.adapters],
            adapter_room(model),
            model.embedding_task,
        )
        for model in config.models
        for ranks in (devices_of(model, devices).tensor_parallel,)
        for rank in range(ranks)
    }
    try:
        prepare_folder(Path(devices.images), wanted)
    except OSError as error:
        log.warning("devices.images is not used: %s", error)
        return ""
    return devices.images


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
