"""The ranks of a tensor-parallel instance: one process each, all doing the same in the same order.

Rank 0, the *leader*, is the worker that the daemon talks to; the others follow it. Each has a whole
engine for every model, on its shard of the weights and of the KV cache, in a pool of its own:

    daemon == leader: Worker -> ReplicatedEngine -> VllmEngine (rank 0)
                                     |  orders            : collectives of the forward pass
                              follower: Follower -> VllmEngine (rank 1)

Whatever changes an engine is first sent to the followers and then done by the leader. Ranks compute
the same logits and draw the same tokens, so nothing else passes between them. What depends on time
(quotas, preemption) is decided above the engine, by the leader alone. A rank that is lost, or that
goes another way than the others, ends the instance: the daemon starts it anew, as it does for a
worker that was killed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from appliance import framing
from appliance.checkpoints.adapters import AdapterPlace
from appliance.engines.protocol import (
    DraftUse,
    Engine,
    KvBytes,
    KvUse,
    Produced,
    SequenceSpec,
    Verdict,
)
from appliance.errors import CheckpointError
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferFailed
from appliance.vocabulary import RequestId
from appliance.worker import frames
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
    decoder_of_answers,
    image_slabs,
    seats,
)
from appliance.worker.rank_processes import RankProcess, start_follower

AGREEMENT_SECONDS: Final = 120.0
"""How long a rank may take to refuse what another refused; a load may be under way before it."""

WORST_FIRST: Final = (Verdict.DIFFERS, Verdict.NOT_LOADED, Verdict.NO_IMAGE, Verdict.OK)

T = TypeVar("T")

log = logging.getLogger("appliance.worker")


class RankFailed(Exception):
    """A follower could not do what the leader could; the message has its rank and its reason."""


class _Poll:
    """What the followers answer to one order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: list[Answer] = []

    def raise_failure(self) -> None:
        """Raise `CheckpointError` or `RankFailed` if one of them did not do it."""
        for answer in self.answers:
            if isinstance(answer, Refused):
                raise RankFailed(answer.reason)
            if isinstance(answer, Failed):
                raise (CheckpointError if answer.checkpoint else RankFailed)(answer.reason)


class _Refusal:
    """An order that some rank refused."""

    def __init__(self) -> None:
        self.followers = 0
        self.leader = False


class Followers:
    """The other ranks, as the leader sees them. Orders may come from several threads.

    `on_lost` is called, from any thread, when a follower is gone or goes another way; the instance
    cannot go on then, and it is expected to end the process.
    """

    def __init__(
        self, connections: Sequence[socket.socket], on_lost: Callable[[str], None]
    ) -> None:
        self.ranks = 1 + len(connections)
        self.drawn = 0
        """Checksum of all tokens that were drawn."""
        self._connections = connections
        self._on_lost = on_lost
        self._gone: str | None = None
        self._telling = threading.Lock()
        self._orders = 0
        self._answered = threading.Condition()
        self._polls: dict[int, _Poll] = {}
        self._refusals: dict[int, _Refusal] = {}
        for rank, connection in enumerate(connections, start=1):
            # Made here: msgspec crashes where threads are the first to make decoders of a type.
            listening = (rank, connection, decoder_of_answers())
            threading.Thread(
                target=self._listen, args=listening, name=f"rank-{rank}", daemon=True
            ).start()

    def invite(self, configuration: frames.Configure, taken: Sequence[Seat]) -> None:
        """Tell every follower its seat; the first frame that it gets."""
        for connection, seat in zip(self._connections, taken, strict=True):
            connection.sendall(framing.encode(Invitation(configuration, seat)))

    def follow(self, call: Call, act: Callable[[], T]) -> T:
        """Have every rank do it, this one by `act`. Raises what `act` raises; of `REFUSALS`, once
        all ranks have refused it."""
        number = self._tell(call).number
        try:
            return act()
        except REFUSALS as refusal:
            self._agree(number, str(refusal))
            raise

    def compute(self, call: Call, act: Callable[[], list[Produced]]) -> list[Produced]:
        """As `follow`, for what ranks compute together: one cannot fail in the midst of it by
        itself, for the others wait for it. They are lost then."""
        try:
            produced = self.follow(call, act)
        except REFUSALS:
            raise
        except Exception as error:
            self._lose(f"the leader failed in a step: {error}")
            raise
        self.drawn = checksum(self.drawn, produced)
        return produced

    def move(self, call: Call, act: Callable[[], Transfer]) -> tuple[Transfer, _Poll]:
        """As `follow`, for what goes on after the order; `join` makes one of the transfers."""
        poll = self._tell(call, asked=True)
        try:
            return act(), poll
        except REFUSALS as refusal:
            self._wait(poll)
            if not all(isinstance(answer, Refused) for answer in poll.answers):
                self._lose(f"the leader alone refused order {poll.number}: {refusal}")
            raise

    def ask(self, call: Call, act: Callable[[], T]) -> tuple[T, Sequence[Answer]]:
        """Have every rank do it, and return when all have. Raises as `act` does, or else
        `CheckpointError` or `RankFailed` for the followers."""
        poll = self._tell(call, asked=True)
        try:
            result = act()
        finally:
            self._wait(poll)
        poll.raise_failure()
        return result, poll.answers

    def join(self, local: Transfer, poll: _Poll, swapper: Swapper | None = None) -> Transfer:
        """The transfer of all ranks, of which `local` is this rank's: over when all of them are.
        It is counted in with `swapper`, if given.

        Every rank moves as much as this one: shards are alike, as vLLM fills up what is not
        divisible. How far its bytes have landed is not reported in between.
        """
        whole = Transfer(local.kind, local.owner, local.nbytes * self.ranks, local.queued)
        if local.began is not None:
            whole.begin(local.began)
        if swapper is not None:
            swapper.follow(whole)
        threading.Thread(target=self._finish, args=(whole, local, poll), daemon=True).start()
        return whole

    def _finish(self, whole: Transfer, local: Transfer, poll: _Poll) -> None:
        error: BaseException | None = None
        try:
            local.wait()
        except TransferFailed as failure:
            error = failure
        try:
            self._wait(poll)
            poll.raise_failure()
        except (CheckpointError, RankFailed) as failure:
            error = error or failure
        if whole.began is None and local.began is not None:
            whole.begin(local.began)
        if error is None:
            whole.finish(time.monotonic())
        else:
            whole.fail(error, time.monotonic())

    def _tell(self, call: Call, *, asked: bool = False) -> _Poll:
        """Orders of several threads reach all followers in one order."""
        with self._telling:
            self._orders += 1
            poll = _Poll(self._orders)
            if asked:
                self._polls[poll.number] = poll
            frame = framing.encode(Order(poll.number, call))
            for connection in self._connections:
                connection.sendall(frame)
            return poll

    def _wait(self, poll: _Poll) -> None:
        """Return when all followers have answered. It takes as long as the work they do."""
        everyone = len(self._connections)
        with self._answered:
            self._answered.wait_for(lambda: self._gone or len(poll.answers) == everyone)
        if self._gone:
            raise RankFailed(self._gone)

    def _agree(self, number: int, reason: str) -> None:
        """This rank refused an order; so must the others."""
        everyone = len(self._connections)
        with self._answered:
            refusal = self._refusals.setdefault(number, _Refusal())
            refusal.leader = True
            self._answered.notify_all()
            agreed = self._answered.wait_for(
                lambda: self._gone or refusal.followers == everyone, AGREEMENT_SECONDS
            )
            del self._refusals[number]
        if not agreed:
            self._lose(f"the leader alone refused order {number}: {reason}")

    def _lose(self, reason: str) -> None:
        with self._answered:
            self._gone = reason
            self._answered.notify_all()
        self._on_lost(reason)

    def _listen(
        self, rank: int, connection: socket.socket, decoder: framing.Decoder[Answer]
    ) -> None:
        try:
            while data := connection.recv(READ_BYTES):
                for answer in decoder.feed(data):
                    self._on_answer(rank, answer)
        except ConnectionError:
            pass  # it went in a hurry
        except Exception as error:
            self._lose(f"rank {rank} sent what cannot be read: {error}")
            return
        self._lose(f"rank {rank} is gone")

    def _on_answer(self, rank: int, answer: Answer) -> None:
        number = answer.number
        if isinstance(answer, Refused | Failed):
            answer = msgspec.structs.replace(answer, reason=f"rank {rank}: {answer.reason}")
        with self._answered:
            poll = self._polls.get(number)
            if poll is not None:
                poll.answers.append(answer)
                if len(poll.answers) == len(self._connections):
                    del self._polls[number]
                self._answered.notify_all()
                return
            refusal = self._refusals.setdefault(number, _Refusal())
            refusal.followers += 1
            self._answered.notify_all()
            agreed = self._answered.wait_for(
                lambda: self._gone or refusal.leader, AGREEMENT_SECONDS
            )
        if not agreed:
            self._lose(f"order {number} was not refused by the leader, but by {answer}")


def lead(
    configuration: frames.Configure, host_fd: int, daemon: socket.socket
) -> tuple[Seat, Followers | None]:
    """Take the leader's seat, and start the followers' processes, if there are to be any. `daemon`
    is the leader's connection, which they do not get.

    They end with this process, and it with any of them. Raises `OSError` if one cannot be started.
    """
    # The name must be new: vLLM makes shared memory of it.
    store = Path(tempfile.gettempdir(), f"ranks-{secrets.token_hex(8)}")
    mine, *others = seats(configuration, str(store))
    if not others:
        return mine, None
    processes: list[RankProcess] = []
    connections: list[socket.socket] = []

    def end(reason: str) -> None:
        log.critical("the instance cannot go on: %s", reason)
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()  # no zombie is left to the process that adopts it
        os._exit(1)

    for _ in others:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            processes.append(start_follower(theirs, host_fd, [daemon, ours, *connections]))
        connections.append(ours)
    followers = Followers(connections, end)
    followers.invite(configuration, others)
    return mine, followers


class ReplicatedEngine:
    """One model on all ranks. Implements `appliance.engines.protocol.Engine`.

    Slabs of devices are those of each rank, which all have the same; bytes and slabs of the host
    tier are those of all ranks together.
    """

    def __init__(
        self, engine: Engine, others: Sequence[Built], followers: Followers, swapper: Swapper
    ) -> None:
        """`engine` is this rank's. Raises `RankFailed` if ranks differ in what they need."""
        for rank, built in enumerate(others, start=1):
            mine = (engine.weight_slabs, engine.host_slabs, engine.kv)
            if (built.weight_slabs, built.host_slabs, built.kv) != mine:
                raise RankFailed(f"rank {rank} differs from the leader: {built}, not {mine}")
        ranks = followers.ranks
        layouts = (engine.layout_digest, *(built.layout for built in others))
        self.model = engine.model
        self.weight_slabs = engine.weight_slabs
        self.host_slabs = engine.host_slabs * ranks
        self.layout_digest = hashlib.sha256(f"{ranks} {' '.join(layouts)}".encode()).hexdigest()
        self.kv = msgspec.structs.replace(engine.kv, block_bytes=engine.kv.block_bytes * ranks)
        self._engine = engine
        self._followers = followers
        self._swapper = swapper
        self._stepping: Sequence[RequestId] | None = None
        """The list of the last step that the followers know."""
        self._local: Transfer | None = None
        self._whole: Transfer | None = None

    def store_weights(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        mine = image_slabs(host_offsets, 0, self._followers.ranks)
        self._followers.ask(
            StoreWeights(self.model, list(host_offsets), fill),
            lambda: self._engine.store_weights(mine, fill=fill),
        )
        return len(host_offsets)

    def begin_load(self) -> Transfer:
        local, poll = self._followers.move(BeginLoad(self.model), self._engine.begin_load)
        if local is not self._local or self._whole is None:
            self._local = local
            self._whole = self._followers.join(local, poll, self._swapper)
        return self._whole

    def evict_weights(self) -> None:
        self._local = self._whole = None
        self._followers.follow(EvictWeights(self.model), self._engine.evict_weights)

    def put_adapters(
        self, adapters: Sequence[AdapterPlace], slots: Sequence[int], *, image: bool
    ) -> None:
        """Several ranks have no model with adapters."""
        raise CheckpointError(f"{self.model} has no adapters, as it is divided among ranks")

    def prepare(self, body: bytes) -> None:
        """By the leader; the others compile it when the request is added."""
        self._engine.prepare(body)

    def add(self, sequence: SequenceSpec) -> None:
        self._followers.follow(Add(sequence), lambda: self._engine.add(sequence))

    def knows(self, request: RequestId) -> bool:
        return self._engine.knows(request)

    def forget(self, request: RequestId) -> None:
        self._followers.follow(Forget(self.model, request), lambda: self._engine.forget(request))

    def prefill(self, request: RequestId, kv_slabs: int) -> list[Produced]:
        # A load that fails under a step would be the end of the ranks; here it is an answer.
        if self._whole is not None:
            self._whole.wait()
        call = Prefill(self.model, request, kv_slabs, self._followers.drawn)
        return self._followers.compute(call, lambda: self._engine.prefill(request, kv_slabs))

    def begin_prefill(self, request: RequestId, kv_slabs: int) -> None:
        self._followers.follow(
            BeginPrefill(self.model, request, kv_slabs),
            lambda: self._engine.begin_prefill(request, kv_slabs),
        )

    def tokens_left(self, request: RequestId) -> int:
        return self._engine.tokens_left(request)

    def step(
        self,
        requests: Sequence[RequestId],
        kv_slabs: int,
        prompts: Sequence[RequestId] = (),
        chunk_tokens: int = 0,
    ) -> list[Produced]:
        changed = None if requests is self._stepping else list(requests)
        self._stepping = requests
        drawn = self._followers.drawn
        call = Step(self.model, changed, kv_slabs, drawn, tuple(prompts), chunk_tokens)
        return self._followers.compute(
            call, lambda: self._engine.step(requests, kv_slabs, prompts, chunk_tokens)
        )

    def swap_out(self, request: RequestId, host_offsets: Sequence[int]) -> Transfer:
        """Over when it returns: blocks have to be free on all ranks at the same point, or one
        would refuse what another can do."""
        mine = block_places(host_offsets, 0, self._engine.kv.block_bytes)
        return self._swap(
            SwapOut(self.model, request, list(host_offsets)),
            lambda: self._engine.swap_out(request, mine),
        )

    def swap_in(self, request: RequestId, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        """Over when it returns."""
        mine = block_places(host_offsets, 0, self._engine.kv.block_bytes)
        return self._swap(
            SwapIn(self.model, request, list(host_offsets), kv_slabs),
            lambda: self._engine.swap_in(request, mine, kv_slabs),
        )

    def _swap(self, call: Call, act: Callable[[], Transfer]) -> Transfer:
        local, poll = self._followers.move(call, act)
        self._swapper.settle([local])
        whole = self._followers.join(local, poll)
        whole.wait()
        return whole

    def trim(self, keep_slabs: int | None = None) -> KvUse:
        return self._followers.follow(
            Trim(self.model, keep_slabs), lambda: self._engine.trim(keep_slabs)
        )

    def kv_use(self) -> KvBytes:
        """Of all ranks, which all have the same."""
        return KvBytes(*(size * self._followers.ranks for size in self._engine.kv_use()))

    def draft_use(self) -> DraftUse:
        """Of this rank: the others draft the same."""
        return self._engine.draft_use()

    def retire(self) -> None:
        self._local = self._whole = None
        self._followers.follow(Retire(self.model), self._engine.retire)

    def verify(self) -> Verdict:
        """The worst verdict of all ranks."""
        mine, answers = self._followers.ask(Verify(self.model), self._engine.verify)
        found = {mine, *(a.verdict for a in answers if isinstance(a, Compared))}
        return next(verdict for verdict in WORST_FIRST if verdict in found)


def replicated(build: Build, followers: Followers, swapper: Swapper) -> Build:
    """Builds each engine on all ranks, this rank's by `build`; its transfers are `swapper`'s.

    Raises what `build` raises, and `RankFailed` for a follower that could not. What other ranks
    have built then stays with them, unused and without any slab.
    """

    def build_all(model: frames.WorkerModel) -> Engine:
        engine, answers = followers.ask(BuildEngine(model), lambda: build(model))
        built = [answer for answer in answers if isinstance(answer, Built)]
        return ReplicatedEngine(engine, built, followers, swapper)

    return build_all
