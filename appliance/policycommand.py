"""`appliance policy`: which policies are installed, and which decide."""

from __future__ import annotations

import click

from appliance.authorcommand import docs, new, test
from appliance.client import get, url_option
from appliance.printing import json_option, print_json, print_table


@click.group()
def policy() -> None:
    """List policies, and choose those that decide."""


@policy.command(name="list")
@url_option
@json_option
def list_policies(url: str, as_json: bool) -> None:
    """List the policies that the daemon has installed."""
    installed = get(url, "/api/policies")["installed"]
    if as_json:
        print_json(installed)
        return
    rows = [
        [row["name"], row["version"], row["distribution"], row["error"] or row["about"]]
        for row in installed
    ]
    print_table(["NAME", "VERSION", "DISTRIBUTION", "ABOUT"], rows)


for command in (new, test, docs):
    policy.add_command(command)
