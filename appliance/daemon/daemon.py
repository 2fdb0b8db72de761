"""The composition root: one machine, its workers, the API's requests. One event loop, one writer.

Events come from workers and from the API; each goes through the machine at once, and the commands
that follow are performed before the next event is taken. Nothing here waits, so order is total.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial, singledispatchmethod
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

import appliance
from appliance.daemon import health
from appliance.daemon.gauges import Gauges
from appliance.daemon.guide_checks import GuideChecks, GuideUnanswered
from appliance.daemon.policy_history import PolicyWatch
from appliance.daemon.quarantine import Quarantine
from appliance.daemon.served_model import ServedModel
from appliance.daemon.slab_queries import SlabQuestions
from appliance.daemon.status import (
    InstanceActivities,
    KvActivities,
    ModelActivities,
    host_bytes,
    request_activity,
)
from appliance.daemon.verification import Verifications
from appliance.journal import Journal, Setup
from appliance.memory.host_tier import HostTier
from appliance.memory.slab_maps import host_map
from appliance.observability.metrics import Metrics
from appliance.observability.request_log import log_request
from appliance.observability.request_phases import RequestPhases
from appliance.observability.slo_window import SloWindow
from appliance.observability.switches import Switches
from appliance.observability.timeline import HOOKS, MOST_PLANNED, Timeline
from appliance.platform.gpu_monitor import GpuWatch
from appliance.policies.guard import BUDGET_SECONDS
from appliance.policies.loader import installed
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.service.event_log import EventLog, Notice, NoticeKind
from appliance.service.front_frames import FrontModel
from appliance.service.generation import RequestStream
from appliance.service.interface import (
    Activity,
    Decision,
    Generation,
    GenerationFailed,
    InstanceNotFound,
    InstanceVerification,
    ModelActivity,
    ModelCard,
    ModelExists,
    ModelNotFound,
    ModelQueueFull,
    ModelTerms,
    QueueFull,
    Readiness,
    RequestActivity,
    RequestNotFound,
    Sink,
    SlabsUnanswered,
    Snapshot,
    SubmitRequest,
    cancelled,
)
from appliance.service.policy_report import PolicyChoice, PolicyChosen, PolicyEnabled, PolicyReport
from appliance.vocabulary import (
    Command,
    Direction,
    Event,
    EvictModel,
    Finish,
    FinishReason,
    InstanceId,
    InstanceLost,
    InstanceUp,
    KvMoved,
    ModelAdded,
    ModelChanged,
    ModelDismissed,
    ModelLoaded,
    ModelName,
    ModelRemoved,
    ModelWanted,
    MoveKv,
    PrefetchModel,
    PrefillDone,
    ReaderStalled,
    ReaderWentOn,
    Reject,
    Release,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RequestSpec,
    RunPrefill,
    RunTurn,
    SlabMap,
    Ticked,
    TokenCount,
    TokensProduced,
)
from appliance.worker import frames
from appliance.worker.process import WorkerProcess

if TYPE_CHECKING:
    from appliance.observability.tracing import Traces

RETRY_AFTER_SECONDS = 1.0
REJECTION_STATUS = {
    "model_not_found": 404,
    "context_length_exceeded": 400,
    "kv_too_large": 400,
    "request_failed": 400,
    "overloaded": 503,
    "model_draining": 503,
    "no_instance": 503,
    "model_removed": 404,
}

log = logging.getLogger("appliance.daemon")


class Limits(msgspec.Struct, frozen=True):
    """`queue`: live requests at most. A request without a new token for `progress_seconds` makes
    the daemon not ready. A policy that is not ours has `policy_seconds` for an answer."""

    queue: int
    progress_seconds: float
    policy_seconds: float = BUDGET_SECONDS


class Daemon:
    """Owns the box. Implements `appliance.service.interface.Service`; used on one event loop."""

    def __init__(
        self,
        setup: Setup,
        models: Sequence[ServedModel],
        pool_slabs: int,
        cpus: Sequence[str],
        limits: Limits,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
        ranks: int = 1,
        devices: Sequence[str] = (),
        runtime_slabs: int = 0,
        images: str = "",
        traces: Traces | None = None,
    ) -> None:
        """`pool_slabs` is the pool of each rank of an instance, which has `ranks` of them;
        `cpus[i]` are the processors of instance i, and `devices[i]` is what it computes on, if that
        is not the CPU. A GPU has `runtime_slabs` beside its pool. Packed weights are kept in the
        folder `images`, if that is one. `traces` are told of every request that ends.

        Raises `PolicyError` if the policies cannot be loaded, `OSError` if memory cannot be had.
        """
        self.metrics_of_run = Metrics()
        self.feed = EventLog()
        self.limits = limits
        """As they are now; they may be replaced."""
        self._policies = PolicyWatch(setup.policy, self._stack(setup), self.metrics_of_run)
        self.machine: Machine = setup.machine(self._policies.stack)
        self.host = HostTier.create(setup.host_bytes)
        self.on_failure: Callable[[BaseException], None] = _log_failure
        """Called when the daemon cannot go on: its books are no longer true."""
        self.on_catalogue: Callable[[], None] = _ignore
        """Called when `front_models` has changed."""
        self.front_ends_missing: Callable[[], str | None] = _nothing
        """Why no front end answers requests; None if one does."""
        self._setup = setup
        self._served: dict[ModelName, ServedModel] = {m.spec.name: m for m in models}
        self._journal = journal
        self._clock = clock
        self._started = clock()
        self._heard = self._started
        """When a worker last reported something, or died."""
        self._streams: dict[RequestId, RequestStream] = {}
        self._live: Counter[ModelName] = Counter()
        """Streams of each model."""
        self._inbox: deque[Callable[[], None]] = deque()
        """What is to be done next: each an event, or a change of policies."""
        self._changing = asyncio.Lock()
        """Held while policies are changed."""
        self._handling = False
        self._broken = False
        """The machine contradicted itself; nothing more is decided."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: float | None = None
        self._known: dict[InstanceId, set[RequestId]] = {}
        self._switches = Switches(self.metrics_of_run, self.feed)
        self._pools: dict[InstanceId, frames.PoolReport] = {}
        self._traces = traces
        self._times = RequestPhases(keeps_stretches=traces is not None)
        self._spans = Timeline(list(self.machine.instances), lambda: time.time() - clock())
        self._paces: defaultdict[ModelName, SloWindow] = defaultdict(SloWindow)
        self._verifications = Verifications(self._send_to, self._images)
        self._guides = GuideChecks(self._send_to)
        self._slab_questions = SlabQuestions(self._send_to)
        self._leaving: dict[ModelName, asyncio.Event] = {}
        """Models that were removed, and when they are gone."""
        self._failed: set[ModelName] = set()
        """Models of which it was told that they cannot be served."""
        self._refused: dict[ModelName, str] = {}
        """Models whose front half cannot be built, and why."""
        for name in self._served:
            self.metrics_of_run.declare(name)
        self.workers = {
            number: WorkerProcess(
                frames.Configure(
                    version=frames.PROTOCOL_VERSION,
                    instance=number,
                    cpus=cpus[number],
                    slabs=pool_slabs,
                    slab_bytes=setup.slab_bytes,
                    host_bytes=setup.host_bytes,
                    models=[model.worker for model in models],
                    ranks=ranks,
                    device=devices[number] if devices else "cpu",
                    runtime_slabs=runtime_slabs,
                    images=images,
                ),
                self.host.fd,
                self._on_message,
                self._on_lost,
                self._on_stillborn,
                self._on_failure,
            )
            for number in self.machine.instances
        }
        self._quarantine = Quarantine(
            self.machine.instances, self.workers, devices, self.feed, self._tell, clock
        )
        gpus = [int(name.removeprefix("cuda:")) for name in devices if name.startswith("cuda:")]
        self._gpus = GpuWatch(gpus) if gpus else None
        self._instance_activities = InstanceActivities(
            self.machine,
            self.workers,
            self._pools,
            self._switches,
            self._spans,
            runtime_slabs,
            self._gpus,
            devices,
        )
        self._model_activities = ModelActivities(
            self.machine, self._served, self._leaving, self._paces, clock, self._refused
        )
        self._kv_activities = KvActivities(self.machine.host, self._pools)
        self._gauges = Gauges(
            self.metrics_of_run,
            self.machine,
            self.workers,
            self._instance_activities,
            self._model_activities,
            self._kv_activities,
            self._gpus,
            clock,
        )

    def start(self) -> None:
        """Start the workers; requests are taken at once. The host tier's pages are brought in and
        locked meanwhile, once, so that no request waits for that."""
        threading.Thread(target=self._lock_host, name="host-tier", daemon=True).start()
        if self._gpus is not None:
            loop = asyncio.get_running_loop()
            self._gpus.start(partial(_call_on, loop, self._quarantine.gpu_failed))
        for worker in self.workers.values():
            worker.start()

    def _lock_host(self) -> None:
        if self.host.lock():
            log.info("the host cache is in memory and page-locked")
        else:
            log.info("the host cache is not page-locked: %s", self.host.unlocked_because)

    async def drain(self, patience_seconds: float) -> None:
        """Take no more requests; let those that run end, and tell the rest after a while."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), patience_seconds)
        for stream in self._streams.values():
            self._end(stream, "shutting_down", _shutting_down())
        self.feed.close()

    async def stop(self) -> None:
        """End the workers and give all memory back."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._gpus is not None:
            self._gpus.stop()
        stops = (worker.stop() for worker in self.workers.values())
        # What a worker's keeper failed of was told to `on_failure` when it happened.
        await asyncio.gather(*stops, return_exceptions=True)
        if self._alarm is not None:  # of a worker's end
            self._alarm.cancel()
        if self._traces is not None:
            await self._traces.stop()
        self._policies.stack.close()
        self.host.close()
        if self._journal is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep us from stopping
                self._journal.close()
            self._journal = None  # operators may still ask for something

    # --- the service the API sees ----------------------------------------------------------------

    def models(self) -> list[ModelCard]:
        return [self.model(name) for name in self._served if name not in self._leaving]

    def model(self, name: ModelName) -> ModelCard:
        self._find(name)
        return self._model_activities.card(name)

    def front_models(self) -> tuple[FrontModel, ...]:
        return tuple(
            served.front for name, served in self._served.items() if name not in self._leaving
        )

    def refuse_model(self, name: ModelName, reason: str) -> None:
        if name not in self._served or name in self._refused:
            return
        self._refused[name] = reason
        log.error("model %s cannot be served: %s", name, reason)
        self.feed.tell(NoticeKind.MODEL_FAILED, model=name, reason=reason)

    async def check_guide(self, name: ModelName, body: bytes) -> None:
        self._find(name)

        def up() -> list[InstanceId]:
            return [instance.id for instance in self.machine.instances.values() if instance.up]

        try:
            await self._guides.ask(up, name, body)
        except GuideUnanswered as error:
            raise GenerationFailed(
                "guide_unanswered", str(error), 503, RETRY_AFTER_SECONDS
            ) from error

    def submit(self, request: SubmitRequest, sink: Sink) -> Generation:
        served = self._find(request.model)
        spec = served.spec
        if self._draining or self._broken:
            raise _shutting_down()
        if (reason := self._refused.get(request.model)) is not None:
            raise GenerationFailed("model_failed", reason, 500)
        if len(self._streams) >= self.limits.queue:
            raise QueueFull(RETRY_AFTER_SECONDS)
        if self._live[request.model] >= served.max_queue:
            raise ModelQueueFull(RETRY_AFTER_SECONDS, request.model)
        slo = request.slo.over(spec.promised(request.request_class))
        stream = RequestStream(request, self._clock(), sink, self._cancel, self._on_reader, slo)
        self._streams[request.id] = stream
        self._times.arrived(request.id, request.model, stream.arrived)
        self._live[request.model] += 1
        self._idle.clear()
        self.feed.tell(
            NoticeKind.REQUEST_ARRIVED,
            id=request.id,
            model=request.model,
            request_class=request.request_class,
        )
        self._tell(
            RequestArrived(
                request=RequestSpec(
                    id=request.id,
                    model=request.model,
                    prompt_tokens=len(request.prompt),
                    max_tokens=request.max_tokens,
                    slo=slo,
                    request_class=request.request_class,
                )
            )
        )
        if stream.failure is not None:
            raise stream.failure
        stream.taken = True
        return stream

    def readiness(self) -> Readiness:
        return health.readiness(
            self.machine,
            self.workers.values(),
            self._clock(),
            self.limits.progress_seconds,
            self.front_ends_missing(),
        )

    def progresses(self) -> bool:
        return health.progresses(
            self.machine,
            self._clock(),
            self._heard,
            self.limits.progress_seconds,
            broken=self._broken,
        )

    def summary(self) -> str:
        instances = self.machine.instances.values()
        up = sum(instance.up for instance in instances)
        return (
            f"{len(self._served)} models, {up} of {len(instances)} instances up, "
            f"{len(self._streams)} requests"
        )

    def activity(self) -> Activity:
        return Activity(
            version=appliance.__version__,
            uptime_seconds=self._clock() - self._started,
            instances=self._instance_activities.all(),
            models=self._model_activities.all(),
            kv=self._kv_activities.tiers(),
            host_bytes=host_bytes(self.machine.host),
        )

    def requests(self) -> list[RequestActivity]:
        return [self.request(name) for name in self.machine.requests]

    def request(self, request: RequestId) -> RequestActivity:
        return request_activity(self.machine, request, self._clock())

    def cancel_request(self, request: RequestId) -> None:
        stream = self._streams.get(request)
        if stream is None:
            raise RequestNotFound(request)
        stream.end(cancelled())
        self._cancel(request)

    def quarantine_instance(self, number: InstanceId, reason: str) -> None:
        self._quarantine.impose(number, reason)

    def release_instance(self, number: InstanceId) -> None:
        self._quarantine.lift(number)

    def model_activity(self, name: ModelName) -> ModelActivity:
        if name not in self._leaving:
            self._find(name)
        return self._model_activities.one(name)

    def load_model(self, name: ModelName) -> None:
        self._find(name)
        reason = self.machine.failed.get(name) or self._refused.get(name)
        if reason is not None:
            raise GenerationFailed("model_failed", reason, 409)
        self.feed.tell(NoticeKind.MODEL_WANTED, model=name)
        self._tell(ModelWanted(model=name))

    def evict_model(self, name: ModelName) -> None:
        self._find(name)
        self.feed.tell(NoticeKind.MODEL_DISMISSED, model=name)
        self._tell(ModelDismissed(model=name))

    def drain_model(self, name: ModelName, draining: bool) -> None:
        served = self._find(name)
        spec = msgspec.structs.replace(served.spec, draining=draining)
        self._change(msgspec.structs.replace(served, spec=spec))

    def change_model(self, name: ModelName, terms: ModelTerms) -> None:
        """Serve the model on other terms from now on. Raises `ModelNotFound`."""
        served = self._find(name)
        spec = msgspec.structs.replace(
            served.spec, slo=terms.slo, batch_slo=terms.batch_slo, pinned=terms.pinned
        )
        self._change(msgspec.structs.replace(served, spec=spec, max_queue=terms.max_queue))

    def add_model(self, served: ServedModel, kv_floor_slabs: int) -> None:
        """Serve a model more from now on; the host tier has `kv_floor_slabs` for KV at least.
        Raises `ModelExists`."""
        name = served.spec.name
        self.check_free(name)
        self._served[name] = served
        self.metrics_of_run.declare(name)
        for worker in self.workers.values():
            worker.add(served.worker)
        self.feed.tell(NoticeKind.MODEL_ADDED, model=name)
        self._tell(ModelAdded(model=served.spec, kv_floor_slabs=kv_floor_slabs))
        self.on_catalogue()

    def check_free(self, name: ModelName) -> None:
        """Raises `ModelExists` unless a model may be added under this name."""
        if name in self._served:
            raise ModelExists(name, leaving=name in self._leaving)

    def remove_model(self, name: ModelName, *, force: bool) -> asyncio.Event:
        """Take no more requests for the model, and forget it when its last one has ended; with
        `force`, end them. The event is set when it is gone. Raises `ModelNotFound`."""
        if name not in self._leaving:
            self._find(name)
            self._leaving[name] = asyncio.Event()
            self.feed.tell(NoticeKind.MODEL_LEAVING, model=name)
            self.on_catalogue()
        gone = self._leaving[name]
        if name not in self.machine.leaving and (force or not self._live[name]):
            self._tell(ModelRemoved(model=name))
        return gone

    def _forget_models(self) -> None:
        """Those that the machine has forgotten."""
        for name in [name for name in self._leaving if name not in self.machine.models]:
            del self._served[name], self._live[name]
            self._refused.pop(name, None)
            self._paces.pop(name, None)
            for worker in self.workers.values():
                worker.drop(name)
            self._switches.forget(name)
            self._gauges.forget(name)
            self.metrics_of_run.forget(name)
            self.feed.tell(NoticeKind.MODEL_REMOVED, model=name)
            self._leaving.pop(name).set()

    def _change(self, served: ServedModel) -> None:
        spec = served.spec
        self._served[spec.name] = served
        self.feed.tell(
            NoticeKind.MODEL_CHANGED,
            model=spec.name,
            draining=spec.draining,
            pinned=spec.pinned,
            slo=spec.slo,
            batch_slo=spec.batch_slo,
            max_queue=served.max_queue,
        )
        self._tell(
            ModelChanged(
                model=spec.name,
                slo=spec.slo,
                batch_slo=spec.batch_slo,
                pinned=spec.pinned,
                draining=spec.draining,
            )
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(
            unix_seconds=time.time(),
            newest_event=self.feed.newest,
            readiness=self.readiness(),
            status=self.activity(),
            requests=tuple(self.requests()),
            spans=self._spans.shown(),
        )

    def events(self, after: int | None) -> AsyncIterator[list[Notice] | None]:
        return self.feed.follow(after)

    async def verify(self) -> list[InstanceVerification]:
        up = [instance.id for instance in self.machine.instances.values() if instance.up]
        answers = await self._verifications.ask(up)
        verifications = []
        for number in self.machine.instances:
            verdicts = answers.get(number)
            verifications.append(
                InstanceVerification(
                    instance=number, answered=verdicts is not None, models=dict(verdicts or {})
                )
            )
        return verifications

    async def pool_map(self, number: InstanceId) -> SlabMap:
        instance = self.machine.instances.get(number)
        if instance is None:
            raise InstanceNotFound(number)
        if not instance.up:
            raise SlabsUnanswered(f"instance {number} is not up")
        return await self._slab_questions.ask(number)

    def host_map(self) -> SlabMap:
        return host_map(self.machine.host)

    def metrics(self) -> bytes:
        self._gauges.refresh()
        return self.metrics_of_run.exposition()

    def _find(self, name: ModelName) -> ServedModel:
        served = self._served.get(name)
        if served is None or name in self._leaving:
            raise ModelNotFound(name)
        return served

    def _images(self, instance: InstanceId) -> dict[ModelName, int]:
        """Versions of the whole master images that the instance's engines load from."""
        found = {}
        for name, engine in self.machine.instances[instance].engines.items():
            master = self.machine.weight_cache.get(name)
            if master is not None and master.filler is None and engine.attached == master.version:
                found[name] = master.version
        return found

    # --- events in, commands out -----------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Have the machine handle an event, after those that wait, and do what follows."""
        self._do(partial(self._handle, event))

    def _do(self, step: Callable[[], None]) -> None:
        self._inbox.append(step)
        if self._handling or self._broken:
            return
        self._handling = True
        try:
            while self._inbox:
                self._inbox.popleft()()
        except Exception as error:
            self._broken = True
            self.on_failure(error)
            for stream in self._streams.values():
                failure = GenerationFailed("internal_error", "the appliance failed; see its log")
                self._end(stream, failure.code, failure)
            raise
        finally:
            self._handling = False

    def _handle(self, event: Event) -> None:
        now = self._clock()
        commands: list[Command] = []
        began = time.perf_counter()
        try:
            commands = self.machine.handle(event, now)
        finally:
            self.metrics_of_run.decision(type(event).__name__, time.perf_counter() - began)
            self._write_down(now, event, commands)
        self._follow(now, commands, type(event).__name__)

    def _follow(self, now: float, commands: list[Command], after: str) -> None:
        if self.machine.failed.keys() != self._failed:
            self._note_failures()
        for command in commands:
            self._times.ordered(command, now)
            if type(command) in HOOKS:
                self._spans.ordered(command, now, self._explain(command, after))
            self._perform(command)
        self._set_alarm(now)
        self._policies.note_faults()
        if self._leaving:
            self._forget_models()

    def _note_failures(self) -> None:
        """Report models that are not served from now on, however the failure was found."""
        found = self.machine.failed
        for model in found.keys() - self._failed - set(self.machine.leaving):
            log.error("model %s cannot be served: %s", model, found[model])
            self.feed.tell(NoticeKind.MODEL_FAILED, model=model, reason=found[model])
        self._failed = set(found)

    # --- policies --------------------------------------------------------------------------------

    # Finding and importing policies takes time: that is done beside the event loop.

    async def policies(self) -> PolicyReport:
        return self._policies.report(await asyncio.to_thread(installed))

    async def set_policy(self, choice: PolicyChoice) -> None:
        async with self._changing:
            stack = await self._load(choice)
            self._swap(choice, stack, partial(self._policies.chosen, choice, stack))

    async def rollback_policy(self) -> None:
        async with self._changing:
            choice = self._policies.previous()
            stack = await self._load(choice)
            self._swap(choice, stack, partial(self._policies.returned, stack))

    def enable_policy(self, policy: str) -> None:
        self._policies.enable(policy)
        self._write_down(self._clock(), PolicyEnabled(policy=policy), [])

    async def _load(self, choice: PolicyChoice) -> PolicyStack:
        setup = msgspec.structs.replace(self._setup, policy=choice)
        return await asyncio.to_thread(self._stack, setup)

    def _stack(self, setup: Setup) -> PolicyStack:
        return setup.stack(
            budget_seconds=self.limits.policy_seconds, observe=self.metrics_of_run.policy_call
        )

    def _swap(self, choice: PolicyChoice, stack: PolicyStack, note: Callable[[], None]) -> None:
        """Have another stack decide, between two events."""

        def swap() -> None:
            now = self._clock()
            note()
            self.feed.tell(NoticeKind.POLICIES_CHOSEN, choice=choice)
            commands: list[Command] = []
            try:
                commands = self.machine.set_policy(stack, now)
            finally:
                self._write_down(now, PolicyChosen(choice=choice), commands)
            self._follow(now, commands, PolicyChosen.__name__)

        if self._broken:
            raise _shutting_down()
        self._do(swap)

    def _explain(self, command: Command, after: str) -> Decision:
        """What led to a command that a span begins with."""
        hook = HOOKS[type(command)]
        if hook is None:
            return Decision(after=after)
        instance: InstanceId = command.instance  # type: ignore[attr-defined]
        work = self.machine.instances[instance].work
        return Decision(
            after=after,
            hook=hook,
            policy=self._policies.stack.answered(hook, instance),
            plan=tuple((turn.model, turn.quota_seconds) for turn in islice(work, MOST_PLANNED)),
        )

    def _set_alarm(self, now: float) -> None:
        """Be woken when the machine has something to do that no event brings about."""
        deadline = self.machine.next_deadline()
        if deadline == self._alarm_at:
            return
        self._alarm_at = deadline
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.0, deadline - now), self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_at = None
        self._tell(Ticked())

    def _write_down(self, now: float, event: Event, commands: list[Command]) -> None:
        """A journal that cannot be written must not stop the service."""
        missed = self._policies.stack.take_missed()
        if self._journal is None:
            return
        try:
            self._journal.record(now, event, commands, missed)
        except OSError:
            log.exception("the journal ends here")
            self._journal = None

    def _on_message(self, message: frames.Up) -> None:
        self._heard = self._clock()
        match message:
            case frames.Hello():
                log.info("instance %d is up (pid %d)", message.instance, message.pid)
                self._known[message.instance] = set()
                self.feed.tell(NoticeKind.INSTANCE_UP, instance=message.instance, pid=message.pid)
                self._tell(InstanceUp(instance=message.instance, slabs=message.slabs))
                self._guides.greeted()
            case frames.Tokens():
                self._on_tokens(message)
            case frames.PoolReport():
                self._pools[message.instance] = message
            case frames.Verified():
                self._verifications.answered(message)
            case frames.GuidePrepared():
                self._guides.answered(message)
            case frames.SlabsTold():
                self._slab_questions.answered(message)
            case _:
                self._observe(message)
                self._tell(message)

    def _on_lost(self, instance: InstanceId) -> None:
        self._heard = self._clock()
        self._switches.lost(instance)
        self._pools.pop(instance, None)
        self._verifications.lost(instance)
        self._guides.lost(instance)
        self._slab_questions.lost(instance)
        self.feed.tell(NoticeKind.INSTANCE_LOST, instance=instance)
        self._known[instance] = set()
        self._times.lost(instance, self._clock())
        self._spans.lost(instance, self._clock())
        self._tell(InstanceLost(instance=instance))

    def _on_stillborn(self, instance: InstanceId, deaths: int) -> None:
        self._quarantine.stillborn(instance, deaths)

    def _on_failure(self, error: BaseException) -> None:
        """A worker's keeper failed; if the machine did before, that was told."""
        if not self._broken:
            self.on_failure(error)

    def _on_tokens(self, message: frames.Tokens) -> None:
        """Every token of every request comes by here: what can be counted once for the whole frame
        is."""
        now = self._clock()
        model, streams = message.model, self._streams
        known = self._known[message.instance]
        counts: list[TokenCount] = []
        tokens = late = 0
        gaps: dict[float, int] = {}
        """How many tokens came so long after the ones before; those of one step are alike."""
        for produced in message.produced:
            finished = produced.finished
            if finished is not None:
                known.discard(produced.request)
            stream = streams.get(produced.request)
            if stream is None:
                continue
            count = produced.tokens
            tokens += count
            if stream.held:
                self._excuse(stream)
            if now > stream.due():
                late += count
                stream.late += count
            if stream.output:
                gap = now - stream.newest
                gaps[gap] = gaps.get(gap, 0) + 1
            else:
                self._first_token(stream, now, count)
            stream.newest = now
            stream.push(produced)
            counts.append(TokenCount(request=stream.id, count=count, finished=finished))
        if not counts:
            return
        pace = self._paces[model]
        pace.tokens(now, tokens, late)
        for gap, count in gaps.items():
            pace.next_token(now, gap, count)
            self.metrics_of_run.tokens(model, count, gap)
        self._tell(TokensProduced(instance=message.instance, model=model, tokens=tuple(counts)))

    def _excuse(self, stream: RequestStream) -> None:
        """Its client stopped reading for a while: its tokens are due so much later."""
        state = self.machine.requests.get(stream.id)
        if state is not None and state.excused > stream.excused:
            stream.excuse(state.excused - stream.excused)

    def _first_token(self, stream: RequestStream, now: float, tokens: int) -> None:
        model, seconds = stream.request.model, now - stream.arrived
        stream.first = now
        self._paces[model].first_token(now, seconds)
        self.metrics_of_run.first_token(model, len(stream.request.prompt), tokens, seconds)

    def _observe(self, event: Event) -> None:
        """What a worker reports beside what the machine needs to know."""
        self._times.reported(event, self._clock())
        self._spans.reported(event, self._clock())
        if isinstance(event, KvMoved):
            self.metrics_of_run.kv_swapped(event.direction, event.model, event.moved_bytes)
            if event.moved:
                self._measure_transfer(f"kv_{event.direction.value}", event)
        elif isinstance(event, ModelLoaded):
            self._measure_transfer("weights", event)
            self.feed.tell(
                NoticeKind.MODEL_LOADED,
                instance=event.instance,
                model=event.model,
                seconds=event.seconds,
                prefetched=event.prefetched,
            )
        elif isinstance(event, PrefillDone):
            self.metrics_of_run.prefill(event.model)

    def _measure_transfer(self, kind: str, event: ModelLoaded | KvMoved) -> None:
        self.metrics_of_run.transfer(
            kind, event.model, event.moved_bytes, event.queued_seconds, event.seconds
        )

    def _cancel(self, request: RequestId) -> None:
        if request in self._streams:
            self._tell(RequestCancelled(request=request))

    def _on_reader(self, request: RequestId, reads: bool) -> None:
        if request not in self._streams:
            return
        self._times.reader(request, reads=reads)
        self._tell(ReaderWentOn(request=request) if reads else ReaderStalled(request=request))

    # --- performing commands ---------------------------------------------------------------------

    @singledispatchmethod
    def _perform(self, command: Command) -> None:
        """Whatever needs nothing from here goes to its worker as it is."""
        self._send(command)

    @_perform.register
    def _perform_finish(self, command: Finish) -> None:
        stream = self._forget(command.request)
        cancelled = command.reason is FinishReason.CANCELLED
        reason = stream.cancel_reason if cancelled else command.reason
        self.feed.tell(
            NoticeKind.REQUEST_ENDED,
            id=stream.id,
            model=stream.request.model,
            outcome=reason,
            output_tokens=len(stream.output),
            seconds=self._clock() - stream.arrived,
        )
        self._end(stream, reason)

    @_perform.register
    def _perform_reject(self, command: Reject) -> None:
        stream = self._forget(command.request)
        self.feed.tell(
            NoticeKind.REQUEST_REJECTED,
            id=stream.id,
            model=stream.request.model,
            code=command.code,
            reason=command.message,
        )
        status = REJECTION_STATUS.get(command.code, 500)
        retry = RETRY_AFTER_SECONDS if status == 503 else None
        self._end(
            stream, command.code, GenerationFailed(command.code, command.message, status, retry)
        )

    def _end(
        self, stream: RequestStream, outcome: str, failure: GenerationFailed | None = None
    ) -> None:
        """Tell the client, the metrics and the log, each once."""
        if stream.times is not None:
            return
        now = self._clock()
        stream.times = self._times.ended(stream.id, now)
        self.metrics_of_run.request_ended(stream.request.model, outcome)
        if failure is None:
            reason = FinishReason(outcome)
            self.metrics_of_run.finished(stream.request.model, reason, now - stream.arrived)
            self.metrics_of_run.requests.ended(stream, stream.times)
        log_request(stream, stream.times, outcome, failure, now)
        if self._traces is not None:
            self._traces.ended(stream, stream.times, outcome, failure, now)
        stream.end(failure)

    def _forget(self, request: RequestId) -> RequestStream:
        stream = self._streams.pop(request)
        self._live[stream.request.model] -= 1
        if not self._streams:
            self._idle.set()
        model = stream.request.model
        told = model in self.machine.leaving
        if model in self._leaving and not self._live[model] and not told:
            self._tell(ModelRemoved(model=model))
        return stream

    @_perform.register
    def _perform_run_prefill(self, command: RunPrefill) -> None:
        self._introduce_prompt(command.instance, command.model, command.request)
        self._switches.runs(command.instance, command.model, "prefill")
        self._send(command)

    @_perform.register
    def _perform_run_turn(self, command: RunTurn) -> None:
        for prompt in command.prompts:
            self._introduce_prompt(command.instance, command.model, prompt)
        self._switches.runs(command.instance, command.model, "turn")
        self._send(command)

    @_perform.register
    def _perform_move_kv(self, command: MoveKv) -> None:
        if command.direction is Direction.IN:
            for kv_move in command.moves:
                self._introduce(command.instance, kv_move.request)
        self._send(command)

    @_perform.register
    def _perform_release(self, command: Release) -> None:
        self._known[command.instance].discard(command.request)
        self._send(command)

    @_perform.register
    def _perform_prefetch_model(self, command: PrefetchModel) -> None:
        self._switches.prefetches(command.instance, command.model)
        self._send(command)

    @_perform.register
    def _perform_evict_model(self, command: EvictModel) -> None:
        self._switches.evicts(command.instance, command.model)
        self._send(command)

    def _send(self, command: Command) -> None:
        self.workers[command.instance].send(command)  # type: ignore[attr-defined,arg-type]

    def _send_to(self, instance: InstanceId, message: frames.Down) -> None:
        self.workers[instance].send(message)

    def _introduce(self, instance: InstanceId, request: RequestId) -> None:
        """Make sure the worker knows the request, with every token it has so far."""
        if request not in self._known[instance]:
            self._known[instance].add(request)
            sequence = self._streams[request].sequence()
            self.workers[instance].send(frames.AddSequence(sequence))

    def _introduce_prompt(self, instance: InstanceId, model: ModelName, request: RequestId) -> None:
        """The worker is about to compute a prompt, and the output that others produced of it."""
        self._introduce(instance, request)
        if self._streams[request].output:
            self.metrics_of_run.recovery(model)


def _call_on(
    loop: asyncio.AbstractEventLoop, act: Callable[..., object], *arguments: object
) -> None:
    """Have something done on an event loop, from another thread, if it still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act, *arguments)


def _shutting_down() -> GenerationFailed:
    return GenerationFailed("shutting_down", "the appliance is shutting down", 503)


def _ignore() -> None:
    pass


def _nothing() -> None:
    return None


def _log_failure(error: BaseException) -> None:
    log.critical("the daemon cannot go on", exc_info=error)
