"""Copies under way on an instance: weights that are loaded, KV that is swapped in or out.

They go on while the worker computes: a load until a prefill or a turn of its model needs the
weights, KV on its way out until its slabs are needed. Each is reported when it has ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from appliance.engines.protocol import Engine, KvExhausted
from appliance.errors import CheckpointError
from appliance.memory.arena import PoolExhausted
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferFailed
from appliance.vocabulary import (
    Direction,
    InstanceId,
    KvMoved,
    ModelFailed,
    ModelLoaded,
    ModelName,
    MoveKv,
    RequestId,
)
from appliance.worker.outbox import Outbox

T = TypeVar("T")

log = logging.getLogger("appliance.worker")


@dataclass(slots=True)
class WeightCopy:
    """Weights on their way."""

    transfer: Transfer
    prefetched: bool


@dataclass(slots=True)
class KvCopy:
    """KV on its way: a `MoveKv` that is not reported yet."""

    command: MoveKv
    transfers: dict[RequestId, Transfer]
    missing: tuple[RequestId, ...]


class Copies:
    """The copies of an instance, in the order in which they were ordered."""

    def __init__(
        self,
        instance: InstanceId,
        engines: Mapping[ModelName, Engine],
        swapper: Swapper,
        outbox: Outbox,
    ) -> None:
        """`engines` are those that are built now."""
        self._instance = instance
        self._engines = engines
        self._swapper = swapper
        self._outbox = outbox
        self._loads: dict[ModelName, WeightCopy] = {}
        self._moves: list[KvCopy] = []
        self.pool_changed = False
        """Whether weights or KV came or went since the pool was last reported."""
        self.unreadable: set[ModelName] = set()
        """Models whose weights could not be read, which was reported."""

    def report(self) -> None:
        """Report the copies that have ended; O(those under way)."""
        if self._loads or self._moves:
            self._report_ended()

    def give_up_load(self, model: ModelName) -> None:
        """The model's weights are not wanted any more."""
        self._loads.pop(model, None)

    def forget_model(self, model: ModelName) -> None:
        """The model is about to be dropped: what is on its way is reported before."""
        for move in [move for move in self._moves if move.command.model == model]:
            self._swapper.settle(move.transfers.values())
        self._report_ended()
        self.unreadable.discard(model)

    def _report_ended(self) -> None:
        """Report everything that was reaped."""
        over = self._swapper.is_over
        for model in [model for model, load in self._loads.items() if over(load.transfer)]:
            self._report_load(model, self._loads.pop(model))
        behind: set[ModelName] = set()
        for move in list(self._moves):
            model, outwards = move.command.model, move.command.direction is Direction.OUT
            # In the order in which they came, as the last one says how much stays; the first
            # may still hold what is to go.
            if (outwards and model in behind) or not all(map(over, move.transfers.values())):
                if outwards:
                    behind.add(model)
                continue
            self._moves.remove(move)
            self._report_move(move)

    # --- weights ---------------------------------------------------------------------------------

    def load(self, model: ModelName, *, prefetched: bool) -> None:
        if model not in self.unreadable:
            transfer = self.when_there_is_room(self._engines[model].begin_load)
            self._loads[model] = WeightCopy(transfer, prefetched)
            self.pool_changed = True

    def _report_load(self, model: ModelName, load: WeightCopy) -> None:
        if load.transfer.error is not None:
            self.unread(model, load.transfer.error)
            return
        trace = load.transfer.trace()
        self._outbox.tell(
            ModelLoaded(
                instance=self._instance,
                model=model,
                moved_bytes=trace.moved_bytes,
                queued_seconds=trace.began - trace.queued,
                seconds=trace.ended - trace.began,
                prefetched=load.prefetched,
            )
        )

    def unread(self, model: ModelName, error: BaseException) -> None:
        """The weights cannot be read. Anything else than that is this worker's failure."""
        reason = error if isinstance(error, CheckpointError) else error.__cause__
        if not isinstance(reason, CheckpointError):
            raise error
        log.error("the weights of %s cannot be read: %s", model, reason)
        self.unreadable.add(model)
        self._loads.pop(model, None)
        self._engines[model].evict_weights()
        self._outbox.tell(ModelFailed(instance=self._instance, model=model, reason=str(reason)))

    def wait_for_weights(self, model: ModelName) -> bool:
        """Return when the model can compute; False if it never can."""
        load = self._loads.pop(model, None)
        if load is not None:
            with contextlib.suppress(TransferFailed):
                load.transfer.wait()
            self._swapper.settle([load.transfer])
            self._report_load(model, load)
        return model not in self.unreadable

    # --- KV --------------------------------------------------------------------------------------

    def move_kv(self, command: MoveKv) -> None:
        """Begin the copies of a command; they are reported when all have ended."""
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
                transfers[request] = self.when_there_is_room(swap_in)
        if command.direction is Direction.OUT:
            engine.trim(command.kv_slabs)
        self._moves.append(KvCopy(command, transfers, tuple(missing)))
        self._swapper.reap()
        self._report_ended()

    def wait_for_kv(self, model: ModelName) -> None:
        """Return when the model's KV on its way in is in place, and was reported to be."""
        for move in [move for move in self._moves if move.command.model == model]:
            if move.command.direction is Direction.IN:
                self._swapper.settle(move.transfers.values())
        self._report_ended()

    def _report_move(self, move: KvCopy) -> None:
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
        self.pool_changed = True
        self._outbox.tell(
            KvMoved(
                instance=self._instance,
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

    def when_there_is_room(self, action: Callable[[], T]) -> T:
        """Do what needs slabs. Those it may map may still be under KV on its way out: that is
        waited for, the oldest first. Raises what the action raises when that does not help."""
        while True:
            try:
                return action()
            except (PoolExhausted, KvExhausted):
                leaving = [m for m in self._moves if m.command.direction is Direction.OUT]
                if not leaving:
                    raise
                self._swapper.settle(leaving[0].transfers.values())
                self._report_ended()
