"""What a worker does with commands, in which order it reports, and what takes effect at once."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from appliance import framing
from appliance.checkpoints.adapters import AdapterPlace
from appliance.engines.protocol import (
    DraftUse,
    GuideRefused,
    KvBytes,
    KvExhausted,
    KvUse,
    Produced,
    SequenceSpec,
    Verdict,
)
from appliance.errors import CheckpointError
from appliance.memory.arena import Arena, PoolExhausted
from appliance.memory.slab_maps import pool_map
from appliance.memory.swapper import Swapper, Then
from appliance.memory.transfers import Transfer, TransferFailed, TransferKind
from appliance.vocabulary import (
    BuildModel,
    Direction,
    DropModel,
    EvictModel,
    FinishReason,
    KvMove,
    KvMoved,
    KvShape,
    LoadModel,
    ModelBuilt,
    ModelDropped,
    ModelFailed,
    ModelLoaded,
    MoveKv,
    Preempt,
    PrefetchModel,
    PrefillDeferred,
    PrefillDone,
    Release,
    RequestArrived,
    RequestFailed,
    RequestSpec,
    RunPrefill,
    RunTurn,
    Slo,
    StoreWeights,
    TrimKv,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)
from appliance.worker import frames as wire
from appliance.worker.mailbox import Mailbox
from appliance.worker.run import first_frames
from appliance.worker.worker import Worker
from tests.patience import PATIENCE_SECONDS
from tests.unit.doubles.memory import RecordingVmm
from tests.unit.doubles.stream import StreamDouble

SHAPE = KvShape(block_tokens=16, block_bytes=300, group_blocks=4, group_slabs=2)
WEIGHT_BYTES = 4000
BLOCK_BYTES = 300
NO_KV = KvBytes(0, 0, 0, 0)
NO_DRAFTS = DraftUse(0, 0)
UNREADABLE: set[str] = set()
"""Models whose files are gone."""


GONE = "/nowhere"
"""The path of an adapter that cannot be read."""


@dataclass
class EngineDouble:
    """An engine that counts: one slab of KV per request on the device, one token per step."""

    model: str
    swapper: Swapper | None = None
    weight_slabs: int = 4
    host_slabs: int = 4
    layout_digest: str = "layout"
    kv: KvShape = SHAPE
    load: Transfer | None = None
    stored: tuple[tuple[int, ...], bool] | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    """Requests it knows, and how many tokens each has yet to produce."""
    on_device: set[str] = field(default_factory=set)
    prompts: dict[str, int] = field(default_factory=dict)
    """How many tokens of the prompt of each request are not computed."""
    mixed: list[tuple[tuple[str, ...], dict[str, int]]] = field(default_factory=list)
    """Of each mixed step, who decoded, and how many tokens of which prompts were computed."""
    refuses: set[str] = field(default_factory=set)
    on_step: Callable[[int], None] = lambda step: None
    """Called in each step with its number, while the worker is in the middle of it."""
    steps: int = 0
    steps_before_full: int = 1_000_000
    compiled: threading.Event = field(default_factory=threading.Event)
    """Set by the guide "quick", for which "slow" waits."""

    room: int = 1_000_000
    """Slabs that can be mapped."""
    cold: int = 0
    use: KvBytes = NO_KV
    verdict: Verdict = Verdict.OK
    encoded_slabs: int = 1000
    tokens_per_step: int = 1
    """Of each request: those behind the first were drafted."""
    drafts: DraftUse = NO_DRAFTS
    retired: bool = False
    adapters: list[tuple[tuple[AdapterPlace, ...], tuple[int, ...], bool]] = field(
        default_factory=list
    )
    """What was put: adapters, places, and whether in the image, too."""

    def retire(self) -> None:
        self.evict_weights()
        self.retired = True

    def start(self, kind: TransferKind, nbytes: int, then: Then | None = None) -> Transfer:
        assert self.swapper is not None
        return self.swapper.start(kind, self.model, [], nbytes=nbytes, then=then)

    def store_weights(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        if fill and self.model in UNREADABLE:
            raise CheckpointError("model.safetensors is gone")
        self.stored = (tuple(host_offsets), fill)
        return min(len(host_offsets), self.encoded_slabs)

    @property
    def loaded(self) -> bool:
        return self.load is not None

    def begin_load(self) -> Transfer:
        if self.load is None:
            if self.room < self.weight_slabs:
                raise PoolExhausted
            self.load = self.start(TransferKind.WEIGHTS, WEIGHT_BYTES)
        return self.load

    def put_adapters(
        self, adapters: Sequence[AdapterPlace], slots: Sequence[int], *, image: bool
    ) -> None:
        if any(one.path == GONE for one in adapters):
            raise CheckpointError(f"{GONE} cannot be read")
        self.adapters.append((tuple(adapters), tuple(slots), image))

    def evict_weights(self) -> None:
        if self.load is not None:
            self.load.cancel()
            self.load.join()
        self.load = None

    def prepare(self, body: bytes) -> None:
        if body == b"(":
            raise GuideRefused("it does not close")
        assert body != b"defect"
        if body == b"slow":
            assert self.compiled.wait(PATIENCE_SECONDS)
        if body == b"quick":
            self.compiled.set()

    def add(self, sequence: SequenceSpec) -> None:
        if sequence.request in self.refuses:
            raise ValueError("its prompt is empty")
        self.lengths[sequence.request] = int(sequence.body) - len(sequence.output)
        self.prompts[sequence.request] = len(sequence.prompt)

    def knows(self, request: str) -> bool:
        return request in self.lengths

    def forget(self, request: str) -> None:
        self.lengths.pop(request, None)
        self.on_device.discard(request)

    def prefill(self, request: str, kv_slabs: int) -> list[Produced]:
        assert self.load is not None
        self.load.wait()
        if len(self.on_device) >= kv_slabs:
            raise KvExhausted
        self.on_device.add(request)
        self.prompts[request] = 0
        return self._produce([request])

    def begin_prefill(self, request: str, kv_slabs: int) -> None:
        assert self.loaded
        if len(self.on_device) >= kv_slabs:
            raise KvExhausted
        self.on_device.add(request)

    def tokens_left(self, request: str) -> int:
        return self.prompts[request]

    def step(
        self,
        requests: Sequence[str],
        kv_slabs: int,
        prompts: Sequence[str] = (),
        chunk_tokens: int = 0,
    ) -> list[Produced]:
        assert self.loaded
        assert {*requests, *prompts} <= self.on_device
        if requests and self.steps >= self.steps_before_full:
            raise KvExhausted
        self.steps += 1
        self.on_step(self.steps)
        if not prompts:
            return self._produce(requests)
        computed = {}
        for prompt in prompts:
            computed[prompt] = min(self.prompts[prompt], chunk_tokens)
            chunk_tokens -= computed[prompt]
            self.prompts[prompt] -= computed[prompt]
        assert all(computed.values()), "a prompt that has begun for nothing"
        self.mixed.append((tuple(requests), computed))
        return self._produce([*requests, *(name for name in prompts if not self.prompts[name])])

    def swap_out(self, request: str, host_offsets: Sequence[int]) -> Transfer:
        def free(transfer: Transfer) -> None:
            self.on_device.remove(leaving)

        leaving = f"leaving {request}"
        self.on_device.remove(request)
        self.on_device.add(leaving)
        return self.start(TransferKind.KV_OUT, len(host_offsets) * BLOCK_BYTES, free)

    def swap_in(self, request: str, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        if len(self.on_device) >= kv_slabs:
            raise KvExhausted
        self.on_device.add(request)
        return self.start(TransferKind.KV_IN, len(host_offsets) * BLOCK_BYTES)

    def trim(self, keep_slabs: int | None = None) -> KvUse:
        if keep_slabs is not None:
            self.cold = max(0, min(self.cold, keep_slabs - len(self.on_device)))
        return KvUse(len(self.on_device) + self.cold, self.cold)

    def kv_use(self) -> KvBytes:
        return self.use

    def draft_use(self) -> DraftUse:
        return self.drafts

    def verify(self) -> Verdict:
        return self.verdict

    def _produce(self, requests: Sequence[str]) -> list[Produced]:
        produced = []
        for request in requests:
            count = min(self.tokens_per_step, self.lengths[request])
            for _ in range(count):
                self.lengths[request] -= 1
                finished = FinishReason.LENGTH if not self.lengths[request] else None
                produced.append(Produced(request=request, token=7, finished=finished))
            used = self.drafts
            self.drafts = DraftUse(
                used.drafted + self.tokens_per_step - 1, used.accepted + count - 1
            )
        for token in produced:
            if token.finished is not None:
                self.forget(token.request)
        return produced


class Bench:
    """A worker on doubles: all commands go in first, then it runs to the end."""

    def __init__(self, *names: str, send: Callable[[Any], None] | None = None) -> None:
        """What it reports goes to `send`, or among `reports`."""
        self.engines = {name: EngineDouble(name) for name in names or ("a",)}
        self.reports: list[Any] = []
        self.mailbox = Mailbox()
        self.streams: dict[str, StreamDouble] = {}
        self.swapper = Swapper(self._stream, on_end=self.mailbox.wake)
        for engine in self.engines.values():
            engine.swapper = self.swapper
        models = [wire.WorkerModel(name, f"/{name}", "bfloat16", 256, 8) for name in self.engines]
        configuration = wire.Configure(
            version=wire.PROTOCOL_VERSION,
            instance=3,
            cpus="",
            slabs=20,
            slab_bytes=10,
            host_bytes=1000,
            models=models,
        )
        self.worker = Worker(
            configuration,
            Arena(RecordingVmm(20)),
            self.swapper,
            self.mailbox,
            self._build,
            send or self.reports.extend,
        )

    def _build(self, model: wire.WorkerModel) -> EngineDouble:
        return self.engines[model.name]

    def _stream(self, name: str) -> StreamDouble:
        return self.streams.setdefault(name.removeprefix("swap-"), StreamDouble())

    def carry_out(self, *commands: wire.Down) -> list[Any]:
        """What the worker reports of these commands, but for the state of its pool."""
        self.reports.clear()
        for command in (*commands, wire.Shutdown()):
            self.mailbox.put(command)
        self.worker.run()
        return [report for report in self.reports if not isinstance(report, wire.PoolReport)]

    def ready(self, *requests: str, output: int = 10) -> None:
        """The engine of `a` is loaded and has these requests on the device, one token each."""
        self.carry_out(
            build("a"),
            load("a"),
            *(command for name in requests for command in (add(name, output), prefill(name))),
        )


@pytest.fixture(autouse=True)
def readable() -> None:
    """No model's files are gone when a test begins."""
    UNREADABLE.clear()


def build(model: str) -> BuildModel:
    return BuildModel(instance=3, model=model)


def load(model: str) -> LoadModel:
    return LoadModel(instance=3, model=model)


def add(request: str, output: int = 10, prompt: int = 2) -> wire.AddSequence:
    """The double reads from the body how many tokens are to come."""
    words, body = tuple(range(prompt)), str(output).encode()
    return wire.AddSequence(SequenceSpec(request=request, model="a", prompt=words, body=body))


def prefill(request: str, kv_slabs: int = 8) -> RunPrefill:
    return RunPrefill(instance=3, model="a", request=request, kv_slabs=kv_slabs)


def turn(*requests: str, quota: float = 1e6, number: int = 1) -> RunTurn:
    return RunTurn(
        instance=3, model="a", turn=number, requests=requests, quota_seconds=quota, kv_slabs=8
    )


def mixed_turn(*requests: str, prompts: Sequence[str], slabs: int = 8) -> RunTurn:
    """A turn whose quota is over at once, and chunks of 4 tokens."""
    return msgspec.structs.replace(
        turn(*requests, quota=0.0), prompts=tuple(prompts), chunk_tokens=4, kv_slabs=slabs
    )


def release(request: str) -> Release:
    return Release(instance=3, model="a", request=request)


def move(direction: Direction, *requests: str) -> MoveKv:
    moves = tuple(KvMove(request=request, host_offsets=(0, 300)) for request in requests)
    return MoveKv(instance=3, model="a", direction=direction, moves=moves, kv_slabs=8)


def tokens(*requests: str, ended: Sequence[str] = ()) -> wire.Tokens:
    produced = [
        Produced(
            request=request, token=7, finished=FinishReason.LENGTH if request in ended else None
        )
        for request in requests
    ]
    return wire.Tokens(3, "a", produced)


def only(reports: list[Any], kind: type) -> Any:
    (report,) = [report for report in reports if isinstance(report, kind)]
    return report


# --- engines and weights -------------------------------------------------------------------------


def test_an_engine_is_built_and_its_weights_stored() -> None:
    """The worker tells the engine's sizes, then that the machine may load it."""
    bench = Bench()

    reports = bench.carry_out(
        build("a"), StoreWeights(instance=3, model="a", host_offsets=(0, 10), fill=True)
    )

    assert reports == [
        ModelBuilt(instance=3, model="a", weight_slabs=4, host_slabs=4, kv=SHAPE, layout="layout"),
        WeightsStored(instance=3, model="a"),
    ]
    assert bench.engines["a"].stored == ((0, 10), True)


def test_an_encoded_image_is_told_by_its_slabs() -> None:
    """Those that it takes, so that the others can be another's."""
    bench = Bench()
    bench.carry_out(build("a"))
    bench.engines["a"].encoded_slabs = 3

    reports = bench.carry_out(
        StoreWeights(instance=3, model="a", host_offsets=(0, 10, 20, 30), fill=True)
    )

    assert reports == [WeightsStored(instance=3, model="a", host_slabs=3)]


def test_an_engine_that_cannot_be_built() -> None:
    """Whatever goes wrong in building one engine is reported, and the next one is built."""
    bench = Bench("a", "b")
    working = bench._build

    def build_or_fail(model: wire.WorkerModel) -> EngineDouble:
        if model.name == "a":
            raise KeyError("rope_theta")
        return working(model)

    bench.worker._build = build_or_fail

    reports = bench.carry_out(build("a"), build("b"))

    assert reports[0] == ModelFailed(instance=3, model="a", reason="KeyError: 'rope_theta'")
    assert isinstance(reports[1], ModelBuilt)


def test_a_model_is_added_and_dropped() -> None:
    """One that the worker did not know can be built; a dropped one is retired, and the next of its
    name is built as it is then. One that was never built can be dropped, too."""
    bench = Bench()
    bench.engines["b"] = EngineDouble("b", bench.swapper)
    asked: list[wire.WorkerModel] = []
    working = bench._build

    def build_it(model: wire.WorkerModel) -> EngineDouble:
        asked.append(model)
        return working(model)

    bench.worker._build = build_it
    models = [wire.WorkerModel("b", f"/b{number}", "bfloat16", 256, 8) for number in (1, 2)]
    drop = DropModel(instance=3, model="b")

    unknown = bench.carry_out(build("b"))
    first = bench.carry_out(wire.AddModel(models[0]), build("b"), drop, drop)
    bench.carry_out(wire.AddModel(models[1]), build("b"))

    assert isinstance(only(unknown, ModelFailed), ModelFailed)
    assert [type(report) for report in first] == [ModelBuilt, ModelDropped, ModelDropped]
    assert bench.engines["b"].retired
    assert asked == models


def test_what_is_on_its_way_is_reported_before_the_drop() -> None:
    """Nothing is said of a model behind that it was dropped."""
    bench = Bench()
    bench.ready("r")
    bench.streams["kv_out"].held = True

    reports = bench.carry_out(
        move(Direction.OUT, "r"),
        EvictModel(instance=3, model="a"),
        DropModel(instance=3, model="a"),
    )

    assert [type(report) for report in reports] == [KvMoved, ModelDropped]


def test_frames_behind_the_first_are_kept() -> None:
    """A worker may hear of a model while it starts."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        configuration = wire.Configure(
            version=wire.PROTOCOL_VERSION,
            instance=3,
            cpus="",
            slabs=20,
            slab_bytes=10,
            host_bytes=1000,
            models=[],
        )
        more = wire.AddModel(wire.WorkerModel("b", "/b", "bfloat16", 256, 8))
        ours.sendall(framing.encode(configuration) + framing.encode(more))

        assert first_frames(theirs, wire.decoder_of_commands()) == (configuration, [more])

        ours.sendall(framing.encode(more))
        with pytest.raises(SystemExit, match="expected a Configure"):
            first_frames(theirs, wire.decoder_of_commands())


def test_a_load_is_reported_when_it_is_over() -> None:
    """Weights land beside whatever else is done; the daemon hears of it once."""
    bench = Bench()
    bench.streams["weights"].held = True

    assert bench.carry_out(build("a"), load("a"))[1:] == []
    bench.streams["weights"].end_all()
    loaded = only(bench.carry_out(), ModelLoaded)

    assert (loaded.moved_bytes, loaded.prefetched) == (WEIGHT_BYTES, False)
    assert (loaded.queued_seconds, loaded.seconds) == (0.0, 0.0)
    assert bench.carry_out() == []


def test_a_prompt_waits_for_the_prefetch() -> None:
    """A model on its way in is waited for, and told to be there before the prompt is done."""
    bench = Bench()
    bench.streams["weights"].held = True

    reports = bench.carry_out(
        build("a"), PrefetchModel(instance=3, model="a"), add("r"), prefill("r")
    )

    assert [type(report) for report in reports[1:]] == [wire.Tokens, ModelLoaded, PrefillDone]
    assert only(reports, ModelLoaded).prefetched


def test_an_eviction_stops_the_prefetch() -> None:
    """Weights on their way in are gone after an eviction, and can be loaded again."""
    bench = Bench()
    bench.streams["weights"].held = True
    evict = EvictModel(instance=3, model="a")

    reports = bench.carry_out(build("a"), PrefetchModel(instance=3, model="a"), evict)
    assert not bench.engines["a"].loaded
    assert [type(report) for report in reports] == [ModelBuilt]

    bench.streams["weights"].held = False
    assert not only(bench.carry_out(load("a")), ModelLoaded).prefetched


def test_a_load_that_cannot_be_mapped_ends_the_worker() -> None:
    """A system that refuses memory that was promised is no answer for the daemon."""
    bench = Bench()
    bench.carry_out(build("a"))

    def fail() -> Transfer:
        raise OSError("cannot map")

    bench.engines["a"].begin_load = fail  # type: ignore[method-assign]

    with pytest.raises(OSError, match="cannot map"):
        bench.carry_out(load("a"))


def test_a_copy_that_fails_ends_the_worker() -> None:
    """A copy within memory has no reason to fail; the books of a worker where it did are void."""
    bench = Bench()
    bench.streams["weights"].fail_next = OSError("EFAULT")

    with pytest.raises(TransferFailed, match="EFAULT"):
        bench.carry_out(build("a"), load("a"))


@pytest.mark.parametrize("held", [False, True])
def test_files_that_cannot_be_read_cost_one_model(held: bool) -> None:
    """The daemon is told what is wrong with them; the job that wanted them ends, others go on."""
    bench = Bench("a", "b")
    bench.carry_out(build("a"), build("b"))
    bench.streams["weights"].held = held
    bench.streams["weights"].fail_next = CheckpointError("model.safetensors was replaced")

    reports = bench.carry_out(load("a"), add("r"), prefill("r"), turn("r"), load("a"), load("b"))
    bench.streams["weights"].end_all()
    reports += bench.carry_out()

    told = only(reports, ModelFailed)
    assert (told.model, told.reason) == ("a", "model.safetensors was replaced")
    assert only(reports, PrefillDeferred).request == "r"
    assert only(reports, TurnEnded).steps == 0
    assert only(reports, ModelLoaded).model == "b"
    assert not bench.engines["a"].loaded


def test_an_image_that_cannot_be_filled_costs_one_model() -> None:
    """A fill is refused like a load, and a load that was ordered behind it does not begin."""
    bench = Bench()
    UNREADABLE.add("a")
    store = StoreWeights(instance=3, model="a", host_offsets=(0, 10), fill=True)

    reports = bench.carry_out(build("a"), store, load("a"), add("r"), prefill("r"))

    assert [type(report) for report in reports] == [ModelBuilt, ModelFailed, PrefillDeferred]
    assert not bench.engines["a"].loaded


def test_a_load_waits_for_slabs_under_kv_on_its_way_out() -> None:
    """Slabs that were promised are there once the swap is over; only then is it waited for."""
    bench = Bench("a", "b")
    bench.ready("r")
    bench.streams["kv_out"].held = True
    bench.engines["b"].room = 0

    def there_is_room(transfer: Transfer) -> None:
        bench.engines["b"].room = 4

    bench.carry_out(build("b"))
    bench.mailbox.put(move(Direction.OUT, "r"))
    bench.mailbox.put(wire.Shutdown())
    bench.worker.run()
    assert only_pending(bench).nbytes == 600
    only_pending(bench).join = chain(only_pending(bench).join, there_is_room)  # type: ignore[method-assign]

    reports = bench.carry_out(load("b"))

    assert [type(report) for report in reports] == [KvMoved, ModelLoaded]


def test_no_room_and_nothing_on_its_way_out_is_a_defect() -> None:
    """The machine counts slabs; a worker that has fewer must not go on."""
    bench = Bench()
    bench.carry_out(build("a"))
    bench.engines["a"].room = 0

    with pytest.raises(PoolExhausted):
        bench.carry_out(load("a"))


def only_pending(bench: Bench) -> Transfer:
    """The one swap outwards that is under way."""
    (transfer,) = bench.streams["kv_out"].line
    return transfer


def chain(join: Callable[[], None], then: Then) -> Callable[[], None]:
    """Join a transfer, then do something."""

    def joined() -> None:
        join()
        then(None)  # type: ignore[arg-type]

    return joined


def test_an_idle_worker_tells_what_its_pool_holds() -> None:
    """Also when weights come or go without a job: at once, as nothing else is to be done."""
    bench = Bench()
    bench.carry_out(build("a"), load("a"))
    bench.reports.clear()

    def send(reports: Sequence[wire.Up]) -> None:
        bench.reports.extend(reports)
        bench.mailbox.put(wire.Shutdown())

    bench.worker._outbox._send = send
    bench.mailbox.put(EvictModel(instance=3, model="a"))
    working = threading.Thread(target=bench.worker.run, daemon=True)
    working.start()
    working.join(PATIENCE_SECONDS)

    assert not working.is_alive()
    assert [type(report) for report in bench.reports] == [wire.PoolReport]


# --- prompts -------------------------------------------------------------------------------------


def test_a_prompt_is_reported_after_its_token() -> None:
    """First the token for the client, then the end of the job, then the pool."""
    bench = Bench()
    bench.carry_out(build("a"), load("a"))

    reports = bench.carry_out(add("r"), prefill("r"))

    assert reports[0] == tokens("r")
    done = reports[1]
    assert isinstance(done, PrefillDone)
    assert (done.instance, done.request, done.kv_slabs) == (3, "r", 1)
    assert bench.reports[-1] == wire.PoolReport(3, {"free": 20}, 0, {300: NO_KV}, 0)


def test_a_prompt_that_does_not_fit_is_deferred() -> None:
    """No token, and not the end of the worker: the machine makes room and asks again."""
    bench = Bench()
    bench.carry_out(build("a"), load("a"))

    reports = bench.carry_out(add("r"), prefill("r", kv_slabs=0))

    assert reports == [PrefillDeferred(instance=3, model="a", request="r", kv_slabs=0)]


def test_a_request_that_the_engine_refuses() -> None:
    """The refusal is told with its reason, and the job that was ordered for it still ends."""
    bench = Bench()
    bench.carry_out(build("a"), load("a"))
    bench.engines["a"].refuses.add("r")

    reports = bench.carry_out(add("r"), prefill("r"))

    assert reports[0] == RequestFailed(
        instance=3, model="a", request="r", reason="its prompt is empty"
    )
    assert [type(report) for report in reports] == [RequestFailed, PrefillDone]


def test_a_released_request_is_not_prefilled() -> None:
    """A release goes before what is queued: the prompt of a known request is not computed."""
    bench = Bench()
    bench.carry_out(build("a"), load("a"), add("r"))

    reports = bench.carry_out(prefill("r"), release("r"))

    assert [type(report) for report in reports] == [PrefillDone]


def test_a_release_that_overtakes_its_request() -> None:
    """A request that was released before the worker came to know it leaves nothing behind."""
    bench = Bench()
    bench.carry_out(build("a"))

    reports = bench.carry_out(load("a"), add("r"), prefill("r"), release("r"))

    assert not any(isinstance(report, wire.Tokens) for report in reports), "nothing was computed"
    assert not bench.engines["a"].knows("r")
    assert bench.engines["a"].trim().slabs == 0


def test_a_release_for_a_model_without_an_engine() -> None:
    """A release may come before its engine was built; there is nothing to forget."""
    assert Bench().carry_out(release("r")) == []


# --- turns ---------------------------------------------------------------------------------------


def test_a_turn_runs_until_its_requests_are_done() -> None:
    """Requests leave the batch as they end; the turn ends with the last."""
    bench = Bench()
    bench.ready("r", output=2)
    bench.carry_out(add("s", 4), prefill("s"))

    reports = bench.carry_out(turn("r", "s"))

    assert reports[:-1] == [tokens("r", "s", ended=["r"]), tokens("s"), tokens("s", ended=["s"])]
    ended = reports[-1]
    assert isinstance(ended, TurnEnded)
    assert (ended.turn, ended.reason, ended.steps, ended.kv_slabs) == (1, TurnEnd.DRAINED, 3, 0)
    assert ended.seconds >= 0


def test_a_step_may_give_several_tokens() -> None:
    """With drafts; a request ends with its last one, and the turn says what was drafted in it."""
    bench = Bench()
    bench.ready("r", output=7)
    engine = bench.engines["a"]
    engine.tokens_per_step, engine.drafts = 4, DraftUse(70, 30)

    *told, ended = bench.carry_out(turn("r"))

    assert [len(one.produced) for one in told] == [4, 2]
    last = told[-1].produced[-1]
    assert [one for each in told for one in each.produced if one.finished] == [last]
    assert isinstance(ended, TurnEnded)
    assert (ended.steps, ended.drafted, ended.accepted) == (2, 6, 4)


def test_the_end_of_a_turn_is_reported_with_its_last_tokens() -> None:
    """And what went before was told before the next step: nobody waits for their tokens while
    others are computed."""
    told: list[list[str]] = []
    bench = Bench("a")
    bench.ready("r", output=4)
    outbox = bench.worker._outbox
    outbox._send = lambda reports: told.append([type(one).__name__ for one in reports])
    before: list[int] = []
    bench.engines["a"].on_step = lambda step: before.append(len(told))

    bench.carry_out(turn("r"))

    assert told == [["Tokens"], ["Tokens"], ["Tokens", "TurnEnded", "PoolReport"]]
    assert before == [0, 1, 2]


def test_a_first_token_is_reported_with_the_end_of_its_prompt() -> None:
    """The daemon orders what follows before it turns to who reads the token."""
    told: list[list[str]] = []
    bench = Bench("a")
    bench.carry_out(build("a"), load("a"), add("r"))
    outbox = bench.worker._outbox
    outbox._send = lambda reports: told.append([type(one).__name__ for one in reports])

    bench.carry_out(prefill("r"))

    assert ["Tokens", "PrefillDone", "PoolReport"] in told


def test_a_quota_ends_a_turn() -> None:
    """A turn whose time is over ends after the step it is in."""
    bench = Bench()
    bench.ready("r")

    ended = only(bench.carry_out(turn("r", quota=0.0)), TurnEnded)

    assert (ended.reason, ended.steps, ended.kv_slabs) == (TurnEnd.QUOTA, 1, 1)


def test_a_preempted_turn_has_a_step() -> None:
    """Even a turn that was preempted before it began is progress."""
    bench = Bench()
    bench.ready("r")

    ended = only(bench.carry_out(turn("r"), Preempt(instance=3, turn=1)), TurnEnded)

    assert (ended.reason, ended.steps) == (TurnEnd.PREEMPTED, 1)


def test_preempting_takes_effect_at_the_next_step() -> None:
    """A turn goes no further than the step in which it was preempted."""
    bench = Bench()
    bench.ready("r")

    def preempt_in_third(step: int) -> None:
        if step == 3:
            bench.mailbox.put(Preempt(instance=3, turn=1))

    bench.engines["a"].on_step = preempt_in_third

    ended = only(bench.carry_out(turn("r")), TurnEnded)

    assert (ended.reason, ended.steps) == (TurnEnd.PREEMPTED, 3)


def test_preempting_a_turn_that_is_over_spares_the_next() -> None:
    """A preemption is for one turn; a later one runs on."""
    bench = Bench()
    bench.ready("r", output=4)

    ended = only(bench.carry_out(Preempt(instance=3, turn=1), turn("r", number=2)), TurnEnded)

    assert (ended.turn, ended.reason, ended.steps) == (2, TurnEnd.DRAINED, 3)


def test_a_turn_ends_when_its_kv_is_full() -> None:
    """A step that needs more KV than allowed ends the turn, as long as there was one before."""
    bench = Bench()
    bench.ready("r")
    bench.engines["a"].steps_before_full = 2

    ended = only(bench.carry_out(turn("r")), TurnEnded)

    assert (ended.reason, ended.steps) == (TurnEnd.KV_FULL, 2)


def test_a_turn_without_room_for_one_step_is_a_defect() -> None:
    """The machine grants room for a step at least; a worker that has none must not go on."""
    bench = Bench()
    bench.ready("r")
    bench.engines["a"].steps_before_full = 0

    with pytest.raises(KvExhausted):
        bench.carry_out(turn("r"))


def test_a_release_in_a_turn() -> None:
    """A released request gets no more steps; the others go on in the same turn."""
    bench = Bench()
    bench.ready("r", "s", output=5)

    def release_in_second(step: int) -> None:
        if step == 2:
            bench.mailbox.put(release("r"))

    bench.engines["a"].on_step = release_in_second

    reports = bench.carry_out(turn("r", "s"))

    assert reports[:-1] == [
        tokens("r", "s"),
        tokens("r", "s"),
        tokens("s"),
        tokens("s", ended=["s"]),
    ]
    assert only(reports, TurnEnded).reason is TurnEnd.DRAINED
    assert not bench.engines["a"].knows("r")


def test_a_turn_of_nobody() -> None:
    """A turn whose requests were all released ends without a step."""
    bench = Bench()
    bench.ready("r")

    ended = only(bench.carry_out(turn("r"), release("r")), TurnEnded)

    assert (ended.reason, ended.steps) == (TurnEnd.DRAINED, 0)


# --- prompts beside a turn -----------------------------------------------------------------------


def test_a_prompt_is_computed_in_a_turn() -> None:
    """Whoever decodes gets a token in every step, and the turn is over when the prompt is done."""
    bench = Bench()
    bench.ready("r")

    reports = bench.carry_out(add("p", prompt=9), mixed_turn("r", prompts=["p"]))

    assert reports[:-2] == [tokens("r"), tokens("r"), tokens("r", "p")]
    done, ended = reports[-2:]
    assert isinstance(done, PrefillDone)
    assert (done.request, done.kv_slabs) == ("p", 2)
    assert 0 <= done.seconds <= ended.seconds
    assert isinstance(ended, TurnEnded)
    assert (ended.reason, ended.steps, ended.kv_slabs) == (TurnEnd.QUOTA, 3, 2)
    assert bench.engines["a"].mixed == [(("r",), {"p": 4}), (("r",), {"p": 4}), (("r",), {"p": 1})]


def test_a_turn_goes_on_after_its_prompts() -> None:
    """The quota is for those who decode; the prompt's request is not among them yet."""
    bench = Bench()
    bench.ready("r", output=5)
    command = msgspec.structs.replace(mixed_turn("r", prompts=["p"]), quota_seconds=1e6)

    reports = bench.carry_out(add("p"), command)

    assert [report for report in reports if isinstance(report, wire.Tokens)] == [
        tokens("r", "p"),
        tokens("r"),
        tokens("r"),
        tokens("r", ended=["r"]),
    ]
    assert only(reports, TurnEnded).reason is TurnEnd.DRAINED


def test_prompts_share_a_chunk() -> None:
    """The next prompt begins in the chunk that the one before it does not fill."""
    bench = Bench()
    bench.ready("r")

    reports = bench.carry_out(
        add("p", prompt=6), add("q", prompt=3), mixed_turn("r", prompts=["p", "q"])
    )

    assert bench.engines["a"].mixed == [
        (("r",), {"p": 4}),
        (("r",), {"p": 2, "q": 2}),
        (("r",), {"q": 1}),
    ]
    assert [r.request for r in reports if isinstance(r, PrefillDone)] == ["p", "q"]


def test_a_prompt_outlives_those_it_is_computed_with() -> None:
    """A turn whose requests are all done goes on for its prompt; steps without a token are no
    news."""
    bench = Bench()
    bench.ready("r", output=2)

    reports = bench.carry_out(add("p", prompt=12), mixed_turn("r", prompts=["p"]))

    assert reports[:-2] == [tokens("r", ended=["r"]), tokens("p")]
    assert isinstance(reports[-2], PrefillDone)
    assert (reports[-1].reason, reports[-1].steps) == (TurnEnd.DRAINED, 3)


def test_a_prompt_whose_first_token_is_its_last() -> None:
    """It is done like any other, and its KV is gone."""
    bench = Bench()
    bench.ready("r")

    reports = bench.carry_out(add("p", output=1), mixed_turn("r", prompts=["p"]))

    assert reports[0] == tokens("r", "p", ended=["p"])
    assert only(reports, PrefillDone).kv_slabs == 1


def test_a_prompt_that_does_not_fit_in_a_turn() -> None:
    """It is deferred, and the turn has its step."""
    bench = Bench()
    bench.ready("r")

    reports = bench.carry_out(add("p"), mixed_turn("r", prompts=["p"], slabs=1))

    assert [type(report) for report in reports] == [PrefillDeferred, wire.Tokens, TurnEnded]
    assert (reports[0].request, reports[0].kv_slabs) == ("p", 1)
    assert (reports[-1].reason, reports[-1].steps) == (TurnEnd.QUOTA, 1)


def test_kv_that_gets_full_with_a_prompt() -> None:
    """Who decodes has to wait; the prompt has its KV, and is computed to its end."""
    bench = Bench()
    bench.ready("r")
    bench.engines["a"].steps_before_full = 1

    reports = bench.carry_out(add("p", prompt=9), add("q"), mixed_turn("r", prompts=["p", "q"]))

    assert bench.engines["a"].mixed == [(("r",), {"p": 4}), ((), {"p": 4}), ((), {"p": 1})]
    assert only(reports, PrefillDone).request == "p"
    assert only(reports, PrefillDeferred).request == "q"
    assert only(reports, TurnEnded).reason is TurnEnd.KV_FULL
    assert bench.engines["a"].knows("r")


def test_preempting_finishes_the_prompt_that_has_begun() -> None:
    """Prompts that have not begun are deferred; who decodes goes on meanwhile."""
    bench = Bench()
    bench.ready("r")

    def preempt_in_first(step: int) -> None:
        if step == 1:
            bench.mailbox.put(Preempt(instance=3, turn=1))

    bench.engines["a"].on_step = preempt_in_first

    reports = bench.carry_out(add("p", prompt=8), add("q"), mixed_turn("r", prompts=["p", "q"]))

    assert bench.engines["a"].mixed == [(("r",), {"p": 4}), (("r",), {"p": 4})]
    assert [type(r) for r in reports[-4:]] == [wire.Tokens, PrefillDone, PrefillDeferred, TurnEnded]
    assert only(reports, PrefillDeferred).request == "q"
    assert (reports[-1].reason, reports[-1].steps) == (TurnEnd.PREEMPTED, 2)


def test_a_preempted_turn_begins_no_prompt() -> None:
    """A turn that was preempted before it began has its step, and defers its prompts."""
    bench = Bench()
    bench.ready("r")

    reports = bench.carry_out(add("p"), mixed_turn("r", prompts=["p"]), Preempt(instance=3, turn=1))

    assert [type(report) for report in reports] == [wire.Tokens, PrefillDeferred, TurnEnded]
    assert (reports[-1].reason, reports[-1].steps) == (TurnEnd.PREEMPTED, 1)


@pytest.mark.parametrize("when", [1, 2])
def test_a_prompt_that_is_released_in_a_turn(when: int) -> None:
    """Nothing more of it is computed, whether it had begun or not; the others go on."""
    bench = Bench()
    bench.ready("r")
    released = ["q", "p"][when - 1]  # in the first step only `p` has begun

    def release_it(step: int) -> None:
        if step == when:
            bench.mailbox.put(release(released))

    bench.engines["a"].on_step = release_it

    reports = bench.carry_out(add("p", prompt=12), add("q"), mixed_turn("r", prompts=["p", "q"]))

    assert sorted(r.request for r in reports if isinstance(r, PrefillDone)) == ["p", "q"]
    drawn = {one.request for r in reports if isinstance(r, wire.Tokens) for one in r.produced}
    assert drawn == {"r", "p", "q"} - {released}
    assert only(reports, TurnEnded).steps == 3
    assert not bench.engines["a"].knows(released)
    assert bench.engines["a"].on_device == {"r", "p", "q"} - {released}


def test_a_release_with_a_prompt() -> None:
    """Who decodes may leave in the middle of somebody else's prompt."""
    bench = Bench()
    bench.ready("r", "s")
    bench.engines["a"].on_step = lambda step: bench.mailbox.put(release("r")) if step == 1 else None

    bench.carry_out(add("p", prompt=8), mixed_turn("r", "s", prompts=["p"]))

    assert bench.engines["a"].mixed == [(("r", "s"), {"p": 4}), (("s",), {"p": 4})]


def test_a_prompt_that_the_engine_refused_is_over() -> None:
    """The refusal was told when the request was added; the turn does not wait for it."""
    bench = Bench()
    bench.ready("r")
    bench.engines["a"].refuses.add("p")

    reports = bench.carry_out(add("p"), mixed_turn("r", prompts=["p"]))

    assert [type(r) for r in reports] == [RequestFailed, PrefillDone, wire.Tokens, TurnEnded]


def test_a_mixed_turn_without_weights() -> None:
    """A model whose files are gone defers the prompts of its turn."""
    bench = Bench()
    bench.streams["weights"].fail_next = CheckpointError("model.safetensors was replaced")

    reports = bench.carry_out(build("a"), load("a"), add("p"), mixed_turn("r", prompts=["p"]))

    assert only(reports, PrefillDeferred).request == "p"
    assert (reports[-1].reason, reports[-1].steps) == (TurnEnd.DRAINED, 0)


# --- swaps ---------------------------------------------------------------------------------------


def test_kv_moves_out_and_in() -> None:
    """A move tells who moved, how much that was, and what stays mapped."""
    bench = Bench()
    bench.ready("r", "s")

    out = only(bench.carry_out(move(Direction.OUT, "r")), KvMoved)
    assert (out.direction, out.moved, out.missing) == (Direction.OUT, ("r",), ())
    assert (out.moved_bytes, out.kv_slabs) == (600, 1)

    back = only(bench.carry_out(move(Direction.IN, "r")), KvMoved)
    assert (back.direction, back.moved, back.moved_bytes) == (Direction.IN, ("r",), 600)
    assert back.kv_slabs == 2


@pytest.mark.parametrize("direction", Direction)
def test_kv_of_a_released_request_is_missing(direction: Direction) -> None:
    """Who was released before the move is told apart from who moved."""
    bench = Bench()
    bench.ready("r", "s")
    if direction is Direction.IN:
        bench.carry_out(move(Direction.OUT, "r", "s"))

    moved = only(bench.carry_out(move(direction, "r", "s"), release("r")), KvMoved)

    assert (moved.moved, moved.missing, moved.moved_bytes) == (("s",), ("r",), 600)


def test_kv_on_its_way_out_is_reported_in_the_middle_of_a_turn() -> None:
    """Who waits for it elsewhere does not wait for the turn."""
    bench = Bench()
    bench.ready("r", "s", output=5)
    bench.streams["kv_out"].held = True

    def end_in_second(step: int) -> None:
        if step == 2:
            bench.streams["kv_out"].end_all()

    bench.engines["a"].on_step = end_in_second

    reports = bench.carry_out(move(Direction.OUT, "r"), turn("s"))

    kinds = [type(report) for report in reports]
    assert kinds == [wire.Tokens, wire.Tokens, KvMoved, wire.Tokens, wire.Tokens, TurnEnded]


def test_kv_on_its_way_out_is_reported_in_the_order_of_the_moves() -> None:
    """The last one says how much stays, however early it has nothing left to move."""
    bench = Bench()
    bench.ready("r")
    bench.streams["kv_out"].held = True

    early = bench.carry_out(
        move(Direction.OUT, "r"),
        MoveKv(instance=3, model="a", direction=Direction.OUT, moves=(), kv_slabs=0),
    )
    bench.engines["a"].cold = 3  # what leaves is kept for the next prompt that begins so
    bench.streams["kv_out"].end_all()
    late = bench.carry_out(release("nobody"))

    assert [report for report in early if isinstance(report, KvMoved)] == []
    first, last = [report for report in late if isinstance(report, KvMoved)]
    assert (first.moved, first.kv_slabs) == (("r",), 3)
    assert (last.moved, last.kv_slabs) == ((), 0)


def test_kv_that_left_during_a_cold_prefill_is_reported() -> None:
    """Who waits for it elsewhere hears of it, whichever wait noticed the end."""
    bench = Bench()
    bench.ready("r", output=5)
    engine = bench.engines["a"]
    bench.carry_out(EvictModel(instance=3, model="a"))
    bench.streams["weights"].held = bench.streams["kv_out"].held = True
    prefill_as_usual = engine.prefill

    def end_meanwhile(request: str, kv_slabs: int) -> list[Produced]:
        bench.streams["kv_out"].end_all()
        return prefill_as_usual(request, kv_slabs)

    engine.prefill = end_meanwhile  # type: ignore[method-assign]

    reports = bench.carry_out(move(Direction.OUT, "r"), load("a"), add("s", 1), prefill("s"))

    assert {type(report) for report in reports} == {wire.Tokens, ModelLoaded, PrefillDone, KvMoved}


def test_a_turn_waits_for_its_kv() -> None:
    """KV on its way in is there, and told to be, before the first step."""
    bench = Bench()
    bench.ready("r", output=3)
    bench.carry_out(move(Direction.OUT, "r"))
    bench.streams["kv_in"].held = True

    reports = bench.carry_out(move(Direction.IN, "r"), turn("r"))

    assert [type(r) for r in reports] == [KvMoved, wire.Tokens, wire.Tokens, TurnEnded]


def test_a_step_waits_for_blocks_on_their_way_out() -> None:
    """A step that finds its slabs still under KV on its way out waits, rather than end the turn."""
    bench = Bench()
    bench.ready("r", "s")
    bench.streams["kv_out"].held = True

    reports = bench.carry_out(
        move(Direction.OUT, "s"), add("t"), prefill("t", kv_slabs=2), turn("r", quota=0.0)
    )

    assert [type(r) for r in reports] == [KvMoved, wire.Tokens, PrefillDone, wire.Tokens, TurnEnded]


def test_cold_cache_is_given_up_on_command() -> None:
    """What an order wants gone goes at once; reports tell what is left."""
    bench = Bench()
    bench.ready("r")
    bench.engines["a"].cold = 3

    ended = only(bench.carry_out(turn("r", quota=0.0)), TurnEnded)
    assert (ended.kv_slabs, ended.cold_slabs) == (4, 3)
    bench.carry_out(TrimKv(instance=3, model="a", kv_slabs=2))
    ended = only(bench.carry_out(turn("r", quota=0.0)), TurnEnded)

    assert (ended.kv_slabs, ended.cold_slabs) == (2, 1)


def test_blocks_that_left_do_not_stay_as_cache() -> None:
    """A swap outwards that is to free slabs frees those of cold cache, too."""
    bench = Bench()
    bench.ready("r")
    bench.engines["a"].cold = 3
    clear = msgspec.structs.replace(move(Direction.OUT, "r"), kv_slabs=0)

    moved = only(bench.carry_out(clear), KvMoved)

    assert (moved.kv_slabs, moved.cold_slabs) == (0, 0)


# --- the mailbox ---------------------------------------------------------------------------------


def test_commands_are_carried_out_in_order() -> None:
    """Reports of jobs come in the order in which they were given."""
    bench = Bench()

    reports = bench.carry_out(
        build("a"),
        load("a"),
        add("r", 3),
        prefill("r"),
        move(Direction.OUT, "r"),
        move(Direction.IN, "r"),
        turn("r"),
    )

    assert [type(report) for report in reports] == [
        ModelBuilt,
        ModelLoaded,
        wire.Tokens,
        PrefillDone,
        KvMoved,
        KvMoved,
        wire.Tokens,
        wire.Tokens,
        TurnEnded,
    ]


def test_nothing_is_done_after_the_shutdown() -> None:
    """What was ordered before it is done, and nothing that came later."""
    bench = Bench("a", "b")
    bench.mailbox.put(build("a"))
    bench.mailbox.put(wire.Shutdown())
    bench.mailbox.put(build("b"))

    bench.worker.run()

    assert [report.model for report in bench.reports] == ["a"]


def test_an_idle_worker_reports_its_pool_after_a_release() -> None:
    """A release wakes the worker up, so that the freed slabs are known."""
    bench = Bench()
    bench.ready("r")

    bench.carry_out(release("r"))

    assert bench.reports == [wire.PoolReport(3, {"free": 20}, 0, {300: NO_KV}, 0)]


def test_the_pool_s_kv_is_reported_by_shape() -> None:
    """Models of one shape are one figure; the peak is the most that was ever seen of it."""
    bench = Bench("a", "b", "c")
    bench.engines["c"].kv = msgspec.structs.replace(SHAPE, block_bytes=500)
    bench.carry_out(build("a"), build("b"), build("c"))
    bench.engines["a"].use = KvBytes(100, 60, 20, 100)
    bench.engines["b"].use = KvBytes(100, 90, 0, 150)
    bench.engines["c"].use = KvBytes(50, 10, 0, 50)
    bench.carry_out(release("r"))
    (full,) = bench.reports
    bench.engines["a"].use = KvBytes(0, 0, 0, 100)
    bench.carry_out(release("r"))
    (later,) = bench.reports

    assert full.kv == {300: KvBytes(200, 150, 20, 200), 500: KvBytes(50, 10, 0, 50)}
    assert later.kv == {300: KvBytes(100, 90, 0, 200), 500: KvBytes(50, 10, 0, 50)}
    assert (full.kv_peak_bytes, later.kv_peak_bytes) == (250, 250)


def test_adapters_are_put_between_jobs() -> None:
    """Into engines that are built; a later one is built with what came before."""
    bench = Bench("a", "b")
    legal, gone = AdapterPlace("legal", "/legal", 1), AdapterPlace("gone", GONE, 0)

    reports = bench.carry_out(
        build("a"),
        wire.PutAdapters(1, "a", (legal,), (1,), image=True),
        wire.PutAdapters(2, "a", (legal, gone), (0,)),
        wire.PutAdapters(3, "b", (legal,), (1,)),
    )

    assert reports[-3:] == [
        wire.AdaptersPut(3, 1),
        wire.AdaptersPut(3, 2, "/nowhere cannot be read"),
        wire.AdaptersPut(3, 3),
    ]
    assert bench.engines["a"].adapters == [((legal,), (1,), True)]


def test_weights_are_verified_between_jobs() -> None:
    """What was ordered before is done first; every engine that is built has a verdict."""
    bench = Bench("a", "b", "c")
    bench.engines["a"].verdict = Verdict.DIFFERS
    bench.engines["b"].verdict = Verdict.NO_IMAGE

    reports = bench.carry_out(
        build("a"), build("b"), load("a"), add("r", 3), prefill("r"), turn("r"), wire.Verify(7)
    )

    assert reports[-2:] == [
        only(reports, TurnEnded),
        wire.Verified(3, 7, {"a": Verdict.DIFFERS, "b": Verdict.NO_IMAGE}),
    ]


@pytest.mark.parametrize(
    ("model", "text", "refused"),
    [
        ("a", "a+", None),
        ("a", "(", "it does not close"),
        ("a", "defect", "AssertionError: "),
        ("b", "(", None),
    ],
)
def test_guides_are_compiled_during_jobs(model: str, text: str, refused: str | None) -> None:
    """They do not wait in the queue of commands, and are answered with why they cannot be followed;
    one of a model that is not built is left to its request."""
    bench = Bench("a", "b")
    asked = wire.PrepareGuide(5, model, text.encode())

    bench.carry_out(build("a"), asked)
    bench.worker.background.prepare_guide(bench.mailbox.guides.get_nowait())

    (answer,) = [r for r in bench.reports if isinstance(r, wire.GuidePrepared)]
    assert (answer.instance, answer.number) == (3, 5)
    assert (answer.refused or "").startswith(refused or "")
    assert (answer.refused is None) == (refused is None)


def test_details_are_reported_in_frames_that_are_not_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of a step's tokens, in their order; plain ones cost no frame."""
    monkeypatch.setattr("appliance.worker.outbox.MOST_DETAIL_BYTES", 10)
    bench = Bench("a")
    sizes = (None, 6, 4, 1, 20, None, 3)
    produced = [
        Produced(f"r{number}", 7, detail=None if size is None else bytes(size))
        for number, size in enumerate(sizes)
    ]
    bench.worker._outbox.tokens("a", produced)
    bench.worker._outbox.flush()

    frames = [report.produced for report in bench.reports if isinstance(report, wire.Tokens)]
    assert [len(frame) for frame in frames] == [3, 1, 2, 1]
    assert [one for frame in frames for one in frame] == produced


def test_a_slow_guide_holds_up_no_other() -> None:
    """One is answered while another one is being compiled, which came before it."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    bench = Bench("a", send=said.put)
    texts = ("slow", "quick")
    asked = [wire.PrepareGuide(i, "a", t.encode()) for i, t in enumerate(texts)]

    bench.carry_out(build("a"), *asked)
    (built,) = said.get(timeout=PATIENCE_SECONDS)
    bench.worker.background.start()
    answers = [said.get(timeout=PATIENCE_SECONDS)[0] for _ in asked]

    assert isinstance(built, ModelBuilt)
    assert {answer.number: answer.refused for answer in answers} == {0: None, 1: None}


def test_slabs_are_reported_in_the_middle_of_a_step() -> None:
    """Whoever asks waits for no turn; asked twice before it could answer, it answers once."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    found: list[wire.SlabsReported] = []
    bench = Bench("a", send=said.put)
    bench.worker.background.start()

    def ask(step: int) -> None:
        bench.mailbox.put(wire.ReportSlabs())
        while not isinstance(message := said.get(timeout=PATIENCE_SECONDS)[0], wire.SlabsReported):
            pass
        found.append(message)

    bench.engines["a"].on_step = ask
    bench.carry_out(build("a"), load("a"), add("r", 3), prefill("r"), turn("r"))

    assert [told.instance for told in found] == [3, 3]
    assert all(told.slabs.runs == ((0, 20),) for told in found)


def test_a_map_that_cannot_be_drawn_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has why; whoever asks next is answered."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    bench = Bench("a", send=said.put)
    outcomes = iter([RuntimeError("once"), pool_map])
    tried = threading.Event()

    def draw(*state: Any) -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, RuntimeError):
            tried.set()
            raise outcome
        return outcome(*state)

    monkeypatch.setattr("appliance.worker.background.pool_map", draw)
    bench.worker.background.start()
    bench.mailbox.put(wire.ReportSlabs())
    assert tried.wait(PATIENCE_SECONDS)
    bench.mailbox.put(wire.ReportSlabs())

    (told,) = said.get(timeout=PATIENCE_SECONDS)
    assert told.slabs.runs == ((0, 20),)
    assert "RuntimeError: once" in caplog.text


def test_what_is_no_command_is_an_error() -> None:
    """A worker does not guess."""
    slo = Slo(ttft_seconds=1.0, tbt_seconds=0.1)
    spec = RequestSpec(id="r", model="a", prompt_tokens=1, max_tokens=1, slo=slo)

    with pytest.raises(TypeError, match="RequestArrived"):
        Bench().carry_out(RequestArrived(request=spec))  # type: ignore[arg-type]
