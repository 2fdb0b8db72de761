"""A full house for `benchmarks/decisions.py`: a real machine, stand-ins for workers and clients.

A real policy stack and a real ledger on a virtual clock: 80 GiB per instance in slabs of 2 MiB,
128 KiB of KV per token. Instances carry the commands out and report what workers report, in the
time that a 7 B model takes. Requests arrive until so many are live; each that ends is replaced.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from appliance.memory.ledger import HostLedger
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Policy
from appliance.vocabulary import (
    AnyCommand,
    BuildModel,
    Direction,
    Event,
    Finish,
    FinishReason,
    InstanceUp,
    KvMoved,
    KvShape,
    LoadModel,
    ModelBuilt,
    ModelLoaded,
    ModelSpec,
    MoveKv,
    Preempt,
    PrefetchModel,
    PrefillDone,
    Reject,
    Release,
    RequestArrived,
    RequestClass,
    RequestSpec,
    RunPrefill,
    RunTurn,
    Slo,
    StoreWeights,
    Ticked,
    TokenCount,
    TokensProduced,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)

SLAB = 2 << 20
DEVICE_SLABS = (80 << 30) // SLAB
SHAPE = KvShape(block_tokens=16, block_bytes=16 * (128 << 10), group_blocks=16, group_slabs=16)
LOAD_BYTES_PER_SECOND = 40e9
MOVE_BYTES_PER_SECOND = 20e9
PREFILL_SECONDS_PER_TOKEN = 5e-5
STEP_SECONDS = 0.02


@dataclass(frozen=True)
class Load:
    """What is asked of the machine. Models are as popular as Zipf's words."""

    requests: int
    """Live ones."""
    slo: Slo
    smallest_bytes: int = 8_000_000_000
    """The weights of the smallest model; the largest has four times as many bytes."""
    asked: int | None = None
    """So many models are asked, the first ones; all if None."""
    shift_seconds: float | None = None
    """Other models are the popular ones after so long; None for never."""
    batch_share: float = 0.1
    """Of the requests, those that are batch work."""
    request_step_seconds: float = 0.0
    """By how much a step is longer for each of its requests."""
    think_seconds: float = 1.0
    """After how long, in the mean, a request that ended is replaced."""


LOADS = {
    "turns": Load(requests=2000, slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1)),
    "homes": Load(
        requests=300,
        slo=Slo(ttft_seconds=0.3, tbt_seconds=0.1),
        smallest_bytes=4_000_000_000,
        shift_seconds=20.0,
        request_step_seconds=2e-4,
    ),
    "apart": Load(
        requests=1000,
        slo=Slo(ttft_seconds=1.0, tbt_seconds=0.05),
        asked=1,
        batch_share=0.0,
        request_step_seconds=2e-4,
    ),
}
"""`turns`: more is asked than the instances can do, of models that load in a part of their TTFT.
`homes`: models load long against their TTFT target, so each has homes, and these move as other
models become popular. `apart`: one model has all the work, so its instances prefill or decode."""


@dataclass
class Sequence:
    """A request as an instance knows it."""

    spec: RequestSpec
    output_tokens: int
    produced: int = 0

    @property
    def blocks(self) -> int:
        """Of the KV it has: of all tokens but the newest."""
        return SHAPE.blocks(self.spec.prompt_tokens + self.produced - 1)

    @property
    def next_blocks(self) -> int:
        """After one more step."""
        return SHAPE.blocks(self.spec.prompt_tokens + self.produced)


@dataclass
class Instance:
    """Stands in for a worker: one command after the other, each as long as it takes."""

    number: int
    busy_until: float = 0.0
    held: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """model -> request -> blocks on the device."""
    preempted: int = 0

    def kv_slabs(self, model: str) -> int:
        return SHAPE.slabs(sum(self.held[model].values()))


class House:
    """The machine, its instances and its clients, on a virtual clock."""

    def __init__(
        self,
        load: Load,
        policy: Policy,
        models: int,
        instances: int,
        seed: int,
        clock_ns: Callable[[], int],
    ) -> None:
        """`clock_ns` is what events are timed with."""
        self.load = load
        self.clock_ns = clock_ns
        self.asked_ns = 0
        """What the questions took that the event led to: to be counted by the policy."""
        self.dice = random.Random(seed)
        self.names = [f"m{number:03}" for number in range(models)]
        part = load.smallest_bytes // 8
        self.weights = [load.smallest_bytes + part * (n * 7 % 25) for n in range(models)]
        self.asked = load.asked or models
        self.popularity = [1 / (rank + 1) for rank in range(self.asked)]
        host = HostLedger((4 << 40), SLAB, (1 << 40) // SLAB)
        self.machine = Machine(
            [
                ModelSpec(
                    name=name,
                    weight_bytes=weights,
                    max_context_tokens=8192,
                    max_batch=256,
                    slo=load.slo,
                )
                for name, weights in zip(self.names, self.weights, strict=True)
            ],
            instances,
            host,
            policy,
        )
        self.instances = [Instance(number) for number in range(instances)]
        self.sequences: dict[str, Sequence] = {}
        self.due: list[tuple[float, int, Callable[[], Event | None]]] = []
        self.sequence_numbers = itertools.count()
        self.now = 0.0
        self.alone: dict[str, list[int]] = defaultdict(list)
        self.whole: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, int] = defaultdict(int)
        self._digest = hashlib.sha256()

    # --- the clock -------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], Event | None]) -> None:
        heapq.heappush(self.due, (when, next(self.sequence_numbers), what))

    def tell(self, event: Event) -> None:
        """One timed event into the machine; what it orders is carried out."""
        self.asked_ns = 0
        began = self.clock_ns()
        commands = self.machine.handle(event, self.now)
        taken = self.clock_ns() - began
        kind = type(event).__name__
        self.whole[kind].append(taken)
        self.alone[kind].append(taken - self.asked_ns)
        for command in commands:
            self._digest.update(repr(command).encode())
            self.carry_out(cast(AnyCommand, command))

    def digest(self) -> str:
        """Of all commands so far: equal if all decisions were."""
        return self._digest.hexdigest()

    def step(self) -> bool:
        """Whatever is due next; whether it was an event."""
        deadline = self.machine.next_deadline()
        if deadline is not None and deadline < self.due[0][0]:
            self.now = max(self.now, deadline)
            self.tell(Ticked())
            return True
        self.now, _, what = heapq.heappop(self.due)
        event = what()
        if event is not None:
            self.tell(event)
        return event is not None

    def start(self) -> None:
        """Every instance has every engine, and as many requests are live as there are to be."""
        for instance in self.instances:
            self.tell(InstanceUp(instance=instance.number, slabs=DEVICE_SLABS))
        while self.due:
            self.step()
        for _ in range(self.load.requests):
            self.at(self.now + 60 * self.dice.random(), self.arrive)

    def run(self, events: int) -> None:
        """Until so many events more were told."""
        while events:
            events -= self.step()

    def forget(self) -> None:
        """What was timed so far does not count."""
        self.alone.clear()
        self.whole.clear()

    # --- clients ---------------------------------------------------------------------------------

    def arrive(self) -> Event:
        name = f"r{next(self.sequence_numbers)}"
        output = self.dice.randint(50, 800)
        batch = self.dice.random() < self.load.batch_share
        spec = RequestSpec(
            id=name,
            model=self.model_asked(),
            prompt_tokens=int(self.dice.lognormvariate(6, 1)) % 4096 + 1,
            max_tokens=1000,
            slo=self.load.slo,
            request_class=RequestClass.BATCH if batch else RequestClass.INTERACTIVE,
        )
        self.sequences[name] = Sequence(spec, output)
        return RequestArrived(request=spec)

    def model_asked(self) -> str:
        (rank,) = self.dice.choices(range(self.asked), self.popularity)
        shift = self.load.shift_seconds
        shifts = 0 if shift is None else int(self.now / shift)
        return self.names[(rank + 7 * shifts) % self.asked]

    # --- instances -------------------------------------------------------------------------------

    def carry_out(self, command: AnyCommand) -> None:
        match command:
            case Finish(request=request):
                self.ended["finished"] += 1
                del self.sequences[request]
                self.at(self.now + self.dice.expovariate(1 / self.load.think_seconds), self.arrive)
                return
            case Reject(request=request, code=code):
                self.ended[code] += 1
                del self.sequences[request]
                self.at(self.now + self.dice.expovariate(1 / self.load.think_seconds), self.arrive)
                return
        instance = self.instances[command.instance]
        begin = max(self.now, instance.busy_until)
        match command:
            case Preempt(turn=turn):
                instance.preempted = max(instance.preempted, turn)
            case Release(model=model, request=request):
                instance.held[model].pop(request, None)
            case BuildModel(model=model):
                self.at(begin, lambda: self.built(instance, model))
            case StoreWeights(model=model):
                self.at(begin, lambda: WeightsStored(instance=instance.number, model=model))
            case LoadModel(model=model):
                instance.busy_until = begin + self.load_seconds(model)
                self.at(instance.busy_until, lambda: self.loaded(instance, model))
            case PrefetchModel(model=model):
                self.at(begin + self.load_seconds(model), lambda: self.loaded(instance, model))
            case MoveKv():
                seconds = sum(len(m.host_offsets) for m in command.moves) * SHAPE.block_bytes
                after = begin + seconds / MOVE_BYTES_PER_SECOND
                if command.direction is Direction.IN:
                    instance.busy_until = after
                self.move(instance, command, after)
            case RunPrefill():
                tokens = self.sequences[command.request].spec.prompt_tokens
                instance.busy_until = begin + tokens * PREFILL_SECONDS_PER_TOKEN
                self.prefill(instance, command.model, command.request, instance.busy_until)
            case RunTurn():
                for prompt in command.prompts:
                    tokens = self.sequences[prompt].spec.prompt_tokens
                    begin += tokens * PREFILL_SECONDS_PER_TOKEN
                    self.prefill(instance, command.model, prompt, begin)
                self.step_later(instance, command, begin, 0.0, 0)

    def load_seconds(self, model: str) -> float:
        return self.weights[self.names.index(model)] / LOAD_BYTES_PER_SECOND

    def built(self, instance: Instance, model: str) -> Event:
        slabs = -(-self.weights[self.names.index(model)] // SLAB)
        return ModelBuilt(
            instance=instance.number, model=model, weight_slabs=slabs, host_slabs=slabs, kv=SHAPE
        )

    def loaded(self, instance: Instance, model: str) -> Event:
        return ModelLoaded(
            instance=instance.number,
            model=model,
            moved_bytes=self.weights[self.names.index(model)],
            seconds=self.load_seconds(model),
        )

    def move(self, instance: Instance, command: MoveKv, when: float) -> None:
        held = instance.held[command.model]
        moved: list[str] = []
        missing: list[str] = []
        for kv_move in command.moves:
            if command.direction is Direction.OUT:
                here = held.pop(kv_move.request, None) is not None
            else:
                here = kv_move.request in self.sequences
                if here:
                    held[kv_move.request] = len(kv_move.host_offsets)
            (moved if here else missing).append(kv_move.request)
        self.at(
            when,
            lambda: KvMoved(
                instance=instance.number,
                model=command.model,
                direction=command.direction,
                moved=tuple(moved),
                missing=tuple(missing),
                moved_bytes=len(moved) * SHAPE.block_bytes,
                seconds=0.001,
                kv_slabs=instance.kv_slabs(command.model),
            ),
        )

    def prefill(self, instance: Instance, model: str, request: str, when: float) -> None:
        def first() -> Event | None:
            sequence = self.sequences.get(request)
            if sequence is None:
                return None
            sequence.produced += 1
            instance.held[model][request] = sequence.blocks
            return TokensProduced(
                instance=instance.number, model=model, tokens=(self.count(request),)
            )

        self.at(when, first)
        self.at(
            when,
            lambda: PrefillDone(
                instance=instance.number,
                model=model,
                request=request,
                kv_slabs=instance.kv_slabs(model),
                seconds=0.1,
            ),
        )

    def count(self, request: str) -> TokenCount:
        sequence = self.sequences[request]
        over = sequence.produced >= sequence.output_tokens
        return TokenCount(request=request, count=1, finished=FinishReason.STOP if over else None)

    def step_later(
        self, instance: Instance, turn: RunTurn, begin: float, seconds: float, steps: int
    ) -> None:
        """The next step of a turn of which so many took so long."""
        step = STEP_SECONDS + self.load.request_step_seconds * len(turn.requests)
        self.at(begin + step, lambda: self.decode(instance, turn, seconds + step, steps + 1))

    def decode(self, instance: Instance, turn: RunTurn, seconds: float, steps: int) -> Event | None:
        """One step of a turn, or its end."""
        held = instance.held[turn.model]
        alive = [request for request in turn.requests if request in self.sequences]
        for request in turn.requests:
            if request not in self.sequences:
                held.pop(request, None)
        grown = [self.sequences[request].next_blocks - held[request] for request in alive]
        full = SHAPE.slabs(sum(held.values()) + sum(grown)) > turn.kv_slabs
        reason = (
            TurnEnd.PREEMPTED
            if turn.turn <= instance.preempted
            else TurnEnd.DRAINED
            if not alive
            else TurnEnd.KV_FULL
            if full and steps > 1
            else TurnEnd.QUOTA
            if steps > 1 and seconds > turn.quota_seconds
            else None
        )
        if reason is not None:
            return TurnEnded(
                instance=instance.number,
                model=turn.model,
                turn=turn.turn,
                reason=reason,
                steps=steps - 1,
                seconds=seconds * (steps - 1) / steps,
                kv_slabs=instance.kv_slabs(turn.model),
            )
        for request in alive:
            self.sequences[request].produced += 1
            held[request] = self.sequences[request].blocks
        self.step_later(instance, turn, self.now, seconds, steps)
        return TokensProduced(
            instance=instance.number,
            model=turn.model,
            tokens=tuple([self.count(request) for request in alive]),
        )
