"""What the lab knows of hardware: GPUs, and how long a model's steps take on them.

The built-in tables are in this package: ``gpus.csv`` (data sheets) and ``profiles.csv`` (written
by ``appliance lab calibrate``; benchmarks/RESULTS.md has the command line).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.errors import LabError
from appliance.scheduling.cost_model import StepTimes
from appliance.vocabulary import KvShape, Word

EFFICIENCY = 0.625
"""Share of the link's rate that a load of weights reaches (Aegaeon, A.2: beta of Eq. 4)."""

MIXED_STEP_KV_FACTOR = 1.3
"""How much longer decoding reads KV in a step that computes prompts, too. vLLM has one call of a
prompts' kernel for all rows then; it lacks what makes decoding fast alone, split KV and packed
heads (vLLM's pull request 58013). 1.26 and 1.32 times are the least that was measured (attention
of mixed batches, vllm-xpu-kernels' pull request 485)."""


class GpuSpec(Word, frozen=True, kw_only=True):
    """One GPU, its link to the host, and the disk behind that."""

    name: str
    vram_bytes: int
    pcie_bytes_per_second: float
    """In each direction."""
    memory_bytes_per_second: float = math.inf
    """At which it reads its own memory."""
    bf16_flops: float = 0.0
    """Operations a second of dense products in bfloat16, at the peak."""
    nvlink_bytes_per_second: float = 0.0
    """In each direction, to all of its peers together; 0 without NVLink."""
    efficiency: float = EFFICIENCY
    mapping_seconds: float = 0.0
    """What a load takes of the instance's own time before the copy begins, whatever its size, as a
    journal tells it: its slabs are mapped, those of who had to go are unmapped, and nothing is
    computed meanwhile."""
    map_seconds_per_slab: float = 0.0
    """What each slab of a GPU that is mapped or unmapped takes of that time, for weights or KV."""
    disk_bytes_per_second: float = 5e9
    """At which weights without an image in the host tier are read."""

    @property
    def link_bytes_per_second(self) -> float:
        """What a copy reaches."""
        return self.pcie_bytes_per_second * self.efficiency

    @property
    def peer_bytes_per_second(self) -> float:
        """What copies from its peers reach together."""
        return self.nvlink_bytes_per_second * self.efficiency

    def switch_seconds(self, weight_bytes: int) -> float:
        """The time a load takes that has the link for itself (Aegaeon Eq. 4, corrected)."""
        return self.mapping_seconds + weight_bytes / self.link_bytes_per_second


class Measured(Word, frozen=True, kw_only=True):
    """How far measurements went: the largest prompt, batch, and KV of a batch."""

    prompt_tokens: int
    requests: int
    kv_tokens: int


class ModelProfile(Word, frozen=True, kw_only=True):
    """A model on one kind of instance: sizes of the whole model, times of the instance.

    With ``tp`` GPUs each holds its share of the weights and of every block.
    """

    name: str
    weight_bytes: int
    layers: int
    hidden: int
    kv_bytes_per_token: int
    tp: int = 1
    prefill_base_seconds: float
    prefill_seconds_per_token: float
    prefill_seconds_per_token2: float
    prefill_knee_tokens: int = 0
    prefill_seconds_per_token_past_knee: float = 0.0
    """On top of `prefill_seconds_per_token`: below, the weights take longer to read."""
    step_base_seconds: float
    step_seconds_per_kv_token: float
    step_seconds_per_sequence: float
    step_knee_sequences: int = 0
    step_seconds_per_sequence_past_knee: float = 0.0
    """On top of `step_seconds_per_sequence`."""
    step_tile_sequences: Annotated[int, Meta(ge=1)] = 1
    step_seconds_per_tile: float = 0.0
    """Of every tile of sequences that has begun: matrix products compute whole tiles."""
    mixed_step_kv_factor: float = MIXED_STEP_KV_FACTOR
    """Of `step_seconds_per_kv_token` in a step that computes prompts, too."""
    shape: KvShape | None = None
    """Its blocks as an engine reported them; else as small as they can be."""
    measured: Measured | None = None
    """What the times were fitted to; None if that is not known."""

    @property
    def shard_bytes(self) -> int:
        """Weights on each GPU."""
        return -(-self.weight_bytes // self.tp)

    def prefill_seconds(self, tokens: int) -> float:
        """Computing a prompt of `tokens` tokens."""
        return (
            self.prefill_base_seconds
            + self.prefill_seconds_per_token * tokens
            + self.prefill_seconds_per_token_past_knee * max(0, tokens - self.prefill_knee_tokens)
            + self.prefill_seconds_per_token2 * tokens * tokens
        )

    def step_seconds(self, batch: float, kv_tokens: float) -> float:
        """One decoding step of `batch` requests that have `kv_tokens` tokens of KV together."""
        return (
            self.step_base_seconds
            + self.step_seconds_per_kv_token * kv_tokens
            + self.step_seconds_per_sequence * batch
            + self.step_seconds_per_sequence_past_knee * max(0, batch - self.step_knee_sequences)
            + self.step_seconds_per_tile * -(-batch // self.step_tile_sequences)
        )

    def mixed_step_seconds(
        self, batch: int, kv_tokens: int, chunks: Iterable[tuple[int, int]]
    ) -> float:
        """A step that computes chunks of prompts, too: `(tokens, history)` of each, where `history`
        tokens of the same prompt were computed before, which attention reads again.

        The weights are read once for all of them; KV is read more slowly than by a step that only
        decodes. With neither a batch nor history this is the time of a prompt.
        """
        if batch:
            fixed = max(0.0, self.prefill_base_seconds - self.step_base_seconds)
            fixed += self.step_seconds(batch, self.mixed_step_kv_factor * kv_tokens)
        else:
            fixed = self.prefill_base_seconds
        rows, attention = 0, 0
        for tokens, history in chunks:
            rows += tokens
            attention += tokens * (tokens + 2 * history)
        past = max(0, rows - self.prefill_knee_tokens)
        return (
            fixed
            + self.prefill_seconds_per_token * rows
            + self.prefill_seconds_per_token_past_knee * past
            + self.prefill_seconds_per_token2 * attention
        )

    def step_growth_seconds(self, batch: int, chunk_tokens: int = 0) -> float:
        """By how much each step of the same batch is longer than the one before, where each
        computes the next `chunk_tokens` tokens of the same prompt."""
        attention = 2 * self.prefill_seconds_per_token2 * chunk_tokens * chunk_tokens
        factor = self.mixed_step_kv_factor if chunk_tokens else 1.0
        return self.step_seconds_per_kv_token * batch * factor + attention

    def with_step_overhead(self, seconds: float) -> ModelProfile:
        """The same with so much more for each step: one that decodes, one that computes prompts,
        or one that does both."""
        return msgspec.structs.replace(
            self,
            prefill_base_seconds=self.prefill_base_seconds + seconds,
            step_base_seconds=self.step_base_seconds + seconds,
        )

    def step_times(self) -> StepTimes:
        """The same formulas in the words of the policies' estimates."""
        return StepTimes(
            prefill_base=self.prefill_base_seconds,
            prefill_per_token=self.prefill_seconds_per_token,
            prefill_per_token_squared=self.prefill_seconds_per_token2,
            prefill_knee_tokens=self.prefill_knee_tokens,
            prefill_per_token_past_knee=self.prefill_seconds_per_token_past_knee,
            step_base=self.step_base_seconds,
            step_per_kv_token=self.step_seconds_per_kv_token,
            step_per_request=self.step_seconds_per_sequence,
            step_knee_requests=self.step_knee_sequences,
            step_per_request_past_knee=self.step_seconds_per_sequence_past_knee,
            step_tile_requests=self.step_tile_sequences,
            step_per_tile=self.step_seconds_per_tile,
        )

    def weight_slabs(self, slab_bytes: int) -> int:
        """Slabs of the weights on each GPU."""
        return -(-self.shard_bytes // slab_bytes)

    def host_slabs(self, slab_bytes: int) -> int:
        """Slabs of the master image, for all GPUs of an instance."""
        return self.tp * self.weight_slabs(slab_bytes)

    def kv_shape(self, slab_bytes: int, block_tokens: int) -> KvShape:
        """Blocks of all GPUs together, in the smallest groups of slabs of one GPU that hold one."""
        if self.shape is not None:
            return self.shape
        block_bytes = self.kv_bytes_per_token * block_tokens
        shard_bytes = -(-block_bytes // self.tp)
        group_slabs = -(-shard_bytes // slab_bytes)
        return KvShape(
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            group_blocks=group_slabs * slab_bytes // shard_bytes,
            group_slabs=group_slabs,
        )


class Box(Word, frozen=True, kw_only=True):
    """The hardware of a run: so many instances, each of `tp` GPUs, and the host they share."""

    gpu: GpuSpec
    instances: int
    tp: int = 1
    host_bytes: int
    host_bytes_per_second: float = math.inf
    """Of the host's memory, for the copies of all GPUs in both directions together."""
    disk_bytes: int = 0
    """Room for KV on disk, at the rate of `gpu.disk_bytes_per_second`."""
    pool_share: float = 0.9
    """Of a GPU's memory, what weights and KV get (Aegaeon leaves about 10 % to libraries, §5.2)."""
    slab_bytes: int = 64 << 20
    block_tokens: int = 16
    gpus_per_root: int = 1
    """GPUs that share a root of the PCIe tree: whole instances, or an instance has whole roots."""
    root_pcie_bytes_per_second: float | None = None
    """Of a root, in each direction; None for as much as one GPU has."""
    relay: bool = False
    """Whether loads go through idle peers, too, over NVLink."""
    gpus_per_host: int = 8
    """GPUs that reach each other over NVLink."""
    activation_seconds: float = 0.0
    """For which an instance computes nothing at a switch, after the copy: what a system needs to
    start an engine. None where engines stay ready."""
    interference_seconds: float = 0.0
    """By how much longer a prompt takes when its weights are still to come: where one processor
    computes and copies, the two are in each other's way."""
    order_seconds: float = 0.0
    """From what happened to the work that follows from it: the daemon hears of it and decides, the
    worker hears that and begins."""
    report_seconds: float = math.inf
    """The daemon hears of tokens at least so often, or at each step that takes longer. A worker
    reports every step; the lab, to be fast, only what changes something."""

    @property
    def root_bytes_per_second(self) -> float:
        """What copies of all GPUs under a root reach together, in each direction."""
        rate = self.root_pcie_bytes_per_second or self.gpu.pcie_bytes_per_second
        return rate * self.gpu.efficiency

    @property
    def slabs(self) -> int:
        """Slabs of the pool of each GPU."""
        return int(self.gpu.vram_bytes * self.pool_share) // self.slab_bytes


def gpu(name: str) -> GpuSpec:
    """A GPU of the built-in table. Raises `LabError` if it is not there."""
    known = _gpus()
    if name not in known:
        raise LabError(f"no GPU {name!r} is known; there are: {', '.join(known)}")
    return known[name]


def gpu_names() -> Collection[str]:
    """Those of the built-in table."""
    return _gpus().keys()


def profile(model: str, gpu_name: str, tp: int = 1) -> ModelProfile:
    """A profile of the built-in table. Raises `LabError` if it was not measured."""
    known = _profiles()
    if (model, gpu_name, tp) not in known:
        there = [f"{m} on {g} tp={t}" for m, g, t in known if model == m or gpu_name == g]
        raise LabError(
            f"no profile of {model} on {gpu_name} with tp={tp}; there are: {'; '.join(there)}"
        )
    return known[model, gpu_name, tp]


def profiled() -> Collection[tuple[str, str, int]]:
    """Model, GPU and tp of each profile of the built-in table."""
    return _profiles().keys()


@cache
def _gpus() -> dict[str, GpuSpec]:
    return {
        row["gpu"]: GpuSpec(
            name=row["gpu"],
            vram_bytes=int(row["vram_bytes"]),
            pcie_bytes_per_second=float(row["pcie_bytes_per_second"]),
            memory_bytes_per_second=float(row["memory_bytes_per_second"]),
            nvlink_bytes_per_second=float(row["nvlink_bytes_per_second"]),
            bf16_flops=float(row["bf16_flops"]),
        )
        for row in _table("gpus.csv")
    }


@cache
def _profiles() -> dict[tuple[str, str, int], ModelProfile]:
    return {
        (row["model"], row["gpu"], int(row["tp"])): profile_of(row)
        for row in _table("profiles.csv")
    }


def profile_of(row: Mapping[str, str]) -> ModelProfile:
    """A row of a table of profiles: fields by name, and those of `Measured` if they are there."""
    measured = None
    if all(row.get(name) for name in Measured.__struct_fields__):
        measured = msgspec.convert(row, Measured, strict=False)
    found = msgspec.convert({**row, "name": row["model"]}, ModelProfile, strict=False)
    return msgspec.structs.replace(found, measured=measured)


def _table(name: str) -> Iterator[dict[str, str]]:
    with (files("appliance.lab") / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)
