"""`appliance policy`: which policies are installed and which decide; commands for their authors."""

from __future__ import annotations

import sys
import tomllib
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from appliance.cli.output import json_option, print_json, print_table
from appliance.cli.policy_advice import advise
from appliance.client import call, get, url_option
from appliance.errors import PolicyError

PATH = "/api/policies"


@click.group()
def policy() -> None:
    """List policies, and choose those that decide."""


policy.add_command(advise)


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
    "--param", "parameters", multiple=True, metavar="NAME.KEY[.KEY...]=VALUE",
    help="Set a parameter, such as aegaeon.q_max_seconds=3, or a key of one that is a table; what"
    " is not set is as it ships.",
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
    tables: dict[str, object] = {}
    for key, value in (_pair(parameter, "--param") for parameter in parameters):
        _set_parameter(tables, key, _value(value))
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


def _pair(text: str, option: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not (key and found and value):
        raise click.BadParameter(f"{text!r} has no value", param_hint=option)
    return key, value


def _set_parameter(tables: dict[str, object], key: str, value: object) -> None:
    """Set what a dotted key names, written as in the configuration: a part with other characters
    than letters, digits, _ and - is in quotation marks."""
    try:
        path = _path_of(tomllib.loads(f"{key} = 0"))
    except tomllib.TOMLDecodeError:
        path = []
    if len(path) < 2:
        wrong = f"{key!r} is not NAME.KEY; put a part with other characters into quotation marks"
        raise click.BadParameter(wrong, param_hint="--param")
    table = tables
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise click.BadParameter(f"{key}: {part} has a value already", param_hint="--param")
        table = inner
    if isinstance(table.get(path[-1]), dict) and not isinstance(value, dict):
        raise click.BadParameter(f"{key}: keys of it are set already", param_hint="--param")
    table[path[-1]] = value


def _path_of(table: object) -> list[str]:
    """The keys of a table in a table, and so on, each the only one."""
    if not isinstance(table, dict):
        return []
    ((key, inner),) = table.items()
    return [key, *_path_of(inner)]


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
    all_stats = [
        [s["name"], hook, stats["calls"], stats["faults"], *_microseconds(stats)]
        for s in report["policies"]
        for hook, stats in s["decisions"].items()
    ]
    if all_stats:
        click.echo()
        columns = ["POLICY", "DECISION", "CALLS", "FAULTS", "MEAN µs", "P50 µs", "P99 µs", "MAX µs"]
        print_table(columns, all_stats)
    _show_autopilot(report.get("autopilot"))
    if report["events"]:
        click.echo()
        events = [
            [
                _when(row["unix_seconds"]),
                row["what"] if row["count"] == 1 else f"{row['what']} x{row['count']}",
                row["policy"],
                row["hook"],
                row["reason"],
            ]
            for row in report["events"]
        ]
        print_table(["AT", "WHAT", "POLICY", "DECISION", "REASON"], events)


def _show_autopilot(report: dict[str, Any] | None) -> None:
    """What it does and did, unless it is off; a daemon of an earlier version has none."""
    if report is None or report["mode"] == "off":
        return
    held = "; an operator chose policies, so it only proposes" if report["held"] else ""
    click.echo(
        f"\nautopilot: {report['mode']}, {report['phase']}{held}; CPU time charged in the last"
        f" hour: {report['cpu_seconds']:.0f} s of {report['cpu_seconds_per_hour']:.0f} s"
    )
    rows = [
        [
            _when(note["unix_seconds"]),
            note["what"],
            "" if note["choice"] is None else _named(note["choice"]),
            *(_percent(note[key]) for key in ("gain", "error", "before", "after")),
            note["reason"],
        ]
        for note in report["notes"]
    ]
    if rows:
        columns = ["AT", "AUTOPILOT", "POLICIES", "GAIN", "ERROR", "BEFORE", "AFTER", "REASON"]
        print_table(columns, rows)


def _named(choice: dict[str, Any]) -> str:
    """Who decides, and with which parameters."""
    tables = choice["parameters"].items()
    words = [f"{name}.{key}={value}" for name, table in tables for key, value in table.items()]
    words = [f"{hook}={name}" for hook, name in choice["decisions"].items()] + words
    return " ".join(["+".join(choice["use"]), *words])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _when(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds).strftime("%Y-%m-%d %H:%M:%S")


def _microseconds(stats: dict[str, Any]) -> list[str]:
    """Mean of all calls, then median, 99th percentile and most of the last ones."""
    if stats["p50_seconds"] is None:
        return ["-"] * 4
    times = [stats["seconds"] / stats["calls"]]
    times += [stats[f"{which}_seconds"] for which in ("p50", "p99", "max")]
    return [f"{seconds * 1e6:.0f}" for seconds in times]


def _state(state: dict[str, Any]) -> str:
    if state["disabled"]:
        return "disabled"
    return "busy" if state["busy"] else "asked"


@policy.command()
@click.argument("name")
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False, path_type=Path), default=Path(),
    help="Where to make its folder (default: here).",
)  # fmt: skip
def new(name: str, directory: Path) -> None:
    """Write a new policy NAME: a package that can be installed, and tests for it."""
    from appliance.cli.policy_template import write_policy
    from appliance.policies.loader import available

    if name in available():
        raise click.UsageError(f"a policy {name!r} is installed already")
    try:
        written = write_policy(name, directory)
    except PolicyError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    for path in written:
        click.echo(path)
    click.echo(f"Test it: appliance policy test {directory / name}", err=True)


@policy.command()
@click.argument("target", metavar="PATH|MODULE:CLASS|NAME")
@click.option(
    "--p99-ms", type=click.FloatRange(min=0, min_open=True),
    help="What the slowest hundredth of the answers to a hook may take.",
)  # fmt: skip
@json_option
def test(target: str, p99_ms: float | None, as_json: bool) -> None:
    """Test a policy: its package's folder, MODULE:CLASS, or the NAME of an installed one.

    It is asked what the machine asks in boxes of all sizes, and has to serve some by itself. Exit
    status: 0 nothing to object to, 1 something, 2 it cannot be loaded.
    """
    from appliance.testing.kit import MACHINE_SECONDS, check  # loads the lab
    from appliance.testing.loading import find

    try:
        found = find(target)
    except PolicyError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, OSError):
            click.echo("".join(traceback.format_exception(error.__cause__)), err=True, nl=False)
        raise click.UsageError(str(error)) from error
    limit = MACHINE_SECONDS if p99_ms is None else p99_ms / 1000
    reports = [(policy, check(policy.kind, p99_seconds=limit)) for policy in found]
    if as_json:
        print_json([
            {"name": policy.name, "source": policy.source, "ok": report.ok}
            | msgspec.to_builtins(report)
            for policy, report in reports
        ])  # fmt: skip
    else:
        for policy, report in reports:
            click.echo(f"{policy.name} ({policy.source})")
            rows = [
                [row.hook, row.asked, row.answered, row.valid, f"{row.p99_seconds * 1e6:.0f}"]
                for row in report.hooks
            ]
            print_table(["HOOK", "ASKED", "ANSWERED", "VALID", "P99 µs"], rows)
            click.echo(f"{report.ended} requests served to their end")
            click.echo(str(report))
    sys.exit(0 if all(report.ok for _, report in reports) else 1)


@policy.command()
def docs() -> None:
    """Print the documentation of the hooks, as Markdown."""
    from appliance.cli.docs.hooks import generate

    click.echo(generate(), nl=False)
