"""The process of one instance: carries the machine's commands out, in order, on engines it holds.

The main thread works,
one reads frames (a `Preempt` or a `Release` takes effect at the next step boundary, ahead of what
is queued), and one for each kind of transfer copies. The daemon's end of the socket closing ends
the process, so that no worker outlives its daemon.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial, singledispatchmethod

from appliance.engines.protocol import Engine, KvExhausted, Produced
from appliance.errors import CheckpointError
from appliance.memory.arena import Arena
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import TransferFailed
from appliance.vocabulary import (
    BuildModel,
    Command,
    DropModel,
    EvictModel,
    LoadModel,
    ModelBuilt,
    ModelDropped,
    ModelFailed,
    ModelName,
    MoveKv,
    PrefetchModel,
    PrefillDeferred,
    PrefillDone,
    Release,
    RequestFailed,
    RequestId,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TrimKv,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)
from appliance.worker import frames
from appliance.worker.background import Background
from appliance.worker.copies import Copies
from appliance.worker.fragmentation import KvMeter
from appliance.worker.mailbox import Mailbox, Wake
from appliance.worker.outbox import Outbox, Send
from appliance.worker.rank_messages import Build

log = logging.getLogger("appliance.worker")


class TurnPrompts:
    """The prompts of a mixed turn that are not over."""

    def __init__(self, requests: Iterable[RequestId]) -> None:
        self.waiting = deque(requests)
        self.begun: dict[RequestId, float] = {}
        """Since when they are computed, in this order."""


class Worker:
    """Carries out commands one after the other. `build` makes an engine, `send` reports.

    The tokens of a turn's last step and the end of the turn are sent at once: the daemon then
    orders what is next before it passes on the tokens, and nothing is computed until it has.

    A copy that ended meanwhile is noticed at the next step or command.
    """

    def __init__(
        self,
        configuration: frames.Configure,
        arena: Arena,
        swapper: Swapper,
        mailbox: Mailbox,
        build: Build,
        send: Send,
    ) -> None:
        self.instance = configuration.instance
        self._models = {model.name: model for model in configuration.models}
        self._arena = arena
        self._swapper = swapper
        self._mailbox = mailbox
        self._build = build
        self._engines: dict[ModelName, Engine] = {}
        self._kv_meter = KvMeter()
        self._outbox = Outbox(self.instance, send)
        self._copies = Copies(self.instance, self._engines, swapper, self._outbox)
        self.background = Background(self.instance, self._engines, arena, swapper, mailbox, send)

    def run(self) -> None:
        """Work until the daemon has it shut down."""
        while True:
            message = self._mailbox.commands.get()
            self._look_around()
            if isinstance(message, frames.Shutdown):
                return
            if not isinstance(message, Wake):
                self._carry_out(message)
                self._look_around()
            if self._copies.pool_changed and self._mailbox.commands.empty():
                self._report_pool()

    def _look_around(self) -> list[Release]:
        """Forget what was released, and report the transfers that ended; O(those)."""
        releases = self._forget_released()
        self._swapper.reap()
        self._copies.report()
        return releases

    @singledispatchmethod
    def _carry_out(self, message: Command) -> None:
        raise TypeError(f"not a command for a worker: {message!r}")

    @_carry_out.register
    def _carry_out_release(self, message: Release) -> None:
        """It took effect when it came, ahead of this place in the queue."""
        self._mailbox.reached(message)
        engine = self._engines.get(message.model)
        if engine is not None:
            engine.forget(message.request)
        self._report_pool()

    @_carry_out.register
    def _carry_out_add_sequence(self, message: frames.AddSequence) -> None:
        sequence = message.sequence
        if self._mailbox.released(sequence.request):
            return
        try:
            self._engines[sequence.model].add(sequence)
        except ValueError as error:
            self._outbox.tell(
                RequestFailed(
                    instance=self.instance,
                    model=sequence.model,
                    request=sequence.request,
                    reason=str(error),
                )
            )

    @_carry_out.register
    def _carry_out_add_model(self, message: frames.AddModel) -> None:
        self._models[message.model.name] = message.model

    @_carry_out.register
    def _carry_out_put_adapters(self, message: frames.PutAdapters) -> None:
        """Jobs wait meanwhile: it reads as much as the adapters have that come."""
        refused = None
        engine = self._engines.get(message.model)
        if engine is not None:
            try:
                engine.put_adapters(message.adapters, message.slots, image=message.image)
            except CheckpointError as error:
                refused = str(error)
        self._outbox.tell(frames.AdaptersPut(self.instance, message.number, refused))

    @_carry_out.register
    def _carry_out_verify(self, message: frames.Verify) -> None:
        """Jobs wait meanwhile: it reads all weights on the device, and as many in the host tier."""
        verdicts = {model: engine.verify() for model, engine in self._engines.items()}
        self._outbox.tell(frames.Verified(self.instance, message.number, verdicts))

    # --- engines and weights ---------------------------------------------------------------------

    @_carry_out.register
    def _carry_out_build_model(self, command: BuildModel) -> None:
        # Whatever is wrong with one checkpoint must not take the other models down.
        try:
            engine = self._build(self._models[command.model])
        except Exception as error:
            log.exception("building %s failed", command.model)
            reason = f"{type(error).__name__}: {error}"
            self._outbox.tell(
                ModelFailed(instance=self.instance, model=command.model, reason=reason)
            )
            return
        self._engines[command.model] = engine
        self._outbox.tell(
            ModelBuilt(
                instance=self.instance,
                model=command.model,
                weight_slabs=engine.weight_slabs,
                kv=engine.kv,
                layout=engine.layout_digest,
                host_slabs=engine.host_slabs,
            )
        )

    @_carry_out.register
    def _carry_out_store_weights(self, command: StoreWeights) -> None:
        engine, offsets = self._engines[command.model], command.host_offsets
        try:
            taken = engine.store_weights(offsets, fill=command.fill)
        except CheckpointError as error:
            self._copies.unread(command.model, error)
        else:
            less = taken if taken < len(offsets) else None
            self._outbox.tell(
                WeightsStored(instance=self.instance, model=command.model, host_slabs=less)
            )

    @_carry_out.register
    def _carry_out_load_model(self, command: LoadModel) -> None:
        self._copies.load(command.model, prefetched=False)

    @_carry_out.register
    def _carry_out_prefetch_model(self, command: PrefetchModel) -> None:
        self._copies.load(command.model, prefetched=True)

    @_carry_out.register
    def _carry_out_evict_model(self, command: EvictModel) -> None:
        self._copies.give_up_load(command.model)
        self._engines[command.model].evict_weights()
        self._copies.pool_changed = True

    @_carry_out.register
    def _carry_out_drop_model(self, command: DropModel) -> None:
        """Whatever of the model is still on its way is reported before."""
        model = command.model
        self._copies.forget_model(model)
        self._models.pop(model, None)
        engine = self._engines.pop(model, None)
        if engine is not None:
            engine.retire()
        self._copies.pool_changed = True
        self._outbox.tell(ModelDropped(instance=self.instance, model=model))

    # --- KV --------------------------------------------------------------------------------------

    @_carry_out.register
    def _carry_out_move_kv(self, command: MoveKv) -> None:
        self._copies.move_kv(command)

    @_carry_out.register
    def _carry_out_trim_kv(self, command: TrimKv) -> None:
        self._engines[command.model].trim(command.kv_slabs)

    # --- requests --------------------------------------------------------------------------------

    @_carry_out.register
    def _carry_out_run_prefill(self, command: RunPrefill) -> None:
        """The weights may still be on their way: the engine waits for them layer by layer."""
        engine, request = self._engines[command.model], command.request
        began = time.monotonic()
        computed = True
        if command.model in self._copies.unreadable:
            computed = False
        elif engine.knows(request):
            prefill = partial(self._prefill, command)
            try:
                self._outbox.tokens(command.model, self._copies.when_there_is_room(prefill))
            except KvExhausted:
                computed = False
            except TransferFailed:
                computed = False
                if self._copies.wait_for_weights(command.model):
                    raise
        seconds = time.monotonic() - began
        computed = self._copies.wait_for_weights(command.model) and computed
        self._report_prompt(command.model, request, seconds if computed else None)
        self._report_pool()

    def _prefill(self, command: RunPrefill) -> list[Produced]:
        # Its load may have failed while there was no room yet.
        if command.model in self._copies.unreadable:
            raise TransferFailed(f"the weights of {command.model} cannot be read")
        return self._engines[command.model].prefill(command.request, command.kv_slabs)

    def _report_prompt(
        self, model: ModelName, request: RequestId, seconds: float | None = None
    ) -> None:
        """A prompt is over: computed in so many seconds, or not at all."""
        use = self._engines[model].trim()
        if seconds is None:
            self._outbox.hold(
                PrefillDeferred(
                    instance=self.instance,
                    model=model,
                    request=request,
                    kv_slabs=use.slabs,
                    cold_slabs=use.cold_slabs,
                )
            )
        else:
            self._outbox.hold(
                PrefillDone(
                    instance=self.instance,
                    model=model,
                    request=request,
                    kv_slabs=use.slabs,
                    cold_slabs=use.cold_slabs,
                    seconds=seconds,
                )
            )

    @_carry_out.register
    def _carry_out_run_turn(self, command: RunTurn) -> None:
        engine = self._engines[command.model]
        reason, steps, seconds = TurnEnd.DRAINED, 0, 0.0
        prompts = TurnPrompts(command.prompts)
        drafts = engine.draft_use()
        if self._copies.wait_for_weights(command.model):
            self._copies.wait_for_kv(command.model)
            began = time.monotonic()
            reason, steps = self._decode(engine, command, prompts, began)
            seconds = time.monotonic() - began
        for request in prompts.waiting:
            self._report_prompt(command.model, request)
        use = engine.trim()
        self._outbox.hold(
            TurnEnded(
                instance=self.instance,
                model=command.model,
                turn=command.turn,
                reason=reason,
                steps=steps,
                seconds=seconds,
                kv_slabs=use.slabs,
                cold_slabs=use.cold_slabs,
                drafted=engine.draft_use().drafted - drafts.drafted,
                accepted=engine.draft_use().accepted - drafts.accepted,
            )
        )
        self._report_pool()

    def _decode(
        self, engine: Engine, turn: RunTurn, prompts: TurnPrompts, began: float
    ) -> tuple[TurnEnd, int]:
        """Steps until the turn is over; at least one, so that every turn is progress. Whatever is
        to end it before its time, a prompt that has begun is computed to its end."""
        batch = [request for request in turn.requests if engine.knows(request)]
        end: TurnEnd | None = None
        steps = 0
        begun = prompts.begun
        self._begin_prompts(engine, turn, prompts)
        while begun or (batch and end is None):
            self._outbox.flush()
            step = partial(engine.step, batch, turn.kv_slabs)
            if begun:
                step = partial(step, prompts=tuple(begun), chunk_tokens=turn.chunk_tokens)
            try:
                produced = self._copies.when_there_is_room(step)
            except KvExhausted:
                if not steps or not batch:
                    raise
                end, batch = TurnEnd.KV_FULL, []
                continue
            steps += 1
            if produced:  # no token was drawn if only a part of a prompt was computed
                self._outbox.tokens(turn.model, produced)
            released = {release.request for release in self._look_around()}
            if begun:
                self._end_prompts(turn.model, begun, released, produced)
            ended = released.union(one.request for one in produced if one.finished is not None)
            if ended:
                batch = [request for request in batch if request not in ended]
            if end is None and (batch or begun or prompts.waiting):
                if self._mailbox.preempted(turn.turn):
                    end = TurnEnd.PREEMPTED
                    continue
                self._begin_prompts(engine, turn, prompts)
                if not begun and time.monotonic() - began >= turn.quota_seconds:
                    end = TurnEnd.QUOTA
        return end or TurnEnd.DRAINED, steps

    def _begin_prompts(self, engine: Engine, turn: RunTurn, prompts: TurnPrompts) -> None:
        """Have prompts begin while those that have leave room in the next chunk."""
        waiting, begun = prompts.waiting, prompts.begun
        while (
            waiting
            and not self._mailbox.preempted(turn.turn)
            and sum(map(engine.tokens_left, begun)) < turn.chunk_tokens
        ):
            request = waiting.popleft()
            if not engine.knows(request):
                self._report_prompt(turn.model, request, 0.0)
                continue
            self._outbox.flush()  # there may be no room before something has left
            try:
                self._copies.when_there_is_room(
                    partial(engine.begin_prefill, request, turn.kv_slabs)
                )
            except KvExhausted:
                self._report_prompt(turn.model, request)
            else:
                begun[request] = time.monotonic()

    def _end_prompts(
        self,
        model: ModelName,
        begun: dict[RequestId, float],
        released: set[RequestId],
        produced: list[Produced],
    ) -> None:
        """Those that produced their token are done, and those that were released."""
        over = released.union(one.request for one in produced)
        for request in [request for request in begun if request in over]:
            self._report_prompt(model, request, time.monotonic() - begun.pop(request))

    def _forget_released(self) -> list[Release]:
        releases = self._mailbox.take_releases()
        for release in releases:
            engine = self._engines.get(release.model)
            if engine is not None:
                engine.forget(release.request)
        return releases

    def _report_pool(self) -> None:
        self._copies.pool_changed = False
        engines = self._engines.values()
        kv = self._kv_meter.measure((e.kv.block_bytes, e.kv_use()) for e in engines)
        self._outbox.tell(
            frames.PoolReport(
                self.instance,
                self._arena.usage(),
                self._arena.high_water,
                kv,
                self._kv_meter.peak_bytes,
            )
        )
