"""Checks of a configuration that was read: across its keys, and against the files that it names.

What is refused here can never work; what is allowed but worth knowing is a warning.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Final

from appliance.access.keys import KeyFile
from appliance.checkpoints.adapters import MAX_ADAPTERS, UnsupportedAdapter, full_name
from appliance.checkpoints.architectures.chat_sounds import (
    HEARS,
    MOST_SOUNDS,
    READS_SOUND,
    read_besides_text,
    why_no_sounds,
)
from appliance.checkpoints.architectures.task_adapters import TaskRefused, served_task
from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.draft_heads import UnsupportedHead
from appliance.checkpoints.drafts import IN_A_FOLDER, METHODS, NGRAM, OTHERWISE, check_drafts
from appliance.checkpoints.families import UnsupportedModel, is_tried
from appliance.checkpoints.language_models import MEDIA, READS_IMAGES, why_no_images
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.quantized.quantization import method_of, multiplied
from appliance.checkpoints.task import PoolerRefused, check_pooler, check_task
from appliance.config.groups import check_groups, devices_of, plan_instances, unused
from appliance.config.machine_room import check_machine
from appliance.config.model_parsers import check_parsers
from appliance.config.problems import ProblemReport
from appliance.config.remotes import shared_secrets
from appliance.config.schema import (
    Api,
    Config,
    Devices,
    Model,
    PolicyTable,
    Speculate,
    Telemetry,
)
from appliance.config.sizing import check_sizes, read_model
from appliance.errors import CheckpointError, KeysError, PolicyChoiceError
from appliance.http.image_hosts import parse_host
from appliance.platform import torchvision
from appliance.platform.admin_socket import AdminSocketError, group_id
from appliance.platform.installation import remedy_for
from appliance.platform.tls import problem_with
from appliance.policies import loader as policies
from appliance.service.front_paths import FRONT_PATHS
from appliance.units import human

PAGE_BYTES: Final = 4096
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""``org/model``, as hubs call models."""

LEAST_AUTOPILOT_SECONDS: Final = {"interval": 10, "cpu": 1, "window": 10, "watch": 5}
"""A replay takes longer than less would leave it, and less says nothing."""
MOST_AUTOPILOT_CPU_SECONDS: Final = 300


def check_keys(config: Config, report: ProblemReport) -> None:
    """Report what shows in the configuration itself, before `auto` has chosen anything."""
    _check_reach(config.api, report)
    _check_shared_keys(config.api, report)
    _check_root_path(config.api, report)
    _check_devices(config.devices, report)
    check_groups(config, report)
    _check_codec(config, report)
    _check_telemetry(config.telemetry, report)
    _check_policies(config.policy, report)
    _check_autopilot(config, report)
    _check_image_hosts(config.api, report)
    _check_names(config.models, report)
    _check_speculate(config.models, report)
    _check_gaps(config.models, report)
    check_parsers(config.models, report)


def check_files(config: Config, entries: list[CatalogEntry | None], report: ProblemReport) -> None:
    """Report what does not go with this machine, or with the files that are named; `entries` are
    what was read of the checkpoints."""
    for key, path in (
        (("journal", "path"), config.journal.path),
        (("batches", "directory"), config.batches.directory),
        (("usage", "directory"), config.usage.directory),
        (("devices", "kv_spill", "directory"), config.devices.kv_spill.directory),
    ):
        if path and not Path(path).parent.is_dir():
            report.add(key, f"{Path(path).parent} is not a directory", "create it")
    check_machine(config.devices, report)
    _check_api_files(config.api, report)
    _check_tasks(config, entries, report)
    _check_heads(config, entries, report)
    _check_images(config, report)
    _check_sounds(config, report)
    _check_drafts(config, entries, report)
    check_sizes(config, entries, report)


def _check_reach(api: Api, report: ProblemReport) -> None:
    if not api.bind.local and not api.keys:
        report.add(
            ("api", "bind"),
            f"{api.bind} can be reached from outside this machine, and there are no keys",
            'add keys = "keys.json" and make one with `appliance key create NAME`, or use '
            "127.0.0.1",
        )


def _check_shared_keys(api: Api, report: ProblemReport) -> None:
    """What says how a file of keys is used means nothing without one."""
    for key, said in (
        ("keys_read_only", api.keys_read_only),
        ("limits_share", api.limits_share.fraction != 1),
    ):
        if said and not api.keys:
            report.add(("api", key), "there are no keys", 'add keys = "keys.json", or leave it out')


def _check_root_path(api: Api, report: ProblemReport) -> None:
    """A path of the API itself would hide what lies below it."""
    first = api.root_path[1:].partition("/")[0]
    if first and any(path[1:].partition("/")[0] == first for path in FRONT_PATHS):
        report.add(
            ("api", "root_path"),
            f"/{first} is where the API itself has paths",
            'use another one, such as "/llm"',
        )


def _check_gaps(models: tuple[Model, ...], report: ProblemReport) -> None:
    """A gap below the time between tokens would be missed by tokens that are in time."""
    for index, model in enumerate(models):
        for key, slo in (("slo", model.slo), ("batch_slo", model.batch_slo)):
            if 0 < slo.gap_seconds < slo.tbt_seconds:
                report.add(
                    ("model", index, key, "gap"),
                    f"{slo.gap_seconds:g} s are less than the {slo.tbt_seconds:g} s between tokens",
                    f'use {slo.tbt_seconds:g}s or more, a shorter tbt, or "0s" for no such promise',
                )


def _check_telemetry(telemetry: Telemetry, report: ProblemReport) -> None:
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
            f"{remedy_for('otel')}, or use false",
        )


def _has_opentelemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _check_api_files(api: Api, report: ProblemReport) -> None:
    if api.keys:
        try:
            KeyFile(Path(api.keys)).read_or_copy()
        except KeysError as error:
            report.add(("api", "keys"), str(error), "restore it, or remove it and make new keys")
        if not Path(api.keys).parent.is_dir():
            report.add(("api", "keys"), f"{Path(api.keys).parent} is not a directory", "create it")
    if problem := problem_with(api.tls_certificate, api.tls_key):
        report.add(("api", problem.key), problem.wrong, problem.remedy)
    try:
        group_id(api.admin_group)
    except AdminSocketError as error:
        wrong = str(error).removeprefix("api.admin_group: ")
        report.add(("api", "admin_group"), wrong, "create it, or leave it out")


def _check_devices(devices: Devices, report: ProblemReport) -> None:
    slab = devices.slab_bytes
    if slab % PAGE_BYTES or slab & (slab - 1):
        report.add(
            ("devices", "slab"),
            f"{human(slab)} is not a power of two of at least {human(PAGE_BYTES)}",
            'use a size such as "2MiB"',
        )
    elif devices.memory_bytes and not devices.slabs:
        runtime = f" after devices.runtime ({human(devices.runtime_bytes)})" if devices.cuda else ""
        report.add(
            ("devices", "memory"),
            f"is smaller than a slab of {human(slab)}{runtime}",
            "make it larger",
        )


def _check_codec(config: Config, report: ProblemReport) -> None:
    """What cannot be together with weights that are encoded in the host cache."""
    devices = config.devices
    if devices.host_cache_codec == "none":
        return
    for found, wrong, remedy in (
        (devices.cuda, "weights are not decoded on GPUs yet", 'devices.kind = "cpu"'),
        (devices.images, "images on disk are those of plain weights", "no devices.images"),
        (
            any(plan.ranks > 1 for plan in plan_instances(devices)),
            "ranks share the slabs of an image, and would need different numbers of them",
            "tensor_parallel = 1 in [devices], or in every group",
        ),
        (
            any(model.max_loras for model in config.models),
            "adapters that come while a model serves are written into plain weights",
            "no max_loras",
        ),
    ):
        if found:
            report.add(("devices", "host_cache_codec"), wrong, f'use "none", or {remedy}')


def _check_policies(table: PolicyTable, report: ProblemReport) -> None:
    try:
        policies.load_stack(table.choice)
    except PolicyChoiceError as error:
        for problem in error.problems:
            # Decisions and tables of parameters are keys of the one table here.
            shared = problem.key[0] in ("decisions", "parameters")
            key = problem.key[1:] if shared else problem.key
            report.add(("policy", *key), problem.wrong, problem.remedy)


def _check_autopilot(config: Config, report: ProblemReport) -> None:
    table = config.policy
    if table.autopilot != "off" and not config.journal.path:
        wrong = "the autopilot replays the end of the journal, and there is none"
        remedy = 'add [journal] with path = "journal.jsonl", or use "off"'
        report.add(("policy", "autopilot"), wrong, remedy)
    for name, least in LEAST_AUTOPILOT_SECONDS.items():
        if getattr(table, f"autopilot_{name}_seconds") < least:
            wrong, remedy = f"is less than {least} s", f'use "{least}s" or more'
            report.add(("policy", f"autopilot_{name}"), wrong, remedy)
    if table.autopilot_cpu_seconds > MOST_AUTOPILOT_CPU_SECONDS:
        wrong = "is more than one replay may take of a tenth of a core in an hour"
        remedy = f"use {MOST_AUTOPILOT_CPU_SECONDS}s at most"
        report.add(("policy", "autopilot_cpu"), wrong, remedy)


def _check_names(models: tuple[Model, ...], report: ProblemReport) -> None:
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
    named = first | _check_aliases(models, first, report)
    for index, model in enumerate(models):
        _check_adapter_names(index, model, named, report)


def _check_aliases(
    models: tuple[Model, ...], names: Mapping[str, int], report: ProblemReport
) -> dict[str, int]:
    """Whose aliases there are, by the numbers of their models."""
    seen: dict[str, int] = {}
    for index, model in enumerate(models):
        for alias in model.aliases:
            other = names.get(alias, seen.get(alias))
            if other is not None:
                wrong = f"{alias} is a name of {models[other].name} already"
                report.add(("model", index, "aliases"), wrong, "have each name mean one model")
            seen.setdefault(alias, index)
    return seen


def _check_adapter_names(
    index: int, model: Model, models: Mapping[str, int], report: ProblemReport
) -> None:
    """Clients ask for a model and its adapter by one name, which may mean nothing else."""
    seen = set()
    if len(model.adapters) > MAX_ADAPTERS:
        report.add(
            ("model", index, "adapter"),
            f"{model.name} has {len(model.adapters)} adapters, more than {MAX_ADAPTERS}",
            "divide them among two models with the same checkpoint",
        )
    elif 0 < model.max_loras < len(model.adapters):
        report.add(
            ("model", index, "adapter"),
            f"{model.name} has {len(model.adapters)} adapters, more than max_loras "
            f"({model.max_loras})",
            "set max_loras to so many, or leave some out",
        )
    for number, adapter in enumerate(model.adapters):
        at = ("model", index, "adapter", number, "name")
        name = full_name(model.name, adapter.name)
        if adapter.name == "latest":
            report.add(
                at, f"{name} is Ollama's name for {model.name} itself", "give it another name"
            )
        elif name in models or adapter.name in seen:
            other = "a model" if name in models else "another adapter"
            report.add(at, f"{name} is the name of {other} already", "give it a name of its own")
        seen.add(adapter.name)


def _check_image_hosts(api: Api, report: ProblemReport) -> None:
    for index, host in enumerate(api.image_hosts):
        try:
            parse_host(host)
        except ValueError as error:
            report.add(
                ("api", "image_hosts", index),
                str(error),
                'name hosts, such as "images.example.org", "*.example.org" or "http://store:8080"',
            )
    for index, network in enumerate(api.image_networks):
        try:
            ip_network(network)
        except ValueError as error:
            report.add(
                ("api", "image_networks", index), str(error), 'name networks, such as "10.1.2.0/24"'
            )


def _check_images(config: Config, report: ProblemReport) -> None:
    devices = config.devices
    for index, model in enumerate(config.models):
        if not model.images:
            continue
        try:
            wrong = why_no_images(
                read_model_config(Path(model.path)),
                ranks=devices_of(model, devices).tensor_parallel,
                cuda=devices.cuda,
                libraries=torchvision.is_there(),
            )
        except (CheckpointError, OSError):  # which is a problem of its own
            continue
        if wrong:
            report.add(("model", index, "images"), wrong, "use images = 0")


def _check_sounds(config: Config, report: ProblemReport) -> None:
    devices = config.devices
    for index, model in enumerate(config.models):
        if not model.sounds:
            continue
        remedy = "use sounds = 0"
        try:
            checkpoint = read_model_config(Path(model.path))
            why_not = partial(
                why_no_sounds,
                checkpoint,
                ranks=devices_of(model, devices).tensor_parallel,
                cuda=devices.cuda,
            )
            wrong = why_not(sounds=model.sounds)
            if wrong and not why_not():
                remedy = f"use sounds = {MOST_SOUNDS[checkpoint.architecture]}"
        except (CheckpointError, OSError):  # which is a problem of its own
            continue
        if wrong:
            report.add(("model", index, "sounds"), wrong, remedy)


def read_checkpoints(config: Config, report: ProblemReport) -> list[CatalogEntry | None]:
    """Those of the models, in order; None for one that cannot be read, which is reported."""
    entries: list[CatalogEntry | None] = []
    for index, model in enumerate(config.models):
        entry = None
        try:
            entry = read_model(model, config.devices)
        except UnsupportedAdapter as error:
            report.add(("model", index, "adapter"), error.wrong, error.remedy)
        except UnsupportedHead as error:
            report.add(("model", index, "speculate"), error.wrong, error.remedy)
        except CheckpointError as error:
            at = ("model", index, "path")
            written = str(report.written(at))
            remedy = _pull_instead(written, Path(model.path)) or _whole_path(written)
            remedy = remedy or error.remedy
            report.add(at, error.wrong, remedy)
        except OSError as error:
            report.add(("model", index, "path"), str(error), "make it readable")
        if entry is not None and model.max_context > entry.max_positions:
            report.add(
                ("model", index, "max_context"),
                f"{model.max_context} tokens are more than the model's {entry.max_positions}",
                f"use {entry.max_positions} or less",
            )
        entries.append(entry)
    return entries


def _pull_instead(written: str, path: Path) -> str:
    """The remedy if a model of a hub was named; "" if not."""
    named = _HUB_NAME.fullmatch(written) and not path.parent.exists()
    if not named:
        return ""
    return (
        f"use `appliance pull {written} --dir DIR --no-add` and set path to the folder that it "
        "prints, or give the directory of a checkpoint"
    )


def _whole_path(written: str) -> str:
    """The remedy if a path begins with `~`, which is another folder for another user; "" if not."""
    if written[:2] not in ("~", "~/"):
        return ""
    try:
        return f"`~` is {Path.home()} for the user that reads this: write the whole path"
    except RuntimeError:
        return "the user that reads this has no home: write the whole path"


def _check_tasks(config: Config, entries: list[CatalogEntry | None], report: ProblemReport) -> None:
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None:
            continue
        try:
            task = check_task(entry.path, model.task)
            check_pooler(entry.path, task, model.pooler_config.chosen)
            served_task(read_model_config(entry.path), model.embedding_task)
        except CheckpointError as error:
            report.add(("model", index, "task"), str(error), "take another checkpoint, or task")
        except PoolerRefused as error:
            at = ("model", index, "pooler_config", error.key)
            report.add(at, error.wrong, error.remedy)
        except TaskRefused as error:
            report.add(("model", index, "embedding_task"), error.wrong, error.remedy)


def _check_speculate(models: tuple[Model, ...], report: ProblemReport) -> None:
    for index, model in enumerate(models):
        at, asked = ("model", index, "speculate"), model.speculate
        if asked.method not in ("", *METHODS):
            report.add(
                (*at, "method"),
                f"there are no drafts by {asked.method!r}: there are {', '.join(METHODS)}",
                f'use "{NGRAM}", or {OTHERWISE}',
            )
        elif not asked.method and asked != Speculate():
            report.add(at, "it has no method", f'add method = "{NGRAM}", or {OTHERWISE}')
        elif (asked.method in IN_A_FOLDER) is not bool(asked.path):
            has = "has no path" if asked.method in IN_A_FOLDER else "has a path, but no folder"
            report.add(
                (*at, "path"),
                f'a head for "{asked.method}" {has}',
                f"set path for {' and '.join(sorted(IN_A_FOLDER))}, and for nothing else",
            )
        if asked.prompt_lookup_min > asked.prompt_lookup_max:
            report.add(
                (*at, "prompt_lookup_min"),
                f"{asked.prompt_lookup_min} is more than prompt_lookup_max "
                f"({asked.prompt_lookup_max})",
                f"use {asked.prompt_lookup_max} or less",
            )


def _check_drafts(
    config: Config, entries: list[CatalogEntry | None], report: ProblemReport
) -> None:
    """Whether models may have the drafts that they are to have."""
    devices = config.devices
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None or not model.speculate.method:
            continue
        try:
            check_drafts(
                read_model_config(entry.path),
                check_task(entry.path, model.task),
                on_cpu=not devices.cuda,
                ranks=devices_of(model, devices).tensor_parallel,
                images=model.images or model.sounds,
                adapters=bool(model.adapters or model.max_loras),
            )
        except UnsupportedModel as error:
            report.add(("model", index, "speculate"), error.wrong, error.remedy)
        except CheckpointError:
            pass  # of its task, and reported as such


def _check_heads(config: Config, entries: list[CatalogEntry | None], report: ProblemReport) -> None:
    """Every rank has as many attention heads as the others, and at least one for keys and values:
    these are divided, or, if there are fewer than ranks, each is on equally many ranks."""
    for index, (model, entry) in enumerate(zip(config.models, entries, strict=True)):
        if entry is None or not entry.kv.attention:
            continue
        ranks = devices_of(model, config.devices).tensor_parallel
        if not (entry.heads % ranks or max(entry.kv_heads, ranks) % min(entry.kv_heads, ranks)):
            continue
        report.add(
            ("model", index),
            f"{entry.name} has {entry.heads} attention heads and {entry.kv_heads} for keys and "
            f"values, which {ranks} ranks cannot divide among them",
            "set tensor_parallel, in [devices] or in the model's groups, to a divisor of both",
        )


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
    found += shared_secrets(config)
    found += unused(config)
    found += [warning for model in config.models if (warning := _of_model(model))]
    if rest := config.devices.memory_bytes % config.devices.slab_bytes:
        found.append(f"devices.memory: the last {human(rest)} are less than a slab and stay unused")
    return found


def _of_model(model: Model) -> str:
    """A warning if a model reads what is not served, or if no test serves its architecture."""
    try:
        checkpoint = read_model_config(Path(model.path))
        architecture = checkpoint.architecture
        if architecture in MEDIA and not (model.images or model.sounds):
            kind = read_besides_text(architecture)
            key = "sounds" if architecture in HEARS else "images"
            can = architecture in READS_IMAGES | READS_SOUND
            return (
                f"model.{model.name}: {architecture} is served for text only; requests with {kind} "
                f"are refused{f'; see {key}' if can else ''}"
            )
        if stored := multiplied(checkpoint):
            return (
                f"model.{model.name}: its weights are stored in {method_of(stored)}, and take the "
                "memory of the type that it is computed in"
            )
        if is_tried(checkpoint):
            return ""
    except (CheckpointError, OSError):  # which is a problem of its own
        return ""
    return (
        f"model.{model.name}: no test serves {checkpoint.architecture}; compare its answers with "
        "vLLM's before you rely on them"
    )
