"""What instances computed and moved, and when: turns, prompts, loads, prefetches, swaps.

orders of the machine  ->  a span begins
reports of a worker    ->  it ends, and began when the worker says
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatchmethod

import msgspec

from appliance.observability.span_history import SpanHistory
from appliance.service.interface import Decision, Span, SpanKind
from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    Event,
    EvictModel,
    InstanceId,
    KvMoved,
    LoadModel,
    ModelBuilt,
    ModelDropped,
    ModelFailed,
    ModelLoaded,
    ModelName,
    MoveKv,
    PrefetchModel,
    PrefillDeferred,
    PrefillDone,
    RequestFailed,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TurnEnded,
    WeightsStored,
)

KEPT = 48
"""Finished spans of each instance in a snapshot; `SpanHistory` has those before."""
MOST_REQUESTS = 64
"""Named in a span, at most."""
MOST_PLANNED = 8
"""Turns of a plan that are shown."""

HOOKS: Mapping[type[Command], str | None] = {
    BuildModel: None,
    LoadModel: None,
    MoveKv: None,
    PrefetchModel: "prefetch",
    RunPrefill: "prefill",
    RunTurn: "round",
    StoreWeights: None,
}
"""What a span begins with, and the question that it is an answer to."""

STEP_SECONDS = 1.0
"""The time of day is followed when it is off by more: it was set, or the machine was suspended."""

COMPUTING = (SpanKind.TURN, SpanKind.PREFILL)

Key = tuple[InstanceId, str, str]
"""What is going on: where, of what kind, and which one."""


class Work(msgspec.Struct):
    """What an instance did since the daemon started. Counters only go up."""

    busy_seconds: float = 0.0
    switches: int = 0
    moved_bytes: Counter[str] = msgspec.field(default_factory=Counter)
    """By what moved: ``weights``, ``kv_in``, ``kv_out``."""
    model: ModelName | None = None
    """What ran last."""


class Timeline:
    """The newest spans of every instance. An order or a report costs O(what it names)."""

    def __init__(
        self,
        instances: Sequence[InstanceId],
        offset: Callable[[], float],
        explain: Callable[[Command], Decision | None] = lambda command: None,
    ) -> None:
        """`offset` is how far Unix seconds are ahead of the machine's clock now. It is followed in
        steps: spans under way are moved, finished ones are not. `explain` says what led to a
        command that was given just now."""
        self.work = {instance: Work() for instance in instances}
        self.history = SpanHistory()
        self._explain = explain
        self._offset_now = offset
        self._offset = offset()
        self._number = 0
        self._open: dict[Key, Span] = {}
        self._over: dict[InstanceId, deque[Span]] = {
            instance: deque(maxlen=KEPT) for instance in instances
        }

    def shown(self) -> tuple[Span, ...]:
        """All that are kept, by number."""
        over = (span for spans in self._over.values() for span in spans)
        return tuple(sorted([*over, *self._open.values()], key=lambda span: span.number))

    def lost(self, instance: InstanceId, now: float) -> None:
        """A worker died; what it did has no end of its own."""
        for key in [key for key in self._open if key[0] == instance]:
            self._end(key, now, outcome="lost")
        self.work[instance].model = None

    def _unix(self, at: float) -> float:
        """Of a time of the machine's clock."""
        step = self._offset_now() - self._offset
        if abs(step) > STEP_SECONDS:
            self._offset += step
            for key, span in self._open.items():
                began = span.began_unix_seconds + step
                self._open[key] = msgspec.structs.replace(span, began_unix_seconds=began)
        return self._offset + at

    # --- orders ----------------------------------------------------------------------------------

    @singledispatchmethod
    def ordered(self, command: Command, now: float) -> None:
        """A command was given. Most take no time worth showing."""

    @ordered.register
    def _ordered_run_turn(self, command: RunTurn, now: float) -> None:
        self._runs(command.instance, command.model)
        self._begin(
            Span(
                number=0,
                instance=command.instance,
                kind=SpanKind.TURN,
                model=command.model,
                began_unix_seconds=self._unix(now),
                requests=command.requests[:MOST_REQUESTS],
                prompts=command.prompts[:MOST_REQUESTS],
                quota_seconds=command.quota_seconds,
                kv_slabs=command.kv_slabs,
                chunk_tokens=command.chunk_tokens,
            ),
            str(command.turn),
            command,
        )

    @ordered.register
    def _ordered_run_prefill(self, command: RunPrefill, now: float) -> None:
        self._runs(command.instance, command.model)
        self._begin(
            Span(
                number=0,
                instance=command.instance,
                kind=SpanKind.PREFILL,
                model=command.model,
                began_unix_seconds=self._unix(now),
                prompts=(command.request,),
                kv_slabs=command.kv_slabs,
            ),
            command.request,
            command,
        )

    @ordered.register
    def _ordered_build_model(self, command: BuildModel, now: float) -> None:
        self._begin_of_model(SpanKind.BUILD, command, now)

    @ordered.register
    def _ordered_store_weights(self, command: StoreWeights, now: float) -> None:
        if command.fill:
            self._begin_of_model(SpanKind.FILL, command, now)

    @ordered.register
    def _ordered_load_model(self, command: LoadModel, now: float) -> None:
        """One that is on its way already goes on as what it was."""
        if (command.instance, "weights", command.model) not in self._open:
            self._begin_of_model(SpanKind.LOAD, command, now)

    @ordered.register
    def _ordered_prefetch_model(self, command: PrefetchModel, now: float) -> None:
        self._begin_of_model(SpanKind.PREFETCH, command, now)

    @ordered.register
    def _ordered_evict_model(self, command: EvictModel, now: float) -> None:
        self._end((command.instance, "weights", command.model), now, outcome="given up")

    @ordered.register
    def _ordered_move_kv(self, command: MoveKv, now: float) -> None:
        kind = SpanKind.SWAP_IN if command.direction is Direction.IN else SpanKind.SWAP_OUT
        requests = tuple(move.request for move in command.moves)[:MOST_REQUESTS]
        self._begin(
            Span(
                number=0,
                instance=command.instance,
                kind=kind,
                model=command.model,
                began_unix_seconds=self._unix(now),
                requests=requests,
            ),
            _first(command.model, tuple(move.request for move in command.moves)),
            command,
        )

    def _begin_of_model(
        self,
        kind: SpanKind,
        command: BuildModel | StoreWeights | LoadModel | PrefetchModel,
        now: float,
    ) -> None:
        span = Span(
            number=0,
            instance=command.instance,
            kind=kind,
            model=command.model,
            began_unix_seconds=self._unix(now),
        )
        self._begin(span, command.model, command)

    def _runs(self, instance: InstanceId, model: ModelName) -> None:
        work = self.work[instance]
        work.switches += work.model not in (None, model)
        work.model = model

    def _begin(self, span: Span, which: str, command: Command) -> None:
        # It begins with the time, so that no number is that of a span from before a restart.
        self._number = max(self._number + 1, int(span.began_unix_seconds * 1e6))
        key = (span.instance, _slot(span.kind), which)
        self._open[key] = msgspec.structs.replace(
            span, number=self._number, decision=self._explain(command)
        )

    # --- reports ---------------------------------------------------------------------------------

    @singledispatchmethod
    def reported(self, event: Event, now: float) -> None:
        """A report of a worker. Most of them end nothing."""

    @reported.register
    def _reported_turn_ended(self, event: TurnEnded, now: float) -> None:
        key = (event.instance, "turn", str(event.turn))
        self._end(key, now, event.seconds, outcome=event.reason.value, steps=event.steps)

    @reported.register
    def _reported_prefill_done(self, event: PrefillDone, now: float) -> None:
        self._end((event.instance, "prefill", event.request), now, event.seconds)

    @reported.register
    def _reported_prefill_deferred(self, event: PrefillDeferred, now: float) -> None:
        self._end((event.instance, "prefill", event.request), now, outcome="deferred")

    @reported.register
    def _reported_request_failed(self, event: RequestFailed, now: float) -> None:
        self._end((event.instance, "prefill", event.request), now, outcome="refused")

    @reported.register
    def _reported_model_built(self, event: ModelBuilt, now: float) -> None:
        self._end((event.instance, "build", event.model), now)

    @reported.register
    def _reported_weights_stored(self, event: WeightsStored, now: float) -> None:
        self._end((event.instance, "fill", event.model), now)

    @reported.register
    def _reported_model_failed(self, event: ModelFailed, now: float) -> None:
        self._end_all(event.instance, event.model, now, "failed")

    @reported.register
    def _reported_model_dropped(self, event: ModelDropped, now: float) -> None:
        self._end_all(event.instance, event.model, now, "given up")

    @reported.register
    def _reported_model_loaded(self, event: ModelLoaded, now: float) -> None:
        key = (event.instance, "weights", event.model)
        self.work[event.instance].moved_bytes["weights"] += event.moved_bytes
        self._end(key, now, event.seconds, moved_bytes=event.moved_bytes)
        began = self._unix(now)
        for other, span in self._open.items():  # what waited for them begins now
            here = other[0] == event.instance and span.model == event.model
            if here and span.kind in COMPUTING:
                self._open[other] = msgspec.structs.replace(span, began_unix_seconds=began)

    @reported.register
    def _reported_kv_moved(self, event: KvMoved, now: float) -> None:
        kind = SpanKind.SWAP_IN if event.direction is Direction.IN else SpanKind.SWAP_OUT
        self.work[event.instance].moved_bytes[f"kv_{event.direction.value}"] += event.moved_bytes
        key = (event.instance, kind.value, _first(event.model, (*event.moved, *event.missing)))
        self._end(key, now, event.seconds, moved_bytes=event.moved_bytes)

    def _end_all(self, instance: InstanceId, model: ModelName, now: float, outcome: str) -> None:
        """Whatever is on the way of a model."""
        for key in [(instance, slot, model) for slot in ("build", "fill", "weights")]:
            self._end(key, now, outcome=outcome)

    def _end(
        self,
        key: Key,
        now: float,
        seconds: float | None = None,
        *,
        outcome: str = "done",
        steps: int = 0,
        moved_bytes: int = 0,
    ) -> None:
        """It is over, and took `seconds` if the worker says so; nothing, if it is not known."""
        end = self._unix(now)  # which may move the span
        span = self._open.pop(key, None)
        if span is None:
            return
        began = span.began_unix_seconds
        if seconds is not None:
            began = min(end, max(began, end - seconds))
        over = msgspec.structs.replace(
            span,
            began_unix_seconds=began,
            ended_unix_seconds=end,
            outcome=outcome,
            steps=steps,
            moved_bytes=moved_bytes,
        )
        self._over[span.instance].append(over)
        self.history.add(over)
        if span.kind in COMPUTING:
            self.work[span.instance].busy_seconds += end - began


def _slot(kind: SpanKind) -> str:
    """Loads and prefetches of a model are one thing: there is one at a time."""
    return "weights" if kind in (SpanKind.LOAD, SpanKind.PREFETCH) else kind.value


def _first(model: ModelName, requests: Sequence[str]) -> str:
    """Which swap it is: a request is in one at a time, whatever order the others are in."""
    return f"{model} {min(requests, default='')}"
