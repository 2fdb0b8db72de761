"""Ranks in lock-step: what reaches followers, what the leader waits for, and what ends them all."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from appliance import framing
from appliance.engines.protocol import (
    DraftUse,
    KvExhausted,
    KvUse,
    Produced,
    SequenceSpec,
)
from appliance.errors import CheckpointError
from appliance.memory.arena import PoolExhausted
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled, TransferFailed, TransferKind
from appliance.vocabulary import KvShape
from appliance.worker import frames, tensor_parallel
from appliance.worker.follower import Follower, WentAstray
from appliance.worker.rank_messages import (
    Add,
    BuildEngine,
    Order,
    Seat,
    Step,
    SwapIn,
    decoder_of_orders,
)
from appliance.worker.tensor_parallel import Followers, RankFailed, ReplicatedEngine, replicated
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.stream import StreamDouble

SHAPE = KvShape(block_tokens=32, block_bytes=100, group_blocks=4, group_slabs=2)
MODEL = frames.WorkerModel("a", "/a", "float32", 256, 8)
"""How long a test waits for what must come; nothing comes by itself after a while."""
SWAPS = [("swap_out", ("r", [0])), ("swap_in", ("r", [0], 1))]


class EngineDouble:
    """Writes down what it is asked. `on[name]` is called in the midst of the method `name`.

    Its swaps end when they are waited for; `reaped` has their requests once their blocks are free.
    A load is `transfer`, which the test ends.
    """

    model = "a"
    weight_slabs = 3
    host_slabs = 3
    layout_digest = "layout"
    kv = SHAPE

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.on: dict[str, Callable[[], None]] = {}
        self.token = 7
        self.transfer = transfer()
        self.stream = StreamDouble()
        self.stream.held = True
        self.swapper = Swapper(lambda name: self.stream)
        self.reaped: queue.SimpleQueue[str] = queue.SimpleQueue()

    def _note(self, name: str, *arguments: Any) -> None:
        self.calls.put((name, *arguments))
        self.on.get(name, lambda: None)()

    def store_weights(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        self._note("store_weights", list(host_offsets), fill)
        return len(host_offsets)

    def begin_load(self) -> Transfer:
        self._note("begin_load")
        return self.transfer

    def evict_weights(self) -> None:
        self._note("evict_weights")

    def retire(self) -> None:
        self._note("retire")

    def prepare(self, body: bytes) -> None:
        self._note("prepare", body)

    def add(self, sequence: SequenceSpec) -> None:
        self._note("add", sequence)

    def knows(self, request: str) -> bool:
        return request == "known"

    def forget(self, request: str) -> None:
        self._note("forget", request)

    def prefill(self, request: str, kv_slabs: int) -> list[Produced]:
        self._note("prefill", request, kv_slabs)
        return [Produced(request=request, token=self.token)]

    def begin_prefill(self, request: str, kv_slabs: int) -> None:
        self._note("begin_prefill", request, kv_slabs)

    def tokens_left(self, request: str) -> int:
        return 9

    def step(
        self,
        requests: Sequence[str],
        kv_slabs: int,
        prompts: Sequence[str] = (),
        chunk_tokens: int = 0,
    ) -> list[Produced]:
        self._note("step", list(requests), kv_slabs, list(prompts), chunk_tokens)
        return [Produced(request=request, token=self.token) for request in requests]

    def draft_use(self) -> DraftUse:
        return DraftUse(0, 0)

    def swap_out(self, request: str, host_offsets: Sequence[int]) -> Transfer:
        self._note("swap_out", request, list(host_offsets))
        return self._swap(TransferKind.KV_OUT, request, len(host_offsets))

    def swap_in(self, request: str, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        self._note("swap_in", request, list(host_offsets), kv_slabs)
        return self._swap(TransferKind.KV_IN, request, len(host_offsets))

    def trim(self, keep_slabs: int | None = None) -> KvUse:
        self._note("trim", keep_slabs)
        return KvUse(4, 1)

    def _swap(self, kind: TransferKind, request: str, blocks: int) -> Transfer:
        self.swap = self.swapper.start(
            kind,
            "kv:a",
            (),
            nbytes=blocks * SHAPE.block_bytes,
            then=lambda transfer: self.reaped.put(request),
        )
        return self.swap


class Instance:
    """A leader, and followers in threads; a follower whose thread ends hangs up."""

    def __init__(self, size: int) -> None:
        self.doubles = [EngineDouble() for _ in range(size)]
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.builds: list[Callable[[frames.WorkerModel], Any]] = [
            lambda model, double=double: double  # type: ignore[misc]
            for double in self.doubles
        ]
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.connections = [theirs for _, theirs in pairs]
        self.threads = [
            # Decoders are made in one thread: msgspec may crash where several make the first one.
            threading.Thread(target=self._follow, args=(rank, theirs, decoder_of_orders()))
            for rank, theirs in enumerate(self.connections, start=1)
        ]
        for thread in self.threads:
            thread.start()
        self.ours = [ours for ours, _ in pairs]
        self.followers = Followers(self.ours, self.lost.put)
        self.swapper = self.doubles[0].swapper

    def engine(self) -> Any:
        return replicated(self.builds[0], self.followers, self.swapper)(MODEL)

    def reason(self) -> str:
        """Why the instance is lost."""
        return self.lost.get(timeout=PATIENCE_SECONDS)

    def end(self) -> None:
        for connection in self.ours:
            connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        for connection in self.ours:
            connection.close()
        for double in self.doubles:
            double.swapper.check_integrity()
        assert [double.swapper.pending for double in self.doubles] == [0] * len(self.doubles)

    def _follow(self, rank: int, connection: socket.socket, decoder: framing.Decoder[Any]) -> None:
        def build(model: frames.WorkerModel) -> Any:
            return self.builds[rank](model)

        def send(answer: Any) -> None:
            # The end of a load that nobody waits for may be told after that of the test.
            with contextlib.suppress(OSError):
                connection.sendall(framing.encode(answer))

        seat = Seat(rank, len(self.doubles), "0")
        follower = Follower(seat, build, self.doubles[rank].swapper, send)
        try:
            while data := connection.recv(1 << 16):
                for order in decoder.feed(data):
                    assert isinstance(order, Order)
                    follower.obey(order)
        except Exception as error:
            self.errors.put(error)
        finally:
            connection.close()


Start = Callable[..., Instance]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes instances of so many ranks."""
    made: list[Instance] = []

    def make(size: int = 2) -> Instance:
        made.append(Instance(size))
        return made[-1]

    yield make
    for instance in made:
        instance.end()


def transfer() -> Transfer:
    return Transfer(TransferKind.WEIGHTS, "weights:a", 1000, time.monotonic())


def sequence(request: str) -> SequenceSpec:
    return SequenceSpec(request=request, model="a", prompt=(1, 2), output=(4,), body=b"\x00asked")


def taken(double: EngineDouble, count: int) -> list[tuple[Any, ...]]:
    """The next calls of an engine."""
    return [double.calls.get(timeout=PATIENCE_SECONDS) for _ in range(count)]


def refuse(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# --- what reaches the ranks ----------------------------------------------------------------------


def test_every_rank_does_the_same_in_the_same_order(start: Start) -> None:
    """All calls that change anything reach all ranks; each has its part of the host's places."""
    instance = start(3)
    engine = instance.engine()
    batch = ["r", "s"]

    engine.store_weights([0, 10, 20, 30, 40, 50], fill=True)
    engine.add(sequence("r"))
    produced = engine.prefill("r", 6)
    engine.step(batch, 6)
    engine.begin_prefill("p", 6)
    engine.step(batch, 6, ["p"], 16)
    out = engine.swap_out("r", [600, 0])
    into = engine.swap_in("r", [300], 5)
    engine.forget("r")
    use = engine.trim(2)
    engine.evict_weights()

    for rank, double in enumerate(instance.doubles):
        assert taken(double, 11) == [
            ("store_weights", [20 * rank, 20 * rank + 10], True),
            ("add", sequence("r")),
            ("prefill", "r", 6),
            ("step", ["r", "s"], 6, [], 0),
            ("begin_prefill", "p", 6),
            ("step", ["r", "s"], 6, ["p"], 16),
            ("swap_out", "r", [600 + 100 * rank, 100 * rank]),
            ("swap_in", "r", [300 + 100 * rank], 5),
            ("forget", "r"),
            ("trim", 2),
            ("evict_weights",),
        ]
    assert produced == [Produced(request="r", token=7)]
    assert (out.kind, out.owner, out.nbytes) == (TransferKind.KV_OUT, "kv:a", 2 * 3 * 100)
    assert (into.kind, into.owner, into.nbytes) == (TransferKind.KV_IN, "kv:a", 3 * 100)
    assert use == KvUse(4, 1)


def test_a_name_is_built_again_on_all_ranks(start: Start) -> None:
    """An engine that is retired is so everywhere; the next one of its name is another."""
    instance = start(3)
    first = instance.engine()
    first.step(["r"], 6)
    first.retire()

    instance.engine().step(["s"], 6)

    for double in instance.doubles:
        assert taken(double, 3) == [
            ("step", ["r"], 6, [], 0),
            ("retire",),
            ("step", ["s"], 6, [], 0),
        ]


def test_a_master_image_can_be_forgotten(start: Start) -> None:
    """No slabs for the instance are no slabs for any rank."""
    instance = start()
    instance.engine().store_weights((), fill=False)

    for double in instance.doubles:
        assert taken(double, 1) == [("store_weights", [], False)]


def test_what_only_asks_stays_with_the_leader(start: Start) -> None:
    """Whether a request is known is the same on all ranks, so nobody else is asked."""
    instance = start()
    engine = instance.engine()

    assert engine.knows("known")
    assert not engine.knows("other")
    assert engine.tokens_left("known") == 9

    engine.prepare(b"asked")
    assert taken(instance.doubles[0], 1) == [("prepare", b"asked")]
    assert instance.doubles[1].calls.empty()


def test_threads_of_the_leader_do_not_mix_orders_up(start: Start) -> None:
    """Whatever order the calls of two threads take, it is the same for all followers."""
    instance = start(3)
    engine = instance.engine()

    def forget(prefix: str) -> None:
        for number in range(200):
            engine.forget(f"{prefix}{number}")

    others = [threading.Thread(target=forget, args=(prefix,)) for prefix in "xy"]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()

    assert taken(instance.doubles[1], 400) == taken(instance.doubles[2], 400)


def test_an_unchanged_batch_is_named_once() -> None:
    """The list of a turn crosses once, with its first step."""
    ours, theirs = socket.socketpair()
    double = EngineDouble()
    followers = Followers([ours], lambda reason: None)
    engine = ReplicatedEngine(double, [], followers, double.swapper)
    batch = ["r", "s"]
    decoder = decoder_of_orders()
    steps: list[Any] = []

    for requests in (batch, batch, list(batch)):
        engine.step(requests, 1)
    while len(steps) < 3:
        steps += decoder.feed(theirs.recv(1 << 16))

    assert all(isinstance(order.call, Step) for order in steps)
    assert [order.call.requests for order in steps] == [["r", "s"], None, ["r", "s"]]
    theirs.close()
    ours.close()


def test_sizes_are_those_of_all_ranks(start: Start) -> None:
    """Slabs of the device are a rank's; the host holds what all of them have."""
    engine = start(3).engine()

    assert (engine.model, engine.weight_slabs, engine.host_slabs) == ("a", 3, 9)
    assert engine.kv == KvShape(block_tokens=32, block_bytes=300, group_blocks=4, group_slabs=2)
    assert len({engine.layout_digest, start(2).engine().layout_digest, "layout"}) == 3


# --- building ------------------------------------------------------------------------------------


def test_ranks_that_differ_are_no_instance(start: Start) -> None:
    """A follower whose engine needs other memory cannot be in lock-step."""
    instance = start()
    instance.doubles[1].weight_slabs = 4

    with pytest.raises(RankFailed, match="rank 1 differs"):
        instance.engine()


def test_a_build_that_fails_on_a_follower(start: Start) -> None:
    """The error names the rank and the reason, and the ranks go on with the next model."""
    instance = start()
    working = instance.builds[1]
    instance.builds[1] = lambda model: refuse(KeyError("rope_theta"))()

    with pytest.raises(RankFailed, match="rank 1: KeyError: 'rope_theta'"):
        instance.engine()

    instance.builds[1] = working
    instance.engine().trim()
    assert taken(instance.doubles[1], 1) == [("trim", None)]


def test_a_build_that_fails_on_the_leader(start: Start) -> None:
    """Its error is the one that is told, also if all ranks fail."""
    instance = start()
    instance.builds[:] = [lambda model: refuse(ValueError("no such model"))()] * 2

    with pytest.raises(ValueError, match="no such model"):
        instance.engine()
    assert instance.lost.empty()


# --- what is waited for --------------------------------------------------------------------------


def test_weights_are_stored_when_all_ranks_have(start: Start) -> None:
    """The leader, done long ago, waits for a follower that still writes."""
    instance = start()
    engine = instance.engine()
    writing, go_on, stored = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        writing.set()
        assert go_on.wait(PATIENCE_SECONDS)

    instance.doubles[1].on["store_weights"] = write

    def store() -> None:
        engine.store_weights([0, 1], fill=True)
        stored.set()

    thread = threading.Thread(target=store)
    thread.start()
    assert writing.wait(PATIENCE_SECONDS)
    assert taken(instance.doubles[0], 1)
    assert not stored.is_set()
    go_on.set()
    assert stored.wait(PATIENCE_SECONDS)
    thread.join()


def test_a_follower_with_a_bad_checkpoint(start: Start) -> None:
    """It is the same error as on the leader, and no reason to end."""
    instance = start()
    engine = instance.engine()
    instance.doubles[1].on["store_weights"] = refuse(CheckpointError("x is truncated"))

    with pytest.raises(CheckpointError, match="rank 1: x is truncated"):
        engine.store_weights([0, 1], fill=True)
    assert instance.lost.empty()


def test_a_load_is_over_when_all_ranks_are(start: Start) -> None:
    """The transfer is one for all ranks: their bytes, done with the last of them."""
    instance = start(3)
    engine = instance.engine()
    for double in instance.doubles:
        double.transfer.begin(time.monotonic())

    whole = engine.begin_load()

    assert (whole.kind, whole.owner, whole.nbytes) == (TransferKind.WEIGHTS, "weights:a", 3000)
    assert whole.began == instance.doubles[0].transfer.began
    for double in instance.doubles:
        assert not whole.done
        double.transfer.finish(time.monotonic())
    whole.wait()
    assert (whole.done, whole.landed) == (True, 3000)
    instance.swapper.settle()


def test_a_load_under_way_is_the_same_load(start: Start) -> None:
    """As with one rank, whoever asks again waits for what is under way; a new one is another."""
    instance = start()
    engine = instance.engine()
    first = engine.begin_load()
    assert engine.begin_load() is first
    for double in instance.doubles:
        assert taken(double, 2) == [("begin_load",)] * 2
        double.transfer.finish(time.monotonic())
        double.transfer = transfer()
        double.transfer.finish(time.monotonic())
    first.wait()

    second = engine.begin_load()

    assert second is not first
    second.wait()
    assert instance.swapper.pending == 2
    instance.swapper.settle()


def test_a_load_of_all_ranks_is_reaped_once(start: Start) -> None:
    """Whoever looks after transfers is woken by its end and finds it, however often asked for."""
    instance = start()
    engine, swapper = instance.engine(), instance.swapper
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    swapper.on_end = lambda: woken.put(None)
    whole = engine.begin_load()
    engine.begin_load()
    assert (swapper.pending, swapper.is_over(whole)) == (1, False)
    instance.doubles[0].transfer.finish(time.monotonic())
    assert swapper.reap() == []
    instance.doubles[1].transfer.finish(time.monotonic())
    woken.get(timeout=PATIENCE_SECONDS)

    assert swapper.reap() == [whole]
    assert engine.begin_load() is whole
    assert (swapper.reap(), swapper.pending, swapper.is_over(whole)) == ([], 0, True)
    assert whole.trace().moved_bytes == 2000
    assert woken.empty()


def test_a_load_that_fails_on_a_follower(start: Start) -> None:
    """It fails for all, with the follower's files as the cause."""
    instance = start()
    engine = instance.engine()
    whole = engine.begin_load()
    instance.doubles[0].transfer.finish(time.monotonic())
    instance.doubles[1].transfer.fail(CheckpointError("x was replaced"), time.monotonic())

    with pytest.raises(TransferFailed, match="rank 1: x was replaced") as caught:
        whole.wait()
    assert isinstance(caught.value.__cause__, CheckpointError)
    instance.swapper.settle()


def test_a_load_that_is_cancelled(start: Start) -> None:
    """What ended on purpose is not told as a failure of a rank."""
    instance = start()
    whole = instance.engine().begin_load()
    for double in instance.doubles:
        double.transfer.fail(TransferCancelled("evicted"), time.monotonic())

    with pytest.raises(TransferCancelled, match="evicted"):
        whole.wait()
    instance.swapper.settle()


@pytest.mark.parametrize(("name", "arguments"), SWAPS)
def test_a_swap_is_over_on_all_ranks_when_it_returns(
    start: Start, name: str, arguments: tuple[Any, ...]
) -> None:
    """The leader, done long ago, waits until the blocks are free on the last of the ranks."""
    instance = start(3)
    engine = instance.engine()
    under_way: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
    returned: queue.SimpleQueue[tuple[Transfer, bool]] = queue.SimpleQueue()
    last = instance.doubles[2]
    last.stream.run = (  # type: ignore[method-assign]
        lambda transfer, copies, **order: under_way.put(transfer)
    )

    def swap() -> None:
        whole = getattr(engine, name)(*arguments)
        returned.put((whole, whole.done))

    thread = threading.Thread(target=swap)
    thread.start()
    slow = under_way.get(timeout=PATIENCE_SECONDS)
    for double in instance.doubles[:2]:
        assert double.reaped.get(timeout=PATIENCE_SECONDS) == "r"
    # A leader that does not wait returns within this time; one that does never fails the test.
    with pytest.raises(queue.Empty):
        returned.get(timeout=0.1)
    assert last.reaped.empty()
    slow.finish(time.monotonic())

    whole, done = returned.get(timeout=PATIENCE_SECONDS)
    assert last.reaped.get_nowait() == "r"
    assert (done, whole.error, instance.swapper.is_over(whole)) == (True, None, True)
    thread.join()


def test_the_bytes_of_a_swap_are_those_of_all_ranks(start: Start) -> None:
    """Its trace is that of the leader's copy, with what the others moved beside it."""
    instance = start(3)
    whole = instance.engine().swap_out("r", [0, 300])

    local, trace = instance.doubles[0].swap.trace(), whole.trace()
    assert (local.moved_bytes, trace.moved_bytes) == (2 * 100, 3 * 2 * 100)
    assert (trace.queued, trace.began) == (local.queued, local.began)
    assert trace.ended >= local.ended


@pytest.mark.parametrize(
    ("rank", "told"),
    [(0, "^kv_in of kv:a: broken"), (1, "rank 1: kv_in of kv:a: broken")],
)
def test_a_swap_that_fails_on_a_rank(start: Start, rank: int, told: str) -> None:
    """It is raised, once it is over on all ranks, and nothing of it is under way any more."""
    instance = start()
    engine = instance.engine()
    instance.doubles[rank].stream.fail_next = OSError("broken")

    with pytest.raises(TransferFailed, match=told):
        engine.swap_in("r", [0], 1)

    for double in instance.doubles:
        assert double.reaped.get_nowait() == "r"
        assert double.swapper.pending == 0
    assert instance.lost.empty()


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KvExhausted("full"), PoolExhausted("full"), ValueError("full")])
@pytest.mark.parametrize("name", ["step", "add", "begin_load", "swap_in"])
def test_what_all_ranks_refuse_is_an_answer(start: Start, error: Exception, name: str) -> None:
    """It is raised on the leader, and followers go on."""
    instance = start(3)
    engine = instance.engine()
    arguments = {
        "step": (["r"], 1),
        "add": (sequence("r"),),
        "begin_load": (),
        "swap_in": ("r", [0], 1),
    }[name]
    for double in instance.doubles:
        double.on[name] = refuse(error)

    with pytest.raises(type(error), match="full"):
        getattr(engine, name)(*arguments)

    for double in instance.doubles:
        double.on.clear()
    getattr(engine, name)(*arguments)
    assert instance.lost.empty()
    for double in instance.doubles:
        assert [call[0] for call in taken(double, 2)] == [name] * 2
        double.transfer.finish(time.monotonic())
    instance.swapper.settle()


@pytest.mark.parametrize(
    ("name", "arguments"), [("step", (["r"], 1)), ("begin_load", ()), ("swap_in", ("r", [0], 1))]
)
def test_a_refusal_of_the_leader_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[Any, ...]
) -> None:
    """The followers did what it did not: the ranks are out of step."""
    monkeypatch.setattr(tensor_parallel, "AGREEMENT_SECONDS", 0.01)
    instance = start()
    engine = instance.engine()
    instance.doubles[0].on[name] = refuse(KvExhausted("full"))
    instance.doubles[1].transfer.finish(time.monotonic())

    with pytest.raises(KvExhausted):
        getattr(engine, name)(*arguments)

    assert "the leader alone refused order 2: full" in instance.reason()


def test_a_refusal_of_a_follower_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader did what it did not, and would wait for it in the next step for ever."""
    monkeypatch.setattr(tensor_parallel, "AGREEMENT_SECONDS", 0.01)
    instance = start()
    engine = instance.engine()
    instance.doubles[1].on["add"] = refuse(ValueError("too long"))

    engine.add(sequence("r"))

    assert "order 2 was not refused by the leader" in instance.reason()


@pytest.mark.parametrize(("name", "arguments"), SWAPS)
def test_a_swap_that_a_follower_alone_refuses(
    start: Start, name: str, arguments: tuple[Any, ...]
) -> None:
    """It is no refusal that could be answered with a retry: the ranks are out of step."""
    instance = start(3)
    engine = instance.engine()
    instance.doubles[2].on[name] = refuse(KvExhausted("full"))

    with pytest.raises(TransferFailed, match="rank 2: full"):
        getattr(engine, name)(*arguments)


# --- what ends the instance ----------------------------------------------------------------------


def test_a_follower_that_dies(start: Start) -> None:
    """The leader hears of it at once, without having asked for anything."""
    instance = start(3)
    instance.engine()
    instance.connections[1].shutdown(socket.SHUT_RDWR)

    assert instance.reason() == "rank 2 is gone"


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [("store_weights", ([0, 1],), RankFailed), ("swap_out", ("r", [0]), TransferFailed)],
)
def test_nobody_waits_for_the_dead(
    start: Start, name: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    """A leader that waits for an answer is told that there will be none."""
    instance = start()
    engine = instance.engine()
    instance.doubles[1].on[name] = refuse(OSError("dies"))
    keywords = {"fill": True} if name == "store_weights" else {}

    with pytest.raises(error, match="rank 1 is gone"):
        getattr(engine, name)(*arguments, **keywords)
    assert instance.reason() == "rank 1 is gone"


def test_any_other_error_ends_the_rank(start: Start) -> None:
    """A follower does not go on with books that may be wrong."""
    instance = start()
    engine = instance.engine()
    instance.doubles[1].on["trim"] = refuse(AssertionError("a slab is lost"))

    engine.trim()

    assert instance.reason() == "rank 1 is gone"
    assert str(instance.errors.get()) == "a slab is lost"


def test_another_token_ends_the_rank(start: Start) -> None:
    """A rank that draws differently is found out before the next step, whatever the model."""
    instance = start()
    engine = instance.engine()
    engine.step(["r"], 1)
    assert taken(instance.doubles[1], 1)
    instance.doubles[1].token = 8
    engine.step(["r"], 1)

    engine.prefill("s", 1)

    assert instance.reason() == "rank 1 is gone"
    assert isinstance(instance.errors.get(), WentAstray)
    assert taken(instance.doubles[1], 1) == [("step", ["r"], 1, [], 0)]
    assert instance.doubles[1].calls.empty()


def test_a_step_that_fails_on_the_leader(start: Start) -> None:
    """Followers wait for it in the midst of the same step: there is no way on."""
    instance = start()
    engine = instance.engine()
    instance.doubles[0].on["prefill"] = refuse(TransferFailed("the file was replaced"))

    with pytest.raises(TransferFailed):
        engine.prefill("r", 1)

    assert "the leader failed in a step: the file was replaced" in instance.reason()


def test_frames_that_cannot_be_read(start: Start) -> None:
    """A rank that is not understood is of no use."""
    instance = start()
    instance.connections[0].sendall(framing.HEADER.pack(3) + b"abc")

    assert "rank 1 sent what cannot be read" in instance.reason()


def test_orders_may_arrive_in_pieces() -> None:
    """Nothing is lost or changed between the ranks, byte by byte."""
    orders = [Order(1, Add(sequence("r"))), Order(2, SwapIn("a", "r", [0, 1 << 40], 3))]
    decoder = decoder_of_orders()
    received: list[Any] = []

    for byte in b"".join(map(framing.encode, orders)):
        received += decoder.feed(bytes([byte]))

    assert received == orders


def test_the_same_list_reaches_the_engine_again() -> None:
    """A follower's engine, too, sees that nothing moved since the last step."""
    double = EngineDouble()
    seen: list[Sequence[str]] = []

    def step(requests: Sequence[str], *others: Any) -> list[Produced]:
        seen.append(requests)
        return []

    double.step = step  # type: ignore[method-assign]
    seat = Seat(1, 2, "0")
    follower = Follower(seat, lambda model: double, double.swapper, lambda answer: None)

    for number, call in enumerate(
        [BuildEngine(MODEL), Step("a", ["r"], 1, 0), Step("a", None, 1, 0)], start=1
    ):
        follower.obey(Order(number, call))

    assert seen[0] is seen[1]
