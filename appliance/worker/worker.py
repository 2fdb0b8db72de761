"""The process of one instance: carries the machine's commands out, in order, on engines it holds.

Started by the daemon as ``python -m appliance.worker SOCKET_FD HOST_FD``. The main thread works,
one reads frames (a `Preempt` or a `Release` takes effect at the next step boundary, ahead of what
is queued), and one for each kind of transfer copies. The daemon's end of the socket closing ends
the process, so that no worker outlives its daemon.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, singledispatchmethod
from typing import NoReturn, TypeVar

from appliance import framing
from appliance.engines.protocol import Engine, GuideRefused, KvExhausted, Produced
from appliance.errors import CheckpointError
from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.slab_maps import pool_map
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferFailed
from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    DropModel,
    EvictModel,
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
from appliance.worker.fragmentation import KvMeter
from appliance.worker.mailbox import Mailbox, Wake
from appliance.worker.rank_messages import Build

GUIDE_THREADS = 4
MOST_DETAIL_BYTES = framing.MAX_FRAME_BYTES // 2
"""Of a frame's tokens together. One token's alone are fewer, and a frame holds some bytes more."""

Send = Callable[[Sequence[frames.Up]], None]
"""Tells the daemon several things at once. Called from any thread."""
T = TypeVar("T")

log = logging.getLogger("appliance.worker")


@dataclass(slots=True)
class Load:
    """Weights on their way."""

    transfer: Transfer
    prefetched: bool


@dataclass(slots=True)
class Move:
    """KV on its way: a `MoveKv` that is not reported yet."""

    command: MoveKv
    transfers: dict[RequestId, Transfer]
    missing: tuple[RequestId, ...]


class Prompts:
    """The prompts of a mixed turn that are not over."""

    def __init__(self, requests: Iterable[RequestId]) -> None:
        self.waiting = deque(requests)
        self.begun: dict[RequestId, float] = {}
        """Since when they are computed, in this order."""


class Worker:
    """Carries out commands one after the other. `build` makes an engine, `send` reports.

    What comes of a step and what comes of its being the last one are told at once: the daemon then
    orders what is next before it passes on the tokens, and nothing is computed until
    it has.

    Copies go on beside: a load until a prefill or a turn of its model needs the weights, KV on its
    way out until somebody needs the slabs. Whatever ended is noticed at the next step or command.
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
        self._send = send
        self._held: list[frames.Up] = []
        """Goes out before anything else is computed."""
        self._engines: dict[ModelName, Engine] = {}
        self._loads: dict[ModelName, Load] = {}
        self._moves: list[Move] = []
        self._kv_meter = KvMeter()
        self._use_changed = False
        """Whether weights or KV came or went since the pool was last told of."""
        self._unreadable: set[ModelName] = set()
        """Models whose weights could not be read; the daemon was told."""

    def run(self) -> None:
        """Work until told to shut down."""
        while True:
            message = self._mailbox.commands.get()
            self._look_around()
            if isinstance(message, frames.Shutdown):
                return
            if not isinstance(message, Wake):
                self._carry_out(message)
                self._look_around()
            if self._use_changed and self._mailbox.commands.empty():
                self._report_pool()

    def _tell(self, message: frames.Up) -> None:
        """Tell the daemon now, behind what was held back."""
        self._held.append(message)
        self._flush()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._send(held)

    def _look_around(self) -> list[Release]:
        """Forget what was released, and report the transfers that ended; O(those)."""
        releases = self._forget_released()
        self._swapper.reap()
        if self._loads or self._moves:
            self._report_transfers()
        return releases

    def _report_transfers(self) -> None:
        """Tell of everything that was reaped."""
        over = self._swapper.is_over
        for model in [model for model, load in self._loads.items() if over(load.transfer)]:
            self._report_load(model, self._loads.pop(model))
        behind: set[ModelName] = set()
        for move in list(self._moves):
            model, outwards = move.command.model, move.command.direction is Direction.OUT
            # In the order in which they were told, as the last one says how much stays; the first
            # may still hold what is to go.
            if (outwards and model in behind) or not all(map(over, move.transfers.values())):
                if outwards:
                    behind.add(model)
                continue
            self._moves.remove(move)
            self._report_move(move)

    def prepare_guides(self) -> None:
        """Compile guides in threads of their own, beside `run`: one that takes long holds up no
        job, and no other guide while there is a thread left."""
        for _ in range(GUIDE_THREADS):
            threading.Thread(target=self._prepare_guides, name="guides", daemon=True).start()

    def _prepare_guides(self) -> NoReturn:
        while True:
            self.prepare_guide(self._mailbox.guides.get())

    def prepare_guide(self, message: frames.PrepareGuide) -> None:
        """Compile a guide. Nothing is done for a model that is not built: its requests bring
        their guides."""
        engine = self._engines.get(message.model)
        refused: str | None = None
        try:
            if engine is not None:
                engine.prepare(message.body)
        except GuideRefused as error:
            refused = str(error)
        except Exception as error:  # a defect must not end the thread
            log.exception("a guide of %s could not be compiled", message.model)
            refused = f"{type(error).__name__}: {error}"
        self._send([frames.GuidePrepared(self.instance, message.number, refused)])

    def tell_slabs(self) -> None:
        """Answer who asks which slab is whose, in a thread of its own, beside `run`."""
        threading.Thread(target=self._tell_slabs, name="slabs", daemon=True).start()

    def _tell_slabs(self) -> NoReturn:
        while True:
            self._mailbox.slabs_asked.wait()
            self._mailbox.slabs_asked.clear()
            try:
                slabs = pool_map(self._arena, self._swapper)
            except Exception:  # a defect must not end the thread; who asks does not wait for ever
                log.exception("it could not be told which slab is whose")
            else:
                self._send([frames.SlabsTold(self.instance, slabs)])

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
            self._tell(
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
    def _carry_out_verify(self, message: frames.Verify) -> None:
        """Jobs wait meanwhile: it reads all weights on the device, and as many in the host tier."""
        verdicts = {model: engine.verify() for model, engine in self._engines.items()}
        self._tell(frames.Verified(self.instance, message.number, verdicts))

    # --- engines and weights ---------------------------------------------------------------------

    @_carry_out.register
    def _carry_out_build_model(self, command: BuildModel) -> None:
        # Whatever is wrong with one checkpoint must not take the other models down.
        try:
            engine = self._build(self._models[command.model])
        except Exception as error:
            log.exception("building %s failed", command.model)
            reason = f"{type(error).__name__}: {error}"
            self._tell(ModelFailed(instance=self.instance, model=command.model, reason=reason))
            return
        self._engines[command.model] = engine
        self._tell(
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
        try:
            self._engines[command.model].store_weights(command.host_offsets, fill=command.fill)
        except CheckpointError as error:
            self._give_up(command.model, error)
        else:
            self._tell(WeightsStored(instance=self.instance, model=command.model))

    @_carry_out.register
    def _carry_out_load_model(self, command: LoadModel) -> None:
        self._load(command.model, prefetched=False)

    @_carry_out.register
    def _carry_out_prefetch_model(self, command: PrefetchModel) -> None:
        self._load(command.model, prefetched=True)

    @_carry_out.register
    def _carry_out_evict_model(self, command: EvictModel) -> None:
        self._loads.pop(command.model, None)
        self._engines[command.model].evict_weights()
        self._use_changed = True

    @_carry_out.register
    def _carry_out_drop_model(self, command: DropModel) -> None:
        """Whatever of the model is still on its way is reported before."""
        model = command.model
        for move in [move for move in self._moves if move.command.model == model]:
            self._swapper.settle(move.transfers.values())
        self._report_transfers()
        self._models.pop(model, None)
        self._unreadable.discard(model)
        engine = self._engines.pop(model, None)
        if engine is not None:
            engine.retire()
        self._use_changed = True
        self._tell(ModelDropped(instance=self.instance, model=model))

    def _load(self, model: ModelName, *, prefetched: bool) -> None:
        if model not in self._unreadable:
            transfer = self._when_there_is_room(self._engines[model].begin_load)
            self._loads[model] = Load(transfer, prefetched)
            self._use_changed = True

    def _report_load(self, model: ModelName, load: Load) -> None:
        if load.transfer.error is not None:
            self._give_up(model, load.transfer.error)
            return
        trace = load.transfer.trace()
        self._tell(
            ModelLoaded(
                instance=self.instance,
                model=model,
                moved_bytes=trace.moved_bytes,
                queued_seconds=trace.began - trace.queued,
                seconds=trace.ended - trace.began,
                prefetched=load.prefetched,
            )
        )

    def _give_up(self, model: ModelName, error: BaseException) -> None:
        """The weights cannot be read. Anything else than that is this worker's failure."""
        reason = error if isinstance(error, CheckpointError) else error.__cause__
        if not isinstance(reason, CheckpointError):
            raise error
        log.error("the weights of %s cannot be read: %s", model, reason)
        self._unreadable.add(model)
        self._loads.pop(model, None)
        self._engines[model].evict_weights()
        self._tell(ModelFailed(instance=self.instance, model=model, reason=str(reason)))

    def _wait_for_weights(self, model: ModelName) -> bool:
        """Return when the model can compute; False if it never can."""
        load = self._loads.pop(model, None)
        if load is not None:
            with contextlib.suppress(TransferFailed):
                load.transfer.wait()
            self._swapper.settle([load.transfer])
            self._report_load(model, load)
        return model not in self._unreadable

    # --- KV --------------------------------------------------------------------------------------

    @_carry_out.register
    def _carry_out_move_kv(self, command: MoveKv) -> None:
        engine = self._engines[command.model]
        transfers: dict[RequestId, Transfer] = {}
        missing = []
        for kv_move in command.moves:
            request, places = kv_move.request, kv_move.host_offsets
            if not engine.knows(request):
                missing.append(request)
            elif command.direction is Direction.OUT:
                transfers[request] = engine.swap_out(request, places)
            else:
                swap_in = partial(engine.swap_in, request, places, command.kv_slabs)
                transfers[request] = self._when_there_is_room(swap_in)
        if command.direction is Direction.OUT:
            engine.trim(command.kv_slabs)
        self._moves.append(Move(command, transfers, tuple(missing)))
        self._swapper.reap()
        self._report_transfers()

    @_carry_out.register
    def _carry_out_trim_kv(self, command: TrimKv) -> None:
        self._engines[command.model].trim(command.kv_slabs)

    def _report_move(self, move: Move) -> None:
        """Swaps that are over; their blocks are free now, and what became cold of them goes, as
        far as the order wanted it."""
        command = move.command
        traces = [transfer.trace() for transfer in move.transfers.values()]
        began = min((trace.began for trace in traces), default=0.0)
        outwards = command.direction is Direction.OUT
        for transfer in move.transfers.values():
            if transfer.error is not None:
                raise transfer.error
        use = self._engines[command.model].trim(command.kv_slabs if outwards else None)
        self._use_changed = True
        self._tell(
            KvMoved(
                instance=self.instance,
                model=command.model,
                direction=command.direction,
                moved=tuple(move.transfers),
                missing=move.missing,
                moved_bytes=sum(trace.moved_bytes for trace in traces),
                queued_seconds=began - min((trace.queued for trace in traces), default=began),
                seconds=max((trace.ended for trace in traces), default=began) - began,
                kv_slabs=use.slabs,
                cold_slabs=use.cold_slabs,
            )
        )

    def _when_there_is_room(self, action: Callable[[], T]) -> T:
        """Do what needs slabs. Those it was promised may still be under KV on its way out: that is
        waited for, the oldest first. Raises what the action raises when that does not help."""
        while True:
            try:
                return action()
            except (PoolExhausted, KvExhausted):
                leaving = [m for m in self._moves if m.command.direction is Direction.OUT]
                if not leaving:
                    raise
                self._swapper.settle(leaving[0].transfers.values())
                self._report_transfers()

    # --- requests --------------------------------------------------------------------------------

    @_carry_out.register
    def _carry_out_run_prefill(self, command: RunPrefill) -> None:
        """The weights may still be on their way: the engine waits for them layer by layer."""
        engine, request = self._engines[command.model], command.request
        began = time.monotonic()
        computed = True
        if command.model in self._unreadable:
            computed = False
        elif engine.knows(request):
            prefill = partial(self._prefill, command)
            try:
                self._tokens(command.model, self._when_there_is_room(prefill))
            except KvExhausted:
                computed = False
            except TransferFailed:
                computed = False
                if self._wait_for_weights(command.model):
                    raise
        seconds = time.monotonic() - began
        computed = self._wait_for_weights(command.model) and computed
        self._report_prompt(command.model, request, seconds if computed else None)
        self._report_pool()

    def _prefill(self, command: RunPrefill) -> list[Produced]:
        # Its load may have failed while there was no room yet.
        if command.model in self._unreadable:
            raise TransferFailed(f"the weights of {command.model} cannot be read")
        return self._engines[command.model].prefill(command.request, command.kv_slabs)

    def _report_prompt(
        self, model: ModelName, request: RequestId, seconds: float | None = None
    ) -> None:
        """A prompt is over: computed in so many seconds, or not at all."""
        use = self._engines[model].trim()
        if seconds is None:
            self._held.append(
                PrefillDeferred(
                    instance=self.instance,
                    model=model,
                    request=request,
                    kv_slabs=use.slabs,
                    cold_slabs=use.cold_slabs,
                )
            )
        else:
            self._held.append(
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
        prompts = Prompts(command.prompts)
        if self._wait_for_weights(command.model):
            self._wait_for_kv(command)
            began = time.monotonic()
            reason, steps = self._decode(engine, command, prompts, began)
            seconds = time.monotonic() - began
        for request in prompts.waiting:
            self._report_prompt(command.model, request)
        use = engine.trim()
        self._held.append(
            TurnEnded(
                instance=self.instance,
                model=command.model,
                turn=command.turn,
                reason=reason,
                steps=steps,
                seconds=seconds,
                kv_slabs=use.slabs,
                cold_slabs=use.cold_slabs,
            )
        )
        self._report_pool()

    def _wait_for_kv(self, turn: RunTurn) -> None:
        """The KV of the batch is in place, and was reported to be, before it is computed with."""
        for move in [move for move in self._moves if move.command.model == turn.model]:
            if move.command.direction is Direction.IN:
                self._swapper.settle(move.transfers.values())
        self._report_transfers()

    def _decode(
        self, engine: Engine, turn: RunTurn, prompts: Prompts, began: float
    ) -> tuple[TurnEnd, int]:
        """Steps until the turn is over; at least one, so that every turn is progress. Whatever is
        to end it before its time, a prompt that has begun is computed to its end."""
        batch = [request for request in turn.requests if engine.knows(request)]
        end: TurnEnd | None = None
        steps = 0
        begun = prompts.begun
        self._begin_prompts(engine, turn, prompts)
        while begun or (batch and end is None):
            self._flush()
            step = partial(engine.step, batch, turn.kv_slabs)
            if begun:
                step = partial(step, prompts=tuple(begun), chunk_tokens=turn.chunk_tokens)
            try:
                produced = self._when_there_is_room(step)
            except KvExhausted:
                if not steps:
                    raise
                end, batch = TurnEnd.KV_FULL, []
                continue
            steps += 1
            if produced:  # no token was drawn if only a part of a prompt was computed
                self._tokens(turn.model, produced)
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

    def _begin_prompts(self, engine: Engine, turn: RunTurn, prompts: Prompts) -> None:
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
            self._flush()  # there may be no room before something has left
            try:
                self._when_there_is_room(partial(engine.begin_prefill, request, turn.kv_slabs))
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

    def _tokens(self, model: ModelName, produced: list[Produced]) -> None:
        """In several frames where details would not fit into one."""
        part: list[Produced] = []
        nbytes = 0
        for one in produced:
            size = len(one.detail or b"")
            if nbytes and size and nbytes + size > MOST_DETAIL_BYTES:
                self._held.append(frames.Tokens(self.instance, model, part))
                part, nbytes = [], 0
            part.append(one)
            nbytes += size
        self._held.append(frames.Tokens(self.instance, model, part))

    def _forget_released(self) -> list[Release]:
        releases = self._mailbox.take_releases()
        for release in releases:
            engine = self._engines.get(release.model)
            if engine is not None:
                engine.forget(release.request)
        return releases

    def _report_pool(self) -> None:
        self._use_changed = False
        engines = self._engines.values()
        kv = self._kv_meter.measure((e.kv.block_bytes, e.kv_use()) for e in engines)
        self._tell(
            frames.PoolReport(
                self.instance,
                self._arena.usage(),
                self._arena.high_water,
                kv,
                self._kv_meter.peak_bytes,
            )
        )
