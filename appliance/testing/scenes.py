"""Small boxes with too many models: the daemon's own machine is run on them, under any policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import signature
from itertools import cycle

import msgspec

from appliance.errors import PolicyError
from appliance.hookspecs import HOOKS, PolicySpec
from appliance.lab.hardware import Box, gpu, profile
from appliance.lab.sim.recorder import Life
from appliance.lab.sim.simulator import Start, simulate
from appliance.lab.workload import Arrival, Lengths, drawn
from appliance.memory.ledger import HostLedger
from appliance.policies.stack import PolicyStack
from appliance.scheduling.machine import Machine
from appliance.scheduling.policy_api import MAX_HOLD_SECONDS, LocalClock
from appliance.vocabulary import (
    Command,
    Event,
    ModelName,
    ModelSpec,
    RequestClass,
    RequestId,
    Slo,
    Word,
)

DRAIN_SECONDS = MAX_HOLD_SECONDS + 3600.0
"""After the last arrival; a request that has not ended by then never will."""
MAX_EVENTS = 200_000
BATCH_EVERY = 5
"""Of so many requests one is batch work."""
KEYS = ("acme", "beta", "acme", "")
"""The API keys of requests, in turn."""

_GPU = "H800"
_MIX = ("Qwen2.5-7B", "Llama-2-13B", "Yi-9B")
CONTEXT_TOKENS = 4096
_SLO = Slo(ttft_seconds=5.0, tbt_seconds=0.1)
_LENGTHS = Lengths([(30, 200), (900, 12), (200, 60), (2500, 300), (8, 1), (1, 90)])


class Scene(Word, frozen=True):
    """So many instances and models; each model gets `rate` requests a second for `seconds`, from
    the time of day `start` on."""

    name: str
    instances: int
    models: int
    rate: float
    seconds: float
    start: str


SCENES: Mapping[str, Scene] = {
    scene.name: scene
    for scene in (
        Scene(name="lone", instances=1, models=1, rate=2.0, seconds=20.0, start="2026-01-05T03:00"),
        Scene(
            name="crowd",
            instances=1,
            models=8,
            rate=0.25,
            seconds=60.0,
            start="2026-01-07T21:59:30",
        ),
        Scene(
            name="pair", instances=2, models=12, rate=0.3, seconds=40.0, start="2026-01-10T12:00"
        ),
        Scene(name="flood", instances=1, models=4, rate=4.0, seconds=8.0, start="2026-01-06T15:00"),
        Scene(name="row", instances=5, models=30, rate=0.3, seconds=12.0, start="2026-01-09T09:00"),
        Scene(
            name="hall",
            instances=16,
            models=100,
            rate=0.7,
            seconds=4.0,
            start="2026-01-12T05:59:58",
        ),
    )
}
"""In "flood" more is asked than the instance can do."""


@dataclass(frozen=True, slots=True)
class HookCall:
    """What the machine asked: the arguments of the hook, by name."""

    hook: str
    views: Mapping[str, object]


ARGUMENTS = {hook: tuple(signature(getattr(PolicySpec, hook)).parameters)[1:] for hook in HOOKS}
"""Those of each hook, in order."""


class Interposed:
    """Hands every question to one function, with the clock that it was given. Implements
    `appliance.scheduling.policy_api.Policy` as far as the function does."""

    def __init__(self, answer: Callable[[HookCall], object]) -> None:
        self._answer = answer
        self._clock = LocalClock()

    def set_clock(self, clock: LocalClock) -> None:
        self._clock = clock

    def take_over(self, before: object) -> None:
        """It knows nothing by itself."""

    def __getattr__(self, hook: str) -> Callable[..., object]:
        names = ARGUMENTS[hook]

        def ask(*views: object) -> object:
            shown = [tuple(view) if isinstance(view, list) else view for view in views]
            shown.append(self._clock)
            return self._answer(HookCall(hook, dict(zip(names, shown, strict=True))))

        return ask


def put(stack: PolicyStack, question: HookCall) -> object:
    """What a stack answers to the question."""
    clock = question.views["clock"]
    assert isinstance(clock, LocalClock), "every question has it"
    stack.set_clock(clock)
    views = {name: view for name, view in question.views.items() if name != "clock"}
    answer: object = getattr(stack, question.hook)(**views)
    return answer


@dataclass(frozen=True, slots=True)
class Played:
    """What became of the requests, and a digest of every command that was given."""

    lives: list[Life]
    digest: str


def arrivals(scene: Scene) -> list[Arrival]:
    """The requests of a scene; the n-th of them gets the id ``r<n>``."""
    requests = drawn(dict.fromkeys(model_names(scene), scene.rate), _LENGTHS, scene.seconds, seed=1)
    return [
        msgspec.structs.replace(
            request,
            key=KEYS[number % len(KEYS)],
            request_class=request.request_class if number % BATCH_EVERY else RequestClass.BATCH,
        )
        for number, request in enumerate(requests)
    ]


def true_lengths(scene: Scene) -> dict[RequestId, int]:
    """What only an oracle may know."""
    return {f"r{n}": request.output_tokens for n, request in enumerate(arrivals(scene))}


def play(
    scene: Scene, answer: Callable[[HookCall], object], drain_seconds: float = DRAIN_SECONDS
) -> Played:
    """Run the machine on a scene until every request has ended, or for `drain_seconds` after the
    last may have come.

    `answer` has to give valid answers. Raises `PolicyError` when there is no end of events.
    """
    names = model_names(scene)
    box = Box(gpu=gpu(_GPU), instances=scene.instances, host_bytes=4 << 40)
    profiles = {name: profile(kind, _GPU) for name, kind in zip(names, cycle(_MIX))}
    specs = [
        ModelSpec(
            name=name,
            weight_bytes=profiles[name].weight_bytes,
            max_context_tokens=CONTEXT_TOKENS,
            max_batch=32,
            slo=_SLO,
        )
        for name in names
    ]
    host = HostLedger(box.host_bytes, box.slab_bytes)
    machine = _Heard(specs, scene.instances, host, Interposed(answer))  # type: ignore[arg-type]
    shown = datetime.fromisoformat(scene.start).replace(tzinfo=UTC)
    run = simulate(
        machine,
        box,
        profiles,
        arrivals(scene),
        scene.seconds + drain_seconds,
        start=Start(unix_seconds=shown.timestamp()),
    )
    machine.check_integrity()
    return Played(run.recorder.lives, machine.digest.hexdigest())


class _Heard(Machine):
    """Keeps a digest of its commands, and an eye on their number."""

    events = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        if not self.events:
            self.digest = hashlib.blake2b(digest_size=16)
        self.events += 1
        if self.events > MAX_EVENTS:
            raise PolicyError(f"{MAX_EVENTS} events, and no end of them")
        commands = super().handle(event, now)
        self.digest.update(msgspec.msgpack.encode(commands))
        return commands


def model_names(scene: Scene) -> list[ModelName]:
    return [f"m{number:02}" for number in range(scene.models)]
