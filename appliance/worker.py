"""The process of one instance: carries the machine's commands out, in order, on engines it holds.

Started by the daemon as ``python -m appliance.worker SOCKET_FD HOST_FD``. Three threads: the main
one works, one reads frames (a `Preempt` or a `Release` takes effect at the next step boundary,
ahead of what is queued), one carries out prefetches. The daemon's end of the socket closing ends
the process, so that no worker outlives its daemon.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import singledispatchmethod

from appliance import wire
from appliance.engines.protocol import Engine, KvExhausted, Produced
from appliance.memory.arena import Arena
from appliance.memory.hosttier import HostTier
from appliance.orders import Build, Seat
from appliance.ranks import lead, replicated
from appliance.vocabulary import (
    BuildModel,
    Command,
    Direction,
    EvictModel,
    KvMoved,
    LoadModel,
    ModelBuilt,
    ModelFailed,
    ModelLoaded,
    ModelName,
    MoveKv,
    Preempt,
    PrefetchModel,
    PrefillDeferred,
    PrefillDone,
    Release,
    RequestFailed,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)

PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 16

Send = Callable[[wire.Up], None]

log = logging.getLogger("appliance.worker")


class Mailbox:
    """Frames from the daemon, sorted by when they take effect."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[wire.Down] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._releases: list[Release] = []
        self._ahead: set[str] = set()
        self._preempted = 0

    def put(self, message: wire.Down) -> None:
        if isinstance(message, Release):
            with self._lock:
                self._releases.append(message)
                self._ahead.add(message.request)
            self.commands.put(message)
        elif isinstance(message, Preempt):
            self._preempted = max(self._preempted, message.turn)
        else:
            self.commands.put(message)

    def preempted(self, turn: int) -> bool:
        """Whether this turn (or a later one) was preempted."""
        return turn <= self._preempted

    def released(self, request: str) -> bool:
        """Whether a release of this request waits further down the queue."""
        return request in self._ahead

    def reached(self, release: Release) -> None:
        """The release was met in the queue: what follows may concern the request anew."""
        with self._lock:
            self._ahead.discard(release.request)

    def take_releases(self) -> list[Release]:
        """The releases that came since the last call."""
        if not self._releases:
            return []
        with self._lock:
            releases, self._releases = self._releases, []
        return releases


class Worker:
    """Carries out commands one after the other. `build` makes an engine, `send` reports."""

    def __init__(
        self,
        configuration: wire.Configure,
        arena: Arena,
        mailbox: Mailbox,
        build: Build,
        send: Send,
    ) -> None:
        self.instance = configuration.instance
        self._models = {model.name: model for model in configuration.models}
        self._arena = arena
        self._mailbox = mailbox
        self._build = build
        self._send = send
        self._engines: dict[ModelName, Engine] = {}
        self._transfers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._prefetches: dict[ModelName, Future[None]] = {}

    def run(self) -> None:
        """Work until told to shut down."""
        while True:
            message = self._mailbox.commands.get()
            self._forget_released()
            if isinstance(message, wire.Shutdown):
                return
            self._carry_out(message)

    @singledispatchmethod
    def _carry_out(self, message: Command) -> None:
        raise TypeError(f"not a command for a worker: {message!r}")

    @_carry_out.register
    def _(self, message: Release) -> None:
        """It took effect when it came, ahead of this place in the queue."""
        self._mailbox.reached(message)
        engine = self._engines.get(message.model)
        if engine is not None:
            engine.forget(message.request)
            engine.trim()
        self._report_pool()

    @_carry_out.register
    def _(self, message: wire.AddSequence) -> None:
        sequence = message.sequence
        if self._mailbox.released(sequence.request):
            return
        try:
            self._engines[sequence.model].add(sequence)
        except ValueError as error:
            self._send(
                RequestFailed(
                    instance=self.instance,
                    model=sequence.model,
                    request=sequence.request,
                    reason=str(error),
                )
            )

    # --- engines and weights ---------------------------------------------------------------------

    @_carry_out.register
    def _(self, command: BuildModel) -> None:
        # Whatever is wrong with one checkpoint must not take the other models down.
        try:
            engine = self._build(self._models[command.model])
        except Exception as error:
            log.exception("building %s failed", command.model)
            reason = f"{type(error).__name__}: {error}"
            self._send(ModelFailed(instance=self.instance, model=command.model, reason=reason))
            return
        self._engines[command.model] = engine
        self._send(
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
    def _(self, command: StoreWeights) -> None:
        self._engines[command.model].store_weights(command.host_offsets, fill=command.fill)
        self._send(WeightsStored(instance=self.instance, model=command.model))

    @_carry_out.register
    def _(self, command: LoadModel) -> None:
        self._await_prefetch(command.model)
        self._load(command.model, prefetched=False)

    @_carry_out.register
    def _(self, command: PrefetchModel) -> None:
        self._prefetches[command.model] = self._transfers.submit(
            self._load, command.model, prefetched=True
        )

    @_carry_out.register
    def _(self, command: EvictModel) -> None:
        prefetch = self._prefetches.pop(command.model, None)
        if prefetch is not None and not prefetch.cancel():
            prefetch.result()
        self._engines[command.model].evict_weights()

    def _await_prefetch(self, model: ModelName) -> None:
        prefetch = self._prefetches.pop(model, None)
        if prefetch is not None:
            prefetch.result()

    def _load(self, model: ModelName, *, prefetched: bool) -> None:
        began = time.monotonic()
        transfer = self._engines[model].begin_load()
        fresh = transfer.began is not None and transfer.began >= began
        transfer.wait()
        if fresh:
            self._send(
                ModelLoaded(
                    instance=self.instance,
                    model=model,
                    moved_bytes=transfer.nbytes,
                    seconds=time.monotonic() - began,
                    prefetched=prefetched,
                )
            )

    # --- requests --------------------------------------------------------------------------------

    @_carry_out.register
    def _(self, command: MoveKv) -> None:
        engine = self._engines[command.model]
        began = time.monotonic()
        moved, missing, moved_bytes = [], [], 0
        for kv_move in command.moves:
            if not engine.knows(kv_move.request):
                missing.append(kv_move.request)
                continue
            if command.direction is Direction.OUT:
                moved_bytes += engine.swap_out(kv_move.request, kv_move.host_offsets)
            else:
                moved_bytes += engine.swap_in(
                    kv_move.request, kv_move.host_offsets, command.kv_slabs
                )
            moved.append(kv_move.request)
        self._send(
            KvMoved(
                instance=self.instance,
                model=command.model,
                direction=command.direction,
                moved=tuple(moved),
                missing=tuple(missing),
                moved_bytes=moved_bytes,
                seconds=time.monotonic() - began,
                kv_slabs=engine.trim().slabs,
            )
        )

    @_carry_out.register
    def _(self, command: RunPrefill) -> None:
        engine = self._engines[command.model]
        self._await_prefetch(command.model)
        began = time.monotonic()
        if engine.knows(command.request):
            try:
                self._tokens(command.model, engine.prefill(command.request, command.kv_slabs))
            except KvExhausted:
                self._send(
                    PrefillDeferred(
                        instance=self.instance,
                        model=command.model,
                        request=command.request,
                        kv_slabs=engine.trim().slabs,
                    )
                )
                return
        self._send(
            PrefillDone(
                instance=self.instance,
                model=command.model,
                request=command.request,
                kv_slabs=engine.trim().slabs,
                seconds=time.monotonic() - began,
            )
        )
        self._report_pool()

    @_carry_out.register
    def _(self, command: RunTurn) -> None:
        engine = self._engines[command.model]
        self._await_prefetch(command.model)
        began = time.monotonic()
        reason, steps = self._decode(engine, command, began)
        self._send(
            TurnEnded(
                instance=self.instance,
                model=command.model,
                turn=command.turn,
                reason=reason,
                steps=steps,
                seconds=time.monotonic() - began,
                kv_slabs=engine.trim().slabs,
            )
        )
        self._report_pool()

    def _decode(self, engine: Engine, turn: RunTurn, began: float) -> tuple[TurnEnd, int]:
        """Steps until the turn is over; at least one, so that every turn is progress."""
        batch = [request for request in turn.requests if engine.knows(request)]
        steps = 0
        while batch:
            try:
                produced = engine.step(batch, turn.kv_slabs)
            except KvExhausted:
                if not steps:
                    raise
                return TurnEnd.KV_FULL, steps
            steps += 1
            self._tokens(turn.model, produced)
            ended = {token.request for token in produced if token.finished is not None}
            ended.update(release.request for release in self._forget_released())
            if ended:
                batch = [request for request in batch if request not in ended]
            if not batch:
                break
            if self._mailbox.preempted(turn.turn):
                return TurnEnd.PREEMPTED, steps
            if time.monotonic() - began >= turn.quota_seconds:
                return TurnEnd.QUOTA, steps
        return TurnEnd.DRAINED, steps

    def _tokens(self, model: ModelName, produced: list[Produced]) -> None:
        self._send(wire.Tokens(self.instance, model, produced))

    def _forget_released(self) -> Iterable[Release]:
        releases = self._mailbox.take_releases()
        for release in releases:
            engine = self._engines.get(release.model)
            if engine is not None:
                engine.forget(release.request)
                engine.trim()
        return releases

    def _report_pool(self) -> None:
        self._send(wire.PoolReport(self.instance, self._arena.usage(), self._arena.high_water))


def _read(connection: socket.socket, decoder: wire.Decoder[wire.Down], mailbox: Mailbox) -> None:
    """Frames to the mailbox until the daemon is gone, or is not understood; the process ends then:
    a worker that cannot hear is of no use."""
    try:
        while data := connection.recv(READ_BYTES):
            for message in decoder.feed(data):
                mailbox.put(message)
    except ConnectionError:
        pass  # the daemon is gone in a hurry
    except Exception:
        log.exception("the daemon sent what cannot be read")
        os._exit(1)
    os._exit(0)


def _first_frame(connection: socket.socket, decoder: wire.Decoder[wire.Down]) -> wire.Configure:
    messages: list[wire.Down] = []
    while not messages:
        data = connection.recv(READ_BYTES)
        if not data:
            raise SystemExit(0)
        messages = decoder.feed(data)
    configuration = messages[0]
    if not isinstance(configuration, wire.Configure) or len(messages) > 1:
        raise SystemExit(f"expected one Configure frame, got {messages!r}")
    if configuration.version != wire.PROTOCOL_VERSION:
        raise SystemExit(f"daemon speaks version {configuration.version} of the wire protocol")
    return configuration


def main(arguments: list[str]) -> None:
    """Run a worker over inherited descriptors: the socket, then the host tier."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[0]))
    decoder = wire.decoder_of_commands()
    configuration = _first_frame(connection, decoder)
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(levelname)s instance={configuration.instance} %(name)s: %(message)s",
    )
    # At every engine vLLM warns of what is chosen here on purpose; its errors are news.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    host = HostTier.attach(int(arguments[1]), configuration.host_bytes)
    seat, followers = lead(configuration, host.fd)
    build, arena = engines(configuration, host, seat)
    if followers is not None:
        build = replicated(build, followers)
    sending = threading.Lock()

    def send(message: wire.Up) -> None:
        with sending:
            connection.sendall(wire.encode(message))

    mailbox = Mailbox()
    reader = threading.Thread(target=_read, args=(connection, decoder, mailbox), daemon=True)
    send(wire.Hello(configuration.instance, os.getpid(), configuration.slabs))
    reader.start()
    # Engines share process-wide state that cannot be torn down piece by piece; the system does it.
    # The same goes for a worker that failed: its books are void, the daemon starts another.
    try:
        Worker(configuration, arena, mailbox, build, send).run()
    except Exception:
        log.exception("worker failed")
        os._exit(1)
    os._exit(0)


def engines(configuration: wire.Configure, host: HostTier, seat: Seat) -> tuple[Build, Arena]:
    """The executor of this machine, for one rank. vLLM is imported here and nowhere before.

    Of several ranks, each waits here for the others.
    """
    from appliance.engines.vllm.environment import prepare_environment
    from appliance.memory.vmm_host import HostVmm

    prepare_environment(seat.cpus)
    from appliance.engines.vllm.engine import VllmEngine
    from appliance.engines.vllm.executor import join_group

    if seat.ranks > 1:
        join_group(seat.rank, seat.ranks, seat.store, crowded=seat.crowded)

    arena = Arena(HostVmm(configuration.slabs, configuration.slab_bytes))

    def build(model: wire.WorkerModel) -> Engine:
        return VllmEngine.build(
            model.name,
            model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_batch=model.max_batch,
            arena=arena,
            host=host,
            ranks=seat.ranks,
        )

    return build, arena


if __name__ == "__main__":
    main(sys.argv[1:])
