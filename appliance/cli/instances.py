"""`appliance instance`: take an instance of a running daemon out of service, and back."""

from __future__ import annotations

from typing import Any

import click

from appliance.cli.output import json_option, print_json
from appliance.client import call, url_option


@click.group()
def instance() -> None:
    """Take instances out of service, and back; `appliance ps` lists them."""


@instance.command()
@click.argument("number", type=int)
@click.option("--reason", metavar="TEXT", help="The reason, which `appliance ps` and the API show.")
@url_option
@json_option
def quarantine(number: int, reason: str | None, url: str, as_json: bool) -> None:
    """End the worker of instance NUMBER; others that can serve their models go on with its
    requests. If there are no such others, the requests are refused."""
    body = {} if reason is None else {"reason": reason}
    found = call("POST", url, f"/api/instances/{number}/quarantine", body)
    _show(found, as_json, f"instance {number} is quarantined: {found['quarantine']}")


@instance.command()
@click.argument("number", type=int)
@url_option
@json_option
def release(number: int, url: str, as_json: bool) -> None:
    """Start a worker for instance NUMBER again, and have it serve."""
    found = call("POST", url, f"/api/instances/{number}/release")
    _show(found, as_json, f"instance {number} is released")


def _show(found: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print_json(found)
    else:
        click.echo(text)
