"""`appliance fit`: what a configuration has room for on this machine, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from appliance.cli.options import config_file, load_or_exit
from appliance.cli.output import json_option, print_json, print_table
from appliance.config.fit import Fit, ModelFit, fit
from appliance.config.schema import Config
from appliance.config.sizing import read_model
from appliance.scheduling.cost_model import FIRST_GUESS_LOAD_BYTES_PER_SECOND
from appliance.units import human


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
    if found.all_at_once:
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
