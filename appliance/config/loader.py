"""Reading a configuration: a file and its drop-ins become a `Config`, or every problem is reported.

Sizes, durations and paths are resolved here, and what `auto` and shares mean on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from appliance.config.auto import Room, choose
from appliance.config.checks import check_files as check_named
from appliance.config.checks import check_keys, read_checkpoints
from appliance.config.groups import plan_instances
from appliance.config.layers import read_layers
from appliance.config.problems import ProblemReport
from appliance.config.remedies import instead_of_key, shown, unit_forgotten, wrong_and_remedy
from appliance.config.remotes import check_remotes, check_secrets, split_rows
from appliance.config.schema import (
    Adapter,
    Config,
    DeviceGroup,
    Devices,
    Model,
    Scalar,
    SchemaField,
    fields,
    may_be_auto,
    plain_type,
)
from appliance.config.tables.remote import Remote
from appliance.config.tables.section import Section
from appliance.config.toml_lines import KeyPath, dotted
from appliance.errors import ConfigError, nearest
from appliance.platform.admin_socket import AUTO
from appliance.platform.gpus import Gpu, GpusUnknown, list_gpus
from appliance.units import human, toml

S = TypeVar("S", bound=Section)


def load_config(
    path: Path,
    *,
    check_files: bool = True,
    pending: Mapping[Path, str] | None = None,
    now: bool = False,
    running: Config | None = None,
) -> Config:
    """Read and check a configuration file with its drop-ins; relative paths are relative to it.

    Without `check_files` the checkpoints, and what depends on their sizes, are not looked at.
    `pending` are drop-ins to read as if they were written. `auto` is chosen for this machine as if
    no other programs ran, or, `now`, for the memory that is available; what `auto` has chosen in
    `running`, the configuration of a daemon, stays. Raises `ConfigError` with every problem
    found.
    """
    layers = read_layers(path, pending)
    report = ProblemReport(layers)
    config = _read_document(layers.document, report)
    if config is not None:
        config = _with_enabled_models(config, report)
        config = _with_absolute_paths(config, path.absolute().parent)
        config, gpu_bytes = _with_devices(config, report, now=now)
        check_keys(config, report)
        check_remotes(config, report)
        entries = read_checkpoints(config, report) if check_files else []
        if not report.concerns("devices"):
            room = Room.on_this_machine(config, gpu_bytes, now=now)
            config = choose(config, entries, room, running)
        if check_files:
            check_named(config, entries, report)
            check_secrets(config, report)
    if report.problems:
        files = [str(file) for file in layers.paths]
        raise ConfigError(sorted(report.problems, key=lambda p: (files.index(p.file), p.line)))
    assert config is not None  # a document that cannot be read has problems
    return config


def _read_document(document: dict[str, Any], report: ProblemReport) -> Config | None:
    document = dict(document)
    policy = document.get("policy")
    parameters: dict[str, dict[str, Scalar]] = {}
    if isinstance(policy, dict):
        parameters = {key: table for key, table in policy.items() if isinstance(table, dict)}
        document["policy"] = {k: v for k, v in policy.items() if k not in parameters}
    elsewhere = split_rows(document, report)
    remotes = [
        _read_section(Remote, row, ("remote", index), report) for index, row in enumerate(elsewhere)
    ]
    config = _read_section(Config, document, (), report)
    if config is None:
        return None
    choice = msgspec.structs.replace(config.policy, parameters=parameters)
    read = tuple(remote for remote in remotes if remote is not None)
    return msgspec.structs.replace(config, policy=choice, remotes=read)


def _read_section(kind: type[S], table: object, at: KeyPath, report: ProblemReport) -> S | None:
    """The section, or None when it has problems; all of them are reported."""
    if not isinstance(table, dict):
        header = dotted([part for part in at if isinstance(part, str)])
        report.add(at, f"expected a table, got {shown(table)}", f"write [{header}]")
        return None
    before = len(report.problems)
    known = fields(kind)
    for key in table:
        if key not in known:
            report.add((*at, key), "unknown key", instead_of_key(kind, key) or nearest(key, known))
    values: dict[str, Any] = {}
    for key, field in known.items():
        if key in table:
            values[field.name] = _read_value(field.type, table[key], (*at, key), report)
        elif field.required:
            report.add((*at, key), "is missing", _remedy_for_missing(kind, field))
    return kind(**values) if len(report.problems) == before else None


def _read_value(kind: Any, value: object, at: KeyPath, report: ProblemReport) -> Any:
    plain = plain_type(kind)
    if value == AUTO and may_be_auto(kind):
        return plain(0)
    if plain == tuple[Model, ...]:
        if not isinstance(value, list) or not value:
            own = " with a path, for at least one model of this box" if report.remote_rows else ""
            remedy = f"write [[model]]{own or ' for each model'}"
            report.add(at, "expected at least one table", remedy)
            return ()
        return tuple(_read_section(Model, row, (*at, i), report) for i, row in enumerate(value))
    if plain == tuple[Adapter, ...]:
        if not isinstance(value, list):
            report.add(at, "expected tables", "write [[model.adapter]] for each adapter")
            return ()
        return tuple(_read_section(Adapter, row, (*at, i), report) for i, row in enumerate(value))
    if plain == tuple[DeviceGroup, ...]:
        if not isinstance(value, list):
            report.add(at, "expected tables", "write [[devices.group]] for each group")
            return ()
        rows = [_read_section(DeviceGroup, row, (*at, i), report) for i, row in enumerate(value)]
        return tuple(rows)
    if isinstance(plain, type) and issubclass(plain, Section):
        return _read_section(plain, value, at, report)
    try:
        read = msgspec.convert(value, kind, dec_hook=_read_unit)
    except msgspec.ValidationError as error:
        report.add(at, *wrong_and_remedy(kind, value, str(error)))
        return None
    if problem := unit_forgotten(value, read):
        report.add(at, *problem)
    return read


def _read_unit(kind: type, value: object) -> object:
    reader: Callable[[object], object] = kind.read  # type: ignore[attr-defined]
    return reader(value)


def _remedy_for_missing(kind: type[Section], field: SchemaField) -> str:
    if kind is Config:
        header = "[[model]] for each model" if field.key == "model" else f"[{field.key}]"
        return f"add {header}"
    return f"add {field.key} = {toml(field.sample)}"


def _with_enabled_models(config: Config, report: ProblemReport) -> Config:
    rows = [index for index, model in enumerate(config.models) if model.enabled]
    if not rows:
        report.add(("model",), "no model is enabled", "take enabled = false from one")
    read = report.rows or range(len(config.models))
    report.rows = [read[row] for row in rows]
    here = [index for index, remote in enumerate(config.remotes) if remote.enabled]
    report.remote_rows = [report.remote_rows[index] for index in here]
    return msgspec.structs.replace(
        config,
        models=tuple(config.models[row] for row in rows),
        remotes=tuple(config.remotes[index] for index in here),
    )


def absolute_path(base: Path, path: str) -> str:
    """A path of a file in the folder `base`; `~` is the home of the user that reads it."""
    try:
        return str(base / Path(path).expanduser())
    except RuntimeError:  # of a user that there is not: reported as missing
        return str(base / path)


def _with_absolute_paths(config: Config, base: Path) -> Config:
    replace = msgspec.structs.replace
    journal, devices, batches = config.journal, config.devices, config.batches
    if journal.path:
        journal = replace(journal, path=absolute_path(base, journal.path))
    if devices.images:
        devices = replace(devices, images=absolute_path(base, devices.images))
    if spill := devices.kv_spill.directory:
        kv_spill = replace(devices.kv_spill, directory=absolute_path(base, spill))
        devices = replace(devices, kv_spill=kv_spill)
    if devices.ceilings and devices.ceilings != AUTO:
        devices = replace(devices, ceilings=absolute_path(base, devices.ceilings))
    if batches.directory:
        batches = replace(batches, directory=absolute_path(base, batches.directory))
    usage = config.usage
    if usage.directory:
        usage = replace(usage, directory=absolute_path(base, usage.directory))
    folder = config.catalog.folder
    if folder == AUTO:
        given = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        folder = str(Path(given, "models")) if given else ""
    catalog = replace(config.catalog, folder=absolute_path(base, folder) if folder else "")
    if secret := catalog.peer_key_file:
        catalog = replace(catalog, peer_key_file=absolute_path(base, secret))
    models = tuple(
        replace(
            model,
            path=absolute_path(base, model.path),
            adapters=tuple(
                replace(one, path=absolute_path(base, one.path)) for one in model.adapters
            ),
            speculate=replace(model.speculate, path=absolute_path(base, head))
            if (head := model.speculate.path)
            else model.speculate,
        )
        for model in config.models
    )
    remotes = tuple(
        replace(remote, remote_key_file=absolute_path(base, secret))
        if (secret := remote.remote_key_file)
        else remote
        for remote in config.remotes
    )
    named = {name: getattr(config.api, name) for name in ("keys", "tls_certificate", "tls_key")}
    if config.api.admin_socket != AUTO:
        named["admin_socket"] = config.api.admin_socket
    absolute = {name: absolute_path(base, path) for name, path in named.items() if path}
    api = replace(config.api, **absolute)
    return replace(
        config,
        api=api,
        journal=journal,
        devices=devices,
        batches=batches,
        usage=usage,
        catalog=catalog,
        models=models,
        remotes=remotes,
    )


def _with_devices(config: Config, report: ProblemReport, *, now: bool) -> tuple[Config, int | None]:
    """What `kind` and shares mean on this machine, and the bytes of its smallest GPU in use, or
    `now` of that with the least free memory; None if models run on the CPU."""
    devices = config.devices
    gpus: list[Gpu] = []
    to_divide = None
    if devices.kind != "cpu":
        try:
            gpus = list_gpus()
            reason = "this machine has no NVIDIA GPU"
        except GpusUnknown as error:
            reason = str(error)
        if not gpus and devices.kind == "cuda":
            report.add(("devices", "kind"), reason, 'or use "cpu"')
            return config, None
    if not gpus:
        if devices.memory_bytes.share is not None:
            report.add(
                ("devices", "memory"),
                "a share is of a GPU's memory, and models run on the CPU here",
                "give a size, such as 192MiB",
            )
        devices = msgspec.structs.replace(devices, kind="cpu")
    else:
        devices = msgspec.structs.replace(devices, kind="cuda")
        used = _used_gpus(devices, gpus, report)
        least = min(gpu.memory_bytes for gpu in used)
        memory = devices.memory_bytes.taken(least)
        if memory > least:
            report.add(
                ("devices", "memory"),
                f"{human(memory)} are more than the {human(least)} of a GPU",
                'use a share, such as "90%"',
            )
        devices = msgspec.structs.replace(devices, memory_bytes=memory)
        to_divide = min(gpu.free_bytes for gpu in used) if now else least
    return msgspec.structs.replace(config, devices=devices), to_divide


def _too_many(devices: Devices, instances: int, ranks: int, gpus: int) -> tuple[KeyPath, str, str]:
    """The problem of more ranks than there are GPUs."""
    wrong = f"{instances} instances of {ranks} ranks in all have {gpus} GPUs"
    if devices.groups:
        return ("devices", "group"), wrong, f"have groups of {gpus} ranks or fewer in all"
    if ranks == instances:
        remedy = f"use {gpus} or fewer: each has one to itself"
        return ("devices", "instances"), f"{instances} instances have {gpus} GPUs", remedy
    fitting = gpus // devices.tensor_parallel
    if fitting:
        remedy = f"use {fitting} or fewer: each rank has a GPU to itself"
        return ("devices", "instances"), wrong, remedy
    wrong = f"an instance of {devices.tensor_parallel} ranks has {gpus} GPUs"
    return (
        ("devices", "tensor_parallel"),
        wrong,
        f"use {gpus} or fewer: each rank has one to itself",
    )


def _used_gpus(devices: Devices, gpus: Sequence[Gpu], report: ProblemReport) -> Sequence[Gpu]:
    """Those that instances compute on; all of them if that cannot be."""
    there = {gpu.number: gpu for gpu in gpus}
    for index, group in enumerate(devices.groups):
        if missing := [number for number in group.gpus if number not in there]:
            report.add(
                ("devices", "group", index, "gpus"),
                f"there is no GPU {missing[0]}",
                f"use numbers from 0 to {max(there)}",
            )
            return gpus
    plans = plan_instances(devices)
    wanted = [number for plan in plans for number in plan.gpus]
    if len(wanted) > len(gpus):
        report.add(*_too_many(devices, len(plans), len(wanted), len(gpus)))
        return gpus
    return [there[number] for number in wanted] or gpus  # none: reported with its group
