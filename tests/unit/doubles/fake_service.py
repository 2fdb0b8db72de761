"""An appliance in memory for tests of the API: its models are scripts, its tokens are bytes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import msgspec

from appliance.engines.protocol import NO_TOKEN, GuideRefused, Produced, Verdict
from appliance.observability.metrics import Metrics
from appliance.service.front_frames import FrontModel
from appliance.service.interface import (
    Activity,
    GenerationFailed,
    InstanceActivity,
    InstanceVerification,
    KvShapeActivity,
    KvTierActivity,
    Load,
    ModelActivity,
    ModelCard,
    ModelNotFound,
    ModelPlaces,
    QueueFull,
    Readiness,
    RequestTimes,
    Sink,
    SubmitRequest,
)
from appliance.service.remote_models import RemoteModels
from appliance.vocabulary import FinishReason, RequestId, SlabMap, SlabOwner, Task

KV = KvShapeActivity(
    mapped_bytes=400, used_bytes=200, cold_bytes=100, peak_bytes=400, fragmentation=0.25
)
IMPOSSIBLE = b"impossible"
"""What is in a body whose guide cannot be compiled."""


def encode(text: str) -> list[int]:
    """The tokens of a text."""
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens."""
    return bytes(tokens).decode()


class FakeGeneration:
    """A sequence whose tokens the test feeds: an `appliance.service.interface.Generation`."""

    def __init__(self, service: FakeService, request: SubmitRequest, sink: Sink) -> None:
        self.request = request
        self.id = request.id
        self.cancelled = asyncio.Event()
        self.reason: FinishReason | None = None
        self.reads: list[bool] = []
        """What was said of its reader, when that was another thing than before."""
        self.times: RequestTimes | None = None
        """What is told at its end."""
        self.over = False
        self._service = service
        self._sink = sink

    @property
    def text(self) -> str:
        """Its prompt."""
        return decode(self.request.prompt)

    def feed(self, tokens: Sequence[int], end: FinishReason | None = None) -> None:
        """Some tokens; `end` goes with the last one."""
        for token in tokens[:-1]:
            self._put(Produced(self.id, token))
        self._put(Produced(self.id, tokens[-1], end))

    def detail(self, token: int, detail: bytes, end: FinishReason | None = None) -> None:
        """A token with more than itself."""
        self._put(Produced(self.id, token, end, detail))

    def say(self, text: str, end: FinishReason | None = FinishReason.LENGTH) -> None:
        """A text."""
        self.feed(encode(text), end)

    def pool(self, numbers: Sequence[float]) -> None:
        """The vector of the prompt, which is all that comes of it."""
        vector = struct.pack(f"<{len(numbers)}f", *numbers)
        self._put(Produced(self.id, NO_TOKEN, FinishReason.STOP, vector))

    def fail(self, error: GenerationFailed) -> None:
        self._end(error)

    def cancel(self, reason: FinishReason) -> None:
        if not self.over:
            self.reason = reason
            self.cancelled.set()
            self._end(None)

    def reader(self, *, reads: bool) -> None:
        if reads != (not self.reads or self.reads[-1]):
            self.reads.append(reads)

    def _put(self, produced: Produced) -> None:
        if self.over:
            return
        self._sink.produced(produced)
        if produced.finished is not None:
            self._end(None)

    def _end(self, failure: GenerationFailed | None) -> None:
        if not self.over:
            self.over = True
            self._service.live.pop(self.id)
            self._sink.ended(self.times, failure)


class FakeService:
    """Two models, one with a slash in its name. `script` runs for every request soon after it
    came. There is `room` for so many requests in all, and for `at_once` of them at once."""

    def __init__(self, script: Callable[[FakeGeneration], None] | None = None) -> None:
        self.script = script
        self.submitted: list[FakeGeneration] = []
        self.waiting: dict[str, int] = {}
        """Requests that wait, by model, as routers see them."""
        self.live: dict[RequestId, FakeGeneration] = {}
        self.arrivals: asyncio.Queue[FakeGeneration] = asyncio.Queue()
        self.room = 1000
        self.at_once = 1000
        self.reasons: tuple[str, ...] = ()
        self.guides: list[bytes] = []
        """Bodies whose guides were checked."""
        self.compiling: asyncio.Event | None = None
        """Guides are compiled when it is set; without it at once."""
        self.refused: dict[str, str] = {}
        """Models that front ends cannot serve."""
        self.catalogue = SimpleNamespace(on_change=None)
        """Which does not change."""
        self.remotes = RemoteModels()
        self.metrics_of_run = Metrics()
        self._cards = {
            name: ModelCard(
                id=name,
                created=1_700_000_000,
                max_context_tokens=200,
                tool_parser=parser,
                architecture="LlamaForCausalLM",
                dtype="bfloat16",
                weight_bytes=300,
            )
            for name, parser in (("small", None), ("org/small", "hermes"))
        }

    def learn(self, name: str, task: Task) -> None:
        """Have one more model, which has another task."""
        card = msgspec.structs.replace(self._cards["small"], id=name, task=task)
        self._cards[name] = card

    def models(self) -> list[ModelCard]:
        return list(self._cards.values())

    def model(self, name: str) -> ModelCard:
        if name not in self._cards:
            raise ModelNotFound(name)
        return self._cards[name]

    def places(self, name: str) -> ModelPlaces:
        return ModelPlaces(instances=1, sequences=32)

    def front_models(self) -> tuple[FrontModel, ...]:
        return tuple(
            FrontModel(
                name=card.id,
                path=f"/models/{card.id}",
                dtype=card.dtype,
                max_context=card.max_context_tokens,
                max_batch=64,
                task=card.task,
                created=card.created,
                tool_parser=card.tool_parser,
            )
            for card in self._cards.values()
        )

    def refuse_model(self, name: str, reason: str) -> None:
        self.refused[name] = reason

    async def check_guide(self, name: str, body: bytes) -> None:
        self.model(name)
        self.guides.append(body)
        if self.compiling is not None:
            await self.compiling.wait()
        if IMPOSSIBLE in body:
            raise GuideRefused("nothing follows this")

    def submit(self, request: SubmitRequest, sink: Sink) -> FakeGeneration:
        self.model(request.model)
        if len(self.submitted) >= self.room or len(self.live) >= self.at_once:
            raise QueueFull(2.4)
        assert request.id not in self.live, "the id of another request"
        generation = self.live[request.id] = FakeGeneration(self, request, sink)
        self.submitted.append(generation)
        asyncio.get_running_loop().call_soon(self._arrive, generation)
        return generation

    def _arrive(self, generation: FakeGeneration) -> None:
        if self.script is not None:
            self.script(generation)
        self.arrivals.put_nowait(generation)

    def readiness(self) -> Readiness:
        return Readiness(ok=not self.reasons, reasons=self.reasons)

    def activity(self) -> Activity:
        return Activity(
            version="1",
            uptime_seconds=1.5,
            instances=(
                InstanceActivity(
                    instance=0,
                    role="mixed",
                    state="up",
                    pool_bytes={"weights:small": 300, "kv:small": 100, "free": 600},
                ),
            ),
            models=(
                ModelActivity(model="small", state="loaded", residency={"0": "loaded"}),
                ModelActivity(model="org/small", state="cold"),
            ),
            kv={"host": KvTierActivity(fragmentation=0.25, shapes={"300": KV})},
        )

    def load(self) -> Load:
        return Load(
            catalogue=tuple(self._cards),
            resident=("small",),
            coming=("org/small",),
            host=("small", "org/small"),
            waiting=sum(self.waiting.values()),
            waiting_by_model=self.waiting,
            running=len(self.live),
            queue_age_seconds=0.0,
            pool_free_bytes=600,
            requests_by_model={"small": 2, "org/small": 1},
            asked_models=2,
            resident_models=1,
            coming_models=1,
            attainment=0.98,
            draining=False,
            version=Load.version_of(tuple(self._cards), ("small",)),
        )

    async def pool_map(self, number: int) -> SlabMap:
        owners = (SlabOwner(name="free"), SlabOwner(name="kv:small", moving=True))
        return SlabMap(slab_bytes=100, owners=owners, runs=((1, 1), (0, 9)))

    def host_map(self) -> SlabMap:
        return SlabMap(slab_bytes=100, owners=(SlabOwner(name="free"),), runs=((0, 20),))

    async def verify(self) -> list[InstanceVerification]:
        return [
            InstanceVerification(
                instance=0,
                answered=True,
                models={"small": Verdict.OK, "org/small": Verdict.NO_IMAGE},
            ),
            InstanceVerification(instance=1, answered=False),
        ]

    def metrics(self) -> bytes:
        return b"some_metric 1\n"
