"""The words of the appliance: frozen nouns, the facts that happen, the orders that are given.

One word per thing:

* model     -- a catalogue entry; served by name, built once per instance into an engine.
* instance  -- one GPU, one tensor-parallel group, or one slice of the CPU; one worker process.
* role      -- what an instance does for requests: prefill, decode, or both (mixed).
* slab      -- the unit of physical memory on a tier (``devices.slab`` bytes).
* block     -- the KV cache of ``block_tokens`` consecutive tokens of one request, in all layers of
               a block table; or, of a table of layers that keep a state, that of one request.
* group     -- the blocks that become usable together when their slabs are mapped on a device.
* turn      -- a stretch of decoding that one model gets on one instance; its quota is seconds.
* round     -- the turns of an instance, one per model with work, until every one had its own.
* switch    -- another model becomes the one that runs on an instance.

Events are facts in the past tense, commands are imperatives. Both are ``msgspec`` structs, so the
same object goes through the machine, over the wire to a worker, and into the journal.
Sizes are bytes unless the name says slabs, blocks or tokens; times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

RequestId: TypeAlias = str
ModelName: TypeAlias = str
InstanceId: TypeAlias = int

MODEL_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"
"""What a model may be called, as a regular expression."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen noun."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A fact that the scheduling machine receives."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order that the scheduling machine gives."""


# --- nouns ---------------------------------------------------------------------------------------


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Task(StrEnum):
    """What a model is for: text generation, the vector of a text, how well two texts match, or
    the text of what is said in a sound."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    TRANSCRIPTION = "transcription"

    @property
    def pools(self) -> bool:
        """Whether it makes something of a prompt, and no text that follows it."""
        return self in (Task.EMBED, Task.SCORE)


class RequestClass(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class InstanceClass(StrEnum):
    """Whose requests an instance takes: interactive ones, any, batch ones, or none for now."""

    INTERACTIVE = "interactive"
    MIXED = "mixed"
    BATCH = "batch"
    PARKED = "parked"


class FinishReason(StrEnum):
    """Why a request ended: the model stopped, the length limit, the client left, or an error; or
    its guide took too long to follow."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    INVALID_GUIDE = "invalid_guide"


class TurnEnd(StrEnum):
    """Why a turn ended."""

    QUOTA = "quota"
    DRAINED = "drained"
    PREEMPTED = "preempted"
    KV_FULL = "kv_full"


class Direction(StrEnum):
    """Where swapped KV moves: ``out`` of a device to the host tier, or ``in`` to a device."""

    OUT = "out"
    IN = "in"


class WaitCode(StrEnum):
    """What a request waits for; a stable word for programs."""

    NO_INSTANCE = "no_instance"
    """No worker is up."""
    BUILDING_ENGINE = "building_engine"
    """Its model's engine is being built, or is built next."""
    FILLING_HOST_CACHE = "filling_host_cache"
    """Its model's weights are read from disk into the host cache."""
    LOADING_WEIGHTS = "loading_weights"
    """Its model's weights are on their way to the device."""
    HOST_ROOM = "host_room"
    """Its KV cache needs room in the host cache."""
    KV_ROOM = "kv_room"
    """KV caches of others leave the device to make room."""
    SEQUENCES = "sequences"
    """As many requests of its model as may have begun on its instance."""
    SWAPPING_OUT = "swapping_out"
    """Its own KV cache is on its way to the host cache."""
    SWAPPING_IN = "swapping_in"
    """Its own KV cache is on its way to the device."""
    ON_DISK = "on_disk"
    """Its own KV cache is on disk, or on its way there or back, as the host cache was short."""
    OTHER_MODEL = "other_model"
    """Another model is computed on its instance."""
    SAME_MODEL = "same_model"
    """Other requests of its model are computed on its instance."""
    QUEUE = "queue"
    """Its instance computes nothing: the request before it waits for something else."""
    SLOW_CLIENT = "slow_client"
    """Its client takes nothing of what was made for it."""
    TURN = "turn"
    """The appliance is full, and its API key has its turn later."""
    KEY = "key"
    """Its API key has as many sequences at once as it may."""
    HELD = "held"
    """The policy holds it until a time."""


class WaitReason(Word, frozen=True):
    """Why a request is not computed now: `code` for programs, `message` for people."""

    code: WaitCode
    message: str
    instance: InstanceId | None = None
    """Where it waits."""
    behind: ModelName | None = None
    """The model that is computed, built or moved there meanwhile, if that is what it waits for."""
    seconds: float | None = None
    """So much longer as it is planned; what has to be moved before comes on top."""


class Slo(Word, frozen=True):
    """Service level: seconds to the first token, seconds between tokens."""

    ttft_seconds: float
    tbt_seconds: float
    gap_seconds: float = 0.0
    """The longest time from one token of a stream to the next; 0 if none is promised."""

    def scheduled(self, began: float, tokens: int) -> float:
        """When token number `tokens`, from 0, of a request is due that began then, whatever came
        before it: at the start + TTFT + k TBT."""
        return began + self.ttft_seconds + tokens * self.tbt_seconds

    def gap_over(self, tokens: int, newest: float) -> float:
        """When the longest gap is over after the last of `tokens` tokens, which came at `newest`;
        never if there is none, or no such promise."""
        return newest + self.gap_seconds if self.gap_seconds and tokens else math.inf

    @property
    def gap_below_tbt(self) -> bool:
        """Whether the gap is shorter than tokens are apart anyway, which is no promise to make."""
        return 0 < self.gap_seconds < self.tbt_seconds


class KvShape(Word, frozen=True):
    """The KV cache geometry of one model on one kind of instance.

    A model's layers are divided among block tables, of one size: a block has ``block_bytes``, which
    hold ``block_tokens`` tokens of the layers of its table, or the state of one request. Those of
    layers with a window may hold ``window_tokens`` instead, if they keep more or less. On a
    device, mapping ``group_slabs`` slabs makes at least ``group_blocks`` blocks usable.
    """

    block_tokens: int
    block_bytes: int
    group_blocks: int
    group_slabs: int
    tables: int = 1
    """Block tables of layers that keep the KV of all tokens."""
    state_blocks: int = 0
    """Blocks of a request, however many tokens it has, for layers that keep a state instead (Mamba,
    linear attention), or keys and values of what an encoder made (cross attention)."""
    windows: tuple[int, ...] = ()
    """Block tables of layers that attend to a window: the most blocks that a request keeps in each,
    those of its last tokens."""
    step_blocks: int = 0
    """What a prompt keeps beyond that in each of these, while it is computed: as many blocks as
    one step fills."""
    snapshot_blocks: int = 0
    """Blocks of a copy of a request's states, which the prefix cache keeps where there is room; 0
    if it keeps none. No request needs one."""
    image_token_bytes: int = 0
    """Of the encoder's output for each token of an image, or of a sound in a chat. An output has
    blocks of its own."""
    most_images: int = 0
    """Of a prompt; or sounds, as no model reads both here."""
    window_tokens: int = 0
    """Tokens of a block in the tables of `windows`, if that is not ``block_tokens``."""

    def blocks(self, tokens: int) -> int:
        """Blocks of a request that has `tokens` tokens in its KV cache. Never fewer for more."""
        if not tokens:
            return 0
        blocks = -(-tokens // self.block_tokens) * self.tables + self.state_blocks
        if self.windows:
            each = -(-tokens // (self.window_tokens or self.block_tokens))
            blocks += sum([min(each, most) for most in self.windows])
        return blocks

    def prompt_blocks(self, tokens: int, images: Iterable[int] = ()) -> int:
        """Blocks that a prompt of `tokens` tokens has while it is computed: what it has afterwards,
        or more. `images` are the tokens of each of its images or sounds."""
        blocks = self.blocks(tokens) + sum(map(self.image_blocks, images))
        if self.windows:
            each = -(-tokens // (self.window_tokens or self.block_tokens))
            for most in self.windows:
                blocks += min(each, most + self.step_blocks) - min(each, most)
        return blocks

    def image_blocks(self, tokens: int) -> int:
        """Blocks of what the encoder makes of an image of so many tokens."""
        return -(-tokens * self.image_token_bytes // self.block_bytes)

    def most_blocks(self, tokens: int) -> int:
        """Blocks of any prompt of so many tokens, while it is computed; all may be of images."""
        blocks = self.prompt_blocks(tokens)
        if self.most_images:
            blocks += self.image_blocks(tokens) + self.most_images - 1
        return blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes by which a request grows with each token, without what blocks round up, until its
        windows are full."""
        in_window = self.window_tokens or self.block_tokens
        scaled = self.tables * in_window + len(self.windows) * self.block_tokens
        return self.block_bytes * scaled // (self.block_tokens * in_window)

    @property
    def step_tokens(self) -> int:
        """A request that decodes takes blocks only where a multiple of so many tokens ends."""
        return min(self.block_tokens, self.window_tokens or self.block_tokens)

    def slabs(self, blocks: int) -> int:
        """Device slabs that are enough for `blocks` blocks when none is mapped yet."""
        return -(-blocks // self.group_blocks) * self.group_slabs


class ModelSpec(Word, frozen=True):
    """What the machine knows of a catalogued model before any engine is built."""

    name: ModelName
    weight_bytes: int
    max_context_tokens: int
    max_batch: int
    slo: Slo
    batch_slo: Slo = Slo(ttft_seconds=3600.0, tbt_seconds=2.0)
    """The SLO of batch requests; `slo` is for the others."""
    max_sequences: int | None = None
    """Most of its requests that decode, or wait to go on decoding, on one instance; None for as
    many as have room."""
    pinned: bool = False
    """Whether its master image stays in the host tier, even if other models need the room."""
    draining: bool = False
    """Whether no new requests are taken for it; those that are live go on."""
    instances: frozenset[InstanceId] | None = None
    """Those that can have an engine for it; None for all."""

    def fits(self, instance: InstanceId) -> bool:
        """Whether the instance can have an engine for it."""
        return self.instances is None or instance in self.instances

    def slo_for(self, request_class: RequestClass) -> Slo:
        """The SLO of requests of a class."""
        return self.batch_slo if request_class is RequestClass.BATCH else self.slo


class RequestSpec(Word, frozen=True):
    """A request as the machine sees it: sizes and its SLO, never the text or the true length.

    With a `max_tokens` of 0 it ends where its prompt is computed: it is embedded, or scored.
    """

    id: RequestId
    model: ModelName
    prompt_tokens: int
    max_tokens: int
    slo: Slo
    request_class: RequestClass = RequestClass.INTERACTIVE
    images: tuple[int, ...] = ()
    """Tokens of each image or sound in the prompt."""
    key: str = ""
    """Name of the API key that asks; empty if there is none."""


class KvMove(Word, frozen=True):
    """One request's KV on its way: the places of its blocks in the host tier, byte offsets."""

    request: RequestId
    host_offsets: tuple[int, ...]


class TokenCount(Word, frozen=True):
    """How many tokens a request got in a step, and whether that ended it."""

    request: RequestId
    count: int
    finished: FinishReason | None = None


# --- events --------------------------------------------------------------------------------------


class InstanceUp(Event, frozen=True, kw_only=True):
    """A worker connected; its pool holds `slabs` slabs."""

    instance: InstanceId
    slabs: int


class InstanceLost(Event, frozen=True, kw_only=True):
    """A worker died; nothing on its device survives. The host tier does."""

    instance: InstanceId


class InstanceQuarantined(Event, frozen=True, kw_only=True):
    """The instance is out of service until it is released, and why. Its worker, if it has one, is
    being ended; `InstanceLost` reports its end."""

    instance: InstanceId
    reason: str


class InstanceReleased(Event, frozen=True, kw_only=True):
    """A quarantined instance may serve again, as soon as it has a worker."""

    instance: InstanceId


class ModelBuilt(Event, frozen=True, kw_only=True):
    """An engine exists on the instance. Its weights need `weight_slabs` slabs on each device;
    `layout` tells how they lie there: instances may share a master image only if it is the same."""

    instance: InstanceId
    model: ModelName
    weight_slabs: int
    kv: KvShape
    layout: str = ""
    host_slabs: int
    """Slabs of the host tier that hold the master image, for all ranks of the instance."""


class ModelFailed(Event, frozen=True, kw_only=True):
    """An engine could not be built, or weights not be read; the model is not served until the
    daemon is restarted, or it is removed and added again."""

    instance: InstanceId
    model: ModelName
    reason: str


class WeightsStored(Event, frozen=True, kw_only=True):
    """The instance can load the model from the master image in the host tier."""

    instance: InstanceId
    model: ModelName
    host_slabs: int | None = None
    """How many of the slabs it was given, from the first on, the image takes; None for all."""


class ModelLoaded(Event, frozen=True, kw_only=True):
    """The model's weights are in place on the device."""

    instance: InstanceId
    model: ModelName
    moved_bytes: int
    seconds: float
    queued_seconds: float = 0.0
    prefetched: bool = False


class RequestArrived(Event, frozen=True, kw_only=True):
    request: RequestSpec


class RequestCancelled(Event, frozen=True, kw_only=True):
    """The client does not wait for the request any more."""

    request: RequestId


class ClientBackpressured(Event, frozen=True, kw_only=True):
    """The client takes nothing of what was made for the request, which makes room until it does."""

    request: RequestId


class ClientResumed(Event, frozen=True, kw_only=True):
    """The client of a request takes what was made for it again."""

    request: RequestId


class RequestFailed(Event, frozen=True, kw_only=True):
    """The engine refuses the request, and why."""

    instance: InstanceId
    model: ModelName
    request: RequestId
    reason: str


class PrefillDone(Event, frozen=True, kw_only=True):
    """The prompt is computed (its first token was reported as produced). `kv_slabs` are mapped,
    `cold_slabs` of them hold nothing but prefix cache that no request uses."""

    instance: InstanceId
    model: ModelName
    request: RequestId
    kv_slabs: int
    cold_slabs: int = 0
    seconds: float


class PrefillDeferred(Event, frozen=True, kw_only=True):
    """The prompt did not fit the slabs it was allowed; nothing of it is kept."""

    instance: InstanceId
    model: ModelName
    request: RequestId
    kv_slabs: int
    cold_slabs: int = 0


class TokensProduced(Event, frozen=True, kw_only=True):
    instance: InstanceId
    model: ModelName
    tokens: tuple[TokenCount, ...]


class TurnEnded(Event, frozen=True, kw_only=True):
    """A turn is over after `seconds` of decoding in `steps` steps. `kv_slabs` stay mapped.
    `drafted` tokens were guessed in it, of which `accepted` became output."""

    instance: InstanceId
    model: ModelName
    turn: int
    reason: TurnEnd
    steps: int
    seconds: float
    kv_slabs: int
    cold_slabs: int = 0
    drafted: int = 0
    accepted: int = 0


class KvMoved(Event, frozen=True, kw_only=True):
    """A `MoveKv` ended. Requests in `missing` had nothing to move (they ended before)."""

    instance: InstanceId
    model: ModelName
    direction: Direction
    moved: tuple[RequestId, ...]
    missing: tuple[RequestId, ...]
    moved_bytes: int
    seconds: float
    queued_seconds: float = 0.0
    kv_slabs: int
    cold_slabs: int = 0


class KvSpilled(Event, frozen=True, kw_only=True):
    """A `SpillKv` ended. `ok`: the KV is on disk; else the disk refused it and holds nothing."""

    model: ModelName
    request: RequestId
    ok: bool
    moved_bytes: int
    seconds: float
    queued_seconds: float = 0.0


class KvRestored(Event, frozen=True, kw_only=True):
    """A `RestoreKv` ended; nothing of it is on disk any more. `ok`: the KV is in its places in the
    host tier, as it was; else it is lost."""

    model: ModelName
    request: RequestId
    ok: bool
    moved_bytes: int
    seconds: float
    queued_seconds: float = 0.0


class ModelChanged(Event, frozen=True, kw_only=True):
    """An operator changed a model's SLO, or how it is served. Requests that are live
    keep the SLO that they were taken with."""

    model: ModelName
    slo: Slo
    batch_slo: Slo
    pinned: bool
    draining: bool


class ImageHeld(Event, frozen=True, kw_only=True):
    """Workers are about to write to a model's master image, which stays meanwhile; or, if it is no
    longer held, they have. If it is `stale`, none of them could and none loads from it: it goes."""

    model: ModelName
    held: bool
    stale: bool = False


class ModelLoadRequested(Event, frozen=True, kw_only=True):
    """An operator wants the model's weights on a device, before a request asks for it."""

    model: ModelName


class ModelEvictRequested(Event, frozen=True, kw_only=True):
    """An operator wants what the model holds on devices back. Its requests go on later."""

    model: ModelName


class ModelAdded(Event, frozen=True, kw_only=True):
    """The catalogue has a model more, the last one. `kv_floor_slabs` slabs of the host tier hold
    the KV cache of any one request at full length, also of this model."""

    model: ModelSpec
    kv_floor_slabs: int


class ModelRemoved(Event, frozen=True, kw_only=True):
    """The model is to leave the catalogue. Its requests are rejected, those that come, too."""

    model: ModelName


class ModelDropped(Event, frozen=True, kw_only=True):
    """A `DropModel` was carried out: nothing more is reported of the model."""

    instance: InstanceId
    model: ModelName


class Ticked(Event, frozen=True, kw_only=True):
    """The time that the machine named as its next deadline is there."""


class ClockSet(Event, frozen=True, kw_only=True):
    """The clock on the wall shows `unix_seconds` (Unix time) now, and local time is so many seconds
    ahead of UTC. It goes on from there at the pace of the machine's clock."""

    unix_seconds: float
    utc_offset_seconds: int


# --- commands ------------------------------------------------------------------------------------
# A worker carries the commands of an instance out in the order given, except `Preempt` and
# `Release`, which take effect at the next step boundary, and `PrefetchModel`, which goes on in the
# background until `LoadModel` or `EvictModel` of the same model joins it.


class BuildModel(Command, frozen=True):
    """Make the engine of a model (once per worker)."""

    instance: InstanceId
    model: ModelName


class StoreWeights(Command, frozen=True):
    """Keep the master image in these host slabs (byte offsets); write it there first, from the
    checkpoint's files, if `fill`. Without slabs the model is loaded from its files every time."""

    instance: InstanceId
    model: ModelName
    host_offsets: tuple[int, ...]
    fill: bool


class LoadModel(Command, frozen=True):
    """Put the weights in place on the device; a switch to `model` begins."""

    instance: InstanceId
    model: ModelName


class PrefetchModel(Command, frozen=True):
    """As `LoadModel`, during whatever runs."""

    instance: InstanceId
    model: ModelName


class EvictModel(Command, frozen=True):
    """Unmap the weights. They are never copied out."""

    instance: InstanceId
    model: ModelName


class DropModel(Command, frozen=True):
    """Forget the model; its engine, if there is one, holds nothing on the device any more."""

    instance: InstanceId
    model: ModelName


class RunPrefill(Command, frozen=True):
    """Compute a prompt and produce one token; the model may map at most `kv_slabs` slabs of KV."""

    instance: InstanceId
    model: ModelName
    request: RequestId
    kv_slabs: int


class RunTurn(Command, frozen=True):
    """Decode `requests` for `quota_seconds`; the model may map at most `kv_slabs` slabs of KV.

    With `prompts` it is a mixed turn: they are computed in the decoding steps, at most
    `chunk_tokens` tokens of them in a step, and the turn is over when they are done, each reported
    as by `RunPrefill`. They decode from the next turn on. Prompts that are embedded may be a turn
    without `requests`.
    """

    instance: InstanceId
    model: ModelName
    turn: int
    requests: tuple[RequestId, ...]
    quota_seconds: float
    kv_slabs: int
    prompts: tuple[RequestId, ...] = ()
    chunk_tokens: int = 0


class Preempt(Command, frozen=True):
    """End the turn at the next step; its requests keep their KV."""

    instance: InstanceId
    turn: int


class MoveKv(Command, frozen=True):
    """Move KV between the device and the host tier; an outward move frees the device blocks.

    An inward move may map slabs until the model holds `kv_slabs`.
    """

    instance: InstanceId
    model: ModelName
    direction: Direction
    moves: tuple[KvMove, ...]
    kv_slabs: int


class SpillKv(Command, frozen=True):
    """Write a request's KV from these blocks of the host tier (byte offsets) to disk. The disk, not
    an instance, carries this out, `RestoreKv` and `DropSpilledKv`, in the order given."""

    model: ModelName
    request: RequestId
    host_offsets: tuple[int, ...]
    block_bytes: int


class RestoreKv(Command, frozen=True):
    """Read a request's KV from disk into these blocks of the host tier, and delete it there."""

    model: ModelName
    request: RequestId
    host_offsets: tuple[int, ...]
    block_bytes: int


class DropSpilledKv(Command, frozen=True):
    """Delete the KV of a request that is on disk, or that is being written there."""

    request: RequestId


class TrimKv(Command, frozen=True):
    """Drop cold prefix cache until the model holds at most `kv_slabs` slabs of KV."""

    instance: InstanceId
    model: ModelName
    kv_slabs: int


class Release(Command, frozen=True):
    """Forget a request and free its device blocks."""

    instance: InstanceId
    model: ModelName
    request: RequestId


class Finish(Command, frozen=True):
    """The request ended; the client gets the reason."""

    request: RequestId
    reason: FinishReason


class Reject(Command, frozen=True):
    """The request cannot be served, and why; `code` is a stable word for programs."""

    request: RequestId
    code: str
    message: str


AnyEvent: TypeAlias = (
    InstanceUp
    | InstanceLost
    | InstanceQuarantined
    | InstanceReleased
    | ModelBuilt
    | ModelFailed
    | WeightsStored
    | ModelLoaded
    | RequestArrived
    | RequestCancelled
    | ClientBackpressured
    | ClientResumed
    | RequestFailed
    | PrefillDone
    | PrefillDeferred
    | TokensProduced
    | TurnEnded
    | KvMoved
    | KvSpilled
    | KvRestored
    | ModelChanged
    | ImageHeld
    | ModelLoadRequested
    | ModelEvictRequested
    | ModelAdded
    | ModelRemoved
    | ModelDropped
    | Ticked
    | ClockSet
)

AnyCommand: TypeAlias = (
    BuildModel
    | StoreWeights
    | LoadModel
    | PrefetchModel
    | EvictModel
    | DropModel
    | RunPrefill
    | RunTurn
    | Preempt
    | MoveKv
    | SpillKv
    | RestoreKv
    | DropSpilledKv
    | TrimKv
    | Release
    | Finish
    | Reject
)


class SlabOwner(Word, frozen=True):
    """``free``, ``weights:<model>``; on a device ``kv:<model>`` and, on a GPU, ``runtime``; in the
    host tier ``kv:<bytes of a block>``. `moving`: bytes are on their way to or from there."""

    name: str
    moving: bool = False


class SlabMap(Word, frozen=True):
    """All slabs of a tier, as runs of slabs that have the same owner."""

    slab_bytes: int
    owners: tuple[SlabOwner, ...]
    runs: tuple[tuple[int, int], ...]
    """Place of the owner among `owners`, and how many slabs."""
