"""The composition root: one machine, its workers, the API's requests. One event loop, one writer.

Reports of workers and calls of the API become events of the decision loop, whose commands go to the
workers, or end requests. What happens to requests and models is in modules of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import appliance
from appliance.daemon import health
from appliance.daemon.adapters.changes import AdapterChanges
from appliance.daemon.autopilot.control import Seen
from appliance.daemon.autopilot.runner import AutopilotRunner
from appliance.daemon.decision_loop import DecisionLoop, Hands
from appliance.daemon.gauges import Gauges
from appliance.daemon.guide_checks import GuideChecks, GuideUnanswered
from appliance.daemon.kv_disk import KvDisk
from appliance.daemon.models import ModelAdministration
from appliance.daemon.quarantine import Quarantine
from appliance.daemon.requests import RETRY_AFTER_SECONDS, RequestStreams
from appliance.daemon.served_model import ServedModel
from appliance.daemon.slab_queries import SlabQuestions
from appliance.daemon.status import (
    InstanceActivities,
    KvActivities,
    ModelActivities,
    disk_bytes,
    host_bytes,
    request_activity,
)
from appliance.daemon.verification import WeightVerification
from appliance.daemon.worker_links import WorkerLinks
from appliance.journal import Journal, Setup
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_files import KvFiles
from appliance.memory.slab_maps import host_map
from appliance.observability.metrics import Metrics
from appliance.observability.timeline import Timeline
from appliance.observability.work_counters import WorkCounters
from appliance.platform.gpu_monitor import GpuWatch
from appliance.platform.gpus import read_gpu_numbers
from appliance.policies.guard import BUDGET_SECONDS
from appliance.policies.loader import installed
from appliance.service.event_log import EventLog, Notice, NoticeKind
from appliance.service.front_frames import FrontModel
from appliance.service.interface import (
    Activity,
    Generation,
    GenerationFailed,
    InstanceNotFound,
    InstanceVerification,
    Load,
    ModelActivity,
    ModelCard,
    ModelPlaces,
    Readiness,
    RequestActivity,
    Sink,
    SlabsUnanswered,
    Snapshot,
    SpanPage,
    SubmitRequest,
    shutting_down,
)
from appliance.service.policy_overview import PolicyReport
from appliance.service.policy_report import PolicyChoice
from appliance.service.remote_models import RemoteModels
from appliance.vocabulary import (
    Command,
    DropSpilledKv,
    Event,
    Finish,
    InstanceId,
    InstanceLost,
    InstanceUp,
    ModelName,
    Reject,
    RequestId,
    RestoreKv,
    SlabMap,
    SpillKv,
)
from appliance.worker import frames
from appliance.worker.process import WorkerProcess
from appliance.worker.starts import ForkedStart, start_fresh

if TYPE_CHECKING:
    from appliance.observability.tracing import Traces

log = logging.getLogger("appliance.daemon")


class Limits(msgspec.Struct, frozen=True):
    """`queue`: live requests at most. A request without a new token for `progress_seconds` makes
    the daemon not ready. A policy that is not ours has `policy_seconds` for an answer."""

    queue: int
    progress_seconds: float
    policy_seconds: float = BUDGET_SECONDS


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers run on. `cpus[i]` are the processors of instance i, `devices[i]` is what it
    computes on, if that is not the CPU, `ranks[i]` its ranks, one each if there are none, and
    `groups[i]` its group, if there are any. Each rank has a pool of `pool_slabs`; a GPU has
    `runtime_slabs` besides its pool. Packed weights are kept in the folder `images`, if that is
    one. Master images are `encoded`, or plain. The host tier is spread over the NUMA nodes
    `host_nodes`, if there are any."""

    pool_slabs: int
    cpus: Sequence[str]
    ranks: Sequence[int] = ()
    groups: Sequence[str] = ()
    devices: Sequence[str] = ()
    runtime_slabs: int = 0
    images: str = ""
    encoded: bool = False
    host_nodes: Sequence[int] = ()

    def configuration(
        self, number: InstanceId, setup: Setup, models: Sequence[ServedModel]
    ) -> frames.Configure:
        """The first message to the worker of an instance."""
        return frames.Configure(
            version=frames.PROTOCOL_VERSION,
            instance=number,
            cpus=self.cpus[number],
            slabs=self.pool_slabs,
            slab_bytes=setup.slab_bytes,
            host_bytes=setup.host_bytes,
            models=[model.worker for model in models],
            ranks=self.ranks_of(number),
            device=self.devices[number] if self.devices else "cpu",
            runtime_slabs=self.runtime_slabs,
            images=self.images,
            encoded=self.encoded,
        )

    def ranks_of(self, number: InstanceId) -> int:
        """Of an instance."""
        return self.ranks[number] if self.ranks else 1

    def gpus(self) -> GpuWatch | None:
        """What watches the GPUs among the devices; None if there is none."""
        numbers = [number for device in self.devices for number in read_gpu_numbers(device)]
        return GpuWatch(numbers) if numbers else None


class Daemon:
    """Owns the box. Implements `appliance.service.interface.Service`; used on one event loop."""

    def __init__(
        self,
        setup: Setup,
        models: Sequence[ServedModel],
        plan: WorkerPlan,
        limits: Limits,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
        traces: Traces | None = None,
        kv_folder: Path | None = None,
        remotes: RemoteModels | None = None,
    ) -> None:
        """`traces` get every request that ends. `remotes` are models of other servers. KV goes to
        files in `kv_folder`, if `setup` has room for it there.

        Raises `PolicyError` if the policies cannot be loaded, `OSError` if memory cannot be had,
        `KvFolderError` if the folder cannot be used.
        """
        self.metrics_of_run = Metrics()
        self.feed = EventLog()
        self.remotes = RemoteModels() if remotes is None else remotes
        self.limits = limits
        """As they are now; they may be replaced."""
        self.on_failure: Callable[[BaseException], None] = _log_failure
        """Called when the daemon cannot go on: its books are no longer true."""
        self.front_ends_missing: Callable[[], str | None] = _nothing
        """Why no front end answers requests; None if one does."""
        self._clock = clock
        self._started = clock()
        self._reported = self._started
        """When a worker last reported something, or died."""
        self._draining = False
        self._pools: dict[InstanceId, frames.PoolReport] = {}
        self._decisions = DecisionLoop(
            setup,
            lambda: self.limits.policy_seconds,
            self.metrics_of_run,
            self.feed,
            journal,
            clock,
            Hands(self._perform, self._decided, self._performed, self._broke),
        )
        self.machine = self._decisions.machine
        self.host = _host_tier(setup.host_bytes, plan.host_nodes)
        self._kv_disk: KvDisk | None = None
        if kv_folder is not None:
            self._kv_disk = KvDisk(KvFiles(kv_folder, self.host))
        forked = None if plan.devices else ForkedStart(plan.cpus[0], plan.ranks_of(0))
        self._start_worker = forked
        self.workers = {
            number: self._worker(plan.configuration(number, setup, models))
            for number in self.machine.instances
        }
        self._compose(models, plan)
        if traces is not None:
            self._requests.trace(traces)

    def _worker(self, configuration: frames.Configure) -> WorkerProcess:
        return WorkerProcess(
            configuration,
            self.host.fd,
            self._on_message,
            self._on_lost,
            self._on_stillborn,
            self._on_failure,
            self._start_worker or start_fresh,
        )

    def _compose(self, models: Sequence[ServedModel], plan: WorkerPlan) -> None:
        """Make what connects the machine, the workers and the API."""
        machine, metrics, feed, clock = self.machine, self.metrics_of_run, self.feed, self._clock
        handle = self._decisions.handle
        self.catalogue = ModelAdministration(
            models, machine, self.workers.values(), feed, metrics, handle, self._forget_model
        )
        self.catalogue.check_here = self.remotes.check_here
        policies = self._decisions.policies
        judged = (lambda: policies.changes, self._watch_seconds, plan.ranks_of)
        self._requests = RequestStreams(
            self.catalogue, machine, handle, feed, metrics, clock, *judged
        )
        self._links = WorkerLinks(self.workers, self._requests.streams, metrics)
        self._counters = WorkCounters(metrics, feed)
        self._timeline = Timeline(
            list(machine.instances), lambda: time.time() - clock(), self._decisions.explain
        )
        self.autopilot = AutopilotRunner(policies.choice, self._decisions, self._seen, feed, clock)
        self._decisions.observers = (self._requests.phases, self._timeline, self._counters)
        self.adapters = AdapterChanges(
            self.catalogue, machine, self.workers, self._links.send, handle
        )
        self._verifications = WeightVerification(self._links.send, self._images)
        self._guides = GuideChecks(self._links.send)
        self._slab_questions = SlabQuestions(self._links.send)
        self._quarantine = Quarantine(machine, self.workers, plan.devices, feed, handle, clock)
        self._gpus = plan.gpus()
        self._instance_activities = InstanceActivities(
            machine,
            self.workers,
            self._pools,
            self._counters,
            self._timeline,
            plan.runtime_slabs,
            self._gpus,
            plan.devices,
            [(plan.groups[n] if plan.groups else "", plan.ranks_of(n)) for n in self.workers],
            clock,
        )
        self._model_activities = ModelActivities(
            machine,
            self.catalogue,
            self._requests.windows,
            self._counters.drafts,
            plan.groups,
            clock,
        )
        self._kv_activities = KvActivities(machine.host, self._pools)
        shown = (self._instance_activities, self._model_activities, self._kv_activities)
        self._gauges = Gauges(metrics, machine, self.workers, *shown, self._gpus, clock)

    def start(self) -> None:
        """Start the workers; requests are taken at once. The host tier's pages come meanwhile."""
        threading.Thread(target=self._lock_host, name="host-tier", daemon=True).start()
        if self._gpus is not None:
            self._gpus.start(_on_this_loop(self._quarantine.gpu_failed))
        if self._kv_disk is not None:
            self._kv_disk.start(_on_this_loop(self._on_report))
        for worker in self.workers.values():
            worker.start()
        self.catalogue.load_wanted()
        self.autopilot.start()

    def _lock_host(self) -> None:
        if self.host.lock():
            log.info("the host cache is in memory and page-locked")
        else:
            log.info("the host cache is not page-locked: %s", self.host.unlocked_because)

    async def drain(self, patience_seconds: float) -> None:
        """Take no more requests; let those that run end, and end the rest after a while."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            idle = asyncio.gather(self._requests.idle(), self.remotes.drain())
            await asyncio.wait_for(idle, patience_seconds)
        self._requests.give_up(shutting_down())
        self.remotes.on_waited_enough()
        self.feed.close()

    async def stop(self) -> None:
        """End the workers and give all memory back."""
        await self.autopilot.stop()
        await self.adapters.stop()
        self._decisions.silence()
        if self._gpus is not None:
            self._gpus.stop()
        if self._kv_disk is not None:
            await asyncio.to_thread(self._kv_disk.stop)
        stops = (worker.stop() for worker in self.workers.values())
        # A worker whose supervision failed called `on_failure` when it happened.
        await asyncio.gather(*stops, return_exceptions=True)
        if self._start_worker is not None:
            await self._start_worker.stop()
        self._decisions.silence()  # the end of a worker may have set an alarm
        await self._requests.close()
        self._decisions.close()
        self.host.close()

    # --- requests --------------------------------------------------------------------------------

    async def check_guide(self, name: ModelName, body: bytes) -> None:
        self.catalogue.find(name)
        try:
            await self._guides.ask(self._up, name, body)
        except GuideUnanswered as error:
            raise GenerationFailed(
                "guide_unanswered", str(error), 503, RETRY_AFTER_SECONDS
            ) from error

    def submit(self, request: SubmitRequest, sink: Sink) -> Generation:
        self.catalogue.find(request.model)
        if self._draining or self._decisions.broken:
            raise shutting_down()
        return self._requests.submit(request, sink, self.limits.queue)

    def cancel_request(self, request: RequestId) -> None:
        self._requests.cancel(request)

    # --- models ----------------------------------------------------------------------------------

    def front_models(self) -> tuple[FrontModel, ...]:
        return (*self.catalogue.front(), *self.remotes.front())

    def places(self, name: ModelName) -> ModelPlaces:
        spec, room = self.catalogue.find(name).spec, self.machine.device_room
        instances = self.machine.instances.values()
        able = [each for each in instances if each.serves and each.may_serve(name)]
        if not able:
            return ModelPlaces(1, spec.max_batch)
        return ModelPlaces(len(able), sum(room.sequences(each, name) for each in able))

    def refuse_model(self, name: ModelName, reason: str) -> None:
        self.catalogue.refuse(name, reason)

    def load_model(self, name: ModelName) -> None:
        self.catalogue.load(name)

    def evict_model(self, name: ModelName) -> None:
        self.catalogue.evict(name)

    def drain_model(self, name: ModelName, draining: bool) -> None:
        self.catalogue.drain(name, draining)

    def end_adapter(self, full: ModelName) -> None:
        """End all requests for an adapter that was removed."""
        self._requests.end_adapter(full)

    # --- instances -------------------------------------------------------------------------------

    def quarantine_instance(self, number: InstanceId, reason: str) -> None:
        self._quarantine.impose(number, reason)

    def release_instance(self, number: InstanceId) -> None:
        self._quarantine.lift(number)

    async def verify(self) -> list[InstanceVerification]:
        answers = await self._verifications.ask(self._up())
        return [
            InstanceVerification(
                instance=number, answered=number in answers, models=dict(answers.get(number, {}))
            )
            for number in self.machine.instances
        ]

    async def pool_map(self, number: InstanceId) -> SlabMap:
        instance = self.machine.instances.get(number)
        if instance is None:
            raise InstanceNotFound(number)
        if not instance.up:
            raise SlabsUnanswered(f"instance {number} is not up")
        return await self._slab_questions.ask(number)

    # --- policies --------------------------------------------------------------------------------

    async def policies(self) -> PolicyReport:
        found = await asyncio.to_thread(installed)
        return self._decisions.policies.report(found, self.autopilot.report())

    async def set_policy(self, choice: PolicyChoice) -> None:
        await self._decisions.set_policy(choice)
        self.autopilot.operator_chose()

    async def rollback_policy(self) -> None:
        await self._decisions.rollback_policy()
        self.autopilot.operator_chose()

    def enable_policy(self, policy: str) -> None:
        self._decisions.enable_policy(policy)

    def _seen(self) -> Seen:
        return self._decisions.seen(self._requests.kept())

    def _watch_seconds(self) -> float:
        return self.autopilot.terms.watch_seconds

    # --- what can be seen ------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        return health.readiness(
            self.machine,
            self.workers.values(),
            self._clock(),
            self.limits.progress_seconds,
            self.front_ends_missing(),
            None if self._start_worker is None else self._start_worker.trouble(),
        )

    def progresses(self) -> bool:
        """Whether something still happens, or nothing has to: the watchdog's question."""
        return health.progresses(
            self.machine,
            self._clock(),
            self._reported,
            self.limits.progress_seconds,
            broken=self._decisions.broken,
        )

    def models(self) -> list[ModelCard]:
        return [*self._model_activities.all_cards(), *self.remotes.cards()]

    def model(self, name: ModelName) -> ModelCard:
        return self.remotes.card(name) or self._model_activities.card(name)

    def summary(self) -> str:
        instances = self.machine.instances.values()
        up = sum(instance.up for instance in instances)
        return (
            f"{len(self.catalogue.served)} models, {up} of {len(instances)} instances up, "
            f"{len(self._requests.streams)} requests"
        )

    def activity(self) -> Activity:
        return Activity(
            version=appliance.__version__,
            uptime_seconds=self._clock() - self._started,
            instances=self._instance_activities.all(),
            models=(*self._model_activities.all(), *self.remotes.activities()),
            kv=self._kv_activities.tiers(),
            host_bytes=host_bytes(self.machine.host),
            disk_bytes=disk_bytes(self.machine.disk),
        )

    def load(self) -> Load:
        return self.remotes.listed_in(self._gauges.load(draining=self._draining))

    def requests(self) -> list[RequestActivity]:
        return [self.request(name) for name in self.machine.requests]

    def request(self, request: RequestId) -> RequestActivity:
        return request_activity(self.machine, request, self._clock())

    def model_activity(self, name: ModelName) -> ModelActivity:
        return self.remotes.activity(name) or self._model_activities.one(name)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            unix_seconds=time.time(),
            newest_event=self.feed.newest,
            readiness=self.readiness(),
            status=self.activity(),
            requests=tuple(self.requests()),
            spans=self._timeline.shown(),
        )

    def timeline(self, since: float, until: float, before: int | None) -> SpanPage:
        return self._timeline.history.page(since, until, before)

    def events(self, after: int | None) -> AsyncIterator[list[Notice] | None]:
        return self.feed.follow(after)

    def host_map(self) -> SlabMap:
        return host_map(self.machine.host)

    def metrics(self) -> bytes:
        self._gauges.refresh()
        return self.metrics_of_run.exposition()

    def _images(self, instance: InstanceId) -> dict[ModelName, int]:
        """Versions of the whole master images that the instance's engines load from, and that
        are not written to."""
        found = {}
        for name, engine in self.machine.instances[instance].engines.items():
            master = self.machine.weight_cache.get(name)
            if name in self.adapters.held:
                continue
            if master is not None and master.filler is None and engine.attached == master.version:
                found[name] = master.version
        return found

    def _up(self) -> list[InstanceId]:
        return [instance.id for instance in self.machine.instances.values() if instance.up]

    # --- what the decision loop calls ------------------------------------------------------------

    def _perform(self, command: Command) -> None:
        match command:
            case Finish():
                self._requests.finish(command)
            case Reject():
                self._requests.reject(command)
            case SpillKv() | RestoreKv() | DropSpilledKv():
                assert self._kv_disk is not None, "the machine knows of a disk"
                self._kv_disk.perform(command)
            case _:
                self._links.perform(command)

    def _decided(self) -> None:
        self.catalogue.note_failures()

    def _performed(self) -> None:
        self.catalogue.forget_removed()

    def _broke(self, error: Exception) -> None:
        self.on_failure(error)
        self._requests.give_up(
            GenerationFailed("internal_error", "the appliance failed; see its log")
        )

    def _forget_model(self, name: ModelName) -> None:
        for part in (self._requests, self._counters, self._gauges):
            part.forget_model(name)

    # --- what workers report ---------------------------------------------------------------------

    def _on_message(self, message: frames.Up) -> None:
        self._reported = self._clock()
        match message:
            case frames.Hello():
                self._on_hello(message)
            case frames.Tokens():
                self._links.produced(message)
                self._requests.produced(message)
            case frames.PoolReport():
                self._pools[message.instance] = message
            case frames.Verified():
                self._verifications.answered(message)
            case frames.AdaptersPut():
                self.adapters.answered(message)
            case frames.GuidePrepared():
                self._guides.answered(message)
            case frames.SlabsReported():
                self._slab_questions.answered(message)
            case _:
                self._on_report(message)

    def _on_hello(self, message: frames.Hello) -> None:
        log.info("instance %d is up (pid %d)", message.instance, message.pid)
        self._links.began(message.instance)
        self.feed.tell(NoticeKind.INSTANCE_UP, instance=message.instance, pid=message.pid)
        self._decisions.handle(InstanceUp(instance=message.instance, slabs=message.slabs))
        self._guides.greeted()

    def _on_report(self, event: Event) -> None:
        """A worker or the disk reports what the machine needs to know."""
        now = self._clock()
        for observer in self._decisions.observers:
            observer.reported(event, now)
        self._decisions.handle(event)

    def _on_lost(self, instance: InstanceId) -> None:
        now = self._reported = self._clock()
        self._pools.pop(instance, None)
        self._links.began(instance)
        for calls in (self._verifications, self._guides, self._slab_questions, self.adapters):
            calls.lost(instance)
        self.feed.tell(NoticeKind.INSTANCE_LOST, instance=instance)
        for observer in self._decisions.observers:
            observer.lost(instance, now)
        self._decisions.handle(InstanceLost(instance=instance))

    def _on_stillborn(self, instance: InstanceId, deaths: int) -> None:
        self._quarantine.stillborn(instance, deaths)

    def _on_failure(self, error: BaseException) -> None:
        """The supervision of a worker failed; a failure of the machine was reported already."""
        if not self._decisions.broken:
            self.on_failure(error)


def _on_this_loop(act: Callable[..., object]) -> Callable[..., None]:
    """What has `act` called on the event loop of now, from another thread, if it still runs."""
    loop = asyncio.get_running_loop()

    def call(*arguments: object) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(act, *arguments)

    return call


def _host_tier(nbytes: int, nodes: Sequence[int]) -> HostTier:
    """Spread over these NUMA nodes, if there are any, before anything touches it. Raises `OSError`
    if there is no memory for it; where the system does not let nodes be chosen, that is logged."""
    tier = HostTier.create(nbytes)
    if nodes:
        try:
            tier.spread(nodes)
        except OSError as error:
            shown = ", ".join(map(str, nodes))
            log.warning("the host cache is not spread over NUMA nodes %s: %s", shown, error)
    return tier


def _nothing() -> None:
    return None


def _log_failure(error: BaseException) -> None:
    log.critical("the daemon cannot go on", exc_info=error)
