"""The command line: starts the daemon, or talks to a running one over HTTP. Names as in Ollama.

Exit status: 0 done, 1 it went wrong, 2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import tomlkit

import appliance
from appliance.checkpoints.adapters import full_name
from appliance.checkpoints.parsers.choose import ChosenParsers
from appliance.checkpoints.parsers.names import AUTO
from appliance.checkpoints.task import read_task
from appliance.cli.config import diff, log_level, reload
from appliance.cli.docs import config as configdoc
from appliance.cli.findings import Level
from appliance.cli.fit import fit_command, print_shared
from appliance.cli.instances import instance
from appliance.cli.keys import key
from appliance.cli.models import drain, limit, load, pin, resume, rm, show, stop, unpin
from appliance.cli.options import config_file, load_or_exit
from appliance.cli.output import json_option, print_json, print_table
from appliance.cli.policies import policy
from appliance.cli.requests import cancel, requests, why
from appliance.cli.start.pull import pull
from appliance.cli.start.run import run
from appliance.cli.start.serve import init, serve
from appliance.cli.top import logs, top
from appliance.cli.usage import usage
from appliance.client import get, url_option
from appliance.config.checks import warnings
from appliance.config.diff import as_written
from appliance.config.fit import fit
from appliance.config.layers import ignored_rows
from appliance.config.model_parsers import parsers_of
from appliance.config.schema import Model
from appliance.config.sizing import read_model
from appliance.fleet.cli import fleet
from appliance.scheduling.cost_model import FIRST_GUESS_LOAD_BYTES_PER_SECOND
from appliance.units import human


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Serve many language models from the memory of a few."""


@cli.command(name="list")
@url_option
@json_option
def list_models(url: str, as_json: bool) -> None:
    """List the models of the catalogue, also those without an engine."""
    models = get(url, "/v1/models")["data"]
    if as_json:
        print_json(models)
        return
    states = {row["model"]: row["state"] for row in get(url, "/api/status")["models"]}
    rows = [[row["id"], str(row["max_model_len"]), states.get(row["id"], "")] for row in models]
    print_table(["NAME", "CONTEXT", "STATE"], rows)


@cli.command()
@url_option
@json_option
def ps(url: str, as_json: bool) -> None:
    """Show what the models and instances do now."""
    status = get(url, "/api/status")
    if as_json:
        print_json(status)
        return
    rows = [
        [row["model"], row["state"], _places(row["residency"]), row["running"], row["waiting"]]
        for row in status["models"]
    ]
    print_table(["NAME", "STATE", "INSTANCES", "RUNNING", "WAITING"], rows)
    click.echo()
    instances = [
        [
            row["instance"], row["role"], row["state"], row["pid"] or "", row["model"] or "",
            human(sum(row["pool_bytes"].values()) - row["pool_bytes"].get("free", 0)),
            human(sum(row["pool_bytes"].values())),
        ]
        for row in status["instances"]
    ]  # fmt: skip
    columns = ["INSTANCE", "ROLE", "STATE", "PID", "RUNS", "USED", "POOL"]
    if any(row.get("group") for row in status["instances"]):
        columns += ["GROUP", "RANKS"]
        for cells, row in zip(instances, status["instances"], strict=True):
            cells += [row["group"], row["ranks"]]
    print_table(columns, instances)


@cli.command()
@config_file
@click.option(
    "--verify", is_flag=True,
    help="Read everything: checkpoints against their checksums, the weights on the devices of a "
    "running daemon against those in host memory.",
)  # fmt: skip
@click.option(
    "--ceilings", is_flag=True,
    help="Measure what this machine can do at best (copies, mapping, page-locking, disks), in some "
    "ten seconds, and store it: a daemon expects its switches by that. What is in use is left out.",
)  # fmt: skip
@json_option
def doctor(path: Path, verify: bool, ceilings: bool, as_json: bool) -> None:
    """Check what the appliance needs, one line each: ok, warn or fail, and what to do about it."""
    from appliance.cli.doctor import examine  # loads the memory's parts

    findings = []
    for finding in examine(path, verify=verify, ceilings=ceilings):
        findings.append(finding)
        if not as_json:
            click.echo(str(finding))
    if as_json:
        print_json([msgspec.to_builtins(finding) for finding in findings])
    sys.exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)


@cli.group()
def config() -> None:
    """Check a configuration, or print what its schema says."""


@config.command()
@config_file
@json_option
def check(path: Path, as_json: bool) -> None:
    """Read FILE as the daemon would, and list its models."""
    loaded = load_or_exit(path)
    for warning in [*warnings(loaded), *ignored_rows(path)]:
        click.echo(f"warning: {warning}", err=True)
    entries = [read_model(model, loaded.devices) for model in loaded.models]
    chosen = [
        parsers_of(model, entry.path, read_task(entry.path, model.task))
        for entry, model in zip(entries, loaded.models, strict=True)
    ]
    if as_json:
        print_json([
            {
                "name": entry.name, "architecture": entry.architecture, "dtype": entry.dtype,
                "weight_bytes": entry.weight_bytes,
                "kv_bytes_per_token": entry.kv_bytes_per_token,
                "window_kv_bytes_per_token": entry.window_kv_bytes_per_token,
                "window_tokens": entry.kv.window, "state_bytes": entry.state_bytes,
                "max_context": model.max_context,
                "adapters": [full_name(model.name, one.name) for one in model.adapters],
                "tool_parser": parsers.tools.name,
                "tool_parser_reason": parsers.tools.reason,
                "reasoning_parser": parsers.reasoning.name,
                "reasoning_parser_reason": parsers.reasoning.reason,
            }
            for entry, model, parsers in zip(entries, loaded.models, chosen, strict=True)
        ])  # fmt: skip
        return
    rows = []
    for entry, model in zip(entries, loaded.models, strict=True):
        sizes = human(entry.weight_bytes), human(entry.kv_bytes_per_token)
        rows.append([entry.name, entry.architecture, entry.dtype, *sizes, model.max_context])
        for one in model.adapters:  # whose weights are its base's
            name = full_name(model.name, one.name)
            rows.append([name, "adapter", entry.dtype, "", "", model.max_context])
    print_table(["NAME", "ARCHITECTURE", "DTYPE", "WEIGHTS", "KV/TOKEN", "CONTEXT"], rows)
    for model, parsers in zip(loaded.models, chosen, strict=True):
        for line in _resolved(model, parsers):
            click.echo(f"{model.name}: {line}")
    print_shared(fit(loaded, entries, FIRST_GUESS_LOAD_BYTES_PER_SECOND), loaded)
    click.echo(f"{path}: fine")


def _resolved(model: Model, parsers: ChosenParsers) -> Iterator[str]:
    """What `auto` means for the model, and why."""
    for name, asked, found in (
        ("tool_parser", model.tool_parser, parsers.tools),
        ("reasoning_parser", model.reasoning_parser, parsers.reasoning),
    ):
        if asked == AUTO and found.reason:
            yield f'{name} = "{found.name}": {found.reason}'


@config.command(name="show")
@config_file
def show_config(path: Path) -> None:
    """Print what FILE means with its drop-ins, in TOML: every key, and why `auto` has its value."""
    loaded = load_or_exit(path)
    document = tomlkit.item(as_written(loaded))
    models = {model.name: at for at, model in enumerate(loaded.models)}
    for one in loaded.chosen:
        table: Any = document[one.key[0]]
        (table[models[one.key[1]]] if one.key[0] == "model" else table)[one.key[-1]].comment(
            f"auto: {one.reason}"
        )
    click.echo(tomlkit.dumps(document), nl=False)


@config.command()
def sample() -> None:
    """Print a configuration with every key and what it means."""
    click.echo(configdoc.generate_sample(), nl=False)


@config.command()
def docs() -> None:
    """Print the documentation of every key, as Markdown."""
    click.echo(configdoc.generate_docs(), nl=False)


for command in (serve, run, init):
    cli.add_command(command)
cli.add_command(instance)
cli.add_command(key)
cli.add_command(policy)
for command in (fit_command, requests, why, cancel, usage):
    cli.add_command(command)
for command in (pull, rm, show, load, stop, pin, unpin, drain, resume, limit):
    cli.add_command(command)
cli.add_command(top, "tui")
for command in (reload, log_level, top, logs):
    cli.add_command(command)
config.add_command(diff)


@cli.command()
@click.option("--keep", is_flag=True, help="Leave the daemon running and print how to reach it.")
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False, path_type=Path),
    help="Keep the checkpoints there (default: a temporary directory).",
)  # fmt: skip
@click.option("--instances", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--policy", default="appliance", show_default=True)
@json_option
def demo(keep: bool, directory: Path | None, instances: int, policy: str, as_json: bool) -> None:
    """Serve six small models from memory for two, and check every token."""
    from appliance.demo.run import main  # loads the daemon's parts

    sys.exit(
        main(keep=keep, directory=directory, instances=instances, policy=policy, as_json=as_json)
    )


@cli.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of the appliance and of Python."""
    versions = {"appliance": appliance.__version__, "python": platform.python_version()}
    if as_json:
        print_json(versions)
    else:
        click.echo(f"appliance {versions['appliance']} (Python {versions['python']})")


# --- the lab -------------------------------------------------------------------------------------


class LabGroup(click.Group):
    """The commands of the lab, loaded when one is asked for: they need numpy, nothing else does."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self._loaded().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._loaded().get_command(ctx, cmd_name)

    def _loaded(self) -> click.Group:
        from appliance.lab.cli import lab

        return lab


cli.add_command(
    LabGroup(
        "lab",
        help="Compare policies on a virtual clock: the daemon's own decisions, modelled hardware.",
    )
)


cli.add_command(fleet)


# --- printing ------------------------------------------------------------------------------------


def _places(residency: dict[str, str]) -> str:
    return ", ".join(f"{instance}:{state}" for instance, state in sorted(residency.items()))
