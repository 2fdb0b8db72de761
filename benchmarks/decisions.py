"""What a decision costs, and what the machine makes of an event, with a full house.

    python benchmarks/decisions.py [--policy aegaeon] [--models 100] [--instances 16]
                                   [--requests 2000] [--events 40000] [--json FILE]

A real machine, a real policy stack and a real ledger on a virtual clock: 80 GiB per instance in
slabs of 2 MiB, models of 8 to 32 GB, 128 KiB of KV per token. Stand-ins for the instances carry the
commands out and report what workers report, in the time that a 7 B model takes. Requests arrive
until so many are live, their models as popular as Zipf's words; each that ends is replaced. Then
the events of the given number are timed: each question through the stack (the policy, and checking
its answer), and each event without the questions it led to, and with them. Microseconds of the
processor, which other processes do not spoil, without Python's garbage collector, which may strike
anywhere and is told of apart; median and 99th percentile.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.memory.ledger import HostLedger
from appliance.policies.loader import load_stack
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import Policy
from appliance.service.policy_report import PolicyChoice
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


class Collector:
    """How long the garbage collector stopped everything, by generation."""

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = defaultdict(list)
        self.total_ns = 0
        self._began = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
            return
        taken = time.thread_time_ns() - self._began
        self.taken[f"generation_{info['generation']}"].append(taken)
        self.total_ns += taken

    def clock_ns(self) -> int:
        """Time of the processor, less that of the collector."""
        return time.thread_time_ns() - self.total_ns


class Stopwatch:
    """Passes questions on to a stack, and keeps how long each took."""

    def __init__(self, stack: PolicyStack, clock_ns: Callable[[], int]) -> None:
        self.stack = stack
        self.clock_ns = clock_ns
        self.taken: dict[str, list[int]] = defaultdict(list)
        self.asked_ns = 0
        """Time that questions took since it was set to 0."""

    def __getattr__(self, hook: str) -> Callable[..., object]:
        question = getattr(self.stack, hook)
        times = self.taken[hook]

        def ask(*arguments: object) -> object:
            began = self.clock_ns()
            answer = question(*arguments)
            taken = self.clock_ns() - began
            times.append(taken)
            self.asked_ns += taken
            return answer

        self.__dict__[hook] = ask
        return ask


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

    def __init__(self, policy: str, models: int, instances: int, requests: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.names = [f"m{number:03}" for number in range(models)]
        self.weights = [8_000_000_000 + 1_000_000_000 * (n * 7 % 25) for n in range(models)]
        self.popularity = [1 / (rank + 1) for rank in range(models)]
        self.live = requests
        self.collector = Collector()
        self.watch = Stopwatch(load_stack(PolicyChoice(use=(policy,))), self.collector.clock_ns)
        slo = Slo(ttft_seconds=10.0, tbt_seconds=0.1)
        host = HostLedger((4 << 40), SLAB, (1 << 40) // SLAB)
        self.machine = Machine(
            [
                ModelSpec(
                    name=name,
                    weight_bytes=weights,
                    max_context_tokens=8192,
                    max_batch=256,
                    slo=slo,
                )
                for name, weights in zip(self.names, self.weights, strict=True)
            ],
            instances,
            host,
            cast(Policy, self.watch),
        )
        self.instances = [Instance(number) for number in range(instances)]
        self.sequences: dict[str, Sequence] = {}
        self.due: list[tuple[float, int, Callable[[], Event | None]]] = []
        self.sequence_numbers = itertools.count()
        self.now = 0.0
        self.alone: dict[str, list[int]] = defaultdict(list)
        self.whole: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, int] = defaultdict(int)

    # --- the clock -------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], Event | None]) -> None:
        heapq.heappush(self.due, (when, next(self.sequence_numbers), what))

    def tell(self, event: Event) -> None:
        """One timed event into the machine; what it orders is carried out."""
        self.watch.asked_ns = 0
        began = self.collector.clock_ns()
        commands = self.machine.handle(event, self.now)
        taken = self.collector.clock_ns() - began
        kind = type(event).__name__
        self.whole[kind].append(taken)
        self.alone[kind].append(taken - self.watch.asked_ns)
        for command in commands:
            self.carry_out(cast(AnyCommand, command))

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
        for _ in range(self.live):
            self.at(self.now + 60 * self.dice.random(), self.arrive)

    def forget(self) -> None:
        """What was timed so far does not count."""
        for table in (self.alone, self.whole, self.watch.taken, self.collector.taken):
            for times in table.values():
                times.clear()

    # --- clients ---------------------------------------------------------------------------------

    def arrive(self) -> Event:
        name = f"r{next(self.sequence_numbers)}"
        output = self.dice.randint(50, 800)
        batch = self.dice.random() < 0.1
        spec = RequestSpec(
            id=name,
            model=self.dice.choices(self.names, self.popularity)[0],
            prompt_tokens=int(self.dice.lognormvariate(6, 1)) % 4096 + 1,
            max_tokens=1000,
            slo=Slo(ttft_seconds=10.0, tbt_seconds=0.1),
            request_class=RequestClass.BATCH if batch else RequestClass.INTERACTIVE,
        )
        self.sequences[name] = Sequence(spec, output)
        return RequestArrived(request=spec)

    # --- instances -------------------------------------------------------------------------------

    def carry_out(self, command: AnyCommand) -> None:
        match command:
            case Finish(request=request):
                self.ended["finished"] += 1
                del self.sequences[request]
                self.at(self.now + self.dice.expovariate(1.0), self.arrive)
                return
            case Reject(request=request, code=code):
                self.ended[code] += 1
                del self.sequences[request]
                self.at(self.now + self.dice.expovariate(1.0), self.arrive)
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
                self.at(begin + STEP_SECONDS, lambda: self.decode(instance, command, 1))

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

    def decode(self, instance: Instance, turn: RunTurn, steps: int) -> Event | None:
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
            if steps > 1 and steps * STEP_SECONDS > turn.quota_seconds
            else None
        )
        if reason is not None:
            return TurnEnded(
                instance=instance.number,
                model=turn.model,
                turn=turn.turn,
                reason=reason,
                steps=steps - 1,
                seconds=(steps - 1) * STEP_SECONDS,
                kv_slabs=instance.kv_slabs(turn.model),
            )
        for request in alive:
            self.sequences[request].produced += 1
            held[request] = self.sequences[request].blocks
        self.at(self.now + STEP_SECONDS, lambda: self.decode(instance, turn, steps + 1))
        return TokensProduced(
            instance=instance.number,
            model=turn.model,
            tokens=tuple([self.count(request) for request in alive]),
        )


def table(times: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Per kind: how many, and microseconds at the median and the 99th percentile."""
    return {kind: summary(of) for kind, of in sorted(times.items()) if of}


def summary(nanoseconds: list[int]) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    return {
        "count": len(ordered),
        "p50_us": round(statistics.median(ordered) / 1e3, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="aegaeon")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--warm-up", type=int, default=40_000, help="events before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    house = House(options.policy, options.models, options.instances, options.requests, options.seed)
    house.start()
    for events in (options.warm_up, options.events):
        house.forget()
        while events:
            events -= house.step()
    result = {
        "what": "microseconds of decisions, and of events without and with the decisions in them",
        "policy": options.policy,
        "models": options.models,
        "instances": options.instances,
        "live_requests": len(house.machine.requests),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "decisions": table(house.watch.taken),
        "all_events": {
            "machine": summary([t for times in house.alone.values() for t in times]),
            "machine_and_decisions": summary([t for times in house.whole.values() for t in times]),
        },
        "collector": table(house.collector.taken),
        "machine": table(house.alone),
        "machine_and_decisions": table(house.whole),
        "ended": dict(house.ended),
        "faults": len(house.watch.stack.faults),
        "virtual_seconds": round(house.now, 1),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
