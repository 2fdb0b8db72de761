"""`appliance reload`, `config diff` and `log-level`: the configuration of a running daemon."""

from __future__ import annotations

import sys
from typing import Any

import click

from appliance.cli.output import json_option, print_json, print_table
from appliance.client import call, get, url_option


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
