"""The configuration: one strict schema, from which sample, documentation and checks all come.

A TOML file becomes a frozen `Config` with resolved units (bytes, seconds, absolute paths), or a
`ConfigError` that lists every problem with its line and its remedy. `appliance config check` and
the daemon read a file with the same `load_config`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from appliance import policies
from appliance.adminsocket import AUTO, AdminSocketError, group_id
from appliance.catalog import CatalogEntry, read_checkpoint
from appliance.dropins import Layers, read_layers
from appliance.errors import CheckpointError, ConfigError, KeysError, PolicyChoiceError, Problem
from appliance.gpus import Gpu, GpusUnknown, list_gpus
from appliance.hookspecs import HOOKS
from appliance.keys import KeyFile
from appliance.logs import LogFormat, LogLevel
from appliance.memory.kvpool import BLOCK_TOKENS, KvGeometry
from appliance.policywords import PolicyChoice
from appliance.purpose import AskedTask, read_purpose
from appliance.remedies import alternatives, nearest
from appliance.tlsfiles import problem_with
from appliance.tomllines import KeyPath, dotted
from appliance.units import Address, Bytes, Memory, Seconds, human, toml

PAGE_BYTES: Final = 4096

Scalar: TypeAlias = str | int | float | bool
S = TypeVar("S", bound="Section")


# --- the schema ----------------------------------------------------------------------------------
# A field's description is its documentation, and `examples` the value it has in the sample file.


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file."""


class Api(Section, kw_only=True):
    """The HTTP server."""

    bind: Annotated[
        Address,
        Meta(description="Address to listen on. Without `keys` it has to be this machine's own."),
    ] = Address("127.0.0.1:11500")
    keys: Annotated[
        str,
        Meta(
            description="File of API keys, relative to this one; `appliance key create` makes it. "
            'With it every client of `bind` needs a key; "" for none.'
        ),
    ] = ""
    open_metrics: Annotated[
        bool, Meta(description="Answer `/metrics` without a key, also when there are keys.")
    ] = False
    max_waiting: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests of one key that wait for their turn when the appliance is full; "
            "one more is answered 429.",
        ),
    ] = 64
    max_wait_seconds: Annotated[
        Seconds,
        Meta(description="Longest that a request waits for the turn of its key; then it gets 429."),
    ] = msgspec.field(default=Seconds(300), name="max_wait")
    tls_certificate: Annotated[
        str,
        Meta(
            description="Certificate with its chain (PEM), relative to this file: serve HTTPS. "
            '"" for HTTP.'
        ),
    ] = ""
    tls_key: Annotated[
        str, Meta(description="Its private key (PEM, no passphrase), relative to this file.")
    ] = ""
    admin_socket: Annotated[
        str,
        Meta(
            description="Unix socket for operators, who need no key there. `auto` is in "
            '`$RUNTIME_DIRECTORY` or `$XDG_RUNTIME_DIR`, if there is one; "" for none.'
        ),
    ] = AUTO
    admin_group: Annotated[
        str,
        Meta(description="Group whose members are operators, beside root and the daemon's user."),
    ] = ""
    keep_alive_seconds: Annotated[
        Seconds,
        Meta(description="Longest silence on an open stream; a comment is sent when it is over."),
    ] = msgspec.field(default=Seconds(5), name="keep_alive")
    max_body_bytes: Annotated[Bytes, Meta(description="Largest request body that is accepted.")] = (
        msgspec.field(default=Bytes(8 << 20), name="max_body")
    )
    max_queue: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests in the appliance at once; one more is answered 429, or waits for "
            "its turn if it has a key.",
        ),
    ] = 1024
    progress_deadline_seconds: Annotated[
        Seconds,
        Meta(description="`/readyz` fails when a request made no progress for this long."),
    ] = msgspec.field(default=Seconds(60), name="progress_deadline")
    drain_seconds: Annotated[
        Seconds,
        Meta(
            description="How long requests that run may go on after the signal to stop (SIGTERM).",
            examples=[Seconds(30)],
        ),
    ] = msgspec.field(default=Seconds(5), name="drain")


class Devices(Section, kw_only=True):
    """What models run on, and the memory they may have there."""

    kind: Annotated[
        Literal["auto", "cuda", "cpu"],
        Meta(description="`cuda` for NVIDIA GPUs, or `auto`: GPUs if there are any, else the CPU."),
    ] = "auto"
    instances: Annotated[
        int,
        Meta(
            ge=1,
            description="Worker processes; each serves every model. On GPUs: one for each.",
            examples=[2],
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            description="Ranks of each instance: a process each, with its shard of every model. "
            "On GPUs: 1.",
        ),
    ] = 1
    memory_bytes: Annotated[
        Memory,
        Meta(
            description="Physical pool of each rank for weights and KV cache. Enforced. On GPUs it "
            'may be a share of their memory, such as "90%".',
            examples=["192MiB"],
        ),
    ] = msgspec.field(name="memory")
    runtime_bytes: Annotated[
        Bytes,
        Meta(
            description="On GPUs: what of `memory` is kept for activations, workspaces and CUDA "
            "graphs of all models together. Enforced."
        ),
    ] = msgspec.field(default=Bytes(4 << 30), name="runtime")
    slab_bytes: Annotated[
        Bytes,
        Meta(description="Unit in which the pool changes hands: a power of two, at least 4KiB."),
    ] = msgspec.field(default=Bytes(2 << 20), name="slab")
    host_cache_bytes: Annotated[
        Bytes,
        Meta(
            description="Host memory for one copy of weights and for swapped-out KV cache. Models "
            "whose weights have no room in it are loaded from disk."
        ),
    ] = msgspec.field(default=Bytes(4 << 30), name="host_cache")
    images: Annotated[
        str,
        Meta(
            description="Folder, of its own, for weights as the CPU computes with them: later "
            "starts read them instead of packing again. It takes as much disk as those weights "
            'again. Relative to this file; "" for none.'
        ),
    ] = ""

    @property
    def cuda(self) -> bool:
        """Whether models run on GPUs; known once the file has been read."""
        return self.kind == "cuda"

    @property
    def runtime_slabs(self) -> int:
        """Slabs of the pool that weights and KV cache never get."""
        return -(-self.runtime_bytes // self.slab_bytes) if self.cuda else 0

    @property
    def slabs(self) -> int:
        """Whole slabs for weights and KV cache in the pool of one rank."""
        return max(0, self.memory_bytes // self.slab_bytes - self.runtime_slabs)


class PolicyTable(Section, kw_only=True):
    """Who decides. `[policy.NAME]` holds the parameters of the policy NAME; see docs/policies.md.

    A policy that is named for one decision is asked for that one only, and before all others.
    """

    use: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="Policies in the order they are asked, for any decision."),
    ] = ("appliance",)
    budget_seconds: Annotated[
        Seconds,
        Meta(description="Longest time that a policy which is not ours may take for an answer."),
    ] = msgspec.field(default=Seconds(0.05), name="budget")
    place: Annotated[
        str, Meta(description="Who says what each instance is for, and which models it may serve.")
    ] = ""
    scale: Annotated[
        str,
        Meta(
            description="Who says how many instances take interactive requests, any, or batch ones."
        ),
    ] = ""
    prefill: Annotated[
        str, Meta(description="Who says where a request is prefilled, or that it is refused.")
    ] = ""
    decode: Annotated[str, Meta(description="Who says where it decodes.")] = ""
    admit: Annotated[str, Meta(description="Who says in which order prompts are served.")] = ""
    phase: Annotated[str, Meta(description="Who says whether a prompt or a turn comes next.")] = ""
    round: Annotated[
        str, Meta(description="Who says which turns a round has, and how long they are.")
    ] = ""
    preempt: Annotated[
        str, Meta(description="Who says how long a turn goes on when more work has come.")
    ] = ""
    batch: Annotated[
        str,
        Meta(
            description="Who says how many requests decode together, and how prompts are chunked."
        ),
    ] = ""
    flow: Annotated[str, Meta(description="Who says which requests go on elsewhere.")] = ""
    evict: Annotated[
        str, Meta(description="Who says which models lose their place when memory is short.")
    ] = ""
    prefetch: Annotated[
        str, Meta(description="Who says which model is brought in beside the one that runs.")
    ] = ""
    parameters: dict[str, dict[str, Scalar]] = {}

    @property
    def choice(self) -> PolicyChoice:
        """The same in the words of the daemon."""
        named = {hook: getattr(self, hook) for hook in HOOKS}
        return PolicyChoice(
            use=self.use,
            decisions={hook: name for hook, name in named.items() if name},
            parameters=self.parameters,
        )


class JournalFile(Section, kw_only=True):
    """A record of every event and every decision, for replay."""

    path: Annotated[
        str, Meta(description='File to write, relative to this one; "" for no journal.')
    ] = ""


class Batches(Section, kw_only=True):
    """Files and batches (`/v1/files`, `/v1/batches`); they survive a restart."""

    directory: Annotated[
        str,
        Meta(
            description="Folder, of its own, for them, relative to this file; it is made if it is "
            'not there. "" for none: they are refused then.'
        ),
    ] = ""
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests of batches in the appliance at once; every choice (`n`) is one.",
        ),
    ] = 32
    max_file_bytes: Annotated[Bytes, Meta(description="Largest file that is accepted.")] = (
        msgspec.field(default=Bytes(100 << 20), name="max_file")
    )
    max_requests: Annotated[int, Meta(ge=1, description="Requests that a batch may have.")] = 50_000
    max_stored_bytes: Annotated[
        Bytes,
        Meta(
            description="All files and logs of batches together. An upload that would go beyond it "
            "is refused; once answers went beyond it, new batches are, and others stand still. "
            "What is done is always written to files."
        ),
    ] = msgspec.field(default=Bytes(10 << 30), name="max_stored")
    keep_days: Annotated[
        int,
        Meta(ge=1, description="Files, and batches that are over, are deleted after so long."),
    ] = 30


class Log(Section, kw_only=True):
    """What the daemon and its workers write to standard error."""

    format: Annotated[
        LogFormat,
        Meta(description="`auto` is lines on a terminal, JSON elsewhere: see docs/logs.md."),
    ] = "auto"
    level: Annotated[LogLevel, Meta(description="The daemon tells what is at least so urgent.")] = (
        "info"
    )


class Telemetry(Section, kw_only=True):
    """Requests as traces of OpenTelemetry, sent over OTLP (HTTP). See docs/telemetry.md."""

    traces: Annotated[
        bool, Meta(description="Send them. Needs the extra `otel` of this package.")
    ] = False
    endpoint: Annotated[
        str,
        Meta(
            description="Address of the collector, such as `http://127.0.0.1:4318`; "
            '"" for `$OTEL_EXPORTER_OTLP_ENDPOINT`, or `http://localhost:4318`.'
        ),
    ] = ""
    sample_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the requests that are traced, of those whose caller does not say "
            "(`traceparent`).",
        ),
    ] = 1.0
    service_name: Annotated[
        str, Meta(description='"" for `$OTEL_SERVICE_NAME`, or `appliance`.')
    ] = ""


class Catalog(Section, kw_only=True):
    """Where models are kept that are pulled while the appliance runs."""

    folder: Annotated[
        str,
        Meta(
            description="Folder of its own for them, relative to this file: `appliance pull` fills "
            "it, `appliance rm` deletes from it. `auto` is `models` in `$STATE_DIRECTORY`, if "
            'systemd gives one; "" for none.'
        ),
    ] = AUTO


class Slo(Section, kw_only=True):
    """The service level that a model's requests are promised."""

    ttft_seconds: Annotated[Seconds, Meta(description="Time to the first token.")] = msgspec.field(
        default=Seconds(10), name="ttft"
    )
    tbt_seconds: Annotated[Seconds, Meta(description="Time between tokens.")] = msgspec.field(
        default=Seconds(0.1), name="tbt"
    )


class BatchSlo(Slo, kw_only=True):
    """The service level that batch requests (`service_tier: "flex"`) are promised."""

    ttft_seconds: Annotated[Seconds, Meta(description="Time to the first token.")] = msgspec.field(
        default=Seconds(3600), name="ttft"
    )
    tbt_seconds: Annotated[Seconds, Meta(description="Time between tokens.")] = msgspec.field(
        default=Seconds(2), name="tbt"
    )


class Model(Section, kw_only=True):
    """A model of the catalogue; repeat the table for each."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$",
            description="What clients call it: letters, digits and any of `._:/-`.",
            examples=["llama-a"],
        ),
    ]
    path: Annotated[
        str,
        Meta(
            description="Checkpoint directory (config.json, *.safetensors, tokenizer.json), "
            "relative to this file.",
            examples=["/srv/models/llama-a"],
        ),
    ]
    max_context: Annotated[
        int, Meta(ge=1, description="Longest prompt and answer together, tokens.", examples=[2048])
    ]
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Type to compute in; `auto` is the stored one, bfloat16 for float32."),
    ] = "auto"
    task: Annotated[
        AskedTask,
        Meta(
            description="What it is for: text that goes on (`generate`), vectors (`embed`), or how "
            "well two texts match (`score`); `auto` is what its checkpoint says."
        ),
    ] = "auto"
    slo: Annotated[Slo, Meta(description="Service level: `ttft` and `tbt`, both durations.")] = (
        Slo()
    )
    batch_slo: Annotated[
        BatchSlo, Meta(description='The same for batch requests (`service_tier: "flex"`).')
    ] = BatchSlo()
    max_batch: Annotated[
        int, Meta(ge=1, description="Most requests that are decoded in one step.")
    ] = 32
    tool_parser: Annotated[
        str,
        Meta(
            description="vLLM's parser of its tool calls, such as `hermes` or `llama3_json`; "
            '"" if it has none: it cannot choose to call tools then.'
        ),
    ] = ""
    reasoning_parser: Annotated[
        str,
        Meta(
            description="vLLM's parser of its reasoning, such as `qwen3` or `deepseek_r1`; "
            '"" if it does not reason: all that it writes is its answer then.'
        ),
    ] = ""
    max_queue: Annotated[
        int, Meta(ge=1, description="Its requests in the appliance at once; one more gets 429.")
    ] = 1024
    pin: Annotated[
        bool,
        Meta(description="Keep its weights in the host cache, whoever else wants the room."),
    ] = False
    verify: Annotated[
        bool,
        Meta(
            description="Check its files against the SHA256SUMS beside them when they are read, "
            "and what `devices.images` has of it against its digests."
        ),
    ] = False
    enabled: Annotated[
        bool,
        Meta(
            description="`false`: the table is not there. A drop-in takes a model from the "
            "catalogue so."
        ),
    ] = True


class Config(Section, kw_only=True):
    """A whole configuration. `api.bind.host`, `devices.slabs` and the like are derived."""

    api: Api = Api()
    devices: Devices
    policy: PolicyTable = PolicyTable()
    journal: JournalFile = JournalFile()
    batches: Batches = Batches()
    log: Log = Log()
    telemetry: Telemetry = Telemetry()
    catalog: Catalog = Catalog()
    models: Annotated[tuple[Model, ...], Meta(min_length=1)] = msgspec.field(name="model")


# --- reading -------------------------------------------------------------------------------------


def load_config(
    path: Path, *, check_files: bool = True, pending: Mapping[Path, str] | None = None
) -> Config:
    """Read and check a configuration file with its drop-ins; relative paths are relative to it.

    Without `check_files` the checkpoints, and what depends on their sizes, are not looked at.
    `pending` are drop-ins to read as if they were written. Raises `ConfigError` with every problem
    found.
    """
    layers = read_layers(path, pending)
    report = _Report(layers)
    config = _read_document(layers.document, report)
    if config is not None:
        config = _with_enabled_models(config, report)
        config = _with_absolute_paths(config, path.absolute().parent)
        config = _with_devices(config, report)
        _check(config, report, check_files)
    if report.problems:
        files = [str(file) for file in layers.paths]
        raise ConfigError(sorted(report.problems, key=lambda p: (files.index(p.file), p.line)))
    assert config is not None  # a document that cannot be read has problems
    return config


def warnings(config: Config) -> list[str]:
    """What is allowed but worth knowing, one sentence each."""
    found = []
    if not config.api.bind.local and not config.api.tls_certificate:
        found.append(
            f"api.bind: {config.api.bind} can be reached from outside this machine, and without "
            "TLS keys and answers can be read on the way; see api.tls_certificate"
        )
    if config.api.keys and KeyFile(Path(config.api.keys)).shared:
        found.append(
            f"api.keys: others than its owner can read or write {config.api.keys}; `chmod 600` it"
        )
    if rest := config.devices.memory_bytes % config.devices.slab_bytes:
        found.append(f"devices.memory: the last {human(rest)} are less than a slab and stay unused")
    return found


def uncached(config: Config, entries: Iterable[CatalogEntry]) -> list[str]:
    """Names of the models whose weights the host cache has no room for while all others' are in
    it: some model is loaded from disk now and then."""
    slab = config.devices.slab_bytes
    entries = list(entries)
    pinned = {model.name for model in config.models if model.pin}
    room = config.devices.host_cache_bytes // slab - kv_floor_slabs(config, entries)
    left_out = []
    ranks = config.devices.tensor_parallel
    for entry in sorted(entries, key=lambda entry: entry.name not in pinned):
        slabs = -(-_share(entry, ranks).weight_bytes // slab) * ranks
        if slabs <= room:
            room -= slabs
        else:
            left_out.append(entry.name)
    return left_out


class _Report:
    """Collects the problems of the files that were read."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.problems: list[Problem] = []
        self.rows: list[int] | None = None
        """Which rows of the file the models are, once some of them are left out."""

    def at(self, key: KeyPath, wrong: str, remedy: str) -> Problem:
        if self.rows is not None and key[0] == "model" and len(key) > 1:
            key = ("model", self.rows[int(key[1])], *key[2:])
        path, line = self.layers.place(key)
        return Problem(str(path), line, dotted(key) or "(file)", wrong, remedy)

    def add(self, key: KeyPath, wrong: str, remedy: str) -> None:
        self.problems.append(self.at(key, wrong, remedy))


def _read_document(document: dict[str, Any], report: _Report) -> Config | None:
    document = dict(document)
    policy = document.get("policy")
    parameters: dict[str, dict[str, Scalar]] = {}
    if isinstance(policy, dict):
        parameters = {key: table for key, table in policy.items() if isinstance(table, dict)}
        document["policy"] = {k: v for k, v in policy.items() if k not in parameters}
    config = _read_section(Config, document, (), report)
    if config is None:
        return None
    choice = msgspec.structs.replace(config.policy, parameters=parameters)
    return msgspec.structs.replace(config, policy=choice)


def _read_section(kind: type[S], table: object, at: KeyPath, report: _Report) -> S | None:
    """The section, or None when it has problems; all of them are reported."""
    if not isinstance(table, dict):
        report.add(at, f"expected a table, got {_shown(table)}", f"write [{dotted(at)}]")
        return None
    before = len(report.problems)
    known = fields(kind)
    for key in table:
        if key not in known:
            report.add((*at, key), "unknown key", nearest(key, known))
    values: dict[str, Any] = {}
    for key, field in known.items():
        if key in table:
            values[field.name] = _read_value(field.type, table[key], (*at, key), report)
        elif field.required:
            report.add((*at, key), "is missing", _remedy_for_missing(kind, field))
    return kind(**values) if len(report.problems) == before else None


def _read_value(kind: Any, value: object, at: KeyPath, report: _Report) -> Any:
    plain = _plain(kind)
    if plain == tuple[Model, ...]:
        if not isinstance(value, list) or not value:
            report.add(at, "expected at least one table", "write [[model]] for each model")
            return ()
        return tuple(_read_section(Model, row, (*at, i), report) for i, row in enumerate(value))
    if isinstance(plain, type) and issubclass(plain, Section):
        return _read_section(plain, value, at, report)
    try:
        return msgspec.convert(value, kind, dec_hook=_read_unit)
    except msgspec.ValidationError as error:
        reason = str(error)
        remedy = f"got {_shown(value)}"
        if words := choices(kind):
            reason, remedy = f"{_shown(value)} is not a choice", f"use {alternatives(words)}"
        report.add(at, reason[:1].lower() + reason[1:], remedy)
        return None


def _read_unit(kind: type, value: object) -> object:
    reader: Callable[[object], object] = kind.read  # type: ignore[attr-defined]
    return reader(value)


def _remedy_for_missing(kind: type[Section], field: SchemaField) -> str:
    if kind is Config:
        header = "[[model]] for each model" if field.key == "model" else f"[{field.key}]"
        return f"add {header}"
    return f"add {field.key} = {toml(field.sample)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _with_enabled_models(config: Config, report: _Report) -> Config:
    rows = [index for index, model in enumerate(config.models) if model.enabled]
    if not rows:
        report.add(("model",), "no model is enabled", "leave one")
    report.rows = rows
    return msgspec.structs.replace(config, models=tuple(config.models[row] for row in rows))


def _with_absolute_paths(config: Config, base: Path) -> Config:
    replace = msgspec.structs.replace
    journal, devices, batches = config.journal, config.devices, config.batches
    if journal.path:
        journal = replace(journal, path=str(base / journal.path))
    if devices.images:
        devices = replace(devices, images=str(base / devices.images))
    if batches.directory:
        batches = replace(batches, directory=str(base / batches.directory))
    folder = config.catalog.folder
    if folder == AUTO:
        given = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        folder = str(Path(given, "models")) if given else ""
    catalog = replace(config.catalog, folder=str(base / folder) if folder else "")
    models = tuple(replace(model, path=str(base / model.path)) for model in config.models)
    named = {name: getattr(config.api, name) for name in ("keys", "tls_certificate", "tls_key")}
    if config.api.admin_socket != AUTO:
        named["admin_socket"] = config.api.admin_socket
    absolute = {name: str(base / path) for name, path in named.items() if path}
    api = replace(config.api, **absolute)
    return replace(
        config,
        api=api,
        journal=journal,
        devices=devices,
        batches=batches,
        catalog=catalog,
        models=models,
    )


def _with_devices(config: Config, report: _Report) -> Config:
    """`auto` and shares become what they mean on this machine."""
    devices = config.devices
    gpus: list[Gpu] = []
    if devices.kind != "cpu":
        try:
            gpus = list_gpus()
            reason = "this machine has no NVIDIA GPU"
        except GpusUnknown as error:
            reason = str(error)
        if not gpus and devices.kind == "cuda":
            report.add(("devices", "kind"), reason, 'or use "cpu"')
            return config
    if not gpus:
        if devices.memory_bytes.share is not None:
            report.add(
                ("devices", "memory"),
                "a share is of a GPU's memory, and models run on the CPU here",
                "give a size, such as 192MiB",
            )
        devices = msgspec.structs.replace(devices, kind="cpu")
    else:
        if devices.instances > len(gpus):
            report.add(
                ("devices", "instances"),
                f"{devices.instances} instances have {len(gpus)} GPUs",
                f"use {len(gpus)} or fewer: each has one to itself",
            )
        if devices.tensor_parallel > 1:
            report.add(
                ("devices", "tensor_parallel"),
                "groups of GPUs are not driven by this version",
                'use 1, or kind = "cpu"',
            )
        least = min(gpu.memory_bytes for gpu in gpus[: devices.instances])
        memory = devices.memory_bytes.taken(least)
        if memory > least:
            report.add(
                ("devices", "memory"),
                f"{human(memory)} are more than the {human(least)} of a GPU",
                'use a share, such as "90%"',
            )
        devices = msgspec.structs.replace(devices, kind="cuda", memory_bytes=memory)
    return msgspec.structs.replace(config, devices=devices)


# --- checks across keys --------------------------------------------------------------------------


def _check(config: Config, report: _Report, check_files: bool) -> None:
    _check_reach(config.api, report)
    _check_devices(config.devices, report)
    _check_telemetry(config.telemetry, report)
    _check_policies(config.policy, report)
    _check_names(config.models, report)
    if check_files:
        for key, path in (
            (("journal", "path"), config.journal.path),
            (("batches", "directory"), config.batches.directory),
        ):
            if path and not Path(path).parent.is_dir():
                report.add(key, f"{Path(path).parent} is not a directory", "create it")
        _check_api_files(config.api, report)
        entries = _read_checkpoints(config.models, report)
        _check_tasks(config, entries, report)
        _check_heads(config, entries, report)
        _check_sizes(config, entries, report)


def _check_reach(api: Api, report: _Report) -> None:
    if not api.bind.local and not api.keys:
        report.add(
            ("api", "bind"),
            f"{api.bind} can be reached from outside this machine, and there are no keys",
            'add keys = "keys.json" and make one with `appliance key create NAME`, or use '
            "127.0.0.1",
        )


def _check_telemetry(telemetry: Telemetry, report: _Report) -> None:
    if telemetry.endpoint and not telemetry.endpoint.startswith(("http://", "https://")):
        report.add(
            ("telemetry", "endpoint"),
            f"{telemetry.endpoint!r} is not the address of an HTTP server",
            'use one such as "http://127.0.0.1:4318"',
        )
    if telemetry.traces and not _has_opentelemetry():
        report.add(
            ("telemetry", "traces"),
            "OpenTelemetry is not installed",
            'install the extra "otel" of this package, or use false',
        )


def _has_opentelemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _check_api_files(api: Api, report: _Report) -> None:
    if api.keys:
        try:
            KeyFile(Path(api.keys)).read()
        except KeysError as error:
            report.add(("api", "keys"), str(error), "restore it, or remove it and make new keys")
        if not Path(api.keys).parent.is_dir():
            report.add(("api", "keys"), f"{Path(api.keys).parent} is not a directory", "create it")
    if problem := problem_with(api.tls_certificate, api.tls_key):
        report.add(("api", problem.key), problem.wrong, problem.remedy)
    try:
        group_id(api.admin_group)
    except AdminSocketError as error:
        report.add(("api", "admin_group"), str(error), "create it, or leave it out")


def _check_devices(devices: Devices, report: _Report) -> None:
    slab = devices.slab_bytes
    if slab % PAGE_BYTES or slab & (slab - 1):
        report.add(
            ("devices", "slab"),
            f"{human(slab)} is not a power of two of at least {human(PAGE_BYTES)}",
            'use a size such as "2MiB"',
        )
    elif devices.memory_bytes.share is None and not devices.slabs:
        beside = f" beside devices.runtime ({human(devices.runtime_bytes)})" if devices.cuda else ""
        report.add(
            ("devices", "memory"),
            f"is smaller than a slab of {human(slab)}{beside}",
            "make it larger",
        )


def _check_policies(table: PolicyTable, report: _Report) -> None:
    try:
        policies.load_stack(table.choice)
    except PolicyChoiceError as error:
        for problem in error.problems:
            # Decisions and tables of parameters are keys of the one table here.
            shared = problem.key[0] in ("decisions", "parameters")
            key = problem.key[1:] if shared else problem.key
            report.add(("policy", *key), problem.wrong, problem.remedy)


def _check_names(models: tuple[Model, ...], report: _Report) -> None:
    first: dict[str, int] = {}
    for index, model in enumerate(models):
        if model.name in first:
            line = report.at(("model", first[model.name], "name"), "", "").line
            report.add(
                ("model", index, "name"),
                f"{model.name} is the name of the model at line {line} already",
                "give each model a name of its own",
            )
        first.setdefault(model.name, index)


def _read_checkpoints(models: tuple[Model, ...], report: _Report) -> list[CatalogEntry | None]:
    entries: list[CatalogEntry | None] = []
    for index, model in enumerate(models):
        entry = None
        try:
            entry = read_checkpoint(model.name, Path(model.path), model.dtype)
        except CheckpointError as error:
            remedy = "give the directory of a whole checkpoint in safetensors format"
            report.add(("model", index, "path"), str(error), remedy)
        except OSError as error:
            report.add(("model", index, "path"), str(error), "make it readable")
        if entry is not None and not (entry.path / "tokenizer.json").is_file():
            report.add(
                ("model", index, "path"),
                f"{entry.path} has no tokenizer.json",
                "add the model's tokenizer in that format",
            )
        if entry is not None and model.max_context > entry.max_positions:
            report.add(
                ("model", index, "max_context"),
                f"{model.max_context} tokens are more than the model's {entry.max_positions}",
                f"use {entry.max_positions} or less",
            )
        entries.append(entry)
    return entries


def _check_tasks(config: Config, entries: list[CatalogEntry | None], report: _Report) -> None:
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None:
            continue
        try:
            read_purpose(entry.path, model.task)
        except CheckpointError as error:
            report.add(("model", index, "task"), str(error), "take another checkpoint, or task")


def _check_heads(config: Config, entries: list[CatalogEntry | None], report: _Report) -> None:
    """Every rank has as many attention heads as the others, and at least one for keys and values:
    these are divided, or, if there are fewer than ranks, each is on equally many ranks."""
    ranks = config.devices.tensor_parallel
    for index, entry in enumerate(entries):
        if entry is None or not (
            entry.heads % ranks or max(entry.kv_heads, ranks) % min(entry.kv_heads, ranks)
        ):
            continue
        report.add(
            ("model", index),
            f"{entry.name} has {entry.heads} attention heads and {entry.kv_heads} for keys and "
            f"values, which {ranks} ranks cannot divide among them",
            "set devices.tensor_parallel to a divisor of both",
        )


def _check_sizes(config: Config, entries: list[CatalogEntry | None], report: _Report) -> None:
    """In whole slabs, as memory is given out. What this refuses can never work."""
    devices, slab = config.devices, config.devices.slab_bytes
    ranks = devices.tensor_parallel
    if any(problem.key.startswith("devices.") for problem in report.problems):
        return  # sizes mean nothing yet
    pinned = 0
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None:
            continue
        share = _share(entry, ranks)
        weights = -(-share.weight_bytes // slab)
        geometry = _kv_geometry(share, devices)
        blocks = -(-model.max_context // BLOCK_TOKENS)
        kv = -(-blocks // geometry.group_blocks) * geometry.group_slabs
        if weights + kv > devices.slabs:
            report.add(
                ("model", index),
                f"{model.name} needs {human(weights * slab)} for its weights and "
                f"{human(kv * slab)} for the KV cache of one request{_on_each(ranks)}, in slabs of "
                f"{human(slab)}: "
                f"more than devices.memory ({human(devices.memory_bytes)})",
                f"set devices.memory to {human((weights + kv) * slab)} or more, a smaller "
                "devices.slab, or a smaller max_context",
            )
        pinned += weights * ranks if model.pin else 0
    longest = kv_floor_slabs(config, [entry for entry in entries if entry is not None])
    needed = (pinned + longest) * slab
    if needed > devices.host_cache_bytes:
        held = f"the weights of pinned models ({human(pinned * slab)}) and " if pinned else ""
        report.add(
            ("devices", "host_cache"),
            f"{human(devices.host_cache_bytes)} do not hold {held}the KV cache of one request "
            f"({human(longest * slab)})",
            f"set it to {human(needed)} or more" + (", or pin fewer models" if pinned else ""),
        )


def kv_floor_slabs(config: Config, entries: Iterable[CatalogEntry]) -> int:
    """Slabs of the host tier that hold the KV cache of any one request at full length."""
    devices = config.devices
    slab, ranks = devices.slab_bytes, devices.tensor_parallel
    contexts = {model.name: model.max_context for model in config.models}
    return max(
        (
            _host_slabs(
                -(-contexts[entry.name] // BLOCK_TOKENS),
                _kv_geometry(_share(entry, ranks), devices).block_bytes * ranks,
                slab,
            )
            for entry in entries
        ),
        default=0,
    )


def _share(entry: CatalogEntry, ranks: int) -> CatalogEntry:
    """What one of the ranks has of a model: at least so much, as small tensors are not divided."""
    return dataclasses.replace(
        entry,
        kv_heads=-(-entry.kv_heads // ranks),
        weight_bytes=-(-entry.weight_bytes // ranks),
    )


def _on_each(ranks: int) -> str:
    return f", on each of {ranks} ranks" if ranks > 1 else ""


def _host_slabs(blocks: int, block_bytes: int, slab_bytes: int) -> int:
    """Slabs of the host tier that hold so many blocks: runs just long enough for one."""
    run = -(-block_bytes // slab_bytes)
    return -(-blocks // (run * slab_bytes // block_bytes)) * run


def _kv_geometry(entry: CatalogEntry, devices: Devices) -> KvGeometry:
    """On a GPU, where all layers of a block lie side by side, they count as one."""
    layers = 1 if devices.cuda else entry.layers
    return KvGeometry.plan(
        layers=layers,
        layer_block_bytes=entry.kv_bytes(BLOCK_TOKENS) // layers,
        slab_bytes=devices.slab_bytes,
        pool_slabs=1,
        least_blocks=1,
    )


# --- the schema as data --------------------------------------------------------------------------


class SchemaField(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a table: `name` in Python, `key` in the file."""

    name: str
    key: str
    type: Any
    required: bool
    default: Any
    description: str
    sample: Any


def _plain(kind: Any) -> Any:
    return getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a field of a `Literal` type may have; none for other types."""
    literal = _plain(kind)
    return literal.__args__ if getattr(literal, "__origin__", None) is Literal else ()


def fields(kind: type[Section]) -> dict[str, SchemaField]:
    """The keys of a table, as the file has them, in order."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, SchemaField] = {}
    for info in msgspec.structs.fields(kind):
        if (kind, info.name) == (PolicyTable, "parameters"):
            continue
        meta: Meta | None = next(iter(getattr(hints[info.name], "__metadata__", ())), None)
        examples = (meta.examples if meta else None) or [info.default]
        found[info.encode_name] = SchemaField(
            name=info.name,
            key=info.encode_name,
            type=hints[info.name],
            required=info.required,
            default=info.default,
            description=(meta.description if meta else None) or "",
            sample=examples[0],
        )
    return found


def schema() -> dict[str, tuple[type[Section], dict[str, SchemaField]]]:
    """Every table of the file by its header, with its keys."""
    return {
        "[api]": (Api, fields(Api)),
        "[devices]": (Devices, fields(Devices)),
        "[policy]": (PolicyTable, fields(PolicyTable)),
        "[journal]": (JournalFile, fields(JournalFile)),
        "[batches]": (Batches, fields(Batches)),
        "[log]": (Log, fields(Log)),
        "[telemetry]": (Telemetry, fields(Telemetry)),
        "[catalog]": (Catalog, fields(Catalog)),
        "[[model]]": (Model, fields(Model)),
    }
