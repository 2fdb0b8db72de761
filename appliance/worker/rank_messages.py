"""What the ranks of a tensor-parallel instance say to each other, and how they share what it has.

Rank 0, the *leader*, sends orders over a socket pair, in `wire`'s frames; the others, its
*followers*, answer those that it waits for. See `appliance.worker.tensor_parallel`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

from appliance import framing
from appliance.engines.protocol import Engine, KvExhausted, Produced, SequenceSpec, Verdict
from appliance.memory.arena import PoolExhausted
from appliance.platform.cpus import deal_cpus, read_cpus, show_cpus
from appliance.platform.numa import by_node, read_nodes
from appliance.vocabulary import KvShape, ModelName, RequestId
from appliance.worker import frames

READ_BYTES: Final = 1 << 16

REFUSALS: Final = (KvExhausted, PoolExhausted, ValueError)
"""Answers of an engine, not failures. They follow from the orders so far: all ranks give them."""

Build = Callable[[frames.WorkerModel], Engine]


# --- seats ---------------------------------------------------------------------------------------


class Seat(msgspec.Struct, frozen=True):
    """Which rank a process is, of how many; the processors it binds, and the file by which the
    ranks find each other. `crowded`: there are more ranks than processors."""

    rank: int
    ranks: int
    cpus: str
    store: str = ""
    crowded: bool = False


def seats(configuration: frames.Configure, store: str) -> list[Seat]:
    """The seats of an instance, the leader's first. Its processors are divided among them."""
    if configuration.ranks == 1:
        return [Seat(0, 1, configuration.cpus)]
    cpus = by_node(read_cpus(configuration.cpus), read_nodes())
    crowded = len(cpus) < configuration.ranks
    return [
        Seat(rank, configuration.ranks, show_cpus(share), store, crowded)
        for rank, share in enumerate(deal_cpus(cpus, configuration.ranks))
    ]


# --- orders and answers --------------------------------------------------------------------------


class Invitation(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a follower: what the instance is, and its seat in it."""

    configuration: frames.Configure
    seat: Seat


class BuildEngine(msgspec.Struct, frozen=True, tag=True):
    model: frames.WorkerModel


class StoreWeights(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    host_offsets: list[int]
    fill: bool


class BeginLoad(msgspec.Struct, frozen=True, tag=True):
    model: ModelName


class EvictWeights(msgspec.Struct, frozen=True, tag=True):
    model: ModelName


class Add(msgspec.Struct, frozen=True, tag=True):
    sequence: SequenceSpec


class Forget(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    request: RequestId


class Prefill(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    request: RequestId
    kv_slabs: int
    drawn: int
    """Checksum of the tokens drawn before, of all models: a rank with another one is wrong."""


class BeginPrefill(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    request: RequestId
    kv_slabs: int


class Step(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    model: ModelName
    requests: list[RequestId] | None
    """None for the same list as in the last step of the model."""
    kv_slabs: int
    drawn: int
    prompts: tuple[RequestId, ...] = ()
    chunk_tokens: int = 0


class SwapOut(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    request: RequestId
    host_offsets: list[int]


class SwapIn(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    request: RequestId
    host_offsets: list[int]
    kv_slabs: int


class Trim(msgspec.Struct, frozen=True, tag=True):
    model: ModelName
    keep_slabs: int | None


class Verify(msgspec.Struct, frozen=True, tag=True):
    model: ModelName


class Retire(msgspec.Struct, frozen=True, tag=True):
    model: ModelName


Call: TypeAlias = (
    BuildEngine
    | StoreWeights
    | BeginLoad
    | EvictWeights
    | Add
    | Forget
    | Prefill
    | BeginPrefill
    | Step
    | SwapOut
    | SwapIn
    | Trim
    | Verify
    | Retire
)


class Order(msgspec.Struct, frozen=True, tag=True):
    """What every rank does next; numbered from 1."""

    number: int
    call: Call


class Built(msgspec.Struct, frozen=True, tag=True):
    """The engine is built; sizes are of this rank."""

    number: int
    weight_slabs: int
    host_slabs: int
    layout: str
    kv: KvShape


class Done(msgspec.Struct, frozen=True, tag=True):
    """It was carried out, and what it moves has arrived."""

    number: int


class Compared(msgspec.Struct, frozen=True, tag=True):
    """What `Verify` found on this rank."""

    number: int
    verdict: Verdict


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine answered with one of `REFUSALS`; nothing changed."""

    number: int
    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It did not work out, and the rank can go on. `checkpoint`: because of the model's files."""

    number: int
    reason: str
    checkpoint: bool = False


Downward: TypeAlias = Invitation | Order
Answer: TypeAlias = Built | Done | Compared | Refused | Failed


def decoder_of_orders() -> framing.Decoder[Downward]:
    """For a follower."""
    return framing.Decoder(msgspec.msgpack.Decoder(Downward))


def decoder_of_answers() -> framing.Decoder[Answer]:
    """For the leader."""
    return framing.Decoder(msgspec.msgpack.Decoder(Answer))


# --- what each rank has of a whole ---------------------------------------------------------------


def image_slabs(host_offsets: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The rank's slabs of a master image: all ranks have equally many, one after the other."""
    each, rest = divmod(len(host_offsets), ranks)
    if rest:
        raise ValueError(f"{len(host_offsets)} slabs cannot be divided among {ranks} ranks")
    return list(host_offsets[rank * each : (rank + 1) * each])


def block_places(host_offsets: Sequence[int], rank: int, block_bytes: int) -> list[int]:
    """Where the rank's `block_bytes` of each block lie, in places of the whole block's size."""
    return [offset + rank * block_bytes for offset in host_offsets]


def checksum(drawn: int, produced: Iterable[Produced]) -> int:
    """Of the tokens drawn before and of these."""
    for one in produced:
        drawn = zlib.crc32(f"{one.request} {one.token} ".encode(), drawn)
    return drawn
