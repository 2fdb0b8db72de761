"""From a configuration to a running appliance: the daemon, its HTTP server, its life."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from appliance import logs
from appliance.adminsocket import AUTO, AdminSocketError, admin_path, open_socket
from appliance.api.app import create_app
from appliance.api.auth import Access
from appliance.api.batchrunner import BatchRunner, BatchSettings
from appliance.api.connections import Connection
from appliance.api.operators import protocol_for
from appliance.api.service import Service
from appliance.api.settings import Settings
from appliance.config import Config
from appliance.configchecks import warnings
from appliance.configsizes import kv_floor_slabs, read_model, uncached
from appliance.cpus import deal_cpus, show_cpus
from appliance.daemon import Daemon, Limits
from appliance.errors import ApplianceError
from appliance.journal import Journal, Setup
from appliance.keys import KeyRing
from appliance.lifetime import Lifetime, Server
from appliance.liveconfig import LiveConfig, tls_pair
from appliance.memory.imagefile import image_name, prepare_folder
from appliance.servedmodels import served_model
from appliance.systemd import Notifier, refuse_strangers, take_sockets
from appliance.tlsfiles import LiveTls

if TYPE_CHECKING:
    from appliance.telemetry import Traces

GRACE_SECONDS = 3
"""How long connections may take to send what they have after the drain."""

log = logging.getLogger("appliance.serve")


def serve(config: Config, path: Path) -> int:
    """Run until told to stop, on what was read from `path`; returns the exit status. Raises what
    `make_daemon` raises."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing to reload yet
    logs.begin(config.log.format, config.log.level)
    for warning in warnings(config):
        log.warning("%s", warning)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, path))


async def _serve(config: Config, path: Path) -> int:
    if importlib.util.find_spec("vllm") is None:
        extra = "gpu" if config.devices.cuda else "cpu"
        raise ApplianceError(f'vLLM is not installed: install the extra "{extra}" of this package')
    notifier = Notifier.taken_from(os.environ)
    sockets = take_sockets(os.environ)
    if not config.api.keys:
        refuse_strangers(sockets)
    daemon = make_daemon(config)
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > config.devices.instances * config.devices.tensor_parallel:
        os.sched_setaffinity(0, allowed[-1:])  # the one that is left to us; workers set their own
    pair = tls_pair(config, path)
    tls = None if pair is None else LiveTls(pair)
    settings = LiveConfig(daemon, config, path, tls)
    await settings.finish_deletions()
    server = make_server(daemon, config, settings, tls)
    admin = make_admin_server(server, config)
    lifetime = Lifetime(
        daemon,
        server,
        notifier,
        sockets,
        drain_seconds=float(config.api.drain_seconds),
    )
    daemon.on_failure = lifetime.fail
    # All of this stays: a collection need not look at it again, for tens of milliseconds in which
    # no request is heard and no token sent.
    gc.collect()
    gc.freeze()
    with reloading(settings, notifier):
        async with beside(admin):
            return await lifetime.run()


def make_daemon(config: Config) -> Daemon:
    """The daemon that a configuration describes, not started yet.

    Raises `PolicyError`, `CheckpointError`, `TokenizerError` or `OSError` for what cannot be had.
    """
    devices = config.devices
    entries = [read_model(model, devices) for model in config.models]
    models = [
        served_model(model, entry) for model, entry in zip(config.models, entries, strict=True)
    ]
    if left_out := uncached(config, entries):
        log.warning(
            "devices.host_cache has no room for the weights of %s beside those of the others: "
            "models that are not in it are loaded from disk",
            ", ".join(left_out),
        )
    setup = Setup(
        models=tuple(model.spec for model in models),
        instances=devices.instances,
        host_bytes=int(devices.host_cache_bytes // devices.slab_bytes * devices.slab_bytes),
        slab_bytes=int(devices.slab_bytes),
        kv_floor_slabs=kv_floor_slabs(config, entries),
        policy=config.policy.choice,
    )
    return Daemon(
        setup,
        models,
        devices.slabs,
        share_cpus(sorted(os.sched_getaffinity(0)), devices.instances, devices.tensor_parallel),
        Limits(
            queue=config.api.max_queue,
            progress_seconds=float(config.api.progress_deadline_seconds),
            policy_seconds=float(config.policy.budget_seconds),
        ),
        Journal(Path(config.journal.path), setup) if config.journal.path else None,
        ranks=devices.tensor_parallel,
        devices=[f"cuda:{number}" for number in range(devices.instances)] if devices.cuda else (),
        runtime_slabs=devices.runtime_slabs,
        images=_prepared_images(config),
        traces=_traces(config),
    )


def _traces(config: Config) -> Traces | None:
    """Who is told of requests, if anybody is. Imported here: others need it not."""
    if not config.telemetry.traces:
        return None
    from appliance.telemetry import Traces, otlp

    return Traces(
        otlp(config.telemetry.endpoint),
        sample_ratio=config.telemetry.sample_ratio,
        service_name=config.telemetry.service_name,
    )


def make_server(
    daemon: Daemon,
    config: Config,
    settings: Settings | None = None,
    tls: LiveTls | None = None,
) -> Server:
    """The HTTP server in front of a daemon; `should_exit` ends it. It has to be given `tls` if the
    configuration has a certificate."""
    assert (tls is not None) == bool(config.api.tls_certificate)
    keys = KeyRing(Path(config.api.keys)) if config.api.keys else None
    app = create_app(
        daemon,
        settings=settings,
        keep_alive_seconds=config.api.keep_alive_seconds,
        max_body_bytes=config.api.max_body_bytes,
        access=Access(keys, local=True, open_metrics=config.api.open_metrics),
        max_waiting=config.api.max_waiting,
        max_wait_seconds=config.api.max_wait_seconds,
        batches=_batches(daemon, config),
        traced=config.telemetry.traces,
    )
    return Server(
        uvicorn.Config(
            app,
            http=Connection,
            host=config.api.bind.host,
            port=config.api.bind.port,
            log_level=logging.WARNING,
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            lifespan="on",
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
        )
    )


def _batches(daemon: Daemon, config: Config) -> Callable[[Service, Access], BatchRunner] | None:
    """What makes the daemon's batches, if there are to be any."""
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
        keep_seconds=wanted.keep_days * 24 * 3600.0,
    )
    return partial(BatchRunner, settings=settings, metrics=daemon.metrics_of_run.batches)


class AdminServer(NamedTuple):
    """The same appliance on the operators' socket."""

    server: Server
    listener: socket.socket
    path: Path


def make_admin_server(server: Server, config: Config) -> AdminServer | None:
    """The application of `server` on the admin socket, which listens from now on; None if it is to
    have none, or nobody said where and another daemon is there.

    Raises `AdminSocketError`.
    """
    configured = config.api.admin_socket
    path = admin_path(configured)
    if path is None:
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
    log.info("operators are listened to at %s", path)
    return AdminServer(Server(settings), listener, path)


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
async def beside(admin: AdminServer | None) -> AsyncIterator[None]:
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


def share_cpus(allowed: Sequence[int], instances: int, ranks: int = 1) -> list[str]:
    """The processors of each instance, in vLLM's notation.

    They are dealt out evenly; one is left to the daemon if there are more than worker processes,
    of which an instance has `ranks`. With fewer processors than instances they are shared.
    """
    usable = allowed[:-1] if len(allowed) > instances * ranks else allowed
    return [show_cpus(share) for share in deal_cpus(usable, instances)]


def _prepared_images(config: Config) -> str:
    """The folder for images, without those that no model is to have; "" if there is to be none, or
    cannot be one."""
    devices = config.devices
    if not devices.images:
        return ""
    ranks = devices.tensor_parallel
    wanted = {
        image_name(model.path, model.dtype, rank, ranks)
        for model in config.models
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
