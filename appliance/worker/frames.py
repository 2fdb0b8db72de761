"""Frames between the daemon and a worker: a length, then one msgpack object. No pickle.

Down go the machine's commands for that instance, and `AddSequence` before the first command that
names a request the worker does not know. Up come the machine's events, and `Tokens`, which carries
what the machine must not see. Frames of one direction keep their order.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from appliance import vocabulary as v
from appliance.checkpoints.adapters import AdapterPlace, AdapterRoom
from appliance.checkpoints.drafts import Speculation
from appliance.checkpoints.task import PoolerValue
from appliance.engines.protocol import KvBytes, Produced, SequenceSpec, Verdict
from appliance.framing import Decoder
from appliance.vocabulary import SlabMap

PROTOCOL_VERSION: Final = 6


class WorkerModel(msgspec.Struct, frozen=True):
    """A model as a worker needs it to build its engine."""

    name: str
    path: str
    dtype: str
    max_context: int
    max_batch: int
    verify: bool = False
    task: v.Task = v.Task.GENERATE
    reasoning_parser: str = ""
    """vLLM's name of it: guides begin where reasoning has ended. Empty: there is none."""
    max_logprobs: int = 20
    pooler_config: dict[str, PoolerValue] | None = None
    """Keys of vLLM's `PoolerConfig` that are not as the checkpoint has them, if any."""
    images: int = 0
    """The most of a prompt; 0: what reads images is not built."""
    sounds: int = 0
    """The most of a chat's prompt; 0: what reads them is not built."""
    adapters: tuple[AdapterPlace, ...] = ()
    adapter_room: AdapterRoom | None = None
    """For adapters that come later, if any may."""
    speculation: Speculation | None = None
    """How tokens are drafted, if they are."""
    embedding_task: str = ""
    """Of adapters that a checkpoint has of tasks, the one that is added; empty: as vLLM does it."""


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first frame down: what the worker is. `host_bytes` sizes the inherited host tier;
    `cpus` are its processors, as in ``0-3,8``. An instance of several `ranks` has `slabs` on each
    of them, and divides its processors among them. `device` is "cpu", or "cuda:N" for the GPU that
    NVML numbers N; such a one has `runtime_slabs` more, for what is neither weights nor KV. Packed
    weights are kept in the folder `images`, if that is one. Master images may be `encoded`."""

    version: int
    instance: int
    cpus: str
    slabs: int
    slab_bytes: int
    host_bytes: int
    models: list[WorkerModel]
    ranks: int = 1
    device: str = "cpu"
    runtime_slabs: int = 0
    images: str = ""
    encoded: bool = False


class AddSequence(msgspec.Struct, frozen=True, tag=True):
    """Make a request known to the worker, with all it needs to compute it."""

    sequence: SequenceSpec


class AddModel(msgspec.Struct, frozen=True, tag=True):
    """Another model that may be built, or another one of a name that was dropped."""

    model: WorkerModel


class PutAdapters(msgspec.Struct, frozen=True, tag=True):
    """A model has these adapters from now on, and its places `slots` are written anew: in the
    master image, too, if `image`. The answer has the same number. Workers that come later, and
    engines that are built later, know it by `AddModel`, which goes before."""

    number: int
    model: str
    adapters: tuple[AdapterPlace, ...]
    slots: tuple[int, ...]
    image: bool = False


class Verify(msgspec.Struct, frozen=True, tag=True):
    """Compare all weights on the device with their master images, after what was ordered before;
    the answer has the same number."""

    number: int


class PrepareGuide(msgspec.Struct, frozen=True, tag=True):
    """Compile the guide of a request's body, during whatever is computed; the answer has the same
    number."""

    number: int
    model: str
    body: bytes


class ReportSlabs(msgspec.Struct, frozen=True, tag=True):
    """Report which slab of the pool is whose, during whatever is computed. Asked again before it is
    answered, it is answered once."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the worker after what was ordered before."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame up: the worker is ready for commands, its pool holds `slabs` slabs."""

    instance: int
    pid: int
    slabs: int


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Tokens of one step of one model."""

    instance: int
    model: str
    produced: list[Produced]


class PoolReport(msgspec.Struct, frozen=True, tag=True):
    """Slabs by owner (``weights:<model>``, ``kv:<model>``, ``free``) and the most ever mapped.

    `kv` is the KV of each shape, which is known by its block size in bytes, and `kv_peak_bytes` the
    most that all shapes together took, as far as was seen between jobs.
    """

    instance: int
    slabs: dict[str, int]
    high_water_slabs: int
    kv: dict[int, KvBytes]
    kv_peak_bytes: int


class Verified(msgspec.Struct, frozen=True, tag=True):
    """What `Verify` found, for every engine that is built."""

    instance: int
    number: int
    models: dict[str, Verdict]


class AdaptersPut(msgspec.Struct, frozen=True, tag=True):
    """What came of `PutAdapters`: done, or why not."""

    instance: int
    number: int
    refused: str | None = None


class GuidePrepared(msgspec.Struct, frozen=True, tag=True):
    """A guide was compiled, or why it cannot be."""

    instance: int
    number: int
    refused: str | None = None


class SlabsReported(msgspec.Struct, frozen=True, tag=True):
    """The pool as it is now: of the first rank, where there are several; the others are alike."""

    instance: int
    slabs: SlabMap


Down: TypeAlias = (
    Configure
    | AddModel
    | AddSequence
    | PrepareGuide
    | PutAdapters
    | Verify
    | ReportSlabs
    | Shutdown
    | v.BuildModel
    | v.StoreWeights
    | v.LoadModel
    | v.PrefetchModel
    | v.EvictModel
    | v.DropModel
    | v.RunPrefill
    | v.RunTurn
    | v.Preempt
    | v.MoveKv
    | v.TrimKv
    | v.Release
)
Up: TypeAlias = (
    Hello
    | Tokens
    | PoolReport
    | Verified
    | AdaptersPut
    | GuidePrepared
    | SlabsReported
    | v.ModelBuilt
    | v.ModelFailed
    | v.ModelDropped
    | v.WeightsStored
    | v.ModelLoaded
    | v.RequestFailed
    | v.PrefillDone
    | v.PrefillDeferred
    | v.TurnEnded
    | v.KvMoved
)


def decoder_of_commands() -> Decoder[Down]:
    """For a worker."""
    return Decoder(msgspec.msgpack.Decoder(Down))


def decoder_of_reports() -> Decoder[Up]:
    """For the daemon."""
    return Decoder(msgspec.msgpack.Decoder(Up))
