"""A follower: the process of a rank that is not the leader of its tensor-parallel instance.

Forked from its leader, or, if that has not imported vLLM either, started by it as
``python -m appliance.worker.follower SOCKET_FD HOST_FD``. It has one thread that works, and ends
with its leader: the system kills it, or it finds the socket closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import singledispatchmethod
from typing import NoReturn

from appliance import framing
from appliance.engines.protocol import Engine
from appliance.errors import CheckpointError
from appliance.memory.host_tier import HostTier
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferFailed
from appliance.platform import logs
from appliance.platform.children import WORKER_OOM_SCORE, die_with_parent, go_before_the_daemon
from appliance.vocabulary import ModelName, RequestId
from appliance.worker.engines import engines
from appliance.worker.rank_messages import (
    READ_BYTES,
    REFUSALS,
    Add,
    Answer,
    BeginLoad,
    BeginPrefill,
    Build,
    BuildEngine,
    Built,
    Call,
    Compared,
    Done,
    Downward,
    EvictWeights,
    Failed,
    Forget,
    Invitation,
    Order,
    Prefill,
    Refused,
    Retire,
    Seat,
    Step,
    StoreWeights,
    SwapIn,
    SwapOut,
    Trim,
    Verify,
    block_places,
    checksum,
    decoder_of_orders,
    image_slabs,
)

log = logging.getLogger("appliance.worker")


class WentAstray(RuntimeError):
    """This rank drew other tokens than the leader; its KV cache is void."""


class Follower:
    """Carries the leader's orders out on its own engines. An error that it raises ends the rank."""

    def __init__(
        self, seat: Seat, build: Build, swapper: Swapper, send: Callable[[Answer], None]
    ) -> None:
        """`swapper` carries out what the engines move. `send` may be called from other threads."""
        self._rank = seat.rank
        self._ranks = seat.ranks
        self._build = build
        self._swapper = swapper
        self._send = send
        self._engines: dict[ModelName, Engine] = {}
        self._batches: dict[ModelName, list[RequestId]] = {}
        self._drawn = 0

    def obey(self, order: Order) -> None:
        """Carry an order out, and answer it if the leader waits for that."""
        self._swapper.reap()
        try:
            self._carry_out(order.call, order.number)
        except REFUSALS as refusal:
            self._send(Refused(order.number, str(refusal)))

    @singledispatchmethod
    def _carry_out(self, call: Call, number: int) -> None:
        raise TypeError(f"not an order for a rank: {call!r}")

    @_carry_out.register
    def _carry_out_build_engine(self, call: BuildEngine, number: int) -> None:
        # Whatever is wrong with one checkpoint must not take the other models down.
        try:
            engine = self._build(call.model)
        except Exception as error:
            log.exception("building %s failed", call.model.name)
            self._send(Failed(number, f"{type(error).__name__}: {error}"))
            return
        self._engines[call.model.name] = engine
        self._send(
            Built(number, engine.weight_slabs, engine.host_slabs, engine.layout_digest, engine.kv)
        )

    @_carry_out.register
    def _carry_out_store_weights(self, call: StoreWeights, number: int) -> None:
        mine = image_slabs(call.host_offsets, self._rank, self._ranks)
        try:
            self._engines[call.model].store_weights(mine, fill=call.fill)
        except CheckpointError as error:
            self._send(Failed(number, str(error), checkpoint=True))
        else:
            self._send(Done(number))

    @_carry_out.register
    def _carry_out_begin_load(self, call: BeginLoad, number: int) -> None:
        transfer = self._engines[call.model].begin_load()
        threading.Thread(target=self._tell_end, args=(transfer, number), daemon=True).start()

    @_carry_out.register
    def _carry_out_evict_weights(self, call: EvictWeights, number: int) -> None:
        self._engines[call.model].evict_weights()

    @_carry_out.register
    def _carry_out_add(self, call: Add, number: int) -> None:
        self._engines[call.sequence.model].add(call.sequence)

    @_carry_out.register
    def _carry_out_forget(self, call: Forget, number: int) -> None:
        self._engines[call.model].forget(call.request)

    @_carry_out.register
    def _carry_out_prefill(self, call: Prefill, number: int) -> None:
        self._check(call.drawn)
        produced = self._engines[call.model].prefill(call.request, call.kv_slabs)
        self._drawn = checksum(self._drawn, produced)

    @_carry_out.register
    def _carry_out_begin_prefill(self, call: BeginPrefill, number: int) -> None:
        self._engines[call.model].begin_prefill(call.request, call.kv_slabs)

    @_carry_out.register
    def _carry_out_step(self, call: Step, number: int) -> None:
        self._check(call.drawn)
        if call.requests is not None:
            self._batches[call.model] = call.requests
        produced = self._engines[call.model].step(
            self._batches[call.model], call.kv_slabs, call.prompts, call.chunk_tokens
        )
        self._drawn = checksum(self._drawn, produced)

    @_carry_out.register
    def _carry_out_swap_out(self, call: SwapOut, number: int) -> None:
        engine = self._engines[call.model]
        places = block_places(call.host_offsets, self._rank, engine.kv.block_bytes)
        self._move(engine.swap_out(call.request, places), number)

    @_carry_out.register
    def _carry_out_swap_in(self, call: SwapIn, number: int) -> None:
        engine = self._engines[call.model]
        places = block_places(call.host_offsets, self._rank, engine.kv.block_bytes)
        self._move(engine.swap_in(call.request, places, call.kv_slabs), number)

    @_carry_out.register
    def _carry_out_trim(self, call: Trim, number: int) -> None:
        self._engines[call.model].trim(call.keep_slabs)

    @_carry_out.register
    def _carry_out_verify(self, call: Verify, number: int) -> None:
        self._send(Compared(number, self._engines[call.model].verify()))

    @_carry_out.register
    def _carry_out_retire(self, call: Retire, number: int) -> None:
        self._batches.pop(call.model, None)
        self._engines.pop(call.model).retire()

    def _move(self, transfer: Transfer, number: int) -> None:
        """Blocks have to be free on all ranks at the same point."""
        self._swapper.settle([transfer])
        self._tell_end(transfer, number)

    def _check(self, drawn: int) -> None:
        """A rank that drew another token than the leader computes with other tokens from now on."""
        if drawn != self._drawn:
            raise WentAstray(f"rank {self._rank} drew other tokens than the leader")

    def _tell_end(self, transfer: Transfer, number: int) -> None:
        """Answer when the transfer is over."""
        try:
            transfer.wait()
        except TransferFailed as failure:
            checkpoint = isinstance(failure.__cause__, CheckpointError)
            reason = str(failure.__cause__ if checkpoint else failure)
            self._send(Failed(number, reason, checkpoint))
        else:
            self._send(Done(number))


def run(connection: socket.socket, host_fd: int) -> NoReturn:
    """Run a follower over its socket, with the host tier of this descriptor."""
    die_with_parent(signal.SIGKILL)
    go_before_the_daemon(WORKER_OOM_SCORE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _follow(connection, host_fd)
    except ConnectionError:
        pass  # the leader is gone in a hurry
    except Exception:
        # The leader hears of it by the end of the socket, and the daemon starts the instance anew.
        log.exception("rank failed")
        os._exit(1)
    os._exit(0)


def _follow(connection: socket.socket, host_fd: int) -> None:
    frames = _frames(connection)
    invitation = next(frames, None)
    if invitation is None:
        return
    if not isinstance(invitation, Invitation):
        raise RuntimeError(f"expected an invitation, got {invitation!r}")
    configuration, seat = invitation.configuration, invitation.seat
    logs.join("warning", instance=configuration.instance, rank=seat.rank)
    # As in the worker: at every engine vLLM warns of what is chosen here on purpose.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    host = HostTier.attach(host_fd, configuration.host_bytes)
    build, _, swapper = engines(configuration, host, seat)
    sending = threading.Lock()

    def send(answer: Answer) -> None:
        with sending, contextlib.suppress(ConnectionError):  # the leader is gone: so are we, soon
            connection.sendall(framing.encode(answer))

    follower = Follower(seat, build, swapper, send)
    for order in frames:
        if isinstance(order, Invitation):
            raise RuntimeError("invited twice")
        follower.obey(order)


def _frames(connection: socket.socket) -> Iterator[Downward]:
    """Until the leader is gone."""
    decoder = decoder_of_orders()
    while data := connection.recv(READ_BYTES):
        yield from decoder.feed(data)


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
