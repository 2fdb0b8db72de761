"""What a simulated instance computes: a prompt alone, or a turn, perhaps with prompts in it; or an
engine that starts, or slabs that are mapped or unmapped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from appliance.lab.hardware import ModelProfile
from appliance.lab.sim.closed_form import elapsed, steps_in_room, steps_until
from appliance.lab.sim.engine import SimulatedEngine
from appliance.lab.sim.event_queue import ScheduledEvent
from appliance.lab.sim.recorder import ComputeSpan, Life, Recorder
from appliance.vocabulary import InstanceId, ModelName, RequestId, RunPrefill, RunTurn, TurnEnd


@dataclass(slots=True)
class Activation:
    """An engine is made the one that runs, by a system where that takes time of its own."""

    model: ModelName


@dataclass(slots=True)
class Mapped:
    """Slabs are mapped for weights that are to be loaded, or unmapped that weights had."""

    model: ModelName


@dataclass(slots=True)
class SimulatedPrefill:
    """A prompt that is being computed: `seconds` of work, and not over before `not_before`."""

    command: RunPrefill
    life: Life
    began: float
    seconds: float
    not_before: float = 0.0
    lacks_weights: bool = False
    """Whether only weights are missing."""


@dataclass(slots=True)
class ChunkedPrompt:
    """A prompt that is computed in chunks within the steps of a turn."""

    life: Life
    tokens: int
    began: float
    done: int = 0
    """Tokens that are computed."""

    @property
    def left(self) -> int:
        return self.tokens - self.done


@dataclass(slots=True)
class SimulatedTurn:
    """A turn that runs, and the stretch it is at."""

    command: RunTurn
    batch: list[Life]
    waiting: deque[RequestId]
    """Prompts that have not begun."""
    began: float
    factor: float
    """Of all its times."""
    prompts: list[ChunkedPrompt] = field(default_factory=list)
    """Prompts that have, in the order in which they are computed."""
    end: TurnEnd | None = None
    """Why it is over when its prompts are done."""
    done_seconds: float = 0.0
    done_steps: int = 0
    start: float = 0.0
    first: float = 0.0
    growth: float = 0.0
    kv_tokens: int = 0
    """Of its batch, when the stretch began."""
    steps: int = 0
    entry: ScheduledEvent | None = None
    largest: int = 0
    done_prompts: int = 0
    waits_since: float | None = None
    """Since when it has no room for a step but under KV of its model that is on its way out."""

    def computes(self, request: RequestId) -> bool:
        """Whether the step that is being computed is of this request, too."""
        return any(life.id == request for life in self.batch) or any(
            prompt.life.id == request for prompt in self.prompts
        )

    def next_chunk(self) -> list[tuple[ChunkedPrompt, int]]:
        """Tokens of its prompts that the next step computes."""
        chunk, room = [], self.command.chunk_tokens
        for prompt in self.prompts:
            if room:
                chunk.append((prompt, min(room, prompt.left)))
                room -= chunk[-1][1]
        return chunk

    def room(self, engine: SimulatedEngine) -> int:
        """Steps until the first request finishes, or until the slabs of the turn are full."""
        shape = engine.shape
        cap_blocks = self.command.kv_slabs // shape.group_slabs * shape.group_blocks
        held = sum(engine.blocks[life.id] for life in self.batch)
        return steps_in_room(
            [life.kv_tokens for life in self.batch],
            shape,
            cap_blocks - (engine.used - held) - engine.leaving,
            min(life.remaining_tokens for life in self.batch),
        )

    def time_steps(self, profile: ModelProfile, start: float) -> None:
        """Begin a stretch at `start`: how long its first step takes, and by how much more those
        after it."""
        batch, kv_tokens = len(self.batch), sum(life.kv_tokens for life in self.batch)
        if self.prompts:
            chunk = [(tokens, prompt.done) for prompt, tokens in self.next_chunk()]
            first = profile.mixed_step_seconds(batch, kv_tokens, chunk)
            growth = profile.step_growth_seconds(batch, self.command.chunk_tokens)
        else:
            first = profile.step_seconds(batch, kv_tokens)
            growth = profile.step_growth_seconds(batch)
        self.start, self.kv_tokens = start, kv_tokens
        self.first, self.growth = first * self.factor, growth * self.factor

    def steps_by(self, until: float) -> int:
        """Steps of the stretch that are computed by then."""
        if self.entry is None or until <= self.start:
            return 0
        steps = steps_until(until - self.start, self.first, self.growth)
        if self.start + elapsed(self.first, self.growth, steps) > until:
            steps -= 1  # the step that is being computed
        return min(steps, self.steps)

    def record(self, recorder: Recorder, steps: int) -> None:
        """Each request of the batch got a token from each of the first steps of the stretch."""
        if steps:
            for life in self.batch:
                recorder.produced(life, self.start, self.first, self.growth, steps)

    def span(self, instance: InstanceId, ended: float) -> ComputeSpan:
        """What the turn was, as it is over."""
        return ComputeSpan(
            instance,
            self.command.model,
            self.began,
            ended,
            self.largest,
            self.done_steps,
            self.done_prompts,
        )
