"""A scenario: a TOML file with hardware, models, requests, SLO targets and the policies to compare.

The tables and keys are the structs below, one for each table; `docs/lab.md` lists them. A file is
read strictly: a key that is not here, or a value of another kind, is an error with its line. Paths
are relative to the file.
"""

from __future__ import annotations

import heapq
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from appliance.config.toml_lines import KeyPath, LineMap, dotted
from appliance.errors import CeilingsError, LabError
from appliance.lab.daemon_config import is_daemon_config, scenario_of
from appliance.lab.data_sheet import ModelSizes, estimated, known_sizes
from appliance.lab.experiments.run import Contender, Setting, System
from appliance.lab.fleet.table import FleetTable
from appliance.lab.hardware import Box, GpuSpec, ModelProfile, gpu, profile, profiled
from appliance.lab.noise import EXACT, Deviation
from appliance.lab.sim.simulator import Start
from appliance.lab.workload import Arrival, Lengths, backlog, drawn, read_trace, with_keys
from appliance.memory.ceilings.stored import read_ceilings
from appliance.units import Bytes, Delay, Seconds
from appliance.vocabulary import ModelName, ModelSpec, RequestClass, Slo

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


HOST_GPUS, HOST_GBPS = 8, 614.4
"""GPUs of a host, and 10^9 bytes a second of its memory: two sockets with eight channels of
DDR5-4800 each (data sheet of the Xeon Platinum 8480+, which Prism's nodes of eight GPUs have, §7.2;
Aegaeon's, §7.1, have DDR5 and processors of the same generation)."""


class ScenarioTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Hardware(ScenarioTable, frozen=True, kw_only=True):
    """``[hardware]``: `count` GPUs of the built-in table, `tp` of them to an instance."""

    gpu: str
    count: Count
    tp: Count = 1
    host_cache: Bytes
    vram: Bytes | None = None
    """Of a GPU; the table's if it is not given."""
    pcie_gbps: Positive | None = None
    """In each direction, 10^9 bytes a second; the table's if it is not given."""
    efficiency: Share | None = None
    """Share of that which a copy reaches."""
    gpus_per_root: Count = 1
    """GPUs that share a root of the PCIe tree, and with it"""
    root_gbps: Positive | None = None
    """so many 10^9 bytes a second in each direction; as much as one GPU has if it is not given."""
    relay: bool = False
    """Whether loads of weights go through idle GPUs of the same host, too, and from those over
    NVLink. No worker does that: this is what a relay would be worth."""
    nvlink_gbps: Positive | None = None
    """Of a GPU's NVLink in each direction, 10^9 bytes a second; the table's if it is not given."""
    disk_gbps: Positive | None = None
    kv_spill: Bytes | None = None
    """Room for KV on disk."""
    memory_share: Share = 0.9
    """Of a GPU's memory, what weights and KV get."""
    slab: Bytes = Bytes(64 << 20)
    block_tokens: Count = 16
    map_seconds_per_slab: Delay = Delay(31.5e-6)
    """Of an instance's own time, for each slab of a GPU that is mapped or unmapped. On an A100
    cuMemMap and cuMemSetAccess take 37.4 us together, cuMemUnmap 25.6 us (`benchmarks/bench_vmm` of
    kvcached, Prism's manager of KV; pages of 2 MB); this is the mean. They are calls for each slab,
    whatever its size."""
    order_seconds: Delay = Delay(1.3e-3)
    """From what happened to the work that follows from it: the daemon hears and decides, the worker
    hears and begins. As journals of our daemon say, on two cores without a GPU
    (`benchmarks/results/2026-11-22-cpu-fidelity.json`, policy `appliance`)."""
    step_overhead: Delay = Delay(0.3e-3)
    """Of a processor's time, for each step that an engine takes, on top of what the profile says.
    The built-in profiles are of whole steps of vLLM without CUDA graphs: its scheduling, sampling
    and launching are in them, and this is what our worker adds to a step of vLLM's (0.3 to 0.4 ms:
    `benchmarks/RESULTS.md`, "What the pool costs a model that is alone"). A scenario whose profiles
    are of kernels alone has to give what vLLM takes, too: 2.2 ms more, the median of nine pairs of
    model and GPU that were measured both ways (`2026-11-24-lab-calibration.json`)."""
    host_gbps: Positive | None = None
    """Of the hosts' memory, 10^9 bytes a second for the copies of all GPUs in both directions
    together; `HOST_GBPS` for every `HOST_GPUS` GPUs, or fewer, if it is not given."""
    data_sheet: bool = False
    """Whether times of models that were not measured on this hardware are estimated from data
    sheets (`appliance.lab.data_sheet`)."""
    ceilings: str = ""
    """A file of `appliance doctor --ceilings`, of any machine, for those of `pcie_gbps`,
    `efficiency`, `disk_gbps` and `map_seconds_per_slab` that are not given."""

    def box(self) -> Box:
        """Raises `LabError` for what is not in the table."""
        if self.count % self.tp:
            raise LabError(f"hardware.count: {self.count} GPUs are no instances of {self.tp}")
        if self.gpus_per_root % self.tp and self.tp % self.gpus_per_root:
            raise LabError(
                f"hardware.gpus_per_root: instances of {self.tp} GPUs are cut by roots of"
                f" {self.gpus_per_root}"
            )
        own = self._gpu()
        if self.relay and not own.nvlink_bytes_per_second:
            raise LabError(
                f"hardware.relay: the {self.gpu} has no NVLink to relay over; give"
                " hardware.nvlink_gbps, or leave hardware.relay out"
            )
        return Box(
            gpu=own,
            relay=self.relay,
            gpus_per_host=HOST_GPUS,
            instances=self.count // self.tp,
            tp=self.tp,
            gpus_per_root=self.gpus_per_root,
            root_pcie_bytes_per_second=self.root_gbps and self.root_gbps * 1e9,
            host_bytes=self.host_cache,
            disk_bytes=self.kv_spill or 0,
            host_bytes_per_second=1e9 * (self.host_gbps or HOST_GBPS * -(-self.count // HOST_GPUS)),
            order_seconds=float(self.order_seconds),
            pool_share=self.memory_share,
            slab_bytes=self.slab,
            block_tokens=self.block_tokens,
        )

    def _gpu(self) -> GpuSpec:
        known = gpu(self.gpu)
        if not self.relay:
            # Nothing goes over it, and what a committed cell was played on is unchanged.
            known = msgspec.structs.replace(known, nvlink_bytes_per_second=0.0)
        changed = {
            "vram_bytes": self.vram,
            "pcie_bytes_per_second": self.pcie_gbps and self.pcie_gbps * 1e9,
            "efficiency": self.efficiency,
            "nvlink_bytes_per_second": self.relay and self.nvlink_gbps and self.nvlink_gbps * 1e9,
            "disk_bytes_per_second": self.disk_gbps and self.disk_gbps * 1e9,
            "map_seconds_per_slab": float(self.map_seconds_per_slab),
        }
        return msgspec.structs.replace(known, **{k: v for k, v in changed.items() if v})


class SloTarget(ScenarioTable, frozen=True, kw_only=True):
    """An SLO: ``slo = { ttft = "10s", tbt = "100ms", gap = "1s" }``."""

    ttft: Seconds
    tbt: Seconds
    gap: Delay = Delay(0)
    """The longest time between two tokens; none is promised if it is not given."""


class SloTargets(SloTarget, frozen=True, kw_only=True):
    """``[slo]``: of every model that has none of its own. `scale` multiplies all there are."""

    batch: SloTarget | None = None
    """Of requests of the class batch."""
    scale: Positive = 1.0
    ttft_scale: Positive = 1.0
    tbt_scale: Positive = 1.0
    """These scale TTFT and TBT alone, besides."""

    def slo(self, target: SloTarget | None) -> Slo:
        """The SLO of a model or class, scaled; these targets where it has none of its own. Raises
        `LabError` for a gap that is shorter than the time between tokens."""
        own = target or self
        slo = Slo(
            ttft_seconds=own.ttft * self.scale * self.ttft_scale,
            tbt_seconds=own.tbt * self.scale * self.tbt_scale,
            gap_seconds=own.gap * self.scale,
        )
        if slo.gap_below_tbt:
            raise LabError(
                f"slo.gap: {slo.gap_seconds:g} s are less than the {slo.tbt_seconds:g} s between"
                " tokens; give slo.gap as much or more, or leave it out"
            )
        return slo


class ModelGroup(ScenarioTable, frozen=True, kw_only=True):
    """``[[models]]``: `count` models, with the profiles of `mix` in turn.

    They are called by `names`, else ``m000``, ``m001`` … through all tables.
    """

    mix: Annotated[tuple[str, ...], Meta(min_length=1)]
    count: Count | None = None
    """One for each of `mix` if it is not given."""
    names: tuple[ModelName, ...] = ()
    context: Count
    """Tokens of prompt and output together."""
    max_batch: Count = 256
    rate: Annotated[float, Meta(ge=0)] | None = None
    """Requests a second of each; that of ``[arrivals]`` if it is not given."""
    lengths: str | None = None
    """Of their requests; those of ``[arrivals]`` if it is not given."""
    batch_rate: Annotated[float, Meta(ge=0)] = 0.0
    """Requests of class batch a second of each, a Poisson process."""
    batch_backlog: Annotated[int, Meta(ge=0)] = 0
    """Requests of class batch of each that come at once,"""
    batch_at: Seconds | None = None
    """at this time; when the warm-up is over if it is not given."""
    slo: SloTarget | None = None
    pinned: bool = False


class RatePhase(ScenarioTable, frozen=True, kw_only=True):
    """``phases = [{ at = "60s", scale = 3.0 }, …]``: from then on so many times the rate."""

    at: Seconds
    scale: Annotated[float, Meta(ge=0)]


class Arrivals(ScenarioTable, frozen=True, kw_only=True):
    """``[arrivals]``: requests drawn at a rate with lengths from a file, or a trace."""

    trace: str | None = None
    """Columns ``arrival_s,model,prompt_tokens,output_tokens[,class][,key]``."""
    rate: Positive | None = None
    """Requests a second of each model."""
    cv: Positive = 1.0
    """Coefficient of variation of the gaps (Gamma distributed; 1 is a Poisson process)."""
    phases: tuple[RatePhase, ...] = ()
    """Of the rate of interactive requests, in the order of time."""
    lengths: str | None = None
    """Columns ``prompt_tokens,output_tokens``; pairs are drawn evenly."""
    prompt_mean: Positive | None = None
    output_mean: Positive | None = None
    """Lengths are scaled to these means; then to these scales."""
    prompt_scale: Positive = 1.0
    output_scale: Positive = 1.0
    rate_scale: Positive = 1.0
    """So many times the rate, or the trace so many times as fast."""
    max_tokens: Count | None = None
    """What clients allow; without, all that the context has room for."""
    keys: Mapping[str, Positive] = {}
    """Names of API keys, and their shares of the requests: ``{ acme = 3, beta = 1 }``. Without
    them, only requests of a trace with a column ``key`` have one."""


class SystemTable(ScenarioTable, frozen=True, kw_only=True):
    """``system = { activation = "2.5s", efficiency = 0.3, prefetch = false }``."""

    activation: Seconds | None = None
    """For which an instance computes nothing at every switch, after the copy."""
    efficiency: Share | None = None
    """Of copies; the hardware's if it is not given."""
    prefetch: bool = True

    def system(self) -> System:
        return System(
            activation_seconds=float(self.activation or 0.0),
            efficiency=self.efficiency,
            prefetch=self.prefetch,
        )


class ScenarioPolicy(ScenarioTable, frozen=True, kw_only=True):
    """``[policies.NAME]``: policies to compare, composed as in ``[policy]`` of the appliance."""

    use: tuple[str, ...] = ()
    """Asked in this order; the installed one of that name if it is not given."""
    decisions: Mapping[str, str] = {}
    """Policies by the name of a hook, asked before."""
    parameters: Mapping[str, Mapping[str, Any]] = {}
    """By policy."""
    system: SystemTable = SystemTable()
    """What switching costs in the policy's own system; without, the same mechanism for all."""


class Deviates(ScenarioTable, frozen=True, kw_only=True):
    """``[deviation]``: how far the truth is from what policies expect (1 is not at all)."""

    prefill: Positive = 1.0
    step: Positive = 1.0
    link: Positive = 1.0
    noise: Annotated[float, Meta(ge=0)] = 0.0
    """Coefficient of variation of each prompt's and each turn's time."""
    learned: bool = False
    """Policies know no profile at first: they learn what things take, as in a daemon."""


class GivenProfile(ModelProfile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[profiles]]``: a model that the built-in table does not have on this hardware."""


class GivenSizes(ModelSizes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[sizes]]``: a model whose times are estimated, if `hardware.data_sheet` allows that."""


class Scenario(ScenarioTable, frozen=True, kw_only=True):
    """The whole file."""

    title: str
    about: str = ""
    duration: Seconds
    warmup: Seconds | None = None
    """Requests that arrive before it is over are served, but not counted."""
    start: datetime | None = None
    """What the clock on the wall shows at the beginning: ``2026-11-27T21:55:00``; the local time of
    UTC if no offset is given. For policies that decide by the time of day."""
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (1,)
    hardware: Hardware
    slo: SloTargets
    models: Annotated[tuple[ModelGroup, ...], Meta(min_length=1)]
    arrivals: Arrivals
    policies: Mapping[str, ScenarioPolicy] = {}
    deviation: Deviates = Deviates()
    fleet: FleetTable | None = None
    """Several boxes; one if it is not given."""
    profiles: tuple[GivenProfile, ...] = ()
    sizes: tuple[GivenSizes, ...] = ()

    @property
    def warmup_seconds(self) -> float:
        return float(self.warmup or 0.0)

    def contender(self, name: str) -> Contender:
        """The policy of this name: a table of the scenario, else an installed one as it ships."""
        table = self.policies.get(name, ScenarioPolicy())
        return Contender(
            name,
            table.use or (name,),
            table.parameters,
            table.decisions,
            system=table.system.system(),
        )

    def setting(self, seed: int, directory: Path) -> Setting:
        """All of a trial but the policy. Raises `LabError` for what cannot be found or made."""
        if self.warmup_seconds >= self.duration:
            raise LabError(f"warmup: nothing is left of {self.duration:g} s to measure")
        box = self.hardware.box()
        specs: list[ModelSpec] = []
        profiles: dict[ModelName, ModelProfile] = {}
        streams: list[list[Arrival]] = []
        for group in self.models:
            names = self._names(group, len(specs))
            for index, name in enumerate(names):
                kind = group.mix[index % len(group.mix)]
                found = self._profile(kind)
                if found.tp != self.hardware.tp:
                    raise LabError(f"profiles: {kind} is of {found.tp} GPUs, not {box.tp}")
                profiles[name] = found.with_step_overhead(self.hardware.step_overhead)
                specs.append(self._spec(group, name, found))
            streams += self._drawn(group, names, seed, directory)
        if len(profiles) < len(specs):
            raise LabError("models.names: a name is there twice")
        if self.arrivals.trace is not None:
            streams.append(self._traced(profiles, directory))
        return Setting(
            models=specs,
            box=box,
            profiles=profiles,
            arrivals=[
                self._as_asked(arrival)
                for arrival in with_keys(_merged(streams), self.arrivals.keys, seed)
            ],
            seconds=float(self.duration),
            deviation=self._deviation(seed),
            start=self._start(),
            informed=not self.deviation.learned,
        )

    def _start(self) -> Start | None:
        if self.start is None:
            return None
        shown = self.start if self.start.tzinfo else self.start.replace(tzinfo=UTC)
        offset = shown.utcoffset()
        return Start(
            unix_seconds=shown.timestamp(),
            utc_offset_seconds=0 if offset is None else int(offset.total_seconds()),
        )

    def _profile(self, kind: str) -> ModelProfile:
        """As given, as measured, or as estimated if that is asked for."""
        for given in self.profiles:
            if given.name == kind:
                return given
        hardware = self.hardware
        if (kind, hardware.gpu, hardware.tp) in profiled() or not hardware.data_sheet:
            return profile(kind, hardware.gpu, hardware.tp)
        sizes = next((one for one in self.sizes if one.name == kind), None)
        return estimated(sizes or known_sizes(kind), gpu(hardware.gpu), hardware.tp)

    def _names(self, group: ModelGroup, before: int) -> Sequence[ModelName]:
        count = group.count or len(group.names) or len(group.mix)
        if group.names and len(group.names) != count:
            raise LabError(f"models.names: {len(group.names)} names for {count} models")
        return group.names or [f"m{before + index:03}" for index in range(count)]

    def _spec(self, group: ModelGroup, name: ModelName, found: ModelProfile) -> ModelSpec:
        return ModelSpec(
            name=name,
            weight_bytes=found.weight_bytes,
            max_context_tokens=group.context,
            max_batch=group.max_batch,
            slo=self.slo.slo(group.slo),
            pinned=group.pinned,
        )

    def _drawn(
        self, group: ModelGroup, names: Sequence[ModelName], seed: int, directory: Path
    ) -> list[list[Arrival]]:
        """Interactive and batch requests that a rate or a number is given for."""
        asked = self.arrivals
        rate = asked.rate if group.rate is None else group.rate
        if asked.trace is not None:
            rate = None
        if group.batch_rate or group.batch_backlog:
            rate = rate or 0.0
        elif asked.trace is not None:
            return []
        if rate is None:
            raise LabError("arrivals: give a trace, or a rate and lengths")
        lengths = self._lengths(group, directory)
        phases = [(float(phase.at), phase.scale) for phase in asked.phases]
        if phases != sorted(phases):
            raise LabError("arrivals.phases: give them in the order of time")
        rates, batch_rates = (
            dict.fromkeys(names, per_model * asked.rate_scale)
            for per_model in (rate, group.batch_rate)
        )
        end, at = float(self.duration), self.warmup_seconds
        if group.batch_at is not None:
            at = float(group.batch_at)
        return [
            drawn(rates, lengths, end, seed, asked.cv, phases=phases),
            drawn(batch_rates, lengths, end, seed, request_class=RequestClass.BATCH),
            backlog(names, group.batch_backlog if at < end else 0, lengths, at, seed),
        ]

    def _lengths(self, group: ModelGroup, directory: Path) -> Lengths:
        asked = self.arrivals
        if group.lengths is not None:
            lengths = Lengths.read(_found(directory, group.lengths, "models.lengths"))
        elif asked.lengths is not None:
            lengths = Lengths.read(_found(directory, asked.lengths, "arrivals.lengths"))
        else:
            raise LabError("arrivals: give a trace, or a rate and lengths")
        lengths = lengths.with_means(asked.prompt_mean, asked.output_mean)
        return lengths.scaled(asked.prompt_scale, asked.output_scale).within(group.context)

    def _traced(self, known: Mapping[ModelName, object], directory: Path) -> list[Arrival]:
        asked = self.arrivals
        if asked.rate is not None or asked.lengths is not None or asked.phases:
            raise LabError("arrivals: give a trace, or a rate and lengths, not both")
        path = _found(directory, asked.trace or "", "arrivals.trace")
        arrivals = read_trace(path, asked.rate_scale)
        strange = sorted({arrival.model for arrival in arrivals}.difference(known))
        if strange:
            raise LabError(f"{path}: no model {', '.join(strange)} in the scenario")
        return [
            msgspec.structs.replace(
                arrival,
                prompt_tokens=max(1, round(arrival.prompt_tokens * asked.prompt_scale)),
                output_tokens=max(1, round(arrival.output_tokens * asked.output_scale)),
            )
            for arrival in arrivals
            if arrival.seconds < self.duration
        ]

    def _as_asked(self, arrival: Arrival) -> Arrival:
        slo = None
        if arrival.request_class is RequestClass.BATCH and self.slo.batch is not None:
            slo = self.slo.slo(self.slo.batch)
        if slo is None and self.arrivals.max_tokens is None:
            return arrival
        return msgspec.structs.replace(arrival, slo=slo, max_tokens=self.arrivals.max_tokens)

    def _deviation(self, seed: int) -> Deviation:
        deviates = self.deviation
        if deviates == Deviates():
            return EXACT
        return Deviation(
            prefill_factor=deviates.prefill,
            step_factor=deviates.step,
            link_factor=deviates.link,
            noise=deviates.noise,
            seed=seed,
        )


def read(path: Path, changes: Mapping[str, str] | None = None) -> Scenario:
    """The scenario of a file, or of a daemon's configuration, with `changes`: values as TOML by
    dotted key (``hardware.count``, ``models.0.count``). Raises `LabError` naming file, line and
    key of what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LabError(f"{path}: {error}") from None
    if is_daemon_config(document):
        document = scenario_of(path)
    for key, value in (changes or {}).items():
        _change(document, key, value)
    _fill_from_ceilings(document, path.parent)
    try:
        return msgspec.convert(document, Scenario, dec_hook=_read_unit)
    except msgspec.ValidationError as error:
        reason, place = _where(str(error))
        line = LineMap(text).line(place)
        raise LabError(f"{path}:{line}: {dotted(place) or 'the file'}: {reason}") from None


def _fill_from_ceilings(document: dict[str, Any], directory: Path) -> None:
    """Give keys of ``[hardware]`` that are not there what was measured. Raises `LabError`."""
    hardware = document.get("hardware")
    name = hardware.get("ceilings") if isinstance(hardware, dict) else None
    if not isinstance(hardware, dict) or not isinstance(name, str) or not name:
        return
    try:
        found = read_ceilings(directory / name)
    except CeilingsError as error:
        raise LabError(f"hardware.ceilings: {error}") from None
    if not found.gpus:
        raise LabError(
            f"hardware.ceilings: {name} has no GPU; measure on a machine that has one, with "
            'devices.kind = "cuda"'
        )
    slowest = min((gpu.memory for gpu in found.gpus), key=lambda memory: memory.into_pool)
    mapping = (slowest.map_slab_seconds + slowest.unmap_slab_seconds) / 2
    measured: dict[str, Any] = {"map_seconds_per_slab": f"{mapping:.9f}s" if mapping else "0s"}
    if "pcie_gbps" not in hardware:
        # What copies reach, not what the link could do: all of it.
        measured |= {"pcie_gbps": slowest.into_pool / 1e9, "efficiency": 1.0}
    if found.disks:
        measured["disk_gbps"] = min(disk.read for disk in found.disks) / 1e9
    for key, value in measured.items():
        hardware.setdefault(key, value)


def _change(document: dict[str, Any], key: str, text: str) -> None:
    """Set what a dotted key names; tables that are missing are made."""
    *path, last = key.split(".")
    table: Any = document
    try:
        for part in path:
            table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
        if isinstance(table, list):
            table[int(last)] = _value(text)
        else:
            table[last] = _value(text)
    except (ValueError, IndexError, TypeError, AttributeError):
        raise LabError(f"--set {key}: there is no such key") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _read_unit(kind: type, value: object) -> object:
    return kind.read(value)  # type: ignore[attr-defined]


_PLACE = re.compile(r"(?P<reason>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)


def _where(message: str) -> tuple[str, KeyPath]:
    """The reason of a validation error, and the key at fault."""
    match = _PLACE.fullmatch(message)
    assert match is not None, "everything matches"
    parts: list[str | int] = []
    for field, index in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", match["path"] or ""):
        parts.append(field or (int(index) if index.isdigit() else index))
    reason = match["reason"]
    return reason[:1].lower() + reason[1:], tuple(parts)


def _found(directory: Path, name: str, key: str) -> Path:
    path = directory / name
    if not path.is_file():
        raise LabError(f"{key}: there is no file {path}")
    return path


def _merged(streams: Sequence[Sequence[Arrival]]) -> Iterator[Arrival]:
    return heapq.merge(*streams, key=lambda arrival: (arrival.seconds, arrival.model))
