"""A daemon whose workers are doubles: they hear what a worker would, and answer as one would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance import framing
from appliance.daemon.daemon import Daemon, Limits, WorkerPlan
from appliance.daemon.served_model import ServedModel
from appliance.engines.protocol import Produced
from appliance.journal import Journal, Setup
from appliance.service.interface import AskedSlo, Generation, RequestTimes, SubmitRequest
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import (
    Direction,
    Event,
    FinishReason,
    InstanceId,
    ModelSpec,
    MoveKv,
    Release,
    RequestClass,
    RunPrefill,
    RunTurn,
    SlabMap,
    SlabOwner,
    Slo,
    TokensProduced,
)
from appliance.worker import frames
from appliance.worker.starts import Start
from tests.unit.doubles.cluster import SLAB, SLO, shape
from tests.unit.doubles.instance import InstanceDouble, Life, ModelDouble, World

PID = 4000

D = TypeVar("D", bound=frames.Down)


def small(names: str) -> dict[str, ModelDouble]:
    """Models of four slabs of weights each, one for every letter."""
    return {name: ModelDouble(4, shape()) for name in names}


def setup_of(
    models: dict[str, ModelDouble],
    *,
    policy: str = "serverlessllm",
    instances: int = 1,
    host_slabs: int = 200,
    kind: type[Setup] = Setup,
    only: Mapping[str, frozenset[int]] | None = None,
    slos: Mapping[str, Slo] | None = None,
) -> Setup:
    specs = [
        ModelSpec(
            name=name,
            weight_bytes=model.weight_slabs * SLAB,
            max_context_tokens=256,
            max_batch=64,
            slo=(slos or {}).get(name, SLO),
            instances=(only or {}).get(name),
        )
        for name, model in models.items()
    ]
    return kind(
        models=tuple(specs),
        instances=instances,
        host_bytes=host_slabs * SLAB,
        slab_bytes=SLAB,
        policy=PolicyChoice(use=(policy,)),
    )


class WorkerDouble:
    """Stands in for `appliance.worker.process.WorkerProcess`.

    An `InstanceDouble` carries the commands out when the test says so. It is stricter than a
    worker: a request has to be introduced before it is named, once, with the output so far, and
    again when more output came elsewhere.
    """

    world: World
    """What the workers of this box share; set by the box."""

    def __init__(
        self,
        configuration: frames.Configure,
        host_fd: int,
        on_message: Callable[[frames.Up], None],
        on_lost: Callable[[InstanceId], None],
        on_stillborn: Callable[[InstanceId, int], None],
        on_failure: Callable[[BaseException], None],
        start: Start,
    ) -> None:
        self.instance = configuration.instance
        self.configuration = configuration
        self.pid: int | None = None
        self.restarts = 0
        self.stillborn = 0
        self.started = False
        self.stopped = False
        self.held = False
        self.tells_slabs = False
        """Whether it says whose its slabs are; else the test does."""
        self.puts_adapters = True
        """Whether it answers at once that it put adapters, or why not; else the test does."""
        self.refuses_adapters: str | None = None
        self.stop_error: Exception | None = None
        self.sent: list[frames.Down] = []
        """Every frame down, in order, over all lives."""
        self.double: InstanceDouble | None = None
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_stillborn = on_stillborn
        self._on_failure = on_failure
        self._known: dict[str, int] = {}
        """Tokens of the output that it knows, by request."""

    def start(self) -> None:
        self.started = True

    def add(self, model: frames.WorkerModel) -> None:
        self.drop(model.name)
        models = [*self.configuration.models, model]
        self.configuration = msgspec.structs.replace(self.configuration, models=models)
        self.send(frames.AddModel(model))

    def drop(self, name: str) -> None:
        models = [model for model in self.configuration.models if model.name != name]
        self.configuration = msgspec.structs.replace(self.configuration, models=models)

    def hold(self) -> None:
        """The test has it die, later: so does a real one."""
        self.held = True

    def let_go(self) -> None:
        """The test has the next one greet."""
        self.held = False

    def be_stillborn(self) -> None:
        """It dies before it greets."""
        self.stillborn += 1
        self._on_stillborn(self.instance, self.stillborn)

    async def stop(self) -> None:
        self.stopped = True
        if self.stop_error is not None:
            raise self.stop_error

    def send(self, message: frames.Down) -> None:
        """Hear a frame as it comes out at the other end; lost if the worker is dead."""
        if self.double is None:
            return
        (heard,) = frames.decoder_of_commands().feed(framing.encode(message))
        self.sent.append(heard)
        match heard:
            case frames.AddSequence():
                self._introduce(heard)
                return
            case frames.AddModel() | frames.Verify() | frames.PrepareGuide():
                return  # the test answers
            case frames.PutAdapters():
                if self.puts_adapters:
                    refused = self.refuses_adapters
                    self.deliver(frames.AdaptersPut(self.instance, heard.number, refused))
                return
            case frames.ReportSlabs():
                if self.tells_slabs:
                    self.deliver(frames.SlabsReported(self.instance, self._slabs()))
                return
            case RunPrefill():
                self._check_known(heard.request)
            case RunTurn():
                for prompt in heard.prompts:
                    self._check_known(prompt)
            case MoveKv(direction=Direction.IN):
                for kv_move in heard.moves:
                    self._check_known(kv_move.request)
            case Release():
                self._known.pop(heard.request, None)
        assert not isinstance(heard, frames.Configure | frames.Shutdown)
        self.double.order(heard)

    def _slabs(self) -> SlabMap:
        """All of them are free; whose they are is the double's secret."""
        return SlabMap(SLAB, (SlabOwner("free"),), ((0, self.configuration.slabs),))

    def _introduce(self, message: frames.AddSequence) -> None:
        sequence = message.sequence
        assert sequence.request not in self._known, "introduced twice"
        assert len(sequence.output) == self.world.lives[sequence.request].produced
        self._known[sequence.request] = len(sequence.output)

    def _check_known(self, request: str) -> None:
        assert request in self._known, "named before it was introduced"
        assert self._known[request] == self.world.lives[request].produced, "it knows less"

    def greet(self) -> None:
        """A fresh worker is ready."""
        self.pid = PID + self.restarts
        slabs = self.configuration.slabs
        self.double = InstanceDouble(self.instance, slabs, self.world)
        self._known = {}
        self.deliver(frames.Hello(self.instance, self.pid, slabs))

    def die(self) -> None:
        self.pid, self.double = None, None
        self.restarts += 1
        self._on_lost(self.instance)

    def deliver(self, message: frames.Up) -> None:
        """Report something. What the daemon raises ends the keeper, as it does a real one's."""
        (heard,) = frames.decoder_of_reports().feed(framing.encode(message))
        try:
            self._on_message(heard)
        except Exception as error:
            self.die()
            self._on_failure(error)

    def work(self) -> list[frames.Up]:
        """The next piece of work; what is to be reported of it."""
        assert self.double is not None
        return [self._translate(event) for event in self.double.work()]

    def _translate(self, event: Event) -> frames.Up:
        """Tokens have values on the wire: here each is the number of the token, from 1."""
        if not isinstance(event, TokensProduced):
            return cast(frames.Up, event)
        produced = []
        for count in event.tokens:
            life = self.world.lives[count.request]
            if count.finished is not None:
                life.outcome = count.finished
                self._known.pop(count.request, None)
            elif count.request in self._known:
                self._known[count.request] += count.count
            produced.append(
                Produced(request=count.request, token=life.produced, finished=count.finished)
            )
        return frames.Tokens(event.instance, event.model, produced)

    def heard(self, kind: type[D]) -> list[D]:
        """Every frame of this kind, in order."""
        return [message for message in self.sent if isinstance(message, kind)]


class Client:
    """The sink of a request, and who reads from it: batches are what came since the one before."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.times: RequestTimes | None = None
        self.failure: Exception | None = None
        self.over = False
        self.generation: Generation | None = None
        self._pending: list[Produced] = []
        self._news = asyncio.Event()

    def produced(self, produced: Produced) -> None:
        assert not self.over
        self._pending.append(produced)
        self._news.set()

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None:
        assert not self.over
        self.over, self.times, self.failure = True, times, failure
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[Produced]]:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._pending:
                batch, self._pending = self._pending, []
                yield batch
            if self.over:
                break
        if self.failure is not None:
            raise self.failure

    def cancel(self, reason: FinishReason) -> None:
        assert self.generation is not None
        self.generation.cancel(reason)

    def reader(self, *, reads: bool) -> None:
        assert self.generation is not None
        self.generation.reader(reads=reads)


class Box:
    """A daemon over worker doubles. Time is `now`; every report takes a millisecond."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        models: dict[str, ModelDouble],
        setup: Setup,
        *,
        slabs: int = 20,
        limits: Limits | None = None,
        journal: Journal | None = None,
        devices: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> None:
        self.now = 0.0
        self.world = World(models)
        self.failures: list[BaseException] = []
        self.clients: dict[str, Client] = {}
        """By the ids of their requests."""
        monkeypatch.setattr("appliance.daemon.daemon.WorkerProcess", WorkerDouble)
        monkeypatch.setattr(WorkerDouble, "world", self.world, raising=False)
        self.daemon = Daemon(
            setup,
            [self.served(spec) for spec in setup.models],
            WorkerPlan(
                pool_slabs=slabs, cpus=["0"] * setup.instances, devices=devices, groups=groups
            ),
            limits or Limits(queue=100, progress_seconds=60.0),
            journal,
            clock=lambda: self.now,
        )
        self.daemon.on_failure = self.failures.append
        self.workers = cast(dict[InstanceId, WorkerDouble], self.daemon.workers)

    def served(self, spec: ModelSpec) -> ServedModel:
        worker = frames.WorkerModel(spec.name, f"/models/{spec.name}", "float32", 256, 64)
        return ServedModel(
            spec,
            worker,
            created=1700000000,
            architecture="LlamaForCausalLM",
            dtype="float32",
        )

    def start(self) -> None:
        """Every worker comes up and builds all its engines."""
        self.daemon.start()
        for worker in self.workers.values():
            worker.greet()
        self.settle()

    def ask(
        self,
        name: str,
        model: str,
        *,
        prompt: int = 20,
        output: int = 5,
        limit: int | None = None,
        kind: RequestClass = RequestClass.INTERACTIVE,
        slo: AskedSlo | None = None,
        key: str | None = None,
    ) -> Client:
        """Submit a request that will produce `output` tokens."""
        limit = output if limit is None else limit
        self.world.lives[name] = Life(model, prompt, output, limit)
        client = self.clients[name] = Client(name)
        client.generation = self.daemon.submit(
            SubmitRequest(
                id=name,
                model=model,
                prompt=tuple(range(prompt)),
                max_tokens=limit,
                body=b"",
                request_class=kind,
                slo=slo or AskedSlo(),
                key=key,
            ),
            client,
        )
        return client

    def cancel(self, stream: Client, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.world.lives[stream.id].outcome = reason
        stream.cancel(reason)

    def work(self, number: int = 0) -> bool:
        """One worker does its next piece of work; False if it had none."""
        worker = self.workers[number]
        if worker.double is None or not worker.double.busy:
            return False
        for message in worker.work():
            self.now += 0.001
            worker.deliver(message)
        return True

    def work_until(self, done: Callable[[], bool], number: int = 0) -> None:
        """One worker works until `done()`, which has to come true."""
        for _ in range(1000):
            if done():
                return
            assert self.work(number), "nothing left to do before what was waited for"
        raise AssertionError("it never happened")

    def settle(self) -> None:
        """All workers work in turn until none has anything to do."""
        for _ in range(10_000):
            if not any([self.work(number) for number in self.workers]):
                return
        raise AssertionError("the box never comes to rest")

    def take_failures(self) -> list[str]:
        """What `on_failure` was called with; a box that keeps any at the end fails its test."""
        told, self.failures[:] = [str(failure) for failure in self.failures], []
        return told

    def samples(self, name: str) -> dict[str, float]:
        """What a scraper reads of one metric, by its labels."""
        families = text_string_to_metric_families(self.daemon.metrics().decode())
        return {
            ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }


@contextmanager
def box_maker(monkeypatch: pytest.MonkeyPatch, slabs: int) -> Iterator[Callable[..., Box]]:
    """What makes boxes, of `slabs` slabs each unless told otherwise; their memory is given back at
    the end, and none may have failed."""
    boxes: list[Box] = []
    ordinary = slabs

    def make(
        names: str = "ab",
        *,
        slabs: int = ordinary,
        limits: Limits | None = None,
        journal: Journal | Path | None = None,
        devices: Sequence[str] = (),
        groups: Sequence[str] = (),
        **of_setup: Any,
    ) -> Box:
        """A journal that is a path is begun there, with the box's own setup."""
        models = small(names)
        setup = setup_of(models, **of_setup)
        if isinstance(journal, Path):
            journal = Journal(journal, setup_of(models, **of_setup))
        box = Box(
            monkeypatch,
            models,
            setup,
            slabs=slabs,
            limits=limits,
            journal=journal,
            devices=devices,
            groups=groups,
        )
        boxes.append(box)
        return box

    yield make
    for box in boxes:
        box.daemon.host.close()
        assert box.take_failures() == []
