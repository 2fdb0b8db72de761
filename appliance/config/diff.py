"""Two configurations compared: what is different, and what of it a reload applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from appliance.config.schema import Config, Model, PolicyTable, fields
from appliance.config.tables.section import Section
from appliance.config.toml_lines import KeyPath, dotted
from appliance.platform.admin_socket import AUTO
from appliance.service.settings import ConfigChange
from appliance.units import Address, Bytes, Seconds, Share, human, toml
from appliance.vocabulary import ModelName

TERMS: Final = ("slo", "batch_slo", "max_queue", "pin", "aliases", "load")
"""Keys of a model that are applied while it is served."""
LIMITS: Final = (("api", "max_queue"), ("api", "progress_deadline"), ("log", "level"))
TLS: Final = (("api", "tls_certificate"), ("api", "tls_key"))


def _size(value: Bytes) -> str | int:
    """As text, if that says it to the byte. A rounded text may be no size at all: "1.4GiB" is not
    a whole number of bytes."""
    text = human(value)
    try:
        return text if Bytes.read(text) == value else int(value)
    except ValueError:
        return int(value)


def as_written(section: Section) -> dict[str, Any]:
    """A table as a file would have it, with every key: sizes and durations are strings."""
    table: dict[str, Any] = {}
    for key, field in fields(type(section)).items():
        value = getattr(section, field.name)
        if isinstance(value, Section):
            table[key] = as_written(value)
        elif value and isinstance(value, tuple) and isinstance(value[0], Section):
            table[key] = [as_written(row) for row in value]
        elif field.may_be_auto and not value:
            table[key] = AUTO
        elif isinstance(value, Bytes):
            table[key] = _size(value)
        elif isinstance(value, Seconds):
            table[key] = toml(value).strip('"')
        elif isinstance(value, Address | Share):
            table[key] = str(value)
        else:
            table[key] = value
    if isinstance(section, PolicyTable):
        table |= {name: dict(values) for name, values in section.parameters.items()}
    return table


def joining_models(running: Config, found: Config) -> list[Model]:
    """Models of `found` that a reload adds. Whether they fit was read off the devices of `found`:
    if those wait for a restart, so do they."""
    if found.devices != running.devices:
        return []
    known = {model.name for model in running.models}
    return [model for model in found.models if model.name not in known]


def exchanging_models(running: Config, found: Config) -> set[ModelName]:
    """Models whose adapters a reload exchanges: they have room for others, the same as before."""
    known = {model.name: model for model in running.models}
    return {
        model.name
        for model in found.models
        if (old := known.get(model.name)) is not None
        and old.max_loras
        and (old.max_loras, old.max_lora_rank) == (model.max_loras, model.max_lora_rank)
        and old.adapters != model.adapters
    }


def _moving(running: Config, found: Config) -> set[ModelName]:
    """Models that a reload adds or takes away; the last one stays."""
    known = {model.name for model in running.models}
    read = {model.name for model in found.models}
    joining = {model.name for model in joining_models(running, found)}
    here = joining | (known - read) if joining or known & read else set()
    return here | {remote.name for remote in (*running.remotes, *found.remotes)}


def changes(running: Config, found: Config) -> Iterator[ConfigChange]:
    """What `found` says otherwise, in the order of the file, models by name."""
    old, new = dict(_flat(running)), dict(_flat(found))
    at_once = _moving(running, found)
    remote = {one.name for one in running.remotes} & {one.name for one in found.remotes}
    exchanging = {("model", name, "adapter") for name in exchanging_models(running, found)}
    stays_https = bool(running.api.tls_certificate and found.api.tls_certificate)
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) == new.get(key):
            continue
        model = key[:2]
        if key[0] == "model" and len(key) > 2 and (model not in old or model not in new):
            continue  # the model as a whole is reported
        renews = stays_https and key in TLS
        elsewhere = len(key) > 2 and key[1] in remote
        at_runtime = key in exchanging or _applies_at_once(key) or elsewhere
        moves = key[0] == "model" and len(key) == 2 and key[1] in at_once
        yield ConfigChange(
            key=dotted(key),
            old=old.get(key),
            new=new.get(key),
            applies="reload" if renews or moves or at_runtime else "restart",
        )


def _flat(config: Config) -> Iterator[tuple[KeyPath, object]]:
    table = as_written(config)
    models = table.pop("model")
    yield from _leaves(table, ())
    for model in [*models, *map(as_written, config.remotes)]:
        yield ("model", model["name"]), model.get("path") or model["remote"]
        yield from _leaves(model, ("model", model["name"]))


def _leaves(table: dict[str, Any], at: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*at, key))
        else:
            yield (*at, key), value


def _applies_at_once(key: KeyPath) -> bool:
    if key[0] == "model":
        return len(key) > 2 and key[2] in TERMS
    return key[0] == "policy" or key in LIMITS


def complete(row: Mapping[str, Any]) -> dict[str, Any]:
    """A model's table with every key, so that none of a table below shows through."""
    required = {key: row[key] for key in ("name", "path")}
    whole = as_written(Model(**required))
    for key, value in row.items():
        merges = isinstance(value, Mapping)
        whole[key] = {**whole[key], **value} if merges else value
    return whole
