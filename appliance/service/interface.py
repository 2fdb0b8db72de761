"""The seam between the HTTP API and the appliance: what the API asks, what it is answered.

Everything here is called on the event loop and must return at once; only what is async waits:
compiling guides, verifying, asking for slabs, finding and loading policies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import msgspec

from appliance.engines.protocol import Produced, Verdict
from appliance.service.event_log import Notice
from appliance.service.front_frames import FrontModel
from appliance.service.policy_overview import PolicyReport
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import (
    FinishReason,
    InstanceId,
    ModelName,
    RequestClass,
    RequestId,
    SlabMap,
    Slo,
    Task,
    WaitReason,
)


class ModelNotFound(Exception):
    """The catalogue has no model of this name."""

    def __init__(self, model: ModelName) -> None:
        super().__init__(f"model {model!r} does not exist")
        self.model = model


class ModelExists(Exception):
    """The catalogue has a model of this name, or one that is still being removed."""

    def __init__(self, model: ModelName, *, removing: bool = False) -> None:
        which = "still being removed: try again later" if removing else "in the catalogue already"
        super().__init__(f"a model {model!r} is {which}")
        self.model = model


class AdapterNotPlaced(Exception):
    """A model cannot have an adapter now; the message says why, and what to do. Nothing was
    changed."""


class InstanceNotFound(Exception):
    """There is no instance of this number."""

    def __init__(self, number: InstanceId | str) -> None:
        super().__init__(f"there is no instance {number}; `appliance ps` lists them")


class SlabsUnanswered(Exception):
    """The owners of an instance's slabs cannot be determined now; the message says why."""


class QueueFull(Exception):
    """No room for another request now; trying again after `retry_after_seconds` makes sense."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("the queue is full, try again later")
        self.retry_after_seconds = retry_after_seconds


class ModelQueueFull(Exception):
    """One model has as many requests as it may have; others may have room. Trying again after
    `retry_after_seconds` makes sense."""

    def __init__(self, retry_after_seconds: float, model: ModelName) -> None:
        super().__init__(f"the queue of {model} is full, try again later")
        self.retry_after_seconds = retry_after_seconds


class GenerationFailed(Exception):
    """The appliance gave a request up. `code` is a stable word, `status` the HTTP status for it.
    Trying again makes sense after `retry_after_seconds`, if that is given."""

    def __init__(
        self,
        code: str,
        message: str,
        status: int = 500,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.code = code
        self.message = message
        self.status = status


def removed(model: ModelName) -> GenerationFailed:
    """The model left the catalogue before it got to what was asked of it: from now on there is no
    such model, and to ask again, as official clients do after a 409, would not help."""
    return GenerationFailed("model_removed", f"{model} was removed", 404)


def cancelled() -> GenerationFailed:
    """The error of a client whose request an operator cancelled. 499 is what gRPC's CANCELLED is
    over HTTP; clients do not try again as after a 5xx."""
    return GenerationFailed("cancelled", "an operator cancelled the request", 499)


def shutting_down() -> GenerationFailed:
    """What a client gets whose request cannot be taken in, or cannot end, because the daemon
    stops."""
    return GenerationFailed("shutting_down", "the appliance is shutting down", 503)


class NothingPrevious(Exception):
    """No other choice of policies came before the one that is active."""

    def __init__(self) -> None:
        super().__init__("there is no earlier choice of policies to go back to")


class PolicyNotActive(Exception):
    """A policy is not of those that decide."""

    def __init__(self, policy: str, message: str) -> None:
        super().__init__(message)
        self.policy = policy


class AskedSlo(msgspec.Struct, frozen=True, kw_only=True):
    """The service level that a request asks for itself; what it leaves open is its model's."""

    ttft_seconds: float | None = None
    tbt_seconds: float | None = None
    gap_seconds: float | None = None
    """0 for none, whatever the model has."""

    def over(self, served: Slo) -> Slo:
        """Raises `GenerationFailed` (400) if the gap would be below the time between tokens."""
        ttft, tbt, gap = self.ttft_seconds, self.tbt_seconds, self.gap_seconds
        slo = Slo(
            ttft_seconds=served.ttft_seconds if ttft is None else ttft,
            tbt_seconds=served.tbt_seconds if tbt is None else tbt,
            gap_seconds=served.gap_seconds if gap is None else gap,
        )
        if slo.gap_below_tbt and (tbt is not None or gap is not None):
            raise GenerationFailed(
                "invalid_slo",
                f"x-slo: a gap of {slo.gap_seconds:g} s is less than the {slo.tbt_seconds:g} s"
                " between tokens; ask for a longer gap, a shorter tbt, or gap=0s for none",
                400,
            )
        return slo


class RequestNotFound(Exception):
    """No live request has this id: it ended, or never was."""

    def __init__(self, request: RequestId) -> None:
        super().__init__(f"no request {request!r} is live")
        self.request = request


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request was asked, and the trace that it is part of: `parent` is the header
    ``traceparent`` (W3C) as it came, "" without."""

    path: str
    parent: str = ""


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `id` is unique and shows the id that the client is given."""

    id: RequestId
    model: ModelName
    asked: ModelName = ""
    """What the client asked for, if the model is computed with one of its adapters."""
    prompt: tuple[int, ...]
    max_tokens: int
    """Of output, at most; 0: the prompt is pooled and nothing follows."""
    body: bytes
    """What only front ends and engines read."""
    request_class: RequestClass = RequestClass.INTERACTIVE
    slo: AskedSlo = AskedSlo()
    key: str | None = None
    """Name of the API key that asks."""
    prefix_salt: str = ""
    """It uses cached prefixes only of requests with the same salt."""
    trace: Trace | None = None
    """Called when requests are traced."""
    together_tokens: int = 0
    """Most tokens, prompts included, of all sequences that are asked for at once, if there are
    several: they are taken together or not at all. Of prompts that are pooled, which come one after
    another, only the first one says it."""
    images: tuple[int, ...] = ()
    """Tokens of each image or sound in the prompt, in their order."""

    @property
    def pooled(self) -> bool:
        """Whether a vector or a score is made of the prompt, and no text follows it."""
        return self.max_tokens == 0


class Stretch(NamedTuple):
    """A phase of a request from one moment to another, of the daemon's clock."""

    phase: str
    began: float
    ended: float


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the time of a request went to; the phases add up to the whole.

    `load` is the part of its wait and of its prompt in which its weights came in, `preempted` what
    passed between its turns.
    """

    queue_seconds: float = 0.0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preempted_seconds: float = 0.0
    preemptions: int = 0
    """How often it stopped in mid-generation for another model or a prompt."""
    instances: tuple[InstanceId, ...] = ()
    """Where it was computed, in order."""
    device_seconds: float = 0.0
    """Of devices: the time in which they computed it; what they computed together is divided."""
    stretches: tuple[Stretch, ...] = ()
    """The phases as they came, where that is kept: not all of a long life. A load lies within the
    wait or the prompt that it is part of."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order of a request's life."""
        return {
            "queue": self.queue_seconds,
            "load": self.load_seconds,
            "prefill": self.prefill_seconds,
            "decode": self.decode_seconds,
            "preempted": self.preempted_seconds,
        }


class Sink(Protocol):
    """Where the output of one request goes, as it comes. Its methods return at once, raise nothing
    and call nothing of the `Service`."""

    def produced(self, produced: Produced) -> None:
        """A token came, or the outcome of a pooled prompt."""

    def ended(self, times: RequestTimes | None, failure: Exception | None) -> None:
        """Nothing more comes. With a `failure` the appliance gave the request up. `times` are None
        for a request that was never computed."""


class Generation(Protocol):
    """One submitted request that is not over."""

    @property
    def id(self) -> RequestId: ...

    def cancel(self, reason: FinishReason) -> None:
        """No more tokens are wanted: the client left (`CANCELLED`) or a stop string came (`STOP`).

        Idempotent, and without effect on a generation that ended. Its sink hears the end.
        """

    def reader(self, *, reads: bool) -> None:
        """The client takes nothing of what came, or takes it again. What is not read makes room
        for others. Idempotent, and without effect on a generation that ended."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A catalogued model as clients see it. `created` is a Unix time in seconds."""

    id: ModelName
    base: ModelName = ""
    """The model that is computed with an adapter, if this is one."""
    root: ModelName = ""
    """The model that this is an alias of, if it is one."""
    created: int
    max_context_tokens: int
    owned_by: str = "appliance"
    tool_parser: str | None = None
    """vLLM's parser of its tool calls; without one, a model cannot choose to call tools."""
    reasoning_parser: str | None = None
    """vLLM's parser of its reasoning; without one, all that a model writes is its answer."""
    state: str = "absent"
    """Its state on the instance that is closest to serving it: a residency, or ``failed``."""
    architecture: str = ""
    """As the checkpoint names it: ``LlamaForCausalLM``."""
    dtype: str = ""
    """What it is computed in: ``bfloat16``, say."""
    weight_bytes: int = 0
    task: Task = Task.GENERATE
    images: int = 0
    """The most of a prompt."""
    sounds: int = 0
    """The most of a chat's prompt."""

    @property
    def named(self) -> ModelName:
        """The name that keys have: an alias is not one of its own."""
        return self.root or self.id

    @property
    def model(self) -> ModelName:
        """The model of the catalogue that answers."""
        return self.base or self.named


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests make progress; when not, why, in words for the operator. `degraded` says
    what else is out of order. Clients without a key can read it, so it quotes no text of others."""

    ok: bool
    reasons: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()


class GpuActivity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What NVML tells of a GPU; a sensor that it has not is left out."""

    gpu: int
    """NVML's number."""
    utilization: float | None = None
    """Share of the time in which it computed, 0 to 1."""
    power_watts: float | None = None
    celsius: float | None = None
    memory_used_bytes: int
    memory_bytes: int


class InstanceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance does now. `pool_bytes` by owner: weights:<model>, kv:<model>, free."""

    instance: InstanceId
    role: str
    state: str
    """``starting``, ``up``, ``lost`` or ``quarantined``."""
    quarantine: str | None = None
    """Why it is out of service, if it is."""
    pid: int | None = None
    model: ModelName | None = None
    """The model that runs."""
    pool_bytes: dict[str, int] = {}
    pool_high_water_bytes: int = 0
    runtime_bytes: int = 0
    """Memory of a GPU outside the pool, for its context, its graphs and its kernels' own."""
    prefetched: tuple[ModelName, ...] = ()
    """Models whose weights came before they were asked for, and did not run since."""
    busy_seconds: float = 0.0
    """Of turns and prompts that are over, since the daemon started."""
    parked: bool = False
    """Whether it takes no requests, as the policy needs fewer instances. What it has it finishes;
    weights stay on the device."""
    parked_seconds: float = 0.0
    """Since the daemon started: parked, with nothing to do."""
    switches: int = 0
    """Since the daemon started."""
    moved_bytes: dict[str, int] = {}
    """Since then, by what moved: ``weights``, ``kv_in``, ``kv_out``."""
    gpus: tuple[GpuActivity, ...] = ()
    group: str = ""
    """Of the configuration; "" if it has none."""
    ranks: int = 1
    """Processes that compute together; the sizes are those of each."""


class ModelTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What can be changed of a model while it is served. Requests that are live keep the SLO
    they were taken with; `max_queue` may be live at once, one more is `ModelQueueFull`."""

    slo: Slo
    batch_slo: Slo
    max_queue: int
    pinned: bool
    """Whether its weights stay in the host cache, even if other models need the room."""
    aliases: tuple[ModelName, ...] = ()
    """What clients may call it besides its name."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is, as its checkpoint says and as it is served. Sizes are of the whole model."""

    architecture: str
    """As the checkpoint names it: ``LlamaForCausalLM``."""
    dtype: str
    """What it is computed in: ``bfloat16``, say."""
    multiplied: str = ""
    """The method of weights that take the memory of `dtype`, though they are stored in less:
    ``mxfp4``, say. Empty for others."""
    embedding_task: str = ""
    """The task of whose adapter it computes with: ``text-matching``, say. Empty for models whose
    checkpoints have none of tasks."""
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int = 0
    """Of what layers keep of one request, however long it is: states (Mamba, say), or keys and
    values of what an encoder made (Whisper)."""
    max_context_tokens: int
    """Of a prompt and its answer together."""
    max_batch: int
    """Requests that are decoded in one step, at most."""
    images: int = 0
    """The most of a prompt."""
    sounds: int = 0
    """The most of a chat's prompt."""
    adapters: tuple[ModelName, ...] = ()
    """What clients call it with each of its LoRA adapters."""
    max_loras: int = 0
    """Places for adapters, taken or free."""
    max_lora_rank: int = 0
    """Of adapters that may come while it serves; 0: none may."""
    tool_parser: str = ""
    """vLLM's parser of its tool calls; empty for none."""
    tool_parser_reason: str = ""
    """Why it is this one, or why there is none: the configuration, or what of the checkpoint."""
    reasoning_parser: str = ""
    """vLLM's parser of its reasoning; empty for none."""
    reasoning_parser_reason: str = ""
    path: str


class WindowStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a model delivered in the last minute. `attainment` is the share of tokens that came
    before they were due: token k at arrival + TTFT + k times TBT. Other times to within 5 %."""

    attainment: float | None = None
    ttft_p50_seconds: float | None = None
    ttft_p99_seconds: float | None = None
    tbt_p50_seconds: float | None = None
    tbt_p99_seconds: float | None = None


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a model does now. `residency` by instance id (a string, as JSON wants it)."""

    model: ModelName
    state: str
    failure: str | None = None
    """Of one that failed: why, as its requests hear it."""
    residency: dict[str, str] = {}
    groups: tuple[str, ...] = ()
    """Of instances that can have it, in the order of the configuration; none if it has none."""
    running: int = 0
    """Live requests that are computed (`COMPUTED_PHASES`)."""
    waiting: int = 0
    """All other live requests, those that wait for the turn of their key included."""
    draining: bool = False
    """Whether new requests are refused."""
    load_requested: bool = False
    """Whether an operator wants it on a device, where it is not yet."""
    output_tokens: int = 0
    """Since the daemon started."""
    drafted_tokens: int = 0
    """Tokens that were drafted since then; 0 for a model without drafts."""
    accepted_tokens: int = 0
    """Those of them that became output."""
    window: WindowStats | None = None
    """None if nothing came of it in the last minute."""
    terms: ModelTerms | None = None
    facts: ModelFacts | None = None


COMPUTED_PHASES: Final = frozenset({"prefilling", "running"})
"""A live request whose phase is one of these is running. All others are waiting: every view, every
count of a model and `appliance ps` mean the same by that."""


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A live request. `phase` is where it is on its way: ``waiting`` (for the turn of its key),
    ``unplaced``, ``queued``, ``prefilling``, ``running``, ``preempted`` (between turns) or
    ``paused`` (its client does not read); `reason` says why it is not computed now."""

    id: RequestId
    model: ModelName
    request_class: RequestClass
    phase: str
    age_seconds: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    instance: InstanceId | None = None
    kv: str = "none"
    """Where its KV cache is: ``none``, ``device``, ``leaving``, ``host`` or ``arriving``."""
    reason: WaitReason | None = None


class KvShapeActivity(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one shape in one tier. `fragmentation` is unused / peak (Aegaeon §7.3)."""

    mapped_bytes: int
    """Whole slabs."""
    used_bytes: int
    cold_bytes: int
    """Prefix cache that no request uses now."""
    peak_bytes: int
    fragmentation: float
    image_bytes: int = 0
    """Of used and cold blocks: images as the encoder left them."""


class KvTierActivity(msgspec.Struct, frozen=True, kw_only=True):
    """KV in one tier, of all instances together. `shapes` by the bytes of a block."""

    fragmentation: float
    shapes: dict[str, KvShapeActivity]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/status``."""

    version: str
    uptime_seconds: float
    instances: tuple[InstanceActivity, ...]
    models: tuple[ModelActivity, ...]
    kv: dict[str, KvTierActivity] = {}
    """By tier: ``device``, ``host``."""
    host_bytes: dict[str, int] = {}
    """The host cache by owner: weights:<model>, kv, free."""
    disk_bytes: dict[str, int] = {}
    """Room for KV on disk (`devices.kv_spill`) by use: kv, free; empty if there is none."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/load``: what a router in front of several boxes asks each second."""

    catalogue: tuple[str, ...]
    """All names that requests may have: models, their aliases and adapters."""
    resident: tuple[str, ...]
    """Those whose weights are on a device of an instance that is up."""
    coming: tuple[str, ...]
    """Those that are on their way there, that an operator wants there, or that requests which
    wait to begin are for."""
    host: tuple[str, ...]
    """Those whose weights are whole in the host cache."""
    waiting: int
    waiting_by_model: dict[str, int]
    """The same by model, under the model's own name; without those of which none waits."""
    running: int
    queue_age_seconds: float
    """How long the oldest request that waits to begin has waited; 0 if none waits."""
    pool_free_bytes: int
    """Of the pools of instances that are up, what neither weights nor KV hold by the daemon's
    books."""
    requests_by_model: dict[str, int]
    """Live requests of each of those that have any; under an alias or an adapter, those of its
    model."""
    asked_models: int
    """How many models have live requests."""
    resident_models: int
    """How many are resident; each counts once, whatever names it has."""
    coming_models: int
    """How many are coming."""
    attainment: float | None
    """The share of the last minute's tokens that came in time; None if there were none."""
    draining: bool
    """Whether the daemon takes no more requests, because it ends."""
    version: str
    """Another one whenever `catalogue` or `resident` is another."""

    @staticmethod
    def version_of(catalogue: tuple[str, ...], resident: tuple[str, ...]) -> str:
        return f"{crc32(msgspec.json.encode((catalogue, resident))):08x}"


class SpanKind(StrEnum):
    """What an instance takes time for."""

    TURN = "turn"
    PREFILL = "prefill"
    BUILD = "build"
    """An engine is made."""
    FILL = "fill"
    """Weights are read from disk into the host cache."""
    LOAD = "load"
    PREFETCH = "prefetch"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why something was ordered: the event it followed from, the question that was asked, and the
    policy that answered. Without a question it follows from what is ordered with it."""

    after: str
    hook: str | None = None
    policy: str | None = None
    plan: tuple[tuple[ModelName, float | None], ...] = ()
    """The turns that were to follow this one: models, and their quotas in seconds; no quota for
    those that are planned anew when their time has come."""


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A time in which an instance computed or moved something; without an end it still does. What
    does not apply is left out."""

    number: int
    instance: InstanceId
    kind: SpanKind
    model: ModelName
    began_unix_seconds: float
    ended_unix_seconds: float | None = None
    outcome: str | None = None
    """Of a turn why it ended; else ``done``, ``deferred``, ``refused``, ``failed``, ``given up``,
    ``lost``."""
    requests: tuple[RequestId, ...] = ()
    """That decode in a turn, or whose KV moves."""
    prompts: tuple[RequestId, ...] = ()
    quota_seconds: float | None = None
    chunk_tokens: int = 0
    kv_slabs: int = 0
    """Slabs of KV that its model might have."""
    steps: int = 0
    moved_bytes: int = 0
    decision: Decision | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/snapshot``: everything at one time."""

    unix_seconds: float
    newest_event: int
    """Number of the newest event that it accounts for."""
    readiness: Readiness
    status: Activity
    requests: tuple[RequestActivity, ...]
    spans: tuple[Span, ...] = ()
    """What instances computed and moved lately, by number."""


class SpanPage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``GET /api/timeline``: spans that are over, by number."""

    spans: tuple[Span, ...]
    before: int | None
    """What to ask with next, for those that came before; None if there are no more."""
    kept_since_unix_seconds: float | None
    """The end of the newest span that is not kept any more; None if all are kept."""


class InstanceVerification(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the weights on one instance's device are those of their master images, by model.

    An instance that is down, or did not answer in time, has no verdicts.
    """

    instance: InstanceId
    answered: bool
    models: dict[ModelName, Verdict] = {}


class ModelPlaces(NamedTuple):
    """How many sequences of a model run at once."""

    instances: int
    """Those that are up and may have the model; at least 1."""
    sequences: int
    """On all of them, with the KV that each has on average now; at least 1."""


class Inference(Protocol):
    """What takes requests in, and the models that may be asked for."""

    def models(self) -> list[ModelCard]:
        """All catalogued models, also cold ones, in the order of the catalogue."""

    def model(self, name: ModelName) -> ModelCard:
        """Raises `ModelNotFound`."""

    def front_models(self) -> tuple[FrontModel, ...]:
        """The models that may be asked for, as front ends need them."""

    def places(self, name: ModelName) -> ModelPlaces:
        """How many sequences of a model run at once. Raises `ModelNotFound`."""

    def refuse_model(self, name: ModelName, reason: str) -> None:
        """A front end cannot build the model's front half: its requests fail with this reason."""

    async def check_guide(self, name: ModelName, body: bytes) -> None:
        """Have the guide of a request's body compiled wherever the model may run, before the
        request is submitted.

        Raises `ModelNotFound`, and `GuideRefused` if it cannot be compiled, or not in time.
        """

    def submit(self, request: SubmitRequest, sink: Sink) -> Generation:
        """Take a request in. Raises `ModelNotFound`, `QueueFull`, `ModelQueueFull` and
        `GenerationFailed`; the sink hears nothing then."""


class Watch(Protocol):
    """What can be seen of the appliance; nothing is changed by looking."""

    def readiness(self) -> Readiness: ...

    def activity(self) -> Activity: ...

    def load(self) -> Load: ...

    def model_activity(self, name: ModelName) -> ModelActivity:
        """Raises `ModelNotFound`."""

    def requests(self) -> list[RequestActivity]:
        """All live requests, the oldest first."""

    def request(self, request: RequestId) -> RequestActivity:
        """Raises `RequestNotFound`."""

    def snapshot(self) -> Snapshot: ...

    def timeline(self, since: float, until: float, before: int | None) -> SpanPage:
        """The newest spans that are over, of which some part is between two times (Unix seconds);
        `before` is that of the page before."""

    def events(self, after: int | None) -> AsyncIterator[list[Notice] | None]:
        """What happens after the event of this number. None replaces what was missed: a
        snapshot, taken then, accounts for it. Ends with the appliance."""

    async def pool_map(self, number: InstanceId) -> SlabMap:
        """Which slab of an instance is whose; requests do not wait meanwhile. Raises
        `InstanceNotFound`, and `SlabsUnanswered` within a few seconds."""

    def host_map(self) -> SlabMap:
        """Which slab of the host tier is whose."""

    async def policies(self) -> PolicyReport: ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""


class Admin(Protocol):
    """What an operator does to requests, models, instances and policies."""

    def cancel_request(self, request: RequestId) -> None:
        """End a request; its client gets an error. Raises `RequestNotFound`."""

    def load_model(self, name: ModelName) -> None:
        """Have its weights brought to a device as soon as there is room that no request waits
        for.
        Raises `ModelNotFound`, `GenerationFailed` for one that cannot be served."""

    def evict_model(self, name: ModelName) -> None:
        """Have it give back what it holds on devices; its requests are paused, and go on later.
        Raises `ModelNotFound`."""

    def drain_model(self, name: ModelName, draining: bool) -> None:
        """Refuse new requests for it from now on, or take them again. Raises `ModelNotFound`."""

    def quarantine_instance(self, number: InstanceId, reason: str) -> None:
        """End its worker, and have others go on with what it had. Raises `InstanceNotFound`."""

    def release_instance(self, number: InstanceId) -> None:
        """Have it serve again. Raises `InstanceNotFound`."""

    async def verify(self) -> list[InstanceVerification]:
        """Have every instance compare its weights; ends when all have answered, or after a while.

        Requests wait while their instance compares.
        """

    async def set_policy(self, choice: PolicyChoice) -> None:
        """Have other policies decide from now on; requests go on. Raises `PolicyChoiceError`."""

    async def rollback_policy(self) -> None:
        """Return to the choice before. Raises `NothingPrevious`, `PolicyChoiceError`."""

    def enable_policy(self, policy: str) -> None:
        """Have a policy asked again that failed too often. Raises `PolicyNotActive`."""


class Service(Inference, Watch, Admin, Protocol):
    """The appliance, as far as the API needs it. The daemon implements it."""
