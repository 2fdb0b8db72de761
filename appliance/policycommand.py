"""`appliance policy`: which policies are installed, and which decide."""

from __future__ import annotations

import tomllib
from datetime import datetime
from typing import Any

import click

from appliance.authorcommand import docs, new, test
from appliance.client import call, get, url_option
from appliance.printing import json_option, print_json, print_table

PATH = "/api/policies"


@click.group()
def policy() -> None:
    """List policies, and choose those that decide."""


@policy.command(name="list")
@url_option
@json_option
def list_policies(url: str, as_json: bool) -> None:
    """List the policies that the daemon has installed."""
    report = get(url, PATH)
    if as_json:
        print_json(report["installed"])
        return
    deciding = {state["name"] for state in report["policies"]}
    rows = [
        [
            row["name"],
            "yes" if row["name"] in deciding else "",
            row["version"],
            row["distribution"],
            row["error"] or row["about"],
        ]
        for row in report["installed"]
    ]
    print_table(["NAME", "DECIDES", "VERSION", "DISTRIBUTION", "ABOUT"], rows)


@policy.command()
@url_option
@json_option
def show(url: str, as_json: bool) -> None:
    """Show who decides what, with which parameters, and what happened to them."""
    _show(get(url, PATH), as_json)


@policy.command(name="set")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--decision", "decisions", multiple=True, metavar="DECISION=NAME",
    help="Have another policy make a decision, such as place=prism; repeat it for each.",
)  # fmt: skip
@click.option(
    "--param", "parameters", multiple=True, metavar="NAME.KEY=VALUE",
    help="Set a parameter, such as aegaeon.q_max_seconds=3; what is not set is as it ships.",
)  # fmt: skip
@url_option
@json_option
def choose(
    names: tuple[str, ...],
    decisions: tuple[str, ...],
    parameters: tuple[str, ...],
    url: str,
    as_json: bool,
) -> None:
    """Have the policies NAME... decide from now on, asked in this order. Requests go on."""
    tables: dict[str, dict[str, object]] = {}
    for key, value in (_pair(parameter, "--param") for parameter in parameters):
        name, _, field = key.rpartition(".")
        if not name:
            raise click.BadParameter(f"{key!r} is not NAME.KEY", param_hint="--param")
        tables.setdefault(name, {})[field] = _value(value)
    given = dict(_pair(decision, "--decision") for decision in decisions)
    body = {"use": names, "decisions": given, "parameters": tables}
    _show(call("PUT", url, PATH, body), as_json)


@policy.command()
@url_option
@json_option
def rollback(url: str, as_json: bool) -> None:
    """Go back to the policies before these."""
    _show(call("POST", url, f"{PATH}/rollback"), as_json)


@policy.command()
@click.argument("name")
@url_option
@json_option
def enable(name: str, url: str, as_json: bool) -> None:
    """Have the policy NAME asked again that failed too often."""
    _show(call("POST", url, f"{PATH}/{name}/enable"), as_json)


for command in (new, test, docs):
    policy.add_command(command)


def _pair(text: str, option: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not (key and found and value):
        raise click.BadParameter(f"{text!r} has no value", param_hint=option)
    return key, value


def _value(text: str) -> object:
    """As it would be written in the configuration; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({key: value for key, value in report.items() if key != "installed"})
        return
    rows = [[hook, ", ".join(names)] for hook, names in report["decisions"].items()]
    print_table(["DECISION", "ASKED"], rows)
    parameters = [
        [f"{name}.{key}", value]
        for name, table in report["active"]["parameters"].items()
        for key, value in table.items()
    ]
    if parameters:
        click.echo()
        print_table(["PARAMETER", "VALUE"], parameters)
    click.echo()
    states = [[s["name"], _state(s), s["calls"], s["faults"]] for s in report["policies"]]
    print_table(["POLICY", "STATE", "CALLS", "FAULTS"], states)
    tallies = [
        [s["name"], hook, tally["calls"], tally["faults"], *_microseconds(tally)]
        for s in report["policies"]
        for hook, tally in s["decisions"].items()
    ]
    if tallies:
        click.echo()
        columns = ["POLICY", "DECISION", "CALLS", "FAULTS", "MEAN µs", "P50 µs", "P99 µs", "MAX µs"]
        print_table(columns, tallies)
    if report["events"]:
        click.echo()
        events = [
            [
                datetime.fromtimestamp(row["unix_seconds"]).strftime("%Y-%m-%d %H:%M:%S"),
                row["what"] if row["count"] == 1 else f"{row['what']} x{row['count']}",
                row["policy"],
                row["hook"],
                row["reason"],
            ]
            for row in report["events"]
        ]
        print_table(["AT", "WHAT", "POLICY", "DECISION", "REASON"], events)


def _microseconds(tally: dict[str, Any]) -> list[str]:
    """Mean of all calls, then median, 99th percentile and most of the last ones."""
    if tally["p50_seconds"] is None:
        return ["-"] * 4
    times = [tally["seconds"] / tally["calls"]]
    times += [tally[f"{which}_seconds"] for which in ("p50", "p99", "max")]
    return [f"{seconds * 1e6:.0f}" for seconds in times]


def _state(state: dict[str, Any]) -> str:
    if state["disabled"]:
        return "disabled"
    return "busy" if state["busy"] else "asked"
