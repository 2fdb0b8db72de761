"""A configuration for checkpoints that were found, with all sizes left to the appliance.

`appliance serve DIR` runs it, and `appliance init` writes it with comments. What can be served is
decided by the one reader of configurations: models that it refuses are left out, with its words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import tomlkit

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.discovery.find import (
    LEVELS,
    Found,
    FoundModel,
    LeftOut,
    NotFound,
)
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.config.sizing import read_model
from appliance.errors import ConfigError, Problem
from appliance.platform import machine_memory
from appliance.platform.admin_socket import AUTO
from appliance.platform.gpus import Gpu, GpusUnknown, list_gpus
from appliance.units import Address, human

BIND: Final = Address("127.0.0.1:11500")
_OF_MODEL: Final = re.compile(r"model\[(\d+)\]")


class Terms(NamedTuple):
    """What a starter says besides its models."""

    bind: Address
    folder: Path
    """For models that are pulled."""
    admin_socket: str = AUTO


class Starter(NamedTuple):
    """A configuration of all models that can be served, and why the others cannot."""

    models: tuple[FoundModel, ...]
    config: Config
    left_out: tuple[LeftOut, ...]


class NothingToServe(NotFound):
    """None of the models that were found can be served."""

    def __init__(self, left_out: Sequence[LeftOut], looked_in: Sequence[Path] = ()) -> None:
        lines = [str(one) for one in left_out] or list(map(_without_models, looked_in))
        super().__init__("\n".join([*lines, "there is no model that can be served"]))
        self.left_out = tuple(left_out)


def write_starter(file: Path, found: Found, terms: Terms, *, now: bool = False) -> Starter:
    """Write a configuration of the models to `file`, and leave out those that it is refused for.

    Raises `NothingToServe` if none is left, `ConfigError` for what is wrong besides models, and
    `OSError`."""
    models, left_out = found.models, list(found.left_out)
    while models:
        file.write_text(starter_text(models, terms), encoding="utf-8")
        try:
            return Starter(models, load_config(file, now=now), tuple(left_out))
        except ConfigError as error:
            refused = _refused(error)
            if not refused:
                raise
            left_out += [
                LeftOut(models[row].path, problem.wrong, problem.remedy)
                for row, problem in sorted(refused.items())
            ]
            models = tuple(model for row, model in enumerate(models) if row not in refused)
    raise NothingToServe(left_out, found.looked_in)


def _without_models(directory: Path) -> str:
    word = _quoted_word(str(directory))
    return (
        f"{word} has no checkpoint, a directory with config.json or *.safetensors, there or up to "
        f"{LEVELS} levels below; pull one with `appliance pull ORG/MODEL --dir {word} --no-add`, "
        "or pull one and chat with it: appliance run ORG/MODEL"
    )


def starter_text(models: Sequence[FoundModel], terms: Terms) -> str:
    """The configuration as TOML."""
    gpus = _gpus()
    tables = [
        f"[api]\nbind = {_quoted(terms.bind)}\n{_socket(terms)}",
        f"[devices]\n{_instances(gpus)}",
        f"[catalog]\nfolder = {_quoted(str(terms.folder))}\n",
        *(_table(model) for model in models),
    ]
    return "\n".join(tables)


def commented_text(starter: Starter, terms: Terms, file: str) -> str:
    """The same for people: what the automatic sizes are on this machine, and what each model is.
    `file` is what the configuration will be called."""
    devices, gpus = starter.config.devices, _gpus()
    entries = [read_model(model, devices) for model in starter.config.models]
    chosen = {one.key: str(one).partition(" = ")[2] for one in starter.config.chosen}
    name = _quoted_word(file)
    tables = [
        f"# Written by `appliance init` for {_machine(gpus)}.\n"
        f"# Check it: appliance config check {name}\n"
        f"# Run it:   appliance serve {name}\n"
        "# All keys and what they mean: appliance config sample, or docs/configuration.md.\n",
        "[api]\n"
        "# For other machines: an address of this one, and keys (`appliance key create NAME`).\n"
        f"bind = {_quoted(terms.bind)}\n"
        '# keys = "keys.json"\n',
        "[devices]\n"
        f"{_instances(gpus)}"
        "# What each instance has for weights and KV cache. Here it is\n"
        f"# {chosen['devices', 'memory']}.\n"
        'memory = "auto"\n'
        "# Host memory for one copy of all weights, and for KV cache that waits. Here it is\n"
        f"# {chosen['devices', 'host_cache']}.\n"
        'host_cache = "auto"\n',
        "[catalog]\n"
        "# `appliance pull ORG/MODEL` puts models there, and `appliance rm` deletes from there.\n"
        f"folder = {_quoted(str(terms.folder))}\n",
        *(
            f"# {_described(entry)}\n{_table(model)}"
            f"# Longest prompt and answer together, tokens. Here it is\n"
            f"# {chosen['model', model.name, 'max_context']}.\n"
            'max_context = "auto"\n'
            for model, entry in zip(starter.models, entries, strict=True)
        ),
    ]
    return "\n".join(tables)


def _refused(error: ConfigError) -> dict[int, Problem]:
    """The first problem of each model that is to be left out, by its place among the models. Of
    those that have no room it is only the largest: without it, sizes are chosen anew, and the
    others may have room."""
    of_models = [
        (int(match[1]), problem)
        for problem in error.problems
        if (match := _OF_MODEL.match(problem.key))
    ]
    others = [(row, problem) for row, problem in of_models if not problem.needed_bytes]
    largest = sorted(of_models, key=lambda one: one[1].needed_bytes, reverse=True)[:1]
    found: dict[int, Problem] = {}
    for row, problem in others or largest:
        found.setdefault(row, problem)
    return found


def _table(model: FoundModel) -> str:
    return f"[[model]]\nname = {_quoted(model.name)}\npath = {_quoted(str(model.path))}\n"


def _socket(terms: Terms) -> str:
    chosen = terms.admin_socket
    return "" if chosen == AUTO else f"admin_socket = {_quoted(chosen)}\n"


def _instances(gpus: Sequence[Gpu]) -> str:
    return f"# One for each GPU.\ninstances = {len(gpus)}\n" if len(gpus) > 1 else ""


def _gpus() -> list[Gpu]:
    try:
        return list_gpus()
    except GpusUnknown:
        return []


def _machine(gpus: Sequence[Gpu]) -> str:
    """This machine in words."""
    total = machine_memory.read_memory().total_bytes
    memory = "" if total is None else f", {human(total)} of memory"
    cards = ", ".join(f"{gpu.name} with {human(gpu.memory_bytes)}" for gpu in gpus)
    count = len(os.sched_getaffinity(0))
    return f"a machine with {count} processors{memory}, {cards or 'no NVIDIA GPU'}"


def _described(entry: CatalogEntry) -> str:
    return (
        f"{entry.architecture}: {human(entry.weight_bytes)} of weights in {entry.dtype}, "
        f"{human(entry.kv_bytes_per_token)} of KV cache for each token"
    )


def _quoted(text: str) -> str:
    """As a string of TOML, whatever characters it has."""
    return tomlkit.item(str(text)).as_string()


def _quoted_word(file: str) -> str:
    """As a word of a shell, in a comment of one line."""
    return file if file.isprintable() and " " not in file else repr(file)
