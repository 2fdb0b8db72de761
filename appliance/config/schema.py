"""The configuration: one strict schema, from which sample, documentation and checks all come.

A TOML file becomes a frozen `Config` with resolved units (bytes, seconds, absolute paths), or a
`ConfigError` that lists every problem with its line and its remedy. `appliance config check` and
the daemon read a file with the same `appliance.config.loader.load_config`.
"""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from appliance.checkpoints.adapters import ADAPTER_NAME, MAX_ADAPTERS, MAX_RANK
from appliance.checkpoints.drafts import LONGEST_LOOKUP, MOST_DRAFTED, NGRAM, Speculation
from appliance.checkpoints.parsers.names import AUTO as AUTO_PARSER
from appliance.checkpoints.task import AskedTask, PoolerValue
from appliance.config.tables.remote import Remote
from appliance.config.tables.section import Section
from appliance.hookspecs import HOOKS
from appliance.platform.admin_socket import AUTO
from appliance.platform.logs import LogFormat, LogLevel
from appliance.service.autopilot import AutopilotMode, AutopilotTerms
from appliance.service.policy_report import PolicyChoice
from appliance.units import Address, Bytes, Delay, Memory, Seconds, Share, human
from appliance.vocabulary import MODEL_NAME

Scalar: TypeAlias = str | int | float | bool

MAX_IMAGES: Final = 16
MAX_SOUNDS: Final = 16
MAX_LOGPROBS: Final = 1 << 18
"""As many tokens as the largest vocabularies have, nearly."""
MAY_BE_AUTO: Final = {"auto": True}
"""Of a key that may say `auto`: its number is 0 until `appliance.config.auto` has chosen one."""


# --- the schema ----------------------------------------------------------------------------------
# A field's description is its documentation, and `examples` the value it has in the sample file.


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
    keys_read_only: Annotated[
        bool,
        Meta(
            description="Never write the file of keys: several boxes have the same one "
            "(docs/fleet.md), and keys are changed where it comes from. What changes in it is "
            "followed as usual. A change waits for a restart."
        ),
    ] = False
    limits_share: Annotated[
        Share,
        Meta(
            description="This box's share of every limit in the file of keys, such as 0.25 or "
            '`"1/4"`: each of four boxes then lets a key have a quarter, at least 1. A change '
            "waits for a restart."
        ),
    ] = Share("1")
    open_metrics: Annotated[
        bool, Meta(description="Answer `/metrics` without a key, also when there are keys.")
    ] = False
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="Let keys use prefixes of prompts that other keys have cached. Response "
            "times then tell a key what others have sent lately. A change waits for a restart."
        ),
    ] = False
    key_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the sequences that a model runs at once (`max_batch` on each "
            "instance, or as many as its KV has room for) that one key may have, where there are "
            "several: requests of others then begin at once. More of the key's wait. A change "
            "waits for a restart.",
        ),
    ] = 0.75
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
        Meta(description="Group whose members are operators, as root and the daemon's user are."),
    ] = ""
    local_operators: Annotated[
        bool,
        Meta(
            description="Without `keys`: let every client on this machine do on `bind` what "
            "operators do, although there is an admin socket. A change waits for a restart."
        ),
    ] = False
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Literal["auto"],
        Meta(
            description="Front ends: processes that turn requests into tokens and back. `auto` is "
            "one for every 8 processors, 4 at most. A change waits for a restart."
        ),
    ] = "auto"
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[A-Za-z0-9._~-]+)*\Z",
            description="Path under which a proxy serves all of it, such as `/llm`: requests below "
            'it are answered, too. "" for none. A change waits for a restart.',
        ),
    ] = ""
    strict: Annotated[
        bool,
        Meta(
            description="Refuse fields of a request that nothing looks at. A change waits for a "
            "restart."
        ),
    ] = False
    origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins whose pages in a browser may use the API, such as "
            '`https://chat.example.org`, besides those of this machine; `"*"` for all. A change '
            "waits for a restart."
        ),
    ] = ()
    image_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that images are fetched from which a request names by URL, such as "
            "`images.example.org`, or `*.example.org` for all names below one: by https, or with "
            "`http://` in front by http; with a port behind it if it is not the usual one. Without "
            "any, images come as data URLs only. A change waits for a restart."
        ),
    ] = ()
    image_networks: Annotated[
        tuple[str, ...],
        Meta(
            description="Networks that are not public and that these hosts may be in, such as "
            "`10.1.2.0/24`. A change waits for a restart."
        ),
    ] = ()
    keep_alive_seconds: Annotated[
        Seconds,
        Meta(description="Longest silence on an open stream; a comment is sent when it is over."),
    ] = msgspec.field(default=Seconds(5), name="keep_alive")
    max_body_bytes: Annotated[Bytes, Meta(description="Largest request body that is accepted.")] = (
        msgspec.field(default=Bytes(8 << 20), name="max_body")
    )
    max_bodies_bytes: Annotated[
        Bytes,
        Meta(
            description="All request bodies of more than 64 KiB that a process holds in memory at "
            "once (each front end, and the daemon itself); at least twice `max_body`. When more "
            "come, some are answered 429, first those of the client that has most. A change waits "
            "for a restart."
        ),
    ] = msgspec.field(default=Bytes(128 << 20), name="max_bodies")
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
        ),
    ] = msgspec.field(default=Seconds(5), name="drain")


class KvSpillFolder(Section, kw_only=True):
    """A folder on disk for KV cache that waits long while the host cache is short of room."""

    directory: Annotated[
        str,
        Meta(
            description="Folder, of its own, relative to this file; it is made if it is not there, "
            'and emptied at every start. Best on a local NVMe drive. "" for none.'
        ),
    ] = ""
    size_bytes: Annotated[Bytes, Meta(description="Most that its files take together.")] = (
        msgspec.field(default=Bytes(16 << 30), name="size")
    )


class DeviceGroup(Section, kw_only=True):
    """Instances alike, of one or several ranks; repeat the table `[[devices.group]]` for each."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
            description="What models call it in `groups`: letters, digits and any of `._-`.",
            examples=["pair"],
        ),
    ]
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            description="Ranks of each of its instances: a process each. On real GPUs: untested.",
        ),
    ] = 1
    instances: Annotated[
        int,
        Meta(
            ge=1,
            description="Its instances. With `gpus` there are as many as these make.",
        ),
    ] = 1
    gpus: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description="Its GPUs, by the numbers that `nvidia-smi` gives them, one for each rank. "
            "Groups without get those that no group names."
        ),
    ] = ()

    @property
    def count(self) -> int:
        """How many instances it has."""
        return len(self.gpus) // self.tensor_parallel if self.gpus else self.instances


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
            description="Worker processes; each serves every model. On GPUs: one for each. With "
            "groups, these say how many.",
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            description="Ranks of each instance: a process each, with its shard of every model. "
            "On real GPUs: untested. With groups, each says it for itself.",
        ),
    ] = 1
    groups: Annotated[
        tuple[DeviceGroup, ...],
        Meta(
            description="Groups of instances, each a table `[[devices.group]]`, if instances "
            "have different numbers of ranks, or serve different models."
        ),
    ] = msgspec.field(default=(), name="group")
    memory_bytes: Annotated[
        Memory,
        Meta(
            description="Physical pool of each rank for weights and KV cache. Enforced. On GPUs it "
            'may be a share of their memory, such as "90%". `auto` is that share; on the CPU, '
            "as much as the models can use of the memory that is available at the start.",
            extra=MAY_BE_AUTO,
        ),
    ] = msgspec.field(default=Memory(0), name="memory")
    runtime_bytes: Annotated[
        Bytes,
        Meta(
            description="On GPUs: what of `memory` is kept for activations, workspaces and CUDA "
            "graphs of all models together. Enforced. `auto` is a tenth of the GPU, 4GiB at "
            "most.",
            extra=MAY_BE_AUTO,
        ),
    ] = msgspec.field(default=Bytes(0), name="runtime")
    slab_bytes: Annotated[
        Bytes,
        Meta(description="Unit in which the pool changes hands: a power of two, at least 4KiB."),
    ] = msgspec.field(default=Bytes(2 << 20), name="slab")
    host_cache_bytes: Annotated[
        Bytes,
        Meta(
            description="Host memory for one copy of weights and for swapped-out KV cache. Models "
            "whose weights have no room in it are loaded from disk. `auto` is what all models "
            "can use, as far as that is available at the start.",
            extra=MAY_BE_AUTO,
        ),
    ] = msgspec.field(default=Bytes(0), name="host_cache")
    host_cache_codec: Annotated[
        Literal["none", "exp7"],
        Meta(
            description="How weights lie in the host cache: as they are, or with the exponents of "
            "bf16 numbers in three bits (`exp7`), which takes 0.70 of the room, and is decoded at "
            "every switch. Nothing is lost. On CPUs, without `images`, `max_loras` and ranks."
        ),
    ] = "none"
    images: Annotated[
        str,
        Meta(
            description="Folder, of its own, for weights as the CPU computes with them: later "
            "starts read them instead of packing again. It takes as much disk as those weights "
            'again. Relative to this file; "" for none.'
        ),
    ] = ""
    kv_spill: Annotated[
        KvSpillFolder,
        Meta(
            description="A folder, and its size, for KV cache that waits long while `host_cache` "
            "is short of room (docs/operations.md)."
        ),
    ] = KvSpillFolder()
    ceilings: Annotated[
        str,
        Meta(
            description="File for what `appliance doctor --ceilings` measures, relative to this "
            "one; the daemon takes from it how long switches last until it has seen some. `auto` "
            "is `ceilings.json` in `$STATE_DIRECTORY`, if systemd gives one, or in the state "
            'directory of the packaged service or of the user; "" for none.'
        ),
    ] = AUTO

    @property
    def kv_spill_bytes(self) -> int:
        """Room for KV cache on disk; 0 if there is no folder for it."""
        return int(self.kv_spill.size_bytes) if self.kv_spill.directory else 0

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
    autopilot: Annotated[
        Literal["off", "propose", "apply"],
        Meta(
            description="Replay the end of the journal now and then, at the lowest priority, under "
            "all installed policies: `propose` says which would keep more, `apply` has them "
            "decide, and goes back if they do not. It needs `journal.path`."
        ),
    ] = "off"
    autopilot_interval_seconds: Annotated[
        Seconds,
        Meta(
            description="From one replay of the autopilot to the next, 10s at least. It is longer "
            "where a replay may take more than a tenth of one core in that time, or those of an "
            "hour more than 360 s.",
        ),
    ] = msgspec.field(default=Seconds(300), name="autopilot_interval")
    autopilot_cpu_seconds: Annotated[
        Seconds,
        Meta(
            description="CPU time of a replay under all policies, 1s to 300s; 5 s more are "
            "charged for its start.",
        ),
    ] = msgspec.field(default=Seconds(25), name="autopilot_cpu")
    autopilot_window_seconds: Annotated[
        Seconds, Meta(description="How much of the journal's end is replayed, 10s at least.")
    ] = msgspec.field(default=Seconds(600), name="autopilot_window")
    autopilot_watch_seconds: Annotated[
        Seconds,
        Meta(
            description="How long the autopilot watches what it applied, and compares it with as "
            "long before; 5s at least.",
        ),
    ] = msgspec.field(default=Seconds(300), name="autopilot_watch")
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
        str, Meta(description="Policy that chooses the model to load while another runs.")
    ] = ""
    parameters: dict[str, dict[str, Scalar]] = msgspec.field(default_factory=dict)

    def autopilot_terms(self, journal: str) -> AutopilotTerms:
        """For a daemon that writes this journal; "" if it writes none."""
        return AutopilotTerms(
            mode=AutopilotMode(self.autopilot),
            interval_seconds=float(self.autopilot_interval_seconds),
            cpu_seconds=float(self.autopilot_cpu_seconds),
            window_seconds=float(self.autopilot_window_seconds),
            watch_seconds=float(self.autopilot_watch_seconds),
            journal=journal,
        )

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
    max_bytes: Annotated[
        Bytes,
        Meta(
            description="Its largest size. It ends there, with an error in the log; a restart "
            "begins a new one, and keeps the last one as `PATH.previous`."
        ),
    ] = msgspec.field(default=Bytes(4 << 30), name="max_size")


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
            description="Requests of batches in the appliance at once.",
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
    max_owner_bytes: Annotated[
        Bytes, Meta(description="The same of one API key, so that no key takes it all.")
    ] = msgspec.field(default=Bytes(5 << 30), name="max_stored_per_key")
    keep_days: Annotated[
        int,
        Meta(ge=1, description="Files, and batches that are over, are deleted after so long."),
    ] = 30


class Usage(Section, kw_only=True):
    """The ledger of what each key used (`appliance usage`); it survives kills and restarts."""

    directory: Annotated[
        str,
        Meta(
            description="Folder, of its own, for it, relative to this file; it is made if it is "
            'not there. "" for none: nothing is counted, and keys with `tokens_per_month` are '
            "refused. A change waits for a restart."
        ),
    ] = ""
    keep_months: Annotated[
        int,
        Meta(ge=1, le=1200, description="Rows are kept for so many whole months, and this one."),
    ] = 13
    max_rows: Annotated[
        int,
        Meta(
            ge=1000,
            description="Most rows, one for each day, key, model and outcome, all in memory (0.5 "
            "KB each). When there are more, the oldest days leave, but none of this month.",
        ),
    ] = 200_000


class Log(Section, kw_only=True):
    """What the daemon and its workers write to standard error."""

    format: Annotated[
        LogFormat,
        Meta(description="`auto` is lines on a terminal, JSON elsewhere: see docs/logs.md."),
    ] = "auto"
    level: Annotated[LogLevel, Meta(description="Minimum severity that is logged.")] = "info"


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
    peers: Annotated[
        tuple[str, ...],
        Meta(
            description="Boxes that this one pulls models from when `appliance fleet apply`, or "
            '`POST /api/pull` with `from`, has it do so, such as `"http://192.0.2.1:11500"`; none '
            "by default. `appliance pull --from` needs no entry. A change waits for a restart."
        ),
    ] = ()
    peer_key_file: Annotated[
        str,
        Meta(
            description="File with an API key of the scope `admin` on those boxes, alone on its "
            'first line, relative to this file; mode 0600. "" for none. Read at each pull.'
        ),
    ] = ""


class SloTable(Section, kw_only=True):
    """The service level of a model's requests."""

    ttft_seconds: Annotated[Seconds, Meta(description="Time to the first token.")] = msgspec.field(
        default=Seconds(10), name="ttft"
    )
    tbt_seconds: Annotated[Seconds, Meta(description="Time between tokens.")] = msgspec.field(
        default=Seconds(0.1), name="tbt"
    )
    gap_seconds: Annotated[
        Delay,
        Meta(
            description="The longest time from one token of a stream to the next; a token that "
            'comes later is not in time. "0s": none is promised.'
        ),
    ] = msgspec.field(default=Delay(0), name="gap")


class BatchSlo(SloTable, kw_only=True):
    """The service level of batch requests (`service_tier: "flex"`)."""

    ttft_seconds: Annotated[Seconds, Meta(description="Time to the first token.")] = msgspec.field(
        default=Seconds(3600), name="ttft"
    )
    tbt_seconds: Annotated[Seconds, Meta(description="Time between tokens.")] = msgspec.field(
        default=Seconds(2), name="tbt"
    )


class Pooler(Section, kw_only=True):
    """What of vLLM's `PoolerConfig` is said of a model that embeds or scores."""

    task: Annotated[
        Literal["auto", "embed", "classify", "token_embed", "token_classify"],
        Meta(
            description="What a prompt is pooled to: one vector or set of classes, or those of "
            "each token."
        ),
    ] = "auto"
    pooling_type: Annotated[
        Literal["auto", "CLS", "LAST", "MEAN", "ALL"],
        Meta(
            description="From which tokens: `CLS` (the first), `LAST` and `MEAN` give one vector, "
            "`ALL` one for each."
        ),
    ] = "auto"
    use_activation: Annotated[
        bool | Literal["auto"],
        Meta(
            description="Whether vectors get length 1, and classes probabilities, unless a request "
            "says so; `auto`: as vLLM has it."
        ),
    ] = "auto"
    dimensions: Annotated[
        int, Meta(ge=0, description="Numbers that vectors are cut to; 0: they have all.")
    ] = 0
    enable_chunked_processing: Annotated[
        bool,
        Meta(
            description="Whether a longer text than `max_context` is embedded in chunks, of whose "
            "vectors the mean is taken."
        ),
    ] = False
    max_embed_len: Annotated[
        int, Meta(ge=0, description="Longest text so, in tokens; 0: `max_context`.")
    ] = 0
    logit_mean: Annotated[
        float, Meta(description="Subtracted from the logits of classes, before the activation.")
    ] = 0.0
    logit_sigma: Annotated[float, Meta(gt=0, description="What they are divided by then.")] = 1.0

    @property
    def chosen(self) -> dict[str, PoolerValue]:
        """What is said here, in vLLM's words."""
        values = {key: getattr(self, key) for key in self.__struct_fields__}
        usual = Pooler()
        return {key: value for key, value in values.items() if value != getattr(usual, key)}


class Adapter(Section, kw_only=True):
    """A LoRA adapter of a model; repeat the table `[[model.adapter]]` for each."""

    name: Annotated[
        str,
        Meta(
            pattern=f"^{ADAPTER_NAME.pattern}$",
            description="What clients call it behind the model's name and a colon "
            "(`llama-a:legal`): letters, digits and any of `._-`.",
            examples=["legal"],
        ),
    ]
    path: Annotated[
        str,
        Meta(
            description="Its directory, as PEFT saves it (adapter_config.json, "
            "adapter_model.safetensors), relative to this file.",
            examples=["/srv/adapters/legal"],
        ),
    ]


class Speculate(Section, kw_only=True):
    """How tokens of a model are drafted."""

    method: Annotated[
        str,
        Meta(
            description="Where drafts come from: `ngram` looks where a request's last tokens stood "
            "before, and drafts what followed there; `mtp` is the head that some checkpoints have, "
            'and `eagle` and `eagle3` are heads in a folder of their own; "" for no drafts.',
            examples=[NGRAM],
        ),
    ] = ""
    path: Annotated[
        str,
        Meta(
            description="Directory of the head (config.json, *.safetensors) of `eagle` and "
            "`eagle3`, relative to this file.",
            examples=["/srv/heads/llama-a-eagle3"],
        ),
    ] = ""
    tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTED, description="Most tokens of a draft.")] = 4
    prompt_lookup_min: Annotated[
        int,
        Meta(
            ge=1,
            le=LONGEST_LOOKUP,
            description="Fewest last tokens that must have stood before (`ngram`). Fewer make more "
            "drafts, of which more are wrong.",
        ),
    ] = 2
    prompt_lookup_max: Annotated[
        int,
        Meta(
            ge=1,
            le=LONGEST_LOOKUP,
            description="Most that are looked for (`ngram`); the longest that is found counts.",
        ),
    ] = 5

    @property
    def chosen(self) -> Speculation | None:
        """None for no drafts."""
        if not self.method:
            return None
        if self.method != NGRAM:
            return Speculation(self.tokens, method=self.method, path=self.path)
        return Speculation(self.tokens, self.prompt_lookup_min, self.prompt_lookup_max)


class Model(Section, kw_only=True):
    """A model of the catalogue; repeat the table for each."""

    name: Annotated[
        str,
        Meta(
            pattern=MODEL_NAME,
            description="What clients call it: letters, digits and any of `._:/-`.",
            examples=["llama-a"],
        ),
    ]
    path: Annotated[
        str,
        Meta(
            description="Checkpoint directory (config.json, *.safetensors, a tokenizer), "
            "relative to this file.",
            examples=["/srv/models/llama-a"],
        ),
    ]
    max_context: Annotated[
        int,
        Meta(
            ge=1,
            description="Longest prompt and answer together, tokens. `auto` is as long as the "
            "model reads, or as the pool and the host cache have room for.",
            extra=MAY_BE_AUTO,
        ),
    ] = 0
    aliases: Annotated[
        tuple[Annotated[str, Meta(pattern=MODEL_NAME)], ...],
        Meta(
            description="Further names that clients may call it, such as `gpt-4o`. Keys, limits "
            "and usage go by its own.",
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(description="Type to compute in; `auto` is the stored one, bfloat16 for float32."),
    ] = "auto"
    task: Annotated[
        AskedTask,
        Meta(
            description="What it is for: text generation (`generate`), vectors (`embed`), how "
            "well two texts match (`score`), or the text of sound (`transcription`); `auto` is "
            "what its checkpoint says."
        ),
    ] = "auto"
    slo: Annotated[
        SloTable, Meta(description="Service level: `ttft`, `tbt` and `gap`, all durations.")
    ] = SloTable()
    batch_slo: Annotated[
        BatchSlo, Meta(description='The same for batch requests (`service_tier: "flex"`).')
    ] = BatchSlo()
    max_batch: Annotated[
        int,
        Meta(
            ge=1,
            description="Most requests that are decoded in one step. `auto` is as many as have "
            "room for 4,096 tokens each: 8 to 32 on the CPU, 8 to 256 on GPUs.",
            extra=MAY_BE_AUTO,
        ),
    ] = 32
    max_sequences: Annotated[
        int,
        Meta(
            ge=1,
            description="Most requests that have begun on one instance and are not over; more wait "
            "before their prompts are computed. Those beyond `max_batch` decode in turns.",
        ),
    ] = 256
    tool_parser: Annotated[
        str,
        Meta(
            description="vLLM's parser of its tool calls, such as `hermes` or `llama3_json`; "
            "`auto` for the one that its family and chat template call for "
            '(docs/structured-outputs.md), "" for none: it cannot choose to call tools then.'
        ),
    ] = AUTO_PARSER
    reasoning_parser: Annotated[
        str,
        Meta(
            description="vLLM's parser of its reasoning, such as `qwen3` or `deepseek_r1`; "
            "`auto` for the one that its family and chat template call for, "
            '"" for none: all that it writes is its answer then.'
        ),
    ] = ""
    max_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_LOGPROBS,
            description="Most log probabilities for each token that a request may ask for. "
            "Many take much memory: 8 bytes and more for each of a token, also of a prompt's.",
        ),
    ] = 20
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(description="Write tokens as `token_id:N` in log probabilities, unasked."),
    ] = False
    pooler_config: Annotated[
        Pooler,
        Meta(
            description="How prompts are pooled, if it embeds or scores: keys of vLLM's "
            "`--pooler-config` (docs/embeddings.md). What is left out is as its checkpoint says."
        ),
    ] = Pooler()
    embedding_task: Annotated[
        str,
        Meta(
            description="Of a checkpoint with an adapter for each task (Jina's embeddings v3), the "
            'task that it embeds for, such as `retrieval.query`; "" for the last one that '
            "config.json lists, as with vLLM (docs/embeddings.md).",
        ),
    ] = ""
    images: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_IMAGES,
            description="Most images of a prompt. With 0, a model that reads images is served for "
            "text only, and what reads them takes no memory.",
        ),
    ] = 0
    sounds: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_SOUNDS,
            description="Most sounds of a prompt, of a model that reads sound in chats "
            "(docs/speech.md). With 0, it is served for text only, and what reads them takes no "
            "memory.",
        ),
    ] = 0
    speculate: Annotated[
        Speculate,
        Meta(
            description="How tokens are drafted: guessed, and checked together in the next step, "
            "so that an answer takes fewer steps (docs/drafts.md)."
        ),
    ] = Speculate()
    groups: Annotated[
        tuple[str, ...],
        Meta(
            description="Groups of instances that may serve it (`[[devices.group]]`), all of as "
            "many ranks; without any, every instance."
        ),
    ] = ()
    instances: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description="Numbers of the instances that may serve it, from 0, in place of `groups`; "
            "all of as many ranks, such as `[0, 2]`. Without either, every instance.",
        ),
    ] = ()
    load: Annotated[
        bool,
        Meta(
            description="Load its weights onto a device when the daemon starts, or when it is "
            "added, before the first request. They leave as those of other models do."
        ),
    ] = False
    max_queue: Annotated[
        int, Meta(ge=1, description="Its requests in the appliance at once; one more gets 429.")
    ] = 1024
    pin: Annotated[
        bool,
        Meta(description="Keep its weights in the host cache, even if other models need the room."),
    ] = False
    verify: Annotated[
        bool,
        Meta(
            description="Check its files against their SHA256SUMS when they are read, "
            "and what `devices.images` has of it against its digests."
        ),
    ] = False
    adapters: Annotated[
        tuple[Adapter, ...],
        Meta(
            description="LoRA adapters, each a table `[[model.adapter]]`. Clients ask for "
            "`MODEL:ADAPTER`; all are loaded with the model, and computed in one batch with it."
        ),
    ] = msgspec.field(default=(), name="adapter")
    max_loras: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_ADAPTERS,
            description="Places for adapters, so that they may come and go while it serves "
            "(docs/adapters.md). They take memory, used or not. With 0 there is one for each "
            "adapter that is listed, and the list is fixed.",
        ),
    ] = 0
    max_lora_rank: Annotated[
        int,
        Meta(ge=1, le=MAX_RANK, description="The largest rank that one of these places is for."),
    ] = 16
    enabled: Annotated[
        bool,
        Meta(
            description="`false` ignores this table. A drop-in removes a model from the "
            "catalogue with it."
        ),
    ] = True


class Chosen(NamedTuple):
    """What `auto` means for a key, and why."""

    key: tuple[str, ...]
    """As in the file, models by name."""
    value: int
    """Bytes, tokens or requests."""
    reason: str

    def __str__(self) -> str:
        sized = self.key[0] == "devices"
        return f"{'.'.join(self.key)} = {human(self.value) if sized else self.value}: {self.reason}"


class Config(Section, kw_only=True):
    """A whole configuration. `api.bind.host`, `devices.slabs` and the like are derived."""

    api: Api = Api()
    devices: Devices = Devices()
    policy: PolicyTable = PolicyTable()
    journal: JournalFile = JournalFile()
    batches: Batches = Batches()
    usage: Usage = Usage()
    log: Log = Log()
    telemetry: Telemetry = Telemetry()
    catalog: Catalog = Catalog()
    models: Annotated[tuple[Model, ...], Meta(min_length=1)] = msgspec.field(name="model")
    remotes: tuple[Remote, ...] = ()
    """The tables `[[model]]` that have `remote`: models of other servers."""
    chosen: tuple[Chosen, ...] = ()
    """What `auto` means, in no file."""

    def is_chosen(self, *key: str) -> bool:
        """Whether `auto` has chosen the value of a key, with a model by its name."""
        return any(one.key == key for one in self.chosen)


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
    may_be_auto: bool = False
    """It is a number, 0 while `auto` has not chosen one."""


def plain_type(kind: Any) -> Any:
    """The type of a field without what the schema says about its values."""
    return getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind


def choices(kind: Any) -> tuple[str, ...]:
    """The words that a field of a `Literal` type may have; none for other types."""
    literal = plain_type(kind)
    return literal.__args__ if getattr(literal, "__origin__", None) is Literal else ()


def may_be_auto(kind: Any) -> bool:
    """Whether a field of this type may say `auto` where it has a number."""
    metas = getattr(kind, "__metadata__", ())
    return any(isinstance(meta, Meta) and meta.extra == MAY_BE_AUTO for meta in metas)


_NO_KEYS: Final = (
    (PolicyTable, "parameters"),
    (Config, "remotes"),
    (Config, "chosen"),
)
"""Fields that are no keys of the file."""


def fields(kind: type[Section]) -> dict[str, SchemaField]:
    """The keys of a table, as the file has them, in order."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, SchemaField] = {}
    for info in msgspec.structs.fields(kind):
        if (kind, info.name) in _NO_KEYS:
            continue
        meta: Meta | None = next(iter(getattr(hints[info.name], "__metadata__", ())), None)
        auto = may_be_auto(hints[info.name])
        default = AUTO if auto and not info.default else info.default
        examples = (meta.examples if meta else None) or [default]
        found[info.encode_name] = SchemaField(
            name=info.name,
            key=info.encode_name,
            type=hints[info.name],
            required=info.required,
            default=default,
            description=(meta.description if meta else None) or "",
            sample=examples[0],
            may_be_auto=auto,
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
        "[usage]": (Usage, fields(Usage)),
        "[log]": (Log, fields(Log)),
        "[telemetry]": (Telemetry, fields(Telemetry)),
        "[catalog]": (Catalog, fields(Catalog)),
        "[[model]]": (Model, fields(Model)),
    }
