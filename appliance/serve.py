"""From a configuration to a running appliance: the daemon, its HTTP server, signals."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from appliance.api.app import create_app
from appliance.catalog import CatalogEntry, read_checkpoint
from appliance.config import Config, Model, kv_floor_slabs, uncached, warnings
from appliance.config import Slo as ConfiguredSlo
from appliance.cpus import deal_cpus, show_cpus
from appliance.daemon import Daemon, Limits, ServedModel
from appliance.errors import ApplianceError
from appliance.journal import Journal, Setup
from appliance.tokens import Tokenizer
from appliance.vocabulary import ModelSpec, Slo
from appliance.wire import WorkerModel

DRAIN_SECONDS = 5.0
"""How long requests that run may go on after the signal to stop."""

GRACE_SECONDS = 3
"""How long connections may take to send what they have after that."""

log = logging.getLogger("appliance.serve")


def serve(config: Config) -> int:
    """Run until told to stop; returns the exit status. Raises what `make_daemon` raises."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for warning in warnings(config):
        log.warning("%s", warning)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config))


async def _serve(config: Config) -> int:
    if importlib.util.find_spec("vllm") is None:
        extra = "gpu" if config.devices.cuda else "cpu"
        raise ApplianceError(f'vLLM is not installed: install the extra "{extra}" of this package')
    daemon = make_daemon(config)
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) > config.devices.instances * config.devices.tensor_parallel:
        os.sched_setaffinity(0, allowed[-1:])  # the one that is left to us; workers set their own
    server = make_server(daemon, config)
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        log.critical("the daemon cannot go on", exc_info=error)
        failures.append(error)
        server.should_exit = True

    async def drain() -> None:
        await daemon.drain(DRAIN_SECONDS)
        server.should_exit = True

    stopping: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    daemon.on_failure = fail
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: stopping.append(loop.create_task(drain())))
    daemon.start()
    try:
        await server.serve()
    finally:
        await daemon.stop()
    return 1 if failures or not server.started else 0


def make_daemon(config: Config) -> Daemon:
    """The daemon that a configuration describes, not started yet.

    Raises `PolicyError`, `CheckpointError`, `TokenizerError` or `OSError` for what cannot be had.
    """
    devices = config.devices
    entries = [read_checkpoint(m.name, Path(m.path), m.dtype) for m in config.models]
    models = [_served(model, entry) for model, entry in zip(config.models, entries, strict=True)]
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
    )


class Server(uvicorn.Server):
    """Leaves signals alone: uvicorn would raise them again when it is done, and end the process
    before the workers are."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def make_server(daemon: Daemon, config: Config) -> Server:
    """The HTTP server in front of a daemon; `should_exit` ends it."""
    app = create_app(
        daemon,
        keep_alive_seconds=config.api.keep_alive_seconds,
        max_body_bytes=config.api.max_body_bytes,
    )
    return Server(
        uvicorn.Config(
            app,
            host=config.api.bind.host,
            port=config.api.bind.port,
            log_level=logging.WARNING,
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            lifespan="off",
        )
    )


def share_cpus(allowed: Sequence[int], instances: int, ranks: int = 1) -> list[str]:
    """The processors of each instance, in vLLM's notation.

    They are dealt out evenly; one is left to the daemon if there are more than worker processes,
    of which an instance has `ranks`. With fewer processors than instances they are shared.
    """
    usable = allowed[:-1] if len(allowed) > instances * ranks else allowed
    return [show_cpus(share) for share in deal_cpus(usable, instances)]


def _served(model: Model, entry: CatalogEntry) -> ServedModel:
    return ServedModel(
        spec=ModelSpec(
            name=model.name,
            weight_bytes=entry.weight_bytes,
            max_context_tokens=model.max_context,
            max_batch=model.max_batch,
            slo=_promise(model.slo),
            batch_slo=_promise(model.batch_slo),
            pinned=model.pin,
        ),
        worker=WorkerModel(
            name=model.name,
            path=model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_batch=model.max_batch,
            verify=model.verify,
        ),
        tokenizer=Tokenizer.load(Path(model.path)),
        created=entry.created,
    )


def _promise(slo: ConfiguredSlo) -> Slo:
    return Slo(ttft_seconds=float(slo.ttft_seconds), tbt_seconds=float(slo.tbt_seconds))


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
