"""`appliance fit`, `reload`, `config diff` and `log-level`: what a configuration has room for, and
what a running daemon has in force."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from appliance.cli.options import config_file
from appliance.cli.output import json_option, print_json, print_table
from appliance.client import call, get, url_option
from appliance.config.fit import Fit, ModelFit, fit
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.config.sizing import read_model
from appliance.errors import ConfigError
from appliance.scheduling.cost_model import FIRST_GUESS_LOAD_BYTES_PER_SECOND
from appliance.units import human


def load_or_exit(path: Path, *, now: bool = False) -> Config:
    """The configuration; when there is none, every problem is printed and the status is 2."""
    try:
        return load_config(path, now=now)
    except ConfigError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        raise click.exceptions.Exit(2) from None


def fit_of(config: Config) -> Fit:
    """What a configuration that was checked has room for. Weights load as `appliance doctor
    --ceilings` measured it, or as a daemon expects it until it has seen some."""
    from appliance.serve import expected_load_rate  # loads the API; others need it not

    rate = expected_load_rate(config)
    entries = [read_model(model, config.devices) for model in config.models]
    guess = FIRST_GUESS_LOAD_BYTES_PER_SECOND
    return fit(config, entries, rate or guess, measured=rate is not None)


@click.command(name="fit")
@config_file
@json_option
def fit_command(path: Path, as_json: bool) -> None:
    """Show what FILE has room for: models at once, requests of each, and what to change for more.

    `auto` is what it is on this machine without other programs."""
    config = load_or_exit(path)
    found = fit_of(config)
    if as_json:
        chosen = [
            {"key": ".".join(one.key), "value": one.value, "reason": one.reason}
            for one in config.chosen
        ]
        print_json({**msgspec.to_builtins(found), "auto": chosen})
        return
    columns = ["NAME", "WEIGHTS", "KV/1K", "CONTEXT", "REQUESTS", "AT 4K", "SWITCH", "FROM"]
    print_table(columns, [_row(one) for one in found.models])
    print_shared(found, config)
    how = "measured" if found.measured else "expected; `appliance doctor --ceilings` measures it"
    click.echo(f"switches: {found.load_bytes_per_second / 1e9:.1f} GB/s ({how})")


def print_shared(found: Fit, config: Config) -> None:
    """What the models share, what to change for more, and what `auto` means."""
    click.echo(_pool_line(found))
    click.echo(_host_line(found))
    for remedy in found.remedies:
        click.echo(f"to fit more: {remedy}")
    for one in config.chosen:
        click.echo(f"auto: {one}")


def _row(one: ModelFit) -> list[Any]:
    return [
        one.name,
        human(one.weight_bytes),
        human(one.kv_bytes_per_1k_tokens),
        one.max_context,
        one.requests_at_max_context,
        one.requests_at_4k,
        _seconds(one.switch_seconds),
        "host cache" if one.in_host_cache else "disk",
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds >= 1 else f"{seconds * 1000:.0f}ms"


def _pool_line(found: Fit) -> str:
    count, most, fewest = len(found.models), found.most_at_once, found.fewest_at_once
    if fewest == count:
        together = "all models" if count > 1 else "the model"
    else:
        together = f"{fewest} of {count} models" if fewest == most else (
            f"{fewest} (the largest) to {most} (the smallest) of {count} models"
        )  # fmt: skip
    where = "on the CPU" if found.kind == "cpu" else "on each GPU"
    pools = f", {found.instances} of them" if found.instances > 1 else ""
    return f"pool: {human(found.pool_bytes)} {where}{pools}: {together} at once"


def _host_line(found: Fit) -> str:
    stored = [one.name for one in found.models if one.in_host_cache]
    left_out = [one.name for one in found.models if not one.in_host_cache]
    weights = "all weights" if not left_out else f"the weights of {', '.join(stored) or 'no model'}"
    held, room = human(found.host_weight_bytes), human(found.host_kv_bytes)
    size = human(found.host_cache_bytes)
    return f"host cache: {size}: {weights} ({held}), and {room} for the KV cache of requests"


# --- of a running daemon -------------------------------------------------------------------------


@click.command()
@url_option
@json_option
def diff(url: str, as_json: bool) -> None:
    """Show what a running daemon's files say otherwise than it does: exit status 2 if they cannot
    be used."""
    found = call("POST", url, "/api/config/check")
    if as_json:
        print_json(found)
    elif found["ok"]:
        _print_changes(found["changes"])
    for problem in [] if as_json else found["problems"]:
        place = f"{problem['file']}:{problem['line']}: {problem['key']}"
        click.echo(f"{place}: {problem['wrong']}; {problem['remedy']}", err=True)
    sys.exit(0 if found["ok"] else 2)


@click.command()
@url_option
@json_option
def reload(url: str, as_json: bool) -> None:
    """Have the daemon read its files again, and apply what it can while it runs."""
    found = call("POST", url, "/api/config/reload")
    if as_json:
        print_json(found)
        return
    click.echo(f"{len(found['applied'])} applied, {len(found['restart'])} wait for a restart")
    changes = [*found["applied"], *found["restart"]]
    if changes:
        _print_changes(changes)


@click.command(name="log-level")
@click.argument("level", required=False, type=click.Choice(["debug", "info", "warning", "error"]))
@url_option
@json_option
def log_level(level: str | None, url: str, as_json: bool) -> None:
    """Show how much the daemon logs, or have it log from LEVEL on until it ends."""
    path = "/api/log-level"
    found = get(url, path) if level is None else call("PUT", url, path, {"level": level})
    if as_json:
        print_json(found)
    else:
        click.echo(found["level"])


def _print_changes(changes: list[dict[str, Any]]) -> None:
    if not changes:
        click.echo("nothing differs")
        return
    rows = [[row["key"], _shown(row["old"]), _shown(row["new"]), row["applies"]] for row in changes]
    print_table(["KEY", "NOW", "FILES", "NEEDS"], rows)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
